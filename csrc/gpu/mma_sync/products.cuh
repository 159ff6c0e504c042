// The two matrix products of a block of keys, with what has its turn among them.
#pragma once

#include <utility>

#include "gpu/mma_sync/tiles.h"
#include "gpu/mma_sync/warp_pair.cuh"
#include "gpu/tile/copy_tile.cuh"
#include "gpu/tile/dropout.cuh"
#include "gpu/tile/softmax.cuh"

namespace flash::mma_sync {

// D = C + A · B for 16 × 16 × 16 blocks: Turing has half the depth.
template <KernelKey kKey>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         const float (&c)[4]) {
  if constexpr (kKey.arch >= Arch::sm80) {
    ptx::mma_m16n8k16<kKey.dtype>(d, a, b0, b1, c);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = c[i];
    ptx::mma_m16n8k8(d, a[0], a[1], b0);
    ptx::mma_m16n8k8(d, a[2], a[3], b1);
  }
}

template <KernelKey kKey>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<kKey>(d, a, b0, b1, d);
}

// f(0), ..., f(kCount - 1), each argument a constant.
template <int kCount, class Function>
__device__ __forceinline__ void static_for(const Function& f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (f(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// The turn of `step` among kSteps, when kCount pieces of work are to be spread over them: f(i) for those i.
template <int kCount, int kSteps, class Function>
__device__ __forceinline__ void spread(int step, const Function& f) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i * kSteps / kCount == step) f(i);
}

// Copies of a tile spread over kSteps steps from kBegin on, or all at once where they cannot be.
template <int kBegin, int kSteps, class Copy>
__device__ __forceinline__ void copy_among(int step, Copy& copy) {
  if constexpr (Copy::kCanBeSpread)
    spread<Copy::kSlices, kSteps>(step - kBegin, [&](int slice) { copy.copy(slice); });
  else if (step == kBegin)
    copy.copy_all();
}

// Everything about a kernel that is known when it is compiled.
template <KernelKey kKeyOf, int kTileOf>
struct Fwd {
  static constexpr KernelKey kKey = kKeyOf;
  static constexpr Tile kTile = fwd_tiles(kKeyOf)[kTileOf];
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys, kThreads = kTile.threads();
  static constexpr int kWarpRows = kTile.warp_rows();
  static constexpr int kSplit = kTile.split;
  static constexpr int kWarpKeys = kKeys / kSplit, kColumns = kHeadDim / kSplit;    // of S and of O in a warp
  static constexpr int kM = kWarpRows / 16, kN = kWarpKeys / 8, kO = kColumns / 8;  // m16, n8 tiles of S and of O
  static constexpr int kDepth = kHeadDim / 16, kValueDepth = kWarpKeys / 16;        // k16 steps of QKᵀ and of P V
  static constexpr int kBytesQ = kTile.q_bytes(kHeadDim), kBytesKV = kTile.kv_bytes(kHeadDim);
  using ReaderQ = BlockReader<kRows, kHeadDim>;
  using ReaderKV = BlockReader<kKeys, kHeadDim>;
  static constexpr bool kDropout = kKey.variant >= Variant::dropout;
  static constexpr bool kKeepDropoutRows = kKey.variant == Variant::dropout && kHeadDim <= 64;  // registers are left
  static constexpr bool kModified = kKey.variant >= Variant::modified;
  static constexpr bool kBiased = kKey.variant == Variant::biased;
  using CopyQ = TileCopy<kKey.arch, kRows, kHeadDim, kThreads, kBiased>;
  using CopyKV = TileCopy<kKey.arch, kKeys, kHeadDim, kThreads, kBiased>;
  static constexpr int kScoreSteps = kDepth * kWarpKeys / 16, kValueSteps = kValueDepth * kColumns / 16;
  static_assert(kWarpKeys % (kDropout ? kDropoutKeys : 16) == 0 && kWarpRows % 16 == 0);
  static_assert(kSplit == 1 || (kM == 2 && kColumns % Panels<kHeadDim>::kColumns == 0));
};

// S = Q Kᵀ. Fragments of K are read one 16 × 16 block ahead of the products that use them. `beside(step)` is other work
// that has its turn after each block's products: the tensor cores are busy for longer than it takes to ask them.
template <class F, class Beside>
__device__ __forceinline__ void score_product(float (&rS)[F::kM][F::kN][4], const typename F::ReaderQ& sQ,
                                              const uint32_t (&rQ)[F::kTile.q_in_registers ? F::kDepth : 1][F::kM][4],
                                              const typename F::ReaderKV& sK, const Beside& beside) {
  constexpr int kBlocks = F::kWarpKeys / 16;
#pragma unroll
  for (int m = 0; m < F::kM; ++m)
#pragma unroll
    for (int n = 0; n < F::kN; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) rS[m][n][c] = 0;

  uint32_t fK[2][4], fQ[F::kM][4];
  sK.load(fK[0], 0, 0);
  if constexpr (!F::kTile.q_in_registers) {
#pragma unroll
    for (int m = 0; m < F::kM; ++m) sQ.load(fQ[m], m, 0);
  }
#pragma unroll
  for (int depth = 0; depth < F::kDepth; ++depth)
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int step = depth * kBlocks + block, next = step + 1;
      if (next < F::kDepth * kBlocks) sK.load(fK[next % 2], next % kBlocks, next / kBlocks);
      const uint32_t (&b)[4] = fK[step % 2];
#pragma unroll
      for (int m = 0; m < F::kM; ++m) {
        if constexpr (F::kTile.q_in_registers) {
          multiply<F::kKey>(rS[m][2 * block], rQ[depth][m], b[0], b[1]);
          multiply<F::kKey>(rS[m][2 * block + 1], rQ[depth][m], b[2], b[3]);
        } else {
          multiply<F::kKey>(rS[m][2 * block], fQ[m], b[0], b[1]);
          multiply<F::kKey>(rS[m][2 * block + 1], fQ[m], b[2], b[3]);
          // Into the same registers, after their last use: a second set does not fit beside S and O.
          if (block + 1 == kBlocks && depth + 1 < F::kDepth) sQ.load(fQ[m], m, depth + 1);
        }
      }
      beside(step);
    }
}

// O += P V, 16 keys at a time: `make_p(rP, depth)` gives their P, so that the exponentials of one part fill the gaps
// between the products of another. `beside(step)` as above.
template <class F, class MakeP, class Beside>
__device__ __forceinline__ void value_product(float (&rO)[F::kM][F::kO][4], const typename F::ReaderKV& sV,
                                              const MakeP& make_p, const Beside& beside) {
  constexpr int kBlocks = F::kColumns / 16;
  uint32_t fV[2][4];
  sV.load_transposed(fV[0], 0, 0);
  static_for<F::kValueDepth>([&](auto depth) {
    uint32_t rP[F::kM][4];
    make_p(rP, depth);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int step = depth.value * kBlocks + block, next = step + 1;
      if (next < F::kValueSteps) sV.load_transposed(fV[next % 2], next / kBlocks, next % kBlocks);
      const uint32_t (&b)[4] = fV[step % 2];
#pragma unroll
      for (int m = 0; m < F::kM; ++m) {
        multiply<F::kKey>(rO[m][2 * block], rP[m], b[0], b[1]);
        multiply<F::kKey>(rO[m][2 * block + 1], rP[m], b[2], b[3]);
      }
      beside(step);
    }
  });
}

// P of 16 keys from S: D fragments of two n8 tiles are one A fragment.
template <class F, int kDepthOf>
__device__ __forceinline__ void make_probabilities(uint32_t (&rP)[F::kM][4], float (&rS)[F::kM][F::kN][4],
                                                   OnlineSoftmax<F::kM>& softmax, ScoreUnit unit) {
  exponentiate<2 * kDepthOf, 2 * kDepthOf + 2>(softmax, rS, unit);
#pragma unroll
  for (int m = 0; m < F::kM; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* s = rS[m][2 * kDepthOf + i / 2];
      rP[m][i] = ptx::pack<F::kKey.dtype>(s[i % 2 * 2], s[i % 2 * 2 + 1]);
    }
}

}  // namespace flash::mma_sync
