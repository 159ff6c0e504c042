// What launches of forward and backward share.
#pragma once

#include <cuda_runtime.h>

#include "common/sequence.h"
#include "gpu/families.h"
#include "gpu/mma_sync/tiles.h"
#include "gpu/tile/launch.cuh"

namespace flash::mma_sync {

__device__ __forceinline__ const uint16_t* first_row_of(const Operand& x, const Rows& rows, int64_t head) {
  return static_cast<const uint16_t*>(x.data) + x.offset(rows.batch, head, rows.first());
}

}  // namespace flash::mma_sync
