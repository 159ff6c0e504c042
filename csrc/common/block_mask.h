// Which blocks of a block mask a tile overlaps, for one head of one sequence. A tile is visited if any of them is; what
// the others hide is hidden element by element. Nothing here widens what visibility.h lets a row see.
#pragma once

#include "common/params.h"
#include "common/sequence.h"
#include "common/visibility.h"

namespace flash {

// Of a block: hidden, full, or kFirstPattern + n: pattern n says which elements are visible.
constexpr int32_t kHiddenBlock = 0, kFullBlock = 1, kFirstPattern = 2;

// An axis of the plane: positions of the sequence, cut into blocks that count from the first row of its tensor.
struct BlockAxis {
  int64_t size = 1;     // of a block
  int64_t leftpad = 0;  // position 0 is row `leftpad` of the mask
  int64_t blocks = 0;

  FLASH_HOST_DEVICE int64_t block_of(int64_t position) const { return (position + leftpad) / size; }
  FLASH_HOST_DEVICE int64_t begin_of(int64_t block) const { return block * size - leftpad; }
};

struct HeadBlocks {
  const int32_t* kinds = nullptr;  // [row block][key block]; null: no mask, as if all blocks were full
  const uint8_t* patterns = nullptr;
  const int32_t *key_lists = nullptr, *query_lists = nullptr;
  BlockAxis rows, keys;

  FLASH_HOST_DEVICE bool given() const { return kinds != nullptr; }
  FLASH_HOST_DEVICE int32_t kind(int64_t m, int64_t n) const { return kinds[m * keys.blocks + n]; }

  // Whether the mask lets row i see key j.
  FLASH_HOST_DEVICE bool sees(int64_t i, int64_t j) const {
    if (!given()) return true;
    const int32_t of_block = kind(rows.block_of(i), keys.block_of(j));
    return of_block == kFullBlock ||
           (of_block >= kFirstPattern && pattern_row(of_block, i)[(j + keys.leftpad) % keys.size]);
  }

  // What a partial block lets row i see, by key of the block.
  FLASH_HOST_DEVICE const uint8_t* pattern_row(int32_t of_block, int64_t i) const {
    return patterns +
           (static_cast<int64_t>(of_block - kFirstPattern) * rows.size + (i + rows.leftpad) % rows.size) * keys.size;
  }

  // The first key from `from` on in a block that some of the rows visits; the largest number where there is none.
  FLASH_HOST_DEVICE int64_t next_key(Range of_rows, int64_t from) const {
    return next(key_lists, rows, keys, of_rows, from);
  }
  // The first row from `from` on whose block visits some of the keys.
  FLASH_HOST_DEVICE int64_t next_row(Range of_keys, int64_t from) const {
    return next(query_lists, keys, rows, of_keys, from);
  }

  // The first stretch of `among` that lies in blocks which some of the rows visits.
  FLASH_HOST_DEVICE Range visited_keys(Range of_rows, Range among) const {
    if (!given() || among.empty()) return among;
    const int64_t begin = next_key(of_rows, among.begin);
    if (begin >= among.end) return {};
    int64_t end = begin;
    for (int64_t next = begin; next == end && end < among.end; next = next_key(of_rows, end))
      end = keys.begin_of(keys.block_of(end) + 1);
    return {begin, smaller(end, among.end)};
  }

  // The first stretch of `among` that every row sees.
  FLASH_HOST_DEVICE Range full_keys(Range of_rows, Range among) const {
    if (!given() || among.empty() || of_rows.empty()) return among;
    const int64_t last = keys.block_of(among.end - 1);
    int64_t n = keys.block_of(among.begin);
    while (n <= last && !is_full(of_rows, n)) ++n;
    const int64_t first = n;
    while (n <= last && is_full(of_rows, n)) ++n;
    return intersect(among, {keys.begin_of(first), keys.begin_of(n)});
  }

  // Calls use(kind, rows, keys) with every block's part of a tile.
  template <class Use>
  void for_each_block(Range of_rows, Range of_keys, const Use& use) const {
    if (of_rows.empty() || of_keys.empty()) return;
    for (int64_t m = rows.block_of(of_rows.begin); m <= rows.block_of(of_rows.end - 1); ++m)
      for (int64_t n = keys.block_of(of_keys.begin); n <= keys.block_of(of_keys.end - 1); ++n)
        use(kind(m, n), intersect(of_rows, {rows.begin_of(m), rows.begin_of(m + 1)}),
            intersect(of_keys, {keys.begin_of(n), keys.begin_of(n + 1)}));
  }

 private:
  FLASH_HOST_DEVICE bool is_full(Range of_rows, int64_t n) const {
    for (int64_t m = rows.block_of(of_rows.begin); m <= rows.block_of(of_rows.end - 1); ++m)
      if (kind(m, n) != kFullBlock) return false;
    return true;
  }

  FLASH_HOST_DEVICE int64_t next(const int32_t* lists, const BlockAxis& own, const BlockAxis& other, Range of_own,
                                 int64_t from) const {
    if (!given()) return from;
    int64_t first = INT64_MAX;
    if (of_own.empty()) return first;
    const int64_t wanted = other.block_of(from);
    for (int64_t m = own.block_of(of_own.begin); m <= own.block_of(of_own.end - 1); ++m) {
      const int32_t* list = lists + m * (1 + other.blocks);
      int64_t low = 1, high = 1 + list[0];  // the first of the list that is not below `wanted`
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        list[middle] < wanted ? low = middle + 1 : high = middle;
      }
      if (low <= list[0]) first = smaller(first, larger(from, other.begin_of(list[low])));
    }
    return first;
  }
};

FLASH_HOST_DEVICE HeadBlocks head_blocks(const AttentionParams& p, const Sequence& s, int64_t head) {
  const BlockMask& mask = p.block_mask;
  if (!mask.given()) return {};
  const int64_t plane = s.index * mask.batch_planes + head * mask.head_planes;
  HeadBlocks blocks;
  blocks.kinds = mask.kinds + plane * mask.q_blocks * mask.k_blocks;
  blocks.patterns = mask.patterns;
  blocks.key_lists = mask.key_lists + plane * mask.q_blocks * (1 + mask.k_blocks);
  blocks.query_lists = mask.query_lists + plane * mask.k_blocks * (1 + mask.q_blocks);
  blocks.rows = {mask.rows, s.q.leftpad, mask.q_blocks};
  blocks.keys = {mask.keys, s.k.leftpad, mask.k_blocks};
  return blocks;
}

}  // namespace flash
