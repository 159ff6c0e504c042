// The kernel families: each launches what the table lists for it.
#pragma once

#include "common/dropout.h"
#include "common/kernel_key.h"
#include "common/params.h"
#include "gpu/tile/tile_order.h"

namespace flash {

// What the host decides about a launch beside the key.
struct FwdLaunch {
  TileOrder order;
  uint32_t blocks = 0;
  int device = 0;        // the current one
  int tile = 0;          // index into the family's tiles of the key
  Divisor group;         // query heads of a key head
  float scale = 1;       // of QKᵀ
  float keep_scale = 1;  // what O is multiplied by for dropout
  DropoutThreshold threshold;
  bool vectorised_qk = false;  // rows can be copied 16 bytes at a time
  bool vectorised_v = false;
  bool vectorised_out = false;
  int64_t max_rows_q = 0;  // rows of a sequence that the grid covers
};

// Launches return a cudaError_t.
namespace mma_sync {
template <KernelKey kKey>
int launch_fwd(const FwdParams& params, const FwdLaunch& launch, void* stream);
}  // namespace mma_sync

}  // namespace flash
