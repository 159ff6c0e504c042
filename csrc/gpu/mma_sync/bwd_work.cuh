// What a CTA of the backward with mma.sync is: how its warps share a tile, and which keys and rows are its work.
#pragma once

#include "common/sequence.h"
#include "gpu/families.h"
#include "gpu/mma_sync/tiles.h"
#include "gpu/tile/copy_tile.cuh"
#include "gpu/tile/panels.cuh"

namespace flash::mma_sync {

template <KernelKey kKeyOf, int kTileOf>
struct Bwd {
  static constexpr KernelKey kKey = kKeyOf;
  static constexpr BwdTile kTile = bwd_tiles(kKeyOf)[kTileOf];
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys, kThreads = kTile.threads(), kWarps = kTile.warps;
  static constexpr int kStages = kTile.stages;
  // Of S and dP a warp has some keys and some rows; of dK and dV the same keys and some columns.
  static constexpr int kSplits = kWarps / kTile.key_warps;
  static constexpr int kWarpKeys = kKeys / kTile.key_warps, kWarpRows = kRows / kSplits;
  static constexpr int kColumns = kHeadDim / kSplits;
  static constexpr int kM = kWarpKeys / 16, kN = kWarpRows / 8, kO = kColumns / 8;
  // Of dQ some rows and some columns, a few of these at a time.
  static constexpr int kDqRows = kRows / kTile.dq_row_warps, kDqColumns = kHeadDim / (kWarps / kTile.dq_row_warps);
  static constexpr int kDqAtOnce = kDqColumns % 32 == 0 ? 32 : 16;
  static constexpr int kDqM = kDqRows / 16, kDqN = kDqAtOnce / 8, kDqParts = kDqColumns / kDqAtOnce;
  static constexpr int kDepth = kHeadDim / 16;
  static constexpr int kBytesKV = kTile.kv_bytes(kHeadDim), kBytesQ = kTile.q_bytes(kHeadDim);
  static constexpr int kBytesScore = kTile.score_bytes();
  static constexpr int kRowBytes = Panels<kHeadDim>::kRowBytes, kScoreRowBytes = Panels<kRows>::kRowBytes;
  using ReaderKV = BlockReader<kKeys, kHeadDim>;
  using ReaderQ = BlockReader<kRows, kHeadDim>;
  using ReaderScore = BlockReader<kKeys, kRows>;  // of Pᵀ, dSᵀ
  static constexpr bool kDropout = kKey.variant >= Variant::dropout;
  static constexpr bool kBiased = kKey.variant == Variant::biased;
  using CopyKV = TileCopy<kKey.arch, kKeys, kHeadDim, kThreads, kBiased>;
  using CopyQ = TileCopy<kKey.arch, kRows, kHeadDim, kThreads, kBiased>;
  static_assert(kWarpKeys % 16 == 0 && kWarpRows % 16 == 0 && kColumns % 16 == 0 && kDqRows % 16 == 0 &&
                kDqColumns % kDqAtOnce == 0 && kRows <= kThreads);
};

// What all threads of a CTA know alike, in shared memory, because registers are scarce.
struct BwdWork {
  Sequence sequence;
  Visibility visibility;
  int64_t batch, head_k;
  int64_t first_tile;  // of head 0 in dq_sum
  int n, keys, rows;   // the key block; of the sequence
  int m_begin, m_end;  // row blocks that see one of the keys
  int seen_begin, seen_end;
  DropoutStream streams[2];  // of even and of odd heads of the group
};

// Row blocks of dq_sum: [head][sequence][block]; a packed sequence gets one more than its rows fill, so that its first
// follows from cu_seqlens alone.
template <int kRows>
__device__ __forceinline__ int64_t first_row_tile(const BwdParams& p, const BwdLaunch& launch, int64_t batch) {
  return p.rows_q.cu_seqlens.given() ? p.rows_q.cu_seqlens[batch] / kRows + batch : batch * launch.m_blocks;
}

template <class F>
__device__ __forceinline__ BwdWork make_bwd_work(const BwdParams& p, const BwdLaunch& launch, const TileIndex& tile,
                                                 const Sequence& sequence) {
  BwdWork work{sequence, make_visibility(p.window, sequence.q.length, sequence.k.length), tile.batch, tile.head};
  work.n = static_cast<int>(launch.order.m_blocks) - 1 - tile.m_block;
  work.keys = static_cast<int>(sequence.k.length);
  work.rows = static_cast<int>(sequence.q.length);
  const int64_t first_key = int64_t{work.n} * F::kKeys;
  const Range rows = work.visibility.rows_of_any({first_key, first_key + F::kKeys});
  const Range seen = work.visibility.keys_of_any({0, work.rows});
  work.m_begin = rows.empty() ? 0 : static_cast<int>(rows.begin / F::kRows);
  work.m_end = rows.empty() ? 0 : static_cast<int>(divide_up(rows.end, F::kRows));
  work.seen_begin = static_cast<int>(seen.begin);
  work.seen_end = static_cast<int>(seen.end);
  work.first_tile = first_row_tile<F::kRows>(p, launch, tile.batch);
  return work;
}

}  // namespace flash::mma_sync
