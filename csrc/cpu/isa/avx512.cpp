// The micro-kernels for AVX-512 (F, DQ, BW, VL): 6 × 64 floats, 29 of 32 registers.
#include "cpu/isa/isa.h"
#include "cpu/isa/panel_kernels.h"

namespace flash::cpu::isa {

const MicroKernels<float> avx512_fp32 = make_kernels<float, 64, 6, 4, 256>("avx512");
const MicroKernels<double> avx512_fp64 = make_kernels<double, 64, 6, 4, 256>("avx512");

}  // namespace flash::cpu::isa
