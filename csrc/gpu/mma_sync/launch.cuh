// What launches of forward and backward share.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "common/sequence.h"
#include "gpu/families.h"
#include "gpu/mma_sync/tiles.h"

namespace flash::mma_sync {

__device__ __forceinline__ const uint16_t* first_row_of(const Operand& x, const Rows& rows, int64_t head) {
  return static_cast<const uint16_t*>(x.data) + x.offset(rows.batch, head, rows.first());
}

#if defined(__CUDACC__)

// Lets a kernel have more shared memory than 48 KB. Once for each of the first 64 devices, which `allowed` remembers: it
// costs some microseconds.
template <class Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes, int device, std::atomic<uint64_t>& allowed) {
  if (bytes + kStaticShared <= 48 * 1024) return cudaSuccess;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((allowed & bit) != 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed |= bit;
  return error;
}

#endif

}  // namespace flash::mma_sync
