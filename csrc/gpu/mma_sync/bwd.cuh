// Backward with mma.sync: Algorithm 4 of the FlashAttention paper, key-stationary: one CTA a tile of keys.
//
// Grid: one CTA for each (sequence, key head, key block), in the order of TileOrder. It walks the row blocks of all query
// heads of its group that see one of its keys, recomputes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, and keeps dK and dV in registers:
// they are summed in an order that is always the same. dQ needs every CTA: each adds its part to an fp32 sum in global
// memory, and a pass of its own scales and rounds it.
#pragma once

#include <cuda_runtime.h>

#include "gpu/mma_sync/bwd_gradients.cuh"
#include "gpu/mma_sync/bwd_work.cuh"
#include "gpu/mma_sync/launch.cuh"
#include "gpu/mma_sync/products.cuh"
#include "gpu/passes/backward_rows.cuh"
#include "gpu/ptx/order.cuh"
#include "gpu/tile/epilogue.cuh"

namespace flash::mma_sync {

// D += A · B, whose fragments come from load_a(fragment, m16, k16) and load_b(fragment, n16, k16). Fragments of B are
// read one ahead of the products that use them, those of A after their last use.
template <KernelKey kKey, int kDepth, int kM, int kN, class LoadA, class LoadB>
__device__ __forceinline__ void add_product(float (&d)[kM][kN][4], const LoadA& load_a, const LoadB& load_b) {
  constexpr int kBlocks = kN / 2;
  uint32_t a[kM][4], b[2][4];
  load_b(b[0], 0, 0);
#pragma unroll
  for (int m = 0; m < kM; ++m) load_a(a[m], m, 0);
#pragma unroll
  for (int depth = 0; depth < kDepth; ++depth)
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int step = depth * kBlocks + block, next = step + 1;
      if (next < kDepth * kBlocks) load_b(b[next % 2], next % kBlocks, next / kBlocks);
      const uint32_t (&now)[4] = b[step % 2];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        multiply<kKey>(d[m][2 * block], a[m], now[0], now[1]);
        multiply<kKey>(d[m][2 * block + 1], a[m], now[2], now[3]);
        if (block + 1 == kBlocks && depth + 1 < kDepth) load_a(a[m], m, depth + 1);
      }
    }
}

// A row of Q or dO that sees nothing contributes nothing, but a zero weight does not keep its NaN away.
template <class F>
__device__ __forceinline__ void clear_row(uint32_t tile, int row) {
  using Layout = Panels<F::kHeadDim>;
#pragma unroll 1
  for (int chunk = 0; chunk < F::kHeadDim / 8; ++chunk)
    ptx::store_shared_16(
        tile + chunk / Layout::kChunks * F::kRows * Layout::kRowBytes + Layout::offset(row, chunk % Layout::kChunks),
        uint4{});
}

// The turn of a CTA among those that add to one row block of dQ.
__device__ __forceinline__ void wait_for_turn(const int* turns, int turn) {
  if (threadIdx.x == 0)
    while (ptx::load_acquire(turns) != turn) {
    }
  __syncthreads();
}
__device__ __forceinline__ void end_turn(int* turns) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ptx::add_release(turns, 1);
}

template <Arch kArch, DataType kType, int kHeadDim, Variant kVariant, int kTile, int kThreads, int kCtas>
__global__ void __launch_bounds__(kThreads, kCtas)
    bwd_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdLaunch launch) {
  using F = Bwd<KernelKey{kArch, kType, kHeadDim, kVariant}, kTile>;
  constexpr KernelKey kKey = F::kKey;
  extern __shared__ __align__(1024) uint8_t shared[];
  static __shared__ __align__(16) uint8_t work_bytes[sizeof(BwdWork)];
  BwdWork& work = *reinterpret_cast<BwdWork*>(work_bytes);
  const uint32_t sK = ptx::shared_address(shared), sV = sK + F::kBytesKV;
  const uint32_t sQ = sV + F::kBytesKV;  // [stage][Q, dO]
  const uint32_t sP = sQ + 2 * F::kStages * F::kBytesQ, sdS = sP + F::kBytesScore;
  const uint32_t sNumbers = sdS + F::kBytesScore;  // [stage][R, log2 ℓ, delta][row]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_key = warp / F::kSplits * F::kWarpKeys, split = warp % F::kSplits;
  const int warp_row = split * F::kWarpRows;
  const int dq_row = warp % F::kTile.dq_row_warps * F::kDqRows;
  const int dq_column = warp / F::kTile.dq_row_warps * F::kDqColumns;

  // ---- The tile of this CTA, K and V ----
  {
    const TileIndex tile = launch.order.tile(blockIdx.x);
    const Sequence sequence = flash::sequence(p, tile.batch);
    if (!rows_are_possible(p.rows_q, sequence.q, tile.batch, launch.max_rows_q) ||
        !rows_are_possible(p.rows_k, sequence.k, tile.batch, launch.max_rows_k))
      return;  // the outputs of the forward are NaN already
    const BwdWork mine = make_bwd_work<F>(p, launch, tile, sequence);
    if (mine.n * F::kKeys >= mine.keys) return;
    const auto copy = [&](uint32_t target, const Operand& x, int64_t dim, bool vectorised) {
      const HeadRows rows{first_row_of(x, sequence.k, tile.head), x.row_stride, static_cast<int>(dim), vectorised};
      typename F::CopyKV(target, rows, mine.n * F::kKeys, mine.seen_begin, mine.seen_end).copy_all();
    };
    copy(sK, p.k, p.dim, launch.vectorised_qk);
    copy(sV, p.v, p.dim_v, launch.vectorised_v);
    if (threadIdx.x == 0) work = mine;
  }
  __syncthreads();  // `work` is there

  // Row block m of a query head: Q and dO to a stage, and the numbers of this thread's row.
  const auto copy_rows = [&](int64_t head, int m, int stage) {
    const Rows& rows = work.sequence.q;
    const uint32_t target = sQ + stage * 2 * F::kBytesQ;
    const HeadRows q{first_row_of(p.q, rows, head), p.q.row_stride, static_cast<int>(p.dim), launch.vectorised_qk};
    const HeadRows dout{first_row_of(p.dout, rows, head), p.dout.row_stride, static_cast<int>(p.dim_v),
                        launch.vectorised_dout};
    typename F::CopyQ(target, q, m * F::kRows, 0, work.rows).copy_all();
    typename F::CopyQ(target + F::kBytesQ, dout, m * F::kRows, 0, work.rows).copy_all();
  };
  const auto read_numbers = [&](int64_t head, int m) {
    QueryNumbers numbers;
    const int row = m * F::kRows + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) < F::kRows && row < work.rows) {
      const Rows& rows = work.sequence.q;
      const RowStatistics<float> s{static_cast<const float*>(p.reference.data)[at(p.reference, rows, head, row)],
                                   static_cast<const float*>(p.log2_sum.data)[at(p.log2_sum, rows, head, row)]};
      numbers = {s, static_cast<const float*>(launch.delta.data)[at(launch.delta, rows, head, row)]};
    }
    return numbers;
  };
  const auto table = [&](int stage) { return QueryTable<F::kRows>{sNumbers + stage * 4 * F::kRows * 4}; };
  const auto store_numbers = [&](const QueryNumbers& numbers, int stage) {
    if (static_cast<int>(threadIdx.x) < F::kRows) table(stage).store(threadIdx.x, numbers);
  };

  float rdK[F::kM][F::kO][4] = {}, rdV[F::kM][F::kO][4] = {};
  const int64_t first_head = work.head_k * launch.group;
  const auto store_stream = [&](int64_t head) {
    if constexpr (F::kDropout)
      if (threadIdx.x == 0 && p.dropout.given())
        work.streams[(head - first_head) % 2] = dropout_stream(p.dropout.seed, work.sequence.index, head);
  };
  int64_t head = first_head;
  int m = work.m_begin, stage = 0;
  bool more = m < work.m_end;
  if (more) {
    copy_rows(head, m, 0);
    store_numbers(read_numbers(head, m), 0);
    store_stream(head);
  }

  // ---- Row blocks of all heads of the group ----
#pragma unroll 1
  while (more) {
    F::CopyQ::wait();
    // Everybody's Q and dO are there, and nobody reads the last P and dS any more.
    const bool has_row = static_cast<int>(threadIdx.x) < F::kRows;
    const bool is_special = __syncthreads_or(has_row && table(stage).is_special(threadIdx.x));
    const uint32_t sQ_now = sQ + stage * 2 * F::kBytesQ, sdO_now = sQ_now + F::kBytesQ;
    if (is_special) {
      if (has_row && table(stage).sees_nothing(threadIdx.x)) {
        clear_row<F>(sQ_now, threadIdx.x);
        clear_row<F>(sdO_now, threadIdx.x);
      }
      __syncthreads();
    }
    int64_t next_head = head;
    int next_m = m + 1;
    if (next_m == work.m_end) next_m = work.m_begin, ++next_head;
    more = next_head < first_head + launch.group;
    const int next_stage = F::kStages == 2 ? stage ^ 1 : 0;
    QueryNumbers numbers;
    if (more) {
      numbers = read_numbers(next_head, next_m);
      if constexpr (F::kStages == 2) copy_rows(next_head, next_m, next_stage);
    }

    const GradientPlace place{work.n * F::kKeys + warp_key + lane / 4, m * F::kRows + warp_row + lane % 4 * 2,
                              work.keys, work.rows};
    const auto dropout = draw_dropout<F>(place, head, p, launch, work);  // first: what it takes is free then

    // Sᵀ = K Qᵀ, dPᵀ = V dOᵀ
    float rS[F::kM][F::kN][4] = {}, rdP[F::kM][F::kN][4] = {};
    const auto score = [&](float (&r)[F::kM][F::kN][4], uint32_t keys, uint32_t rows) {
      const auto a = F::ReaderKV::rows_first(keys + warp_key * F::kRowBytes, lane);
      const auto b = F::ReaderQ::columns_first(rows + warp_row * F::kRowBytes, lane);
      add_product<kKey, F::kDepth>(
          r, [&](uint32_t (&x)[4], int block, int depth) { a.load(x, block, depth); },
          [&](uint32_t (&x)[4], int block, int depth) { b.load(x, block, depth); });
    };
    score(rS, sK, sQ_now);
    score(rdP, sV, sdO_now);

    // P and dS
    const GradientTile tile{place, head, warp_row + lane % 4 * 2, is_special};
    compute_gradients<F>(rS, rdP, tile, m, p, launch, work, table(stage), dropout);
    stage_output<kType, F::kKeys, F::kRows>(sP, rS, warp_key, lane, warp_row / 8);
    stage_output<kType, F::kKeys, F::kRows>(sdS, rdP, warp_key, lane, warp_row / 8);
    __syncthreads();  // everybody's P and dS are there

    // dV += Pᵀ dO, dK += dSᵀ Q
    const auto outer = [&](float (&r)[F::kM][F::kO][4], uint32_t scores, uint32_t rows) {
      const auto a = F::ReaderScore::rows_first(scores + warp_key * F::kScoreRowBytes, lane);
      const auto b = F::ReaderQ::rows_first(rows, lane);
      add_product<kKey, F::kRows / 16>(
          r, [&](uint32_t (&x)[4], int block, int depth) { a.load(x, block, depth); },
          [&](uint32_t (&x)[4], int block, int depth) {
            b.load_transposed(x, depth, split * (F::kColumns / 16) + block);
          });
    };
    outer(rdV, sP, sdO_now);
    outer(rdK, sdS, sQ_now);

    // dQ += dS K, of this warp's rows and columns
    if (launch.dq_sum != nullptr) {
      const int64_t tile = head * launch.all_tiles + work.first_tile + m;
      float* target = launch.dq_sum + tile * (F::kRows * F::kHeadDim) + threadIdx.x;
      if (launch.turns != nullptr) {
        const Range rows{int64_t{m} * F::kRows, min(work.rows, (m + 1) * F::kRows)};
        const auto first = static_cast<int>(work.visibility.key_blocks(rows, F::kKeys).begin);
        wait_for_turn(launch.turns + tile, work.n - first);
      }
      const auto a = F::ReaderScore::columns_first(sdS, lane);
      const auto b = F::ReaderKV::rows_first(sK, lane);
#pragma unroll 1
      for (int part = 0; part < F::kDqParts; ++part) {
        float rdQ[F::kDqM][F::kDqN][4] = {};
        add_product<kKey, F::kKeys / 16>(
            rdQ, [&](uint32_t (&x)[4], int block, int depth) { a.load_transposed(x, depth, dq_row / 16 + block); },
            [&](uint32_t (&x)[4], int block, int depth) {
              b.load_transposed(x, depth, (dq_column + part * F::kDqAtOnce) / 16 + block);
            });
#pragma unroll
        for (int i = 0; i < F::kDqM * F::kDqN * 4; ++i, target += F::kThreads)
          ptx::add_global(target, rdQ[i / (F::kDqN * 4)][i / 4 % F::kDqN][i % 4]);
      }
      if (launch.turns != nullptr) end_turn(launch.turns + tile);
    }
    if constexpr (F::kStages == 1) {
      __syncthreads();  // nobody reads Q, dO and the numbers any more
      if (more) copy_rows(next_head, next_m, 0);
    }
    if (more) {
      store_numbers(numbers, next_stage);
      if (next_head != head) store_stream(next_head);
    }
    head = next_head, m = next_m, stage = next_stage;
  }

  // ---- dK and dV, by way of K's and V's places ----
  F::CopyKV::wait();  // of a CTA that had no row block
  __syncthreads();
  const auto scale = [&](float (&r)[F::kM][F::kO][4], float factor) {
#pragma unroll
    for (int i = 0; i < F::kM * F::kO * 4; ++i) r[i / (F::kO * 4)][i / 4 % F::kO][i % 4] *= factor;
  };
  scale(rdK, launch.scale);
  scale(rdV, launch.keep_scale);
  stage_output<kType, F::kKeys, F::kHeadDim>(sK, rdK, warp_key, lane, split * (F::kColumns / 8));
  stage_output<kType, F::kKeys, F::kHeadDim>(sV, rdV, warp_key, lane, split * (F::kColumns / 8));
  __syncthreads();
  const auto store = [&](uint32_t tile, const Operand& x, int64_t dim, bool vectorised) {
    if (x.data == nullptr) return;
    constexpr int kRowsOfWarp = F::kKeys / F::kWarps;
    const Rows& rows = work.sequence.k;
    auto* out = static_cast<uint16_t*>(x.data) + x.offset(rows.batch, work.head_k, rows.first());
    const HeadRows head_rows{nullptr, x.row_stride, static_cast<int>(dim), vectorised};
    store_rows<F::kKeys, F::kHeadDim, kRowsOfWarp, F::kHeadDim>(tile, out, head_rows, work.n * F::kKeys, work.keys,
                                                                warp * kRowsOfWarp, lane);
  };
  store(sK, p.dk, p.dim, launch.vectorised_dk);
  store(sV, p.dv, p.dim_v, launch.vectorised_dv);
}

// dQ = scale · dq_sum, one CTA a row block. Four lanes of the main kernel that share a row hold 8 columns, two each: a
// thread takes all of them.
template <Arch kArch, DataType kType, int kHeadDim, Variant kVariant, int kTile, int kThreads>
__global__ void __launch_bounds__(kThreads)
    dq_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdLaunch launch) {
  using F = Bwd<KernelKey{kArch, kType, kHeadDim, kVariant}, kTile>;
  const RowBlock block(launch.m_blocks, p.heads, F::kRows);
  const Rows rows = rows_of_sequence(p.rows_q, block.batch);
  const int first_row = static_cast<int>(block.first_row);
  if (!rows_are_possible(p.rows_q, rows, block.batch, launch.max_rows_q) || first_row >= rows.length) return;
  const int64_t tile =
      block.head * launch.all_tiles + first_row_tile<F::kRows>(p, launch, block.batch) + first_row / F::kRows;
  const float* sums = launch.dq_sum + tile * (F::kRows * F::kHeadDim);
  auto* out = static_cast<uint16_t*>(p.dq.data) + p.dq.offset(rows.batch, block.head, rows.first());
  constexpr int kQuads = F::kThreads / 4, kEights = F::kRows * F::kHeadDim / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < kEights; i += kThreads) {
    const int quad = i % kQuads, index = i / kQuads;  // [part][m16][n8][half]
    const int half = index % 2, n = index / 2 % F::kDqN, m = index / 2 / F::kDqN % F::kDqM;
    const int part = index / 2 / F::kDqN / F::kDqM, warp = quad / 8;
    const int row = first_row + warp % F::kTile.dq_row_warps * F::kDqRows + 16 * m + 8 * half + quad % 8;
    const int column = warp / F::kTile.dq_row_warps * F::kDqColumns + part * F::kDqAtOnce + 8 * n;
    if (row >= rows.length || column >= p.dim) continue;
    const auto* from = reinterpret_cast<const float4*>(sums + 2 * index * F::kThreads + 4 * quad);
    const float4 even = from[0], odd = from[F::kThreads / 4];
    const auto pair = [&](float a, float b) { return ptx::pack<kType>(launch.scale * a, launch.scale * b); };
    const uint4 all{pair(even.x, odd.x), pair(even.y, odd.y), pair(even.z, odd.z), pair(even.w, odd.w)};
    uint16_t* target = out + row * p.dq.row_stride + column;
    if (launch.vectorised_dq) {
      *reinterpret_cast<uint4*>(target) = all;
    } else {
      const uint32_t pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int d = 0; d < 8; ++d)
        if (column + d < p.dim) target[d] = static_cast<uint16_t>(pairs[d / 2] >> (16 * (d % 2)));
    }
  }
}

#if defined(__CUDACC__)  // not where kernels are compiled for the CPU, for tests

template <KernelKey kKey, int kTile>
int launch_bwd_tile(const BwdParams& params, const BwdLaunch& launch, void* given_stream) {
  using F = Bwd<kKey, kTile>;
  const auto stream = static_cast<cudaStream_t>(given_stream);
  const auto blocks = static_cast<uint32_t>(params.batch * params.heads);
  if (launch.max_rows_q > 0 && blocks > 0) {
    const auto row_blocks = static_cast<uint32_t>(divide_up(launch.max_rows_q, kRowsOfCta));
    constexpr int kLanes = F::kHeadDim <= 64 ? 8 : F::kHeadDim <= 128 ? 16 : 32;
    delta_kernel<kKey.dtype, kLanes><<<row_blocks * blocks, kRowThreads, 0, stream>>>(
        params, launch.delta, row_blocks, launch.vectorised_dout && launch.vectorised_out);
  }
  if (params.dsink != nullptr && params.heads > 0)
    sink_kernel<kKey.dtype><<<static_cast<uint32_t>(params.heads), kRowThreads, 0, stream>>>(params, launch.delta);
  if (launch.blocks > 0) {
    constexpr int kSharedBytes = F::kTile.shared_bytes(F::kHeadDim);
    const auto kernel =
        bwd_kernel<kKey.arch, kKey.dtype, kKey.head_dim, kKey.variant, kTile, F::kThreads, F::kTile.ctas>;
    static_assert(sizeof(BwdWork) <= kStaticShared);
    static std::atomic<uint64_t> allowed{0};
    if (const cudaError_t error = allow_shared(kernel, kSharedBytes, launch.device, allowed); error != cudaSuccess)
      return error;
    kernel<<<launch.blocks, F::kThreads, kSharedBytes, stream>>>(params, launch);
  }
  if (launch.dq_sum != nullptr && launch.m_blocks > 0 && blocks > 0)
    dq_kernel<kKey.arch, kKey.dtype, kKey.head_dim, kKey.variant, kTile, F::kThreads>
        <<<static_cast<uint32_t>(launch.m_blocks) * blocks, F::kThreads, 0, stream>>>(params, launch);
  return cudaGetLastError();
}

template <KernelKey kKey>
int launch_bwd(const BwdParams& params, const BwdLaunch& launch, void* stream) {
  constexpr BwdTiles kTiles = bwd_tiles(kKey);
  if (launch.tile == 0) return launch_bwd_tile<kKey, 0>(params, launch, stream);
  if constexpr (kTiles[1].rows > 0)
    if (launch.tile == 1) return launch_bwd_tile<kKey, 1>(params, launch, stream);
  if constexpr (kTiles[2].rows > 0)
    if (launch.tile == 2) return launch_bwd_tile<kKey, 2>(params, launch, stream);
  return cudaErrorInvalidValue;
}

#endif

}  // namespace flash::mma_sync

#define FLASH_ATTN_INSTANTIATE_BWD(family, arch, dtype, head_dim, variant)                                   \
  template int flash::family::launch_bwd<flash::KernelKey{flash::Arch::arch, flash::table::dtype, head_dim,  \
                                                          flash::Variant::variant}>(const flash::BwdParams&, \
                                                                                    const flash::BwdLaunch&, void*);
