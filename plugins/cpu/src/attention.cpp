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
                                       int32_t((last + kChunk - 1) / kChunk), -1});
    }
  }
}

// Per-thread working memory; grows to the largest head size met.
AttentionScratch scratch_for(int64_t padded) {
  thread_local std::vector<char> memory;
  const int64_t sizes[] = {kTileRows * padded * 4, kTileRows * kChunk * 4, kChunk * padded * 4,
                           kChunk * padded * 4,    kTileRows * padded * 4, kTileRows * padded * 4};
  int64_t total = 64;
  for (int64_t size : sizes) total += size;
  if (int64_t(memory.size()) < total) memory.resize(size_t(total));
  char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
  char* part[6];
  for (int i = 0; i < 6; ++i) {
    part[i] = at;
    at += sizes[i];
  }
  return AttentionScratch{part[0], reinterpret_cast<float*>(part[1]), part[2], part[3],
                          reinterpret_cast<float*>(part[4]), reinterpret_cast<float*>(part[5])};
}

void clear_padding(const AttentionArgs& a, const AttentionBatch& b) {
  const int64_t item = a.cache.item();
  for (int64_t t = a.query_start[b.sequences]; t < b.tokens; ++t)
    for (int64_t h = 0; h < b.query_heads; ++h) std::memset(a.out + t * a.out_token + h * a.out_head, 0, size_t(a.cache.head_size * item));
}

}  // namespace

void run_attention(Pool& pool, const Isa& isa, const AttentionArgs& args, const AttentionBatch& batch) {
  check_tables(args, batch);
  clear_padding(args, batch);
  std::vector<AttentionItem> tiles;
  cut(args, batch, &tiles);
  if (tiles.empty()) return;
  // Few tiles and long contexts: every chunk becomes an item, and whoever finishes a tile's last one merges them.
  std::vector<AttentionItem> split;
  int64_t partials = 0;
  int most_rows = 0;
  std::vector<int64_t> first_partial(tiles.size());
  const bool scarce = pool.threads() > 1 && int64_t(tiles.size()) < 4 * pool.threads();
  for (size_t i = 0; i < tiles.size(); ++i) {
    const AttentionItem& tile = tiles[i];
    const int chunks = tile.chunk_end - tile.chunk;
    if (!scarce || chunks < 2) {
      split.push_back(tile);
      continue;
    }
    first_partial[i] = partials;
    partials += chunks;
    most_rows = std::max(most_rows, int(tile.rows));
    for (int c = tile.chunk; c < tile.chunk_end; ++c) {
      split.push_back(tile);
      split.back().chunk = c;
      split.back().chunk_end = c + 1;
      split.back().tile = int32_t(i);
    }
  }
  // Close together and kept by the calling thread: fresh pages would cost more than what is written to them.
  const int64_t stride = 2 * kTileRows + int64_t(most_rows) * args.cache.padded;
  thread_local std::vector<float> memory;
  if (int64_t(memory.size()) < partials * stride) memory.resize(size_t(partials * stride));
  float* const partial = memory.data();
  std::unique_ptr<std::atomic<int>[]> left(partials ? new std::atomic<int>[tiles.size()] : nullptr);
  for (size_t i = 0; partials && i < tiles.size(); ++i) left[i].store(tiles[i].chunk_end - tiles[i].chunk);
  std::atomic<int64_t> next{0};
  auto job = [&] {
    const AttentionScratch scratch = scratch_for(args.cache.padded);
    // Of many small items the next is claimed early, so that its keys are fetched while this one is computed.
    const int64_t count = int64_t(split.size());
    const bool early = count >= 8 * pool.threads();
    bool near = false;
    for (int64_t i = next.fetch_add(1), after; i < count; i = after) {
      const AttentionItem& item = split[size_t(i)];
      if (early) after = next.fetch_add(1);
      const AttentionItem* following = early && after < count ? &split[size_t(after)] : nullptr;
      const bool fetched = near;
      near = following != nullptr;
      if (item.tile < 0) {
        isa.attention(args, item, scratch, nullptr, fetched, following);
        if (!early) after = next.fetch_add(1);
        continue;
      }
      const AttentionItem& tile = tiles[size_t(item.tile)];
      float* base = partial + first_partial[size_t(item.tile)] * stride;
      isa.attention(args, item, scratch, base + (item.chunk - tile.chunk) * stride, fetched, following);
      if (left[item.tile].fetch_sub(1) == 1) isa.attention_merge(args, tile, scratch, base, stride);
      if (!early) after = next.fetch_add(1);
    }
  };
  if (split.size() == 1) job();
  else pool.run(job);
}
