// The micro-kernels for any CPU: GCC vector extensions of 16 bytes, which every 64-bit target has in hardware.
#include "cpu/isa/isa.h"
#include "cpu/isa/panel_kernels.h"

namespace flash::cpu::isa {

// 12 accumulators, 2 vectors of B, 1 of A: 15 of 16 registers.
const MicroKernels<float> portable_fp32 = make_kernels<float, 16, 6, 2, 32>("portable");
const MicroKernels<double> portable_fp64 = make_kernels<double, 16, 6, 2, 32>("portable");

}  // namespace flash::cpu::isa
