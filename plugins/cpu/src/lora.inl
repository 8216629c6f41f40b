// The two small products of low-rank adapters, each token with its own: h = A x and y += B h. A token's rows of A and B
// are contiguous, so both are dot products along them; a row's result does not depend on the other rows.
namespace EC_ISA {
namespace {

// out[j] = x . rows[j], for R rows that lie one after the other.
template <class T, int R> EC_INLINE void lora_dots(const T* x, const T* rows, int64_t size, float* out) {
  vf acc[R];
  EC_UNROLL for (int j = 0; j < R; ++j) acc[j] = vset(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const vf part = vload(x + i);
    EC_UNROLL for (int j = 0; j < R; ++j) acc[j] = fma(part, vload(rows + j * size + i), acc[j]);
  }
  if (i < size) {
    const vf part = vload_n(x + i, int(size - i));
    EC_UNROLL for (int j = 0; j < R; ++j) acc[j] = fma(part, vload_n(rows + j * size + i, int(size - i)), acc[j]);
  }
  EC_UNROLL for (int j = 0; j < R; ++j) out[j] = hsum(acc[j]);
}

template <class T> void lora_shrink_pieces(const LoraShrinkArgs& a, int64_t begin, int64_t end) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t t = piece / a.S, s = piece % a.S, n = a.adapter[t];
    float* h = a.h + (s * a.T + t) * a.R;
    if (n < 0) {
      for (int64_t r = 0; r < a.R; ++r) h[r] = 0.0f;
      continue;
    }
    const T* x = reinterpret_cast<const T*>(a.x + t * a.x_stride);
    const T* rows = reinterpret_cast<const T*>(a.a) + (s * a.N + n) * a.R * a.I;
    int64_t r = 0;
    for (; r + 4 <= a.R; r += 4) lora_dots<T, 4>(x, rows + r * a.I, a.I, h + r);
    for (; r < a.R; ++r) lora_dots<T, 1>(x, rows + r * a.I, a.I, h + r);
  }
}

template <class T> void lora_expand_pieces(const LoraExpandArgs& a, int64_t begin, int64_t end) {
  const int64_t runs = (a.P + kLoraRun - 1) / kLoraRun;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t t = piece / runs, n = a.adapter[t];
    if (n < 0) continue;
    const float* h = a.h + t * a.R;
    T* y = reinterpret_cast<T*>(a.y + t * a.y_stride);
    const T* b = reinterpret_cast<const T*>(a.b) + n * a.P * a.R;
    const int64_t p0 = piece % runs * kLoraRun, p1 = p0 + kLoraRun < a.P ? p0 + kLoraRun : a.P;
    for (int64_t p = p0; p < p1; ++p) {
      const T* row = b + p * a.R;
      vf acc = vset(0.0f);
      int64_t r = 0;
      for (; r + kLanes <= a.R; r += kLanes) acc = fma(vload(h + r), vload(row + r), acc);
      if (r < a.R) acc = fma(vload_n(h + r, int(a.R - r)), vload_n(row + r, int(a.R - r)), acc);
      from_float(y + p, to_float(y[p]) + hsum(acc));
    }
  }
}

void lora_shrink(const LoraShrinkArgs& a, int64_t begin, int64_t end) {
  if (a.dtype == DType::kFloat32) lora_shrink_pieces<float>(a, begin, end);
  else lora_shrink_pieces<bf16>(a, begin, end);
}

void lora_expand(const LoraExpandArgs& a, int64_t begin, int64_t end) {
  if (a.dtype == DType::kFloat32) lora_expand_pieces<float>(a, begin, end);
  else lora_expand_pieces<bf16>(a, begin, end);
}

}  // namespace
}  // namespace EC_ISA
