// The kernel families: each launches what the table lists for it.
#pragma once

#include "common/dropout.h"
#include "common/kernel_key.h"
#include "common/params.h"
#include "gpu/tile/block_tiles.h"
#include "gpu/tile/softcap.h"
#include "gpu/tile/turns.h"

namespace flash {

// Rows of a sequence: positions and their differences fit into 32 bits, whatever a tile adds to them.
inline constexpr int64_t kMostRows = 1 << 28;

// What the host decides about a launch beside the key.
struct FwdLaunch {
  TileOrder order;           // of mma_sync
  LateTileOrder late_order;  // of wgmma
  uint32_t blocks = 0;
  int device = 0;    // the current one
  int sm_count = 0;  // of the card
  int tile = 0;      // index into the family's tiles of the key
  Divisor group;     // query heads of a key head
  float scale = 1;   // of QKᵀ
  SoftcapTerms softcap;
  float keep_scale = 1;  // what O is multiplied by for dropout
  DropoutThreshold threshold;
  bool vectorised_qk = false;  // rows can be copied 16 bytes at a time
  bool vectorised_v = false;
  bool vectorised_out = false;
  int packed_queries = 0;  // of a warpgroup whose rows are all heads of a group; 0: its rows are queries of one head
  int64_t max_rows_q = 0;  // rows of a sequence that the grid covers
  BlockTiles tiles;        // of rows
  uint32_t* counter = nullptr;  // of tiles, in the call's memory and zero; null: the kernel's own
};

struct BwdLaunch {
  TileOrder order;  // its row blocks are key blocks, counted from the last
  TurnOrder turn_order;
  uint32_t blocks = 0;
  int device = 0;                      // the current one
  int tile = 0;                        // index into the family's tiles of the key
  int m_blocks = 0;                    // row blocks of the longest sequence
  int64_t group = 1;                   // query heads of a key head
  int64_t all_tiles = 0;               // row blocks of a head, of all sequences, in dq_sum
  float scale = 1, inverse_scale = 1;  // of QKᵀ
  float keep_scale = 1;                // of what dropout keeps
  DropoutThreshold threshold;
  bool vectorised_qk = false, vectorised_v = false, vectorised_dout = false, vectorised_out = false;
  bool vectorised_dq = false, vectorised_dk = false, vectorised_dv = false;
  int64_t max_rows_q = 0, max_rows_k = 0;  // rows of a sequence that the grids cover
  // Memory of the call: the numbers of all queries (QueryTable of each row block); and zeros for the rest.
  float* numbers = nullptr;
  float* dq_sum = nullptr;  // dQ / scale, in the order in which the threads hold it; null: not wanted
  int* turns = nullptr;     // if turns are taken, of each row block: how many key blocks have added to it
  Broadcast dbias_sum;      // fp32
  BlockTiles tiles;         // of keys
};

// Launches return a cudaError_t.
namespace mma_sync {
template <KernelKey kKey>
int launch_fwd(const FwdParams& params, const FwdLaunch& launch, void* stream);
template <KernelKey kKey>
int launch_bwd(const BwdParams& params, const BwdLaunch& launch, void* stream);
}  // namespace mma_sync

namespace wgmma {
template <KernelKey kKey>
int launch_fwd(const FwdParams& params, const FwdLaunch& launch, void* stream);
}  // namespace wgmma

}  // namespace flash
