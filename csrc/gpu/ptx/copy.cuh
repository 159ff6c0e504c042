// Copies between global and shared memory.
#pragma once

#include <cstdint>

namespace flash::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// shared[0 .. 16) = global[0 .. bytes), then zeros; bytes = 0 reads nothing. Both 16-byte aligned. Past L1 (cg): every
// byte is read once by a CTA. sm_80.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

// Closes a group: the copies of this thread since the last one.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of this thread are on their way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t shared, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t shared, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
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
