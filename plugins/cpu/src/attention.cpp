// Cutting a mixed batch into tiles for the attention kernel.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "drivers.hpp"

namespace {


void check_tables(const AttentionArgs& a, const AttentionBatch& b) {
  int32_t previous = a.query_start[0];
  if (previous != 0) throw std::invalid_argument("query_start_loc must begin with 0");
  for (int64_t i = 0; i < b.sequences; ++i) {
    const int32_t next = a.query_start[i + 1], queries = next - previous, length = a.seq_lens[i];
    if (queries < 0 || next > b.tokens)
      throw std::invalid_argument("query_start_loc must rise and stay within the query's " + std::to_string(b.tokens) + " rows");
    if (queries > length)
      throw std::invalid_argument("sequence " + std::to_string(i) + " has " + std::to_string(queries) + " new tokens but seq_lens " +
                                  std::to_string(length));
    previous = next;
    if (queries == 0) continue;
    const int64_t blocks = (length + a.cache.block_size - 1) / a.cache.block_size;
    if (blocks > b.table_width)
      throw std::invalid_argument("sequence " + std::to_string(i) + " needs " + std::to_string(blocks) + " blocks, the table has " +
                                  std::to_string(b.table_width));
    const int64_t start = a.window > 0 ? std::max<int64_t>(0, length - queries + 1 - a.window) / a.cache.block_size : 0;
    for (int64_t j = start; j < blocks; ++j) {
      const int32_t block = a.table[i * a.table_stride + j];
      if (block < 0 || block >= a.cache.num_blocks)
        throw std::out_of_range("block " + std::to_string(block) + " of sequence " + std::to_string(i) +
                                " is outside the cache of " + std::to_string(a.cache.num_blocks) + " blocks");
    }
  }
}

// Wide heads get fewer rows a tile, so that a tile's state stays in the first-level cache.
int tile_rows(const AttentionArgs& a) { return a.cache.padded > 128 ? kTileRows / 2 : kTileRows; }

void cut(const AttentionArgs& a, const AttentionBatch& b, std::vector<AttentionItem>* items) {
  const int most = tile_rows(a);
  for (int64_t i = 0; i < b.sequences; ++i) {
    const int64_t queries = a.query_start[i + 1] - a.query_start[i], rows = queries * a.group;
    const int64_t context = a.seq_lens[i] - queries, tiles = (rows + most - 1) / most;
    // Late tiles see more keys: they go first.
    for (int64_t t = tiles - 1; t >= 0; --t) {
      const int64_t r0 = rows * t / tiles, r1 = rows * (t + 1) / tiles;
      const int64_t last = a.causal ? context + (r1 - 1) / a.group + 1 : a.seq_lens[i];
      const int64_t first = a.window > 0 ? std::max<int64_t>(0, context + r0 / a.group + 1 - a.window) : 0;
      for (int h = 0; h < a.cache.kv_heads; ++h)
        items->push_back(AttentionItem{int32_t(i), h, int32_t(r0), int32_t(r1 - r0), int32_t(first / kChunk),
                                       int32_t((last + kChunk - 1) / kChunk)});
    }
  }
}

// Per-thread working memory; grows to the largest head size met.
AttentionScratch scratch_for(int64_t padded) {
  thread_local std::vector<char> memory;
  const int64_t sizes[] = {kTileRows * padded * 4, kTileRows * kChunk * 4, kChunk * padded * 4,
                           kChunk * padded * 4,    kTileRows * padded * 4, kTileRows * padded * 4,
                           2 * kPanel * padded,    2 * kChunk * 4,         2 * kTileRows * int64_t(sizeof(ByteRow))};
  int64_t total = 64;
  for (int64_t size : sizes) total += (size + 63) / 64 * 64;
  if (int64_t(memory.size()) < total) memory.resize(size_t(total));
  char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
  char* part[9];
  for (int i = 0; i < 9; ++i) {
    part[i] = at;
    at += (sizes[i] + 63) / 64 * 64;
  }
  const auto floats = [&](int i) { return reinterpret_cast<float*>(part[i]); };
  return AttentionScratch{part[0], floats(1), part[2], part[3], floats(4), floats(5), part[6], floats(7), reinterpret_cast<ByteRow*>(part[8])};
}

void clear_padding(const AttentionArgs& a, const AttentionBatch& b) {
  const int64_t item = a.cache.wide();
  for (int64_t t = a.query_start[b.sequences]; t < b.tokens; ++t)
    for (int64_t h = 0; h < b.query_heads; ++h) std::memset(a.out + t * a.out_token + h * a.out_head, 0, size_t(a.cache.head_size * item));
}

// What one thread takes at a time: tiles first .. first + count - 1, which are the heads of one sequence or one tile
// alone, over chunks [chunk, chunk_end). `shared`: other threads have the tiles' other chunks.
struct Work {
  int32_t first, count;
  int32_t chunk, chunk_end;
  bool shared;
};

// Heads whose keys and values of one chunk stay in the second-level cache beside those of the next.
constexpr int64_t kUnitBytes = 320 << 10;

struct Plan {
  std::vector<AttentionItem> tiles;
  std::vector<Work> works;
  std::vector<int64_t> partial;  // by tile: where its chunks' partial results begin, in floats
  int64_t floats = 0, stride = 0;
};

bool streams(const AttentionItem& tile) { return tile.rows <= kStreamRows; }

// Tiles that wait for memory are taken with the other heads of their sequence, whose keys lie beside theirs. Where tiles
// are few and contexts long, every chunk is a piece of work of its own.
void plan_work(const AttentionArgs& a, int threads, Plan* plan) {
  const CacheView& c = a.cache;
  const int heads = int(std::max<int64_t>(1, std::min<int64_t>(c.kv_heads, kUnitBytes / (2 * kChunk * c.padded * c.item()))));
  const int64_t count = int64_t(plan->tiles.size());
  std::vector<Work> groups;
  for (int64_t i = 0, next; i < count; i = next) {
    const AttentionItem& tile = plan->tiles[size_t(i)];
    next = i + (streams(tile) ? std::min(heads, c.kv_heads - tile.kv_head) : 1);
    groups.push_back(Work{int32_t(i), int32_t(next - i), tile.chunk, tile.chunk_end, false});
  }
  const bool scarce = threads > 1 && int64_t(groups.size()) < 4 * threads;
  int most_rows = 0;
  for (const AttentionItem& tile : plan->tiles) most_rows = std::max(most_rows, int(tile.rows));
  plan->stride = 2 * kTileRows + int64_t(most_rows) * c.padded;
  plan->partial.assign(size_t(count), -1);
  for (Work work : groups) {
    const int chunks = work.chunk_end - work.chunk;
    if (!scarce || chunks < 2) {
      plan->works.push_back(work);
      continue;
    }
    for (int i = 0; i < work.count; ++i) {
      plan->partial[size_t(work.first + i)] = plan->floats;
      plan->floats += chunks * plan->stride;
    }
    work.shared = true;
    for (int chunk = work.chunk, end = work.chunk_end; chunk < end; ++chunk) {
      work.chunk = chunk;
      work.chunk_end = chunk + 1;
      plan->works.push_back(work);
    }
  }
}

struct Tokens {
  int64_t begin, end;
};

// Those of a chunk that a tile looks at.
Tokens tokens_of(const AttentionArgs& a, const AttentionItem& tile, int chunk) {
  const int64_t length = a.seq_lens[tile.seq], queries = a.query_start[tile.seq + 1] - a.query_start[tile.seq];
  const int64_t seen = length - queries + tile.row / a.group + 1;
  const int64_t first = a.window > 0 ? std::max<int64_t>(0, seen - a.window) : 0;
  return Tokens{std::max<int64_t>(int64_t(chunk) * kChunk, first), std::min<int64_t>((int64_t(chunk) + 1) * kChunk, length)};
}

// What `heads` heads of them are in memory, in lines, whole blocks.
int64_t lines_of(const AttentionArgs& a, const AttentionItem& tile, int chunk, int heads) {
  const Tokens tokens = tokens_of(a, tile, chunk);
  const int64_t size = a.cache.block_size, blocks = (tokens.end + size - 1) / size - tokens.begin / size;
  return std::max<int64_t>(0, blocks) * heads * (a.cache.head_bytes() / 32);
}

constexpr int64_t kMoreLines = 64;  // what a tile may fetch beyond what it reads itself

// What a thread will read, work after work and chunk after chunk, each in the order of addresses.
class Reader {
 public:
  Reader(const AttentionArgs& a, const Plan& plan) : a_(a), plan_(plan) {}

  // From chunk `chunk` of work `at` on, up to work `last`.
  void start(int64_t at, int chunk, int64_t last) {
    ahead = Ahead();
    at_ = at;
    chunk_ = chunk;
    last_ = last;
    skip();
  }
  // At least so many lines in the queue, where there is as much to read.
  void fill(int64_t lines) {
    while (ahead.queued() < lines && at_ < last_ && !ahead.full(2 * kChunk / 8)) {
      read(plan_.works[size_t(at_)], chunk_++);
      skip();
    }
  }

  Ahead ahead;

 private:
  void skip() {
    while (at_ < last_) {
      const Work& work = plan_.works[size_t(at_)];
      if (streams(plan_.tiles[size_t(work.first)]) && chunk_ < work.chunk_end) return;
      if (++at_ < last_) chunk_ = plan_.works[size_t(at_)].chunk;  // what is read often does not wait for memory
    }
  }

  void read(const Work& work, int chunk) {
    const CacheView& c = a_.cache;
    const AttentionItem& tile = plan_.tiles[size_t(work.first)];
    const int32_t* table = a_.table + tile.seq * a_.table_stride;
    const Tokens tokens = tokens_of(a_, tile, chunk);
    for (int64_t i = tokens.begin / c.block_size; i * c.block_size < tokens.end; ++i) {
      const char* block = c.data + table[i] * c.block_bytes() + tile.kv_head * c.head_bytes();
      ahead.add(block, work.count * c.head_bytes());
      ahead.add(block + c.side_bytes(), work.count * c.head_bytes());
    }
  }

  const AttentionArgs& a_;
  const Plan& plan_;
  int64_t at_ = 0, last_ = 0;
  int chunk_ = 0;
};

class Worker {
 public:
  Worker(const Isa& isa, const AttentionArgs& a, const Plan& plan, float* partials, std::atomic<int>* left)
      : isa_(isa), a_(a), plan_(plan), partials_(partials), left_(left), scratch_(scratch_for(a.cache.padded)), reader_(a, plan) {}

  // Work `i`; this thread goes on with those up to `last`.
  void run(int64_t i, int64_t last) {
    const Work& work = plan_.works[size_t(i)];
    if (streams(plan_.tiles[size_t(work.first)])) {
      run_group(i, last);
      next_ = i + 1 < last ? i + 1 : -1;
    } else {
      run_tile(work);
      if (next_ == i) next_ = i + 1;
    }
  }

 private:
  void run_group(int64_t i, int64_t last) {
    const Work& work = plan_.works[size_t(i)];
    const int chunks = work.chunk_end - work.chunk;
    thread_local std::vector<float> own;  // fresh pages would cost more than what is written to them
    const bool whole = !work.shared && chunks == 1;
    if (!work.shared && !whole && int64_t(own.size()) < work.count * chunks * plan_.stride)
      own.resize(size_t(work.count * chunks * plan_.stride));
    for (int chunk = work.chunk; chunk < work.chunk_end; ++chunk) {
      const bool near = bring_near(i, chunk, last);
      for (int j = 0; j < work.count; ++j) {
        AttentionItem item = plan_.tiles[size_t(work.first + j)];
        float* to = nullptr;
        if (work.shared) to = partials_ + plan_.partial[size_t(work.first + j)] + (chunk - item.chunk) * plan_.stride;
        else if (!whole) to = own.data() + (j * chunks + chunk - work.chunk) * plan_.stride;
        item.chunk = chunk;
        item.chunk_end = chunk + 1;
        reader_.fill(lines_of(a_, item, chunk, 1) + kMoreLines);
        isa_.attention(a_, item, scratch_, to, near, &reader_.ahead);
      }
    }
    if (work.shared) finish(work);
    else if (!whole)
      for (int j = 0; j < work.count; ++j)
        isa_.attention_merge(a_, plan_.tiles[size_t(work.first + j)], scratch_, own.data() + j * chunks * plan_.stride, plan_.stride);
  }

  // Sees to it that chunk `chunk` of work `i` was fetched ahead. False where a run of works begins: with that the thread
  // is ahead by one chunk from then on.
  bool bring_near(int64_t i, int chunk, int64_t last) {
    const Work& work = plan_.works[size_t(i)];
    if (chunk == work.chunk && i != next_) {
      reader_.start(i, chunk + 1, last);
      needed_ = 0;
      return false;
    }
    needed_ += lines_of(a_, plan_.tiles[size_t(work.first)], chunk, work.count);
    const int64_t late = needed_ - reader_.ahead.fetched();
    if (late > 0) {
      reader_.fill(late);
      reader_.ahead.fetch(late);
    }
    return true;
  }

  void run_tile(const Work& work) {
    AttentionItem item = plan_.tiles[size_t(work.first)];
    if (!work.shared) return isa_.attention(a_, item, scratch_, nullptr, false, nullptr);
    float* to = partials_ + plan_.partial[size_t(work.first)] + (work.chunk - item.chunk) * plan_.stride;
    item.chunk = work.chunk;
    item.chunk_end = work.chunk_end;
    isa_.attention(a_, item, scratch_, to, false, nullptr);
    finish(work);
  }

  // Whoever has done a group's last chunk merges them all.
  void finish(const Work& work) {
    if (left_[work.first].fetch_sub(1) != 1) return;
    for (int i = 0; i < work.count; ++i)
      isa_.attention_merge(a_, plan_.tiles[size_t(work.first + i)], scratch_, partials_ + plan_.partial[size_t(work.first + i)], plan_.stride);
  }

  const Isa& isa_;
  const AttentionArgs& a_;
  const Plan& plan_;
  float* partials_;
  std::atomic<int>* left_;
  const AttentionScratch scratch_;
  Reader reader_;
  int64_t next_ = -1;    // the work that goes on where the reader is
  int64_t needed_ = 0;   // lines that had to be fetched ahead so far
};

// Where each thread's works begin, by what they cost: a row that waits for memory costs more than others.
std::vector<int64_t> share_works(const AttentionArgs& a, const Plan& plan, int threads) {
  std::vector<int64_t> sums{0};
  for (const Work& work : plan.works) {
    const AttentionItem& tile = plan.tiles[size_t(work.first)];
    int64_t tokens = 0;
    for (int chunk = work.chunk; chunk < work.chunk_end; ++chunk) {
      const Tokens read = tokens_of(a, tile, chunk);
      tokens += read.end - read.begin;
    }
    sums.push_back(sums.back() + (tokens + 16) * work.count * (tile.rows + 4));
  }
  std::vector<int64_t> bounds{0};
  for (int i = 1; i < threads; ++i) {
    const int64_t target = sums.back() * i / threads;
    int64_t at = std::lower_bound(sums.begin(), sums.end(), target) - sums.begin();
    if (at > 0 && sums[size_t(at)] - target > target - sums[size_t(at - 1)]) --at;
    bounds.push_back(std::max(at, bounds.back()));
  }
  bounds.push_back(int64_t(plan.works.size()));
  return bounds;
}

}  // namespace

void run_attention(Pool& pool, const Isa& isa, const AttentionArgs& args, const AttentionBatch& batch) {
  check_tables(args, batch);
  clear_padding(args, batch);
  Plan plan;
  cut(args, batch, &plan.tiles);
  if (plan.tiles.empty()) return;
  plan_work(args, pool.threads(), &plan);
  thread_local std::vector<float> memory;
  if (int64_t(memory.size()) < plan.floats) memory.resize(size_t(plan.floats));
  float* const partials = memory.data();
  std::unique_ptr<std::atomic<int>[]> left(plan.floats ? new std::atomic<int>[plan.tiles.size()] : nullptr);
  for (size_t i = 0; plan.floats && i < plan.tiles.size(); ++i) left[i].store(plan.tiles[i].chunk_end - plan.tiles[i].chunk);
  Shares shares(share_works(args, plan, pool.threads()));
  auto job = [&](int thread) {
    Worker worker(isa, args, plan, partials, left.get());
    for (int64_t i, end, last; shares.next(thread, &i, &end, &last);) worker.run(i, last);
  };
  if (plan.works.size() == 1) job(0);
  else pool.run(job);
}
