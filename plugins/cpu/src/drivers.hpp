// The kernels over all threads: how work is cut, and what must hold before a pointer is followed.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"

const Isa* choose_isa(const char* wanted);  // null or "": the best this processor has; throws for an unknown name

// The whole huge pages inside [memory, memory + bytes); no more than a wish.
void advise_huge_pages(void* memory, int64_t bytes);
// Brings the pages under a range into memory without changing what they hold; false where the system cannot.
bool populate_pages(void* memory, int64_t bytes);

// Lets a thread wait until blocks from a certain one on are written to.
class HighWater {
 public:
  bool wait(int64_t block, double seconds);  // false: not within that time
  void reach(int64_t block) {
    if (block >= wanted_.load(std::memory_order_relaxed)) reached(block);
  }

 private:
  void reached(int64_t block);

  std::atomic<int64_t> wanted_{INT64_MAX};
  std::mutex mutex_;
  std::condition_variable changed_;
};

// Memory in huge pages where the system gives them: streaming through it then misses the translation cache rarely.
class Buffer {
 public:
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  char* data_;
  size_t size_;
};

// Weights side by side in large buffers: a small one alone would lie in small pages.
class Arena {
 public:
  struct Piece {
    std::shared_ptr<Buffer> owner;  // freed with the last weight in it
    char* data;
  };
  Piece allocate(size_t bytes);

 private:
  std::mutex mutex_;
  std::shared_ptr<Buffer> current_;
  size_t used_ = 0;
};

// Rows one by one to threads: each has the same part of them in every kernel, so that what it wrote is in its own cache.
inline Shares row_shares(int64_t rows, int threads) { return Shares(rows, threads, rows / (8 * threads) + 1, 1); }

// A product is cut into blocks of rows and, in each, panels: so many a thread takes at a time, and leaves to others. With
// many rows each thread has whole blocks, which are its share of the rows too; with few it has its own panels, so that
// weights are read once.
constexpr int64_t kPanelsTaken = 4, kPanelsShared = 2, kRowsApart = 48;

inline int64_t row_blocks(int64_t rows, int64_t most, int threads) {
  const int64_t blocks = (rows + most - 1) / most;
  return rows < kRowsApart * threads ? blocks : (blocks + threads - 1) / threads * threads;
}

// Calls f(block of rows, first panel, end, end of the panels that follow) for what is this thread's.
template <class F> void over_panels(Shares& shares, int thread, int64_t panels, const F& f) {
  for (int64_t begin, end, last; shares.next(thread, &begin, &end, &last);) {
    while (begin < end) {
      const int64_t block = begin / panels, base = block * panels, limit = base + panels;
      const int64_t stop = end < limit ? end : limit;
      f(block, begin - base, stop - base, (last < limit ? last : limit) - base);
      begin = stop;
    }
  }
}

// Whether a result is better written past the caches: logits of many rows, in whole lines.
inline bool worth_streaming(const char* y, int64_t y_stride, int64_t rows, int64_t columns, bool float32) {
  return float32 && columns >= 1 << 14 && rows * columns >= 1 << 19 && reinterpret_cast<uintptr_t>(y) % 64 == 0 && y_stride % 64 == 0;
}

struct PackedWeight {
  PackedWeight(Arena& arena, int64_t outputs, int64_t inputs, DType dtype);
  int64_t bytes() const { return panels * steps * 64; }
  void pack(Pool& pool, const char* source, int64_t row_bytes);
  void rows(Pool& pool, const int64_t* ids, int64_t count, char* out) const;  // out: contiguous rows of K elements

  int64_t N, K, steps, panels;
  DType dtype;
  Arena::Piece memory;
  std::vector<float> bias;
};

void run_linear(Pool& pool, const Isa& isa, const PackedWeight& weight, const char* x, int64_t x_stride, int64_t rows,
                char* y, int64_t y_stride, bool y_float32);

// A weight in one of GGUF's formats of 32 inputs a block: "q4_0", "q4_1", "q5_0", "q5_1", "q8_0". Throws for another.
struct QuantWeight {
  QuantWeight(Arena& arena, const std::string& scheme, int64_t outputs, int64_t inputs);
  int64_t bytes() const { return panels * panel_bytes; }
  void pack(Pool& pool, const char* source, int64_t stride);  // rows as in the file, or a scale and K bytes
  void rows(Pool& pool, const int64_t* ids, int64_t count, char* out, DType dtype) const;

  int64_t N, K, panels, group, blocks, panel_bytes, block_bytes;
  int64_t row_bytes;  // of the source
  int file_block;     // bytes of a block in the file
  Codes codes;
  bool has_min;
  int32_t offset;
  Arena::Piece memory;
  std::vector<float> bias;

 private:
  void pack_panel(int64_t panel, const char* source, int64_t stride);
};

// Where a product goes.
struct Product {
  char* y;
  int64_t y_stride;  // bytes between rows
  DType y_type;
  int64_t rows;
};
void run_quant(Pool& pool, const Isa& isa, const QuantWeight& weight, const char* x, int64_t x_stride, DType x_type,
               const Product& to);
// The product of the rows that a norm or a gated activation would have stored.
void run_quant_norm(Pool& pool, const Isa& isa, const QuantWeight& weight, const NormArgs& norm, const Product& to);
void run_quant_gate(Pool& pool, const Isa& isa, const QuantWeight& weight, const GateArgs& gate, const Product& to);

struct AttentionBatch {
  int64_t sequences, tokens, table_width, query_heads;
};
void run_attention(Pool& pool, const Isa& isa, const AttentionArgs& args, const AttentionBatch& batch);
void run_cache_write(Pool& pool, const Isa& isa, const CacheWriteArgs& args, int64_t tokens, HighWater& water);
void run_norm(Pool& pool, const Isa& isa, const NormArgs& args, int64_t rows);
void run_rotary(Pool& pool, const Isa& isa, const RotaryArgs& args, int64_t tokens, int64_t num_positions);
void run_gate(Pool& pool, const Isa& isa, const GateArgs& args, int64_t rows);

// Adapters of each token must be below N; that is checked here, in each run.
void run_lora_shrink(Pool& pool, const Isa& isa, const LoraShrinkArgs& args);
void run_lora_expand(Pool& pool, const Isa& isa, const LoraExpandArgs& args);

struct SampleArgs {
  const float* logits;
  int64_t stride, rows, vocab;
  const float *temperature, *top_p, *min_p;
  const int64_t* top_k;
  const double* uniform;
  int64_t* ids;
};
void run_sample(Pool& pool, const Isa& isa, const SampleArgs& args);
