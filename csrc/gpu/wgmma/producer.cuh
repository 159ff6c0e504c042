// The threads that find tiles of rows, and ask the copy engine for their Q, K and V.
#pragma once

#include "gpu/ptx/mbarrier.cuh"
#include "gpu/ptx/order.cuh"
#include "gpu/ptx/tma.cuh"
#include "gpu/tile/score.cuh"
#include "gpu/wgmma/work.cuh"

namespace flash::wgmma {

// Tiles are dealt out one by one, in the order of LateTileOrder. The last team of a launch leaves the counters as it found
// them: two for each stream that has launched kernels of this unit outside of a graph.
inline constexpr int kMostStreams = 512;

__device__ __forceinline__ void leave(uint32_t* counter, uint32_t all_teams) {
  if (atomicAdd(counter + 1, 1u) != all_teams - 1) return;
  counter[0] = counter[1] = 0;
}

// The lengths of the tile's sequence, and what rows see by them. False: they cannot be.
template <class F>
__device__ __forceinline__ bool find_lengths(TileWork& work, const FwdParams& p, const FwdLaunch& launch) {
  work.sequence.q = rows_of_sequence(p.rows_q, work.batch);
  ptx::forget_memory();
  bool possible = rows_are_possible(p.rows_q, work.sequence.q, work.batch, launch.max_rows_q);
  ptx::forget_memory();
  work.sequence.k = rows_of_sequence(p.rows_k, work.batch);
  ptx::forget_memory();
  const int64_t most = launch.tiles.steps == nullptr ? kMostRows : int64_t{launch.tiles.other_tiles} * F::kKeys;
  possible = possible && rows_are_possible(p.rows_k, work.sequence.k, work.batch, most);
  ptx::forget_memory();
  work.rows = static_cast<int>(work.sequence.q.length), work.keys = static_cast<int>(work.sequence.k.length);
  ptx::forget_memory();
  work.visibility = make_visibility(p.window, work.rows, work.keys);
  ptx::forget_memory();
  work.has_lengths = possible && !has_lengths(p.rows_q) && !has_lengths(p.rows_k);
  return possible;
}

template <class F>
__device__ __forceinline__ int queries_of_tile(const FwdLaunch& launch) {
  return F::kPacksHeads ? F::kWarpgroups * launch.packed_queries : F::kRows;
}

// The tile of this index. False: no such rows. What is known goes to shared memory at once: there are few registers.
template <class F>
__device__ __forceinline__ bool describe(TileWork& work, const FwdParams& p, const FwdLaunch& launch, uint32_t index) {
  {
    const TileIndex tile = launch.late_order.tile(index);
    const auto head = static_cast<int>(tile.head), group = static_cast<int>(launch.group.value);
    work.batch = static_cast<int>(tile.batch), work.head = F::kPacksHeads ? head * group : head;
    work.first_row = tile.m_block * queries_of_tile<F>(launch);
  }
  ptx::forget_memory();
  work.head_k = static_cast<int>(launch.group.divide(static_cast<uint32_t>(work.head)));
  work.sequence.index = work.batch;
  if (work.has_lengths) {
    work.sequence.q.batch = work.sequence.k.batch = work.batch;
  } else if (!find_lengths<F>(work, p, launch)) {
    work.state = TileWork::kImpossible;
    return work.first_row == 0;
  }
  if (work.first_row >= work.rows) return false;
  work.batch_q = static_cast<int>(work.sequence.q.batch), work.batch_k = static_cast<int>(work.sequence.k.batch);
  work.first_q = static_cast<int>(work.sequence.q.first()) + work.first_row;
  work.first_k = static_cast<int>(work.sequence.k.first());
  work.end_k = has_lengths(p.rows_k) ? work.first_k + work.keys : 0x7FFFFFFF;
  ptx::forget_memory();
  if constexpr (F::kDropout)
    if (p.dropout.given()) work.dropout = dropout_stream(p.dropout.seed, work.sequence.index, work.head);
  ptx::forget_memory();
  const Range rows{work.first_row, min(work.rows, work.first_row + queries_of_tile<F>(launch))};
  {
    const DiagonalInterval seen(work.visibility, work.first_row);
    work.seen_begin = seen.begin, work.seen_end = seen.end;
  }
  ptx::forget_memory();
  const Rows& of_tensor = work.sequence.q;
  const int64_t row = of_tensor.first() + work.first_row;
  const auto of_row = [&](const RowArray& x) {
    return static_cast<float*>(x.data) + x.offset(of_tensor.batch, work.head, row);
  };
  work.out = static_cast<uint16_t*>(p.out.data) + p.out.offset(of_tensor.batch, work.head, row);
  ptx::forget_memory();
  work.reference = of_row(p.reference);
  ptx::forget_memory();
  work.log2_sum = of_row(p.log2_sum);
  ptx::forget_memory();
  work.lse = of_row(p.lse);
  ptx::forget_memory();
  int last;
  {
    const BlockRange range = work.visibility.key_blocks(rows, F::kKeys);
    work.begin = static_cast<int>(range.begin), last = static_cast<int>(range.end) - 1;
    work.full_begin = static_cast<int>(range.full_begin), work.full_end = static_cast<int>(range.full_end);
  }
  ptx::forget_memory();
  work.steps = TileSteps(launch.tiles, work.batch, work.head, work.first_row / F::kRows);
  if (launch.tiles.steps != nullptr) last = work.steps.before(min(last + 1, launch.tiles.other_tiles));
  work.last = work.start = last;
  if constexpr (F::kModified)
    if (p.score.alibi_slopes != nullptr) {
      // From the diagonal on, so that scores fall, on the whole, and few rows ask for another reference.
      const int64_t diagonal = (rows.end - 1 + work.visibility.diagonal) / F::kKeys;
      if (diagonal < last) work.start = diagonal < work.begin ? -1 : work.steps.before(static_cast<int>(diagonal) + 1);
      if (work.start < work.begin) work.start = last;
    }
  work.state = last >= work.begin ? TileWork::kBlocks : TileWork::kNoBlocks;
  return true;
}

// The thread that finds tiles.
template <class F>
__device__ __forceinline__ void schedule(const FwdParams& p, const FwdLaunch& launch, uint32_t* counter,
                                         const TeamMemory<F>& memory, int team) {
  Messages<F>& messages = memory.messages;
  const uint32_t all_teams = gridDim.x * F::kTeams;
  const auto next_tile = [&] { return all_teams + atomicAdd(counter, 1u); };
  Ring<2> slot;
  // A tile is taken when its description has a place, not before: who holds tiles that others could have begun with makes
  // them wait in the end (two tiles ahead cost 4 % under a causal mask).
  for (uint32_t index = blockIdx.x + team * gridDim.x;; index = next_tile()) {
    TileWork& work = messages.tile[slot.stage];
    while (index < launch.blocks && !describe<F>(work, p, launch, index)) index = next_tile();
    if (index >= launch.blocks) work.state = TileWork::kEnd;
    ptx::mbarrier_arrive(memory.address(messages.tile_full[slot.stage]));
    if (index >= launch.blocks) break;
    slot.advance();
    ptx::mbarrier_wait(memory.address(messages.tile_empty[slot.stage]), slot.parity ^ 1);
  }
  leave(counter, all_teams);
}

// The warp that asks for the copies, by one of its lanes: what all lanes know alike needs no registers of theirs. K comes a
// block ahead of V, also from one tile to the next, in the order in which buffers become free; so V of a tile's last block
// comes when the next tile is known.
template <class F>
struct Loader {
  const FwdParams& p;
  const FwdLaunch& launch;
  const TensorMaps& maps;
  const TeamMemory<F>& memory;
  bool elected;
  Messages<F>& messages = memory.messages;
  Ring<F::kStagesQ> q;
  Ring<F::kStages> k, v;
  Ring<2> slot;

  // Key block n of K or V, of which only rows of the sequence may be read: the others come from behind the tensor's last.
  __device__ __forceinline__ void load_keys(uint32_t shared, uint32_t barrier, const TileWork& work, int n,
                                            const CUtensorMap& all, const CUtensorMap& eight,
                                            const CUtensorMap& one) const {
    const int row = work.first_k + n * F::kKeys, rows = work.end_k - row, head = work.head_k, batch = work.batch_k;
    if (!elected) return;
    const auto load = [&](const CUtensorMap& map, int row_of_tile, int from) {
#pragma unroll
      for (int panel = 0; panel < F::kPanels; ++panel)
        ptx::tma_load(shared + panel * F::kPanelBytesKV + row_of_tile * 128, &map, barrier, panel * kPanelColumns, from,
                      head, batch);
    };
    ptx::mbarrier_arrive_expecting(barrier, F::kBytesKV);
    if (rows >= F::kKeys) {
      load(all, 0, row);
    } else {
#pragma unroll 1
      for (int i = 0; i < F::kKeys;) {
        const bool is_mixed = rows % 8 != 0 && i / 8 == rows / 8;
        load(is_mixed ? one : eight, i, i < rows ? row + i : static_cast<int>(p.rows_k.rows));
        i += is_mixed ? 1 : 8;
      }
    }
  }

  __device__ __forceinline__ void load_k(const TileWork& work, int n, bool is_last) {
    ptx::mbarrier_wait(memory.address(messages.k_empty[k.stage]), k.parity ^ 1);
    const bool has_hidden = n < work.full_begin || n >= work.full_end;
    if (elected) messages.block[k.stage] = n | (has_hidden ? kHasHidden : 0) | (is_last ? kIsLast : 0);
    load_keys(memory.begin + memory.kK + k.stage * F::kBytesKV, memory.address(messages.k_full[k.stage]), work, n,
              maps.k, maps.k_eight, maps.k_one);
    __syncwarp();
    k.advance();
  }

  __device__ __forceinline__ void load_v(const TileWork& work, int n) {
    ptx::mbarrier_wait(memory.address(messages.v_empty[v.stage]), v.parity ^ 1);
    load_keys(memory.begin + memory.kV + v.stage * F::kBytesKV, memory.address(messages.v_full[v.stage]), work, n,
              maps.v, maps.v_eight, maps.v_one);
    __syncwarp();
    v.advance();
  }

  // The tile's rows, a warpgroup's after the other's.
  __device__ __forceinline__ void load_q(const TileWork& work) {
    ptx::mbarrier_wait(memory.address(messages.q_empty[q.stage]), q.parity ^ 1);
    const int row = work.first_q, head = F::kPacksHeads ? work.head_k : work.head, batch = work.batch_q;
    if (elected) {
      const uint32_t barrier = memory.address(messages.q_full[q.stage]);
      const int queries = F::kPacksHeads ? launch.packed_queries : 64;
      ptx::mbarrier_arrive_expecting(
          barrier, F::kPacksHeads ? F::kBytesQ / 64 * queries * static_cast<int>(launch.group.value) : F::kBytesQ);
#pragma unroll
      for (int i = 0; i < F::kWarpgroups; ++i)
#pragma unroll
        for (int panel = 0; panel < F::kPanels; ++panel) {
          const uint32_t at =
              memory.begin + memory.kQ + q.stage * F::kBytesQ + i * F::kBytesOfWarpgroup + panel * F::kPanelBytesQ;
          if constexpr (F::kPacksHeads)
            ptx::tma_load_groups(at, &maps.q, barrier, panel * kPanelColumns, row + queries * i, head, batch);
          else
            ptx::tma_load(at, &maps.q, barrier, panel * kPanelColumns, row + queries * i, head, batch);
        }
    }
    q.advance();
  }

  __device__ __forceinline__ void release_tile(int stage) const {
    __syncwarp();  // everybody has read it
    if (elected) ptx::mbarrier_arrive(memory.address(messages.tile_empty[stage]));
  }

  __device__ __forceinline__ void run() {
    constexpr int kNone = -1;
    int waiting = kNone, waiting_slot = 0;  // the block whose V is still to come, and its tile
    const auto load_waiting = [&] {
      if (waiting == kNone) return;
      load_v(messages.tile[waiting_slot], waiting);
      if (waiting_slot != slot.stage) release_tile(waiting_slot);
    };
    while (true) {
      ptx::mbarrier_wait(memory.address(messages.tile_full[slot.stage]), slot.parity);
      const TileWork& work = messages.tile[slot.stage];
      const TileWork::State state = work.state;
      if (state == TileWork::kBlocks) {
        const int start = work.start;
        int begin = work.begin, behind = F::kModified && start != work.last ? work.last : kNone;
#pragma unroll 1
        for (int n = start; n != kNone;) {
          int next = work.steps.before(n);
          if (F::kModified && next < begin && behind != kNone) next = behind, begin = start + 1, behind = kNone;
          if (next < begin) next = kNone;
          load_k(work, n, next == kNone);
          load_waiting();
          waiting = n, waiting_slot = slot.stage;
          if (n == start) load_q(work);
          n = next;
        }
      } else {
        load_waiting();
        waiting = kNone;
        release_tile(slot.stage);
        if (state == TileWork::kEnd) break;
      }
      slot.advance();
    }
  }
};

}  // namespace flash::wgmma
