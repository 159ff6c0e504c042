// Barriers in shared memory that count arrivals and, on sm_90, bytes: what a copy that nobody executes can arrive at.
// sm_80.
#pragma once

#include <cstdint>

namespace flash::ptx {

// A phase ends when `arrivals` threads have arrived and all bytes that were announced are there. The first has parity 0.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// What was initialised is seen by the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A warp arrives by one lane, after a __syncwarp where others have used what is given. compute-sanitizer's racecheck does
// not know that this orders what they did: for it, all lanes arrive.
#ifdef FLASH_ATTN_ALL_LANES_ARRIVE
inline constexpr int kArrivalsOfWarp = 32;
#else
inline constexpr int kArrivalsOfWarp = 1;
#endif
__device__ __forceinline__ void mbarrier_arrive_of_warp(uint32_t barrier, int lane) {
  if (lane < kArrivalsOfWarp) mbarrier_arrive(barrier);
}

// Arrives, and announces `bytes` that copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity has ended; of the phase before the first one (parity 1) nobody waits.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{.reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
      "again_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"  // sleeps meanwhile
#else
      "again_%=: mbarrier.test_wait.parity.shared::cta.b64 p, [%0], %1;\n"
#endif
      "@!p bra again_%=;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace flash::ptx
