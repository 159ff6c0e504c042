// What backward does row by row, around its main kernel: the queries' numbers before it, and the gradient of the sink.
#pragma once

#include "common/sequence.h"
#include "common/statistics.h"
#include "gpu/ptx/math.cuh"
#include "gpu/tile/gradient.cuh"

namespace flash {

// One row of a head: numbers that are read in the forward's statistics.
__device__ __forceinline__ int64_t at(const RowArray& array, const Rows& rows, int64_t head, int64_t row) {
  return array.offset(rows.batch, head, rows.first() + row);
}

// The (sequence, head, block of rows) of a CTA.
struct RowBlock {
  int64_t batch, head, first_row;

  __device__ __forceinline__ RowBlock(int64_t blocks, int64_t heads, int rows) {
    const int64_t index = blockIdx.x, of_head = index / blocks;
    batch = of_head / heads, head = of_head % heads, first_row = index % blocks * rows;
  }
};

inline constexpr int kRowThreads = 256;

// Row blocks in arrays that hold something of each: [head][sequence][block]; a packed sequence gets one more than its
// rows fill, so that its first follows from cu_seqlens alone. `m_blocks`: of the longest sequence.
template <int kRows>
__device__ __forceinline__ int64_t first_row_tile(const BwdParams& p, int m_blocks, int64_t batch) {
  return p.rows_q.cu_seqlens.given() ? p.rows_q.cu_seqlens[batch] / kRows + batch : batch * m_blocks;
}

__device__ __forceinline__ RowStatistics<float> statistics_of(const BwdParams& p, const Rows& rows, int64_t head,
                                                              int64_t row) {
  return {static_cast<const float*>(p.reference.data)[at(p.reference, rows, head, row)],
          static_cast<const float*>(p.log2_sum.data)[at(p.log2_sum, rows, head, row)]};
}

// The numbers of a row block's queries, with delta = rowsum(dO ∘ O) - dLSE (paper, Algorithm 4, line 4, and the gradient
// of the LSE). kLanes lanes take a row. `all_tiles`: row blocks of a head.
template <DataType kType, class Table, int kLanes>
__global__ void __launch_bounds__(kRowThreads) numbers_kernel(const __grid_constant__ BwdParams p, float* numbers,
                                                              int m_blocks, int64_t all_tiles, bool vectorised) {
  const RowBlock block(m_blocks, p.heads, Table::kRows);
  const Rows rows = rows_of_sequence(p.rows_q, block.batch);
  if (!rows_are_possible(p.rows_q, rows, block.batch, -1) || block.first_row >= rows.length) return;
  const int64_t tile =
      block.head * all_tiles + first_row_tile<Table::kRows>(p, m_blocks, block.batch) + block.first_row / Table::kRows;
  float* table = numbers + tile * Table::kFloats;
  const int lane = threadIdx.x % kLanes;
  bool any_special = false;
#pragma unroll
  for (int first = 0; first < Table::kRows; first += kRowThreads / kLanes) {
    const int row_of_block = first + static_cast<int>(threadIdx.x) / kLanes;
    const int64_t row = block.first_row + row_of_block, tensor_row = rows.first() + row;
    float sum = 0;
    if (row < rows.length) {
      const auto* dout = static_cast<const uint16_t*>(p.dout.data) + p.dout.offset(rows.batch, block.head, tensor_row);
      const auto* out = static_cast<const uint16_t*>(p.out.data) + p.out.offset(rows.batch, block.head, tensor_row);
      const auto product = [](uint32_t a, uint32_t b) {
        return ptx::unpack_low<kType>(a) * ptx::unpack_low<kType>(b) +
               ptx::unpack_low<kType>(a >> 16) * ptx::unpack_low<kType>(b >> 16);
      };
      if (vectorised) {
        for (int64_t d = 8 * lane; d < p.dim_v; d += 8 * kLanes) {
          const uint4 a = *reinterpret_cast<const uint4*>(dout + d), b = *reinterpret_cast<const uint4*>(out + d);
          sum += product(a.x, b.x) + product(a.y, b.y) + (product(a.z, b.z) + product(a.w, b.w));
        }
      } else {
        for (int64_t d = lane; d < p.dim_v; d += kLanes)
          sum += ptx::unpack_low<kType>(dout[d]) * ptx::unpack_low<kType>(out[d]);
      }
    }
#pragma unroll
    for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane != 0 || row_of_block >= Table::kRows) continue;
    QueryNumbers result;
    if (row < rows.length) {
      const RowStatistics<float> statistics = statistics_of(p, rows, block.head, row);
      if (p.dlse.data != nullptr) sum -= static_cast<const float*>(p.dlse.data)[at(p.dlse, rows, block.head, row)];
      result = {statistics, statistics.log2_sum == -INFINITY ? 0.f : sum};
      any_special |= result.is_special();
    }
    Table::store(table, row_of_block, result);
  }
  any_special = __syncthreads_or(any_special);
  if (threadIdx.x < 4) table[Table::kSpecial + threadIdx.x] = any_special ? 1.f : 0.f;
}

// dsink = -Σ P_sink · delta with P_sink = exp(sink - LSE): the sink is a logit like any other whose value row is zero.
// A CTA takes a head, and adds in an order that is always the same.
template <class Table>
__global__ void __launch_bounds__(kRowThreads)
    sink_kernel(const __grid_constant__ BwdParams p, const float* numbers, int m_blocks, int64_t all_tiles) {
  static __shared__ double sums[kRowThreads];
  const int64_t head = blockIdx.x;
  const float sink = static_cast<const float*>(p.sink)[head];
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Rows rows = rows_of_sequence(p.rows_q, b);
    if (!rows_are_possible(p.rows_q, rows, b, -1)) continue;
    const int64_t first_tile = head * all_tiles + first_row_tile<Table::kRows>(p, m_blocks, b);
    for (int64_t row = threadIdx.x; row < rows.length; row += kRowThreads) {
      const RowStatistics<float> s = statistics_of(p, rows, head, row);
      const float weight = exp2f((sink - s.reference) * kLog2E<float> - log2_sum_for_backward(s));
      const float* table = numbers + (first_tile + row / Table::kRows) * Table::kFloats;
      sum += static_cast<double>(weight) * Table::minus_delta(table, static_cast<int>(row % Table::kRows));
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = kRowThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) static_cast<float*>(p.dsink)[head] = static_cast<float>(sums[0]);
}

}  // namespace flash
