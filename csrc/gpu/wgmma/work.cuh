// What a CTA of the forward with wgmma is, and what its producer tells its consumers.
#pragma once

#include "common/sequence.h"
#include "common/statistics.h"
#include "common/visibility.h"
#include "gpu/families.h"
#include "gpu/tile/block_tiles.cuh"
#include "gpu/tile/dropout.cuh"
#include "gpu/wgmma/tensor_map.h"
#include "gpu/wgmma/tiles.h"

namespace flash::wgmma {

template <KernelKey kKeyOf, int kTileOf>
struct Fwd {
  static constexpr KernelKey kKey = kKeyOf;
  static constexpr Tile kTile = fwd_tiles(kKeyOf)[kTileOf];
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kTeams = kTile.teams, kThreads = kTile.threads();
  static constexpr int kWarpgroups = kTile.warpgroups, kConsumers = 128 * kWarpgroups;  // of a team
  static constexpr int kRows = kTile.rows(), kKeys = kTile.keys;
  static constexpr int kN = kKeys / 8, kO = kHeadDim / 8;                 // n8 tiles of S and of O
  static constexpr int kDepth = kHeadDim / 16, kValueDepth = kKeys / 16;  // k16 steps of QKᵀ and of P V
  static constexpr int kPanels = Tile::columns(kHeadDim) / kPanelColumns;
  static constexpr int kPanelBytesQ = 64 * 128, kPanelBytesKV = kKeys * 128;
  static constexpr int kBytesQ = kTile.q_bytes(kHeadDim), kBytesKV = kTile.kv_bytes(kHeadDim);
  static constexpr int kBytesOfWarpgroup = kBytesQ / kWarpgroups;  // of Q
  static constexpr int kStagesQ = kTile.q_stages, kStages = kTile.kv_stages;
  static constexpr bool kDropout = kKey.variant >= Variant::dropout;
  static constexpr bool kModified = kKey.variant >= Variant::modified;
  static constexpr bool kPacksHeads = kTile.packs_heads;
  // The registers at launch are all there is: so many for each thread, a multiple of eight.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kTeams * kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters * kThreads - 128 * kProducerRegisters) / (kTeams * kConsumers) / 8 * 8;
  static_assert(!kPacksHeads || !kDropout);  // what a head has of its own but the sink, rows do not ask for
  static_assert(kTeams <= 2);                // of the loading warpgroup, each has two warps
  // V of a tile's last block is still held while blocks of the next are passed over (fwd.cuh), and each of those takes a
  // buffer: the first warpgroup passes over as many as this.
  static_assert(64 * (kWarpgroups - 1) <= kStages * kKeys);
  static_assert(kKeys % (kDropout ? static_cast<int>(kDropoutKeys) : 16) == 0 && kHeadDim % 16 == 0);
};

// A place in a ring of buffers, and the parity of the phase that it is in.
template <int kStages>
struct Ring {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

inline constexpr int kNoQuery = 1 << 29;  // behind all of them

// Which of a tile's queries, and of which of the heads that it has, a row of a warpgroup is.
struct QueryOfRow {
  int query, head;
};

template <class F>
__device__ __forceinline__ QueryOfRow query_of_row(const FwdLaunch& launch, int warpgroup, int row) {
  if constexpr (!F::kPacksHeads) return {64 * warpgroup + row, 0};
  const auto query = static_cast<int>(launch.group.divide(static_cast<uint32_t>(row)));
  // Rows that are left over are behind all queries.
  return {query < launch.packed_queries ? warpgroup * launch.packed_queries + query : kNoQuery,
          row - query * static_cast<int>(launch.group.value)};
}

// What the scheduler has found out about a tile of rows.
struct TileWork {
  enum State : int { kBlocks, kNoBlocks, kImpossible, kEnd };
  State state;                // keys are visited; rows see nothing; their lengths cannot be; there is no tile any more
  int batch, head, head_k;    // the first head, where there are several
  int first_row, rows, keys;  // the tile's first query; of the sequence
  bool has_lengths;           // from a tile before, because all sequences are alike
  Sequence sequence;
  Visibility visibility;
  DropoutStream dropout;  // of this sequence and head
  // Key blocks that are visited, from `start` down to the first and then from the last down to behind `start`; those among
  // them of which every row sees every key.
  TileSteps steps;
  int begin, start, last, full_begin, full_end;
  int seen_begin, seen_end;  // keys that the tile's first row sees, before the ends of the sequence
  // Of the tile's first row.
  uint16_t* out;
  float *reference, *log2_sum, *lse;
  // Where the copy engine finds them: rows of the tensors, and what it may read of the keys.
  int batch_q, batch_k, first_q, first_k, end_k;

  __device__ __forceinline__ void store_statistics(const FwdParams& p, QueryOfRow row,
                                                   RowStatistics<float> statistics) const {
    reference[row.query + row.head * p.reference.head_stride] = statistics.reference;
    log2_sum[row.query + row.head * p.log2_sum.head_stride] = statistics.log2_sum;
    lse[row.query + row.head * p.lse.head_stride] = log_sum_exp(statistics);
  }
  __device__ __forceinline__ uint16_t* out_of(const FwdParams& p, QueryOfRow row) const {
    return out + row.query * p.out.row_stride + row.head * p.out.head_stride;
  }
  __device__ __forceinline__ bool is_there(QueryOfRow row) const { return row.query < rows - first_row; }
};

// What the loader says of a block of keys: its number and these.
inline constexpr int kIsLast = 1 << 30, kHasHidden = 1 << 29;  // of the tile; some row does not see some of its keys
inline constexpr int kBlockNumber = kHasHidden - 1;

// Shared memory: messages, then the buffers. Where they are is known when kernels are compiled, as there is nothing else
// but what the system has of each CTA's: addresses that are found out take the warps a while in each block of keys.
inline constexpr uint32_t kSharedBegin = 1024, kMessageBytes = 1024;

// Barriers and messages beside the buffers. A buffer is full, or empty again, at a barrier of its own.
template <class F>
struct Messages {
  uint64_t q_full[F::kStagesQ], q_empty[F::kStagesQ];
  uint64_t k_full[F::kStages], k_empty[F::kStages], v_full[F::kStages], v_empty[F::kStages];
  uint64_t tile_full[2], tile_empty[2];
  int block[F::kStages];  // that a buffer of K holds
  TileWork tile[2];
};

// A team's part of shared memory.
template <class F>
struct TeamMemory {
  static constexpr uint32_t kBytes = F::kTile.team_bytes(F::kHeadDim), kQ = kMessageBytes,
                            kK = kQ + F::kStagesQ * F::kBytesQ, kV = kK + F::kStages * F::kBytesKV;
  static_assert(sizeof(Messages<F>) <= kMessageBytes && kV + F::kStages * F::kBytesKV == kBytes);
  static_assert(kSharedBegin % 1024 == 0 && kBytes % 1024 == 0 && kQ % 1024 == 0 && kK % 1024 == 0 && kV % 1024 == 0);

  Messages<F>& messages;
  uint32_t begin;  // address

  __device__ __forceinline__ TeamMemory(uint8_t* shared, int team)
      : messages(*reinterpret_cast<Messages<F>*>(shared + team_offset(team))),
        begin(kSharedBegin + team_offset(team)) {}
  static __device__ __forceinline__ int team_offset(int team) {
    return F::kTeams == 1 ? 0 : team * static_cast<int>(kBytes);
  }

  __device__ __forceinline__ uint32_t address(const uint64_t& barrier) const {
    return begin +
           static_cast<uint32_t>(reinterpret_cast<const char*>(&barrier) - reinterpret_cast<const char*>(&messages));
  }
};

}  // namespace flash::wgmma
