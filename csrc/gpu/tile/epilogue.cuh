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

// Normalises O and writes the statistics. Of the four threads that share 2 · kM rows each finishes one, and tells the
// others by which factor.
template <int kM, int kO>
__device__ __forceinline__ void finish_rows(const OnlineSoftmax<kM>& softmax, float (&rO)[kM][kO][4],
                                            const FwdParams& p, const Sequence& sequence, int64_t head,
                                            const FragmentPlace& place, float sink, float keep_scale, ScoreUnit unit,
                                            int lane) {
  const int mine = lane % 4;
  float reference = -INFINITY, row_sum = 0;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_sum_of(softmax.row_sum[m][half]);
      if (mine == 2 * m + half) reference = softmax.reference[m][half], row_sum = sum;
    }
  const FinishedRow row = finish_row(reference, row_sum, sink, unit);
  const int position = place.row + 8 * mine;
  if (mine < 2 * kM && position < place.rows) store_statistics(p, sequence, head, position, row.statistics);
  const float factor = row.normalise * keep_scale;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float f = __shfl_sync(~0u, factor, (lane & ~3) + 2 * m + half);
#pragma unroll
      for (int n = 0; n < kO; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) rO[m][n][2 * half + c] *= f;
    }
}

// A warp's O (16 · kM rows from `first_row` of the tile) goes to `tile`, in the layout of Panels.
template <DataType kType, int kRows, int kHeadDim, int kM>
__device__ __forceinline__ void stage_output(uint32_t tile, const float (&rO)[kM][kHeadDim / 8][4], int first_row,
                                             int lane) {
  using Layout = Panels<kHeadDim>;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const int panel = n / Layout::kChunks, chunk = n % Layout::kChunks;
        const uint32_t at = tile + panel * kRows * Layout::kRowBytes + Layout::offset(row, chunk) + lane % 4 * 4;
        ptx::store_shared_4(at, ptx::pack<kType>(rO[m][n][2 * half], rO[m][n][2 * half + 1]));
      }
    }
}

// A warp copies its staged rows to the tensor; row i of the tile is row `first + i` of the head, of which there are
// `rows`.
template <int kRows, int kHeadDim, int kWarpRows>
__device__ __forceinline__ void store_rows(uint32_t tile, uint16_t* out, const HeadRows& head, int first, int rows,
                                           int first_row, int lane) {
  using Layout = Panels<kHeadDim>;
  constexpr int kChunksOfAll = kHeadDim / 8;
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

}  // namespace flash
