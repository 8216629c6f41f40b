#include "pool.hpp"

namespace {
// Between two kernels of a model's step pass some microseconds; after this many pauses (about 50 us) a worker sleeps.
constexpr int kSpins = 1500;
}  // namespace

Pool::Pool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  stop_.store(true);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(void (*fn)(void*, int), void* context) {
  std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
  if (workers_.empty() || !busy.owns_lock()) {
    fn(context, 0);
    return;
  }
  fn_ = fn;
  context_ = context;
  phase_.fetch_add(1);  // open
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  fn(context, 0);
  phase_.fetch_add(1);  // closed: a worker that joins from here on sees it and leaves again
  for (int spins = 0; joined_.load() != 0; ++spins) {
    if (spins < 20000) relax();
    else std::this_thread::yield();
  }
}

void Pool::work(int thread) {
  uint32_t done = 0;  // the last phase this worker has taken part in
  for (;;) {
    uint32_t phase = phase_.load();
    for (int spins = 0; (phase == done || !(phase & 1)) && spins < kSpins; ++spins) {
      relax();
      phase = phase_.load();
    }
    if (stop_.load()) return;
    if (phase == done || !(phase & 1)) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] {
        phase = phase_.load();
        return stop_.load() || (phase != done && (phase & 1));
      });
      sleepers_.fetch_sub(1);
      if (stop_.load()) return;
    }
    joined_.fetch_add(1);
    // Joining and the phase are sequentially consistent: either the caller sees this worker, or it sees the job closed.
    if (phase_.load() == phase) fn_(context_, thread);
    done = phase;
    joined_.fetch_sub(1);
  }
}
