// One spelling for functions that both compilers take: g++ for the CPU library, nvcc for the kernels.
#pragma once

#if defined(__CUDACC__)
#define FLASH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_HOST_DEVICE inline
#endif
