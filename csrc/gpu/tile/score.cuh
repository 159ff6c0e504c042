// From QKᵀ to the logits, for the D fragments of a warp (softmax.cuh says who owns what): softcap, ALiBi, bias and
// masks. Which of them a call has is the same for a whole launch, so each is a branch that all take alike.
#pragma once

#include "common/score.h"
#include "common/sequence.h"
#include "common/statistics.h"
#include "common/visibility.h"
#include "gpu/ptx/math.cuh"
#include "gpu/tile/block_tiles.cuh"

namespace flash {

// Where a thread's fragments lie in the plane of one head: all numbers count positions within the sequence.
struct FragmentPlace {
  int row;         // of this thread's first row; the others are 8, 16, 24, ... below
  int column;      // 2 · (lane % 4)
  int rows, keys;  // of the sequence
};

// The keys that row `place.row` sees, before the ends of the sequence: each row below sees one more to the right.
struct DiagonalInterval {
  int begin, end;

  __device__ __forceinline__ DiagonalInterval(int begin_of_row, int end_of_row)
      : begin(begin_of_row), end(end_of_row) {}
  // Of a row so far below.
  __device__ __forceinline__ DiagonalInterval below(int rows) const { return {begin + rows, end + rows}; }

  __device__ __forceinline__ DiagonalInterval(const Visibility& v, int row) {
    // Far outside the sequence all numbers mean the same: 2^29 keeps sums with rows and columns in 32 bits.
    constexpr int64_t kFar = 1 << 29;
    begin = static_cast<int>(larger(-kFar, row + v.diagonal - v.left));
    end = static_cast<int>(larger(-kFar, smaller(2 * kFar, row + v.diagonal + v.right + 1)));
  }
};

// S = -inf where a row does not see a key. `first_key` is that of the tile.
template <int kM, int kN>
__device__ __forceinline__ void hide_unseen(float (&rS)[kM][kN][4], const FragmentPlace& place,
                                            const DiagonalInterval& diagonal, int first_key) {
  const int first_column = first_key + place.column;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int below = 16 * m + 8 * half;
      const int begin = max(0, diagonal.begin + below) - first_column;
      const int end = min(place.keys, diagonal.end + below) - first_column;
      const auto seen = static_cast<uint32_t>(max(0, end - begin));
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (static_cast<uint32_t>(8 * n + c - begin) >= seen) rS[m][n][2 * half + c] = -INFINITY;
    }
}

// tanh(x), relative error below 2^-20: its series where it is nearly x, else by exp; both, because a branch for each element
// costs more.
__device__ __forceinline__ float tanh_approximate(float x) {
  const float x2 = x * x;
  const float series = x * fmaf(x2, fmaf(x2, fmaf(x2, -17.f / 315, 2.f / 15), -1.f / 3), 1.f);
  const float by_exp = fmaf(-2.f, ptx::reciprocal(1.f + ptx::exp2_approximate(2 * kLog2E<float> * x)), 1.f);
  return fabsf(x) < 0.25f ? series : by_exp;
}

// softcap · tanh(scale · S / softcap), then ALiBi: S is the natural logit after it.
template <int kM, int kN>
__device__ __forceinline__ void scale_and_modify(float (&rS)[kM][kN][4], const FragmentPlace& place, float scale,
                                                 float softcap, float slope, int64_t diagonal, int first_key) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) rS[m][n][c] *= scale;
  if (softcap > 0) {
    const float inverse = 1 / softcap;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) rS[m][n][c] = softcap * tanh_approximate(rS[m][n][c] * inverse);
  }
  if (slope != 0) {
    const int distance = static_cast<int>(place.row + diagonal) - first_key - place.column;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int below = 16 * m + 8 * (c / 2), right = 8 * n + c % 2;
          rS[m][n][c] = fmaf(-slope, fabsf(static_cast<float>(distance + below - right)), rS[m][n][c]);
        }
  }
}

// body(m, half, row) for the rows of a thread's fragments that there are.
template <int kM, class Body>
__device__ __forceinline__ void for_each_row(const FragmentPlace& place, const Body& body) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (const int row = place.row + 16 * m + 8 * half; row < place.rows) body(m, half, row);
}

template <DataType kType>
__device__ __forceinline__ float bias_at(const AttentionParams& p, int64_t at) {
  return p.bias.dtype == DataType::kFloat32 ? static_cast<const float*>(p.bias.data)[at]
                                            : ptx::unpack_low<kType>(static_cast<const uint16_t*>(p.bias.data)[at]);
}

// S += bias; -inf where the mask says so. Nothing outside the sequence is read.
template <DataType kType, int kM, int kN>
__device__ __forceinline__ void add_bias_and_mask(float (&rS)[kM][kN][4], const FragmentPlace& place,
                                                  const AttentionParams& p, const Sequence& sequence, int64_t head,
                                                  int first_key) {
  const int first_column = first_key + place.column;
  for_each_row<kM>(place, [&](int m, int half, int row) {
    const int64_t tensor_row = sequence.q.leftpad + row, tensor_column = sequence.k.leftpad + first_column;
    if (p.bias.given()) {
      const int64_t offset = p.bias.offset(sequence.index, head, tensor_row, tensor_column);
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 8 * n + c;
          if (first_column + column >= place.keys) continue;
          const int64_t at = offset + column * p.bias.column_stride;
          const float bias = bias_at<kType>(p, at);
          float& s = rS[m][n][2 * half + c];
          s = bias == -INFINITY ? bias : s + bias;  // it hides a NaN, too
        }
    }
    if (p.mask.given()) {
      const int64_t offset = p.mask.offset(sequence.index, head, tensor_row, tensor_column);
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 8 * n + c;
          if (first_column + column >= place.keys) continue;
          if (static_cast<const uint8_t*>(p.mask.data)[offset + column * p.mask.column_stride] == 0)
            rS[m][n][2 * half + c] = -INFINITY;
        }
    }
  });
}

// S = -inf where the block mask hides the key.
template <int kM, int kN>
__device__ __forceinline__ void hide_blocks(float (&rS)[kM][kN][4], const FragmentPlace& place, const BlockMask& mask,
                                            const BlockTiles& tiles, const Sequence& sequence, int64_t head,
                                            int first_key) {
  const int64_t first_column = sequence.k.leftpad + first_key + place.column;
  for_each_row<kM>(place, [&](int m, int half, int row) {
    const MaskRow of_row(mask, tiles, sequence.index, head, sequence.q.leftpad + row);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (!of_row.sees(mask, tiles, first_column + 8 * n + c)) rS[m][n][2 * half + c] = -INFINITY;
  });
}

}  // namespace flash
