// From accumulators to global memory: O through shared memory in rows of 16 bytes, statistics and LSE by one thread of
// each row.
#pragma once

#include "common/sequence.h"
#include "gpu/tile/copy_tile.cuh"
#include "gpu/tile/score.cuh"
#include "gpu/tile/softmax.cuh"

namespace flash {

// The two statistics and the LSE of a row.
__device__ __forceinline__ void store_statistics(const FwdParams& p, const Sequence& sequence, int64_t head, int row,
                                                 RowStatistics<float> statistics) {
  const int64_t batch = sequence.q.batch, tensor_row = sequence.q.first() + row;
  static_cast<float*>(p.reference.data)[p.reference.offset(batch, head, tensor_row)] = statistics.reference;
  static_cast<float*>(p.log2_sum.data)[p.log2_sum.offset(batch, head, tensor_row)] = statistics.log2_sum;
  static_cast<float*>(p.lse.data)[p.lse.offset(batch, head, tensor_row)] = log_sum_exp(statistics);
}

// Impossible lengths (nobody on the host has read them): nothing is computed, and NaN says so.
inline __device__ __noinline__ void store_nan(const FwdParams& p, int64_t batch, int64_t head, int thread,
                                              int threads) {
  Sequence whole{batch, {}, {}};  // from the tensor's first row on
  Range rows{0, p.rows_q.rows};
  if (p.rows_q.cu_seqlens.given())
    rows = intersect(rows, {p.rows_q.cu_seqlens[batch], p.rows_q.cu_seqlens[batch + 1]});
  else
    whole.q.batch = batch;
  for (int64_t row = rows.begin + thread; row < rows.end; row += threads) {
    auto* out = static_cast<uint16_t*>(p.out.data) + p.out.offset(whole.q.batch, head, row);
    for (int64_t d = 0; d < p.dim_v; ++d) out[d] = 0x7FFF;  // NaN in fp16 and in bf16
    store_statistics(p, whole, head, static_cast<int>(row), {NAN, NAN});
  }
}

// The row of this thread when the four threads that share 2 · kM rows take one each: its place among them is lane % 4.
struct OwnRow {
  float reference = -INFINITY, row_sum = 0;
};

template <int kM>
__device__ __forceinline__ OwnRow own_row(const OnlineSoftmax<kM>& softmax, int lane) {
  OwnRow own;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_sum_of(softmax.row_sum[m][half]);
      if (lane % 4 == 2 * m + half) own = {softmax.reference[m][half], sum};
    }
  return own;
}

// Multiplies the rows of O by what the thread that has taken each says.
template <int kM, int kO>
__device__ __forceinline__ void scale_rows(float (&rO)[kM][kO][4], float own_factor, int lane) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = __shfl_sync(~0u, own_factor, (lane & ~3) + 2 * m + half);
#pragma unroll
      for (int n = 0; n < kO; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) rO[m][n][2 * half + c] *= factor;
    }
}

// A warp's O (16 · kM rows from `first_row` of the tile, columns from 8 · first_chunk on) goes to `tile`, in the layout
// of Panels. Of column blocks of 16 it has every kShare-th.
template <DataType kType, int kRows, int kHeadDim, int kPeriod = 8, int kShare = 1, int kM, int kO>
__device__ __forceinline__ void stage_output(uint32_t tile, const float (&rO)[kM][kO][4], int first_row, int lane,
                                             int first_chunk = 0) {
  using Layout = Panels<kHeadDim, kPeriod>;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int n = 0; n < kO; ++n) {
        const int of_all = first_chunk + n / 2 * 2 * kShare + n % 2;
        const int panel = of_all / Layout::kChunks, chunk = of_all % Layout::kChunks;
        const uint32_t at = tile + panel * kRows * Layout::kRowBytes + Layout::offset(row, chunk) + lane % 4 * 4;
        ptx::store_shared_4(at, ptx::pack<kType>(rO[m][n][2 * half], rO[m][n][2 * half + 1]));
      }
    }
}

// A warp copies its staged rows to the tensor; row i of the tile is row `first + i` of the head, of which there are
// `rows`.
template <int kRows, int kHeadDim, int kWarpRows, int kColumns, int kPeriod = 8>
__device__ __forceinline__ void store_rows(uint32_t tile, uint16_t* out, const HeadRows& head, int first, int rows,
                                           int first_row, int lane) {
  using Layout = Panels<kHeadDim, kPeriod>;
  constexpr int kChunksOfAll = kColumns / 8;
#pragma unroll 4
  for (int i = lane; i < kWarpRows * kChunksOfAll; i += 32) {
    const int row = first_row + i / kChunksOfAll, chunk_of_all = i % kChunksOfAll;
    const int columns = head.dim - 8 * chunk_of_all;
    if (first + row >= rows || columns <= 0) continue;
    const int panel = chunk_of_all / Layout::kChunks, chunk = chunk_of_all % Layout::kChunks;
    const uint4 x = ptx::load_shared_16(tile + panel * kRows * Layout::kRowBytes + Layout::offset(row, chunk));
    uint16_t* target = out + (first + row) * head.row_stride + 8 * chunk_of_all;
    if (head.vectorised && columns >= 8) {
      *reinterpret_cast<uint4*>(target) = x;
    } else {
      const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int d = 0; d < 8; ++d)
        if (d < columns) target[d] = static_cast<uint16_t>(pairs[d / 2] >> (16 * (d % 2)));
    }
  }
}

// A warp's O, times a factor of each row, goes from registers to the tensor, whose rows are vectorised: four lanes that
// share a row change their pairs of columns for 16 bytes of one n8 tile each. `row_of(half)`: where this
// lane's two rows are; `is_there(half)`: whether they are.
template <DataType kType, int kO>
__device__ __forceinline__ void store_fragments(int dim, const float (&rO)[kO][4], const float (&factor)[2], int lane,
                                                const auto& row_of, const auto& is_there) {
  static_assert(kO % 4 == 0);
  const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
  const auto swap = [](uint32_t& a, uint32_t& b, bool first_of_both, int distance) {
    const uint32_t other = __shfl_xor_sync(~0u, first_of_both ? a : b, distance);
    (first_of_both ? a : b) = other;
  };
  const int columns = dim - lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint16_t* target = row_of(half) + lane % 4 * 8;
    const int there = is_there(half) ? columns : 0;
#pragma unroll
    for (int n = 0; n < kO; n += 4) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = ptx::pack<kType>(rO[n + i][2 * half] * factor[half], rO[n + i][2 * half + 1] * factor[half]);
      swap(x[0], x[1], odd, 1);
      swap(x[2], x[3], odd, 1);
      swap(x[0], x[2], upper, 2);
      swap(x[1], x[3], upper, 2);
      if (8 * n < there) *reinterpret_cast<uint4*>(target + 8 * n) = uint4{x[0], x[1], x[2], x[3]};
    }
  }
}

}  // namespace flash
