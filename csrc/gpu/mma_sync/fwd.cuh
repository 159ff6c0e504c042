// Forward with mma.sync: Algorithm 1 of Dao, Fu, Ermon, Rudra, Ré, "FlashAttention" (2022), one CTA a tile of query
// rows.
//
// Grid: one CTA for each (sequence, head, row block), in the order of TileOrder. A warp owns 16 or 32 rows with their
// S, P and O in registers and never talks to another; K and V go through shared memory, a block ahead of their use.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <utility>

#include "gpu/families.h"
#include "gpu/mma_sync/tiles.h"
#include "gpu/tile/copy_tile.cuh"
#include "gpu/tile/epilogue.cuh"
#include "gpu/tile/score.cuh"
#include "gpu/tile/softmax.cuh"

namespace flash::mma_sync {

// D += A · B for 16 × 16 × 16 blocks: Turing has half the depth.
template <KernelKey kKey>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kKey.arch >= Arch::sm80) {
    ptx::mma_m16n8k16<kKey.dtype>(d, a, b0, b1);
  } else {
    ptx::mma_m16n8k8(d, a[0], a[1], b0);
    ptx::mma_m16n8k8(d, a[2], a[3], b1);
  }
}

// f(0), ..., f(kCount - 1), each argument a constant.
template <int kCount, class Function>
__device__ __forceinline__ void static_for(const Function& f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (f(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Everything about a kernel that is known when it is compiled.
template <KernelKey kKeyOf, int kTileOf>
struct Fwd {
  static constexpr KernelKey kKey = kKeyOf;
  static constexpr Tile kTile = fwd_tiles(kKeyOf)[kTileOf];
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys, kThreads = kTile.threads();
  static constexpr int kWarpRows = kTile.warp_rows();
  static constexpr int kM = kWarpRows / 16, kN = kKeys / 8, kO = kHeadDim / 8;  // m16, n8 tiles of S and of O
  static constexpr int kDepth = kHeadDim / 16;                                  // k16 steps of QKᵀ
  static constexpr int kBytesQ = kTile.q_bytes(kHeadDim), kBytesKV = kTile.kv_bytes(kHeadDim);
  using ReaderQ = BlockReader<kRows, kHeadDim>;
  using ReaderKV = BlockReader<kKeys, kHeadDim>;
  static constexpr bool kModified = kKey.variant != Variant::plain;
  static constexpr bool kBiased = kKey.variant == Variant::biased;
  using CopyQ = TileCopy<kKey.arch, kRows, kHeadDim, kThreads, kBiased>;
  using CopyKV = TileCopy<kKey.arch, kKeys, kHeadDim, kThreads, kBiased>;
  static constexpr int kPart = kModified ? 32 : 16;  // keys that P is made for at a time; dropout draws for 32
  static_assert(kKeys % kPart == 0 && kWarpRows % 16 == 0);
};

// S = Q Kᵀ. Fragments of K are read one 16 × 16 block ahead of the products that use them.
template <class F>
__device__ __forceinline__ void score_product(float (&rS)[F::kM][F::kN][4], const typename F::ReaderQ& sQ,
                                              const uint32_t (&rQ)[F::kTile.q_in_registers ? F::kDepth : 1][F::kM][4],
                                              const typename F::ReaderKV& sK) {
  constexpr int kBlocks = F::kKeys / 16;
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
    }
}

// P and O += P V, some keys at a time: the exponentials of one part fill the gaps between the products of another.
// `finish(part)` does to P what a call wants done to it after the sum.
template <class F, class Finish>
__device__ __forceinline__ void value_product(float (&rO)[F::kM][F::kO][4], float (&rS)[F::kM][F::kN][4],
                                              OnlineSoftmax<F::kM>& softmax, ScoreUnit unit,
                                              const typename F::ReaderKV& sV, const Finish& finish) {
  constexpr int kBlocks = F::kHeadDim / 16, kDepthOfAll = F::kKeys / 16, kDepth = F::kPart / 16;
  uint32_t fV[2][4];
  sV.load_transposed(fV[0], 0, 0);
  static_for<F::kKeys / F::kPart>([&](auto part) {
    constexpr int kBegin = part.value * F::kPart / 8;
    exponentiate<kBegin, kBegin + F::kPart / 8>(softmax, rS, unit);
    finish(part);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      // D fragments of two n8 tiles are one A fragment.
      uint32_t rP[F::kM][4];
#pragma unroll
      for (int m = 0; m < F::kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* s = rS[m][kBegin + 2 * d + i / 2];
          rP[m][i] = ptx::pack<F::kKey.dtype>(s[i % 2 * 2], s[i % 2 * 2 + 1]);
        }
      const int depth = part.value * kDepth + d;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int step = depth * kBlocks + block, next = step + 1;
        if (next < kDepthOfAll * kBlocks) sV.load_transposed(fV[next % 2], next / kBlocks, next % kBlocks);
        const uint32_t (&b)[4] = fV[step % 2];
#pragma unroll
        for (int m = 0; m < F::kM; ++m) {
          multiply<F::kKey>(rO[m][2 * block], rP[m], b[0], b[1]);
          multiply<F::kKey>(rO[m][2 * block + 1], rP[m], b[2], b[3]);
        }
      }
    }
  });
}

__device__ __forceinline__ const uint16_t* first_row_of(const Operand& x, const Rows& rows, int64_t head) {
  return static_cast<const uint16_t*>(x.data) + x.offset(rows.batch, head, rows.first());
}

// Impossible lengths (nobody on the host has read them): nothing is computed, and NaN says so.
template <int kThreads>
__device__ __noinline__ void store_nan(const FwdParams& p, int64_t batch, int64_t head) {
  Sequence whole{batch, {}, {}};  // from the tensor's first row on
  Range rows{0, p.rows_q.rows};
  if (p.rows_q.cu_seqlens.given())
    rows = intersect(rows, {p.rows_q.cu_seqlens[batch], p.rows_q.cu_seqlens[batch + 1]});
  else
    whole.q.batch = batch;
  for (int64_t row = rows.begin + threadIdx.x; row < rows.end; row += kThreads) {
    auto* out = static_cast<uint16_t*>(p.out.data) + p.out.offset(whole.q.batch, head, row);
    for (int64_t d = 0; d < p.dim_v; ++d) out[d] = 0x7FFF;  // NaN in fp16 and in bf16
    store_statistics(p, whole, head, static_cast<int>(row), {NAN, NAN});
  }
}

// What all threads of a CTA know alike. In shared memory, because S and O leave no register for it: whoever needs a
// number reads it anew.
struct Work {
  TileIndex tile;
  Sequence sequence;
  Visibility visibility;
  const uint16_t *gQ, *gK, *gV;  // first rows
  int first_row, rows;           // of the tile; of the sequence
  int n_begin, n_end;            // key blocks that are visited
  int full_begin, full_end;      // those without an element mask
  int seen_begin, seen_end;      // keys that some row of the tile sees: the only ones that are read
};

template <class F>
__device__ __forceinline__ Work make_work(const FwdParams& p, const FwdLaunch& launch, const TileIndex& tile,
                                          const Sequence& sequence) {
  Work work{tile, sequence, make_visibility(p.window, sequence.q.length, sequence.k.length)};
  const uint32_t head_k = static_cast<uint32_t>(tile.head) / launch.group;
  work.gQ = first_row_of(p.q, sequence.q, tile.head);
  work.gK = first_row_of(p.k, sequence.k, head_k);
  work.gV = first_row_of(p.v, sequence.k, head_k);
  work.first_row = tile.m_block * F::kRows;
  work.rows = static_cast<int>(sequence.q.length);
  const Range rows{work.first_row, min(work.rows, work.first_row + F::kRows)};
  const BlockRange blocks = work.visibility.key_blocks(rows, F::kKeys);
  const Range seen = work.visibility.keys_of_any(rows);
  work.n_begin = static_cast<int>(blocks.begin);
  work.n_end = static_cast<int>(blocks.end);
  work.full_begin = static_cast<int>(blocks.full_begin);
  work.full_end = static_cast<int>(blocks.full_end);
  work.seen_begin = static_cast<int>(seen.begin);
  work.seen_end = static_cast<int>(seen.end);
  return work;
}

// (The key comes in parts: nvcc 13 writes stubs that do not compile for kernels with class-type arguments.)
template <Arch kArch, DataType kType, int kHeadDim, Variant kVariant, int kTile, int kThreads, int kCtas>
__global__ void __launch_bounds__(kThreads, kCtas)
    fwd_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ FwdLaunch launch) {
  using F = Fwd<KernelKey{kArch, kType, kHeadDim, kVariant}, kTile>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ __align__(16) uint8_t work_bytes[sizeof(Work)];  // bytes, because a Work would want to be constructed
  Work& work = *reinterpret_cast<Work*>(work_bytes);
  const uint32_t sQ = ptx::shared_address(shared);
  const uint32_t sKV = sQ + F::kBytesQ;  // [stage][K, V]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // ---- The tile of this CTA ----
  {
    const TileIndex tile = launch.order.tile(blockIdx.x);
    const Sequence sequence = flash::sequence(p, tile.batch);
    if (!rows_are_possible(p.rows_q, sequence.q, tile.batch, launch.max_rows_q) ||
        !rows_are_possible(p.rows_k, sequence.k, tile.batch, -1)) {
      if (tile.m_block == 0) store_nan<F::kThreads>(p, tile.batch, tile.head);
      return;
    }
    if (tile.m_block * F::kRows >= sequence.q.length) return;
    if (threadIdx.x == 0) work = make_work<F>(p, launch, tile, sequence);
  }
  __syncthreads();  // everybody reads `work` from here on
  const auto place = [&] {
    return FragmentPlace{work.first_row + warp * F::kWarpRows + lane / 4, lane % 4 * 2, work.rows,
                         static_cast<int>(work.sequence.k.length)};
  };

  const ScoreUnit unit =
      F::kModified ? ScoreUnit{1.f, kLog2E<float>} : ScoreUnit{launch.scale, launch.scale * kLog2E<float>};
  float slope = 0;
  DropoutStream dropout{};
  if constexpr (F::kModified) {
    slope = alibi_slope<float>(p.score, work.tile.batch, work.tile.head);
    if (p.dropout.given()) dropout = dropout_stream(p.dropout.seed, work.tile.batch, work.tile.head);
  }

  // ---- Prologue: Q and the last K as one group of copies, the last V as another ----
  // Blocks before the first one are loaded too, as nothing: no row of them is seen.
  const auto load_k = [&](int n, int stage) {
    const HeadRows gK{work.gK, p.k.row_stride, static_cast<int>(p.dim), launch.vectorised_qk};
    F::CopyKV::load(sKV + stage * 2 * F::kBytesKV, gK, n * F::kKeys, work.seen_begin, work.seen_end);
    F::CopyKV::commit();
  };
  const auto load_v = [&](int n, int stage) {
    const HeadRows gV{work.gV, p.v.row_stride, static_cast<int>(p.dim_v), launch.vectorised_v};
    F::CopyKV::load(sKV + (stage * 2 + 1) * F::kBytesKV, gV, n * F::kKeys, work.seen_begin, work.seen_end);
    F::CopyKV::commit();
  };
  OnlineSoftmax<F::kM> softmax;
  float rO[F::kM][F::kO][4] = {};
  uint32_t rQ[F::kTile.q_in_registers ? F::kDepth : 1][F::kM][4];
  const auto reader_q = F::ReaderQ::rows_first(sQ + warp * F::kWarpRows * Panels<F::kHeadDim>::kRowBytes, lane);
  const int n_begin = work.n_begin, full_begin = work.full_begin, full_end = work.full_end;
  int n = work.n_end - 1;
  if (n >= n_begin) {
    const HeadRows gQ{work.gQ, p.q.row_stride, static_cast<int>(p.dim), launch.vectorised_qk};
    F::CopyQ::load(sQ, gQ, work.first_row, 0, work.rows);
    load_k(n, 0);
    load_v(n, 0);
    F::CopyKV::template wait<1>();
    __syncthreads();  // everybody's Q and K are there
    if constexpr (F::kTile.q_in_registers) {
#pragma unroll
      for (int depth = 0; depth < F::kDepth; ++depth)
#pragma unroll
        for (int m = 0; m < F::kM; ++m) reader_q.load(rQ[depth][m], m, depth);
    }
  }

  // ---- Key blocks, from the diagonal back ----
  int stage = 0;
#pragma unroll 1
  for (; n >= n_begin; --n) {
    const uint32_t sK = ptx::opaque(sKV) + stage * 2 * F::kBytesKV, sV = sK + F::kBytesKV;

    // S = Q Kᵀ, then the logits
    float rS[F::kM][F::kN][4];
    score_product<F>(rS, {ptx::opaque(reader_q.address)}, rQ, F::ReaderKV::columns_first(sK, lane));
    const int first_key = n * F::kKeys;
    if constexpr (F::kModified)
      scale_and_modify(rS, place(), launch.scale, static_cast<float>(p.score.softcap), slope, work.visibility.diagonal,
                       first_key);
    if constexpr (F::kBiased)
      add_bias_and_mask<F::kKey.dtype>(rS, place(), p, work.sequence, work.tile.head, first_key);
    if (n < full_begin || n >= full_end)
      hide_unseen(rS, place(), DiagonalInterval(work.visibility, place().row), first_key);
    update_reference(softmax, rS, rO, unit);

    // P = exp(S - m), O += P V
    F::CopyKV::template wait<0>();
    __syncthreads();  // everybody's V is there, and nobody reads this K, or the block before, any more
    stage = F::kTile.stages == 2 ? stage ^ 1 : 0;
    load_k(n - 1, stage);
    if constexpr (F::kTile.stages == 2) load_v(n - 1, stage);
    value_product<F>(rO, rS, softmax, unit, F::ReaderKV::rows_first(sV, lane), [&](auto part) {
      if constexpr (F::kModified) {
        if (p.dropout.given()) drop<part.value * F::kPart / 8>(rS, place(), dropout, p.dropout.threshold, first_key);
      }
    });
    F::CopyKV::template wait<F::kTile.stages - 1>();
    __syncthreads();  // everybody's next K is there, and nobody reads this V any more
    if constexpr (F::kTile.stages == 1) load_v(n - 1, 0);
  }
  F::CopyKV::template wait<0>();

  // ---- Epilogue: the sink joins the sum, O is normalised, the statistics are written ----
  const float sink = p.sink == nullptr ? -INFINITY : static_cast<const float*>(p.sink)[work.tile.head];
  const float keep_scale = static_cast<float>(p.dropout.keep_scale);
#pragma unroll
  for (int m = 0; m < F::kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const FinishedRow row = finish_row(softmax, m, half, row_sum_of(softmax.row_sum[m][half]), sink, unit);
#pragma unroll
      for (int n = 0; n < F::kO; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) rO[m][n][2 * half + c] *= row.normalise * keep_scale;
      const int position = place().row + 16 * m + 8 * half;
      if (lane % 4 == 0 && position < work.rows)
        store_statistics(p, work.sequence, work.tile.head, position, row.statistics);
    }
  stage_output<F::kKey.dtype, F::kRows, F::kHeadDim, F::kM>(sQ, rO, warp * F::kWarpRows, lane);
  __syncwarp();  // a warp's rows of Q are read by nobody else
  const Rows& rows = work.sequence.q;
  auto* out = static_cast<uint16_t*>(p.out.data) + p.out.offset(rows.batch, work.tile.head, rows.first());
  store_rows<F::kRows, F::kHeadDim, F::kWarpRows>(
      sQ, out, {nullptr, p.out.row_stride, static_cast<int>(p.dim_v), launch.vectorised_out}, work.first_row, work.rows,
      warp * F::kWarpRows, lane);
}

template <KernelKey kKey, int kTile>
int launch_tile(const FwdParams& params, const FwdLaunch& launch, void* stream) {
  using F = Fwd<kKey, kTile>;
  constexpr int kSharedBytes = F::kTile.shared_bytes(F::kHeadDim);
  const auto kernel = fwd_kernel<kKey.arch, kKey.dtype, kKey.head_dim, kKey.variant, kTile, F::kThreads, F::kTile.ctas>;
  static_assert(sizeof(Work) <= kStaticShared);
  if (kSharedBytes + kStaticShared > 48 * 1024) {
    // Once for each of the first 64 devices: it costs some microseconds.
    static std::atomic<uint64_t> allowed{0};
    const uint64_t bit = launch.device < 64 ? uint64_t{1} << launch.device : 0;
    if ((allowed & bit) == 0) {
      const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      if (error != cudaSuccess) return error;
      allowed |= bit;
    }
  }
  kernel<<<launch.blocks, F::kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(params, launch);
  return cudaGetLastError();
}

template <KernelKey kKey>
int launch_fwd(const FwdParams& params, const FwdLaunch& launch, void* stream) {
  constexpr Tiles kTiles = fwd_tiles(kKey);
  if (launch.tile == 0) return launch_tile<kKey, 0>(params, launch, stream);
  if constexpr (kTiles[1].rows > 0)
    if (launch.tile == 1) return launch_tile<kKey, 1>(params, launch, stream);
  if constexpr (kTiles[2].rows > 0)
    if (launch.tile == 2) return launch_tile<kKey, 2>(params, launch, stream);
  return cudaErrorInvalidValue;
}

}  // namespace flash::mma_sync

#define FLASH_ATTN_INSTANTIATE_FWD(family, arch, dtype, head_dim, variant)                                   \
  template int flash::family::launch_fwd<flash::KernelKey{flash::Arch::arch, flash::table::dtype, head_dim,  \
                                                          flash::Variant::variant}>(const flash::FwdParams&, \
                                                                                    const flash::FwdLaunch&, void*);
