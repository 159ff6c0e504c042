// Cards, and the tables of kernels that a library may have been built with.
#pragma once

#include <vector>

#include "gpu/plan.h"

namespace flash {

inline constexpr int kDims[] = {32, 64, 96, 128, 192, 256};
inline constexpr Variant kVariants[] = {Variant::plain, Variant::dropout, Variant::modified, Variant::biased};

inline std::vector<KernelKey> all_keys() {
  std::vector<KernelKey> keys;
  for (int dim : kDims)
    for (Variant variant : kVariants) {
      keys.push_back({Arch::sm75, DataType::kFloat16, dim, variant});
      keys.push_back({Arch::sm80, DataType::kFloat16, dim, variant});
      keys.push_back({Arch::sm80, DataType::kBFloat16, dim, variant});
    }
  return keys;
}

// Capability, shared memory of a CTA and of an SM.
inline constexpr Card kT4{75, 64 << 10, 64 << 10, 4 << 20}, kA100{80, 163 << 10, 164 << 10, 40 << 20},
    kRtx3090{86, 99 << 10, 100 << 10, 6 << 20}, kH200{90, 227 << 10, 228 << 10, 60 << 20},
    kRtx5090{120, 99 << 10, 100 << 10, 96 << 20}, kB200{100, 227 << 10, 228 << 10, 126 << 20},
    kRtx4090{89, 99 << 10, 100 << 10, 72 << 20};

inline std::vector<KernelKey> keys_with_wgmma() {
  std::vector<KernelKey> keys = all_keys();
  for (int dim : {64, 96, 128, 192, 256})
    for (Variant variant : {Variant::plain, Variant::dropout, Variant::modified})
      for (DataType dtype : {DataType::kFloat16, DataType::kBFloat16})
        keys.push_back({Arch::sm90, dtype, dim, variant});
  return keys;
}

}  // namespace flash
