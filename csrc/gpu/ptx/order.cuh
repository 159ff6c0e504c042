// Who does what, and what CTAs do to memory that they share.
#pragma once

#include <cstdint>

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

// *target += x. atomicAdd returns what was there, which costs the wait for it unless the compiler sees that nobody wants
// it.
__device__ __forceinline__ void add_global(float* target, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target), "f"(x) : "memory");
}

// True in one lane of the warp. sm_90.
__device__ __forceinline__ bool elect_one() {
  uint32_t is_elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p;}" : "=r"(is_elected));
  return is_elected != 0;
}

}  // namespace flash::ptx
