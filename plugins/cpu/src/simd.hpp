// Sixteen float lanes, whatever the machine: one register with AVX-512, two with AVX2, four elsewhere.
//
// Included only by the isa_*.cpp files, inside each one's own namespace, so that code compiled for one instruction set
// is never merged by the linker with the same template compiled for another. For the same reason nothing here uses
// templates of the standard library. Contraction is off in the build: a multiply-add is fused exactly where fma() is
// written, which makes a result independent of how the compiler arranged the loop around it.
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "kernels.hpp"

#if defined(__clang__)
#define EC_UNROLL _Pragma("unroll")
#else
#define EC_UNROLL _Pragma("GCC unroll 16")
#endif

namespace EC_ISA {
namespace {

constexpr int kLanes = 16;
constexpr float kMinusInf = -__builtin_inff();

#if defined(__AVX512F__)
constexpr int kParts = 1;
constexpr int kMaxRows = 6, kMaxPanels = 4;  // 24 of the 32 registers accumulate
#elif defined(__AVX2__)
constexpr int kParts = 2;
constexpr int kMaxRows = 6, kMaxPanels = 1;  // 12 of 16
#elif defined(__ARM_NEON)
constexpr int kParts = 4;
constexpr int kMaxRows = 6, kMaxPanels = 1;  // 24 of 32
#else
constexpr int kParts = 4;
constexpr int kMaxRows = 3, kMaxPanels = 1;  // 12 of 16
#endif

typedef float fpart __attribute__((vector_size(64 / kParts)));
typedef int32_t ipart __attribute__((vector_size(64 / kParts)));
typedef uint32_t upart __attribute__((vector_size(64 / kParts)));
typedef float fpart_u __attribute__((vector_size(64 / kParts), aligned(1), may_alias));
typedef uint32_t upart_u __attribute__((vector_size(64 / kParts), aligned(1), may_alias));

struct vf { fpart p[kParts]; };
struct vu { upart p[kParts]; };

#define EC_EACH EC_UNROLL for (int i = 0; i < kParts; ++i)

EC_INLINE vf vload(const float* x) { vf r; EC_EACH r.p[i] = reinterpret_cast<const fpart_u*>(x)[i]; return r; }
EC_INLINE vu vloadu(const void* x) { vu r; EC_EACH r.p[i] = reinterpret_cast<const upart_u*>(x)[i]; return r; }
EC_INLINE void vstore(float* x, vf a) { EC_EACH reinterpret_cast<fpart_u*>(x)[i] = a.p[i]; }
EC_INLINE vf vset(float x) { vf r; EC_EACH r.p[i] = x - fpart{}; return r; }
EC_INLINE vu vsetu(uint32_t x) { vu r; EC_EACH r.p[i] = x | upart{}; return r; }
EC_INLINE vf operator+(vf a, vf b) { EC_EACH a.p[i] += b.p[i]; return a; }
EC_INLINE vf operator-(vf a, vf b) { EC_EACH a.p[i] -= b.p[i]; return a; }
EC_INLINE vf operator*(vf a, vf b) { EC_EACH a.p[i] *= b.p[i]; return a; }
EC_INLINE vf operator/(vf a, vf b) { EC_EACH a.p[i] /= b.p[i]; return a; }

EC_INLINE fpart fma_part(fpart a, fpart b, fpart c) {
#if defined(__AVX512F__)
  return (fpart)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (fpart)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (fpart)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
EC_INLINE vf fma(vf a, vf b, vf c) { EC_EACH c.p[i] = fma_part(a.p[i], b.p[i], c.p[i]); return c; }

EC_INLINE fpart max_part(fpart a, fpart b) {
#if defined(__AVX512F__)
  return (fpart)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (fpart)_mm256_max_ps((__m256)a, (__m256)b);
#else
  ipart m = a > b;
  return (fpart)(((ipart)a & m) | ((ipart)b & ~m));
#endif
}
EC_INLINE vf vmax(vf a, vf b) { EC_EACH a.p[i] = max_part(a.p[i], b.p[i]); return a; }

EC_INLINE vu operator|(vu a, vu b) { EC_EACH a.p[i] |= b.p[i]; return a; }
// All ones where a and b differ; a NaN differs from itself.
EC_INLINE vu unequal(vf a, vf b) { vu r; EC_EACH r.p[i] = (upart)(a.p[i] != b.p[i]); return r; }
EC_INLINE bool any(vu a) {
  uint32_t bits = 0;
  alignas(64) uint32_t lanes[kLanes];
  EC_EACH reinterpret_cast<upart_u*>(lanes)[i] = a.p[i];
  for (int i = 0; i < kLanes; ++i) bits |= lanes[i];
  return bits != 0;
}

// x where keep is all ones, otherwise y; keep comes from a comparison.
EC_INLINE vf select(vu keep, vf x, vf y) {
  EC_EACH x.p[i] = (fpart)(((upart)x.p[i] & keep.p[i]) | ((upart)y.p[i] & ~keep.p[i]));
  return x;
}
// All ones in the lanes first..last-1.
EC_INLINE vu lanes_between(int first, int last) {
  alignas(64) static const int32_t iota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vu r;
  EC_EACH {
    ipart n = (ipart)reinterpret_cast<const upart_u*>(iota)[i];
    r.p[i] = (upart)((n >= first) & (n < last));
  }
  return r;
}
EC_INLINE vf viota() {
  alignas(64) static const float iota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return vload(iota);
}

// Fixed pairwise trees, so that a sum never depends on the instruction set's own horizontal order.
EC_INLINE float hsum(vf a) {
#if defined(__AVX512F__)
  const __m512 x512 = (__m512)a.p[0];
  const __m256 x256 = _mm256_add_ps(_mm512_castps512_ps256(x512), _mm512_extractf32x8_ps(x512, 1));
  const __m128 x128 = _mm_add_ps(_mm256_castps256_ps128(x256), _mm256_extractf128_ps(x256, 1));
  const __m128 x64 = _mm_add_ps(x128, _mm_movehl_ps(x128, x128));
  return _mm_cvtss_f32(_mm_add_ss(x64, _mm_movehdup_ps(x64)));
#else
  alignas(64) float x[16];
  vstore(x, a);
  EC_UNROLL for (int w = 8; w; w /= 2) EC_UNROLL for (int i = 0; i < w; ++i) x[i] += x[i + w];
  return x[0];
#endif
}
EC_INLINE float hmax(vf a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)a.p[0]);
#else
  alignas(64) float x[16];
  vstore(x, a);
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; ++i) x[i] = x[i] > x[i + w] ? x[i] : x[i + w];
  return x[0];
#endif
}

// p * 2^n for an integer n.
EC_INLINE vf scale_by_power(vf p, vf n) {
#if defined(__AVX512F__)
  return vf{{(fpart)_mm512_scalef_ps((__m512)p.p[0], (__m512)n.p[0])}};
#else
  // Two factors keep each exponent in range; below 2^-126 the result is flushed to zero. A NaN stays one.
  vf out;
  EC_EACH {
    ipart e = __builtin_convertvector(n.p[i], ipart);
    ipart half = e >> 1, rest = e - half;
    fpart v = p.p[i] * (fpart)((half + 127) << 23) * (fpart)((rest + 127) << 23);
    ipart tiny = (e < -126) & (p.p[i] == p.p[i]);
    out.p[i] = (fpart)((ipart)v & ~tiny);
  }
  return out;
#endif
}

// exp to about one unit in the last place: 2^n * P(r), x = n ln 2 + r. exp(0) is exactly 1; exp(-inf) is 0.
EC_INLINE vf vexp(vf x) {
  x = vmax(vset(-104.76f), x);  // a NaN passes through
  const vf magic = vset(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  vf t = fma(x, vset(1.44269504088896341f), magic);
  vf n = t - magic;
  vf r = fma(n, vset(-0.693359375f), x);
  r = fma(n, vset(2.12194440e-4f), r);
  vf p = vset(1.9875691500e-4f);
  p = fma(p, r, vset(1.3981999507e-3f));
  p = fma(p, r, vset(8.3334519073e-3f));
  p = fma(p, r, vset(4.1665795894e-2f));
  p = fma(p, r, vset(1.6666665459e-1f));
  p = fma(p, r, vset(5.0000001201e-1f));
  p = fma(p, r * r, r + vset(1.0f));
  return scale_by_power(p, n);
}

// 2^x for x below 128 (-inf: 0; 0: exactly 1), good to 1e-7, or with `fine` false to 3e-6, which is enough for a value
// that is rounded to bfloat16.
template <bool fine> EC_INLINE vf vexp2(vf x) {
  x = vmax(vset(-151.0f), x);
  const vf magic = vset(12582912.0f);
  const vf n = (x + magic) - magic, r = x - n;
  vf p;
  if (fine) {
    p = fma(vset(1.535336188319500e-4f), r, vset(1.339887440266574e-3f));
    p = fma(p, r, vset(9.618437357674640e-3f));
    p = fma(p, r, vset(5.550332471162809e-2f));
    p = fma(p, r, vset(2.402264791363012e-1f));
    p = fma(p, r, vset(6.931472028550421e-1f));
  } else {
    p = fma(vset(9.582878904e-3f), r, vset(5.590643189e-2f));
    p = fma(p, r, vset(2.402409818e-1f));
    p = fma(p, r, vset(6.931241924e-1f));
  }
  return scale_by_power(fma(p, r, vset(1.0f)), n);
}

// 1 / x for a normal x, to about one unit in the last place.
EC_INLINE vf reciprocal(vf x) {
#if defined(__AVX512F__)
  const vf r{{(fpart)_mm512_rcp14_ps((__m512)x.p[0])}};
  return fma(r, fma(vset(0.0f) - x, r, vset(1.0f)), r);
#else
  return vset(1.0f) / x;
#endif
}

// bfloat16 pairs in one 32-bit lane: element 0 in the low half.
EC_INLINE vf low_half(vu a) { vf r; EC_EACH r.p[i] = (fpart)(a.p[i] << 16); return r; }
EC_INLINE vf high_half(vu a) { vf r; EC_EACH r.p[i] = (fpart)(a.p[i] & 0xffff0000u); return r; }

EC_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
EC_INLINE float to_float(float x) { return x; }
EC_INLINE bf16 to_bf16(float x) {  // round to nearest even; a NaN stays one
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((bits >> 16) | 64)};
  return bf16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}
EC_INLINE void from_float(float* out, float x) { *out = x; }
EC_INLINE void from_float(bf16* out, float x) { *out = to_bf16(x); }

EC_INLINE vf vload(const bf16* x) {
#if defined(__AVX512F__)
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
  return vf{{(fpart)_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))}};
#elif defined(__AVX2__)
  vf r;
  EC_EACH {
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(x + 8 * i)));
    r.p[i] = (fpart)_mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
  }
  return r;
#else
  alignas(64) float f[16];
  for (int i = 0; i < 16; ++i) f[i] = to_float(x[i]);
  return vload(f);
#endif
}
#if defined(__AVX512F__)
EC_INLINE __m256i pack_bf16(vf a) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh((__m512)a.p[0]);
#else
  const upart b = (upart)a.p[0];
  const upart rounded = (b + 0x7fffu + ((b >> 16) & 1)) >> 16, nan = (upart)((b & 0x7fffffffu) > 0x7f800000u);
  return _mm512_cvtepi32_epi16((__m512i)((rounded & ~nan) | (((b >> 16) | 64) & nan)));
#endif
}
EC_INLINE void vstore(bf16* x, vf a) { _mm256_storeu_si256((__m256i*)x, pack_bf16(a)); }
#else
EC_INLINE void vstore(bf16* x, vf a) {
  alignas(64) uint32_t w[16];
  EC_EACH {
    upart b = (upart)a.p[i];
    upart rounded = (b + 0x7fffu + ((b >> 16) & 1)) >> 16;
    upart nan = (upart)((b & 0x7fffffffu) > 0x7f800000u);
    reinterpret_cast<upart_u*>(w)[i] = (rounded & ~nan) | (((b >> 16) | 64) & nan);
  }
  for (int i = 0; i < 16; ++i) x[i].bits = uint16_t(w[i]);
}
#endif

// A store of 64 aligned bytes past the caches, for what is larger than they are; `stream_end` before others may read it.
EC_INLINE void vstream(float* x, vf a) {
#if defined(__AVX512F__)
  _mm512_stream_ps(x, (__m512)a.p[0]);
#else
  vstore(x, a);
#endif
}
EC_INLINE void stream_end() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

// What a store to T and a load would give back.
template <class T> EC_INLINE vf round_to(vf a) {
  if (sizeof(T) == 4) return a;
#if defined(__AVX512BF16__)
  const __m512i bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)a.p[0]));
  return vf{{(fpart)_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))}};
#else
  alignas(64) T buffer[kLanes];
  vstore(buffer, a);
  return vload(buffer);
#endif
}

// The first n of 16 lanes; the others load as zero and are not stored. With masks there is no call to copy bytes, which
// in a product would send its accumulators through memory.
#if defined(__AVX512F__)
EC_INLINE uint32_t lane_mask(int n) { return n >= kLanes ? 0xffffu : (1u << n) - 1u; }
EC_INLINE vf vload_n(const float* x, int n) { return vf{{(fpart)_mm512_maskz_loadu_ps(__mmask16(lane_mask(n)), x)}}; }
EC_INLINE vf vload_n(const bf16* x, int n) {
  const __m512i w = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16(lane_mask(n)), x));
  return vf{{(fpart)_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))}};
}
EC_INLINE void vstore_n(float* x, vf a, int n) { _mm512_mask_storeu_ps(x, __mmask16(lane_mask(n)), (__m512)a.p[0]); }
EC_INLINE void vstore_n(bf16* x, vf a, int n) { _mm256_mask_storeu_epi16(x, __mmask16(lane_mask(n)), pack_bf16(a)); }
#else
template <class T> EC_INLINE vf vload_n(const T* x, int n) {
  if (n >= kLanes) return vload(x);
  T buffer[kLanes] = {};
  memcpy(buffer, x, n * sizeof(T));
  return vload(buffer);
}
template <class T> EC_INLINE void vstore_n(T* x, vf a, int n) {
  if (n >= kLanes) return vstore(x, a);
  T buffer[kLanes];
  vstore(buffer, a);
  memcpy(x, buffer, n * sizeof(T));
}
#endif

// One reduction step: acc += a . b, where a lane of a "step vector" holds 1 float or a pair of bfloat16.
template <class T> struct Step;

template <> struct Step<float> {
  static constexpr int kWidth = 1;  // elements of the reduction in one step
  typedef vf Scalar;
  static EC_INLINE Scalar splat(const char* x) {
    float f;
    memcpy(&f, x, 4);
    return vset(f);
  }
  static EC_INLINE vf load(const char* b) { return vload(reinterpret_cast<const float*>(b)); }
  static EC_INLINE vf dot(vf acc, Scalar a, vf b) { return fma(a, b, acc); }
};

template <> struct Step<bf16> {
  static constexpr int kWidth = 2;
#if defined(__AVX512BF16__)
  typedef vu Scalar;
  static EC_INLINE Scalar splat(const char* x) {
    uint32_t u;
    memcpy(&u, x, 4);
    return vsetu(u);
  }
  static EC_INLINE vu load(const char* b) { return vloadu(b); }
  static EC_INLINE vf dot(vf acc, Scalar a, vu b) {
    return vf{{(fpart)_mm512_dpbf16_ps((__m512)acc.p[0], (__m512bh)a.p[0], (__m512bh)b.p[0])}};
  }
#else
  struct Scalar { float low, high; };
  static EC_INLINE Scalar splat(const char* x) {
    bf16 pair[2];
    memcpy(pair, x, 4);
    return Scalar{to_float(pair[0]), to_float(pair[1])};
  }
  static EC_INLINE vu load(const char* b) { return vloadu(b); }
  static EC_INLINE vf dot(vf acc, Scalar a, vu b) {
    acc = fma(vset(a.low), low_half(b), acc);
    return fma(vset(a.high), high_half(b), acc);
  }
#endif
};

}  // namespace
}  // namespace EC_ISA
