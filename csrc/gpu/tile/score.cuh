// From QKᵀ to the logits, for the D fragments of a warp (softmax.cuh says who owns what): softcap, ALiBi, bias and
// masks. Which of them a call has is the same for a whole launch, so each is a branch that all take alike.
#pragma once

#include "common/score.h"
#include "common/sequence.h"
#include "common/statistics.h"
#include "common/visibility.h"
#include "gpu/ptx/math.cuh"
#include "gpu/tile/block_tiles.cuh"
#include "gpu/tile/softcap.h"

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

// Bits of the columns before `end` that a thread has of 16 n8 tiles: 2 n + c is column 8 n + c.
__device__ __forceinline__ uint32_t columns_before(int end) {
  const int from_0 = max(end, 0);
  return __funnelshift_lc(~0u, 0u, 2 * (from_0 >> 3) + min(from_0 & 7, 2));  // so many ones, 32 at most
}

// S = -inf where a row does not see a key. `first_column`: this thread's first key; `keys`: of the sequence;
// `seen_by(m, half)`: the DiagonalInterval of one of its rows. What is seen are bits of one register, which become predicates
// seven at a time; a difference and a comparison for each element are more instructions.
template <int kM, int kN>
__device__ __forceinline__ void hide_unseen(float (&rS)[kM][kN][4], int first_column, int keys, const auto& seen_by) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const DiagonalInterval of_row = seen_by(m, half);
      const int begin = max(0, of_row.begin) - first_column;
      const int end = min(keys, of_row.end) - first_column;
#pragma unroll
      for (int first = 0; first < kN; first += 16) {
        const uint32_t seen = columns_before(end - 8 * first) & ~columns_before(begin - 8 * first);
#pragma unroll
        for (int i = 0; i < 2 * (kN - first < 16 ? kN - first : 16); ++i) {
          float& s = rS[m][first + i / 2][2 * half + i % 2];
          if ((seen & (1u << i)) == 0) s = -INFINITY;
        }
      }
    }
}

// S = softcap · tanh(scale · S / softcap), relative error below 2^-20. Most logits are below half the softcap: there tanh
// is a polynomial, which leaves the special function unit to the softmax. Where a warp has a larger one it takes exp and a
// division as well, for that element alone: what the others are does not depend on it.
template <int kM, int kN>
__device__ __forceinline__ void cap(float (&rS)[kM][kN][4], const SoftcapTerms& terms) {
  const auto element = [&](int i) -> float& { return rS[i / 4 / kN][i / 4 % kN][i % 4]; };
  const auto near_capped = [&](float s) {
    const float x4 = s * terms.to_4x, square = x4 * x4;
    return x4 * fmaf(square, fmaf(square, fmaf(square, terms.c3, terms.c2), terms.c1), terms.c0);
  };
  const auto far_capped = [&](float s) {
    const float power = ptx::exp2_approximate(s * terms.to_4x * (kLog2E<float> / 2));  // e^2x
    return terms.softcap * fmaf(-2.f, ptx::reciprocal(1.f + power), 1.f);
  };
  // NaN is NaN either way.
  const auto are_near = [&](float largest) { return __all_sync(~0u, largest < terms.nearest_far) != 0; };
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) largest = fmaxf(largest, fabsf(element(i)));
  if (are_near(largest)) {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) element(i) = near_capped(element(i));
    return;
  }
  // A few at a time, with a branch between them: all at once would take too many registers.
  constexpr int kChunk = 16;
  static_assert(kM * kN * 4 % kChunk == 0);
#pragma unroll
  for (int chunk = 0; chunk < kM * kN * 4; chunk += kChunk) {
    largest = 0;
#pragma unroll
    for (int i = chunk; i < chunk + kChunk; ++i) largest = fmaxf(largest, fabsf(element(i)));
    if (are_near(largest)) {
#pragma unroll
      for (int i = chunk; i < chunk + kChunk; ++i) element(i) = near_capped(element(i));
    } else {
#pragma unroll
      for (int i = chunk; i < chunk + kChunk; ++i) {
        const float far = ptx::opaque_number(far_capped(element(i)));  // of all: a branch for each would take longer
        element(i) = fabsf(element(i)) < terms.nearest_far ? near_capped(element(i)) : far;
      }
    }
  }
}

// scale · S, the softcap, then ALiBi: S is the natural logit after it.
template <int kM, int kN>
__device__ __forceinline__ void scale_and_modify(float (&rS)[kM][kN][4], const FragmentPlace& place, float scale,
                                                 const SoftcapTerms& terms, float slope, int64_t diagonal,
                                                 int first_key) {
  if (terms.softcap > 0) cap(rS, terms);
  const float rest = terms.softcap > 0 ? 1.f : scale;
  if (slope == 0 && rest == 1) return;
  const int distance = static_cast<int>(place.row + diagonal) - first_key - place.column;
  const auto first = static_cast<float>(distance);
  const auto for_each = [&](const auto& body) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          rS[m][n][c] = body(rS[m][n][c], static_cast<float>(16 * m + 8 * (c / 2) - 8 * n - c % 2));
  };
  // |distance| costs one more instruction an element than a distance that has the same sign in the whole block.
  if (__all_sync(~0u, distance >= 8 * kN - 7)) {
    const float of_first = -slope * first;
    for_each([&](float s, float further) { return fmaf(s, rest, fmaf(-slope, further, of_first)); });
  } else {
    for_each([&](float s, float further) { return fmaf(-slope, fabsf(first + further), s * rest); });
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
