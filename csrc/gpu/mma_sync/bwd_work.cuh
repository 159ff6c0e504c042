// What a CTA of the backward with mma.sync is: how its warps share a tile, and which keys and rows are its work.
#pragma once

#include <bit>

#include "common/sequence.h"
#include "gpu/families.h"
#include "gpu/mma_sync/launch.cuh"
#include "gpu/mma_sync/tiles.h"
#include "gpu/passes/backward_rows.cuh"
#include "gpu/tile/block_tiles.cuh"
#include "gpu/tile/copy_tile.cuh"
#include "gpu/tile/gradient.cuh"
#include "gpu/tile/panels.cuh"

namespace flash::mma_sync {

// The launches that a kernel is for: all, those without a block mask, those with one. What is known at compile time takes
// no instructions: without a mask, asking for steps cost 1.4 to 3.6 %.
enum class Masks : int { any, none, given };

template <KernelKey kKeyOf, int kTileOf, Masks kMasks = Masks::any>
struct Bwd {
  static constexpr KernelKey kKey = kKeyOf;
  static constexpr BwdTile kTile = bwd_tiles(kKeyOf)[kTileOf];
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys, kThreads = kTile.threads(), kWarps = kTile.warps;
  static constexpr int kStages = kTile.stages;
  // Of S and dP a warp has some keys and some rows; of dK and dV the same keys and every kSplits-th block of 16 columns.
  static constexpr int kSplits = kWarps / kTile.key_warps;
  static constexpr int kWarpKeys = kKeys / kTile.key_warps, kWarpRows = kRows / kSplits;
  static constexpr int kColumns = kHeadDim / kSplits;
  static constexpr int kM = kWarpKeys / 16, kN = kWarpRows / 8, kO = kColumns / 8;
  // Of dQ some rows and every kDqSplits-th block of 16 columns, as many of these at a time as registers allow.
  static constexpr int kDqSplits = kWarps / kTile.dq_row_warps;
  static constexpr int kDqRows = kRows / kTile.dq_row_warps, kDqColumns = kHeadDim / kDqSplits;
  static constexpr int kDqAtOnce = kDqColumns < 64 ? kDqColumns : kDqColumns % 64 == 0 && kN < 4 ? 64 : 32;
  static constexpr int kDqM = kDqRows / 16, kDqN = kDqAtOnce / 8, kDqParts = kDqColumns / kDqAtOnce;
  static constexpr int kDepth = kHeadDim / 16;
  static constexpr int kBytesKV = kTile.kv_bytes(kHeadDim), kBytesQ = kTile.q_bytes(kHeadDim);
  static constexpr int kBytesScore = kTile.score_bytes();
  // A thread's queries are neighbours in P and dS, where a warp has whole groups of 32.
  static constexpr bool kDealt = kWarpRows % 32 == 0;
  static constexpr int kPeriod = 32;  // of swizzles
  using Table = QueryTable<kRows, kDealt>;
  using ReaderKV = BlockReader<kKeys, kHeadDim, kPeriod>;
  using ReaderQ = BlockReader<kRows, kHeadDim, kPeriod>;
  using ReaderScore = BlockReader<kKeys, kRows, kPeriod>;  // of Pᵀ, dSᵀ
  static constexpr bool kDropout = kKey.variant >= Variant::dropout;
  static constexpr bool kBiased = kKey.variant == Variant::biased;
  // Whether a block mask leaves row blocks out.
  static __device__ __forceinline__ bool skips(const BlockTiles& tiles) {
    if constexpr (kMasks == Masks::any) return kTile.takes_blocks && tiles.steps != nullptr;
    return kMasks == Masks::given;
  }
  // dP is made, and P and dS with it, of this many parts of a warp's rows: 32 of them at most leave registers.
  static constexpr int kScoreParts = kBiased ? 1 : (kN + 3) / 4;
  static constexpr bool kKeepsPlaces = kHeadDim <= 128;
  using CopyKV = TileCopy<kKey.arch, kKeys, kHeadDim, kThreads, kBiased, kPeriod>;
  using CopyQ = TileCopy<kKey.arch, kRows, kHeadDim, kThreads, kBiased, kPeriod>;
  static_assert(kWarpKeys % 16 == 0 && kWarpRows % 16 == 0 && kColumns % 16 == 0 && kDqRows % 16 == 0 &&
                kDqColumns % kDqAtOnce == 0 && kRows % CopyQ::kStep == 0 && kTile.table_floats() == Table::kFloats);
  static_assert(kN % (2 * kScoreParts) == 0);
  // Panels::moved goes on by exclusive or from where a part begins.
  static_assert(kDqParts == 1 || std::has_single_bit(static_cast<unsigned>(kDqAtOnce * kDqSplits)));
};

// What all threads of a CTA know alike, in shared memory, because registers are scarce.
struct BwdWork {
  Sequence sequence;
  Visibility visibility;
  int64_t batch, head_k;
  const uint16_t *gQ, *gdO;      // the sequence's first row of head 0
  int64_t first_tile;            // of head 0 in dq_sum
  int n, keys, rows;             // the key block; of the sequence
  int first_head, end_head;      // that read this key head
  uint32_t has_turn;             // 1: to add to dQ of the row block at hand
  int m_begin, m_end;            // row blocks that see one of the keys
  int m_full_begin, m_full_end;  // those in which every row sees all of them
  int seen_begin, seen_end;
  TileSteps steps;           // of the head at hand, for the thread that copies them
  DropoutStream streams[2];  // of even and of odd heads of the group
};

template <class F>
__device__ __forceinline__ BwdWork make_bwd_work(const BwdParams& p, const BwdLaunch& launch, const TileIndex& tile,
                                                 const Sequence& sequence) {
  BwdWork work{sequence, make_visibility(p.window, sequence.q.length, sequence.k.length), tile.batch, tile.head};
  work.n = tile.m_block;
  work.keys = static_cast<int>(sequence.k.length);
  work.rows = static_cast<int>(sequence.q.length);
  const int64_t first_key = int64_t{work.n} * F::kKeys;
  const Range rows = work.visibility.rows_of_any({first_key, first_key + F::kKeys});
  const Range seen = work.visibility.keys_of_any({0, work.rows});
  work.m_begin = rows.empty() ? 0 : static_cast<int>(rows.begin / F::kRows);
  work.m_end = rows.empty() ? 0 : static_cast<int>(divide_up(rows.end, F::kRows));
  const Range full = work.visibility.rows_of_all({first_key, first_key + F::kKeys});
  work.m_full_begin = static_cast<int>(divide_up(full.begin, F::kRows));
  // What is behind the last row sees nothing, whatever its mask says.
  work.m_full_end = static_cast<int>(full.end == work.rows ? divide_up(full.end, F::kRows) : full.end / F::kRows);
  work.seen_begin = static_cast<int>(seen.begin);
  work.seen_end = static_cast<int>(seen.end);
  work.first_head = static_cast<int>(tile.head * launch.group);
  work.end_head = work.first_head + static_cast<int>(launch.group);
  work.gQ = first_row_of(p.q, sequence.q, 0);
  work.gdO = first_row_of(p.dout, sequence.q, 0);
  work.first_tile = first_row_tile<F::kRows>(p, launch.m_blocks, tile.batch);
  return work;
}

}  // namespace flash::mma_sync
