// The whole story of one call, as plain data: what the binding fills in and every backend reads.
// Strides are in elements and 64-bit by type, so no product of an index and a stride can wrap.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash {

enum class DataType : uint8_t { kFloat64, kFloat32, kFloat16, kBFloat16 };

// Rows of `dim` consecutive elements. Dense tensors are (batch, row, head, dim); packed ones (row, head, dim) have
// batch_stride 0.
struct Operand {
  void* data = nullptr;  // read only, unless the params struct says "output"
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;

  FLASH_HOST_DEVICE int64_t offset(int64_t batch, int64_t head, int64_t row) const {
    return batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// One number per (batch, head, row): LSE, statistics, delta. Contiguous along rows.
struct RowArray {
  void* data = nullptr;  // fp64 for fp64 inputs, else fp32
  int64_t batch_stride = 0;
  int64_t head_stride = 0;

  FLASH_HOST_DEVICE int64_t offset(int64_t batch, int64_t head, int64_t row) const {
    return batch * batch_stride + head * head_stride + row;
  }
};

// A list of lengths or offsets as the caller has it: int32 or int64.
struct IndexArray {
  const void* data = nullptr;
  bool is_64_bit = false;

  FLASH_HOST_DEVICE bool given() const { return data != nullptr; }
  FLASH_HOST_DEVICE int64_t operator[](int64_t i) const {
    return is_64_bit ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Where the rows of each sequence are, on the query side or on the key side; sequence.h reads it.
struct RowLayout {
  int64_t rows = 0;       // dense: rows per batch; varlen: all rows of the packed tensor
  IndexArray cu_seqlens;  // varlen: segment b is [cu_seqlens[b], cu_seqlens[b + 1])
  IndexArray seqused;     // real rows of the segment are [leftpad, seqused)
  IndexArray leftpad;
};

// A tensor that broadcasts to (batch, head, row, column): the stride of a broadcast axis is 0.
struct Broadcast {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  FLASH_HOST_DEVICE bool given() const { return data != nullptr; }
  FLASH_HOST_DEVICE int64_t offset(int64_t batch, int64_t head, int64_t row, int64_t column) const {
    return batch * batch_stride + head * head_stride + row * row_stride + column * column_stride;
  }
};

struct Bias : Broadcast {
  DataType dtype = DataType::kFloat32;
};

struct Mask : Broadcast {};  // bytes, nonzero = may attend

// Blocks of rows × keys that are visited: block_mask.h reads it. Tensors are contiguous: planes of heads, and where the
// mask is the same for all batches or heads, their number of planes is 0.
struct BlockMask {
  const int32_t* kinds = nullptr;        // [plane][row block][key block]
  const uint8_t* patterns = nullptr;     // [pattern][row][key], nonzero = visible
  const int32_t* key_lists = nullptr;    // [plane][row block][1 + k_blocks]: how many key blocks it visits, and which
  const int32_t* query_lists = nullptr;  // [plane][key block][1 + q_blocks]: the same the other way around
  int64_t rows = 1, keys = 1;            // of a block
  int64_t q_blocks = 0, k_blocks = 0;
  int64_t batch_planes = 0, head_planes = 0;
  int64_t pattern_count = 0;

  FLASH_HOST_DEVICE bool given() const { return kinds != nullptr; }
};

struct Score {
  double scale = 1.0;
  double softcap = 0.0;                // 0 = off
  const void* alibi_slopes = nullptr;  // fp64 for fp64 inputs, else fp32
  int64_t alibi_batch_stride = 0;
  int64_t alibi_head_stride = 0;
};

// Which keys a row may see, before lengths are known; visibility.h turns it into intervals.
struct Window {
  bool causal = false;
  bool upper_left = false;  // the diagonal starts at (0, 0) instead of ending at the last row and key
  int64_t left = -1;        // -1 = unlimited
  int64_t right = -1;
};

struct Dropout {
  const int64_t* seed = nullptr;  // two numbers, on the device; null = nothing is dropped
  uint32_t threshold = 0;         // round(p * 65536): dropout.h compares with it
  double keep_scale = 1.0;        // 1 / (1 - p)

  FLASH_HOST_DEVICE bool given() const { return seed != nullptr; }
};

struct AttentionParams {
  DataType dtype = DataType::kFloat32;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t heads_k = 0;  // query head h reads key/value head h / (heads / heads_k)
  int64_t dim = 0;
  int64_t dim_v = 0;
  Operand q, k, v;
  RowLayout rows_q, rows_k;
  Score score;
  Window window;
  Bias bias;
  Mask mask;
  BlockMask block_mask;
  const void* sink = nullptr;  // (heads,): fp64 for fp64 inputs, else fp32
  Dropout dropout;

  FLASH_HOST_DEVICE int64_t group() const { return heads / heads_k; }  // 0 where there are no heads
};

struct FwdParams : AttentionParams {
  Operand out;                   // output
  RowArray lse;                  // output
  RowArray reference, log2_sum;  // output: the two statistics of statistics.h
};

struct BwdParams : AttentionParams {
  Operand out, dout;
  RowArray reference, log2_sum;
  RowArray dlse;       // null: no gradient reaches the LSE
  Operand dq, dk, dv;  // outputs; null: not wanted
  Bias dbias;          // output in the shape of the bias; null: not wanted
  int64_t bias_batch = 1, bias_heads = 1, bias_rows = 1, bias_columns = 1;
  void* dsink = nullptr;  // output (heads,); null: not wanted
};

}  // namespace flash
