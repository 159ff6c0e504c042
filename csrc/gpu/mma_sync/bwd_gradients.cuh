// From S and dP to P and dS in the backward with mma.sync: softmax from its statistics, dropout, the logits' options.
#pragma once

#include "gpu/mma_sync/bwd_work.cuh"
#include "gpu/ptx/order.cuh"
#include "gpu/tile/gradient.cuh"
#include "gpu/tile/score.cuh"

namespace flash::mma_sync {

template <class F>
__device__ __forceinline__ GradientDropout<F::kM, F::kN> draw_dropout(const GradientPlace& place, int64_t head,
                                                                      const BwdParams& p, const BwdLaunch& launch,
                                                                      const BwdWork& work) {
  GradientDropout<F::kM, F::kN> dropout;
  if constexpr (F::kDropout) {
    if (p.dropout.given())
      dropout.draw(work.streams[(head - work.head_k * launch.group) % 2], place, launch.threshold);
    else
      dropout.keep_all();
  }
  return dropout;
}

// Where a warp's S and dP lie, for what becomes of them.
struct GradientTile {
  GradientPlace place;
  int64_t head;
  int row_in_tile;  // this thread's first query
  bool is_special;  // some query is far, or sees nothing
};

// P of one element. `shift`, ...: of its query.
template <class F>
__device__ __forceinline__ float probability(float s, const BwdLaunch& launch, bool any_far, float shift,
                                             float reference, float log2_sum) {
  const float scale = F::kBiased ? 1.f : launch.scale;  // what s still lacks
  float exponent = fmaf(s, scale * kLog2E<float>, -shift);
  if (any_far && fabsf(reference) >= QueryNumbers::kFar)
    exponent = fmaf(fmaf(s, scale, -reference), kLog2E<float>, -log2_sum);
  return ptx::exp2_approximate(exponent);
}

// S and dP of a warp become P (dropped, without dropout's factor) and dS, for dV and dK. kClean: every row sees every
// key, and no query is special.
template <class F, bool kClean>
__device__ __forceinline__ void compute_gradients(float (&rS)[F::kM][F::kN][4], float (&rdP)[F::kM][F::kN][4],
                                                  const GradientTile& tile, const BwdParams& p, const BwdLaunch& launch,
                                                  const BwdWork& work, QueryTable<F::kRows> numbers,
                                                  const GradientDropout<F::kM, F::kN>& dropout) {
  const GradientPlace& place = tile.place;
  const DiagonalInterval diagonal(work.visibility, place.query);
  const LogitOptions<F::kKey.dtype> options{p,
                                            work.sequence,
                                            tile.head,
                                            softcap_of<float>(p.score),
                                            F::kBiased ? alibi_slope<float>(p.score, work.batch, tile.head) : 0.f,
                                            work.visibility.diagonal};
#pragma unroll
  for (int n = 0; n < F::kN; ++n) {
    const int row = tile.row_in_tile + 8 * n;
    const float2 shifts = numbers.shifts(row), deltas = numbers.deltas(row);
    const float2 references = kClean ? float2{} : numbers.references(row),
                 sums = kClean ? float2{} : numbers.log2_sums(row);
#pragma unroll
    for (int i = 0; i < F::kM * 4; ++i) {
      const int block = i / 4, c = i % 4, column = c % 2, below = 8 * n + column;
      const int key = place.key + 16 * block + c / 2 * 8;
      float &s = rS[block][n][c], &dp = rdP[block][n][c];
      bool seen = true;
      if constexpr (!kClean)
        seen = max(0, diagonal.begin + below) <= key && key < min(place.keys, diagonal.end + below);
      float derivative = 1;
      if constexpr (F::kBiased) {
        s *= launch.scale;
        seen = seen && place.query + below < place.rows && options.apply(s, derivative, place.query + below, key);
      }
      float weight = probability<F>(s, launch, !kClean, column ? shifts.y : shifts.x,
                                    column ? references.y : references.x, column ? sums.y : sums.x);
      if (!seen) weight = 0;
      s = weight;
      const float delta = column ? deltas.y : deltas.x;
      if constexpr (F::kDropout) {
        const bool kept = dropout.keeps(block, n, c);
        dp = weight * fmaf(kept ? dp : 0.f, launch.keep_scale, -delta);
        s = kept ? weight : 0.f;
      } else {
        dp = weight * (dp - delta);
      }
      if (!seen) dp = 0;  // dP may be NaN
      if constexpr (F::kBiased) {
        if (launch.dbias_sum.given() && seen)
          ptx::add_global(
              static_cast<float*>(launch.dbias_sum.data) +
                  launch.dbias_sum.offset(work.sequence.index, tile.head, work.sequence.q.leftpad + place.query + below,
                                          work.sequence.k.leftpad + key),
              dp);
        dp *= derivative;
      }
    }
  }
}

// The same, with what this tile needs.
template <class F>
__device__ __forceinline__ void compute_gradients(float (&rS)[F::kM][F::kN][4], float (&rdP)[F::kM][F::kN][4],
                                                  const GradientTile& tile, int m, const BwdParams& p,
                                                  const BwdLaunch& launch, const BwdWork& work,
                                                  QueryTable<F::kRows> numbers,
                                                  const GradientDropout<F::kM, F::kN>& dropout) {
  const Range rows{int64_t{m} * F::kRows, min(work.rows, (m + 1) * F::kRows)};
  const Range all = work.visibility.keys_of_all(rows);
  const bool full = all.begin <= int64_t{work.n} * F::kKeys && int64_t{work.n + 1} * F::kKeys <= all.end;
  if (!F::kBiased && full && !tile.is_special)
    compute_gradients<F, true>(rS, rdP, tile, p, launch, work, numbers, dropout);
  else
    compute_gradients<F, false>(rS, rdP, tile, p, launch, work, numbers, dropout);
}

}  // namespace flash::mma_sync
