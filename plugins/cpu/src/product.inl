// The register-blocked product that linear layers and attention share.
namespace EC_ISA {
namespace {

// Row r, panel p of the tile: acc[r][p] = sum over s of x[r][s] * b[p][s]. A step of b is one 64-byte line.
// `ahead`, where not null, is brought into the second-level cache one line a step.
template <class T, int R, int P>
EC_INLINE void product_steps(vf (&acc)[R][P], const char* x, int64_t x_stride, const char* const* b, int64_t b_step,
                             int64_t steps, const char* ahead = nullptr, const char* ahead2 = nullptr) {
  const char* bp[P];
  EC_UNROLL for (int p = 0; p < P; ++p) bp[p] = b[p];
  const char* xr[R];
  EC_UNROLL for (int r = 0; r < R; ++r) xr[r] = x + r * x_stride;
  for (int64_t s = 0; s < steps; ++s) {
    if (ahead) __builtin_prefetch(ahead + s * 64, 0, 2);
    if (ahead2) __builtin_prefetch(ahead2 + s * 64, 0, 2);
    decltype(Step<T>::load(bp[0])) w[P];
    EC_UNROLL for (int p = 0; p < P; ++p) w[p] = Step<T>::load(bp[p] + s * b_step);
    EC_UNROLL for (int r = 0; r < R; ++r) {
      typename Step<T>::Scalar a = Step<T>::splat(xr[r] + s * 4);
      EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = Step<T>::dot(acc[r][p], a, w[p]);
    }
  }
}

// What the machine can do, for the benches: a read of memory, and products that never leave the registers.
float measure_read(const float* x, int64_t begin, int64_t end) {
  vf sum[8] = {};
  for (int64_t i = begin; i + 128 <= end; i += 128)
    EC_UNROLL for (int j = 0; j < 8; ++j) sum[j] = vmax(vload(x + i + 16 * j), sum[j]);
  for (int j = 1; j < 8; ++j) sum[0] = vmax(sum[0], sum[j]);
  return hmax(sum[0]);
}

template <class T> int64_t measure_product(int64_t rounds) {
  vf acc[kMaxRows][kMaxPanels] = {};
  alignas(64) static const char data[64 * 8] = {};
  const char* b[kMaxPanels];
  for (int p = 0; p < kMaxPanels; ++p) b[p] = data + 64 * p;
  for (int64_t i = 0; i < rounds; ++i) product_steps<T, kMaxRows, kMaxPanels>(acc, data, 4, b, 0, 4);
  float sum = 0;
  for (int r = 0; r < kMaxRows; ++r) for (int p = 0; p < kMaxPanels; ++p) sum += hsum(acc[r][p]);
  return rounds * 4 * kMaxRows * kMaxPanels * kLanes * Step<T>::kWidth * 2 + int64_t(sum);
}

int64_t measure_matrix(DType dtype, int64_t rounds) {
  return dtype == DType::kFloat32 ? measure_product<float>(rounds) : measure_product<bf16>(rounds);
}

}  // namespace
}  // namespace EC_ISA
