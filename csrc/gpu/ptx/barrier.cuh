// Barriers beside __syncthreads.
#pragma once

#include <cstdint>

namespace flash::ptx {

// Waits until `threads` threads, whole warps, are at barrier `index`; what they wrote to shared memory is seen.
__device__ __forceinline__ void barrier_sync(int index, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

// Counts as being there, and does not wait.
__device__ __forceinline__ void barrier_arrive(int index, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

}  // namespace flash::ptx
