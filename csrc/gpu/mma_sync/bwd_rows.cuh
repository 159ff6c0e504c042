// The rows that a CTA of the backward with mma.sync walks: Q, dO and the numbers of one row block after the other, and its
// turns to add to their dQ.
#pragma once

#include "gpu/mma_sync/bwd_work.cuh"
#include "gpu/mma_sync/launch.cuh"
#include "gpu/ptx/order.cuh"
#include "gpu/tile/block_tiles.cuh"

namespace flash::mma_sync {

// Which row block: m of a query head. m < 0: no more.
struct RowBlockIndex {
  int head, m;
  int tile;  // among those of all heads and sequences: index of its numbers and of its dQ

  __device__ __forceinline__ bool given() const { return m >= 0; }
};

// Row blocks of all heads of the group in turn, and their copies to shared memory.
template <class F>
struct RowStream {
  const BwdParams& p;
  const BwdLaunch& launch;
  BwdWork& work;
  uint32_t target;           // this thread's first place in stage 0 of Q
  uint32_t numbers;          // stage 0 of QueryTable
  const uint16_t *q, *dout;  // this thread's first rows of the block to be copied next

  __device__ __forceinline__ RowStream(const BwdParams& params, const BwdLaunch& of_call, BwdWork& of_cta, uint32_t sQ,
                                       uint32_t sNumbers)
      : p(params),
        launch(of_call),
        work(of_cta),
        target(ptx::opaque(F::CopyQ::first_target(sQ))),
        numbers(sNumbers),
        q(nullptr),
        dout(nullptr) {}

  __device__ __forceinline__ typename F::Table table(int stage) const {
    return {numbers + stage * F::Table::kFloats * 4};
  }

  __device__ __forceinline__ RowBlockIndex first() {
    RowBlockIndex block{work.first_head, work.m_begin < work.m_end ? work.m_begin : -1, 0};
    if (F::kTile.takes_blocks && launch.tiles.steps != nullptr && block.given()) block = visited(block);
    if (block.given()) {
      jump(block);
      store_dropout_stream(block.head);
    }
    return block;
  }
  __device__ __forceinline__ RowBlockIndex after(const RowBlockIndex& block) {
    RowBlockIndex next{block.head, block.m + 1, block.tile + 1};
    if (F::kTile.takes_blocks && launch.tiles.steps != nullptr) {
      next = visited(next);
      if (next.given()) jump(next);
      return next;
    }
    if (next.m == work.m_end) {
      next.m = ++next.head == work.end_head ? -1 : work.m_begin;
      if (next.given()) {
        jump(next);
        store_dropout_stream(next.head);
      }
    }
    return next;
  }
  // The row block, or the first after it that a block mask visits.
  __device__ __forceinline__ RowBlockIndex visited(RowBlockIndex block) {
    for (;; block.m = work.m_begin) {
      block.m = TileSteps(launch.tiles, work.batch, block.head, work.n).from(block.m);
      if (block.m < work.m_end) return block;
      if (++block.head == work.end_head) return {block.head, -1, 0};
    }
  }
  // Others may still read that of the head before.
  __device__ __forceinline__ void store_dropout_stream(int head) {
    if constexpr (F::kDropout)
      if (threadIdx.x == 0 && p.dropout.given())
        work.streams[(head - work.first_head) % 2] = dropout_stream(p.dropout.seed, work.sequence.index, head);
  }
  __device__ __forceinline__ void jump(RowBlockIndex& block) {
    const Rows& rows = work.sequence.q;
    const int64_t first = block.m * F::kRows, head = block.head;
    block.tile = static_cast<int>(head * launch.all_tiles + work.first_tile) + block.m;
    q = F::CopyQ::first_source(first_row_of(p.q, rows, head) + first * p.q.row_stride, p.q.row_stride);
    dout = F::CopyQ::first_source(first_row_of(p.dout, rows, head) + first * p.dout.row_stride, p.dout.row_stride);
  }

  // Q and dO of a block, which must be the one after the last copied or jumped to. Of none: rows that are not there.
  __device__ __forceinline__ void copy_rows(const RowBlockIndex& block, int stage) {
    const auto copy = [&](const uint16_t*& from, uint32_t bytes, int64_t stride, int64_t dim, bool vectorised) {
      typename F::CopyQ part(target + stage * 2 * F::kBytesQ + bytes, {from, stride, static_cast<int>(dim), vectorised},
                             block.m * F::kRows, work.rows);
      part.copy_all();
      from = part.from;
    };
    copy(q, 0, p.q.row_stride, p.dim, launch.vectorised_qk);
    copy(dout, F::kBytesQ, p.dout.row_stride, p.dim_v, launch.vectorised_dout);
  }
  __device__ __forceinline__ void copy_numbers(const RowBlockIndex& block, int stage) const {
    if (!block.given()) return;
    const float* from = launch.numbers + int64_t{block.tile} * F::Table::kFloats;
#pragma unroll
    for (int first = 0; first < F::Table::kFloats / 4; first += F::kThreads)
      if (const int i = first + static_cast<int>(threadIdx.x); i < F::Table::kFloats / 4)
        copy_16<F::kKey.arch>(table(stage).shared + 16 * i, from + 4 * i);
  }
};

// A row of Q or dO that sees nothing contributes nothing, but a zero weight does not keep its NaN away.
template <class F>
__device__ __forceinline__ void clear_unseeing_rows(const typename F::Table& numbers, uint32_t sQ) {
  using Layout = Panels<F::kHeadDim, F::kPeriod>;
  const int row = threadIdx.x;
  if (row >= F::kRows || !numbers.sees_nothing(row)) return;
#pragma unroll 1
  for (int chunk = 0; chunk < F::kHeadDim / 8; ++chunk) {
    const uint32_t at =
        sQ + chunk / Layout::kChunks * F::kRows * Layout::kRowBytes + Layout::offset(row, chunk % Layout::kChunks);
    ptx::store_shared_16(at, uint4{});
    ptx::store_shared_16(at + F::kBytesQ, uint4{});
  }
}

// Turns to add to row blocks of dQ (turns.h). One thread ends them and another one waits for them, because each waits for
// memory while others compute.
inline constexpr int kTurnTaker = 32;

template <class F>
__device__ __forceinline__ int turn_at(const BwdWork& work, const RowBlockIndex& block) {
  const Range rows{int64_t{block.m} * F::kRows, min(work.rows, (block.m + 1) * F::kRows)};
  return TurnOrder::turn(work.visibility, rows, work.n, F::kKeys);
}
// After a barrier that comes when all threads have added to the last row block.
__device__ __forceinline__ void end_turn(const BwdLaunch& launch, const BwdWork& work) {
  if (threadIdx.x == 0 && work.added >= 0) ptx::add_release(launch.turns + work.added, 1);
}
// The same, and the next row block is `block`.
template <class F>
__device__ __forceinline__ void next_turn(const BwdLaunch& launch, BwdWork& work, const RowBlockIndex& block) {
  end_turn(launch, work);
  if (threadIdx.x == 0) work.added = block.tile;
  if (threadIdx.x == kTurnTaker)
    work.has_turn = ptx::load_acquire(launch.turns + block.tile) == turn_at<F>(work, block);
}
// Before a barrier, after which all threads may add.
template <class F>
__device__ __forceinline__ void wait_for_turn(const BwdLaunch& launch, const BwdWork& work,
                                              const RowBlockIndex& block) {
  if (threadIdx.x != kTurnTaker || work.has_turn) return;
  const int turn = turn_at<F>(work, block);
  while (ptx::load_acquire(launch.turns + block.tile) != turn) {
  }
}

}  // namespace flash::mma_sync
