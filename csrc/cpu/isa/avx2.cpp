// The micro-kernels for AVX2 and FMA (x86-64 since 2013): 6 × 16 floats, 15 of 16 registers.
#include "cpu/isa/isa.h"
#include "cpu/isa/panel_kernels.h"

namespace flash::cpu::isa {

const MicroKernels<float> avx2_fp32 = make_kernels<float, 32, 6, 2, 256>("avx2");
const MicroKernels<double> avx2_fp64 = make_kernels<double, 32, 6, 2, 256>("avx2");

}  // namespace flash::cpu::isa
