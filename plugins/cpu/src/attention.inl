// Paged attention. Idea: a tile of query rows (token, head of the group) meets the keys of its key-value head in chunks
// of kChunk tokens at fixed positions. For each chunk: scores by a register-blocked product with the key panels where
// they lie in the cache, one exact softmax over the chunk, a second product with the values; then the chunk's (max, sum,
// output) is merged into the running one, in chunk order.
//
// Invariants: a row's arithmetic depends on its own position and keys only. Tokens that a row may not see get weight
// exactly 0 and leave every sum as it is, so that the result is the same bit for bit whichever rows share the tile,
// and whether its chunks were computed by one thread or by several.
namespace EC_ISA {
namespace {

struct ChunkRange {
  int64_t begin, end;  // tokens of the sequence, begin at a panel edge
};

struct TileRows {
  int64_t first_position;  // of the tile's first row's token
  int64_t last_position;
  int64_t context;  // position of the sequence's first query token
  int64_t length;   // keys of the sequence
};

TileRows rows_of(const AttentionArgs& a, const AttentionItem& item) {
  const int64_t queries = a.query_start[item.seq + 1] - a.query_start[item.seq];
  const int64_t length = a.seq_lens[item.seq], context = length - queries;
  return TileRows{context + item.row / a.group, context + (item.row + item.rows - 1) / a.group, context, length};
}

// What row r may see, as tokens of the sequence.
EC_INLINE void row_limits(const AttentionArgs& a, const TileRows& rows, int64_t position, int64_t* first, int64_t* last) {
  *last = a.causal ? position + 1 : rows.length;
  *first = a.window > 0 && position + 1 > a.window ? position + 1 - a.window : 0;
}

ChunkRange chunk_range(const AttentionArgs& a, const TileRows& rows, int64_t chunk) {
  int64_t first, last, unused;
  row_limits(a, rows, rows.first_position, &first, &unused);
  row_limits(a, rows, rows.last_position, &unused, &last);
  ChunkRange range{chunk * kChunk, (chunk + 1) * kChunk};
  if (range.begin < first) range.begin = first / kPanel * kPanel;
  if (range.end > last) range.end = last;
  return range;
}

// Panel p of the chunk's keys or values: in place where a whole panel lies in one block and all of it was written.
// Values past the end are replaced by zeros: a weight of 0 does not silence a NaN.
struct Panels {
  const char* keys[kChunk / kPanel];
  const char* values[kChunk / kPanel];
};

void gather_small_blocks(const AttentionArgs& a, const int32_t* table, int64_t token, int64_t first, int64_t length,
                         int64_t head_offset, char* keys, char* values) {
  const CacheView& c = a.cache;
  constexpr int64_t unit = 4;  // bytes of one token in one step of a key panel: a float or a pair of bfloat16
  const int64_t steps = c.dtype == DType::kFloat32 ? c.head_size : (c.head_size + 1) / 2;
  const int64_t half_panel = c.block_size * unit, value_bytes = int64_t(c.block_size) * c.padded * c.item();
  for (int part = 0; part * c.block_size < kPanel; ++part) {
    const int64_t start = token + part * c.block_size;
    char* k = keys + part * half_panel;
    if (start >= length || start + c.block_size <= first) {  // unwritten, or given up behind the window
      for (int64_t s = 0; s < steps; ++s) memset(k + s * kPanel * unit, 0, half_panel);
      memset(values + part * value_bytes, 0, value_bytes);
      continue;
    }
    const char* block = c.data + table[start / c.block_size] * c.block_bytes() + head_offset;
    for (int64_t s = 0; s < steps; ++s) memcpy(k + s * kPanel * unit, block + s * half_panel, half_panel);
    memcpy(values + part * value_bytes, block + c.side_bytes(), value_bytes);
  }
}

void zero_tail(char* values, int valid, int padded, DType dtype) {
  if (dtype == DType::kFloat32) {
    memset(values + int64_t(valid) * padded * 4, 0, int64_t(kPanel - valid) * padded * 4);
    return;
  }
  uint32_t* pairs = reinterpret_cast<uint32_t*>(values);
  int next = valid;
  if (valid & 1) {
    for (int d = 0; d < padded; ++d) pairs[int64_t(valid / 2) * padded + d] &= 0xffffu;
    ++next;
  }
  memset(pairs + int64_t(next / 2) * padded, 0, int64_t(kPanel - next) / 2 * padded * 4);
}

void find_panels(const AttentionArgs& a, const AttentionItem& item, const TileRows& rows, ChunkRange range,
                 const AttentionScratch& scratch, Panels* out) {
  const CacheView& c = a.cache;
  const int32_t* table = a.table + item.seq * a.table_stride;
  const int64_t head_offset = item.kv_head * c.head_bytes();
  const int64_t panel_bytes = int64_t(kPanel) * c.padded * c.item();
  int64_t first, unused;
  row_limits(a, rows, rows.first_position, &first, &unused);
  int i = 0;
  for (int64_t token = range.begin; token < range.end; token += kPanel, ++i) {
    char* copy = scratch.values + i * panel_bytes;
    if (c.block_size < kPanel) {
      char* keys = scratch.keys + i * panel_bytes;
      gather_small_blocks(a, table, token, first, rows.length, head_offset, keys, copy);
      out->keys[i] = keys;
      out->values[i] = copy;
    } else {
      const int64_t inside = token % c.block_size;
      const char* block = c.data + table[token / c.block_size] * c.block_bytes() + head_offset;
      const int64_t steps = c.dtype == DType::kFloat32 ? c.head_size : (c.head_size + 1) / 2;
      out->keys[i] = block + inside / kPanel * steps * 64;
      out->values[i] = block + c.side_bytes() + inside * c.padded * c.item();
    }
    if (token + kPanel > rows.length) {
      if (out->values[i] != copy) memcpy(copy, out->values[i], panel_bytes);
      zero_tail(copy, int(rows.length - token), c.padded, c.dtype);
      out->values[i] = copy;
    }
  }
}

constexpr int kFetchPanels = 4;

EC_INLINE void fetch_lines(const char* from, int64_t lines) {
  for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(from + line * 64, 0, 2);
}

EC_INLINE void fetch(const char* const* panels, int first, int n, int count, int64_t lines) {
  for (int i = first; i < first + n && i < count; ++i) fetch_lines(panels[i], lines);
}

// The keys that this thread needs next, brought near while the values of now are multiplied: what is computed is the
// same with them or without.
struct Ahead {
  const char* keys[kChunk / kPanel];
  int count = 0;
  int64_t lines;  // of one panel
};

void find_ahead(const AttentionArgs& a, const AttentionItem& item, int64_t chunk, Ahead* out) {
  const CacheView& c = a.cache;
  out->count = 0;
  if (c.block_size < kPanel || item.rows > kMaxRows) return;  // copied first, or read so often that it does not matter
  const ChunkRange range = chunk_range(a, rows_of(a, item), chunk);
  const int32_t* table = a.table + item.seq * a.table_stride;
  const int64_t steps = c.dtype == DType::kFloat32 ? c.head_size : (c.head_size + 1) / 2;
  out->lines = steps;
  for (int64_t token = range.begin; token < range.end; token += kPanel)
    out->keys[out->count++] = c.data + table[token / c.block_size] * c.block_bytes() + item.kv_head * c.head_bytes() +
                              token % c.block_size / kPanel * steps * 64;
  // The last panel's values are copied before anything else happens.
  const int64_t last = (range.end - 1) / kPanel * kPanel;
  if (out->count && last + kPanel > a.seq_lens[item.seq])
    fetch_lines(c.data + table[last / c.block_size] * c.block_bytes() + item.kv_head * c.head_bytes() + c.side_bytes() +
                    last % c.block_size * c.padded * c.item(),
                c.padded * c.item() * kPanel / 64);
}

template <class T, int R, int P>
void score_tile(const char* q, int64_t q_stride, const char* const* keys, int64_t steps, float* scores) {
  vf acc[R][P];
  EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = vset(0.0f);
  product_steps<T, R, P>(acc, q, q_stride, keys, 64, steps);
  EC_UNROLL for (int r = 0; r < R; ++r)
    EC_UNROLL for (int p = 0; p < P; ++p) vstore(scores + r * kChunk + p * kPanel, acc[r][p]);
}

// out[r][16 p + i] = sum over the panels' tokens of weights[r][t] * values[t][16 p + i].
template <class T, int R, int P>
void value_tile(const char* weights, const char* const* values, int panels, int64_t offset, int64_t v_step, float* out,
                int64_t out_stride, const Ahead* ahead) {
  vf acc[R][P];
  EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = vset(0.0f);
  constexpr int64_t kSteps = kPanel / Step<T>::kWidth;
  for (int i = 0; i < panels; ++i) {
    const char* b[P];
    EC_UNROLL for (int p = 0; p < P; ++p) b[p] = values[i] + offset + p * 64;
    if (ahead && i < ahead->count) fetch_lines(ahead->keys[i], ahead->lines);
    product_steps<T, R, P>(acc, weights + i * kPanel * int64_t(sizeof(T)), kChunk * 4, b, v_step, kSteps);
  }
  EC_UNROLL for (int r = 0; r < R; ++r)
    EC_UNROLL for (int p = 0; p < P; ++p) vstore(out + r * out_stride + p * kPanel, acc[r][p]);
}

typedef void (*ScoreFn)(const char*, int64_t, const char* const*, int64_t, float*);
typedef void (*ValueFn)(const char*, const char* const*, int, int64_t, int64_t, float*, int64_t, const Ahead*);

template <class T, int P> ScoreFn score_of_rows(int rows) {
  switch (rows) {
    case 1: return score_tile<T, 1, P>;
    case 2: return score_tile<T, 2, P>;
    case 3: return score_tile<T, 3, P>;
    case 4: return score_tile<T, kMaxRows < 4 ? 3 : 4, P>;
    case 5: return score_tile<T, kMaxRows < 5 ? 3 : 5, P>;
    default: return score_tile<T, kMaxRows < 6 ? 3 : 6, P>;
  }
}
template <class T, int P> ValueFn value_of_rows(int rows) {
  switch (rows) {
    case 1: return value_tile<T, 1, P>;
    case 2: return value_tile<T, 2, P>;
    case 3: return value_tile<T, 3, P>;
    case 4: return value_tile<T, kMaxRows < 4 ? 3 : 4, P>;
    case 5: return value_tile<T, kMaxRows < 5 ? 3 : 5, P>;
    default: return value_tile<T, kMaxRows < 6 ? 3 : 6, P>;
  }
}
template <class T> ScoreFn score_of(int rows, int panels) {
  switch (panels) {
    case 1: return score_of_rows<T, 1>(rows);
    case 2: return score_of_rows<T, kMaxPanels < 2 ? 1 : 2>(rows);
    case 3: return score_of_rows<T, kMaxPanels < 3 ? 1 : 3>(rows);
    default: return score_of_rows<T, kMaxPanels < 4 ? 1 : 4>(rows);
  }
}
template <class T> ValueFn value_of(int rows, int panels) {
  switch (panels) {
    case 1: return value_of_rows<T, 1>(rows);
    case 2: return value_of_rows<T, kMaxPanels < 2 ? 1 : 2>(rows);
    case 3: return value_of_rows<T, kMaxPanels < 3 ? 1 : 3>(rows);
    default: return value_of_rows<T, kMaxPanels < 4 ? 1 : 4>(rows);
  }
}

constexpr float kLog2E = 1.44269504088896341f;

// Scores to base-2 logits, and -inf where the row may not look. Returns the factor that is still to be applied to them.
float finish_scores(const AttentionArgs& a, const TileRows& rows, ChunkRange range, int64_t position, float slope,
                    float* scores) {
  int64_t first, last;
  row_limits(a, rows, position, &first, &last);
  const int panels = int((range.end - range.begin + kPanel - 1) / kPanel);
  const bool plain = !(a.soft_cap > 0) && slope == 0 && a.scale > 0;
  for (int i = 0; !plain && i < panels; ++i) {
    vf s = vload(scores + i * kPanel) * vset(a.scale);
    if (a.soft_cap > 0) s = vset(a.soft_cap) * vtanh(s / vset(a.soft_cap));
    s = fma(vset(slope), viota() + vset(float(range.begin + i * kPanel - position)), s);
    vstore(scores + i * kPanel, s * vset(kLog2E));
  }
  const auto mask = [&](int64_t token) {
    const int64_t low = first - token, high = last - token;
    const vu seen = lanes_between(low < 0 ? 0 : low > kPanel ? kPanel : int(low), high < 0 ? 0 : high > kPanel ? kPanel : int(high));
    float* at = scores + (token - range.begin);
    vstore(at, select(seen, vload(at), vset(kMinusInf)));
  };
  int64_t token = range.begin;
  for (; token < first && token < range.end; token += kPanel) mask(token);
  if (token < last / kPanel * kPanel) token = last / kPanel * kPanel;
  for (; token < range.end; token += kPanel) mask(token);
  return plain ? a.scale * kLog2E : 1.0f;
}

// Softmax of one row over the chunk: weights 2^(s - max) in place of the scores (an element of T each, from the row's
// start), their sum, the maximum.
template <class T>
void softmax_row(const AttentionArgs& a, const TileRows& rows, ChunkRange range, int64_t position, float slope,
                 float* scores, float* max_out, float* sum_out) {
  const int panels = int((range.end - range.begin + kPanel - 1) / kPanel);
  const float factor = finish_scores(a, rows, range, position, slope, scores);
  // Two chains each, by the parity of the panel: their order in the final sum does not matter.
  vf best0 = vset(kMinusInf), best1 = best0;
  int i = 0;
  for (; i + 1 < panels; i += 2) {
    best0 = vmax(vload(scores + i * kPanel), best0);
    best1 = vmax(vload(scores + i * kPanel + kPanel), best1);
  }
  if (i < panels) best0 = vmax(vload(scores + i * kPanel), best0);
  const float max = hmax(vmax(best0, best1)) * factor;
  // A row that sees nothing here has weights 2^(-inf - 0) = 0.
  const vf shift = vset(max > kMinusInf ? -max : 0.0f), scale = vset(factor);
  T* weights = reinterpret_cast<T*>(scores);
  const auto weigh = [&](int panel) {
    const vf p = vexp2<sizeof(T) == 4>(fma(vload(scores + panel * kPanel), scale, shift));
    vstore(weights + panel * kPanel, p);
    return p;
  };
  vf sum0 = vset(0.0f), sum1 = sum0;
  for (i = 0; i + 1 < panels; i += 2) {
    sum0 = sum0 + weigh(i);
    sum1 = sum1 + weigh(i + 1);
  }
  if (i < panels) sum0 = sum0 + weigh(i);
  *max_out = max;
  *sum_out = hsum(sum0 + sum1);
}

template <class T> void load_queries(const AttentionArgs& a, const AttentionItem& item, char* q) {
  const CacheView& c = a.cache;
  const int64_t bytes = c.head_size * int64_t(sizeof(T)), stride = c.padded * int64_t(sizeof(T));
  for (int r = 0; r < item.rows; ++r) {
    const int64_t flat = item.row + r, token = a.query_start[item.seq] + flat / a.group;
    const int64_t head = int64_t(item.kv_head) * a.group + flat % a.group;
    memcpy(q + r * stride, a.q + token * a.q_token + head * a.q_head, bytes);
    memset(q + r * stride + bytes, 0, stride - bytes);
  }
}

template <class T>
void chunk_attention(const AttentionArgs& a, const AttentionItem& item, const TileRows& rows, ChunkRange range,
                     const AttentionScratch& scratch, bool near, const Ahead& ahead, float* max, float* sum, float* out) {
  const CacheView& c = a.cache;
  Panels panels;
  find_panels(a, item, rows, range, scratch, &panels);
  const int count = int((range.end - range.begin + kPanel - 1) / kPanel);
  const int64_t q_stride = c.padded * int64_t(sizeof(T));
  const int64_t steps = (c.head_size + Step<T>::kWidth - 1) / Step<T>::kWidth;
  const int tiles = (item.rows + kMaxRows - 1) / kMaxRows;
  // With one pass of rows the cache streams from memory, in pieces too short for the hardware to foresee.
  const bool stream = tiles == 1;
  if (stream && !near) fetch(panels.keys, 0, kFetchPanels, count, steps);
  const int64_t value_lines = c.padded * int64_t(sizeof(T)) * kPanel / 64;
  const int later = near ? count * 2 / 3 : count;  // values from here on are fetched during the softmax
  for (int i = 0; i < count; i += kMaxPanels) {
    if (stream) {
      if (!near) fetch(panels.keys, i + kFetchPanels, kMaxPanels, count, steps);
      fetch(panels.values, i, kMaxPanels, later, value_lines);
    }
    const int n = count - i < kMaxPanels ? count - i : kMaxPanels;
    for (int t = 0; t < tiles; ++t) {
      const int r0 = item.rows * t / tiles, r1 = item.rows * (t + 1) / tiles;
      score_of<T>(r1 - r0, n)(scratch.q + r0 * q_stride, q_stride, panels.keys + i, steps,
                              scratch.scores + r0 * kChunk + i * kPanel);
    }
  }
  for (int r = 0; r < item.rows; ++r) {
    const int64_t flat = item.row + r, head = int64_t(item.kv_head) * a.group + flat % a.group;
    if (stream) fetch(panels.values, later + (count - later) * r / item.rows, (count - later + item.rows - 1) / item.rows, count, value_lines);
    softmax_row<T>(a, rows, range, rows.context + flat / a.group, a.alibi ? a.alibi[head] : 0.0f,
                   scratch.scores + r * kChunk, max + r, sum + r);
  }
  const int64_t v_step = c.padded * int64_t(sizeof(T)) * Step<T>::kWidth;
  for (int d = 0; d < c.padded / kPanel; d += kMaxPanels) {
    const int n = c.padded / kPanel - d < kMaxPanels ? c.padded / kPanel - d : kMaxPanels;
    for (int t = 0; t < tiles; ++t) {
      const int r0 = item.rows * t / tiles, r1 = item.rows * (t + 1) / tiles;
      value_of<T>(r1 - r0, n)(reinterpret_cast<const char*>(scratch.scores + r0 * kChunk), panels.values, count, d * 64, v_step,
                              out + r0 * c.padded + d * kPanel, c.padded, d == 0 && t == 0 ? &ahead : nullptr);
    }
  }
  fetch(ahead.keys, count, ahead.count, ahead.count, ahead.lines);
}

// Fold one chunk's (max, sum, out) of each row into the running ones.
void merge_chunk(const AttentionArgs& a, int rows, const float* max, const float* sum, const float* out, float* total_max,
                 float* total_sum, float* total) {
  constexpr int kRows = (kTileRows + kLanes - 1) / kLanes * kLanes;
  const int padded = a.cache.padded;
  alignas(64) float top[kRows], old_scale[kRows], new_scale[kRows];
  for (int r = 0; r < kRows; ++r) {
    const bool used = r < rows && max[r] > kMinusInf;
    top[r] = used && max[r] > total_max[r] ? max[r] : r < rows ? total_max[r] : 0.0f;
    old_scale[r] = used ? total_max[r] - top[r] : 0.0f;
    new_scale[r] = used ? max[r] - top[r] : kMinusInf;
  }
  for (int r = 0; r < kRows; r += kLanes) {
    vstore(old_scale + r, vexp2<true>(vload(old_scale + r)));
    vstore(new_scale + r, vexp2<true>(vload(new_scale + r)));
  }
  for (int r = 0; r < rows; ++r) {
    if (!(max[r] > kMinusInf)) continue;
    total_sum[r] = total_sum[r] * old_scale[r] + sum[r] * new_scale[r];
    total_max[r] = top[r];
    float* to = total + r * padded;
    const vf keep = vset(old_scale[r]), add = vset(new_scale[r]);
    for (int d = 0; d < padded; d += kLanes) vstore(to + d, fma(vload(to + d), keep, vload(out + r * padded + d) * add));
  }
}

template <class T>
void write_rows(const AttentionArgs& a, const AttentionItem& item, const float* max, const float* sum, const float* total) {
  const CacheView& c = a.cache;
  for (int r = 0; r < item.rows; ++r) {
    const int64_t flat = item.row + r, token = a.query_start[item.seq] + flat / a.group;
    const int64_t head = int64_t(item.kv_head) * a.group + flat % a.group;
    float scale = 1.0f, weight = sum[r];
    if (a.sinks) {
      // A sink is one more score without a value.
      const float sink = a.sinks[head] * kLog2E, top = sink > max[r] ? sink : max[r];
      alignas(64) float terms[kLanes] = {max[r] - top, sink - top};
      vstore(terms, vexp2<true>(vload(terms)));
      scale = terms[0];
      weight = sum[r] * terms[0] + terms[1];
    }
    const vf factor = vset(weight > 0 ? scale / weight : 0.0f);
    T* out = reinterpret_cast<T*>(a.out + token * a.out_token + head * a.out_head);
    for (int d = 0; d < c.head_size; d += kLanes)
      vstore_n(out + d, vload(total + r * c.padded + d) * factor, c.head_size - d);
  }
}

void write_result(const AttentionArgs& a, const AttentionItem& item, const float* max, const float* sum, const float* total) {
  if (a.cache.dtype == DType::kFloat32) write_rows<float>(a, item, max, sum, total);
  else write_rows<bf16>(a, item, max, sum, total);
}

void start_total(const AttentionArgs& a, int rows, float* max, float* sum, float* total) {
  for (int r = 0; r < rows; ++r) {
    max[r] = kMinusInf;
    sum[r] = 0;
  }
  memset(total, 0, int64_t(rows) * a.cache.padded * 4);
}

void attention(const AttentionArgs& a, const AttentionItem& item, const AttentionScratch& scratch, float* partial,
               bool near, const AttentionItem* next) {
  const TileRows rows = rows_of(a, item);
  const bool f32 = a.cache.dtype == DType::kFloat32;
  if (f32) load_queries<float>(a, item, scratch.q);
  else load_queries<bf16>(a, item, scratch.q);
  const auto compute = f32 ? chunk_attention<float> : chunk_attention<bf16>;
  Ahead ahead;
  if (partial) {
    if (next) find_ahead(a, *next, next->chunk, &ahead);
    compute(a, item, rows, chunk_range(a, rows, item.chunk), scratch, near, ahead, partial, partial + kTileRows,
            partial + 2 * kTileRows);
    return;
  }
  float max[kTileRows], sum[kTileRows], total_max[kTileRows], total_sum[kTileRows];
  start_total(a, item.rows, total_max, total_sum, scratch.total);
  for (int64_t chunk = item.chunk; chunk < item.chunk_end; ++chunk) {
    const bool last = chunk + 1 == item.chunk_end;
    ahead.count = 0;
    if (!last) find_ahead(a, item, chunk + 1, &ahead);
    else if (next) find_ahead(a, *next, next->chunk, &ahead);
    compute(a, item, rows, chunk_range(a, rows, chunk), scratch, near, ahead, max, sum, scratch.chunk);
    near = ahead.count > 0;
    merge_chunk(a, item.rows, max, sum, scratch.chunk, total_max, total_sum, scratch.total);
  }
  write_result(a, item, total_max, total_sum, scratch.total);
}

void attention_merge(const AttentionArgs& a, const AttentionItem& item, const AttentionScratch& scratch,
                     const float* partials, int64_t stride) {
  float total_max[kTileRows], total_sum[kTileRows];
  start_total(a, item.rows, total_max, total_sum, scratch.total);
  for (int64_t chunk = item.chunk; chunk < item.chunk_end; ++chunk) {
    const float* part = partials + (chunk - item.chunk) * stride;
    merge_chunk(a, item.rows, part, part + kTileRows, part + 2 * kTileRows, total_max, total_sum, scratch.total);
  }
  write_result(a, item, total_max, total_sum, scratch.total);
}

}  // namespace
}  // namespace EC_ISA
