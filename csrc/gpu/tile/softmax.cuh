// Online softmax with a lazy reference, for the D fragments of a warp: [m16][n8][c], c: rows {r, r, r + 8, r + 8},
// columns {2l, 2l + 1} of each n8 tile.
//
// P = exp2(S · c - R), where R is not the running maximum but any number that is near enough: the maximum of the first
// block, until some score exceeds it by more than `kHeadroom` (in powers of two). So the steady state has no shuffle and
// no rescaling of O, only each thread's own maximum and one vote. The reference cancels in O and enters the statistics,
// so this is exact softmax; every row decides for itself, whatever its neighbours hold.
#pragma once

#include "common/statistics.h"
#include "gpu/ptx/math.cuh"

namespace flash {

// P may reach 2^12: far from fp16's 65504, and O and the sums have fp32's range.
inline constexpr float kHeadroom = 12;

// Beyond this |R| the product S · c alone would lose whole units: (S - m) · c instead, so that equal huge inputs come
// out exact.
inline constexpr float kLargestFolded = 1 << 22;

// S times `to_natural` is the logit; times `to_log2` it is the logit in powers of two.
struct ScoreUnit {
  float to_natural, to_log2;
};

template <int kM>
struct OnlineSoftmax {
  float reference[kM][2];  // m, in units of S; -inf while nothing was seen
  float row_sum[kM][2];    // this thread's columns only
  float headroom;  // how far S may exceed m; -inf: some m of this warp is huge, so that each block goes the slow way

  explicit __device__ __forceinline__ OnlineSoftmax(ScoreUnit unit) : headroom(kHeadroom / unit.to_log2) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -INFINITY;
        row_sum[m][half] = 0;
      }
  }

  // What to subtract from S before it meets c, and from the product after it: one of them is 0, both for an empty row.
  __device__ __forceinline__ float offset(int m, int half, float to_log2) const {
    return is_huge(reference[m][half], to_log2) ? reference[m][half] : 0.f;
  }
  __device__ __forceinline__ float folded(int m, int half, float to_log2) const {
    const float product = reference[m][half] * to_log2;  // rounded once
    return fabsf(product) < kLargestFolded ? product : 0.f;
  }

  static __device__ __forceinline__ bool is_huge(float reference, float to_log2) {
    return reference != -INFINITY && fabsf(reference * to_log2) >= kLargestFolded;
  }
};

// The largest of four neighbours' values: the threads that share a row.
__device__ __forceinline__ float row_max_of(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float row_sum_of(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The largest of this thread's S in each row; true if one of them exceeds what the reference allows.
template <int kM, int kN>
__device__ __forceinline__ bool find_maxima(float (&thread_max)[kM][2], const OnlineSoftmax<kM>& softmax,
                                            const float (&rS)[kM][kN][4]) {
  bool exceeds = false;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(rS[m][0][2 * half], rS[m][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < kN; ++n) largest = fmaxf(largest, fmaxf(rS[m][n][2 * half], rS[m][n][2 * half + 1]));
      thread_max[m][half] = largest;
      exceeds |= largest > softmax.reference[m][half] + softmax.headroom;
    }
  return exceeds;
}

// Makes the reference near enough for S, whose row maxima are given: rows that exceed the headroom take theirs as the
// new reference; O and the sums follow, and S loses what cannot be folded.
template <int kM, int kN, int kO>
__device__ __forceinline__ void raise_reference(OnlineSoftmax<kM>& softmax, const float (&row_max)[kM][2],
                                                float (&rS)[kM][kN][4], float (&rO)[kM][kO][4], ScoreUnit unit) {
  bool any_huge = false;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& reference = softmax.reference[m][half];
      const float largest = row_max[m][half];
      const float old_folded = softmax.folded(m, half, unit.to_log2);
      const float old_offset = softmax.offset(m, half, unit.to_log2);
      float factor = 1;
      if (largest > reference + kHeadroom / unit.to_log2) {
        const bool first = reference == -INFINITY;
        reference = largest;
        const float offset = old_offset - softmax.offset(m, half, unit.to_log2);
        const float folded = old_folded - softmax.folded(m, half, unit.to_log2);
        factor = first ? 0.f : ptx::exp2_approximate(offset * unit.to_log2 + folded);
      }
      any_huge |= softmax.is_huge(reference, unit.to_log2);
      softmax.row_sum[m][half] *= factor;
#pragma unroll
      for (int n = 0; n < kO; ++n) {
        rO[m][n][2 * half] *= factor;
        rO[m][n][2 * half + 1] *= factor;
      }
    }
  softmax.headroom = __any_sync(~0u, any_huge) ? -INFINITY : kHeadroom / unit.to_log2;
  if (softmax.headroom != -INFINITY) return;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = softmax.offset(m, half, unit.to_log2);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        rS[m][n][2 * half] -= offset;
        rS[m][n][2 * half + 1] -= offset;
      }
    }
}

// S becomes P, unnormalised, in the n8 tiles [kBegin, kEnd). -inf becomes 0.
template <int kBegin, int kEnd, int kM, int kN>
__device__ __forceinline__ void exponentiate(OnlineSoftmax<kM>& softmax, float (&rS)[kM][kN][4], ScoreUnit unit) {
  float folded[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) folded[m][half] = softmax.folded(m, half, unit.to_log2);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum[kEnd - kBegin];  // pairs first: one long chain of sums would keep every P waiting in its register
#pragma unroll
      for (int n = kBegin; n < kEnd; ++n) {
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c)
          rS[m][n][c] = ptx::exp2_approximate(fmaf(rS[m][n][c], unit.to_log2, -folded[m][half]));
        sum[n - kBegin] = rS[m][n][2 * half] + rS[m][n][2 * half + 1];
      }
#pragma unroll
      for (int n = 0; n < kEnd - kBegin; n += 2) softmax.row_sum[m][half] += sum[n] + sum[n + 1];
    }
}

// What a finished row needs: its statistics, and the factor that normalises its O.
struct FinishedRow {
  RowStatistics<float> statistics;
  float normalise;
};

// `sink` is a logit that joins the denominator; -inf: none. `reference` is in units of S; `row_sum` is the whole row's.
__device__ __forceinline__ FinishedRow finish_row(float reference, float row_sum, float sink, ScoreUnit unit) {
  const bool empty = reference == -INFINITY;
  const float natural = empty ? -INFINITY : reference * unit.to_natural;
  // The sum is relative to what was folded, or to m itself; the statistics promise the stored R. The products differ in
  // their last bits, which is much at large logits: the differences are exact.
  float correction = 0;
  if (!empty) {
    const float product = reference * unit.to_log2;
    if (fabsf(product) < kLargestFolded) correction = -fmaf(reference, unit.to_log2, -product);
    correction += fmaf(reference, unit.to_natural, -natural) * kLog2E<float>;
  }
  const float sum = row_sum * exp2f(correction);
  if (empty && sink != -INFINITY) return {{sink, INFINITY}, 0.f};
  if (sink == -INFINITY) return {make_statistics(natural, sum), row_sum == 0 ? 0.f : 1.f / row_sum};
  const Merge<float> with_sink = merge(natural, sink);
  const float total = sum * with_sink.scale_a + with_sink.scale_b;
  const float share = sum * with_sink.scale_a / total;
  return {make_statistics(with_sink.row_max, total), row_sum == 0 ? 0.f : share / row_sum};
}

}  // namespace flash
