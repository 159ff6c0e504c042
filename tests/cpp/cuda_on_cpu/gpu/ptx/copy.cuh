// Shared memory is an array, and its addresses are offsets in it.
#pragma once

#include <cuda_runtime.h>

namespace flash::mma_sync {
alignas(1024) inline uint8_t shared[256 << 10];  // what the kernels declare as theirs
}

namespace flash::ptx {

// Kernels' static variables lie before the array or behind it.
inline uint8_t* at(uint32_t address) { return mma_sync::shared + static_cast<int32_t>(address); }
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - mma_sync::shared);
}

template <class T>
T load_shared(uint32_t address) {
  T x;
  std::memcpy(&x, at(address), sizeof(x));
  return x;
}
inline uint32_t load_shared_4(uint32_t address) { return load_shared<uint32_t>(address); }
inline float2 load_shared_8(uint32_t address) { return load_shared<float2>(address); }
inline uint4 load_shared_16(uint32_t address) { return load_shared<uint4>(address); }
inline void store_shared_4(uint32_t address, uint32_t x) { std::memcpy(at(address), &x, sizeof(x)); }
inline void store_shared_16(uint32_t address, uint4 x) { std::memcpy(at(address), &x, sizeof(x)); }

inline void cp_async_16(uint32_t address, const void* global, bool given) {
  if (given)
    std::memcpy(at(address), global, 16);
  else
    std::memset(at(address), 0, 16);
}
inline void cp_async_4(uint32_t address, const void* global) { std::memcpy(at(address), global, 4); }
inline void cp_async_wait_all() {}

}  // namespace flash::ptx
