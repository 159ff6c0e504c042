// From the blocks of a mask to the tiles of a kernel: how far it is from each tile to the next that is visited. A warp takes
// a row of them, 32 tiles at a time; nothing waits for the host.
#pragma once

#include "common/block_mask.h"
#include "gpu/tile/block_tiles.h"

namespace flash {

inline constexpr int kBlockTileThreads = 256;

// `kByKeys`: own tiles are tiles of keys, and steps lead on; else of rows, and steps lead back. Sizes: of the tiles.
template <bool kByKeys, class Params>
__global__ void __launch_bounds__(kBlockTileThreads)
    block_tiles_kernel(const __grid_constant__ Params p, const __grid_constant__ BlockTiles tiles, int own_size,
                       int other_size) {
  const int64_t index = (int64_t{blockIdx.x} * kBlockTileThreads + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (index >= tiles.planes * tiles.own_tiles) return;
  const int64_t own = index % tiles.own_tiles, plane = index / tiles.own_tiles;
  const int64_t heads = tiles.head_planes == 0 ? 1 : p.heads, batch = plane / heads, head = plane % heads;
  const BlockMask& mask = p.block_mask;
  const int32_t* kinds =
      mask.kinds + (batch * mask.batch_planes + head * mask.head_planes) * mask.q_blocks * mask.k_blocks;
  // Rows and columns of the mask. Nobody has checked the left pads: what lies outside the mask is hidden.
  const int64_t first_row = p.rows_q.leftpad.given() ? p.rows_q.leftpad[batch] : 0;
  const int64_t first_key = p.rows_k.leftpad.given() ? p.rows_k.leftpad[batch] : 0;
  const int rows = kByKeys ? other_size : own_size, keys = kByKeys ? own_size : other_size;
  uint16_t* steps = tiles.steps + index * (tiles.other_tiles + 1);
  const int groups = tiles.other_tiles / 32 + 1;
  int nearest = kByKeys ? tiles.other_tiles : -1;  // visited tile of the groups before
  for (int i = 0; i < groups; ++i) {
    const int first = 32 * (kByKeys ? groups - 1 - i : i), other = first + lane;
    const int64_t row = first_row + (kByKeys ? other : own) * rows, key = first_key + (kByKeys ? own : other) * keys;
    bool visited = false, full = true;
    if (other < tiles.other_tiles && row >= 0 && key >= 0) {
      const int64_t m_end = smaller(mask.q_blocks, divide_up(row + rows, mask.rows));
      const int64_t n_end = smaller(mask.k_blocks, divide_up(key + keys, mask.keys));
      for (int64_t m = row / mask.rows; m < m_end; ++m)
        for (int64_t n = key / mask.keys; n < n_end; ++n) {
          visited |= kinds[m * mask.k_blocks + n] != kHiddenBlock;
          full &= kinds[m * mask.k_blocks + n] == kFullBlock;
        }
    }
    const uint32_t all = __ballot_sync(~0u, visited);
    int distance;
    if (kByKeys) {
      const uint32_t beside = all & (~0u << lane);
      distance = (beside != 0 ? first + __ffs(static_cast<int>(beside)) - 1 : nearest) - other;
      if (all != 0) nearest = first + __ffs(static_cast<int>(all)) - 1;
    } else {
      const uint32_t beside = all & ~(~0u << lane);
      distance = other - 1 - (beside != 0 ? first + 31 - __clz(static_cast<int>(beside)) : nearest);
      if (all != 0) nearest = first + 31 - __clz(static_cast<int>(all));
    }
    if (other <= tiles.other_tiles)
      steps[other] = static_cast<uint16_t>(distance | (visited && full ? 0 : BlockTiles::kNotFull));
  }
}

#if defined(__CUDACC__)

// Fills the steps of a launch, if it has any.
template <bool kByKeys, class Params>
void make_block_tiles(const Params& params, const BlockTiles& tiles, int own_size, int other_size,
                      cudaStream_t stream) {
  if (tiles.steps == nullptr) return;
  const int64_t threads = 32 * tiles.planes * tiles.own_tiles;
  const auto ctas = static_cast<uint32_t>(divide_up(threads, kBlockTileThreads));
  if (ctas > 0)
    block_tiles_kernel<kByKeys, Params><<<ctas, kBlockTileThreads, 0, stream>>>(params, tiles, own_size, other_size);
}

#endif

}  // namespace flash
