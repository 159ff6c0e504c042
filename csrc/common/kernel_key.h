// What tells one GPU kernel from another at compile time: the columns of kernels.def. All else is decided at run time.
#pragma once

#include "common/params.h"

namespace flash {

// What a kernel is compiled for. Its PTX runs on every newer GPU too, except that of sm90 (wgmma exists there alone).
enum class Arch : int { sm75 = 75, sm80 = 80, sm86 = 86, sm89 = 89, sm90 = 90, sm120 = 120 };

// Each contains the ones before it.
enum class Variant : int {
  plain,     // S = scale · QKᵀ with scale > 0; causal, window, lengths, GQA, sink
  dropout,   // and dropout
  modified,  // and any scale, softcap, ALiBi
  biased,    // and a bias, a mask, rows at any address and of any length
};

struct KernelKey {
  Arch arch;
  DataType dtype;
  int head_dim;  // the bucket: the largest dim and dim_v that the kernel takes
  Variant variant;

  constexpr bool operator==(const KernelKey&) const = default;
};

// The spelling of data types in kernels.def.
namespace table {
inline constexpr DataType fp32 = DataType::kFloat32, fp16 = DataType::kFloat16, bf16 = DataType::kBFloat16;
}  // namespace table

}  // namespace flash
