// Which tiles of the other axis a tile visits under a block mask, read from the steps that passes/block_tiles.cuh made.
#pragma once

#include "common/block_mask.h"
#include "gpu/tile/block_tiles.h"

namespace flash {

// The steps of one tile. Null: no block mask, every tile is visited and full. A step is one load that all threads do
// alike, so it is taken anew wherever the next tile is needed: a register for it made the largest kernels spill.
struct TileSteps {
  const uint16_t* steps = nullptr;

  TileSteps() = default;
  __device__ __forceinline__ TileSteps(const BlockTiles& tiles, int64_t batch, int64_t head, int tile) {
    if (tiles.steps == nullptr) return;
    const int plane = static_cast<int>(batch) * tiles.batch_planes + static_cast<int>(head) * tiles.head_planes;
    steps = tiles.steps + (int64_t{plane} * tiles.own_tiles + tile) * tiles.row_steps();
  }

  __device__ __forceinline__ int distance(int n) const { return steps == nullptr ? 0 : distance_of(steps[n]); }
  // Of tiles of keys: from tile n to the first visited one from there on, or behind the last tile.
  static __device__ __forceinline__ int distance_of(uint32_t step) { return step & (BlockTiles::kNotFull - 1); }
  // Of tiles of rows: the last visited tile before tile n; -1 if there is none.
  __device__ __forceinline__ int before(int n) const { return n - 1 - distance(n); }

  // A step and its neighbour: no copy to shared memory is smaller.
  __device__ __forceinline__ const uint32_t* pair_of(int n) const {
    return reinterpret_cast<const uint32_t*>(steps) + static_cast<uint32_t>(n) / 2;
  }
  static __device__ __forceinline__ int distance_in_pair(uint32_t pair, int n) {
    return distance_of(pair >> ((n & 1) * 16));
  }

  __device__ __forceinline__ bool is_full(int n) const {
    return steps == nullptr || (steps[n] & BlockTiles::kNotFull) == 0;
  }
};

// The block mask's elements, for kernels that look at them: which keys a row of one head sees.
struct MaskRow {
  const int32_t* kinds;  // of the row's blocks; null: it sees nothing
  int row_in_block;

  __device__ __forceinline__ MaskRow(const BlockMask& mask, const BlockTiles& tiles, int64_t batch, int64_t head,
                                     int64_t row) {
    const auto block = static_cast<int>(tiles.mask_rows.divide(static_cast<uint32_t>(row)));
    const int64_t plane = batch * mask.batch_planes + head * mask.head_planes;
    row_in_block = static_cast<int>(row) - block * static_cast<int>(tiles.mask_rows.value);
    kinds = block < mask.q_blocks ? mask.kinds + (plane * mask.q_blocks + block) * mask.k_blocks : nullptr;
  }

  // Nothing outside the tensors is read, whatever they hold.
  __device__ __forceinline__ bool sees(const BlockMask& mask, const BlockTiles& tiles, int64_t key) const {
    const uint32_t block = tiles.mask_keys.divide(static_cast<uint32_t>(key));
    if (kinds == nullptr || block >= mask.k_blocks) return false;
    const int32_t kind = kinds[block], pattern = kind - kFirstPattern;
    if (pattern < 0 || pattern >= mask.pattern_count) return kind == kFullBlock;
    const uint32_t in_block = static_cast<uint32_t>(key) - block * tiles.mask_keys.value;
    return mask.patterns[(int64_t{pattern} * mask.rows + row_in_block) * mask.keys + in_block] != 0;
  }
};

}  // namespace flash
