// The micro-kernels for AVX-512 (F, DQ, BW, VL): 6 × 64 floats, 29 of 32 registers.
#include "cpu/isa/isa.h"
#include "cpu/isa/vector_kernels.h"

namespace flash::cpu::isa {

const MicroKernels<float> avx512_fp32 = Vectors<float, 64, 6, 4, 256>::kernels("avx512");
const MicroKernels<double> avx512_fp64 = Vectors<double, 64, 6, 4, 256>::kernels("avx512");

}  // namespace flash::cpu::isa
