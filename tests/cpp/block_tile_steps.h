// What a launch of the GPU's kernels reads of a block mask, made by the pass that makes it on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "gpu/passes/block_tiles.cuh"

// The memory of `launch.tiles`, which points to it; empty without a mask. kTransposed: of backward.
template <bool kTransposed, class Params, class Launch>
std::vector<uint16_t> make_steps(const Params& p, Launch& launch, int own_size, int other_size) {
  using namespace flash;
  std::vector<uint16_t> steps(launch.tiles.bytes() / 2);
  if (!p.block_mask.given()) return steps;
  launch.tiles.lie_at(steps.data());
  const BlockTiles& tiles = launch.tiles;
  cuda_on_cpu::launch(
      static_cast<unsigned>(tiles.tiles()), kBlockTileThreads,
      [&] { block_tiles_kernel<kTransposed, Params>(p, tiles, own_size, other_size); }, [] {});
  if (tiles.ordered)
    cuda_on_cpu::launch(
        static_cast<unsigned>(divide_up(32 * tiles.tiles(), kBlockTileThreads)), kBlockTileThreads,
        [&] { block_order_kernel(tiles, tiles.head_planes == 0 ? 1 : static_cast<int>(p.group())); }, [] {});
  return steps;
}
