// Products with weights in signed bytes, one scale to an output. Rows are signed bytes too, one scale to a group of 64
// inputs (32 where the inputs are no multiple of 64): activations have outliers, weights hardly. Sums within a group are
// exact integers; groups are added in order, so that a result depends on nothing but its row.
namespace EC_ISA {
namespace {

// Rows with some panels, and `following` as many rows after them, one tile after the other: between the calls of a
// function the units would wait, with 576 inputs a twentieth of the time.
struct ByteTile {
  const int8_t* x;
  const RowBlock* groups;
  const char* w;
  const float* bias;
  char* y;
  int64_t columns;
  NearPanels ahead;
  int64_t following;
};

// `Steps`: lines of 4 inputs in a group.
template <int Steps, int R, int P> EC_INLINE void one_byte_tile(const QuantArgs& a, const ByteTile& t) {
  const int64_t panel_bytes = a.panel_bytes, row_bytes = a.blocks * Steps * 4;
  vf acc[R][P];
  EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = vset(0.0f);
  const char* w = t.w;
  NearPanels ahead = t.ahead;
  for (int64_t g = 0; g < a.blocks; ++g) {
    const int8_t* x = t.x + g * Steps * 4;
    vi sum[R][P];
    EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) sum[r][p] = vseti(t.groups[r * a.blocks + g].start);
    fetch_panels<P, Steps * 64>(ahead, t.w, panel_bytes, g, a.blocks);
    EC_UNROLL for (int s = 0; s < Steps; ++s) {
      vu codes[P];
      EC_UNROLL for (int p = 0; p < P; ++p) codes[p] = vloadu(w + p * panel_bytes + 64 * s);
      EC_UNROLL for (int r = 0; r < R; ++r) {
        uint32_t four;
        memcpy(&four, x + r * row_bytes + 4 * s, 4);
        EC_UNROLL for (int p = 0; p < P; ++p) sum[r][p] = dot_bytes(sum[r][p], codes[p], four);
      }
    }
    EC_UNROLL for (int r = 0; r < R; ++r) {
      const vf scale = vset(t.groups[r * a.blocks + g].scale);
      EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = fma(to_float(sum[r][p]), scale, acc[r][p]);
    }
    w += Steps * 64;
  }
  EC_UNROLL for (int p = 0; p < P; ++p) {
    const int64_t left = t.columns - p * kPanel;
    const int n = left < kPanel ? int(left) : kPanel;
    const vf scale = vload(reinterpret_cast<const float*>(t.w + p * panel_bytes + a.blocks * Steps * 64));
    const vf bias = t.bias ? vload_n(t.bias + p * kPanel, n) : vset(0.0f);
    EC_UNROLL for (int r = 0; r < R; ++r) {
      const vf y = t.bias ? acc[r][p] * scale + bias : acc[r][p] * scale;
      char* at = t.y + r * a.y_stride;
      if (a.y_streams && n == kPanel) vstream(reinterpret_cast<float*>(at) + p * kPanel, y);
      else if (a.y_type == DType::kFloat32) vstore_n(reinterpret_cast<float*>(at) + p * kPanel, y, n);
      else vstore_n(reinterpret_cast<bf16*>(at) + p * kPanel, y, n);
    }
  }
}

template <int Steps, int R, int P> void byte_tile(const QuantArgs& a, const ByteTile& first) {
  for (ByteTile t = first;; --t.following) {
    one_byte_tile<Steps, R, P>(a, t);
    if (!t.following) return;
    t.x += R * a.blocks * Steps * 4;
    t.groups += R * a.blocks;
    t.y += R * a.y_stride;
    if (t.ahead.lines) t.ahead.next += a.blocks * t.ahead.lines * 64;
  }
}

typedef void (*ByteTileFn)(const QuantArgs&, const ByteTile&);

template <int Steps, int R> ByteTileFn byte_tile_of(bool full) {
  constexpr int rows = R < kQuantRows ? R : kQuantRows;
  return full ? byte_tile<Steps, rows, quant_panels(rows)> : byte_tile<Steps, rows, 1>;
}

template <int Steps> ByteTileFn byte_tile_of(int rows, bool full) {
  switch (rows) {
    case 1: return byte_tile_of<Steps, 1>(full);
    case 2: return byte_tile_of<Steps, 2>(full);
    case 3: return byte_tile_of<Steps, 3>(full);
    case 4: return byte_tile_of<Steps, 4>(full);
    case 5: return byte_tile_of<Steps, 5>(full);
    default: return byte_tile_of<Steps, 6>(full);
  }
}

// Rows that are cut into full tiles and a rest; fewer are cut evenly, because a small rest takes as long as a tile.
constexpr int64_t kManyRows = 8 * kQuantRows;

void byte_linear(const QuantArgs& a, int64_t m0, int64_t m1, int64_t panel0, int64_t panel1, int64_t last) {
  const int64_t rows = m1 - m0, tiles = (rows + kQuantRows - 1) / kQuantRows, inputs = a.blocks * a.group;
  if (!rows) return;
  const int group = quant_panels(int((rows + tiles - 1) / tiles));
  for (int64_t panel = panel0; panel < panel1;) {
    const int64_t left = panel1 - panel, panels = left < group ? left : group;
    const char* w = a.w + panel * a.panel_bytes;
    const int64_t more = last - panel - panels, following = more < group ? more : group;
    for (int64_t i = 0, r0 = m0; r0 < m1;) {
      const bool many = m1 - r0 >= kManyRows;
      const int64_t count = many ? kQuantRows : m0 + rows * (i + 1) / tiles - r0, again = many ? (m1 - r0) / count - 1 : 0;
      const int width = quant_panels(int(count));
      for (int64_t p = 0; p < panels;) {
        const bool full = panels - p >= width;
        const int64_t column = (panel + p) * kPanel;
        const ByteTile tile{a.x + r0 * inputs, a.scales + r0 * a.blocks, w + p * a.panel_bytes, a.bias ? a.bias + column : nullptr,
                            a.y + r0 * a.y_stride + column * (a.y_type == DType::kFloat32 ? 4 : 2), a.N - column,
                            near_panels(w + panels * a.panel_bytes, following, a.panel_bytes, a.blocks, i, tiles), again};
        (a.group == 64 ? byte_tile_of<16>(int(count), full) : byte_tile_of<8>(int(count), full))(a, tile);
        p += full ? width : 1;
      }
      i += 1 + again;
      r0 += (1 + again) * count;
    }
    panel += panels;
  }
  if (a.y_streams) stream_end();
}

}  // namespace
}  // namespace EC_ISA
