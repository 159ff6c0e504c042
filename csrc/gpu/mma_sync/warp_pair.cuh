// Two warps that share their rows: each makes S and P for its half of a block's keys, and O for its half of the columns.
//
// With 16 rows a warp the wide heads would read K and V from shared memory more slowly than the tensor cores multiply;
// 32 rows leave no registers for all columns of O. So a pair has 32 rows, P goes from one to the other through shared
// memory, and K, V and Q are read 28 % less in all. Both must agree on each row's reference, since their P are summed.
#pragma once

#include "gpu/ptx/barrier.cuh"
#include "gpu/ptx/copy.cuh"

namespace flash::mma_sync {

// kM m16 tiles and kDepth k16 steps of P in each warp.
template <int kM, int kDepth>
struct WarpPair {
  uint32_t fragments, floats;  // in shared memory, of the first warp
  int warp, lane;

  __device__ __forceinline__ WarpPair(uint32_t shared, int warps, int warp, int lane)
      : fragments(shared), floats(shared + warps * kM * kDepth * 512), warp(warp), lane(lane) {}

  // Both warps are here, and see what the other has written. Barrier 0 is __syncthreads'.
  __device__ __forceinline__ void sync() const { ptx::barrier_sync(1 + warp / 2, 64); }

  __device__ __forceinline__ void give(const uint32_t (&rP)[4], int m, int depth) const {
    ptx::store_shared_16(address(warp, m, depth), {rP[0], rP[1], rP[2], rP[3]});
  }
  __device__ __forceinline__ void take(uint32_t (&rP)[4], int m, int depth) const {
    const uint4 x = ptx::load_shared_16(address(warp ^ 1, m, depth));
    rP[0] = x.x, rP[1] = x.y, rP[2] = x.z, rP[3] = x.w;
  }

  // A number for each of the 16 · kM rows.
  __device__ __forceinline__ void give_number(float x, int row) const {
    ptx::store_shared_4(floats + (warp * 16 * kM + row) * 4, __float_as_uint(x));
  }
  __device__ __forceinline__ float take_number(int row) const {
    return __uint_as_float(ptx::load_shared_4(floats + ((warp ^ 1) * 16 * kM + row) * 4));
  }

  // Fragments as they are in registers: no bank conflict, no swizzle.
  __device__ __forceinline__ uint32_t address(int of_warp, int m, int depth) const {
    return fragments + ((of_warp * kM + m) * kDepth + depth) * 512 + lane * 16;
  }
};

}  // namespace flash::mma_sync
