// Products with weights in small blocks of integers, as GGUF files have them. Rows are turned into signed bytes, 32
// inputs to a scale, by the same rule whatever the batch; sums within a block are exact integers, and blocks are added
// in order, so that a result depends on nothing but its row.
namespace EC_ISA {
namespace {

struct vi { ipart p[kParts]; };

EC_INLINE vi vseti(int32_t x) { vi r; EC_EACH r.p[i] = x - ipart{}; return r; }
EC_INLINE vf to_float(vi a) { vf r; EC_EACH r.p[i] = __builtin_convertvector(a.p[i], fpart); return r; }

// Each lane: acc + the products of its four unsigned bytes in w with the four signed bytes of x. Exact everywhere.
EC_INLINE vi dot_bytes(vi acc, vu w, uint32_t x) {
#if defined(__AVX512VNNI__)
  return vi{{(ipart)_mm512_dpbusd_epi32((__m512i)acc.p[0], (__m512i)w.p[0], _mm512_set1_epi32(int(x)))}};
#elif defined(__AVX512F__) || defined(__AVX2__)
  // Even and odd bytes apart, as 16-bit numbers: a product of bytes could saturate in 16 bits.
  const int even = int(uint32_t(uint16_t(int8_t(x))) | uint32_t(uint16_t(int8_t(x >> 16))) << 16);
  const int odd = int(uint32_t(uint16_t(int8_t(x >> 8))) | uint32_t(uint16_t(int8_t(x >> 24))) << 16);
  EC_EACH {
#if defined(__AVX512F__)
    const __m512i low = (__m512i)(w.p[i] & 0x00ff00ffu), high = (__m512i)((w.p[i] >> 8) & 0x00ff00ffu);
    acc.p[i] += (ipart)_mm512_madd_epi16(low, _mm512_set1_epi32(even)) + (ipart)_mm512_madd_epi16(high, _mm512_set1_epi32(odd));
#else
    const __m256i low = (__m256i)(w.p[i] & 0x00ff00ffu), high = (__m256i)((w.p[i] >> 8) & 0x00ff00ffu);
    acc.p[i] += (ipart)_mm256_madd_epi16(low, _mm256_set1_epi32(even)) + (ipart)_mm256_madd_epi16(high, _mm256_set1_epi32(odd));
#endif
  }
  return acc;
#else
  EC_EACH EC_UNROLL for (int b = 0; b < 4; ++b) acc.p[i] += (ipart)((w.p[i] >> (8 * b)) & 0xffu) * int32_t(int8_t(x >> (8 * b)));
  return acc;
#endif
}

// Sixteen half-precision numbers. The other way than F16C's is exact for all finite ones.
EC_INLINE vf vload_half(const char* x) {
#if defined(__AVX512F__)
  return vf{{(fpart)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x))}};
#else
  uint16_t half[kLanes];
  memcpy(half, x, sizeof half);
  alignas(64) uint32_t bits[kLanes];
  for (int i = 0; i < kLanes; ++i) bits[i] = half[i];
  const vu h = vloadu(bits);
  vf r;
  EC_EACH {
    const fpart magnitude = (fpart)((h.p[i] & 0x7fffu) << 13) * 0x1p112f;
    r.p[i] = (fpart)((upart)magnitude | ((h.p[i] & 0x8000u) << 16));
  }
  return r;
#endif
}

// 16 fifth bits of 4 bytes each, added to w where set. The mask's bit 4 n + b is for byte b of lane n.
EC_INLINE vu add_sixteen(vu w, const char* mask) {
  uint64_t bits;
  memcpy(&bits, mask, 8);
#if defined(__AVX512F__)
  return vu{{(upart)_mm512_mask_add_epi8((__m512i)w.p[0], (__mmask64)bits, (__m512i)w.p[0], _mm512_set1_epi8(16))}};
#else
  alignas(64) uint32_t add[kLanes];
  for (int n = 0; n < kLanes; ++n) {
    const uint32_t four = uint32_t(bits >> (4 * n)) & 15u;
    add[n] = ((four & 1) | (four & 2) << 7 | (four & 4) << 14 | (four & 8) << 21) << 4;
  }
  const vu a = vloadu(add);
  EC_EACH w.p[i] |= a.p[i];
  return w;
#endif
}

template <int Parts> EC_INLINE uint32_t largest_bits(const vf (&v)[Parts]) {
#if defined(__AVX512F__)
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  __m512i most = _mm512_and_si512((__m512i)v[0].p[0], mask);
  EC_UNROLL for (int i = 1; i < Parts; ++i) most = _mm512_max_epu32(most, _mm512_and_si512((__m512i)v[i].p[0], mask));
  return _mm512_reduce_max_epu32(most);
#else
  alignas(64) uint32_t lanes[Parts * kLanes];
  memcpy(lanes, v, sizeof lanes);
  uint32_t most = 0;
  for (int i = 0; i < Parts * kLanes; ++i) {
    const uint32_t bits = lanes[i] & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
#endif
}

// A group of a row. As integers, absolute values compare alike, and what is no finite number is above all others.
template <int Parts> EC_INLINE void quantize_group(const vf (&v)[Parts], int32_t offset, int8_t* codes, RowBlock* out) {
  const uint32_t bits = largest_bits<Parts>(v);
  float top;
  memcpy(&top, &bits, 4);
  if (bits >= 0x7f800000u) {  // so is the result
    memset(codes, 0, Parts * kLanes);
    *out = RowBlock{__builtin_nanf(""), 0, __builtin_nanf("")};
    return;
  }
  const bool flat = !(top > 1e-30f);
  const vf inverse = vset(flat ? 0.0f : 127.0f / top);
  int32_t sum = 0;
#if defined(__AVX512F__)
  __m512i total = _mm512_setzero_si512();
  EC_UNROLL for (int i = 0; i < Parts; ++i) {
    const __m512i q = _mm512_cvtps_epi32((__m512)(v[i] * inverse).p[0]);
    _mm_storeu_si128((__m128i*)(codes + i * kLanes), _mm512_cvtepi32_epi8(q));
    total = _mm512_add_epi32(total, q);
  }
  sum = _mm512_reduce_add_epi32(total);
#else
  for (int part = 0; part < Parts; ++part) {
    alignas(64) float lanes[kLanes];
    vstore(lanes, v[part] * inverse + vset(12582912.0f));  // rounds to the nearest, ties to even
    for (int i = 0; i < kLanes; ++i) {
      const int32_t q = int32_t(lanes[i] - 12582912.0f);
      codes[part * kLanes + i] = int8_t(q);
      sum += q;
    }
  }
#endif
  const float scale = flat ? 0.0f : top * (1.0f / 127.0f);
  *out = RowBlock{scale, -offset * sum, scale * float(sum)};
}

// Row `m` in bytes; `load(e)` gives 16 values from column e on.
template <int Group, class Load> EC_INLINE void quantize_row(const RowCodes& to, int64_t m, const Load& load) {
  constexpr int parts = Group / kLanes;
  int8_t* codes = to.codes + m * to.blocks * Group;
  RowBlock* out = to.scales + m * to.blocks;
  for (int64_t block = 0; block < to.blocks; ++block) {
    vf v[parts];
    EC_UNROLL for (int i = 0; i < parts; ++i) v[i] = load(block * Group + i * kLanes);
    quantize_group<parts>(v, to.offset, codes + block * Group, out + block);
  }
}

template <class T, int Group> void quantize_rows(const QuantizeArgs& a, int64_t m0, int64_t m1) {
  for (int64_t m = m0; m < m1; ++m) {
    const T* x = reinterpret_cast<const T*>(a.x + m * a.x_stride);
    quantize_row<Group>(a.to, m, [x](int64_t e) { return vload(x + e); });
  }
}

void quantize(const QuantizeArgs& a, int64_t m0, int64_t m1) {
  const bool wide = a.to.group == 64;
  if (a.dtype == DType::kFloat32) wide ? quantize_rows<float, 64>(a, m0, m1) : quantize_rows<float, 32>(a, m0, m1);
  else wide ? quantize_rows<bf16, 64>(a, m0, m1) : quantize_rows<bf16, 32>(a, m0, m1);
}

// What a tile brings into the second-level cache beside its work. With one tile to a group of panels the weights stream
// through once: each block fetches one a little further on, at the end of its panel in the next group's. With several
// tiles each fetches its share of the next group.
struct NearPanels {
  const char* next;  // the next group of panels, or null
  int lines;         // of a share, by block; 0: the weights stream through
};

EC_INLINE void fetch_lines(const char* from, int lines) {
  for (int line = 0; line < lines; ++line) __builtin_prefetch(from + line * 64, 0, 2);
}

// At block `b` of `blocks` of `Bytes` each, in `P` panels from `w` on.
template <int P, int Bytes>
EC_INLINE void fetch_panels(NearPanels& ahead, const char* w, int64_t panel_bytes, int64_t b, int64_t blocks) {
  if (ahead.lines) {
    fetch_lines(ahead.next, ahead.lines);
    ahead.next += ahead.lines * 64;
    return;
  }
  // Distances were measured: with few rows, 4 panels wide, 1 KiB of each; with more rows there are 2 and 4 KiB.
  constexpr int64_t distance = ((P > 2 ? 1024 : 4096) + Bytes - 1) / Bytes;
  const char* from = w + (b + distance) * Bytes;
  if (b + distance >= blocks) {
    if (!ahead.next || b + distance >= 2 * blocks) return;
    from = ahead.next + (b + distance - blocks) * Bytes;
  }
  EC_UNROLL for (int p = 0; p < P; ++p)
    EC_UNROLL for (int byte = 0; byte < Bytes; byte += 64) __builtin_prefetch(from + p * panel_bytes + byte, 0, 2);
}

// The share of tile `i` of `tiles` in the group of `panels` panels at `next`.
inline NearPanels near_panels(const char* next, int64_t panels, int64_t panel_bytes, int64_t blocks, int64_t i, int64_t tiles) {
  if (tiles == 1 || !panels) return NearPanels{panels ? next : nullptr, 0};
  const int64_t lines = (panels * panel_bytes / 64 + tiles * blocks - 1) / (tiles * blocks);
  return NearPanels{next + i * blocks * lines * 64, int(lines)};
}

struct QuantTile {
  const int8_t* x;
  const RowBlock* scales;
  const char* w;
  const float* bias;
  char* y;
  int64_t columns;
  NearPanels ahead;
};

template <Codes C, bool Min, int R, int P> void quant_tile(const QuantArgs& a, const QuantTile& t) {
  constexpr int kMins = 32, kHigh = kMins + (Min ? 32 : 0), kCodes = kHigh + (C == Codes::kFive ? 64 : 0);
  constexpr int64_t kBytes = kCodes + (C == Codes::kByte ? 512 : 256);
  const int64_t panel_bytes = a.panel_bytes, row_bytes = a.blocks * kBlock;
  vf acc[R][P];
  EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = vset(0.0f);
  const char* block = t.w;
  NearPanels ahead = t.ahead;
  for (int64_t b = 0; b < a.blocks; ++b, block += kBytes) {
    const int8_t* x = t.x + b * kBlock;
    fetch_panels<P, int(kBytes)>(ahead, t.w, panel_bytes, b, a.blocks);
    vi sum[R][P];
    EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) sum[r][p] = vseti(t.scales[r * a.blocks + b].start);
    EC_UNROLL for (int s = 0; s < (C == Codes::kByte ? 8 : 4); ++s) {
      vu low[P], high[P];
      EC_UNROLL for (int p = 0; p < P; ++p) {
        const vu w = vloadu(block + p * panel_bytes + kCodes + 64 * s);
        if (C == Codes::kByte) {
          low[p] = w;
          continue;
        }
        EC_EACH low[p].p[i] = w.p[i] & 0x0f0f0f0fu;
        EC_EACH high[p].p[i] = (w.p[i] >> 4) & 0x0f0f0f0fu;
        if (C == Codes::kFive) {
          low[p] = add_sixteen(low[p], block + p * panel_bytes + kHigh + 8 * s);
          high[p] = add_sixteen(high[p], block + p * panel_bytes + kHigh + 32 + 8 * s);
        }
      }
      EC_UNROLL for (int r = 0; r < R; ++r) {
        uint32_t first, second;
        memcpy(&first, x + r * row_bytes + 4 * s, 4);
        EC_UNROLL for (int p = 0; p < P; ++p) sum[r][p] = dot_bytes(sum[r][p], low[p], first);
        if (C == Codes::kByte) continue;
        memcpy(&second, x + r * row_bytes + 16 + 4 * s, 4);
        EC_UNROLL for (int p = 0; p < P; ++p) sum[r][p] = dot_bytes(sum[r][p], high[p], second);
      }
    }
    EC_UNROLL for (int p = 0; p < P; ++p) {
      const vf scale = vload_half(block + p * panel_bytes);
      EC_UNROLL for (int r = 0; r < R; ++r) {
        const RowBlock& row = t.scales[r * a.blocks + b];
        acc[r][p] = fma(scale * vset(row.scale), to_float(sum[r][p]), acc[r][p]);
        if (Min) acc[r][p] = fma(vload_half(block + p * panel_bytes + kMins), vset(row.weighted), acc[r][p]);
      }
    }
  }
  EC_UNROLL for (int p = 0; p < P; ++p) {
    const int64_t left = t.columns - p * kPanel;
    const int n = left < kPanel ? int(left) : kPanel;
    const vf bias = t.bias ? vload_n(t.bias + p * kPanel, n) : vset(0.0f);
    EC_UNROLL for (int r = 0; r < R; ++r) {
      const vf y = t.bias ? acc[r][p] + bias : acc[r][p];
      char* at = t.y + r * a.y_stride;
      if (a.y_streams && n == kPanel) vstream(reinterpret_cast<float*>(at) + p * kPanel, y);
      else if (a.y_type == DType::kFloat32) vstore_n(reinterpret_cast<float*>(at) + p * kPanel, y, n);
      else vstore_n(reinterpret_cast<bf16*>(at) + p * kPanel, y, n);
    }
  }
}

typedef void (*QuantTileFn)(const QuantArgs&, const QuantTile&);

// With few rows many panels are in flight at once; with more rows a panel's unpacking is shared by them.
constexpr int kQuantRows = kMaxPanels > 1 ? 6 : 3;
constexpr int quant_panels(int rows) { return kMaxPanels == 1 ? 1 : rows <= 3 ? 4 : 2; }

template <Codes C, bool Min, int R> QuantTileFn quant_tile_of(bool full) {
  constexpr int rows = R < kQuantRows ? R : kQuantRows;
  return full ? quant_tile<C, Min, rows, quant_panels(rows)> : quant_tile<C, Min, rows, 1>;
}

template <Codes C, bool Min> QuantTileFn quant_tile_of(int rows, bool full) {
  switch (rows) {
    case 1: return quant_tile_of<C, Min, 1>(full);
    case 2: return quant_tile_of<C, Min, 2>(full);
    case 3: return quant_tile_of<C, Min, 3>(full);
    case 4: return quant_tile_of<C, Min, 4>(full);
    case 5: return quant_tile_of<C, Min, 5>(full);
    default: return quant_tile_of<C, Min, 6>(full);
  }
}

QuantTileFn quant_tile_of(const QuantArgs& a, int rows, bool full) {
  switch (a.codes) {
    case Codes::kNibble: return a.has_min ? quant_tile_of<Codes::kNibble, true>(rows, full) : quant_tile_of<Codes::kNibble, false>(rows, full);
    case Codes::kFive: return a.has_min ? quant_tile_of<Codes::kFive, true>(rows, full) : quant_tile_of<Codes::kFive, false>(rows, full);
    default: return quant_tile_of<Codes::kByte, false>(rows, full);
  }
}

void quant_linear(const QuantArgs& a, int64_t m0, int64_t m1, int64_t panel0, int64_t panel1, int64_t last) {
  const int64_t rows = m1 - m0, tiles = (rows + kQuantRows - 1) / kQuantRows;
  if (!rows) return;
  const int group = quant_panels(int((rows + tiles - 1) / tiles));
  for (int64_t panel = panel0; panel < panel1;) {
    const int64_t left = panel1 - panel, panels = left < group ? left : group;
    const char* w = a.w + panel * a.panel_bytes;
    const int64_t more = last - panel - panels, following = more < group ? more : group;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t r0 = m0 + rows * i / tiles, r1 = m0 + rows * (i + 1) / tiles;
      const int count = int(r1 - r0), width = quant_panels(count);
      for (int64_t p = 0; p < panels;) {
        const bool full = panels - p >= width;
        const int64_t column = (panel + p) * kPanel;
        const QuantTile tile{a.x + r0 * a.blocks * kBlock, a.scales + r0 * a.blocks, w + p * a.panel_bytes,
                             a.bias ? a.bias + column : nullptr,
                             a.y + r0 * a.y_stride + column * (a.y_type == DType::kFloat32 ? 4 : 2), a.N - column,
                             near_panels(w + panels * a.panel_bytes, following, a.panel_bytes, a.blocks, i, tiles)};
        quant_tile_of(a, count, full)(a, tile);
        p += full ? width : 1;
      }
    }
    panel += panels;
  }
  if (a.y_streams) stream_end();
}

}  // namespace
}  // namespace EC_ISA
