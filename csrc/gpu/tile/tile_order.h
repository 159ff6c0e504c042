// Which tile a CTA works on. CTAs start in the order of their index, so this order is the schedule.
#pragma once

#include "common/host_device.h"
#include "common/params.h"

namespace flash {

struct TileIndex {
  int64_t batch, head;
  int m_block;
};

// Tiles run over (group of heads, row block descending, head of the group). Neighbours share keys in the L2 cache.
// Under a causal mask the last row blocks have most work, so they come first; a group bounds how many heads' keys the
// cache must hold meanwhile.
struct TileOrder {
  uint32_t m_blocks = 1;   // of a head
  uint32_t heads = 1;      // of a sequence
  uint32_t all_heads = 1;  // of all sequences
  uint32_t group = 1;

  FLASH_HOST_DEVICE TileIndex tile(uint32_t index) const {
    const uint32_t group_tiles = group * m_blocks;
    const uint32_t first_head = index / group_tiles * group, rest = index % group_tiles;
    const uint32_t size = group < all_heads - first_head ? group : all_heads - first_head;
    const uint32_t head = first_head + rest % size;
    return {head / heads, head % heads, static_cast<int>(m_blocks - 1 - rest / size)};
  }
};

}  // namespace flash
