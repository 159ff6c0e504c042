// What CTAs do to memory that they share.
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

// *target += x. atomicAdd returns what was there, which costs the wait for it unless the compiler sees that nobody wants
// it.
__device__ __forceinline__ void add_global(float* target, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target), "f"(x) : "memory");
}

}  // namespace flash::ptx
