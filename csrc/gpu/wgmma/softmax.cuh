// Online softmax without a maximum in the steady state, for the D fragments of a warp (tile/softmax.cuh says who owns what).
//
// P = exp2(S · c - R) with the R of the block before. If a thread's sum of such a block is more than kMostOfThread, or is no
// number, the warp repairs what it got: the rows to which that happened take the block's maximum as their reference, O and
// their sums follow, and P is made anew from S, which is still there. The other rows get the same P again: a row's bits do
// not depend on its neighbours. A reference is always a score of the row, so that its sum is at least 1 and cannot underflow.
// Rows whose reference is too large for S · c - R subtract -inf, which makes them ask for a repair in every block; rows that
// have seen nothing subtract the lowest number, so that whatever is seen asks for one (down to logits of -2e38), and -inf
// alone does not.
#pragma once

#include "gpu/tile/softmax.cuh"

namespace flash::wgmma {

// fp16 holds 65504. In bf16 P may grow further: O has room for values up to 2^96 then.
template <DataType kType>
inline constexpr float kMostOfThread = kType == DataType::kBFloat16 ? 0x1p30f : 0x1p14f;

inline constexpr float kLowest = -0x1.fffffep127f;

struct LazySoftmax : OnlineSoftmax<1> {
  float subtracted[2];  // of rows r and r + 8: R, or what the comment above says

  using OnlineSoftmax<1>::OnlineSoftmax;

  __device__ __forceinline__ void refer_to(int half, float new_reference, float to_log2) {
    reference[0][half] = new_reference;
    subtracted[half] = new_reference == -INFINITY        ? kLowest
                       : is_huge(new_reference, to_log2) ? -INFINITY
                                                         : folded(0, half, to_log2);
  }
};

// The largest score of a row in the first kTiles n8 tiles, for all four threads that share it.
template <int kTiles, int kN>
__device__ __forceinline__ float row_max(const float (&rS)[kN][4], int half) {
  float even = rS[0][2 * half], odd = rS[0][2 * half + 1];
#pragma unroll
  for (int n = 1; n < kTiles; ++n) even = fmaxf(even, rS[n][2 * half]), odd = fmaxf(odd, rS[n][2 * half + 1]);
  return row_max_of(fmaxf(even, odd));
}

// P of a block, packed as A fragments [k16][i], and this thread's sums of its two rows.
template <DataType kType, int kN>
__device__ __forceinline__ void make_weights(uint32_t (&rP)[kN / 2][4], float (&sum)[2], const float (&rS)[kN][4],
                                             const float (&offset)[2], const float (&folded)[2], float to_log2) {
  sum[0] = sum[1] = 0;
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto weight = [&](float s) {
        return ptx::exp2_approximate(fmaf(s - offset[half], to_log2, -folded[half]));
      };
      const float even = weight(rS[n][2 * half]), odd = weight(rS[n][2 * half + 1]);
      sum[half] += even + odd;
      rP[n / 2][n % 2 * 2 + half] = ptx::pack<kType>(even, odd);
    }
}

// The rows' references, to begin with: their maxima in the first kTiles n8 tiles of S. A few keys serve as well as all,
// unless something makes scores rise along the keys.
template <int kTiles, int kN>
__device__ __forceinline__ void begin_rows(LazySoftmax& softmax, const float (&rS)[kN][4], float to_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) softmax.refer_to(half, row_max<kTiles>(rS, half), to_log2);
}

// What the comment above says.
template <DataType kType, int kN, int kO>
__device__ __forceinline__ void repair(LazySoftmax& softmax, uint32_t (&rP)[kN / 2][4], float (&sum)[2],
                                       const float (&rS)[kN][4], float (&rO)[kO][4], float to_log2, int lane) {
  float offset[2], folded[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float largest = row_max<kN>(rS, half), reference = softmax.reference[0][half];
    const float old_folded = softmax.folded(0, half, to_log2), old_offset = softmax.offset(0, half, to_log2);
    const uint32_t asking = __ballot_sync(~0u, !(sum[half] <= kMostOfThread<kType>));
    if ((asking >> (lane & ~3) & 15) != 0) softmax.refer_to(half, fmaxf(reference, largest), to_log2);
    offset[half] = softmax.offset(0, half, to_log2), folded[half] = softmax.folded(0, half, to_log2);
    const float factor =
        reference == -INFINITY
            ? 0.f
            : ptx::exp2_approximate((old_offset - offset[half]) * to_log2 + (old_folded - folded[half]));
    softmax.row_sum[0][half] *= factor;
#pragma unroll
    for (int n = 0; n < kO; ++n) {
      rO[n][2 * half] *= factor;
      rO[n][2 * half + 1] *= factor;
    }
  }
  make_weights<kType>(rP, sum, rS, offset, folded, to_log2);
}

// S becomes P, and this thread's sums of it. True: some row asks for a repair, which is to follow.
template <DataType kType, int kN>
__device__ __forceinline__ bool make_block(const LazySoftmax& softmax, uint32_t (&rP)[kN / 2][4], float (&sum)[2],
                                           const float (&rS)[kN][4], float to_log2) {
  constexpr float kNoOffset[2] = {0, 0};
  make_weights<kType>(rP, sum, rS, kNoOffset, softmax.subtracted, to_log2);
  return __any_sync(~0u, !(sum[0] <= kMostOfThread<kType>) || !(sum[1] <= kMostOfThread<kType>));
}

__device__ __forceinline__ void add_sums(LazySoftmax& softmax, const float (&sum)[2]) {
  softmax.row_sum[0][0] += sum[0];
  softmax.row_sum[0][1] += sum[1];
}

}  // namespace flash::wgmma
