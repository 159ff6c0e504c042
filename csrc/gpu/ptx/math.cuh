// Arithmetic that C++ has no word for.
#pragma once

#include <cstdint>

#include "common/kernel_key.h"

namespace flash::ptx {

// 2^x, relative error 2^-22; below 2^-126: 0. One instruction, where exp2f scales its range first.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, relative error 2^-23; of what is below 2^-126: inf.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x, as if nobody knew where it came from: what is made from it is made anew instead of being kept in registers.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float opaque_number(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// What is in memory is read anew behind this, also what has just been written: registers are free for something else.
__device__ __forceinline__ void forget_memory() { asm volatile("" ::: "memory"); }

// Four bytes, each all ones or all zeros: the sign of the byte of (a, b) that kSelector's digit names, with its bit 3
// set; b has bytes 4 to 7.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_signs(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "n"(kSelector));
  return y;
}

// Whether x has one of `bits`, as one instruction whose result sets a predicate: from plain C++ compilers make a shift, an and and a
// comparison.
__device__ __forceinline__ bool has_bits(uint32_t x, uint32_t bits) {
  uint32_t y;
  asm("and.b32 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(bits));
  return y != 0;
}

// (low, high), each rounded to nearest even.
template <DataType kType>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t y;
  if constexpr (kType == DataType::kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
    asm("{.reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(y)
        : "f"(low), "f"(high));
#endif
  }
  return y;
}

// The low half of x.
template <DataType kType>
__device__ __forceinline__ float unpack_low(uint32_t x) {
  if constexpr (kType == DataType::kBFloat16) return __uint_as_float(x << 16);
  float y;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(x));
  return y;
}

}  // namespace flash::ptx
