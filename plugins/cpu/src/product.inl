// The register-blocked product that linear layers and attention share.
namespace EC_ISA {
namespace {

// Row r, panel p of the tile: acc[r][p] = sum over s of x[r][s] * b[p][s]. A step of b is one 64-byte line.
// `ahead`, when not null, is brought into the second-level cache one line a step.
template <class T, int R, int P>
EC_INLINE void product_steps(vf (&acc)[R][P], const char* x, int64_t x_stride, const char* const* b, int64_t b_step,
                             int64_t steps, const char* ahead) {
  const char* bp[P];
  EC_UNROLL for (int p = 0; p < P; ++p) bp[p] = b[p];
  const char* xr[R];
  EC_UNROLL for (int r = 0; r < R; ++r) xr[r] = x + r * x_stride;
  for (int64_t s = 0; s < steps; ++s) {
    if (ahead) __builtin_prefetch(ahead + s * 64, 0, 2);
    decltype(Step<T>::load(bp[0])) w[P];
    EC_UNROLL for (int p = 0; p < P; ++p) w[p] = Step<T>::load(bp[p] + s * b_step);
    EC_UNROLL for (int r = 0; r < R; ++r) {
      typename Step<T>::Scalar a = Step<T>::splat(xr[r] + s * 4);
      EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = Step<T>::dot(acc[r][p], a, w[p]);
    }
  }
}

}  // namespace
}  // namespace EC_ISA
