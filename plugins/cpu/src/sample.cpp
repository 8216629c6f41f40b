// Sampling without a full sort. Idea: most of a vocabulary has next to no mass, so a vectorised pass collects the
// candidates above a threshold relative to the maximum, and only when they cannot hold the wanted set is the threshold
// lowered. Among candidates a partial selection finds the kept prefix of the order (larger logit first, then smaller id).
#include <algorithm>
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
  std::vector<int32_t> ids;
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

int64_t draw_kept(const Row& row, Scratch& s, int64_t kept) {
  std::sort(s.ids.begin(), s.ids.begin() + kept);
  double total = 0, mass = 0;
  for (int64_t i = 0; i < kept; ++i) total += double(s.probs[size_t(s.ids[size_t(i)])]);
  const double target = row.uniform * total;
  for (int64_t i = 0; i < kept; ++i) {
    mass += double(s.probs[size_t(s.ids[size_t(i)])]);
    if (mass > target) return s.ids[size_t(i)];
  }
  return s.ids[size_t(kept - 1)];
}

// Order the front of `ids` until its mass reaches `wanted`; returns how many that takes.
int64_t prefix_of_mass(const Row& row, Scratch& s, int64_t count, double wanted) {
  const float* logits = row.logits;
  const auto before = [logits](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  double mass = 0;
  int64_t sorted = 0;
  for (int64_t size = 64; sorted < count; size *= 4) {
    const int64_t end = std::min(count, sorted + size);
    const auto front = s.ids.begin() + sorted;
    if (end < count) std::nth_element(front, s.ids.begin() + end, s.ids.begin() + count, before);
    std::sort(front, s.ids.begin() + end, before);
    for (; sorted < end; ++sorted) {
      mass += double(s.probs[size_t(s.ids[size_t(sorted)])]);
      if (mass >= wanted) return sorted + 1;
    }
  }
  return count;
}

int64_t sample_row(const Isa& isa, const Row& row, Scratch& s) {
  const int64_t best = isa.arg_max(row.logits, row.vocab);
  if (best < 0) return 0;
  if (!(row.temperature > 0)) return best;
  const float top = row.logits[best];
  if (!(top < std::numeric_limits<float>::infinity())) return best;
  s.probs.resize(size_t(row.vocab));
  s.sums.resize(size_t((row.vocab + kSumBlock - 1) / kSumBlock));
  isa.exp_row(row.logits, s.probs.data(), s.sums.data(), row.vocab, top, row.temperature);
  const bool limited = row.top_k > 0 && row.top_k < row.vocab, nucleus = row.top_p < 1.0f;
  if (!limited && !nucleus && !(row.min_p > 0)) return draw_all(row, s);
  s.ids.resize(size_t(row.vocab) + kPanel);
  const double total = std::accumulate(s.sums.begin(), s.sums.end(), 0.0);
  int64_t count = 0;
  if (!limited && !nucleus) {
    count = isa.collect(s.probs.data(), row.vocab, row.min_p, s.ids.data());
    return draw_kept(row, s, count);
  }
  for (float threshold : {3.4e-4f, 1.2e-7f, 0.0f}) {  // exp(-8), exp(-16), all
    count = isa.collect(s.probs.data(), row.vocab, threshold, s.ids.data());
    if (limited ? count >= row.top_k : count == row.vocab) break;
    if (!limited) {
      double mass = 0;
      for (int64_t i = 0; i < count; ++i) mass += double(s.probs[size_t(s.ids[size_t(i)])]);
      if (mass >= double(row.top_p) * total) break;
    }
  }
  double mass = total;
  if (limited && count > row.top_k) {
    const float* logits = row.logits;
    std::nth_element(s.ids.begin(), s.ids.begin() + row.top_k, s.ids.begin() + count, [logits](int32_t a, int32_t b) {
      return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    });
    count = row.top_k;
  }
  if (limited && nucleus) {
    // Summed in id order, so that the mass does not depend on how the selection left the ids.
    std::sort(s.ids.begin(), s.ids.begin() + count);
    mass = 0;
    for (int64_t i = 0; i < count; ++i) mass += double(s.probs[size_t(s.ids[size_t(i)])]);
  }
  int64_t kept = nucleus ? prefix_of_mass(row, s, count, double(row.top_p) * mass) : count;
  if (row.min_p > 0) {
    const auto end = std::partition(s.ids.begin(), s.ids.begin() + kept,
                                    [&](int32_t id) { return s.probs[size_t(id)] >= row.min_p; });
    kept = std::max<int64_t>(1, end - s.ids.begin());
  }
  return draw_kept(row, s, kept);
}

}  // namespace

void run_sample(Pool& pool, const Isa& isa, const SampleArgs& a) {
  Pieces pieces(a.rows, pool.threads(), 1);
  const auto job = [&] {
    thread_local Scratch scratch;
    for (int64_t begin, end; pieces.next(&begin, &end);)
      for (int64_t r = begin; r < end; ++r)
        a.ids[r] = sample_row(isa, Row{a.logits + r * a.stride, a.vocab, a.temperature[r], a.top_p[r], a.min_p[r], a.top_k[r],
                                       a.uniform[r]}, scratch);
  };
  if (a.rows == 1) job();
  else pool.run(job);
}
