#pragma once

#include <cuda_runtime.h>

namespace flash::ptx {

inline int load_acquire(const int* counter) { return std::atomic_ref<int>(*const_cast<int*>(counter)).load(); }
inline void add_release(int* counter, int x) { std::atomic_ref<int>(*counter).fetch_add(x); }
inline void add_global(float* target, float x) { std::atomic_ref<float>(*target).fetch_add(x); }

}  // namespace flash::ptx
