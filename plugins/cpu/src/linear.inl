// Products with packed weights. Idea: a group of up to kMaxPanels weight panels stays in the second-level cache while
// all rows pass over it, kMaxRows at a time; meanwhile the next group is prefetched. With few rows the weights stream
// through once and memory bandwidth is the limit; with many the multiply-add units are.
namespace EC_ISA {
namespace {

struct LinearTile {
  const char* x;
  const char* w;  // first panel of the group
  const float* bias;
  char* y;
  int64_t columns;  // valid outputs of the group
  const char *ahead, *ahead2;
};

template <class T, class Out, int R, int P> void linear_tile(const LinearArgs& a, const LinearTile& t) {
  const int64_t panel_bytes = a.steps * 64;
  const char* b[P];
  for (int p = 0; p < P; ++p) b[p] = t.w + p * panel_bytes;
  vf acc[R][P];
  EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = vset(0.0f);
  product_steps<T, R, P>(acc, t.x, a.x_stride, b, 64, a.steps, t.ahead, t.ahead2);
  EC_UNROLL for (int p = 0; p < P; ++p) {
    const int64_t left = t.columns - p * kPanel;
    const int n = left < kPanel ? int(left) : kPanel;
    const vf bias = t.bias ? vload_n(t.bias + p * kPanel, n) : vset(0.0f);
    EC_UNROLL for (int r = 0; r < R; ++r) {
      Out* y = reinterpret_cast<Out*>(t.y + r * a.y_stride) + p * kPanel;
      const vf sum = t.bias ? acc[r][p] + bias : acc[r][p];
      if (n < kPanel) vstore_n(y, sum, n);
      else if (sizeof(Out) == 4 && a.y_streams) vstream(reinterpret_cast<float*>(y), sum);
      else vstore(y, sum);
    }
  }
}

typedef void (*TileFn)(const LinearArgs&, const LinearTile&);

template <class T, class Out, int P> TileFn tile_of_rows(int rows) {
  switch (rows) {
    case 1: return linear_tile<T, Out, 1, P>;
    case 2: return linear_tile<T, Out, 2, P>;
    case 3: return linear_tile<T, Out, 3, P>;
    case 4: return linear_tile<T, Out, kMaxRows < 4 ? 3 : 4, P>;
    case 5: return linear_tile<T, Out, kMaxRows < 5 ? 3 : 5, P>;
    default: return linear_tile<T, Out, kMaxRows < 6 ? 3 : 6, P>;
  }
}

template <class T, class Out> TileFn tile_of(int rows, int panels) {
  switch (panels) {
    case 1: return tile_of_rows<T, Out, 1>(rows);
    case 2: return tile_of_rows<T, Out, kMaxPanels < 2 ? 1 : 2>(rows);
    case 3: return tile_of_rows<T, Out, kMaxPanels < 3 ? 1 : 3>(rows);
    default: return tile_of_rows<T, Out, kMaxPanels < 4 ? 1 : 4>(rows);
  }
}

template <class T, class Out>
void linear_rows(const LinearArgs& a, int64_t m0, int64_t m1, int64_t panel0, int64_t panel1, int64_t last) {
  const int64_t panel_bytes = a.steps * 64;
  const int64_t rows = m1 - m0, tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t panel = panel0; panel < panel1;) {
    const int panels = int(panel1 - panel < kMaxPanels ? panel1 - panel : kMaxPanels);
    const char* w = a.w + panel * panel_bytes;
    const char* next = w + panels * panel_bytes;
    const int64_t next_panels = last - panel - panels < kMaxPanels ? last - panel - panels : kMaxPanels;
    if (tiles == 1) {
      // The weights stream through once: the hardware follows within a panel, but not to the next one's beginning.
      for (int64_t p = 0; p < next_panels; ++p)
        for (int64_t line = 0; line < 16 && line < a.steps; ++line) __builtin_prefetch(next + p * panel_bytes + line * 64, 0, 2);
    }
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t r0 = m0 + rows * i / tiles, r1 = m0 + rows * (i + 1) / tiles;
      LinearTile tile{a.x + r0 * a.x_stride, w, a.bias ? a.bias + panel * kPanel : nullptr,
                      a.y + r0 * a.y_stride + panel * kPanel * int64_t(sizeof(Out)), a.N - panel * kPanel,
                      tiles > 1 && i < next_panels ? next + i * panel_bytes : nullptr,
                      tiles > 1 && i + tiles < next_panels ? next + (i + tiles) * panel_bytes : nullptr};
      tile_of<T, Out>(int(r1 - r0), panels)(a, tile);
    }
    panel += panels;
  }
}

void linear(const LinearArgs& a, int64_t m0, int64_t m1, int64_t panel0, int64_t panel1, int64_t last) {
  if (a.dtype == DType::kFloat32) linear_rows<float, float>(a, m0, m1, panel0, panel1, last);
  else if (a.y_float32) linear_rows<bf16, float>(a, m0, m1, panel0, panel1, last);
  else linear_rows<bf16, bf16>(a, m0, m1, panel0, panel1, last);
  if (a.y_streams) stream_end();
}

}  // namespace
}  // namespace EC_ISA
