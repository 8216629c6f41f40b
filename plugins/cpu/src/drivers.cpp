#include "drivers.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr int64_t kHuge = 2 << 20;
// Work below about two microseconds is not worth waking another thread for.
constexpr int64_t kSmallElements = 4096;

// Rows that stay in the second-level cache while a group of weight panels passes over them.
constexpr int64_t kRowBytes = 384 << 10;

template <class F> void over_rows(Pool& pool, int64_t rows, int64_t row_elements, F&& f) {
  if (rows * row_elements <= kSmallElements) return f(0, rows);
  Shares shares = row_shares(rows, pool.threads());
  pool.run([&](int thread) {
    for (int64_t begin, end, last; shares.next(thread, &begin, &end, &last);) f(begin, end);
  });
}

int64_t item_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace

const Isa* choose_isa(const char* wanted) {
  const std::string name = wanted ? wanted : "";
  const Isa* found[5];
  int count = 0;
#if defined(EC_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
#if defined(EC_AVX512_BF16)
  if (vnni && __builtin_cpu_supports("avx512bf16")) found[count++] = isa_avx512_bf16();
#endif
#if defined(EC_AVX512_VNNI)
  if (vnni) found[count++] = isa_avx512_vnni();
#endif
#if defined(EC_AVX512)
  if (avx512) found[count++] = isa_avx512();
#endif
#if defined(EC_AVX2)
  if (avx2) found[count++] = isa_avx2();
#endif
  (void)vnni;
#endif
  found[count++] = isa_generic();
  if (name.empty()) return found[0];
  for (int i = 0; i < count; ++i)
    if (name == found[i]->name) return found[i];
  throw std::invalid_argument("this processor or build has no kernels named " + name);
}

void advise_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kHuge - 1) & ~uintptr_t(kHuge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + uintptr_t(bytes)) & ~uintptr_t(kHuge - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

bool populate_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14: pages are there afterwards, contents untouched
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory) & ~uintptr_t(4095);
  return madvise(reinterpret_cast<void*>(begin), size_t(bytes), kPopulateWrite) == 0;
#else
  (void)memory;
  (void)bytes;
  return false;
#endif
}

bool HighWater::wait(int64_t block, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  wanted_.store(block);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return wanted_.load() == INT64_MAX; });
}

void HighWater::reached(int64_t block) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (block < wanted_.load()) return;
  wanted_.store(INT64_MAX);
  changed_.notify_all();
}

Buffer::Buffer(size_t bytes) : size_(bytes) {
  const size_t align = bytes >= size_t(kHuge) ? size_t(kHuge) : 64;
  const size_t padded = (std::max<size_t>(bytes, 1) + align - 1) / align * align;
  void* memory = nullptr;
  if (posix_memalign(&memory, align, padded) != 0) throw std::bad_alloc();
  advise_huge_pages(memory, int64_t(padded));
  data_ = static_cast<char*>(memory);
}

Buffer::~Buffer() { std::free(data_); }

Arena::Piece Arena::allocate(size_t bytes) {
  constexpr size_t kBuffer = 32 << 20;
  bytes = (bytes + 63) / 64 * 64;
  if (bytes >= kBuffer / 4) {
    auto alone = std::make_shared<Buffer>(bytes);
    return Piece{alone, alone->data()};
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!current_ || used_ + bytes > current_->size()) {
    current_ = std::make_shared<Buffer>(kBuffer);
    used_ = 0;
  }
  char* at = current_->data() + used_;
  used_ += bytes;
  return Piece{current_, at};
}

PackedWeight::PackedWeight(Arena& arena, int64_t outputs, int64_t inputs, DType type)
    : N(outputs), K(inputs), steps(type == DType::kFloat32 ? inputs : (inputs + 1) / 2),
      panels((outputs + kPanel - 1) / kPanel), dtype(type), memory(arena.allocate(size_t(panels * steps * 64))) {}

void PackedWeight::pack(Pool& pool, const char* source, int64_t row_bytes) {
  const int64_t whole = dtype == DType::kFloat32 ? K : K / 2;
  over_rows(pool, panels, steps * kPanel, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      char* to = memory.data + panel * steps * 64;
      for (int64_t lane = 0; lane < kPanel; ++lane) {
        const int64_t n = panel * kPanel + lane;
        if (n >= N) {
          for (int64_t s = 0; s < steps; ++s) std::memset(to + s * 64 + lane * 4, 0, 4);
          continue;
        }
        const char* from = source + n * row_bytes;
        for (int64_t s = 0; s < whole; ++s) std::memcpy(to + s * 64 + lane * 4, from + s * 4, 4);
        if (whole < steps) {
          uint16_t pair[2] = {0, 0};
          std::memcpy(pair, from + whole * 4, 2);
          std::memcpy(to + whole * 64 + lane * 4, pair, 4);
        }
      }
    }
  });
}

void PackedWeight::rows(Pool& pool, const int64_t* ids, int64_t count, char* out) const {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= N)
      throw std::out_of_range("row " + std::to_string(ids[i]) + " is outside the weight's " + std::to_string(N) + " rows");
  const int64_t bytes = K * item_size(dtype), whole = bytes / 4;
  over_rows(pool, count, K * 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* from = memory.data + ids[i] / kPanel * steps * 64 + ids[i] % kPanel * 4;
      char* to = out + i * bytes;
      for (int64_t s = 0; s < whole; ++s) std::memcpy(to + s * 4, from + s * 64, 4);
      if (whole * 4 < bytes) std::memcpy(to + whole * 4, from + whole * 64, 2);
    }
  });
}

void run_linear(Pool& pool, const Isa& isa, const PackedWeight& weight, const char* x, int64_t x_stride, int64_t rows,
                char* y, int64_t y_stride, bool y_float32) {
  if (rows == 0) return;
  std::unique_ptr<char[]> padded;
  if (weight.dtype == DType::kBFloat16 && (weight.K & 1)) {
    // The last step reads a pair: give every row its zero.
    const int64_t stride = weight.steps * 4;
    padded.reset(new char[size_t(rows * stride)]());
    for (int64_t m = 0; m < rows; ++m) std::memcpy(padded.get() + m * stride, x + m * x_stride, size_t(weight.K * 2));
    x = padded.get();
    x_stride = stride;
  }
  const LinearArgs args{x, x_stride, weight.memory.data, weight.bias.empty() ? nullptr : weight.bias.data(), y, y_stride,
                        rows, weight.K, weight.N, weight.steps, weight.dtype, y_float32,
                        worth_streaming(y, y_stride, rows, weight.N, y_float32)};
  // Blocks of rows, then panels: a piece is a run of panels of one block.
  const int64_t blocks = row_blocks(rows, std::max<int64_t>(48, kRowBytes / std::max<int64_t>(1, weight.steps * 4)), pool.threads());
  if (rows * weight.N * weight.K <= 1 << 15) return isa.linear(args, 0, rows, 0, weight.panels, weight.panels);
  Shares shares(blocks * weight.panels, pool.threads(), kPanelsTaken, kPanelsShared);
  pool.run([&](int thread) {
    over_panels(shares, thread, weight.panels, [&](int64_t block, int64_t panel0, int64_t panel1, int64_t last) {
      isa.linear(args, rows * block / blocks, rows * (block + 1) / blocks, panel0, panel1, last);
    });
  });
}

void run_cache_write(Pool& pool, const Isa& isa, const CacheWriteArgs& args, int64_t tokens, HighWater& water) {
  const int64_t slots = args.cache.num_blocks * args.cache.block_size;
  int64_t highest = -1;
  for (int64_t t = 0; t < tokens; ++t) {
    highest = std::max(highest, args.slots[t]);
    if (args.slots[t] >= slots || args.slots[t] < -1)
      throw std::out_of_range("slot " + std::to_string(args.slots[t]) + " is outside the cache of " + std::to_string(slots) +
                              " slots");
  }
  if (highest >= 0) water.reach(highest / args.cache.block_size);
  over_rows(pool, tokens, int64_t(args.cache.kv_heads) * args.cache.head_size * 8,
            [&](int64_t begin, int64_t end) { isa.cache_write(args, begin, end); });
}

void run_norm(Pool& pool, const Isa& isa, const NormArgs& args, int64_t rows) {
  over_rows(pool, rows, args.E, [&](int64_t begin, int64_t end) { isa.norm(args, begin, end); });
}

void run_rotary(Pool& pool, const Isa& isa, const RotaryArgs& args, int64_t tokens, int64_t num_positions) {
  for (int64_t t = 0; t < tokens; ++t)
    if (args.positions[t] < 0 || args.positions[t] >= num_positions)
      throw std::out_of_range("position " + std::to_string(args.positions[t]) + " is outside the table of " +
                              std::to_string(num_positions) + " positions");
  over_rows(pool, tokens, int64_t(args.q_heads + args.k_heads) * args.half * 2,
            [&](int64_t begin, int64_t end) { isa.rotary(args, begin, end); });
}

void run_gate(Pool& pool, const Isa& isa, const GateArgs& args, int64_t rows) {
  over_rows(pool, rows, args.F * 4, [&](int64_t begin, int64_t end) { isa.gate(args, begin, end, 0, args.F); });
}

static void check_adapters(const int64_t* adapter, int64_t tokens, int64_t adapters) {
  for (int64_t t = 0; t < tokens; ++t)
    if (adapter[t] >= adapters)
      throw std::out_of_range("adapter " + std::to_string(adapter[t]) + " is not one of " + std::to_string(adapters));
}

void run_lora_shrink(Pool& pool, const Isa& isa, const LoraShrinkArgs& args) {
  check_adapters(args.adapter, args.T, args.N);
  over_rows(pool, args.T * args.S, args.R * args.I / 8,
            [&](int64_t begin, int64_t end) { isa.lora_shrink(args, begin, end); });
}

void run_lora_expand(Pool& pool, const Isa& isa, const LoraExpandArgs& args) {
  check_adapters(args.adapter, args.T, args.N);
  const int64_t runs = (args.P + kLoraRun - 1) / kLoraRun;
  over_rows(pool, args.T * runs, kLoraRun * (args.R + 16) / 8,
            [&](int64_t begin, int64_t end) { isa.lora_expand(args, begin, end); });
}
