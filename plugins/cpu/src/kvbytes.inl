// Caches of bytes: written, and read back.
//
// Signed bytes have a scale to each token and head, so that what a token's code is depends on nothing but the token.
// Queries and weights meet them as two signed bytes each, 256 * high + low, which is finer than bfloat16; sums are exact
// integers. 8-bit floats are turned into the activations' type, which holds every one of them exactly.
namespace EC_ISA {
namespace {

EC_INLINE vf vround(vf x) {  // to nearest, ties to even, below 2^22
  const vf magic = vset(12582912.0f);
  return (x + magic) - magic;
}
EC_INLINE vf vabs(vf a) { EC_EACH a.p[i] = (fpart)((upart)a.p[i] & 0x7fffffffu); return a; }
EC_INLINE vf vmin(vf a, vf b) { return select(unequal(a, a), a, vset(0.0f) - vmax(vset(0.0f) - a, vset(0.0f) - b)); }
EC_INLINE vi to_int(vf a) { vi r; EC_EACH r.p[i] = __builtin_convertvector(a.p[i], ipart); return r; }

// The low byte of each lane.
EC_INLINE void store_bytes(void* to, vi a) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)a.p[0]));
#else
  alignas(64) int32_t lanes[kLanes];
  memcpy(lanes, &a, sizeof lanes);
  for (int i = 0; i < kLanes; ++i) reinterpret_cast<uint8_t*>(to)[i] = uint8_t(lanes[i]);
#endif
}

EC_INLINE int32_t hsum(vi a) {
  alignas(64) int32_t lanes[kLanes];
  memcpy(lanes, &a, sizeof lanes);
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

// Codes plus 128 of n numbers, rounded up to whole vectors (zeros); returns their scale. A NaN among them makes it NaN.
template <class T> float encode_int8(const T* x, int n, uint8_t* codes) {
  vf best = vset(0.0f);
  vu bad = vsetu(0);
  for (int d = 0; d < n; d += kLanes) {
    const vf v = vload_n(x + d, n - d);
    best = vmax(vabs(v), best);
    bad = bad | unequal(v, v);
  }
  const float scale = hmax(best) * (1.0f / 127.0f);
  const vf divisor = vset(scale > 0 ? scale : 1.0f), most = vset(127.0f);
  for (int d = 0; d < n; d += kLanes) {
    const vf v = vload_n(x + d, n - d) / divisor;
    const vf code = vround(vmax(vset(-127.0f), vmin(select(unequal(v, v), vset(0.0f), v), most)));
    store_bytes(codes + d, to_int(code + vset(128.0f)));
  }
  return any(bad) ? __builtin_nanf("") : scale;
}

template <Stored S> struct Float8;
template <> struct Float8<Stored::kE4M3> {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr float kLargest = 448.0f;
};
template <> struct Float8<Stored::kE5M2> {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr float kLargest = 57344.0f;
};
constexpr uint32_t kFloat8NaN = 0x7f;

// To nearest, ties to even; larger numbers become the largest, a NaN all ones.
template <Stored S> EC_INLINE vu encode_float8(vf x) {
  typedef Float8<S> F;
  constexpr int shift = 23 - F::kMantissa;
  // Below the smallest normal number: added to a power of two whose last place is the format's smallest number, the
  // number is rounded by the addition.
  constexpr int power = 24 - F::kMantissa - F::kBias;
  const vf size = vmin(vabs(x), vset(F::kLargest));
  const vf lifted = size + vset(float(int64_t(1) << (power > 0 ? power : 0)) / float(int64_t(1) << (power < 0 ? -power : 0)));
  const float normal = 1.0f / float(1 << (F::kBias - 1));
  vu out;
  EC_EACH {
    const upart bits = (upart)size.p[i], sign = ((upart)x.p[i] >> 24) & 0x80u;
    const upart rounded = ((bits + ((1u << (shift - 1)) - 1) + ((bits >> shift) & 1u)) >> shift) - (uint32_t(127 - F::kBias) << F::kMantissa);
    const upart small = (upart)lifted.p[i] - (uint32_t(127 + power) << 23);
    const upart is_small = (upart)(size.p[i] < normal), is_nan = (upart)(x.p[i] != x.p[i]);
    const upart code = (small & is_small) | (rounded & ~is_small);
    out.p[i] = sign | (code & ~is_nan) | (kFloat8NaN & is_nan);
  }
  return out;
}

template <Stored S, class T> void encode_float8(const T* x, int n, uint8_t* codes) {
  for (int d = 0; d < n; d += kLanes) {
    const vu code = encode_float8<S>(vload_n(x + d, n - d));
    vi lanes;
    EC_EACH lanes.p[i] = (ipart)code.p[i];
    store_bytes(codes + d, lanes);
  }
}

// Byte `byte` of each lane.
template <Stored S> EC_INLINE vf decode_float8(vu x, int byte) {
  typedef Float8<S> F;
  vf out;
  EC_EACH {
    const upart y = x.p[i] << (24 - 8 * byte), code = (y >> 24) & 0x7fu;
    const upart normal = (code << (23 - F::kMantissa)) + (uint32_t(127 - F::kBias) << 23);
    const fpart small = __builtin_convertvector((ipart)code, fpart) * (1.0f / float(1 << (F::kMantissa + F::kBias - 1)));
    const upart is_small = (upart)(code < (1u << F::kMantissa)), is_nan = (upart)(code == kFloat8NaN);
    const upart bits = ((upart)small & is_small) | (normal & ~is_small);
    out.p[i] = (fpart)((y & 0x80000000u) | (bits & ~is_nan) | (0x7fc00000u & is_nan));
  }
  return out;
}

// Lanes of four numbers to lanes of T, `stride` bytes apart: four lines of floats, or two of pairs.
template <Stored S> EC_INLINE void expand_line(vu x, float*, char* to, int64_t stride) {
  EC_UNROLL for (int byte = 0; byte < 4; ++byte) vstore(reinterpret_cast<float*>(to + byte * stride), decode_float8<S>(x, byte));
}

#if defined(__AVX512BW__)
// Bytes that stand in the high halves of 16-bit lanes, as bfloat16.
template <Stored S> EC_INLINE __m512i words_to_bf16(__m512i y) {
  typedef Float8<S> F;
  const auto entry = [](int code) {  // bfloat16 of a code below the smallest normal number
    int exponent = 127 - F::kMantissa - F::kBias + 1;
    if (!code) return 0;
    while (code < 128) code *= 2, --exponent;
    return (exponent + 7) << 7 | (code & 127);
  };
  const __m128i few = _mm_setr_epi16(short(entry(0)), short(entry(1)), short(entry(2)), short(entry(3)), short(entry(4)),
                                     short(entry(5)), short(entry(6)), short(entry(7)));
  const __m512i code = _mm512_and_si512(y, _mm512_set1_epi16(0x7f00));
  const __m512i normal = _mm512_add_epi16(_mm512_srli_epi16(code, 1 + F::kMantissa), _mm512_set1_epi16(short((127 - F::kBias) << 7)));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(code, _mm512_set1_epi16(short(0x100 << F::kMantissa)));
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(code, _mm512_set1_epi16(0x7f00));
  __m512i bits = _mm512_mask_permutexvar_epi16(normal, is_small, _mm512_srli_epi16(code, 8), _mm512_broadcast_i32x4(few));
  bits = _mm512_mask_mov_epi16(bits, is_nan, _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(bits, _mm512_and_si512(y, _mm512_set1_epi16(short(0x8000))));
}

template <Stored S> EC_INLINE void expand_line(vu x, bf16*, char* to, int64_t stride) {
  // Bytes 0 and 1, then 2 and 3, of each 32-bit lane into the high halves of its two words.
  const __m512i low = _mm512_set4_epi32(0x0d800c80, 0x09800880, 0x05800480, 0x01800080);
  const __m512i high = _mm512_set4_epi32(0x0f800e80, 0x0b800a80, 0x07800680, 0x03800280);
  _mm512_storeu_si512(to, words_to_bf16<S>(_mm512_shuffle_epi8((__m512i)x.p[0], low)));
  _mm512_storeu_si512(to + stride, words_to_bf16<S>(_mm512_shuffle_epi8((__m512i)x.p[0], high)));
}
#else
template <Stored S> EC_INLINE void expand_line(vu x, bf16*, char* to, int64_t stride) {
  EC_UNROLL for (int half = 0; half < 2; ++half) {
    const vf even = decode_float8<S>(x, 2 * half), odd = decode_float8<S>(x, 2 * half + 1);
    EC_EACH reinterpret_cast<upart_u*>(to + half * stride)[i] = ((upart)even.p[i] >> 16) | ((upart)odd.p[i] & 0xffff0000u);
  }
}
#endif

// Panels of 16 tokens as they stand in the cache, to panels of T.
template <Stored S, class T> void expand_keys(const char* from, int64_t steps, char* to) {
  constexpr int64_t line = 64 * int64_t(sizeof(T));  // what 64 bytes become
  for (int64_t s = 0; s < steps; ++s) expand_line<S>(vloadu(from + s * 64), static_cast<T*>(nullptr), to + s * line, 64);
}
template <Stored S, class T> void expand_values(const char* from, int padded, char* to) {
  const int64_t row = int64_t(padded) * 4, quad = row * int64_t(sizeof(T));
  for (int64_t q = 0; q < kPanel / 4; ++q)
    for (int64_t d = 0; d < row; d += 64) expand_line<S>(vloadu(from + q * row + d), static_cast<T*>(nullptr), to + q * quad + d, row);
}

// n numbers at x, zeros up to whole vectors, as bytes high[i] and low[i]. `largest` is that of their absolute values.
EC_INLINE ByteRow split_bytes(const float* x, int n, float largest, char* high, char* low) {
  constexpr float kMost = 127 * 256;
  const vf factor = vset(largest > 0 ? kMost / largest : 0.0f);
  vi sum_high = vseti(0), sum_low = sum_high;
  for (int i = 0; i < n; i += kLanes) {
    const vf scaled = vmax(vset(-kMost), vmin(vload(x + i) * factor, vset(kMost)));
    const vi code = to_int(vround(select(unequal(scaled, scaled), vset(0.0f), scaled)));
    vi h, l;
    for (int p = 0; p < kParts; ++p) {
      h.p[p] = (code.p[p] + 128) >> 8;
      l.p[p] = code.p[p] - (h.p[p] << 8);
      sum_high.p[p] += h.p[p];
      sum_low.p[p] += l.p[p];
    }
    store_bytes(high + i, h);
    store_bytes(low + i, l);
  }
  return ByteRow{{-128 * hsum(sum_high), -128 * hsum(sum_low)}, largest * (1.0f / kMost)};
}

constexpr int kSoftmaxShare = 4;  // one line in so many of what is fetched ahead is fetched during the softmax

constexpr int kByteRows = kMaxRows < 2 ? 1 : kMaxRows / 2;  // each has two sums

EC_INLINE vf byte_sum(vi high, vi low, float scale) { return fma(to_float(high), vset(256.0f), to_float(low)) * vset(scale); }

// Rows of queries (padded D bytes high, then low) with P panels of keys, times the keys' scales.
template <int R, int P>
void score_bytes(const char* q, int64_t padded, const ByteRow* rows, const char* const* keys, int64_t steps, const float* scales,
                 float* scores, Ahead* ahead) {
  vi high[R][P], low[R][P];
  EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) {
    high[r][p] = vseti(rows[r].start[0]);
    low[r][p] = vseti(rows[r].start[1]);
  }
  for (int64_t s = 0; s < steps; ++s) {
    vu k[P];
    EC_UNROLL for (int p = 0; p < P; ++p) k[p] = vloadu(keys[p] + s * 64);
    if (ahead) ahead->step<P>();
    EC_UNROLL for (int r = 0; r < R; ++r) {
      uint32_t h, l;
      memcpy(&h, q + r * 2 * padded + s * 4, 4);
      memcpy(&l, q + r * 2 * padded + padded + s * 4, 4);
      EC_UNROLL for (int p = 0; p < P; ++p) high[r][p] = dot_bytes(high[r][p], k[p], h);
      EC_UNROLL for (int p = 0; p < P; ++p) low[r][p] = dot_bytes(low[r][p], k[p], l);
    }
  }
  EC_UNROLL for (int r = 0; r < R; ++r)
    EC_UNROLL for (int p = 0; p < P; ++p)
      vstore(scores + r * kChunk + p * kPanel, byte_sum(high[r][p], low[r][p], rows[r].scale) * vload(scales + p * kPanel));
}

// out[r][16 p + i] = sum over the panels' tokens of weights[r][t] * values[t][16 p + i]; weights: kChunk bytes high, then
// low, in rows of kChunk floats.
template <int R, int P>
void value_bytes(const char* weights, const ByteRow* rows, const char* const* values, int panels, int64_t offset, int64_t v_step,
                 float* out, int64_t out_stride, Ahead* ahead) {
  vi high[R][P], low[R][P];
  EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) {
    high[r][p] = vseti(rows[r].start[0]);
    low[r][p] = vseti(rows[r].start[1]);
  }
  for (int i = 0; i < panels; ++i) {
    const char* v = values[i] + offset;
    Ahead* const lines = i % kSoftmaxShare != kSoftmaxShare - 1 ? ahead : nullptr;
    EC_UNROLL for (int s = 0; s < kPanel / 4; ++s) {
      vu x[P];
      EC_UNROLL for (int p = 0; p < P; ++p) x[p] = vloadu(v + s * v_step + p * 64);
      if (lines) lines->step<P>();
      EC_UNROLL for (int r = 0; r < R; ++r) {
        uint32_t h, l;
        memcpy(&h, weights + r * kChunk * 4 + i * kPanel + s * 4, 4);
        memcpy(&l, weights + r * kChunk * 4 + kChunk + i * kPanel + s * 4, 4);
        EC_UNROLL for (int p = 0; p < P; ++p) high[r][p] = dot_bytes(high[r][p], x[p], h);
        EC_UNROLL for (int p = 0; p < P; ++p) low[r][p] = dot_bytes(low[r][p], x[p], l);
      }
    }
  }
  EC_UNROLL for (int r = 0; r < R; ++r)
    EC_UNROLL for (int p = 0; p < P; ++p) vstore(out + r * out_stride + p * kPanel, byte_sum(high[r][p], low[r][p], rows[r].scale));
}

}  // namespace
}  // namespace EC_ISA
