// In which order key blocks add to a row block of dQ, where sums must repeat bit for bit. Plain C++, for tests, too.
//
// All key blocks of a head start at once: if each began at the first row block, each would wait for all before it.
//
// With a window each begins where its diagonal does, a later one further down. Row block m is reached first by the last
// key block that sees it, and so on backward. CTAs start in that order, too, and so wait for earlier ones alone.
//
// Without a window, key blocks form circles. Those of a circle begin at row blocks that are spread over all of them, and
// add in the order in which they arrive. They wait for each other, so all of a circle must be on the card at once; one
// circle comes after the other. Nobody waits for whom it keeps waiting: if t is the number of row blocks that a key block
// has behind it, whoever is waited for has a lower t, or the same t and a higher index.
#pragma once

#include "common/visibility.h"
#include "gpu/tile/tile_order.h"

namespace flash {

struct TurnOrder {
  bool taken = false;  // false: whoever comes adds
  int circle = 0;      // key blocks of a circle; 0: there is a window
  Divisor batch;       // sequences; for circles

  // The key block of CTA `index`, as the row block of its tile. `order`: of the key blocks of heads, or of their circles,
  // circle by circle.
  FLASH_HOST_DEVICE TileIndex key_block(const TileOrder& order, uint32_t index) const {
    TileIndex tile = order.tile(index);
    if (taken && circle == 0) return tile;  // the last key block first
    tile.m_block = static_cast<int>(order.m_blocks) - 1 - tile.m_block;
    if (taken) {
      const uint32_t lap = batch.divide(static_cast<uint32_t>(tile.batch));
      tile.batch -= int64_t{lap} * batch.value;
      tile.m_block += static_cast<int>(lap) * circle;
    }
    return tile;
  }
};

// Of one key block of a sequence.
struct Turns {
  int key_block = 0, keys_of_block = 1, rows_of_block = 1;
  int circle = 0, first = 0;  // 0: none; its first key block
  int row_blocks = 0;         // of the sequence

  Turns() = default;
  FLASH_HOST_DEVICE Turns(const TurnOrder& order, const Visibility& visibility, int block, int keys, int rows)
      : key_block(block), keys_of_block(keys), rows_of_block(rows) {
    if (!order.taken || order.circle == 0) return;
    first = block / order.circle * order.circle;
    circle = static_cast<int>(smaller(order.circle, divide_up(visibility.seqlen_k, keys) - first));
    row_blocks = static_cast<int>(divide_up(visibility.seqlen_q, rows));
  }

  // Where to begin, of the row blocks from `begin` on.
  FLASH_HOST_DEVICE int first_row_block(int begin) const {
    return circle > 0 ? static_cast<int>(int64_t{key_block - first} * row_blocks / circle) : begin;
  }

  // How many key blocks add to the row block before this one. In a circle the last one that begins there or above is
  // first, then the one before it, and so on round.
  FLASH_HOST_DEVICE int turn(const Visibility& visibility, int row_block) const {
    if (circle > 0) {
      const auto leader = static_cast<int>((int64_t{row_block + 1} * circle - 1) / row_blocks);
      const int behind = leader - (key_block - first);
      return first + behind + (behind < 0 ? circle : 0);
    }
    const int64_t begin = int64_t{row_block} * rows_of_block;
    const Range rows{begin, smaller(visibility.seqlen_q, begin + rows_of_block)};
    return static_cast<int>(visibility.key_blocks(rows, keys_of_block).end) - 1 - key_block;
  }
};

}  // namespace flash
