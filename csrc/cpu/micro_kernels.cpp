#include "cpu/micro_kernels.h"

#include "cpu/isa/isa.h"

namespace flash::cpu {

template <>
const MicroKernels<float>& micro_kernels<float>() {
  return isa::portable_fp32;
}

template <>
const MicroKernels<double>& micro_kernels<double>() {
  return isa::portable_fp64;
}

}  // namespace flash::cpu
