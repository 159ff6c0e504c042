#pragma once

#include <cuda_runtime.h>

namespace flash::ptx {

inline void barrier_sync(int index, int threads) { cuda_on_cpu::named_barrier(index, threads).arrive_and_wait(); }

}  // namespace flash::ptx
