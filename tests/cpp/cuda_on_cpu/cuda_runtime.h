// CUDA kernels as plain C++: every thread of a CTA is a thread, one CTA runs after the other. Stands in for the real
// header when kernels are compiled for the CPU, so that they can be tested without a GPU, and their barriers by
// ThreadSanitizer. The instructions of gpu/ptx have stand-ins beside this file.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx;

namespace cuda_on_cpu {

inline constexpr int kMostThreads = 1024;

// Of the CTA that runs.
inline std::unique_ptr<std::barrier<>> cta;
inline std::vector<std::unique_ptr<std::barrier<>>> warps;
inline std::array<std::unique_ptr<std::barrier<>>, 16> named;  // made by whoever comes first
inline std::mutex making;
inline float exchanged[kMostThreads];
inline std::atomic<bool> any;

inline std::barrier<>& warp() { return *warps[threadIdx.x / 32]; }
inline unsigned warp_begin() { return threadIdx.x / 32 * 32; }
inline unsigned lane() { return threadIdx.x % 32; }

inline std::barrier<>& named_barrier(int index, int threads) {
  const std::lock_guard lock(making);
  if (named[index] == nullptr) named[index] = std::make_unique<std::barrier<>>(threads);
  return *named[index];
}

// Runs kernel() for every thread of every CTA; before_cta() comes before each CTA.
template <class Kernel, class Before>
void launch(unsigned blocks, int threads, const Kernel& kernel, const Before& before_cta) {
  for (unsigned block = 0; block < blocks; ++block) {
    before_cta();
    any = false;
    cta = std::make_unique<std::barrier<>>(threads);
    warps.clear();
    named = {};
    for (int w = 0; w < threads / 32; ++w) warps.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i)
      all.emplace_back([&, i] {
        threadIdx.x = static_cast<unsigned>(i), blockIdx.x = block;
        kernel();
        cta->arrive_and_drop();
        warp().arrive_and_drop();
      });
    for (std::thread& thread : all) thread.join();
  }
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::cta->arrive_and_wait(); }
inline bool __syncthreads_or(bool x) {
  if (x) cuda_on_cpu::any = true;
  __syncthreads();
  const bool result = cuda_on_cpu::any;
  __syncthreads();
  if (threadIdx.x == 0) cuda_on_cpu::any = false;
  __syncthreads();
  return result;
}
inline void __syncwarp() { cuda_on_cpu::warp().arrive_and_wait(); }
inline void __threadfence() {}

inline float __shfl_sync(unsigned, float x, int from) {
  using namespace cuda_on_cpu;
  exchanged[threadIdx.x] = x;
  __syncwarp();
  const float result = exchanged[warp_begin() + static_cast<unsigned>(from) % 32];
  __syncwarp();
  return result;
}
inline float __shfl_xor_sync(unsigned mask, float x, int other) {
  return __shfl_sync(mask, x, static_cast<int>(cuda_on_cpu::lane()) ^ other);
}
inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t x, int other) {
  return std::bit_cast<uint32_t>(__shfl_xor_sync(mask, std::bit_cast<float>(x), other));
}
inline bool __any_sync(unsigned mask, bool x) {
  float sum = x ? 1.f : 0.f;
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(mask, sum, other);
  return sum > 0;
}
inline bool __all_sync(unsigned mask, bool x) { return !__any_sync(mask, !x); }
inline unsigned __ballot_sync(unsigned, bool x) {
  using namespace cuda_on_cpu;
  exchanged[threadIdx.x] = x ? 1.f : 0.f;
  __syncwarp();
  unsigned result = 0;
  for (unsigned i = 0; i < 32; ++i) result |= (exchanged[warp_begin() + i] != 0 ? 1u : 0u) << i;
  __syncwarp();
  return result;
}
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((((std::uint64_t{high} << 32) | low) << (shift < 32 ? shift : 32)) >> 32);
}
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __popc(unsigned x) { return std::popcount(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
using std::max;
using std::min;
