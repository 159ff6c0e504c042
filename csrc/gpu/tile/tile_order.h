// Which tile a CTA works on. CTAs start in the order of their index, so this order is the schedule.
#pragma once

#include "common/host_device.h"
#include "common/params.h"

namespace flash {

struct TileIndex {
  int64_t batch, head;
  int m_block;
};

// Divides numbers below 2^31 by one that the host knows, without a division (Granlund, Montgomery, "Division by
// invariant integers using multiplication", 1994). A CTA has several to do before it can load anything.
struct Divisor {
  uint32_t value = 1, multiplier = 0x80000000u, shift = 31;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : value(divisor == 0 ? 1 : divisor) {
    for (uint32_t rest = value - 1; rest > 0; rest /= 2) ++shift;  // 31 + ⌈log2 value⌉
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + value - 1) / value);
  }

  FLASH_HOST_DEVICE uint32_t divide(uint32_t x) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(x) * multiplier) >> shift);
  }
};

// Tiles run over (group of heads, row block descending, head of the group). Neighbours share keys in the L2 cache.
// Under a causal mask the last row blocks have most work, so they come first; a group bounds how many heads' keys the
// cache must hold meanwhile.
struct TileOrder {
  uint32_t m_blocks = 1;   // of a head
  uint32_t all_heads = 1;  // of all sequences
  Divisor heads;           // of a sequence
  Divisor group;
  Divisor group_tiles;
  Divisor last_group;  // heads of the last one, where it is smaller

  TileOrder() = default;
  TileOrder(uint32_t blocks_of_head, uint32_t heads_of_sequence, uint32_t heads_of_all, uint32_t heads_of_group)
      : m_blocks(blocks_of_head),
        all_heads(heads_of_all),
        heads(heads_of_sequence),
        group(heads_of_group),
        group_tiles(heads_of_group * blocks_of_head),
        last_group(heads_of_all % heads_of_group) {}

  FLASH_HOST_DEVICE TileIndex tile(uint32_t index) const {
    const uint32_t of_group = group_tiles.divide(index), rest = index - of_group * group_tiles.value;
    const uint32_t first_head = of_group * group.value;
    const Divisor& size = first_head + group.value <= all_heads ? group : last_group;
    const uint32_t above = size.divide(rest), head = first_head + rest - above * size.value;
    const uint32_t batch = heads.divide(head);
    return {batch, head - batch * heads.value, static_cast<int>(m_blocks - 1 - above)};
  }
};

// Under a causal mask the first row blocks have least work. A launch that deals out its tiles as CTAs become free keeps
// those of all heads for the end, behind the others in the order of groups: they fill the time of CTAs that would have to
// wait for a longer tile. (A simulation of 132 CTAs says 1 to 6 % of all time.)
struct LateTileOrder {
  TileOrder early;           // of the other row blocks
  uint32_t late_blocks = 0;  // of each head
  uint32_t late_begin = 0;   // the first tile among them
  Divisor all_heads;

  LateTileOrder() = default;
  LateTileOrder(uint32_t blocks_of_head, uint32_t heads_of_sequence, uint32_t heads_of_all, uint32_t heads_of_group,
                bool has_late)
      : late_blocks(has_late ? (blocks_of_head + 3) / 4 : 0), all_heads(heads_of_all) {
    early = TileOrder(blocks_of_head - late_blocks, heads_of_sequence, heads_of_all, heads_of_group);
    late_begin = (blocks_of_head - late_blocks) * heads_of_all;
  }

  FLASH_HOST_DEVICE TileIndex tile(uint32_t index) const {
    if (index < late_begin) {
      TileIndex found = early.tile(index);
      found.m_block += static_cast<int>(late_blocks);
      return found;
    }
    const uint32_t rest = index - late_begin, above = all_heads.divide(rest), head = rest - above * all_heads.value;
    const uint32_t batch = early.heads.divide(head);
    return {batch, head - batch * early.heads.value, static_cast<int>(late_blocks - 1 - above)};
  }
};

}  // namespace flash
