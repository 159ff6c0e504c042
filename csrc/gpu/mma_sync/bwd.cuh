// Backward with mma.sync: Algorithm 4 of the FlashAttention paper, key-stationary: one CTA a tile of keys.
//
// Grid: one CTA for each (sequence, key head, key block), in the order of TileOrder. It walks the row blocks of all query
// heads of its group that see one of its keys, recomputes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, and keeps dK and dV in registers:
// they are summed in an order that is always the same. dQ needs every CTA: each adds its part to an fp32 sum in global
// memory, and a pass of its own scales and rounds it.
#pragma once

#include <cuda_runtime.h>

#include "gpu/mma_sync/bwd_gradients.cuh"
#include "gpu/mma_sync/bwd_products.cuh"
#include "gpu/mma_sync/bwd_rows.cuh"
#include "gpu/passes/block_tiles.cuh"
#include "gpu/tile/epilogue.cuh"
#include "gpu/tile/split_barrier.cuh"

namespace flash::mma_sync {

// The key block of CTA `index`: under a block mask those of a head that visit most come first, so that no long one is
// left for the end.
template <class F>
__device__ __forceinline__ TileIndex key_block_of(const BwdLaunch& launch, uint32_t index) {
  TileIndex tile = launch.turn_order.key_block(launch.order, index);
  const BlockTiles& tiles = launch.tiles;
  if (F::skips(tiles)) {
    const int head = static_cast<int>(tile.head) * static_cast<int>(launch.group);
    const int plane = static_cast<int>(tile.batch) * tiles.batch_planes + head * tiles.head_planes;
    tile.m_block = tiles.order[int64_t{plane} * tiles.own_tiles + tile.m_block];
  }
  return tile;
}

// Finds the key block of this CTA and its first row block, and asks for both. False: there is no such key block.
template <class F>
__device__ __forceinline__ bool start_key_block(const BwdParams& p, const BwdLaunch& launch, BwdWork& work,
                                                RowBlockIndex& block, const RowStream<F>& stream, uint32_t sK,
                                                uint32_t sV) {
  const TileIndex tile = key_block_of<F>(launch, blockIdx.x);
  const Sequence sequence = flash::sequence(p, tile.batch);
  if (!rows_are_possible(p.rows_q, sequence.q, tile.batch, launch.max_rows_q) ||
      !rows_are_possible(p.rows_k, sequence.k, tile.batch, launch.max_rows_k))
    return false;  // the outputs of the forward are NaN already
  BwdWork mine = make_bwd_work<F>(p, launch, tile, sequence);
  if (mine.n * F::kKeys >= mine.keys) return false;
  // Everybody has made it, so that nobody waits for `work` before the copies.
  const RowStream<F> my_stream(stream, mine);
  const uint32_t step = my_stream.first_step(mine.first_head);  // used behind the copies of K and V
  const auto copy = [&](uint32_t target, const Operand& x, int64_t dim, bool vectorised) {
    const HeadRows rows{first_row_of(x, sequence.k, tile.head), x.row_stride, static_cast<int>(dim), vectorised};
    typename F::CopyKV(target, rows, mine.n * F::kKeys, mine.seen_begin, mine.seen_end).copy_all();
  };
  copy(sK, p.k, p.dim, launch.vectorised_qk);
  copy(sV, p.v, p.dim_v, launch.vectorised_v);
  block = my_stream.first(mine.first_head, step);
  if (my_stream.skips()) mine.steps = my_stream.steps_of(block.head);
  my_stream.copy(block, 0);
  if (threadIdx.x == 0) {
    work = mine;
    stream.make_dropout_stream(block);
  }
  return true;
}

// dK and dV, by way of K's and V's places: warps that share keys write their rows, which no others want.
template <class F>
__device__ __forceinline__ void store_gradients(const BwdParams& p, const BwdLaunch& launch, const BwdWork& work,
                                                float (&rdK)[F::kM][F::kO][4], float (&rdV)[F::kM][F::kO][4],
                                                uint32_t sK, uint32_t sV, const auto& sync_key_warps) {
  const uint32_t thread = ptx::opaque(threadIdx.x);  // the loop has no registers for what follows from it
  const int warp = static_cast<int>(thread / 32), lane = static_cast<int>(thread % 32);
  const int warp_key = warp / F::kSplits * F::kWarpKeys, split = warp % F::kSplits;
  const auto scale = [&](float (&r)[F::kM][F::kO][4], float factor) {
#pragma unroll
    for (int i = 0; i < F::kM * F::kO * 4; ++i) r[i / (F::kO * 4)][i / 4 % F::kO][i % 4] *= factor;
  };
  scale(rdK, launch.scale);
  if constexpr (F::kDropout) scale(rdV, launch.keep_scale);
  stage_output<F::kKey.dtype, F::kKeys, F::kHeadDim, F::kPeriod, F::kSplits>(sK, rdK, warp_key, lane, 2 * split);
  stage_output<F::kKey.dtype, F::kKeys, F::kHeadDim, F::kPeriod, F::kSplits>(sV, rdV, warp_key, lane, 2 * split);
  sync_key_warps();
  const auto store = [&](uint32_t tile, const Operand& x, int64_t dim, bool vectorised) {
    if (x.data == nullptr) return;
    constexpr int kRowsOfWarp = F::kKeys / F::kWarps;
    const Rows& rows = work.sequence.k;
    auto* out = static_cast<uint16_t*>(x.data) + x.offset(rows.batch, work.head_k, rows.first());
    const HeadRows head_rows{nullptr, x.row_stride, static_cast<int>(dim), vectorised};
    store_rows<F::kKeys, F::kHeadDim, kRowsOfWarp, F::kHeadDim, F::kPeriod>(tile, out, head_rows, work.n * F::kKeys,
                                                                            work.keys, warp * kRowsOfWarp, lane);
  };
  store(sK, p.dk, p.dim, launch.vectorised_dk);
  store(sV, p.dv, p.dim_v, launch.vectorised_dv);
}

template <Arch kArch, DataType kType, int kHeadDim, Variant kVariant, int kTile, Masks kMasks, int kThreads, int kCtas>
__global__ void __launch_bounds__(kThreads, kCtas)
    bwd_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdLaunch launch) {
  using F = Bwd<KernelKey{kArch, kType, kHeadDim, kVariant}, kTile, kMasks>;
  constexpr KernelKey kKey = F::kKey;
  extern __shared__ __align__(128) uint8_t shared[];
  static __shared__ __align__(16) uint8_t work_bytes[sizeof(BwdWork)];
  static __shared__ __align__(8) uint8_t barrier_bytes[3 * 8];
  BwdWork& work = *reinterpret_cast<BwdWork*>(work_bytes);
  const uint32_t sK = ptx::shared_address(shared), sV = sK + F::kBytesKV;
  const uint32_t sQ = sV + F::kBytesKV;  // [stage][Q, dO]
  const uint32_t sP = sQ + 2 * F::kStages * F::kBytesQ, sdS = sP + F::kBytesScore;
  const uint32_t sNumbers = sdS + F::kBytesScore;  // [stage] QueryTable, and steps of a block mask
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key_warp = warp / F::kSplits, split = warp % F::kSplits;
  const int warp_key = key_warp * F::kWarpKeys, warp_row = split * F::kWarpRows;

  // Each warp goes at its own pace, so that the two of a scheduler are not both without products at the same time. It
  // meets those that share its keys once a row block, and all others at three barriers with a product between their halves.
  const uint32_t barriers = ptx::shared_address(barrier_bytes);
  const SplitBarrier<kKey.arch> ds_there{barriers};              // everybody's dS
  const SplitBarrier<kKey.arch> rows_there{barriers + 8};        // Q, dO and the numbers of the next row block
  const SplitBarrier<kKey.arch> last_block_over{barriers + 16};  // nobody reads anything of the last one any more
  const auto sync_key_warps = [&] { ptx::barrier_sync(1 + key_warp, 32 * F::kSplits); };

  const RowStream<F> stream(p, launch, work, sQ, sNumbers);
  RowBlockIndex block;
  if (!start_key_block<F>(p, launch, work, block, stream, sK, sV)) return;
  if (threadIdx.x == 0)
    for (const auto& barrier : {ds_there, rows_there, last_block_over}) barrier.init(F::kWarps);

  // Where this lane reads and writes, kept: made anew for each row block it is 100 instructions. What serves fewer of
  // them is made anew where there are no registers for it.
  const auto a_kv = F::ReaderKV::rows_first(sK, lane, key_warp * F::kM).kept();
  const auto b_q = F::ReaderQ::columns_first(sQ, lane, split * F::kN / 2).kept();
  const auto b_rows =
      (F::kDealt ? F::ReaderQ::dealt_rows_first(sQ, lane, split) : F::ReaderQ::rows_first(sQ, lane, 0, split)).kept();
  const Places<F> kept_places = Places<F>(sP, sdS, sK, threadIdx.x).kept();

  float rdK[F::kM][F::kO][4] = {}, rdV[F::kM][F::kO][4] = {};
  int stage = 0, parity = 0;
  F::CopyQ::wait();
  __syncthreads();  // everybody's copies, and `work`

  // ---- Row blocks of all heads of the group ----
#pragma unroll 1
  while (block.given()) {
    if (launch.turn_order.taken) ask_for_turn<F>(launch, work, block);
    const typename F::Table numbers = stream.table(stage);
    const bool is_special = numbers.is_special();
    if (is_special) {
      clear_unseeing_rows<F>(numbers, sQ + stage * 2 * F::kBytesQ);
      __syncthreads();
    }
    const int next_stage = F::kStages == 2 ? stage ^ 1 : 0;

    const auto fragments = [&] {
      const int here = static_cast<int>(ptx::opaque(lane));  // to be computed where it is needed alone
      return GradientTile{
          {work.n * F::kKeys + warp_key + here / 4, block.m * F::kRows + warp_row + here % 4 * 2, work.keys, work.rows},
          block.head,
          warp_row,
          here};
    };
    const auto dropout = draw_dropout<F>(fragments(), p, launch, work);  // first: what it takes is free then

    // Sᵀ = K Qᵀ
    const auto score = [&](auto& r, const auto& c, int kv_bytes, int q_bytes, int first_block, const auto& beside) {
      const auto b = b_q.behind(stage * 2 * F::kBytesQ);
      add_product<kKey, F::kDepth>(
          r, c, [&](uint32_t (&x)[4], int block, int depth) { a_kv.load(x, block, depth, kv_bytes); },
          [&](uint32_t (&x)[4], int block, int depth) { b.load(x, first_block + block, depth, q_bytes); }, beside);
    };
    const Zeros zeros;
    float rS[F::kM][F::kN][4];
    uint32_t steps = 0;  // loaded among the last products
    score(rS, zeros, 0, 0, 0, [&](int step) {
      if (step == F::kDepth * F::kN / 2 - 2) steps = stream.load_steps(stage);
    });
    last_block_over.wait(parity ^ 1);
    const RowBlockIndex next = stream.after(block, steps);
    if constexpr (F::kStages == 2) stream.copy(next, next_stage);

    // P = exp2(S · c - shift), beside dPᵀ = V dOᵀ, from -delta on; dS = P · (dP - delta)
    const bool hides = !F::kBiased && (block.m < work.m_full_begin || block.m >= work.m_full_end);
    if constexpr (!F::kBiased) {
      if (is_special) rebase_far<F>(rS, fragments(), numbers, launch);
      if (hides) replace_unseen(rS, fragments().place, work.visibility, -INFINITY);
    }
    const auto places = F::kKeepsPlaces ? kept_places : Places<F>(sP, sdS, sK, ptx::opaque(threadIdx.x));
    constexpr int kParts = F::kScoreParts, kNOfPart = F::kN / kParts, kPieces = Pieces<F>::kCount / kParts;
    static_for<kParts>([&](auto part) {
      constexpr int kFirst = part.value * kNOfPart;
      float rdP[F::kM][kNOfPart][4];
      if constexpr (F::kBiased) {
        score(rdP, zeros, F::kBytesKV, F::kBytesQ, 0, [](int) {});
        apply_options<F>(rS, rdP, fragments(), is_special, p, launch, work, numbers, dropout);
      } else {
        float minus_deltas[kNOfPart][4] = {};
        const auto start = [&](int m, int n) -> const float (&)[4] {
          if (!F::kDropout && m == 0) numbers.minus_deltas(minus_deltas[n], warp_row + 8 * (kFirst + n), lane);
          return minus_deltas[n];
        };
        float shifts[Pieces<F>::kTiles][2];
        constexpr int kStepsOfPart = F::kDepth * kNOfPart / 2;
        score(rdP, start, F::kBytesKV, F::kBytesQ, kFirst / 2, [&](int step) {
          spread<kPieces, kStepsOfPart / 2>(step - kStepsOfPart / 4, [&](int piece) {
            const Pieces<F> at(part.value * kPieces + piece);
            if (at.m == 0 && at.half == 0) numbers.shifts(shifts, warp_row + 8 * at.n, lane);
            exponentiate<F>(rS, shifts, launch.scale * kLog2E<float>, part.value * kPieces + piece);
          });
        });
        if constexpr (F::kDropout)
          multiply_and_drop<F>(rdP, rS, kFirst, fragments(), launch, numbers, dropout);
        else
          multiply_by_weights(rdP, rS, kFirst);
        if (hides) {  // dP may be NaN
          GradientPlace place = fragments().place;
          place.query += 8 * kFirst;
          replace_unseen(rdP, place, work.visibility, 0);
        }
      }
#pragma unroll
      for (int piece = part.value * kPieces; piece < (part.value + 1) * kPieces; ++piece) {
        places.scores.store(rS, piece);
        places.scores.store(rdP, piece, kFirst, F::kBytesScore);
      }
    });
    if (launch.turn_order.taken) wait_for_turn<F>(launch, work, block);
    ds_there.arrive();
    sync_key_warps();  // their P and dS are there

    // dV += Pᵀ dO; dQ += dS K, of this warp's rows and columns; dK += dSᵀ Q, and beside it dQ is added
    const auto outer = [&](float (&r)[F::kM][F::kO][4], int score_bytes, int q_bytes, const auto& beside) {
      const auto b = b_rows.behind(stage * 2 * F::kBytesQ);
      add_product<kKey, F::kRows / 16>(
          r, [&](int m, int n) -> const float (&)[4] { return r[m][n]; },
          [&](uint32_t (&x)[4], int block, int depth) { places.a_scores.load(x, block, depth, score_bytes); },
          [&](uint32_t (&x)[4], int block, int depth) {
            if constexpr (F::kDealt)
              b.load_dealt_transposed(x, depth, block * F::kSplits, q_bytes);
            else
              b.load_transposed(x, depth, block * F::kSplits, q_bytes);
          },
          beside);
    };
    outer(rdV, 0, F::kBytesQ, [](int) {});
    ds_there.wait(parity);  // and dQ is this CTA's to add to
    if (launch.dq_sum != nullptr) {
      float rdQ[F::kDqM][F::kDqN][4] = {};
      constexpr int kNumbers = F::kDqM * F::kDqN * 4;
      float* dq = launch.dq_sum + int64_t{block.tile} * (F::kRows * F::kHeadDim) + threadIdx.x;
      const auto add = [&](int i) {
        ptx::add_global(dq + i * F::kThreads, rdQ[i / (F::kDqN * 4)][i / 4 % F::kDqN][i % 4]);
      };
      const auto multiply_dq = [&](int part) {
        const auto b = part == 0 ? places.b_dq : Places<F>::b_dq_of(part, sK, threadIdx.x);
        add_product<kKey, F::kKeys / 16>(
            rdQ, zeros, [&](uint32_t (&x)[4], int block, int depth) { places.a_dq.load_transposed(x, depth, block); },
            [&](uint32_t (&x)[4], int block, int depth) { b.load_transposed(x, depth, block * F::kDqSplits); },
            [](int) {});
      };
#pragma unroll 1
      for (int part = 0; part + 1 < F::kDqParts; ++part) {
        multiply_dq(part);
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) add(i);
        dq += kNumbers * F::kThreads;
      }
      multiply_dq(F::kDqParts - 1);
      F::CopyQ::wait();
      rows_there.arrive();
      if (launch.turn_order.taken) {  // once, not for each of them: the product would have fifty branches
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) add(i);
        __syncthreads();
        end_turn(launch, block.tile);
        outer(rdK, F::kBytesScore, 0, [](int) {});
      } else {
        outer(rdK, F::kBytesScore, 0,
              [&](int step) { spread<kNumbers, F::kRows / 16 * F::kO / 2>(step, [&](int i) { add(i); }); });
      }
    } else {
      F::CopyQ::wait();
      rows_there.arrive();
      outer(rdK, F::kBytesScore, 0, [](int) {});
    }
    last_block_over.arrive();
    if constexpr (F::kStages == 2) {
      rows_there.wait(parity);
    } else {
      __syncthreads();  // nobody reads Q, dO and the numbers any more
      stream.copy(next, 0);
      F::CopyQ::wait();
      __syncthreads();
    }
    block = next, stage = next_stage, parity ^= 1;
  }

  __syncthreads();
  store_gradients<F>(p, launch, work, rdK, rdV, sK, sV, sync_key_warps);
}

// dQ = scale · dq_sum, one CTA a row block. Four lanes of the main kernel that share a row hold 8 columns, two each: a
// thread takes all of them. Its neighbours take the next rows, whose sums are neighbours, and then the next columns, as
// many as lie beside each other in dQ: 128 bytes at a time are read, and 32 to 128 written.
template <Arch kArch, DataType kType, int kHeadDim, Variant kVariant, int kTile, int kThreads>
__global__ void __launch_bounds__(kThreads)
    dq_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdLaunch launch) {
  using F = Bwd<KernelKey{kArch, kType, kHeadDim, kVariant}, kTile>;
  const RowBlock block(launch.m_blocks, p.heads, F::kRows);
  const Rows rows = rows_of_sequence(p.rows_q, block.batch);
  const int first_row = static_cast<int>(block.first_row);
  if (!rows_are_possible(p.rows_q, rows, block.batch, launch.max_rows_q) || first_row >= rows.length) return;
  const int64_t tile =
      block.head * launch.all_tiles + first_row_tile<F::kRows>(p, launch.m_blocks, block.batch) + first_row / F::kRows;
  const float* sums = launch.dq_sum + tile * (F::kRows * F::kHeadDim);
  auto* out = static_cast<uint16_t*>(p.dq.data) + p.dq.offset(rows.batch, block.head, rows.first() + first_row);
  constexpr int kEights = F::kRows * F::kHeadDim / 8, kRounds = kEights / kThreads;
  constexpr int kBatch = kRounds % 4 == 0 ? 4 : kRounds % 3 == 0 ? 3 : kRounds % 2 == 0 ? 2 : 1;
  static_assert(kRounds * kThreads == kEights && 2 * kBatch <= kLoadsAtOnce);
#pragma unroll 1
  for (int begin = 0; begin < kRounds; begin += kBatch) {
    float4 even[kBatch], odd[kBatch];
    int row[kBatch], column[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int rest = (begin + i) * kThreads + static_cast<int>(threadIdx.x);
      const auto digit = [&](int base) {
        const int value = rest % base;
        rest /= base;
        return value;
      };
      const int row_of_8 = digit(8), n_odd = digit(2), split = digit(F::kDqSplits), n_half = digit(F::kDqN / 2);
      const int row_warp = digit(F::kTile.dq_row_warps), half = digit(2), m = digit(F::kDqM), part = rest;
      const int index = ((part * F::kDqM + m) * F::kDqN + 2 * n_half + n_odd) * 2 + half;
      const auto* from = reinterpret_cast<const float4*>(sums + 2 * index * kThreads) +
                         (split * F::kTile.dq_row_warps + row_warp) * 8 + row_of_8;
      even[i] = from[0], odd[i] = from[kThreads / 4];  // the sums have all rows of a block
      const int place = row_warp * F::kDqRows + 16 * m + 8 * half + row_of_8;
      row[i] = F::kDealt ? dealt_query(place) : place;
      column[i] = 16 * ((part * (F::kDqAtOnce / 16) + n_half) * F::kDqSplits + split) + 8 * n_odd;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first_row + row[i] >= rows.length || column[i] >= p.dim) continue;
      const auto pair = [&](float a, float b) { return ptx::pack<kType>(launch.scale * a, launch.scale * b); };
      const uint4 all{pair(even[i].x, odd[i].x), pair(even[i].y, odd[i].y), pair(even[i].z, odd[i].z),
                      pair(even[i].w, odd[i].w)};
      uint16_t* target = out + row[i] * p.dq.row_stride + column[i];
      if (launch.vectorised_dq) {
        *reinterpret_cast<uint4*>(target) = all;
      } else {
        const uint32_t pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int d = 0; d < 8; ++d)
          if (column[i] + d < p.dim) target[d] = static_cast<uint16_t>(pairs[d / 2] >> (16 * (d % 2)));
      }
    }
  }
}

// Whether a tile has one kernel for launches with a block mask and one for those without: the tiles that are chosen by
// themselves have, but for options that take longer than a step.
constexpr bool has_kernel_of_masks(KernelKey key, int tile) {
  return tile == 0 && key.variant != Variant::biased && bwd_tiles(key)[tile].takes_blocks;
}

#if defined(__CUDACC__)  // not where kernels are compiled for the CPU, for tests

template <KernelKey kKey, int kTile, Masks kMasks>
cudaError_t launch_main(const BwdParams& params, const BwdLaunch& launch, cudaStream_t stream) {
  using F = Bwd<kKey, kTile>;
  constexpr int kSharedBytes = F::kTile.shared_bytes(F::kHeadDim);
  const auto kernel =
      bwd_kernel<kKey.arch, kKey.dtype, kKey.head_dim, kKey.variant, kTile, kMasks, F::kThreads, F::kTile.ctas>;
  static_assert(sizeof(BwdWork) + 3 * 8 <= kStaticShared);
  static std::atomic<uint64_t> allowed{0};
  if (const cudaError_t error = allow_shared(kernel, kSharedBytes, launch.device, allowed); error != cudaSuccess)
    return error;
  make_block_tiles<true>(params, launch.tiles, F::kKeys, F::kRows, stream);
  kernel<<<launch.blocks, F::kThreads, kSharedBytes, stream>>>(params, launch);
  return cudaSuccess;
}

template <KernelKey kKey, int kTile>
int launch_bwd_tile(const BwdParams& params, const BwdLaunch& launch, void* given_stream) {
  using F = Bwd<kKey, kTile>;
  const auto stream = static_cast<cudaStream_t>(given_stream);
  const auto blocks = static_cast<uint32_t>(params.batch * params.heads);
  if (launch.m_blocks > 0 && blocks > 0) {
    constexpr int kLanes = F::kHeadDim <= 64 ? 8 : F::kHeadDim <= 128 ? 16 : 32;
    numbers_kernel<kKey.dtype, typename F::Table, kLanes, F::kRows * F::kHeadDim>
        <<<static_cast<uint32_t>(launch.m_blocks) * blocks, kRowThreads, 0, stream>>>(
            params, launch.numbers, launch.dq_sum, launch.m_blocks, launch.all_tiles,
            launch.vectorised_dout && launch.vectorised_out);
  }
  if (params.dsink != nullptr && params.heads > 0)
    sink_kernel<typename F::Table><<<static_cast<uint32_t>(params.heads), kRowThreads, 0, stream>>>(
        params, launch.numbers, launch.m_blocks, launch.all_tiles);
  if (launch.blocks > 0) {
    cudaError_t error;
    if constexpr (has_kernel_of_masks(kKey, kTile))
      error = launch.tiles.steps == nullptr ? launch_main<kKey, kTile, Masks::none>(params, launch, stream)
                                            : launch_main<kKey, kTile, Masks::given>(params, launch, stream);
    else
      error = launch_main<kKey, kTile, Masks::any>(params, launch, stream);
    if (error != cudaSuccess) return error;
  }
  if (launch.dq_sum != nullptr && launch.m_blocks > 0 && blocks > 0)
    dq_kernel<kKey.arch, kKey.dtype, kKey.head_dim, kKey.variant, kTile, F::kThreads>
        <<<static_cast<uint32_t>(launch.m_blocks) * blocks, F::kThreads, 0, stream>>>(params, launch);
  return cudaGetLastError();
}

template <KernelKey kKey, int kTile>
int launch_bwd_tile_from(const BwdParams& params, const BwdLaunch& launch, void* stream) {
  constexpr BwdTiles kTiles = bwd_tiles(kKey);
  if constexpr (kTile < static_cast<int>(kTiles.size()) && kTiles[kTile].rows > 0) {
    if (launch.tile == kTile) return launch_bwd_tile<kKey, kTile>(params, launch, stream);
    return launch_bwd_tile_from<kKey, kTile + 1>(params, launch, stream);
  }
  return cudaErrorInvalidValue;
}

template <KernelKey kKey>
int launch_bwd(const BwdParams& params, const BwdLaunch& launch, void* stream) {
  return launch_bwd_tile_from<kKey, 0>(params, launch, stream);
}

#endif

}  // namespace flash::mma_sync

#define FLASH_ATTN_INSTANTIATE_BWD(family, arch, dtype, head_dim, variant)                                   \
  template int flash::family::launch_bwd<flash::KernelKey{flash::Arch::arch, flash::table::dtype, head_dim,  \
                                                          flash::Variant::variant}>(const flash::BwdParams&, \
                                                                                    const flash::BwdLaunch&, void*);
