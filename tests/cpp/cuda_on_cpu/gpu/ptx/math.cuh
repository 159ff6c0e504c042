#pragma once

#include <cuda_runtime.h>

#include "common/kernel_key.h"
#include "cpu/convert.h"

namespace flash::ptx {

inline float exp2_approximate(float x) { return std::exp2(x); }
inline uint32_t opaque(uint32_t x) { return x; }
inline float opaque_number(float x) { return x; }
inline float reciprocal(float x) { return 1 / x; }
inline bool has_bits(uint32_t x, uint32_t bits) { return (x & bits) != 0; }

template <uint32_t kSelector>
uint32_t permute_signs(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = kSelector >> (4 * i) & 7, word = from < 4 ? a : b;
    if (word >> (from % 4 * 8 + 7) & 1) result |= 0xFFu << (8 * i);
  }
  return result;
}

template <DataType kType>
uint32_t pack(float low, float high) {
  const auto round = [](float x) { return kType == DataType::kBFloat16 ? cpu::to_bf16(x) : cpu::to_fp16(x); };
  return round(low) | static_cast<uint32_t>(round(high)) << 16;
}
template <DataType kType>
float unpack_low(uint32_t x) {
  const auto half = static_cast<uint16_t>(x);
  return kType == DataType::kBFloat16 ? cpu::from_bf16(half) : cpu::from_fp16(half);
}

}  // namespace flash::ptx
