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
  uint32_t target;   // this thread's first place in stage 0 of Q
  uint32_t numbers;  // [stage] QueryTable; behind them, [stage] a pair of TileSteps

  __device__ __forceinline__ RowStream(const BwdParams& params, const BwdLaunch& of_call, BwdWork& of_cta, uint32_t sQ,
                                       uint32_t sNumbers)
      : p(params), launch(of_call), work(of_cta), target(ptx::opaque(F::CopyQ::first_target(sQ))), numbers(sNumbers) {}
  // The same for a thread that has the work in registers.
  __device__ __forceinline__ RowStream(const RowStream& other, BwdWork& own)
      : p(other.p), launch(other.launch), work(own), target(other.target), numbers(other.numbers) {}

  __device__ __forceinline__ typename F::Table table(int stage) const {
    return {numbers + stage * F::Table::kFloats * 4};
  }
  // With the step that leads on from the row block.
  __device__ __forceinline__ uint32_t step_pair(int stage) const {
    return numbers + (F::kStages * F::Table::kFloats + stage) * 4;
  }
  // Whether row blocks are left out.
  __device__ __forceinline__ bool skips() const { return F::skips(launch.tiles); }
  __device__ __forceinline__ TileSteps steps_of(int head) const {
    return TileSteps(launch.tiles, work.batch, head, work.n);
  }

  // From the first row block of `head` to the first that is visited.
  __device__ __forceinline__ uint32_t first_step(int head) const {
    return skips() ? steps_of(head).steps[work.m_begin] : 0;
  }
  // The first row block of `head`, or if it has none, of the heads after it.
  __device__ __forceinline__ RowBlockIndex first(int head, uint32_t step) const {
    for (;;) {
      const int m = work.m_begin + TileSteps::distance_of(step);
      if (m < work.m_end) return {head, m, static_cast<int>(head * launch.all_tiles + work.first_tile) + m};
      if (++head == work.end_head) return {head, -1, 0};
      step = first_step(head);
    }
  }
  // What after() wants to know of the row block in `stage`.
  __device__ __forceinline__ uint32_t load_steps(int stage) const {
    return skips() ? ptx::load_shared_4(step_pair(stage)) : 0;
  }
  __device__ __forceinline__ RowBlockIndex after(const RowBlockIndex& block, uint32_t steps) const {
    const int step = 1 + TileSteps::distance_in_pair(steps, block.m + 1);
    const RowBlockIndex next{block.head, block.m + step, block.tile + step};
    if (next.m < work.m_end) return next;
    const int head = block.head + 1;
    if (head == work.end_head) return {head, -1, 0};
    const RowBlockIndex of_next_head = first(head, first_step(head));
    if (skips() && copies_steps(threadIdx.x)) work.steps = steps_of(of_next_head.head);
    if (threadIdx.x == 0) make_dropout_stream(of_next_head);
    return of_next_head;
  }
  // Of a block's head. Others may still read that of the head before.
  __device__ __forceinline__ void make_dropout_stream(const RowBlockIndex& block) const {
    if constexpr (F::kDropout)
      if (block.given() && p.dropout.given())
        work.streams[(block.head - work.first_head) % 2] =
            dropout_stream(p.dropout.seed, work.sequence.index, block.head);
  }

  // Q, dO and the numbers of a block, and the step that leads on from it: a row block ahead, so that nobody waits for it.
  __device__ __forceinline__ void copy(const RowBlockIndex& block, int stage) const {
    if (!block.given()) return;
    const uint32_t thread = ptx::opaque(threadIdx.x);  // what follows from it is not to be kept
    const auto copy = [&](const uint16_t* head_0, const Operand& x, uint32_t bytes, int64_t dim, bool vectorised) {
      const HeadRows rows{head_0 + block.head * x.head_stride, x.row_stride, static_cast<int>(dim), vectorised};
      typename F::CopyQ(target + stage * 2 * F::kBytesQ + bytes, rows, block.m * F::kRows, work.rows, thread)
          .copy_all();
    };
    copy(work.gQ, p.q, 0, p.dim, launch.vectorised_qk);
    copy(work.gdO, p.dout, F::kBytesQ, p.dim_v, launch.vectorised_dout);
    const float* from = launch.numbers + int64_t{block.tile} * F::Table::kFloats;
#pragma unroll
    for (int first = 0; first < F::Table::kFloats / 4; first += F::kThreads)
      if (const int i = first + static_cast<int>(thread); i < F::Table::kFloats / 4)
        copy_16<F::kKey.arch>(table(stage).shared + 16 * i, from + 4 * i);
    if (skips() && copies_steps(thread)) copy_4<F::kKey.arch>(step_pair(stage), work.steps.pair_of(block.m + 1));
  }
  // One of those that copy fewest numbers.
  static __device__ __forceinline__ bool copies_steps(uint32_t thread) { return thread == F::kThreads - 1; }
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
// Whether it is this CTA's turn at `block` already.
template <class F>
__device__ __forceinline__ void ask_for_turn(const BwdLaunch& launch, BwdWork& work, const RowBlockIndex& block) {
  if (threadIdx.x == kTurnTaker)
    work.has_turn = ptx::load_acquire(launch.turns + block.tile) == turn_at<F>(work, block);
}
// Before a barrier, after which all threads may add.
template <class F>
__device__ __forceinline__ void wait_for_turn(const BwdLaunch& launch, const BwdWork& work,
                                              const RowBlockIndex& block) {
  if (threadIdx.x != kTurnTaker) return;
  if (ptx::load_shared_4(ptx::shared_address(&work.has_turn)) != 0) return;  // others would read it, too, if they could
  const int turn = turn_at<F>(work, block);
  while (ptx::load_acquire(launch.turns + block.tile) != turn) {
  }
}
// After a barrier that comes when all threads have added to row block `tile`; -1: there was none.
__device__ __forceinline__ void end_turn(const BwdLaunch& launch, int tile) {
  if (threadIdx.x == 0 && tile >= 0) ptx::add_release(launch.turns + tile, 1);
}

}  // namespace flash::mma_sync
