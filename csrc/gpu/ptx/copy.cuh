// Copies between global and shared memory.
#pragma once

#include <cstdint>

namespace flash::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// shared[0 .. 16) = global[0 .. 16), or zeros, and nothing is read. Both 16-byte aligned. Past L1 (cg): every byte is
// read once by a CTA. A predicate, and not the number of bytes that PTX also takes: that costs six instructions more, as
// the hardware knows only all or nothing. sm_80.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool given) {
  asm volatile(
      "{.reg .pred p; setp.eq.u32 p, %2, 0; cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p;}" ::"r"(shared),
      "l"(global), "r"(static_cast<uint32_t>(given))
      : "memory");
}

// shared[0 .. 4) = global[0 .. 4), both aligned. sm_80.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Until all copies of this thread are there.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_shared_16(uint32_t shared, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t shared, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t shared) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

__device__ __forceinline__ float2 load_shared_8(uint32_t shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
  return x;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t shared) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

}  // namespace flash::ptx
