// Threads that share the work of one kernel call.
//
// A job is a function that takes pieces of work from a counter of its own until none is left, so that the caller never
// depends on the others: workers join while the job is open, and the caller waits only for those that joined. A worker
// that is asleep or has lost its processor to somebody else costs its help, not a wait. Which thread computes a piece
// does not change the result: pieces are independent and each is computed in a fixed order.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Call fn(context) on the caller and on whichever workers come in time. Concurrent calls run on their callers alone.
  void run(void (*fn)(void*), void* context);

  template <class F> void run(F&& f) {
    using Callable = std::remove_cv_t<std::remove_reference_t<F>>;
    run([](void* p) { (*static_cast<Callable*>(p))(); }, const_cast<Callable*>(&f));
  }

 private:
  void work();

  std::vector<std::thread> workers_;
  std::mutex busy_;
  // Counts jobs and whether one is open: even when closed, odd when open.
  std::atomic<uint32_t> phase_{0};
  std::atomic<int> joined_{0};
  std::atomic<bool> stop_{false};
  void (*fn_)(void*) = nullptr;
  void* context_ = nullptr;
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Pieces 0..total-1 in runs that shrink towards the end: few steps on the counter, and an even finish.
class Pieces {
 public:
  Pieces(int64_t total, int threads, int64_t unit) : total_(total), share_(2 * threads), unit_(unit) {}

  bool next(int64_t* begin, int64_t* end) {
    int64_t at = next_.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t left = total_ - at;
      if (left <= 0) return false;
      int64_t size = left / share_ / unit_ * unit_;
      if (size < unit_) size = unit_;
      if (size > left) size = left;
      if (next_.compare_exchange_weak(at, at + size, std::memory_order_relaxed)) {
        *begin = at;
        *end = at + size;
        return true;
      }
    }
  }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t total_, share_, unit_;
};
