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
    // Their product is a number of CTAs: 64-bit divisions would take longer than the rows.
    const auto blocks32 = static_cast<uint32_t>(blocks), heads32 = static_cast<uint32_t>(heads);
    const uint32_t of_head = blockIdx.x / blocks32;
    batch = of_head / heads32, head = of_head % heads32, first_row = int64_t{blockIdx.x % blocks32} * rows;
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

// Loads of 16 bytes that a thread has under way at once: what it takes to keep the memory busy.
inline constexpr int kLoadsAtOnce = 8;

// The numbers of a row block's queries, with delta = rowsum(dO ∘ O) - dLSE (paper, Algorithm 4, line 4, and the gradient
// of the LSE); and zeros for the sums of their dQ, of kSums numbers, unless dq_sum is null: they are written while O and dO
// are on their way. kLanes lanes take a row, of kLanes · 8 columns at most. `all_tiles`: row blocks of a head.
template <DataType kType, class Table, int kLanes, int kSums>
__global__ void __launch_bounds__(kRowThreads)
    numbers_kernel(const __grid_constant__ BwdParams p, float* numbers, float* dq_sum, int m_blocks, int64_t all_tiles,
                   bool vectorised) {
  constexpr int kAtOnce = kRowThreads / kLanes, kRounds = (Table::kRows + kAtOnce - 1) / kAtOnce;
  constexpr int kBatch = kRounds < kLoadsAtOnce / 2 ? kRounds : kLoadsAtOnce / 2;
  static_assert(Table::kRows <= kRowThreads && kRounds % kBatch == 0);
  static __shared__ float sums[kRounds * kAtOnce];
  const RowBlock block(m_blocks, p.heads, Table::kRows);
  const Rows rows = rows_of_sequence(p.rows_q, block.batch);
  if (!rows_are_possible(p.rows_q, rows, block.batch, -1) || block.first_row >= rows.length) return;
  const int64_t tile =
      block.head * all_tiles + first_row_tile<Table::kRows>(p, m_blocks, block.batch) + block.first_row / Table::kRows;
  float* table = numbers + tile * Table::kFloats;
  const int there = static_cast<int>(min(int64_t{Table::kRows}, rows.length - block.first_row));

  // Of the row whose numbers this thread makes in the end, asked for before all else.
  const int own = static_cast<int>(threadIdx.x);
  const int64_t own_row = block.first_row + own;
  RowStatistics<float> statistics;
  float dlse = 0;
  if (own < there) {
    statistics = statistics_of(p, rows, block.head, own_row);
    if (p.dlse.data != nullptr) dlse = static_cast<const float*>(p.dlse.data)[at(p.dlse, rows, block.head, own_row)];
  }

  if (dq_sum != nullptr) {
    auto* sums_of_dq = reinterpret_cast<float4*>(dq_sum + tile * kSums);
    for (int i = own; i < kSums / 4; i += kRowThreads) sums_of_dq[i] = float4{};
  }

  const int lane = own % kLanes, first = own / kLanes;
  const auto first_of = [&](const Operand& x) {
    return static_cast<const uint16_t*>(x.data) +
           x.offset(rows.batch, block.head, rows.first() + block.first_row + first);
  };
  const uint16_t *dout = first_of(p.dout), *out = first_of(p.out);
  const auto product = [](uint32_t a, uint32_t b) {
    return ptx::unpack_low<kType>(a) * ptx::unpack_low<kType>(b) +
           ptx::unpack_low<kType>(a >> 16) * ptx::unpack_low<kType>(b >> 16);
  };
#pragma unroll
  for (int begin = 0; begin < kRounds; begin += kBatch) {
    float sum[kBatch] = {};
    if (vectorised) {
      uint4 a[kBatch], b[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t row = (begin + i) * kAtOnce;
        a[i] = b[i] = uint4{};
        if (first + row >= there || 8 * lane >= p.dim_v) continue;
        a[i] = *reinterpret_cast<const uint4*>(dout + row * p.dout.row_stride + 8 * lane);
        b[i] = *reinterpret_cast<const uint4*>(out + row * p.out.row_stride + 8 * lane);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        sum[i] =
            product(a[i].x, b[i].x) + product(a[i].y, b[i].y) + (product(a[i].z, b[i].z) + product(a[i].w, b[i].w));
    } else {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t row = (begin + i) * kAtOnce;
        if (first + row >= there) continue;
        for (int64_t d = lane; d < p.dim_v; d += kLanes)
          sum[i] += ptx::unpack_low<kType>(dout[row * p.dout.row_stride + d]) *
                    ptx::unpack_low<kType>(out[row * p.out.row_stride + d]);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int other = kLanes / 2; other > 0; other /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], other);
      if (lane == 0) sums[(begin + i) * kAtOnce + first] = sum[i];
    }
  }
  __syncthreads();

  QueryNumbers result;
  if (own < there) {
    // Rows without keys have no O, and their dO may be NaN.
    const float of_keys = log2_sum_for_backward(statistics) == INFINITY ? 0.f : sums[own];
    result = {statistics, statistics.log2_sum == -INFINITY ? 0.f : of_keys - dlse};
  }
  if (own < Table::kRows) Table::store(table, own, result);
  const bool any_special = __syncthreads_or(own < there && result.is_special());
  if (own < 4) table[Table::kSpecial + own] = any_special ? 1.f : 0.f;
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
      const float weight = sink_weight(s, sink);
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
