// Weights in GGUF's blocks: repacked into panels once, multiplied, and looked up by row.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "drivers.hpp"

namespace {

struct Format {
  const char* name;
  Codes codes;
  bool has_min;
  int32_t offset;
  int bytes;  // of a block of 32 in the file: scale, minimum, fifth bits, codes
};

constexpr Format kFormats[] = {
    {"q4_0", Codes::kNibble, false, 8, 18}, {"q4_1", Codes::kNibble, true, 0, 20}, {"q5_0", Codes::kFive, false, 16, 22},
    {"q5_1", Codes::kFive, true, 0, 24},    {"q8_0", Codes::kByte, false, 128, 34}, {"int8", Codes::kChannel, false, 128, 0},
};

const Format& format_of(const std::string& name) {
  for (const Format& format : kFormats)
    if (name == format.name) return format;
  throw std::invalid_argument("there are no kernels for weights in " + name);
}

float half_to_float(const char* at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
  uint32_t bits = uint32_t(half & 0x8000) << 16;
  float value;
  if (exponent == 0) {
    value = float(fraction) * 0x1p-24f;
    return half & 0x8000 ? -value : value;
  }
  bits |= exponent == 31 ? 0x7f800000u | fraction << 13 : (exponent + 112) << 23 | fraction << 13;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t to_bfloat16(float value) {  // round to nearest even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 64);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// What one call needs for its rows; kept by the calling thread, since every step asks for it a hundred times.
struct Scratch {
  char* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  char* get(size_t bytes) {
    if (bytes > size) {
      std::free(data);
      data = nullptr;
      size = 0;
      void* memory = nullptr;
      bytes = (bytes + 4095) / 4096 * 4096;
      if (posix_memalign(&memory, 64, bytes) != 0) throw std::bad_alloc();
      data = static_cast<char*>(memory);
      size = bytes;
    }
    return data;
  }
};
thread_local Scratch scratch;

}  // namespace

QuantWeight::QuantWeight(Arena& arena, const std::string& scheme, int64_t outputs, int64_t inputs)
    : N(outputs), K(inputs), panels((outputs + kPanel - 1) / kPanel) {
  const Format& format = format_of(scheme);
  group = format.codes == Codes::kChannel && inputs % 64 == 0 ? 64 : kBlock;
  blocks = inputs / group;
  codes = format.codes;
  has_min = format.has_min;
  offset = format.offset;
  file_block = format.bytes;
  block_bytes = int64_t(format.bytes) * kPanel;
  row_bytes = codes == Codes::kChannel ? inputs + 4 : blocks * file_block;
  panel_bytes = codes == Codes::kChannel ? inputs * kPanel + 64 : (blocks * block_bytes + 63) / 64 * 64;
  memory = arena.allocate(size_t(panels * panel_bytes));
}

void QuantWeight::pack(Pool& pool, const char* source, int64_t stride) {
  Pieces pieces(panels, pool.threads(), 1);
  pool.run([&](int) {
    for (int64_t begin, end; pieces.next(&begin, &end);)
      for (int64_t panel = begin; panel < end; ++panel) pack_panel(panel, source, stride);
  });
}

void QuantWeight::pack_panel(int64_t panel, const char* source, int64_t stride) {
  char* const base = memory.data + panel * panel_bytes;
  std::memset(base, 0, size_t(panel_bytes));
  for (int lane = 0; lane < kPanel && panel * kPanel + lane < N; ++lane) {
    const char* from = source + (panel * kPanel + lane) * stride;
    if (codes == Codes::kChannel) {
      std::memcpy(base + K * kPanel + 4 * lane, from, 4);
      for (int64_t s = 0; s < K / 4; ++s) {
        uint32_t four;
        std::memcpy(&four, from + 4 + 4 * s, 4);
        four ^= 0x80808080u;
        std::memcpy(base + 64 * s + 4 * lane, &four, 4);
      }
      continue;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      char* to = base + b * block_bytes;
      std::memcpy(to + 2 * lane, from, 2);
      to += 32, from += 2;
      if (has_min) {
        std::memcpy(to + 2 * lane, from, 2);
        to += 32, from += 2;
      }
      if (codes == Codes::kFive) {
        for (int j = 0; j < kBlock; ++j)
          if (from[j / 8] >> (j % 8) & 1) {  // bit 4 lane + j % 4 of the mask j / 4
            const int bit = 4 * lane + j % 4;
            to[j / 4 * 8 + bit / 8] |= char(1 << (bit % 8));
          }
        to += 64, from += 4;
      }
      const int lines = codes == Codes::kByte ? 8 : 4;
      for (int s = 0; s < lines; ++s) {
        uint32_t four;
        std::memcpy(&four, from + 4 * s, 4);
        if (codes == Codes::kByte) four ^= 0x80808080u;
        std::memcpy(to + 64 * s + 4 * lane, &four, 4);
      }
      from += 4 * lines;
    }
  }
}

void QuantWeight::rows(Pool& pool, const int64_t* ids, int64_t count, char* out, DType dtype) const {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= N)
      throw std::out_of_range("row " + std::to_string(ids[i]) + " is outside the weight's " + std::to_string(N) + " rows");
  const auto one = [&](int64_t i) {
    const int lane = int(ids[i] % kPanel);
    const char* from = memory.data + ids[i] / kPanel * panel_bytes;
    const auto put = [&](int64_t k, float value) {
      const int64_t at = i * K + k;
      if (dtype == DType::kFloat32) reinterpret_cast<float*>(out)[at] = value;
      else reinterpret_cast<uint16_t*>(out)[at] = to_bfloat16(value);
    };
    if (codes == Codes::kChannel) {
      float scale;
      std::memcpy(&scale, from + K * kPanel + 4 * lane, 4);
      for (int64_t k = 0; k < K; ++k) put(k, scale * float(int(uint8_t(from[k / 4 * 64 + 4 * lane + k % 4])) - 128));
      return;
    }
    for (int64_t b = 0; b < blocks; ++b, from += block_bytes) {
      const char* high = from + (has_min ? 64 : 32);
      const char* code = high + (codes == Codes::kFive ? 64 : 0) + 4 * lane;
      const float scale = half_to_float(from + 2 * lane), least = has_min ? half_to_float(from + 32 + 2 * lane) : 0.0f;
      for (int j = 0; j < kBlock; ++j) {
        int q;
        if (codes == Codes::kByte) {
          q = uint8_t(code[j / 4 * 64 + j % 4]);
        } else {
          const int pair = uint8_t(code[j % 16 / 4 * 64 + j % 4]);
          q = j < 16 ? pair & 15 : pair >> 4;
          const int bit = 4 * lane + j % 4;
          if (codes == Codes::kFive && (high[j / 4 * 8 + bit / 8] >> (bit % 8) & 1)) q |= 16;
        }
        put(b * kBlock + j, has_min ? scale * float(q) + least : scale * float(q - offset));
      }
    }
  };
  Pieces pieces(count, pool.threads(), 1);
  if (count * K <= 4096) {
    for (int64_t i = 0; i < count; ++i) one(i);
    return;
  }
  pool.run([&](int) {
    for (int64_t begin, end; pieces.next(&begin, &end);)
      for (int64_t i = begin; i < end; ++i) one(i);
  });
}

namespace {

// The beginning of what a thread multiplies with, while the rows are not ready: with few rows that of four panels, which
// stream through side by side, else that of the first.
void bring_near(const QuantWeight& weight, int64_t panel, int64_t rows) {
  const int64_t panels = rows <= 3 ? std::min<int64_t>(4, weight.panels - panel) : 1;
  const int64_t bytes = rows <= 3 ? 2048 : 16384;
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t at = 0; at < std::min(bytes, weight.panel_bytes); at += 64)
      __builtin_prefetch(weight.memory.data + (panel + p) * weight.panel_bytes + at, 0, 2);
}

// `fill(to, begin, end)` leaves rows begin..end in bytes; `cheap` elements are not worth another thread.
template <class Fill>
void multiply(Pool& pool, const Isa& isa, const QuantWeight& weight, const Product& to, int64_t cheap, const Fill& fill) {
  const int64_t rows = to.rows;
  if (rows == 0) return;
  const size_t code_bytes = (size_t(rows * weight.K) + 63) / 64 * 64;
  char* memory = scratch.get(code_bytes + size_t(rows * weight.blocks) * sizeof(RowBlock));
  const RowCodes codes{reinterpret_cast<int8_t*>(memory), reinterpret_cast<RowBlock*>(memory + code_bytes), weight.blocks,
                       weight.group, weight.offset};
  const QuantArgs args{codes.codes, codes.scales, weight.memory.data, weight.bias.empty() ? nullptr : weight.bias.data(), to.y,
                       to.y_stride, weight.N, weight.blocks, weight.group, weight.panel_bytes, weight.codes, weight.has_min, to.y_type,
                       worth_streaming(to.y, to.y_stride, rows, weight.N, to.y_type == DType::kFloat32)};
  const auto linear = weight.codes == Codes::kChannel ? isa.byte_linear : isa.quant_linear;
  const bool alone = rows * weight.N * weight.K <= 1 << 16;
  if (alone) {
    fill(codes, 0, rows);
    return linear(args, 0, rows, 0, weight.panels, weight.panels);
  }
  // As for other weights: blocks of rows that stay in the second-level cache, and panels by the handful.
  const int64_t blocks = row_blocks(rows, std::max<int64_t>(48, (256 << 10) / weight.K), pool.threads());
  Shares fills = rows * weight.K <= cheap ? Shares(rows, 1, rows, rows) : row_shares(rows, pool.threads());
  std::atomic<int64_t> left{rows};
  Shares shares(blocks * weight.panels, pool.threads(), kPanelsTaken, kPanelsShared);
  pool.run([&](int thread) {
    bring_near(weight, shares.first(thread) % weight.panels, rows);
    for (int64_t begin, end, last; fills.next(thread, &begin, &end, &last);) {
      fill(codes, begin, end);
      left.fetch_sub(end - begin, std::memory_order_release);
    }
    while (left.load(std::memory_order_acquire) > 0) relax();  // whoever has the last rows is at work on them
    over_panels(shares, thread, weight.panels, [&](int64_t block, int64_t panel0, int64_t panel1, int64_t last) {
      linear(args, rows * block / blocks, rows * (block + 1) / blocks, panel0, panel1, last);
    });
  });
}

}  // namespace

void run_quant(Pool& pool, const Isa& isa, const QuantWeight& weight, const char* x, int64_t x_stride, DType x_type,
               const Product& to) {
  multiply(pool, isa, weight, to, 1 << 15, [&](const RowCodes& codes, int64_t begin, int64_t end) {
    isa.quantize(QuantizeArgs{x, x_stride, codes, x_type}, begin, end);
  });
}

void run_quant_norm(Pool& pool, const Isa& isa, const QuantWeight& weight, const NormArgs& norm, const Product& to) {
  multiply(pool, isa, weight, to, 1 << 13,
           [&](const RowCodes& codes, int64_t begin, int64_t end) { isa.norm_quantize(norm, codes, begin, end); });
}

void run_quant_gate(Pool& pool, const Isa& isa, const QuantWeight& weight, const GateArgs& gate, const Product& to) {
  multiply(pool, isa, weight, to, 1 << 13,
           [&](const RowCodes& codes, int64_t begin, int64_t end) { isa.gate_quantize(gate, codes, begin, end); });
}
