// Numbers of any input type and the type that arithmetic is done in: fp64 for fp64, else fp32.
#pragma once

#include <bit>
#include <cstdint>

#include "common/params.h"

namespace flash::cpu {

inline float from_fp16(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16, exponent = h & 0x7C00u, mantissa = h & 0x03FFu;
  const uint32_t normal = (uint32_t{h & 0x7FFFu} << 13) + (112u << 23);
  const uint32_t special = 0x7F800000u | (mantissa << 13);  // Inf, NaN
  const uint32_t small = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-24f);
  return std::bit_cast<float>(sign | (exponent == 0 ? small : exponent == 0x7C00u ? special : normal));
}

// Round to nearest, ties to even, as the hardware does.
inline uint16_t to_fp16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  uint32_t h;
  if (magnitude >= 0x47800000u) {  // 65536 and above, Inf, NaN
    h = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: the addition to 0.5 rounds at fp16's last place
    h = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    h = (magnitude - (112u << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;  // may carry into Inf: right
  }
  return static_cast<uint16_t>(sign | h);
}

inline float from_bf16(uint16_t b) { return std::bit_cast<float>(uint32_t{b} << 16); }

inline uint16_t to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline int64_t bytes_of(DataType dtype) {
  return dtype == DataType::kFloat64 ? 8 : dtype == DataType::kFloat32 ? 4 : 2;
}

// Calls body(store) with store(i, x) writing x, rounded, to element `offset + i`.
template <class Real, class Body>
void with_storer(DataType dtype, void* data, int64_t offset, Body&& body) {
  switch (dtype) {
    case DataType::kFloat64:
      return body([p = static_cast<double*>(data) + offset](int64_t i, Real x) { p[i] = x; });
    case DataType::kFloat32:
      return body([p = static_cast<float*>(data) + offset](int64_t i, Real x) { p[i] = static_cast<float>(x); });
    case DataType::kFloat16:
      return body(
          [p = static_cast<uint16_t*>(data) + offset](int64_t i, Real x) { p[i] = to_fp16(static_cast<float>(x)); });
    case DataType::kBFloat16:
      return body(
          [p = static_cast<uint16_t*>(data) + offset](int64_t i, Real x) { p[i] = to_bf16(static_cast<float>(x)); });
  }
}

}  // namespace flash::cpu
