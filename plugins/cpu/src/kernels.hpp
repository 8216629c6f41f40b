// Argument blocks of the kernels and the table that each instruction set fills. Plain data, so that a call can be
// recorded and replayed.
//
// Letters: T tokens, E hidden size, M rows, K inputs of a product, N outputs, H query heads, D head size.
#pragma once
#include <stdint.h>

// Functions here are part of files compiled for one instruction set each. None may become a symbol: of several with one
// name the linker keeps one, which another processor may be unable to run.
#define EC_INLINE inline __attribute__((always_inline))

struct bf16 { uint16_t bits; };

enum class DType : int { kFloat32 = 0, kBFloat16 = 1 };

constexpr int kPanel = 16;  // outputs of a packed weight, tokens of a key panel

// y[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n]. `w` is packed in panels of 16 outputs:
//   float32:  [N/16][K][16]          bfloat16: [N/16][K/2][16][2]     (N and K padded with zeros)
// Each output is one chain of accumulations in the order of k, whatever M is.
struct LinearArgs {
  const char* x;
  int64_t x_stride;  // bytes between rows
  const char* w;
  const float* bias;  // null: none
  char* y;
  int64_t y_stride;  // bytes between rows
  int64_t M, K, N;
  int64_t steps;  // reduction steps: K, or K/2 rounded up
  DType dtype;
  bool y_float32;
  bool y_streams;  // y is float32, in whole lines, and larger than the caches
};

// Weights in blocks of 32 inputs, one scale (half precision) and perhaps a minimum to a block: w = scale * code + minimum,
// or scale * (code - offset). A panel of 16 outputs holds, block after block, in as many bytes as the file has,
//   16 scales | 16 minima, if any | 64 bytes of fifth bits, if any | codes
// where step s of the codes is a line of 16 outputs x 4 bytes: inputs 4s..4s+3 (bytes), or in the low halves inputs
// 4s..4s+3 and in the high halves 16+4s..16+4s+3. Fifth bits are a 64-bit mask for each 4 inputs in the order of inputs.
// kChannel has one scale (float32) to an output: a panel is all lines of codes, then 16 scales.
enum class Codes : int { kNibble = 0, kFive = 1, kByte = 2, kChannel = 3 };
constexpr int kBlock = 32;

// A block (a group, of weights with one scale) of a row in signed bytes. `start`: -offset times the sum of its codes; `weighted`: scale times that sum.
struct RowBlock {
  float scale;
  int32_t start;
  float weighted;
};

// Rows in signed bytes, in groups of 32 or 64 inputs.
struct RowCodes {
  int8_t* codes;     // [M][blocks][group]
  RowBlock* scales;  // [M][blocks]
  int64_t blocks, group;
  int32_t offset;
};

struct QuantizeArgs {
  const char* x;
  int64_t x_stride;  // bytes between rows
  RowCodes to;
  DType dtype;
};

struct QuantArgs {
  const int8_t* x;         // [M][blocks][group]
  const RowBlock* scales;  // [M][blocks]
  const char* w;
  const float* bias;  // null: none
  char* y;
  int64_t y_stride;  // bytes between rows
  int64_t N, blocks, group, panel_bytes;
  Codes codes;
  bool has_min;
  DType y_type;
  bool y_streams;  // as in LinearArgs
};

// What a number of the cache is: the activations' own type, a byte with 128 added (times its token's and head's scale),
// or an 8-bit float.
enum class Stored : int { kPlain = 0, kInt8 = 1, kE4M3 = 2, kE5M2 = 3 };

// The cache of one attention call, block by block: keys then values, each [kv heads][block_size * padded D].
//   keys:   panels of P = min(16, block_size) tokens, [D][P] float32, [D/2][P][2] bfloat16 or [D/4][P][4] bytes
//   values: [block_size][padded D] float32, [block_size/2][padded D][2] bfloat16 or [block_size/4][padded D][4] bytes
// so that both are the right-hand operand of a product as they stand: q k^T reduces over D, p v over tokens. Behind the
// bytes of kInt8, for each side and head, are block_size scales (float32).
struct CacheView {
  char* data;
  int64_t num_blocks;
  int kv_heads, block_size, head_size, padded;  // padded: head_size rounded up to 16
  DType dtype;    // of queries and results, and of what is stored where that is plain
  Stored stored;

  EC_INLINE int64_t wide() const { return dtype == DType::kFloat32 ? 4 : 2; }
  EC_INLINE int64_t item() const { return stored == Stored::kPlain ? wide() : 1; }
  EC_INLINE int64_t key_steps() const {  // lines of P x 4 bytes in a panel of keys
    const int64_t width = 4 / item();
    return (head_size + width - 1) / width;
  }
  EC_INLINE int64_t code_bytes() const { return int64_t(block_size) * padded * item(); }
  EC_INLINE int64_t head_bytes() const { return code_bytes() + (stored == Stored::kInt8 ? block_size * 4 : 0); }
  EC_INLINE int64_t side_bytes() const { return head_bytes() * kv_heads; }
  EC_INLINE int64_t block_bytes() const { return 2 * side_bytes(); }
};

constexpr int kChunk = 256;    // tokens whose scores are normalised together; partial results merge in chunk order
constexpr int kTileRows = 24;  // query rows (token, head of the group) that share one pass over the keys
constexpr int kStreamRows = 6;  // tiles of so few rows wait for memory, not for arithmetic

// What a thread reads next, in the order of its work and of addresses, brought near while it computes: the hardware
// foresees long runs only. What is computed is the same with it or without.
class Ahead {
 public:
  EC_INLINE void add(const char* from, int64_t bytes) {
    queued_ += bytes / 64;
    if (count_ > at_ && runs_[count_ - 1].end == from) {
      runs_[count_ - 1].end += bytes;
      return;
    }
    if (at_ == count_) at_ = count_ = 0;
    runs_[count_++] = Run{from, from + bytes};
  }
  // Whether there is no room for so many runs.
  EC_INLINE bool full(int more) {
    if (at_ > 0) {
      for (int i = at_; i < count_; ++i) runs_[i - at_] = runs_[i];
      count_ -= at_;
      at_ = 0;
    }
    return count_ + more > kRuns;
  }
  EC_INLINE int64_t fetched() const { return fetched_ - (end_ - from_) / 64; }          // lines so far
  EC_INLINE int64_t queued() const { return queued_ + (end_ - from_) / 64; }  // lines that wait

  EC_INLINE void fetch(int64_t lines) {
    for (; lines > 0; --lines, from_ += 64) {
      if (from_ >= end_ && !turn()) return;
      __builtin_prefetch(from_, 0, 2);
    }
  }
  // `Lines` of them, in a loop that has little time.
  template <int Lines> EC_INLINE void step() {
    if (end_ - from_ < Lines * 64) return fetch(Lines);
    for (int i = 0; i < Lines; ++i) __builtin_prefetch(from_ + 64 * i, 0, 2);
    from_ += Lines * 64;
  }

 private:
  struct Run {
    const char *from, *end;
  };
  // To the next run; false where there is none.
  EC_INLINE bool turn() {
    if (at_ == count_) return false;
    from_ = runs_[at_].from;
    end_ = runs_[at_++].end;
    fetched_ += (end_ - from_) / 64;
    queued_ -= (end_ - from_) / 64;
    return true;
  }

  static constexpr int kRuns = 4 * kChunk / 8;
  const char *from_ = nullptr, *end_ = nullptr;  // of the run that is being fetched
  int64_t queued_ = 0, fetched_ = 0;             // lines of the runs behind it; of all up to its end
  int count_ = 0, at_ = 0;
  Run runs_[kRuns];
};

struct AttentionArgs {
  const char* q;
  int64_t q_token, q_head;  // bytes
  char* out;
  int64_t out_token, out_head;  // bytes
  CacheView cache;
  const int32_t *query_start, *seq_lens, *table;
  int64_t table_stride;  // entries
  int group;             // query heads of one key-value head
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
  const float *sinks, *alibi;  // by query head, or null
  bool causal;
};

// Rows [row, row + rows) of the flattened (token, head in group) of one sequence and key-value head, over the key
// chunks [chunk, chunk_end). `partial` null: write the result; else leave (max, sum, output) of this one chunk there.
struct AttentionItem {
  int32_t seq, kv_head;
  int32_t row, rows;
  int32_t chunk, chunk_end;
};

// A row of queries or weights as bytes: scale * (256 * high + low). `start`: -128 times the sums of high and of low.
struct ByteRow {
  int32_t start[2];
  float scale;
};

struct AttentionScratch {
  char* q;         // [kTileRows][padded D] elements
  float* scores;   // [kTileRows][kChunk]; then, in each row's place, its weights
  char* keys;      // [kChunk][padded D] elements: panels that had to be copied
  char* values;    // the same
  float* chunk;    // [kTileRows][padded D]
  float* total;    // [kTileRows][padded D]
  char* raw;       // two panels of bytes
  float* scales;   // [2][kChunk]: of keys, of values
  ByteRow* rows;   // [2][kTileRows]: of queries, of weights
};

struct CacheWriteArgs {
  const char *k, *v;
  int64_t k_token, k_head, v_token, v_head;  // bytes
  CacheView cache;
  const int64_t* slots;
};

struct NormArgs {
  const char* x;
  int64_t x_stride, x_inner, x_outer;  // row t: t / x_inner * x_outer + t % x_inner * x_stride bytes (heads of a fused QKV)
  char* residual;                      // null: plain norm; else x + residual is stored here
  int64_t residual_stride;
  const char* weight;
  char* out;  // contiguous rows
  int64_t E;
  float eps;
  DType dtype, weight_dtype;
};

struct RotaryArgs {
  char *q, *k;  // k may be null
  int64_t q_token, q_head, k_token, k_head;  // bytes
  int q_heads, k_heads, half;                // half: N/2
  const float* cos_sin;
  int64_t cos_sin_stride;  // floats
  const int64_t* positions;
  bool interleaved;
  DType dtype;
};

enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

struct GateArgs {
  const char* x;
  int64_t x_stride;  // bytes
  char* out;         // contiguous rows
  int64_t F;
  Activation kind;
  DType dtype;
};

constexpr int64_t kLoraRun = 256;  // outputs of one token that are a piece of work

// h[s, t] = a[s, adapter[t]] x[t], zeros where adapter[t] is negative. a [S][N][R][I], h [S][T][R].
struct LoraShrinkArgs {
  const char* x;
  int64_t x_stride;  // bytes between rows
  const char* a;
  const int64_t* adapter;
  float* h;
  int64_t T, S, N, R, I;
  DType dtype;
};

// y[t] += b[adapter[t]] h[t] where adapter[t] is not negative. b [N][P][R], h [T][R].
struct LoraExpandArgs {
  const float* h;
  const char* b;
  const int64_t* adapter;
  char* y;
  int64_t y_stride;  // bytes between rows
  int64_t T, N, P, R;
  DType dtype;
};

constexpr int kSumBlock = 256;  // probabilities whose sum is kept, so that a draw skips whole blocks

struct Isa {
  const char* name;
  // Products of rows m0..m1-1 with panels panel0..panel1-1. Panels up to `last` are next, and brought near meanwhile.
  void (*linear)(const LinearArgs&, int64_t m0, int64_t m1, int64_t panel0, int64_t panel1, int64_t last);
  void (*quantize)(const QuantizeArgs&, int64_t m0, int64_t m1);
  // The same of what `norm` and `gate` would store, which is not stored.
  void (*norm_quantize)(const NormArgs&, const RowCodes&, int64_t t0, int64_t t1);
  void (*gate_quantize)(const GateArgs&, const RowCodes&, int64_t t0, int64_t t1);
  void (*quant_linear)(const QuantArgs&, int64_t m0, int64_t m1, int64_t panel0, int64_t panel1, int64_t last);
  void (*byte_linear)(const QuantArgs&, int64_t m0, int64_t m1, int64_t panel0, int64_t panel1, int64_t last);
  // `near`: what the item reads is on its way. `ahead`: what to bring near meanwhile, as much as the item reads itself.
  void (*attention)(const AttentionArgs&, const AttentionItem&, const AttentionScratch&, float* partial, bool near,
                    Ahead* ahead);
  void (*attention_merge)(const AttentionArgs&, const AttentionItem&, const AttentionScratch&, const float* partials,
                          int64_t partial_stride);
  void (*cache_write)(const CacheWriteArgs&, int64_t t0, int64_t t1);
  void (*norm)(const NormArgs&, int64_t t0, int64_t t1);
  void (*rotary)(const RotaryArgs&, int64_t t0, int64_t t1);
  void (*gate)(const GateArgs&, int64_t t0, int64_t t1, int64_t f0, int64_t f1);
  // First index of the largest value (NaN never wins); -1 when there is none above -inf.
  int64_t (*arg_max)(const float* x, int64_t n);
  // probs[i] = exp((x[i] - max) / temperature), sums[j] = sum of block j.
  void (*exp_row)(const float* x, float* probs, double* sums, int64_t n, float max, float temperature);
  // Indices with probs[i] >= threshold, in order; returns how many.
  int64_t (*collect)(const float* probs, int64_t n, float threshold, int32_t* ids);
  // For the benches: the largest of x[begin..end); floating-point operations done in that many rounds from registers.
  float (*measure_read)(const float* x, int64_t begin, int64_t end);
  int64_t (*measure_matrix)(DType, int64_t rounds);
  // Pieces: (token, slice) of a shrink, (token, run of kLoraRun outputs) of an expand.
  void (*lora_shrink)(const LoraShrinkArgs&, int64_t begin, int64_t end);
  void (*lora_expand)(const LoraExpandArgs&, int64_t begin, int64_t end);
};

const Isa* isa_avx512_bf16();
const Isa* isa_avx512_vnni();
const Isa* isa_avx512();
const Isa* isa_avx2();
const Isa* isa_generic();
