// Descriptions of Q, K and V for the copy engine, made by the host for each launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "common/host_device.h"
#include "common/params.h"

namespace flash::wgmma {

inline constexpr int kPanelColumns = 64;

// Boxes of 64 columns and as many rows as a tile has. Sequences with lengths of their own end in the middle of one: what is
// behind comes in boxes of eight rows and of one, from outside of the tensor, where all is zero.
struct TensorMaps {
  CUtensorMap q, k, v;
  CUtensorMap k_eight, v_eight, k_one, v_one;  // not made where sequences end with the tensor
};

// The driver's function: a library of ours that is linked with the driver could not be loaded without one.
inline decltype(&cuTensorMapEncodeTiled) encode_function() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) !=
        cudaSuccess)
      found = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

// An axis behind that of the head dim.
struct Axis {
  int64_t size, stride;
  int of_box = 1;
};

// Axes in the order of ptx::tma_load, or of tma_load_groups.
template <size_t kAxes>
bool encode(CUtensorMap& map, DataType type, void* data, int64_t dim, const Axis (&axes)[kAxes]) {
  const auto encode_tiled = encode_function();
  if (encode_tiled == nullptr) return false;
  cuuint64_t sizes[kAxes + 1] = {static_cast<cuuint64_t>(dim)}, strides[kAxes];
  cuuint32_t box[kAxes + 1] = {kPanelColumns}, steps[kAxes + 1] = {1};
  for (size_t i = 0; i < kAxes; ++i) {
    sizes[i + 1] = static_cast<cuuint64_t>(axes[i].size);
    // An axis of one has no stride worth its name.
    strides[i] = axes[i].size > 1 ? static_cast<cuuint64_t>(2 * axes[i].stride) : 16;
    box[i + 1] = static_cast<cuuint32_t>(axes[i].of_box), steps[i + 1] = 1;
  }
  return encode_tiled(
             &map, type == DataType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             kAxes + 1, data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether a sequence may end, or begin, elsewhere than its tensor.
FLASH_HOST_DEVICE bool has_lengths(const RowLayout& rows) {
  return rows.cu_seqlens.given() || rows.seqused.given() || rows.leftpad.given();
}

// `packed_queries`: as in FwdLaunch. False: the driver refuses.
inline bool make_tensor_maps(TensorMaps& maps, const FwdParams& p, int keys, int packed_queries) {
  const auto batches = [&](const RowLayout& rows) { return rows.cu_seqlens.given() ? 1 : p.batch; };
  const auto of_keys = [&](CUtensorMap& map, const Operand& x, int64_t dim, int box_rows) {
    return encode(
        map, p.dtype, x.data, dim,
        {{p.rows_k.rows, x.row_stride, box_rows}, {p.heads_k, x.head_stride}, {batches(p.rows_k), x.batch_stride}});
  };
  const Operand& q = p.q;
  const Axis batches_q{batches(p.rows_q), q.batch_stride};
  const auto group = static_cast<int>(p.group());
  bool made = packed_queries == 0 ? encode(maps.q, p.dtype, q.data, p.dim,
                                           {{p.rows_q.rows, q.row_stride, 64}, {p.heads, q.head_stride}, batches_q})
                                  : encode(maps.q, p.dtype, q.data, p.dim,
                                           {{group, q.head_stride, group},
                                            {p.rows_q.rows, q.row_stride, packed_queries},
                                            {p.heads_k, group * q.head_stride},
                                            batches_q});
  made = made && of_keys(maps.k, p.k, p.dim, keys) && of_keys(maps.v, p.v, p.dim_v, keys);
  if (has_lengths(p.rows_k))
    made = made && of_keys(maps.k_eight, p.k, p.dim, 8) && of_keys(maps.v_eight, p.v, p.dim_v, 8) &&
           of_keys(maps.k_one, p.k, p.dim, 1) && of_keys(maps.v_one, p.v, p.dim_v, 1);
  return made;
}

}  // namespace flash::wgmma
