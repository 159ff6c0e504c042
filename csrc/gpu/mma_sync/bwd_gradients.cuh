// From S and dP to P and dS in the backward with mma.sync: softmax from its statistics, dropout, the logits' options.
#pragma once

#include "gpu/mma_sync/bwd_work.cuh"
#include "gpu/ptx/order.cuh"
#include "gpu/tile/block_tiles.cuh"
#include "gpu/tile/score.cuh"

namespace flash::mma_sync {

// Where a warp's S and dP lie, for what becomes of them.
struct GradientTile {
  GradientPlace place;
  int64_t head;
  int first_row, lane;  // the warp's first row in the tile
};

template <class F>
__device__ __forceinline__ GradientDropout<F::kM, F::kN> draw_dropout(const GradientTile& tile, const BwdParams& p,
                                                                      const BwdLaunch& launch, const BwdWork& work) {
  GradientDropout<F::kM, F::kN> dropout;
  if constexpr (F::kDropout) {
    if (p.dropout.given())
      // A block mask may leave heads out, and then two of them share a place.
      dropout.draw(F::skips(launch.tiles) ? dropout_stream(p.dropout.seed, work.sequence.index, tile.head)
                                          : work.streams[(tile.head - work.first_head) % 2],
                   tile.place, launch.threshold);
    else
      dropout.keep_all();
  }
  return dropout;
}

// Fragments of P and dS in turn: those of one key and of the n8 tiles that lie beside each other in shared memory.
template <class F>
struct Pieces {
  static constexpr int kTiles = F::kDealt ? 4 : 1;
  static constexpr int kCount = F::kM * 2 * F::kN / kTiles;
  int m, half, n;

  __device__ __forceinline__ constexpr explicit Pieces(int piece)
      : m(piece / 2 % F::kM), half(piece % 2), n(piece / (2 * F::kM) * kTiles) {}
};

// Where a thread's part of P or dS goes in shared memory.
template <class F>
struct ScoreStore {
  using Layout = Panels<F::kRows, F::kPeriod>;
  uint32_t address;

  static __device__ __forceinline__ uint32_t first(uint32_t tile, int warp_key, int warp_row, int lane) {
    return F::ReaderScore::at(tile, warp_key + lane / 4, warp_row / 8 + (F::kDealt ? lane % 4 : 0)).address +
           (F::kDealt ? 0 : lane % 4 * 4);
  }

  // `first`: the n8 tile that r begins with.
  template <int kN>
  __device__ __forceinline__ void store(const float (&r)[F::kM][kN][4], int piece, int first = 0, int bytes = 0) const {
    const Pieces<F> at(piece);
    const uint32_t target = Layout::template moved<F::kKeys>(address, 16 * at.m + 8 * at.half, at.n) + bytes;
    const auto pair = [&](int n) {
      const float (&x)[4] = r[at.m][at.n - first + n];
      return ptx::pack<F::kKey.dtype>(x[2 * at.half], x[2 * at.half + 1]);
    };
    if constexpr (F::kDealt)
      ptx::store_shared_16(target, uint4{pair(0), pair(1), pair(2), pair(3)});
    else
      ptx::store_shared_4(target, pair(0));
  }
};

// Where a thread writes P and dS, and where it reads them, and K for dQ.
template <class F>
struct Places {
  ScoreStore<F> scores;
  typename F::ReaderScore a_scores, a_dq;
  typename F::ReaderKV b_dq;

  __device__ __forceinline__ Places(uint32_t sP, uint32_t sdS, uint32_t sK, uint32_t thread) {
    const int lane = thread % 32, warp = thread / 32, key_warp = warp / F::kSplits;
    scores = {ScoreStore<F>::first(sP, key_warp * F::kWarpKeys, warp % F::kSplits * F::kWarpRows, lane)};
    a_scores = F::ReaderScore::rows_first(sP, lane, key_warp * F::kM);
    a_dq = F::ReaderScore::columns_first(sdS, lane, 0, warp % F::kTile.dq_row_warps * F::kDqM);
    b_dq = b_dq_of(0, sK, thread);
  }
  // Of a part of dQ's columns.
  static __device__ __forceinline__ typename F::ReaderKV b_dq_of(int part, uint32_t sK, uint32_t thread) {
    const int split = thread / 32 / F::kTile.dq_row_warps;
    return F::ReaderKV::rows_first(sK, thread % 32, 0, split + part * (F::kDqAtOnce / 16 * F::kDqSplits));
  }

  __device__ __forceinline__ Places kept() const {
    Places same = *this;
    same.scores.address = ptx::opaque(scores.address);
    same.a_scores = a_scores.kept(), same.a_dq = a_dq.kept(), same.b_dq = b_dq.kept();
    return same;
  }
};

// S - R in S's own unit for the queries that are far (QueryNumbers).
template <class F>
__device__ __forceinline__ void rebase_far(float (&rS)[F::kM][F::kN][4], const GradientTile& tile,
                                           typename F::Table numbers, const BwdLaunch& launch) {
#pragma unroll
  for (int n = 0; n < F::kN; ++n)
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float reference = numbers.reference(tile.first_row + 8 * n + tile.lane % 4 * 2 + column);
      if (!QueryNumbers::is_far(reference)) continue;
#pragma unroll
      for (int i = 0; i < F::kM * 2; ++i) {
        float& s = rS[i / 2][n][i % 2 * 2 + column];
        s = fmaf(s, launch.scale, -reference) * launch.inverse_scale;
      }
    }
}

// `value` where a query does not see a key.
template <int kM, int kN>
__device__ __forceinline__ void replace_unseen(float (&r)[kM][kN][4], const GradientPlace& place,
                                               const Visibility& visibility, float value) {
  const DiagonalInterval diagonal(visibility, place.query);
  // A step down and a step to the left are the same to a diagonal: one number says where an element lies.
  const auto seen = static_cast<uint32_t>(max(0, diagonal.end - diagonal.begin));
  const int first = diagonal.end - place.key - 1;
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) {
    const bool is_key = place.key + 8 * i < place.keys;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int column = 0; column < 2; ++column)
        if (!is_key || static_cast<uint32_t>(first + 8 * n + column - 8 * i) >= seen)
          r[i / 2][n][i % 2 * 2 + column] = value;
  }
}

// One piece of S becomes P = exp2(S · c - shift). `shifts`: of its n8 tiles.
template <class F>
__device__ __forceinline__ void exponentiate(float (&rS)[F::kM][F::kN][4], const float (&shifts)[Pieces<F>::kTiles][2],
                                             float exponent_scale, int piece) {
  const Pieces<F> at(piece);
#pragma unroll
  for (int i = 0; i < 2 * Pieces<F>::kTiles; ++i) {
    float& s = rS[at.m][at.n + i / 2][2 * at.half + i % 2];
    s = ptx::exp2_approximate(fmaf(s, exponent_scale, -shifts[i / 2][i % 2]));
  }
}

// dS = P · (dP - delta), of P and dP - delta; P's n8 tiles from `first` on.
template <int kM, int kN, int kNOfP>
__device__ __forceinline__ void multiply_by_weights(float (&rdP)[kM][kN][4], const float (&rP)[kM][kNOfP][4],
                                                    int first) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    rdP[i / (kN * 4)][i / 4 % kN][i % 4] *= rP[i / (kN * 4)][first + i / 4 % kN][i % 4];
}

// The same with dropout, of P and dP: both are dropped, P without dropout's factor, which dV gets in the end.
template <class F, int kN>
__device__ __forceinline__ void multiply_and_drop(float (&rdP)[F::kM][kN][4], float (&rP)[F::kM][F::kN][4], int first,
                                                  const GradientTile& tile, const BwdLaunch& launch,
                                                  const typename F::Table& numbers,
                                                  const GradientDropout<F::kM, F::kN>& dropout) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float minus_deltas[4];
    numbers.minus_deltas(minus_deltas, tile.first_row + 8 * (first + n), tile.lane);
#pragma unroll
    for (int i = 0; i < F::kM * 4; ++i) {
      float &weight = rP[i / 4][first + n][i % 4], &dp = rdP[i / 4][n][i % 4];
      const bool kept = dropout.keeps(i / 4, first + n, i % 4);
      dp = weight * fmaf(kept ? dp : 0.f, launch.keep_scale, minus_deltas[i % 4]);
      if (!kept) weight = 0;
    }
  }
}

// All of it, with the logits' options: S and dP become P and dS.
template <class F>
__device__ __forceinline__ void apply_options(float (&rS)[F::kM][F::kN][4], float (&rdP)[F::kM][F::kN][4],
                                              const GradientTile& tile, bool is_special, const BwdParams& p,
                                              const BwdLaunch& launch, const BwdWork& work,
                                              const typename F::Table& numbers,
                                              const GradientDropout<F::kM, F::kN>& dropout) {
  const GradientPlace& place = tile.place;
  const DiagonalInterval diagonal(work.visibility, place.query);
  const LogitOptions<F::kKey.dtype> options{p,
                                            work.sequence,
                                            tile.head,
                                            softcap_of<float>(p.score),
                                            alibi_slope<float>(p.score, work.batch, tile.head),
                                            work.visibility.diagonal};
  const bool hides_blocks =
      F::skips(launch.tiles) && !TileSteps(launch.tiles, work.batch, tile.head, work.n).is_full(place.query / F::kRows);
  const auto block_sees = [&](int query, int key) {
    const Sequence& s = work.sequence;
    return MaskRow(p.block_mask, launch.tiles, s.index, tile.head, s.q.leftpad + query)
        .sees(p.block_mask, launch.tiles, s.k.leftpad + key);
  };
  float shifts[F::kN][2];
  numbers.shifts(shifts, tile.first_row, tile.lane);
#pragma unroll
  for (int n = 0; n < F::kN; ++n) {
    float minus_deltas[4];
    numbers.minus_deltas(minus_deltas, tile.first_row + 8 * n, tile.lane);
#pragma unroll
    for (int i = 0; i < F::kM * 4; ++i) {
      const int block = i / 4, c = i % 4, column = c % 2, below = 8 * n + column;
      const int key = place.key + 16 * block + c / 2 * 8;
      float s = rS[block][n][c] * launch.scale, dp = rdP[block][n][c], derivative = 1;
      const bool seen = max(0, diagonal.begin + below) <= key && key < min(place.keys, diagonal.end + below) &&
                        place.query + below < place.rows && options.apply(s, derivative, place.query + below, key) &&
                        (!hides_blocks || block_sees(place.query + below, key));
      if (is_special) {
        const float reference = numbers.reference(tile.first_row + tile.lane % 4 * 2 + below);
        if (QueryNumbers::is_far(reference)) s -= reference;
      }
      const float weight = seen ? ptx::exp2_approximate(fmaf(s, kLog2E<float>, -shifts[n][column])) : 0.f;
      const bool kept = dropout.keeps(block, n, c);
      rS[block][n][c] = kept ? weight : 0.f;
      dp = seen ? weight * fmaf(kept ? dp : 0.f, launch.keep_scale, minus_deltas[c]) : 0.f;  // dP may be NaN
      if (launch.dbias_sum.given() && seen)
        ptx::add_global(
            static_cast<float*>(launch.dbias_sum.data) +
                launch.dbias_sum.offset(work.sequence.index, tile.head, work.sequence.q.leftpad + place.query + below,
                                        work.sequence.k.leftpad + key),
            dp);
      rdP[block][n][c] = dp * derivative;
    }
  }
}

}  // namespace flash::mma_sync
