// Order between CTAs.
#pragma once

namespace flash::ptx {

// What others wrote before they raised `counter` is seen after it was read so.
__device__ __forceinline__ int load_acquire(const int* counter) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

__device__ __forceinline__ void add_release(int* counter, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

}  // namespace flash::ptx
