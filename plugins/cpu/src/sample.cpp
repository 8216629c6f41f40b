// Sampling without a full sort. Idea: most of a vocabulary has next to no mass, so a vectorised pass collects the
// candidates above a threshold relative to the maximum, and only when they cannot hold the wanted set is the threshold
// lowered. Among candidates a histogram over probabilities finds where the kept front of the order (larger logit first,
// then smaller id) ends, and only that bucket is sorted. Ids stay in id order throughout, as the draw wants them.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "drivers.hpp"

namespace {

struct Row {
  const float* logits;
  int64_t vocab;
  float temperature, top_p, min_p;
  int64_t top_k;  // 0: all
  double uniform;
};

struct Scratch {
  std::vector<float> probs;
  std::vector<double> sums;
  std::vector<int32_t> ids, edge;
};

// First id, in id order, at which the running mass passes the target; the last with any mass when rounding kept it below.
int64_t draw_all(const Row& row, const Scratch& s) {
  const int64_t blocks = int64_t(s.sums.size());
  const double target = row.uniform * std::accumulate(s.sums.begin(), s.sums.end(), 0.0);
  double mass = 0;
  int64_t block = 0, last = -1;
  while (block < blocks - 1 && mass + s.sums[size_t(block)] <= target) mass += s.sums[size_t(block++)];
  for (int64_t i = block * kSumBlock; i < row.vocab; ++i) {
    mass += double(s.probs[size_t(i)]);
    if (mass > target) return i;
    if (s.probs[size_t(i)] > 0) last = i;
  }
  for (int64_t i = block * kSumBlock; last < 0 && i-- > 0;)
    if (s.probs[size_t(i)] > 0) last = i;
  return last;
}

int64_t draw_kept(const Row& row, const Scratch& s) {
  double total = 0, mass = 0;
  for (int32_t id : s.ids) total += double(s.probs[size_t(id)]);
  const double target = row.uniform * total;
  for (int32_t id : s.ids) {
    mass += double(s.probs[size_t(id)]);
    if (mass > target) return id;
  }
  return s.ids.back();
}

// Buckets of falling probability, eight an octave.
constexpr int kBuckets = 256;
int bucket_of(float prob) {
  uint32_t bits;
  std::memcpy(&bits, &prob, 4);
  const int bucket = int((0x3f800000 - int64_t(bits)) >> 20);
  return std::clamp(bucket, 0, kBuckets - 1);
}

// Keep, of the ids (in id order), the first of the order "larger logit, then smaller id": `count` of them, or as many as
// reach `mass`. Only the bucket in which the limit falls is sorted.
void keep_front(const Row& row, Scratch& s, int64_t count, double mass) {
  int64_t counts[kBuckets] = {};
  double masses[kBuckets] = {};
  for (int32_t id : s.ids) {
    const int b = bucket_of(s.probs[size_t(id)]);
    ++counts[b];
    masses[b] += double(s.probs[size_t(id)]);
  }
  int edge = 0;
  for (; edge < kBuckets - 1 && counts[edge] < count && masses[edge] < mass; ++edge) {
    count -= counts[edge];
    mass -= masses[edge];
  }
  const float* logits = row.logits;
  const auto before = [logits](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  s.edge.clear();
  for (int32_t id : s.ids)
    if (bucket_of(s.probs[size_t(id)]) == edge) s.edge.push_back(id);
  if (s.edge.empty()) return;  // rounding: everything is needed
  std::sort(s.edge.begin(), s.edge.end(), before);
  size_t last = 0;
  for (double sum = 0; last + 1 < s.edge.size(); ++last) {
    sum += double(s.probs[size_t(s.edge[last])]);
    if (int64_t(last) + 1 >= count || sum >= mass) break;
  }
  const int32_t final_id = s.edge[last];
  s.ids.erase(std::remove_if(s.ids.begin(), s.ids.end(), [&](int32_t id) { return before(final_id, id); }), s.ids.end());
}

double mass_of(const Scratch& s) {
  double mass = 0;
  for (int32_t id : s.ids) mass += double(s.probs[size_t(id)]);
  return mass;
}

int64_t sample_row(const Isa& isa, const Row& row, Scratch& s) {
  const int64_t best = isa.arg_max(row.logits, row.vocab);
  if (best < 0) return -1;
  if (!(row.temperature > 0)) return best;
  const float top = row.logits[best];
  s.probs.resize(size_t(row.vocab));
  s.sums.resize(size_t((row.vocab + kSumBlock - 1) / kSumBlock));
  isa.exp_row(row.logits, s.probs.data(), s.sums.data(), row.vocab, top, row.temperature);
  const bool limited = row.top_k > 0 && row.top_k < row.vocab, nucleus = row.top_p < 1.0f;
  if (!limited && !nucleus && !(row.min_p > 0)) return draw_all(row, s);
  const double wanted = double(row.top_p) * std::accumulate(s.sums.begin(), s.sums.end(), 0.0);
  const float floor = row.min_p > 1.0f ? 1.0f : row.min_p;
  for (float threshold : {3.4e-4f, 1.2e-7f, 0.0f}) {  // exp(-8), exp(-16), all
    if (!limited && !nucleus) threshold = floor;
    s.ids.resize(size_t(row.vocab) + kPanel);
    s.ids.resize(size_t(isa.collect(s.probs.data(), row.vocab, threshold, s.ids.data())));
    if (threshold <= floor && !nucleus && !limited) return draw_kept(row, s);
    if (int64_t(s.ids.size()) == row.vocab) break;
    if (limited ? int64_t(s.ids.size()) >= row.top_k : mass_of(s) >= wanted) break;
  }
  constexpr double kNoMass = std::numeric_limits<double>::infinity();
  constexpr int64_t kNoCount = std::numeric_limits<int64_t>::max();
  if (limited && int64_t(s.ids.size()) > row.top_k) keep_front(row, s, row.top_k, kNoMass);
  if (nucleus) keep_front(row, s, kNoCount, limited ? double(row.top_p) * mass_of(s) : wanted);
  if (floor > 0)
    s.ids.erase(std::remove_if(s.ids.begin(), s.ids.end(), [&](int32_t id) { return s.probs[size_t(id)] < floor; }), s.ids.end());
  return s.ids.empty() ? best : draw_kept(row, s);
}

}  // namespace

void run_sample(Pool& pool, const Isa& isa, const SampleArgs& a) {
  Pieces pieces(a.rows, pool.threads(), 1);
  const auto job = [&](int) {
    thread_local Scratch scratch;
    for (int64_t begin, end; pieces.next(&begin, &end);)
      for (int64_t r = begin; r < end; ++r)
        a.ids[r] = sample_row(isa, Row{a.logits + r * a.stride, a.vocab, a.temperature[r], a.top_p[r], a.min_p[r], a.top_k[r],
                                       a.uniform[r]}, scratch);
  };
  if (a.rows == 1) job(0);
  else pool.run(job);
}
