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

// Axes of the tensor in the order of ptx::tma_load.
inline bool encode(CUtensorMap& map, DataType type, const Operand& x, int64_t dim, int64_t rows, int64_t heads,
                   int64_t batches, int box_rows) {
  const auto encode_tiled = encode_function();
  if (encode_tiled == nullptr) return false;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batches)};
  // An axis of one has no stride worth its name.
  const auto bytes = [](int64_t stride, int64_t size) -> cuuint64_t { return size > 1 ? 2 * stride : 16; };
  const cuuint64_t strides[3] = {bytes(x.row_stride, rows), bytes(x.head_stride, heads),
                                 bytes(x.batch_stride, batches)};
  const cuuint32_t box[4] = {kPanelColumns, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  return encode_tiled(&map,
                      type == DataType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                      4, x.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether a sequence may end, or begin, elsewhere than its tensor.
FLASH_HOST_DEVICE bool has_lengths(const RowLayout& rows) {
  return rows.cu_seqlens.given() || rows.seqused.given() || rows.leftpad.given();
}

// False: the driver refuses.
inline bool make_tensor_maps(TensorMaps& maps, const FwdParams& p, int keys) {
  const auto batches = [&](const RowLayout& rows) { return rows.cu_seqlens.given() ? 1 : p.batch; };
  const auto of_keys = [&](CUtensorMap& map, const Operand& x, int64_t dim, int box_rows) {
    return encode(map, p.dtype, x, dim, p.rows_k.rows, p.heads_k, batches(p.rows_k), box_rows);
  };
  bool made = encode(maps.q, p.dtype, p.q, p.dim, p.rows_q.rows, p.heads, batches(p.rows_q), 64) &&
              of_keys(maps.k, p.k, p.dim, keys) && of_keys(maps.v, p.v, p.dim_v, keys);
  if (has_lengths(p.rows_k))
    made = made && of_keys(maps.k_eight, p.k, p.dim, 8) && of_keys(maps.v_eight, p.v, p.dim_v, 8) &&
           of_keys(maps.k_one, p.k, p.dim, 1) && of_keys(maps.v_one, p.v, p.dim_v, 1);
  return made;
}

}  // namespace flash::wgmma
