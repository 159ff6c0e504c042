#include "cpu/micro_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>

#include "cpu/isa/isa.h"

namespace flash::cpu {
namespace {

std::atomic<InstructionSet>& used() {
  static std::atomic<InstructionSet> set{best_instruction_set()};
  return set;
}

#if defined(__x86_64__)
// AMX: the CPU's tiles and bf16, the operating system's saving of them, and its permission, asked once for the process.
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kOsXsave = 1u << 27;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kOsXsave) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  if ((low & kTileState) != kTileState) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

InstructionSet detect() {
#if defined(__x86_64__)
  // These ask the CPU and the operating system, which must save the wide registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) {
    if (has_amx()) return InstructionSet::kAmx;
    // Intel's vdpbf16ps does half of what its fp32 FMA does.
    if (__builtin_cpu_is("amd")) return InstructionSet::kAvx512Bf16;
  }
  return avx512 ? InstructionSet::kAvx512 : avx2 ? InstructionSet::kAvx2 : InstructionSet::kPortable;
#else
  return InstructionSet::kPortable;
#endif
}

}  // namespace

InstructionSet best_instruction_set() {
  static const InstructionSet best = detect();
  return best;
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
  if (set >= InstructionSet::kAvx512) return isa::avx512_fp32;
  if (set == InstructionSet::kAvx2) return isa::avx2_fp32;
#endif
  return isa::portable_fp32;
}

template <>
const MicroKernels<double>& micro_kernels<double>() {
#if defined(__x86_64__)
  const InstructionSet set = used().load(std::memory_order_relaxed);
  if (set >= InstructionSet::kAvx512) return isa::avx512_fp64;
  if (set == InstructionSet::kAvx2) return isa::avx2_fp64;
#endif
  return isa::portable_fp64;
}

const Bf16Kernels* bf16_kernels() {
#if defined(__x86_64__)
  const InstructionSet set = used().load(std::memory_order_relaxed);
  if (set >= InstructionSet::kAmx) return &isa::amx_bf16;
  if (set == InstructionSet::kAvx512Bf16) return &isa::avx512_bf16;
#endif
  return nullptr;
}

}  // namespace flash::cpu
