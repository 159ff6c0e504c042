// What each instruction set offers.
#pragma once

#include "cpu/micro_kernels.h"

namespace flash::cpu::isa {

extern const MicroKernels<float> portable_fp32;
extern const MicroKernels<double> portable_fp64;

}  // namespace flash::cpu::isa
