// A barrier of all threads of a CTA in two halves, with work of one's own between them.
#pragma once

#include "common/kernel_key.h"
#include "gpu/ptx/mbarrier.cuh"

namespace flash {

// wait() returns when all threads have come to arrive(), and what they wrote before is seen. Everybody arrives and waits
// once a round; rounds have parity 0, 1, 0, ... Turing has no such barriers: there all of it is in wait().
template <Arch kArch>
struct SplitBarrier {
  uint32_t address;  // 8 bytes of shared memory

  // By one thread, before a __syncthreads.
  __device__ __forceinline__ void init(int warps) const {
    if constexpr (kArch >= Arch::sm80) ptx::mbarrier_init(address, warps * ptx::kArrivalsOfWarp);
  }
  __device__ __forceinline__ void arrive() const {
    if constexpr (kArch >= Arch::sm80) {
      __syncwarp();
      ptx::mbarrier_arrive_of_warp(address, threadIdx.x % 32);
    }
  }
  __device__ __forceinline__ void wait(int parity) const {
    if constexpr (kArch >= Arch::sm80)
      ptx::mbarrier_wait(address, parity);
    else
      __syncthreads();
  }
};

}  // namespace flash
