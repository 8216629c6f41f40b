// Norms, rotary embedding, gated activations and the vector passes of sampling. All arithmetic is float32.
namespace EC_ISA {
namespace {

// Row t: adds the residual where there is one, and returns 1 / sqrt(mean square + eps) of the sum.
template <class T> EC_INLINE float norm_scale(const NormArgs& a, const T* x, T* residual) {
  const auto square = [&](int64_t e, vf sum) {
    const int n = a.E - e < kLanes ? int(a.E - e) : kLanes;
    vf v = vload_n(x + e, n);
    if (residual) {
      v = round_to<T>(v + vload_n(residual + e, n));  // what later layers will read
      vstore_n(residual + e, v, n);
    }
    return fma(v, v, sum);
  };
  vf sum0 = vset(0.0f), sum1 = sum0;
  int64_t e = 0;
  for (; e + kLanes < a.E; e += 2 * kLanes) {
    sum0 = square(e, sum0);
    sum1 = square(e + kLanes, sum1);
  }
  if (e < a.E) sum0 = square(e, sum0);
  return 1.0f / __builtin_sqrtf(hsum(sum0 + sum1) / float(a.E) + a.eps);
}

// Calls `row(t, source, scale)` for each row: its result is source * scale * weight.
template <class T, class Row> EC_INLINE void norm_each(const NormArgs& a, int64_t t0, int64_t t1, const Row& row) {
  for (int64_t t = t0; t < t1; ++t) {
    const T* x = reinterpret_cast<const T*>(a.x + t / a.x_inner * a.x_outer + t % a.x_inner * a.x_stride);
    T* residual = a.residual ? reinterpret_cast<T*>(a.residual + t * a.residual_stride) : nullptr;
    const float scale = norm_scale<T>(a, x, residual);
    row(t, residual ? residual : x, scale);
  }
}

template <class T, class W> void norm_rows(const NormArgs& a, int64_t t0, int64_t t1) {
  const W* weight = reinterpret_cast<const W*>(a.weight);
  norm_each<T>(a, t0, t1, [&](int64_t t, const T* source, float scale) {
    T* out = reinterpret_cast<T*>(a.out) + t * a.E;
    for (int64_t e = 0; e < a.E; e += kLanes) {
      const int n = a.E - e < kLanes ? int(a.E - e) : kLanes;
      vstore_n(out + e, vload_n(source + e, n) * vset(scale) * vload_n(weight + e, n), n);
    }
  });
}

template <class T, class W, int Group> void norm_quantize_rows(const NormArgs& a, const RowCodes& to, int64_t t0, int64_t t1) {
  const W* weight = reinterpret_cast<const W*>(a.weight);
  norm_each<T>(a, t0, t1, [&](int64_t t, const T* source, float scale) {
    quantize_row<Group>(to, t, [&](int64_t e) { return round_to<T>(vload(source + e) * vset(scale) * vload(weight + e)); });
  });
}

// Calls f(T(), W()) for the types of the rows and of the norm's weight.
template <class F> EC_INLINE void with_types(const NormArgs& a, const F& f) {
  if (a.dtype == DType::kFloat32) {
    if (a.weight_dtype == DType::kFloat32) f(float(), float());
    else f(float(), bf16());
  } else {
    if (a.weight_dtype == DType::kFloat32) f(bf16(), float());
    else f(bf16(), bf16());
  }
}

void norm(const NormArgs& a, int64_t t0, int64_t t1) {
  with_types(a, [&](auto t, auto w) { norm_rows<decltype(t), decltype(w)>(a, t0, t1); });
}

void norm_quantize(const NormArgs& a, const RowCodes& to, int64_t t0, int64_t t1) {
  with_types(a, [&](auto t, auto w) {
    if (to.group == 64) norm_quantize_rows<decltype(t), decltype(w), 64>(a, to, t0, t1);
    else norm_quantize_rows<decltype(t), decltype(w), 32>(a, to, t0, t1);
  });
}

template <class T>
void rotate_heads(char* base, int64_t head_stride, int heads, int half, const float* cosines, bool interleaved) {
  const float* sines = cosines + half;
  for (int h = 0; h < heads; ++h) {
    T* x = reinterpret_cast<T*>(base + h * head_stride);
    if (interleaved) {
      for (int i = 0; i < half; ++i) {
        const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
        from_float(&x[2 * i], a * cosines[i] - b * sines[i]);
        from_float(&x[2 * i + 1], b * cosines[i] + a * sines[i]);
      }
      continue;
    }
    for (int i = 0; i < half; i += kLanes) {
      const int n = half - i < kLanes ? half - i : kLanes;
      const vf a = vload_n(x + i, n), b = vload_n(x + half + i, n);
      const vf c = vload_n(cosines + i, n), s = vload_n(sines + i, n);
      vstore_n(x + i, a * c - b * s, n);
      vstore_n(x + half + i, b * c + a * s, n);
    }
  }
}

void rotary(const RotaryArgs& a, int64_t t0, int64_t t1) {
  for (int64_t t = t0; t < t1; ++t) {
    const float* cosines = a.cos_sin + a.positions[t] * a.cos_sin_stride;
    const auto rotate = a.dtype == DType::kFloat32 ? rotate_heads<float> : rotate_heads<bf16>;
    rotate(a.q + t * a.q_token, a.q_head, a.q_heads, a.half, cosines, a.interleaved);
    if (a.k) rotate(a.k + t * a.k_token, a.k_head, a.k_heads, a.half, cosines, a.interleaved);
  }
}

EC_INLINE vf vtanh(vf x) {
  // 1 - 2 / (exp(2x) + 1); beyond 10 it is 1 in float32, and exp would overflow.
  const vf bounded = vset(0.0f) - vmax(vset(0.0f) - vmax(x, vset(-10.0f)), vset(-10.0f));
  return vset(1.0f) - vset(2.0f) / (vexp(bounded + bounded) + vset(1.0f));
}

template <class T> EC_INLINE vf activate(vf x, Activation kind) {
  if (kind == Activation::kSilu) {
    // exp(-x) overflows below -88, where the result is -0 in any case.
    const vf e = vexp2<sizeof(T) == 4>(vmax(vset(-87.0f), x) * vset(-1.44269504088896341f));
    return x * reciprocal(vset(1.0f) + e);
  }
  if (kind == Activation::kGeluTanh) {
    const vf inner = vset(0.7978845608028654f) * fma(vset(0.044715f) * x * x, x, x);
    return vset(0.5f) * x * (vset(1.0f) + vtanh(inner));
  }
  alignas(64) float lanes[kLanes];
  vstore(lanes, x);
  for (int i = 0; i < kLanes; ++i) lanes[i] *= 0.5f * (1.0f + __builtin_erff(lanes[i] * 0.70710678118654752f));
  return vload(lanes);
}

template <class T> void gate_rows(const GateArgs& a, int64_t t0, int64_t t1, int64_t f0, int64_t f1) {
  for (int64_t t = t0; t < t1; ++t) {
    const T* x = reinterpret_cast<const T*>(a.x + t * a.x_stride);
    T* out = reinterpret_cast<T*>(a.out) + t * a.F;
    for (int64_t f = f0; f < f1; f += kLanes) {
      const int n = f1 - f < kLanes ? int(f1 - f) : kLanes;
      vstore_n(out + f, activate<T>(vload_n(x + f, n), a.kind) * vload_n(x + a.F + f, n), n);
    }
  }
}

void gate(const GateArgs& a, int64_t t0, int64_t t1, int64_t f0, int64_t f1) {
  if (a.dtype == DType::kFloat32) gate_rows<float>(a, t0, t1, f0, f1);
  else gate_rows<bf16>(a, t0, t1, f0, f1);
}

template <class T, int Group> void gate_quantize_rows(const GateArgs& a, const RowCodes& to, int64_t t0, int64_t t1) {
  for (int64_t t = t0; t < t1; ++t) {
    const T* x = reinterpret_cast<const T*>(a.x + t * a.x_stride);
    quantize_row<Group>(to, t, [&](int64_t f) { return round_to<T>(activate<T>(vload(x + f), a.kind) * vload(x + a.F + f)); });
  }
}

void gate_quantize(const GateArgs& a, const RowCodes& to, int64_t t0, int64_t t1) {
  const bool wide = to.group == 64;
  if (a.dtype == DType::kFloat32) wide ? gate_quantize_rows<float, 64>(a, to, t0, t1) : gate_quantize_rows<float, 32>(a, to, t0, t1);
  else wide ? gate_quantize_rows<bf16, 64>(a, to, t0, t1) : gate_quantize_rows<bf16, 32>(a, to, t0, t1);
}

int64_t arg_max(const float* x, int64_t n) {
  vf best[4] = {vset(kMinusInf), vset(kMinusInf), vset(kMinusInf), vset(kMinusInf)};
  vu nan[4] = {};
  int64_t i = 0;
  // max(x, best) returns the second operand when the first is NaN, so a NaN is looked for beside it.
  for (; i + 64 <= n; i += 64) EC_UNROLL for (int j = 0; j < 4; ++j) {
    const vf v = vload(x + i + 16 * j);
    best[j] = vmax(v, best[j]);
    nan[j] = nan[j] | unequal(v, v);
  }
  float top = hmax(vmax(vmax(best[0], best[1]), vmax(best[2], best[3])));
  bool bad = any((nan[0] | nan[1]) | (nan[2] | nan[3]));
  for (int64_t j = i; j < n; ++j) {
    top = x[j] > top ? x[j] : top;
    bad |= x[j] != x[j];
  }
  if (bad || !(top > kMinusInf) || top == -kMinusInf) return -1;
  for (i = 0; i < n; ++i) if (x[i] == top) return i;
  return -1;
}

typedef float f8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef double d8 __attribute__((vector_size(64)));

void exp_row(const float* x, float* probs, double* sums, int64_t n, float max, float temperature) {
  for (int64_t block = 0; block < n; block += kSumBlock) {
    const int64_t end = block + kSumBlock < n ? block + kSumBlock : n;
    d8 sum[2] = {};
    for (int64_t i = block; i < end; i += kLanes) {
      const int lanes = end - i < kLanes ? int(end - i) : kLanes;
      alignas(64) float e[kLanes];
      vf v = vexp((vload_n(x + i, lanes) - vset(max)) / vset(temperature));
      if (lanes < kLanes) v = select(lanes_between(0, lanes), v, vset(0.0f));
      vstore(e, v);
      vstore_n(probs + i, v, lanes);
      for (int half = 0; half < 2; ++half) sum[half] += __builtin_convertvector(*reinterpret_cast<const f8*>(e + 8 * half), d8);
    }
    sum[0] += sum[1];
    const d8 s = sum[0];
    sums[block / kSumBlock] = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
  }
}

int64_t collect(const float* probs, int64_t n, float threshold, int32_t* ids) {
  int64_t count = 0, i = 0;
#if defined(__AVX512F__)
  const __m512 limit = _mm512_set1_ps(threshold);
  __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= n; i += 16) {
    __mmask16 keep = _mm512_cmp_ps_mask(_mm512_loadu_ps(probs + i), limit, _CMP_GE_OQ);
    if (keep) {
      _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(keep, index));
      count += __builtin_popcount(keep);
    }
    index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
  }
#endif
  for (; i < n; ++i) {
    ids[count] = int32_t(i);
    count += probs[i] >= threshold;
  }
  return count;
}

}  // namespace
}  // namespace EC_ISA
