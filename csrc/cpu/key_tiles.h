// K and V of some (sequence, key/value head) units, packed tile by tile, once for all the query blocks that read them.
#pragma once

#include <vector>

#include "cpu/schedule.h"
#include "cpu/tile.h"

namespace flash::cpu {

// Sizes of a tile: `rows` queries in panels of kLanes, `keys` keys.
struct TileSize {
  int64_t rows, keys;

  int64_t panels() const { return rows / kLanes; }
  int64_t panel_elements() const { return keys * kLanes; }
};

// The keys of a tile, `keys` or less, so that it holds whole blocks of the mask or is a whole part of one: a block that is
// cut by the end of a tile takes two products instead of one.
template <class Arithmetic>
int64_t fit_blocks(int64_t keys, int64_t longest_k, const BlockMask& mask) {
  if (!mask.given() || keys >= longest_k) return keys;
  int64_t parts = divide_up(mask.keys, keys);
  while (mask.keys % parts != 0) ++parts;
  const int64_t part = mask.keys / parts, fitted = keys / part * part;
  return fitted % Arithmetic::kKeyPad == 0 ? fitted : keys;
}

// One key/value head of one sequence, and its place in a wave.
struct Unit {
  const Sequence* sequence;
  int64_t head_k;
  int64_t blocks;                  // of queries, per query head
  int64_t first_tile, first_item;  // in the wave

  int64_t tiles(TileSize size) const { return divide_up(sequence->k.length, size.keys); }
};

// The unit that an item or tile belongs to.
inline const Unit& unit_of(const std::vector<Unit>& units, int64_t Unit::* first, int64_t index) {
  const auto after = std::upper_bound(units.begin(), units.end(), index,
                                      [first](int64_t i, const Unit& unit) { return i < unit.*first; });
  return *(after - 1);
}

}  // namespace flash::cpu
