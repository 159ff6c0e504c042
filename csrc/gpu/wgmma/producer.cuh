// The threads that find tiles of rows, and ask the copy engine for their Q, K and V.
#pragma once

#include "gpu/ptx/mbarrier.cuh"
#include "gpu/ptx/tma.cuh"
#include "gpu/wgmma/work.cuh"

namespace flash::wgmma {

// Tiles are dealt out one by one, in the order of TileOrder. The last CTA of a launch leaves the counters as it found them:
// two for each stream that has launched this kernel outside of a graph.
inline constexpr int kMostStreams = 512;

__device__ __forceinline__ uint32_t next_tile(uint32_t* counter) { return gridDim.x + atomicAdd(counter, 1u); }

__device__ __forceinline__ void leave(uint32_t* counter) {
  if (atomicAdd(counter + 1, 1u) != gridDim.x - 1) return;
  counter[0] = counter[1] = 0;
  __threadfence();
}

// The tile of this index. False: no such rows. What is known goes to shared memory at once: there are few registers.
template <class F>
__device__ __forceinline__ bool describe(TileWork& work, const FwdParams& p, const FwdLaunch& launch, uint32_t index) {
  {
    const TileIndex tile = launch.order.tile(index);
    work.batch = static_cast<int>(tile.batch), work.head = static_cast<int>(tile.head);
    work.first_row = tile.m_block * F::kRows;
  }
  ptx::forget_memory();
  work.head_k = static_cast<int>(launch.group.divide(static_cast<uint32_t>(work.head)));
  work.sequence.index = work.batch;
  work.sequence.q = rows_of_sequence(p.rows_q, work.batch);
  ptx::forget_memory();
  bool possible = rows_are_possible(p.rows_q, work.sequence.q, work.batch, launch.max_rows_q);
  ptx::forget_memory();
  work.sequence.k = rows_of_sequence(p.rows_k, work.batch);
  ptx::forget_memory();
  possible = possible && rows_are_possible(p.rows_k, work.sequence.k, work.batch,
                                           launch.tiles.steps == nullptr ? -1 : int64_t{launch.tiles.other_tiles} * F::kKeys);
  ptx::forget_memory();
  if (!possible) {
    work.state = TileWork::kImpossible;
    return work.first_row == 0;
  }
  if (work.first_row >= work.sequence.q.length) return false;
  work.rows = static_cast<int>(work.sequence.q.length), work.keys = static_cast<int>(work.sequence.k.length);
  work.batch_q = static_cast<int>(work.sequence.q.batch), work.batch_k = static_cast<int>(work.sequence.k.batch);
  work.first_q = static_cast<int>(work.sequence.q.first()) + work.first_row;
  work.first_k = static_cast<int>(work.sequence.k.first());
  work.end_k = has_lengths(p.rows_k) ? work.first_k + work.keys : 0x7FFFFFFF;
  ptx::forget_memory();
  if constexpr (F::kDropout)
    if (p.dropout.given()) work.dropout = dropout_stream(p.dropout.seed, work.sequence.index, work.head);
  ptx::forget_memory();
  work.visibility = make_visibility(p.window, work.rows, work.keys);
  ptx::forget_memory();
  const Range rows{work.first_row, min(work.rows, work.first_row + F::kRows)};
  int last;
  {
    const BlockRange range = work.visibility.key_blocks(rows, F::kKeys);
    work.begin = static_cast<int>(range.begin), last = static_cast<int>(range.end) - 1;
    work.full_begin = static_cast<int>(range.full_begin), work.full_end = static_cast<int>(range.full_end);
  }
  ptx::forget_memory();
  work.steps = TileSteps(launch.tiles, work.batch, work.head, work.first_row / F::kRows);
  if (launch.tiles.steps != nullptr) last = work.steps.before(min(last + 1, launch.tiles.other_tiles));
  work.last = last;
  work.state = last >= work.begin ? TileWork::kBlocks : TileWork::kNoBlocks;
  return true;
}

__device__ __forceinline__ uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }

// The thread that finds tiles.
template <class F>
__device__ __forceinline__ void schedule(const FwdParams& p, const FwdLaunch& launch, uint32_t* counter,
                                         Messages<F>& messages) {
  Ring<2> slot;
  uint32_t index = blockIdx.x;
  while (true) {
    TileWork& work = messages.tile[slot.stage];
    ptx::mbarrier_wait(address(messages.tile_empty[slot.stage]), slot.parity ^ 1);
    while (index < launch.blocks && !describe<F>(work, p, launch, index)) index = next_tile(counter);
    if (index >= launch.blocks) work.state = TileWork::kEnd;
    ptx::mbarrier_arrive(address(messages.tile_full[slot.stage]));
    if (index >= launch.blocks) break;
    slot.advance();
    index = next_tile(counter);
  }
  leave(counter);
}

// Key block n of K or V, of which only rows of the sequence may be read: the others come from behind the tensor's last.
template <class F>
__device__ __forceinline__ void load_keys(uint32_t shared, uint32_t barrier, const TileWork& work, int n,
                                          const CUtensorMap& all, const CUtensorMap& eight, const CUtensorMap& one,
                                          const FwdParams& p) {
  const auto load = [&](const CUtensorMap& map, int row_of_tile, int from) {
#pragma unroll
    for (int panel = 0; panel < F::kPanels; ++panel)
      ptx::tma_load(shared + panel * F::kPanelBytesKV + row_of_tile * 128, &map, barrier, panel * kPanelColumns, from,
                    work.head_k, work.batch_k);
  };
  ptx::mbarrier_arrive_expecting(barrier, F::kBytesKV);
  const int row = work.first_k + n * F::kKeys, rows = work.end_k - row;
  if (rows >= F::kKeys) {
    load(all, 0, row);
  } else {
#pragma unroll 1
    for (int i = 0; i < F::kKeys;) {
      const bool is_mixed = i / 8 == rows / 8;
      load(is_mixed ? one : eight, i, i < rows ? row + i : static_cast<int>(p.rows_k.rows));
      i += is_mixed ? 1 : 8;
    }
  }
}

// The tile's rows of Q, 64 after 64.
template <class F>
__device__ __forceinline__ void load_q(uint32_t shared, Messages<F>& messages, Ring<F::kStagesQ>& q,
                                       const TileWork& work, const CUtensorMap& map) {
  ptx::mbarrier_wait(address(messages.q_empty[q.stage]), q.parity ^ 1);
  const uint32_t barrier = address(messages.q_full[q.stage]);
  ptx::mbarrier_arrive_expecting(barrier, F::kBytesQ);
#pragma unroll 1
  for (int i = 0; i < F::kWarpgroups; ++i)
#pragma unroll
    for (int panel = 0; panel < F::kPanels; ++panel)
      ptx::tma_load(shared + i * F::kBytesOfWarpgroup + panel * F::kPanelBytesQ, &map, barrier, panel * kPanelColumns,
                    work.first_q + 64 * i, work.head, work.batch_q);
  q.advance();
}

// The thread that asks for the copies.
template <class F>
__device__ __forceinline__ void load(const FwdParams& p, const TensorMaps& maps, Messages<F>& messages, uint32_t sQ,
                                     uint32_t sK, uint32_t sV) {
  Ring<F::kStagesQ> q;
  Ring<F::kStages> kv;
  Ring<2> slot;
  while (true) {
    const TileWork& work = messages.tile[slot.stage];
    ptx::mbarrier_wait(address(messages.tile_full[slot.stage]), slot.parity);
    if (work.state == TileWork::kEnd) break;
    if (work.state == TileWork::kBlocks) {
      bool has_q = false;
#pragma unroll 1
      for (int n = work.last; n >= work.begin;) {
        const int next = work.steps.before(n);
        ptx::mbarrier_wait(address(messages.k_empty[kv.stage]), kv.parity ^ 1);
        const bool has_hidden = n < work.full_begin || n >= work.full_end;
        messages.block[kv.stage] = n | (has_hidden ? kHasHidden : 0) | (next < work.begin ? kIsLast : 0);
        load_keys<F>(sK + kv.stage * F::kBytesKV, address(messages.k_full[kv.stage]), work, n, maps.k, maps.k_eight,
                     maps.k_one, p);
        if (!has_q) {
          load_q<F>(sQ + q.stage * F::kBytesQ, messages, q, work, maps.q);
          has_q = true;
        }
        ptx::mbarrier_wait(address(messages.v_empty[kv.stage]), kv.parity ^ 1);
        load_keys<F>(sV + kv.stage * F::kBytesKV, address(messages.v_full[kv.stage]), work, n, maps.v, maps.v_eight,
                     maps.v_one, p);
        kv.advance();
        n = next;
      }
    }
    ptx::mbarrier_arrive(address(messages.tile_empty[slot.stage]));
    slot.advance();
  }
}

}  // namespace flash::wgmma
