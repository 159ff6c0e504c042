// From the tensors of an op call to params.h: checks, strides, and the allocated outputs.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>

#include "common/params.h"

namespace flash {

using Tensor = torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Everything of a call but q, k, v, bias and sink, in the order of the schema.
struct CallOptions {
  double softmax_scale;
  bool causal;
  int64_t window_left, window_right;
  bool upper_left;
  double softcap;
  double dropout_p = 0;
  OptionalTensor dropout_seed{}, alibi_slopes{}, mask{};
  OptionalTensor cu_seqlens_q{}, cu_seqlens_k{};
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  OptionalTensor seqused_q{}, seqused_k{}, leftpad_q{}, leftpad_k{};
  OptionalTensor block_kinds{}, block_patterns{}, key_lists{}, query_lists{};
  int64_t family = 0;
};

// Families of GPU kernels are numbered from 0 (any) to this: see schema.cpp.
inline constexpr int64_t kLastFamily = 2;
int64_t checked_family(int64_t family);

// What a call hands to the backend beside the params: the tensors that hold the results.
struct Forward {
  FwdParams params;
  Tensor out, lse, statistics;
};

struct Backward {
  BwdParams params;
  Tensor dq, dk, dv, dbias, dsink;  // without elements where not wanted
};

struct Wanted {
  bool dq, dk, dv, dbias, dsink;
};

// x, copied if consecutive elements of its last dimension are not neighbours in memory.
Tensor with_unit_stride(const Tensor& x);

// A tensor on the device of `like`; of zeros, or of whatever was there.
Tensor allocate(const Tensor& like, const std::vector<int64_t>& shape, torch::headeronly::ScalarType dtype, bool zeros);

Forward build_forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                      const OptionalTensor& sink, const CallOptions& options);

Backward build_backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& statistics, const OptionalTensor& bias,
                        const OptionalTensor& sink, const CallOptions& options, Wanted wanted);

// Reads cu_seqlens, lengths and left pads (host memory) and refuses what would lead outside the tensors.
void check_contents(const AttentionParams& params, const OptionalTensor& bias, const CallOptions& options);

}  // namespace flash
