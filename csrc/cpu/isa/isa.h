// What each instruction set offers. The tables are constants: they exist before any code that an old CPU cannot run is
// called.
#pragma once

#include "cpu/micro_kernels.h"

namespace flash::cpu::isa {

extern const MicroKernels<float> portable_fp32;
extern const MicroKernels<double> portable_fp64;
#if defined(__x86_64__)
extern const MicroKernels<float> avx2_fp32, avx512_fp32;
extern const MicroKernels<double> avx2_fp64, avx512_fp64;
extern const Bf16Kernels avx512_bf16, amx_bf16;
#endif

}  // namespace flash::cpu::isa
