// Forward with mma.sync: Algorithm 1 of Dao, Fu, Ermon, Rudra, Ré, "FlashAttention" (2022), one CTA a tile of query
// rows.
//
// Grid: one CTA for each (sequence, head, row block), in the order of TileOrder. A warp owns 16 or 32 rows with their
// S, P and O in registers and talks to no other, or to one (warp_pair.cuh); K and V go through shared memory, a block
// ahead of their use.
#pragma once

#include <cuda_runtime.h>

#include "gpu/mma_sync/launch.cuh"
#include "gpu/mma_sync/products.cuh"
#include "gpu/passes/block_tiles.cuh"
#include "gpu/tile/block_tiles.cuh"
#include "gpu/tile/epilogue.cuh"
#include "gpu/tile/score.cuh"

namespace flash::mma_sync {

// What all threads of a CTA know alike. In shared memory, because S and O leave no register for it: whoever needs a
// number reads it anew.
struct Work {
  TileIndex tile;
  Sequence sequence;
  Visibility visibility;
  const uint16_t *gK, *gV;   // first rows
  int first_row, rows;       // of the tile; of the sequence
  TileSteps blocks;          // of those, the ones that a block mask visits
  int n_begin, n_last;       // key blocks that are visited
  int full_begin, full_end;  // those without an element mask
  int seen_begin, seen_end;  // keys that some row of the tile sees: the only ones that are read
  DropoutStream dropout;     // of this sequence and head
};

template <class F>
__device__ __forceinline__ Work make_work(const FwdParams& p, const FwdLaunch& launch, const TileIndex& tile,
                                          const Sequence& sequence) {
  Work work{tile, sequence, make_visibility(p.window, sequence.q.length, sequence.k.length), nullptr, nullptr,
            0,    0,        TileSteps(launch.tiles, tile.batch, tile.head, tile.m_block)};
  const uint32_t head_k = launch.group.divide(static_cast<uint32_t>(tile.head));
  work.gK = first_row_of(p.k, sequence.k, head_k);
  work.gV = first_row_of(p.v, sequence.k, head_k);
  work.first_row = tile.m_block * F::kRows;
  work.rows = static_cast<int>(sequence.q.length);
  const Range rows{work.first_row, min(work.rows, work.first_row + F::kRows)};
  const BlockRange blocks = work.visibility.key_blocks(rows, F::kKeys);
  const Range seen = work.visibility.keys_of_any(rows);
  work.n_begin = static_cast<int>(blocks.begin);
  const auto n_end = static_cast<int>(blocks.end);
  work.n_last = n_end - 1;
  if (F::kTile.takes_blocks && launch.tiles.steps != nullptr)
    work.n_last = work.blocks.before(min(n_end, launch.tiles.other_tiles));
  work.full_begin = static_cast<int>(blocks.full_begin);
  work.full_end = static_cast<int>(blocks.full_end);
  work.seen_begin = static_cast<int>(seen.begin);
  work.seen_end = static_cast<int>(seen.end);
  return work;
}

// Copies of key block n into `target`.
template <class F>
__device__ __forceinline__ typename F::CopyKV copy_k(const FwdParams& p, const FwdLaunch& launch, const Work& work,
                                                     int n, uint32_t target) {
  const HeadRows head{work.gK, p.k.row_stride, static_cast<int>(p.dim), launch.vectorised_qk};
  return {target, head, n * F::kKeys, work.seen_begin, work.seen_end};
}

template <class F>
__device__ __forceinline__ typename F::CopyKV copy_v(const FwdParams& p, const FwdLaunch& launch, const Work& work,
                                                     int n, uint32_t target) {
  const HeadRows head{work.gV, p.v.row_stride, static_cast<int>(p.dim_v), launch.vectorised_v};
  return {target, head, n * F::kKeys, work.seen_begin, work.seen_end};
}

// Finds the tile of this CTA, and asks for Q, the last K and, if there are two buffers, the last V. False: no such rows.
template <class F>
__device__ __forceinline__ bool start_tile(const FwdParams& p, const FwdLaunch& launch, Work& work, uint32_t sQ,
                                           uint32_t sKV) {
  const TileIndex tile = launch.order.tile(blockIdx.x);
  const Sequence sequence = flash::sequence(p, tile.batch);
  if (!rows_are_possible(p.rows_q, sequence.q, tile.batch, launch.max_rows_q) ||
      !rows_are_possible(p.rows_k, sequence.k, tile.batch,
                         launch.tiles.steps == nullptr ? kMostRows : int64_t{launch.tiles.other_tiles} * F::kKeys)) {
    if (tile.m_block == 0) store_nan(p, tile.batch, tile.head, static_cast<int>(threadIdx.x), F::kThreads);
    return false;
  }
  if (tile.m_block * F::kRows >= sequence.q.length) return false;
  // Q first: what there is to compute for K and V can be computed while it comes.
  const HeadRows gQ{first_row_of(p.q, sequence.q, tile.head), p.q.row_stride, static_cast<int>(p.dim),
                    launch.vectorised_qk};
  typename F::CopyQ(sQ, gQ, tile.m_block * F::kRows, 0, static_cast<int>(sequence.q.length)).copy_all();
  // Everybody computes it, so that nobody waits for it before the copies; what comes later reads it from `work`.
  const Work mine = make_work<F>(p, launch, tile, sequence);
  const int n = mine.n_last;
  if (n >= mine.n_begin) {
    copy_k<F>(p, launch, mine, n, sKV).copy_all();
    if constexpr (F::kTile.stages == 2) copy_v<F>(p, launch, mine, n, sKV + F::kBytesKV).copy_all();
  }
  if (threadIdx.x == 0) {
    work = mine;
    if constexpr (F::kDropout)
      if (p.dropout.given()) work.dropout = dropout_stream(p.dropout.seed, sequence.index, tile.head);
  }
  return true;
}

template <class F>
using Pair = WarpPair<F::kM, F::kValueDepth>;

// From this thread's largest scores to those of whole rows.
template <class F>
__device__ __forceinline__ void find_row_maxima(float (&maxima)[F::kM][2], const Pair<F>& pair) {
  float own = 0;  // of the row that is this lane's to give
#pragma unroll
  for (int i = 0; i < 2 * F::kM; ++i) {
    float& largest = maxima[i / 2][i % 2];
    largest = row_max_of(largest);
    if (pair.lane % 4 == i) own = largest;
  }
  if constexpr (F::kSplit == 2) {
    pair.give_number(own, pair.lane / 4 + pair.lane % 4 * 8);
    pair.sync();
#pragma unroll
    for (int i = 0; i < 2 * F::kM; ++i) {
      float& largest = maxima[i / 2][i % 2];
      largest = fmaxf(largest, pair.take_number(pair.lane / 4 + 8 * i));
    }
  }
}

// The sink joins the sum, O is normalised and goes to `staged`, Q's place, and from there to the tensor; the statistics
// are written.
template <class F>
__device__ __forceinline__ void finish_tile(const FwdParams& p, const FwdLaunch& launch, const Work& work,
                                            const OnlineSoftmax<F::kM>& softmax, float (&rO)[F::kM][F::kO][4],
                                            ScoreUnit unit, uint32_t staged, const Pair<F>& pair) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp / F::kSplit * F::kWarpRows, half = warp % F::kSplit;
  OwnRow own = own_row(softmax, lane);
  const int row = lane / 4 + lane % 4 * 8;
  if constexpr (F::kSplit == 2) {
    pair.give_number(own.row_sum, row);
    pair.sync();
    own.row_sum += pair.take_number(row);
  }
  const float sink = p.sink == nullptr ? -INFINITY : static_cast<const float*>(p.sink)[work.tile.head];
  const FinishedRow finished = finish_row(own.reference, own.row_sum, sink, unit);
  const int position = work.first_row + first_row + row;
  if (half == 0 && lane % 4 < 2 * F::kM && position < work.rows)
    store_statistics(p, work.sequence, work.tile.head, position, finished.statistics);
  scale_rows(rO, finished.normalise * (F::kDropout ? launch.keep_scale : 1.f), lane);

  staged += half * F::kColumns * F::kRows * 2;
  stage_output<F::kKey.dtype, F::kRows, F::kHeadDim>(staged, rO, first_row, lane);
  __syncwarp();  // nobody reads Q any more, and nobody else this part of O
  const Rows& rows = work.sequence.q;
  const int64_t offset = p.out.offset(rows.batch, work.tile.head, rows.first()) + half * F::kColumns;
  const HeadRows out{nullptr, p.out.row_stride, static_cast<int>(p.dim_v) - half * F::kColumns, launch.vectorised_out};
  store_rows<F::kRows, F::kHeadDim, F::kWarpRows, F::kColumns>(staged, static_cast<uint16_t*>(p.out.data) + offset, out,
                                                               work.first_row, work.rows, first_row, lane);
}

// (The key comes in parts: nvcc 13 writes stubs that do not compile for kernels with class-type arguments.)
template <Arch kArch, DataType kType, int kHeadDim, Variant kVariant, int kTile, int kThreads, int kCtas>
__global__ void __launch_bounds__(kThreads, kCtas)
    fwd_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ FwdLaunch launch) {
  using F = Fwd<KernelKey{kArch, kType, kHeadDim, kVariant}, kTile>;
  using CopyKV = typename F::CopyKV;
  extern __shared__ __align__(128) uint8_t shared[];
  static __shared__ __align__(16)
      uint8_t work_bytes[sizeof(Work)];  // bytes, because a Work would want to be constructed
  Work& work = *reinterpret_cast<Work*>(work_bytes);
  const uint32_t sQ = ptx::shared_address(shared);
  const uint32_t sKV = sQ + F::kBytesQ;  // [stage][K, V]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp / F::kSplit * F::kWarpRows;
  const int half = warp % F::kSplit;  // of the keys and of the columns that its pair has
  const Pair<F> pair(sKV + F::kTile.stages * 2 * F::kBytesKV, F::kTile.warps, warp, lane);
  if (!start_tile<F>(p, launch, work, sQ, sKV)) return;
  CopyKV::wait();
  __syncthreads();  // everybody's Q and K are there, and `work`
  const auto place = [&] {
    return FragmentPlace{work.first_row + first_row + lane / 4, lane % 4 * 2, work.rows,
                         static_cast<int>(work.sequence.k.length)};
  };

  const ScoreUnit unit =
      F::kModified ? ScoreUnit{1.f, kLog2E<float>} : ScoreUnit{launch.scale, launch.scale * kLog2E<float>};
  const float slope = F::kModified ? alibi_slope<float>(p.score, work.tile.batch, work.tile.head) : 0.f;
  WarpDropout<F::kM, F::kDropout ? F::kWarpKeys : 0, F::kKeepDropoutRows> dropout;
  if constexpr (F::kDropout) dropout.begin(work.dropout, place().row, place().column);

  constexpr int kRowBytes = Panels<F::kHeadDim>::kRowBytes;
  OnlineSoftmax<F::kM> softmax(unit);
  float rO[F::kM][F::kO][4] = {};
  uint32_t rQ[F::kTile.q_in_registers ? F::kDepth : 1][F::kM][4];
  const auto reader_q = F::ReaderQ::rows_first(sQ + first_row * kRowBytes, lane);
  if constexpr (F::kTile.q_in_registers) {
#pragma unroll
    for (int depth = 0; depth < F::kDepth; ++depth)
#pragma unroll
      for (int m = 0; m < F::kM; ++m) reader_q.load(rQ[depth][m], m, depth);
  }

  // ---- Key blocks, from the diagonal back ----
  // With two buffers for K and V the next block of both is copied beside S; with one, V is beside S and the next K
  // beside P V. The block before the first one is copied too, as nothing: no row of it is seen.
  uint32_t stage = 0;
#pragma unroll 1
  for (int n = work.n_last; n >= work.n_begin;) {
    [[maybe_unused]] int listed;
    if constexpr (F::kTile.takes_blocks) listed = work.blocks.before(n);
    const auto next = [&] {
      if constexpr (F::kTile.takes_blocks) return listed;
      return n - 1;
    };
    const uint32_t sK = ptx::opaque(sKV) + stage, sV = sK + F::kBytesKV;
    const int first_key = n * F::kKeys + half * F::kWarpKeys;
    constexpr bool kTwoStages = F::kTile.stages == 2;
    if constexpr (kTwoStages) stage ^= 2 * F::kBytesKV;

    // S = Q Kᵀ, then the logits
    CopyKV copy =
        kTwoStages ? copy_k<F>(p, launch, work, next(), ptx::opaque(sKV) + stage) : copy_v<F>(p, launch, work, n, sV);
    float rS[F::kM][F::kN][4];
    const auto k_reader = F::ReaderKV::columns_first(sK + half * F::kWarpKeys * kRowBytes, lane);
    score_product<F>(rS, {ptx::opaque(reader_q.address)}, rQ, k_reader, [&](int step) {
      if constexpr (kTwoStages) {
        constexpr int kHalf = F::kScoreSteps / 2;
        if (step == kHalf) copy = copy_v<F>(p, launch, work, next(), ptx::opaque(sKV) + stage + F::kBytesKV);
        step < kHalf ? copy_among<0, kHalf>(step, copy) : copy_among<kHalf, kHalf>(step, copy);
      } else {
        copy_among<0, F::kScoreSteps>(step, copy);
      }
      if constexpr (F::kDropout && !F::kModified)
        dropout.template draw_among<F::kScoreSteps>(step, work.dropout, first_key);
    });
    if constexpr (F::kModified) {
      scale_and_modify(rS, place(), launch.scale, launch.softcap, slope, work.visibility.diagonal, first_key);
      if (p.dropout.given()) {
        // What follows from it is not kept: registers are scarce.
        dropout.query_group = ptx::opaque(dropout.query_group);
        dropout.draw(work.dropout, first_key);
      }
    }
    if constexpr (F::kBiased) {
      add_bias_and_mask<F::kKey.dtype>(rS, place(), p, work.sequence, work.tile.head, first_key);
      if (!work.blocks.is_full(n))
        hide_blocks(rS, place(), p.block_mask, launch.tiles, work.sequence, work.tile.head, first_key);
    }
    if (n < work.full_begin || n >= work.full_end) {
      const DiagonalInterval of_first(work.visibility, place().row);
      hide_unseen(rS, first_key + place().column, place().keys,
                  [&](int m, int half) { return of_first.below(16 * m + 8 * half); });
    }
    float maxima[F::kM][2];
    bool raise = find_maxima(maxima, softmax, rS);
    if constexpr (F::kSplit == 2) {
      CopyKV::wait();
      raise = __syncthreads_or(raise);  // as below, and a pair does the same
    } else {
      raise = __any_sync(~0u, raise);
    }
    if (raise) {
      find_row_maxima<F>(maxima, pair);
      raise_reference(softmax, maxima, rS, rO, unit);
    }

    // P = exp(S - m), O += P V
    if constexpr (!kTwoStages) {
      if constexpr (F::kSplit == 1) {
        CopyKV::wait();
        __syncthreads();  // everybody's V is there, and nobody reads this K any more
      }
      copy = copy_k<F>(p, launch, work, next(), sK);
    }
    const auto v_reader = [&](int keys) {  // the keys of one half, this warp's columns
      return F::ReaderKV::rows_first(sV + keys * F::kWarpKeys * kRowBytes + half * F::kColumns * F::kKeys * 2, lane);
    };
    value_product<F>(
        rO, v_reader(half),
        [&](uint32_t (&rP)[F::kM][4], auto depth) {
          make_probabilities<F, depth.value>(rP, rS, softmax, unit);
#pragma unroll
          for (int m = 0; m < F::kM; ++m) {
            if constexpr (F::kDropout) dropout.drop(rP[m], m, depth.value, work.dropout, first_key, launch.threshold);
            if constexpr (F::kSplit == 2) pair.give(rP[m], m, depth.value);
          }
        },
        [&](int step) {
          if constexpr (!kTwoStages) copy_among<0, F::kValueSteps>(step, copy);
        });
    if constexpr (F::kSplit == 2) {
      pair.sync();
      value_product<F>(
          rO, v_reader(half ^ 1),
          [&](uint32_t (&rP)[F::kM][4], auto depth) {
#pragma unroll
            for (int m = 0; m < F::kM; ++m) pair.take(rP[m], m, depth.value);
          },
          [](int) {});
    }
    CopyKV::wait();
    __syncthreads();  // everybody's next K is there (and V, of two), and nobody reads this V (this block) any more
    n = next();
  }

  finish_tile<F>(p, launch, work, softmax, rO, unit, sQ, pair);
}

#if defined(__CUDACC__)  // not where kernels are compiled for the CPU, for tests

template <KernelKey kKey, int kTile>
int launch_tile(const FwdParams& params, const FwdLaunch& launch, void* stream) {
  using F = Fwd<kKey, kTile>;
  constexpr int kSharedBytes = F::kTile.shared_bytes(F::kHeadDim);
  const auto kernel = fwd_kernel<kKey.arch, kKey.dtype, kKey.head_dim, kKey.variant, kTile, F::kThreads, F::kTile.ctas>;
  static_assert(sizeof(Work) <= kStaticShared);
  static std::atomic<uint64_t> allowed{0};
  if (const cudaError_t error = allow_shared(kernel, kSharedBytes, launch.device, allowed); error != cudaSuccess)
    return error;
  make_block_tiles<false>(params, launch.tiles, F::kRows, F::kKeys, static_cast<cudaStream_t>(stream));
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
  if constexpr (kTiles[3].rows > 0)
    if (launch.tile == 3) return launch_tile<kKey, 3>(params, launch, stream);
  return cudaErrorInvalidValue;
}

#endif

}  // namespace flash::mma_sync

#define FLASH_ATTN_INSTANTIATE_FWD(family, arch, dtype, head_dim, variant)                                   \
  template int flash::family::launch_fwd<flash::KernelKey{flash::Arch::arch, flash::table::dtype, head_dim,  \
                                                          flash::Variant::variant}>(const flash::FwdParams&, \
                                                                                    const flash::FwdLaunch&, void*);
