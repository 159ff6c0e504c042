// Where a kernel finds the tiles that a block mask visits.
#pragma once

#include "gpu/tile/tile_order.h"

namespace flash {

// Which tiles of the other axis each tile visits under a block mask: steps that a pass makes of the mask before the
// kernel (passes/block_tiles.cuh) and that the kernel reads (block_tiles.cuh).
struct BlockTiles {
  static constexpr int kNotFull = 0x8000;  // in a step: the tile itself has elements that are hidden
  static constexpr int64_t kMost = 0x7FFF;

  uint16_t* steps = nullptr;  // [plane][own tile][other tile, and one more]; null: no block mask
  int own_tiles = 0, other_tiles = 0;
  int64_t planes = 0, batch_planes = 0,
          head_planes = 0;       // 0 from one batch or head to the next where all have the same
  Divisor mask_rows, mask_keys;  // sizes of a block

  int64_t bytes() const { return planes * own_tiles * (other_tiles + 1) * 2; }
};

}  // namespace flash
