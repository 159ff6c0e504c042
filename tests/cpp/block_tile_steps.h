// What a launch of the GPU's kernels reads of a block mask, made by the pass that makes it on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "gpu/passes/block_tiles.cuh"

// The memory of `launch.tiles.steps`, which points to it; empty without a mask. kTransposed: of backward.
template <bool kTransposed, class Params, class Launch>
std::vector<uint16_t> make_steps(const Params& p, Launch& launch, int own_size, int other_size) {
  using namespace flash;
  std::vector<uint16_t> steps(launch.tiles.bytes() / 2);
  if (!p.block_mask.given()) return steps;
  launch.tiles.steps = steps.data();
  const int64_t warps = launch.tiles.planes * launch.tiles.own_tiles;
  cuda_on_cpu::launch(
      static_cast<unsigned>(divide_up(32 * warps, kBlockTileThreads)), kBlockTileThreads,
      [&] { block_tiles_kernel<kTransposed, Params>(p, launch.tiles, own_size, other_size); }, [] {});
  return steps;
}
