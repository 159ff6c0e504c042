// A kernel that must spill: 1024 threads, two CTAs on an SM, leave 32 registers for 128 live values.
#pragma once

namespace flash::trivial {

template <int kValues>
__global__ void __launch_bounds__(1024, 2) too_many_registers(float* data) {
  float values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = data[i * 1024 + threadIdx.x];
  __syncthreads();  // all loads come first: the values are live together
#pragma unroll
  for (int i = 0; i < kValues; ++i) data[i * 1024 + threadIdx.x] = values[kValues - 1 - i] * values[i];
}

}  // namespace flash::trivial

#define FLASH_ATTN_INSTANTIATE_SPILL(family, arch, dtype, head_dim, variant) \
  template __global__ void flash::family::too_many_registers<head_dim>(float*);
