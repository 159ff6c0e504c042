// What launches of all families share.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace flash {

#if defined(__CUDACC__)  // not where kernels are compiled for the CPU, for tests

// Lets a kernel have more shared memory than 48 KB, of which up to 1 KB is static. Once for each of the first 64 devices,
// which `allowed` remembers: it costs some microseconds.
template <class Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes, int device, std::atomic<uint64_t>& allowed) {
  if (bytes <= 47 * 1024) return cudaSuccess;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((allowed & bit) != 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed |= bit;
  return error;
}

#endif

}  // namespace flash
