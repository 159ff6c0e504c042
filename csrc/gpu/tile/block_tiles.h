// Where a kernel finds the tiles that a block mask visits.
#pragma once

#include "gpu/tile/tile_order.h"

namespace flash {

// Which tiles of the other axis each tile visits under a block mask: steps that a pass makes of the mask before the
// kernel (passes/block_tiles.cuh) and that the kernel reads (block_tiles.cuh).
struct BlockTiles {
  static constexpr int kNotFull = 0x8000;  // in a step: the tile itself has elements that are hidden
  static constexpr int64_t kMost = 0x7FFF;

  uint16_t* steps = nullptr;  // [plane][own tile][row_steps(): other tile, and one more]; null: no block mask
  // Where `ordered`: how many tiles each own tile visits, and own tiles in the order of that, the most first.
  uint16_t *counts = nullptr, *order = nullptr;  // [plane][own tile]
  bool ordered = false;
  int own_tiles = 0, other_tiles = 0;
  int64_t planes = 0;
  int batch_planes = 0, head_planes = 0;  // 0 from one batch or head to the next where all have the same
  Divisor mask_rows, mask_keys;           // sizes of a block

  // Rows of steps begin at multiples of 4 bytes.
  FLASH_HOST_DEVICE int row_steps() const { return (other_tiles + 2) & ~1; }
  int64_t tiles() const { return planes * own_tiles; }
  int64_t bytes() const { return tiles() * (row_steps() + (ordered ? 2 : 0)) * 2; }
  // `memory`: of bytes() bytes.
  void lie_at(void* memory) {
    steps = static_cast<uint16_t*>(memory);
    if (ordered) counts = steps + tiles() * row_steps(), order = counts + tiles();
  }
};

}  // namespace flash
