#include "cpu/micro_kernels.h"

#include <algorithm>
#include <atomic>

#include "cpu/isa/isa.h"

namespace flash::cpu {
namespace {

std::atomic<InstructionSet>& used() {
  static std::atomic<InstructionSet> set{best_instruction_set()};
  return set;
}

}  // namespace

InstructionSet best_instruction_set() {
#if defined(__x86_64__)
  // These ask the CPU and the operating system, which must save the wide registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return avx512 ? InstructionSet::kAvx512 : avx2 ? InstructionSet::kAvx2 : InstructionSet::kPortable;
#else
  return InstructionSet::kPortable;
#endif
}

InstructionSet limit_instruction_set(InstructionSet most) {
  const InstructionSet set = std::min(most, best_instruction_set());
  used() = set;
  return set;
}

template <>
const MicroKernels<float>& micro_kernels<float>() {
#if defined(__x86_64__)
  const InstructionSet set = used().load(std::memory_order_relaxed);
  if (set == InstructionSet::kAvx512) return isa::avx512_fp32;
  if (set == InstructionSet::kAvx2) return isa::avx2_fp32;
#endif
  return isa::portable_fp32;
}

template <>
const MicroKernels<double>& micro_kernels<double>() {
#if defined(__x86_64__)
  const InstructionSet set = used().load(std::memory_order_relaxed);
  if (set == InstructionSet::kAvx512) return isa::avx512_fp64;
  if (set == InstructionSet::kAvx2) return isa::avx2_fp64;
#endif
  return isa::portable_fp64;
}

}  // namespace flash::cpu
