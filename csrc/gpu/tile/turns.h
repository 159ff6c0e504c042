// In which order key blocks add to a row block of dQ, where sums must repeat bit for bit. Plain C++, for tests, too.
//
// The last key block that sees a row block is first, then the one before it, and so on. CTAs start in that order, too, and
// so wait for earlier ones alone: they end whatever else is on the card, another launch of the same kernel included. (That
// CTAs start in the order of their index is how GPUs have always done it, and not promised.)
//
// With a diagonal nobody waits for long: a later key block begins at a later row block. Without one, those of a head that
// start at once all begin at the first row block, each a step behind the one before. So heads take their turns in groups
// (plan.h), of which few key blocks each are on the card.
#pragma once

#include "common/visibility.h"
#include "gpu/tile/tile_order.h"

namespace flash {

struct TurnOrder {
  bool taken = false;  // false: whoever comes adds

  // The key block of CTA `index`, as the row block of its tile. `order`: of the key blocks of heads.
  FLASH_HOST_DEVICE TileIndex key_block(const TileOrder& order, uint32_t index) const {
    TileIndex tile = order.tile(index);  // the last key block first
    if (!taken) tile.m_block = static_cast<int>(order.m_blocks) - 1 - tile.m_block;
    return tile;
  }

  // How many key blocks add to the rows before this one.
  FLASH_HOST_DEVICE static int turn(const Visibility& visibility, Range rows, int key_block, int keys) {
    return static_cast<int>(visibility.key_blocks(rows, keys).end) - 1 - key_block;
  }
};

}  // namespace flash
