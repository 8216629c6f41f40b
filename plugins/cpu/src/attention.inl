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
  constexpr int64_t unit = 4;  // bytes of one token in one step of a key panel: a float, two bfloat16 or four bytes
  const int64_t steps = c.key_steps();
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

// Scales of the panel at `token` of the sequence; 0 where nothing was written.
void gather_scales(const AttentionArgs& a, const int32_t* table, int64_t token, int64_t first, int64_t length, int64_t head_offset,
                   float* keys, float* values) {
  const CacheView& c = a.cache;
  const int64_t width = c.block_size < kPanel ? c.block_size : kPanel;
  for (int64_t part = 0; part < kPanel; part += width) {
    const int64_t start = token + part, left = start + width <= first ? 0 : length - start;
    const int64_t valid = left < 0 ? 0 : left > width ? width : left;
    memset(keys + part, 0, width * 4);
    memset(values + part, 0, width * 4);
    if (!valid) continue;
    const char* from = c.data + table[start / c.block_size] * c.block_bytes() + head_offset + c.code_bytes() + start % c.block_size * 4;
    memcpy(keys + part, from, valid * 4);
    memcpy(values + part, from + c.side_bytes(), valid * 4);
  }
}

template <class T> void expand_panel(const CacheView& c, const char* keys, const char* values, char* to_keys, char* to_values) {
  const int64_t steps = c.key_steps();
  if (c.stored == Stored::kE4M3) {
    expand_keys<Stored::kE4M3, T>(keys, steps, to_keys);
    expand_values<Stored::kE4M3, T>(values, c.padded, to_values);
  } else {
    expand_keys<Stored::kE5M2, T>(keys, steps, to_keys);
    expand_values<Stored::kE5M2, T>(values, c.padded, to_values);
  }
}

void find_panels(const AttentionArgs& a, const AttentionItem& item, const TileRows& rows, ChunkRange range,
                 const AttentionScratch& scratch, Panels* out) {
  const CacheView& c = a.cache;
  const int32_t* table = a.table + item.seq * a.table_stride;
  const int64_t head_offset = item.kv_head * c.head_bytes();
  const int64_t panel_bytes = int64_t(kPanel) * c.padded * c.wide();
  const bool bytes = c.stored == Stored::kInt8, floats = !bytes && c.stored != Stored::kPlain;
  int64_t first, unused;
  row_limits(a, rows, rows.first_position, &first, &unused);
  int i = 0;
  for (int64_t token = range.begin; token < range.end; token += kPanel, ++i) {
    char* const copied_keys = scratch.keys + i * panel_bytes;
    char* const copy = scratch.values + i * panel_bytes;
    if (c.block_size < kPanel) {
      char* keys = floats ? scratch.raw : copied_keys;
      char* values = floats ? scratch.raw + kPanel * c.padded : copy;
      gather_small_blocks(a, table, token, first, rows.length, head_offset, keys, values);
      out->keys[i] = keys;
      out->values[i] = values;
    } else {
      const int64_t inside = token % c.block_size;
      const char* block = c.data + table[token / c.block_size] * c.block_bytes() + head_offset;
      out->keys[i] = block + inside / kPanel * c.key_steps() * 64;
      out->values[i] = block + c.side_bytes() + inside * c.padded * c.item();
    }
    if (bytes) {  // a byte is a number whatever its bits: only scales of what was not written must be silenced
      gather_scales(a, table, token, first, rows.length, head_offset, scratch.scales + i * kPanel, scratch.scales + kChunk + i * kPanel);
      continue;
    }
    if (floats) {
      if (c.dtype == DType::kFloat32) expand_panel<float>(c, out->keys[i], out->values[i], copied_keys, copy);
      else expand_panel<bf16>(c, out->keys[i], out->values[i], copied_keys, copy);
      out->keys[i] = copied_keys;
      out->values[i] = copy;
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

// As product_steps, with P lines of `ahead` fetched a step.
template <class T, int R, int P>
EC_INLINE void steps_ahead(vf (&acc)[R][P], const char* x, int64_t x_stride, const char* const* b, int64_t b_step, int64_t steps,
                           Ahead* ahead) {
  if (!ahead) return product_steps<T, R, P>(acc, x, x_stride, b, b_step, steps);
  for (int64_t s = 0; s < steps; ++s) {
    decltype(Step<T>::load(b[0])) w[P];
    EC_UNROLL for (int p = 0; p < P; ++p) w[p] = Step<T>::load(b[p] + s * b_step);
    ahead->step<P>();
    EC_UNROLL for (int r = 0; r < R; ++r) {
      typename Step<T>::Scalar a = Step<T>::splat(x + r * x_stride + s * 4);
      EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = Step<T>::dot(acc[r][p], a, w[p]);
    }
  }
}

template <class T, int R, int P>
void score_tile(const char* q, int64_t q_stride, const char* const* keys, int64_t steps, float* scores, Ahead* ahead) {
  vf acc[R][P];
  EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = vset(0.0f);
  steps_ahead<T, R, P>(acc, q, q_stride, keys, 64, steps, ahead);
  EC_UNROLL for (int r = 0; r < R; ++r)
    EC_UNROLL for (int p = 0; p < P; ++p) vstore(scores + r * kChunk + p * kPanel, acc[r][p]);
}

// out[r][16 p + i] = sum over the panels' tokens of weights[r][t] * values[t][16 p + i].
template <class T, int R, int P>
void value_tile(const char* weights, const char* const* values, int panels, int64_t offset, int64_t v_step, float* out,
                int64_t out_stride, Ahead* ahead) {
  vf acc[R][P];
  EC_UNROLL for (int r = 0; r < R; ++r) EC_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = vset(0.0f);
  constexpr int64_t kSteps = kPanel / Step<T>::kWidth;
  for (int i = 0; i < panels; ++i) {
    const char* b[P];
    EC_UNROLL for (int p = 0; p < P; ++p) b[p] = values[i] + offset + p * 64;
    steps_ahead<T, R, P>(acc, weights + i * kPanel * int64_t(sizeof(T)), kChunk * 4, b, v_step, kSteps,
                         i % kSoftmaxShare != kSoftmaxShare - 1 ? ahead : nullptr);
  }
  EC_UNROLL for (int r = 0; r < R; ++r)
    EC_UNROLL for (int p = 0; p < P; ++p) vstore(out + r * out_stride + p * kPanel, acc[r][p]);
}

typedef void (*ScoreFn)(const char*, int64_t, const char* const*, int64_t, float*, Ahead*);
typedef void (*ValueFn)(const char*, const char* const*, int, int64_t, int64_t, float*, int64_t, Ahead*);
typedef void (*ByteScoreFn)(const char*, int64_t, const ByteRow*, const char* const*, int64_t, const float*, float*, Ahead*);
typedef void (*ByteValueFn)(const char*, const ByteRow*, const char* const*, int, int64_t, int64_t, float*, int64_t, Ahead*);

template <int P> ByteScoreFn score_bytes_of_rows(int rows) {
  return rows == 1 ? score_bytes<1, P> : rows == 2 ? score_bytes<kByteRows < 2 ? 1 : 2, P> : score_bytes<kByteRows, P>;
}
template <int P> ByteValueFn value_bytes_of_rows(int rows) {
  return rows == 1 ? value_bytes<1, P> : rows == 2 ? value_bytes<kByteRows < 2 ? 1 : 2, P> : value_bytes<kByteRows, P>;
}
ByteScoreFn score_bytes_of(int rows, int panels) {
  switch (panels) {
    case 1: return score_bytes_of_rows<1>(rows);
    case 2: return score_bytes_of_rows<kMaxPanels < 2 ? 1 : 2>(rows);
    case 3: return score_bytes_of_rows<kMaxPanels < 3 ? 1 : 3>(rows);
    default: return score_bytes_of_rows<kMaxPanels < 4 ? 1 : 4>(rows);
  }
}
ByteValueFn value_bytes_of(int rows, int panels) {
  switch (panels) {
    case 1: return value_bytes_of_rows<1>(rows);
    case 2: return value_bytes_of_rows<kMaxPanels < 2 ? 1 : 2>(rows);
    case 3: return value_bytes_of_rows<kMaxPanels < 3 ? 1 : 3>(rows);
    default: return value_bytes_of_rows<kMaxPanels < 4 ? 1 : 4>(rows);
  }
}

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
template <class T, bool Fine = sizeof(T) == 4>
void softmax_row(const AttentionArgs& a, const TileRows& rows, ChunkRange range, int64_t position, float slope,
                 float* scores, float* max_out, float* sum_out, Ahead* ahead, int lines) {
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
    const vf p = vexp2<Fine>(fma(vload(scores + panel * kPanel), scale, shift));
    vstore(weights + panel * kPanel, p);
    if (ahead) ahead->fetch(lines);
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

// The same with weights times their values' scales, as bytes in place of the scores.
ByteRow softmax_bytes(const AttentionArgs& a, const TileRows& rows, ChunkRange range, int64_t position, float slope, const float* scales,
                      float* scores, float* max_out, float* sum_out, Ahead* ahead, int lines) {
  if (a.cache.dtype == DType::kFloat32) softmax_row<float>(a, rows, range, position, slope, scores, max_out, sum_out, ahead, lines);
  else softmax_row<float, false>(a, rows, range, position, slope, scores, max_out, sum_out, ahead, lines);
  const int n = int((range.end - range.begin + kPanel - 1) / kPanel) * kPanel;
  vf largest = vset(0.0f);
  vu bad = vsetu(0);
  for (int i = 0; i < n; i += kLanes) {
    const vf weight = vload(scores + i);
    const vu seen = unequal(weight, vset(0.0f));
    const vf scaled = select(seen, weight * vload(scales + i), vset(0.0f));
    bad = bad | unequal(scaled, scaled);
    largest = vmax(scaled, largest);
    vstore(scores + i, scaled);
  }
  alignas(64) char bytes[2 * kChunk];
  const ByteRow row = split_bytes(scores, n, any(bad) ? __builtin_nanf("") : hmax(largest), bytes, bytes + kChunk);
  memcpy(scores, bytes, size_t(n));
  memcpy(reinterpret_cast<char*>(scores) + kChunk, bytes + kChunk, size_t(n));
  return row;
}

template <class T> void load_queries(const AttentionArgs& a, const AttentionItem& item, const AttentionScratch& scratch) {
  const CacheView& c = a.cache;
  const int64_t bytes = c.head_size * int64_t(sizeof(T)), stride = c.padded * int64_t(sizeof(T));
  for (int r = 0; r < item.rows; ++r) {
    const int64_t flat = item.row + r, token = a.query_start[item.seq] + flat / a.group;
    const int64_t head = int64_t(item.kv_head) * a.group + flat % a.group;
    const char* from = a.q + token * a.q_token + head * a.q_head;
    if (c.stored != Stored::kInt8) {
      memcpy(scratch.q + r * stride, from, bytes);
      memset(scratch.q + r * stride + bytes, 0, stride - bytes);
      continue;
    }
    const T* x = reinterpret_cast<const T*>(from);
    float* row = scratch.total;  // not in use yet
    vf largest = vset(0.0f);
    vu bad = vsetu(0);
    for (int d = 0; d < c.padded; d += kLanes) {
      const vf v = d < c.head_size ? vload_n(x + d, c.head_size - d) : vset(0.0f);
      largest = vmax(vabs(v), largest);
      bad = bad | unequal(v, v);
      vstore(row + d, v);
    }
    char* to = scratch.q + int64_t(r) * 2 * c.padded;
    scratch.rows[r] = split_bytes(row, c.padded, any(bad) ? __builtin_nanf("") : hmax(largest), to, to + c.padded);
  }
}

// Scores, softmax and values of one chunk. `T` is the activations' type; bytes multiply as they are.
template <class T>
void chunk_attention(const AttentionArgs& a, const AttentionItem& item, const TileRows& rows, ChunkRange range,
                     const AttentionScratch& scratch, bool near, Ahead* ahead, float* max, float* sum, float* out) {
  const CacheView& c = a.cache;
  const bool bytes = c.stored == Stored::kInt8;
  const int count = int((range.end - range.begin + kPanel - 1) / kPanel);
  const int most = bytes ? kByteRows : kMaxRows, tiles = (item.rows + most - 1) / most;
  const int64_t q_stride = c.padded * int64_t(sizeof(T));
  const int64_t steps = bytes ? c.key_steps() : (c.head_size + Step<T>::kWidth - 1) / Step<T>::kWidth;
  Panels panels;
  find_panels(a, item, rows, range, scratch, &panels);
  // Few rows wait for the cache, which comes in pieces too short for the hardware to foresee. Where nobody has fetched
  // it, it is fetched some panels ahead.
  const bool copied = c.stored == Stored::kE4M3 || c.stored == Stored::kE5M2 || c.block_size < kPanel;
  const bool stream = item.rows <= kStreamRows && !near && !copied;
  if (stream) fetch(panels.keys, 0, kFetchPanels, count, steps);
  const int64_t value_lines = c.padded * c.item() * kPanel / 64;
  for (int i = 0; i < count; i += kMaxPanels) {
    if (stream) {
      fetch(panels.keys, i + kFetchPanels, kMaxPanels, count, steps);
      fetch(panels.values, i, kMaxPanels, count, value_lines);
    }
    const int n = count - i < kMaxPanels ? count - i : kMaxPanels;
    for (int t = 0; t < tiles; ++t) {
      const int r0 = item.rows * t / tiles, r1 = item.rows * (t + 1) / tiles;
      const bool fetches = ahead && t == 0 && i / kMaxPanels % kSoftmaxShare != kSoftmaxShare - 1;
      Ahead* const lines = fetches ? ahead : nullptr;
      float* to = scratch.scores + r0 * kChunk + i * kPanel;
      if (bytes)
        score_bytes_of(r1 - r0, n)(scratch.q + int64_t(r0) * 2 * c.padded, c.padded, scratch.rows + r0, panels.keys + i, steps,
                                   scratch.scales + i * kPanel, to, lines);
      else score_of<T>(r1 - r0, n)(scratch.q + r0 * q_stride, q_stride, panels.keys + i, steps, to, lines);
    }
  }
  ByteRow* const weights = scratch.rows + kTileRows;
  // A thread has only so many lines on their way at a time, so they are spread: a quarter of them here, a few a panel.
  const int lines = ahead ? int((count * steps + count * value_lines) / kSoftmaxShare / (item.rows * count)) + 1 : 0;
  for (int r = 0; r < item.rows; ++r) {
    const int64_t flat = item.row + r, head = int64_t(item.kv_head) * a.group + flat % a.group, position = rows.context + flat / a.group;
    const float slope = a.alibi ? a.alibi[head] : 0.0f;
    float* row = scratch.scores + r * kChunk;
    if (bytes) weights[r] = softmax_bytes(a, rows, range, position, slope, scratch.scales + kChunk, row, max + r, sum + r, ahead, lines);
    else softmax_row<T>(a, rows, range, position, slope, row, max + r, sum + r, ahead, lines);
  }
  const int64_t v_step = bytes ? int64_t(c.padded) * 4 : c.padded * int64_t(sizeof(T)) * Step<T>::kWidth;
  for (int d = 0; d < c.padded / kPanel; d += kMaxPanels) {
    const int n = c.padded / kPanel - d < kMaxPanels ? c.padded / kPanel - d : kMaxPanels;
    for (int t = 0; t < tiles; ++t) {
      const int r0 = item.rows * t / tiles, r1 = item.rows * (t + 1) / tiles;
      const char* row = reinterpret_cast<const char*>(scratch.scores + r0 * kChunk);
      float* to = out + r0 * c.padded + d * kPanel;
      if (bytes) value_bytes_of(r1 - r0, n)(row, weights + r0, panels.values, count, d * 64, v_step, to, c.padded, t == 0 ? ahead : nullptr);
      else value_of<T>(r1 - r0, n)(row, panels.values, count, d * 64, v_step, to, c.padded, t == 0 ? ahead : nullptr);
    }
  }
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
               bool near, Ahead* ahead) {
  const TileRows rows = rows_of(a, item);
  const bool f32 = a.cache.dtype == DType::kFloat32;
  if (f32) load_queries<float>(a, item, scratch);
  else load_queries<bf16>(a, item, scratch);
  const auto compute = f32 ? chunk_attention<float> : chunk_attention<bf16>;
  if (partial) {
    compute(a, item, rows, chunk_range(a, rows, item.chunk), scratch, near, ahead, partial, partial + kTileRows,
            partial + 2 * kTileRows);
    return;
  }
  float max[kTileRows], sum[kTileRows], total_max[kTileRows], total_sum[kTileRows];
  start_total(a, item.rows, total_max, total_sum, scratch.total);
  for (int64_t chunk = item.chunk; chunk < item.chunk_end; ++chunk) {
    compute(a, item, rows, chunk_range(a, rows, chunk), scratch, near, ahead, max, sum, scratch.chunk);
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
