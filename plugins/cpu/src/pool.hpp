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
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

// One turn of a loop that waits for another thread.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#else
  std::this_thread::yield();
#endif
}

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Call fn(context, thread) on the caller, which is thread 0, and on whichever workers come in time. Concurrent calls
  // run on their callers alone.
  void run(void (*fn)(void*, int), void* context);

  template <class F> void run(F&& f) {
    using Callable = std::remove_cv_t<std::remove_reference_t<F>>;
    run([](void* p, int thread) { (*static_cast<Callable*>(p))(thread); }, const_cast<Callable*>(&f));
  }

 private:
  void work(int thread);

  std::vector<std::thread> workers_;
  std::mutex busy_;
  // Counts jobs and whether one is open: even when closed, odd when open.
  std::atomic<uint32_t> phase_{0};
  std::atomic<int> joined_{0};
  std::atomic<bool> stop_{false};
  void (*fn_)(void*, int) = nullptr;
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

// Pieces 0..total-1 in one share to a thread, so that each knows what it reads next. Who has finished takes from the ends
// of others' shares.
class Shares {
 public:
  // Shares begin at multiples of `grain` pieces; a thread takes `unit` of its own at a time.
  Shares(int64_t total, int threads, int64_t unit, int64_t grain) : count_(threads), unit_(unit), grain_(grain) {
    if (threads > kFew) more_.reset(new Share[size_t(threads)]);
    const int64_t grains = (total + grain - 1) / grain;
    for (int i = 0; i < threads; ++i) {
      const int64_t begin = grains * i / threads * grain, end = grains * (i + 1) / threads * grain;
      share(i).store(pack(begin, end < total ? end : total), std::memory_order_relaxed);
    }
  }

  // One piece at a time; thread i's share is bounds[i]..bounds[i + 1]-1.
  explicit Shares(const std::vector<int64_t>& bounds) : count_(int(bounds.size()) - 1), unit_(1), grain_(1) {
    if (count_ > kFew) more_.reset(new Share[size_t(count_)]);
    for (int i = 0; i < count_; ++i) share(i).store(pack(bounds[size_t(i)], bounds[size_t(i) + 1]), std::memory_order_relaxed);
  }

  // The first piece of a thread's own share, while nobody has taken any.
  int64_t first(int thread) { return int64_t(share(thread).load(std::memory_order_relaxed) >> 32); }

  // `last`: where the pieces end that this thread takes one after the other.
  bool next(int thread, int64_t* begin, int64_t* end, int64_t* last) {
    for (int i = 0; i < count_; ++i) {
      const int of = (thread + i) % count_;
      std::atomic<uint64_t>& range = share(of);
      uint64_t at = range.load(std::memory_order_relaxed);
      for (;;) {
        const int64_t first = int64_t(at >> 32), stop = int64_t(at & 0xffffffffu);
        if (first >= stop) break;
        const int64_t size = i ? grain_ : unit_, left = stop - first;
        const int64_t taken = size < left ? size : left;
        const uint64_t rest = i ? pack(first, stop - taken) : pack(first + taken, stop);
        if (!range.compare_exchange_weak(at, rest, std::memory_order_relaxed)) continue;
        *begin = i ? stop - taken : first;
        *end = *begin + taken;
        *last = i ? *end : stop;
        return true;
      }
    }
    return false;
  }

 private:
  static constexpr int kFew = 8;
  struct alignas(64) Share {
    std::atomic<uint64_t> range;
  };
  static uint64_t pack(int64_t begin, int64_t end) { return uint64_t(begin) << 32 | uint64_t(end); }
  std::atomic<uint64_t>& share(int i) { return more_ ? more_[size_t(i)].range : few_[i].range; }

  const int count_;
  const int64_t unit_, grain_;
  Share few_[kFew];
  std::unique_ptr<Share[]> more_;
};
