// Matrix products of a warpgroup (four warps): D (64 × N, fp32, registers) += A (64 × 16) · B (16 × N), B in shared memory.
// They run beside what the warps do next. sm_90a.
//
// Warp w of the four has rows 16 w to 16 w + 15 of D, in fragments d[n8][c] like those of mma.cuh; so is A in registers.
#pragma once

#include <cstdint>

#include "common/kernel_key.h"

namespace flash::ptx {

// Registers that products read or write were written before.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Products asked for since the last one are a group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the last kPending groups are done.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Nobody moves uses of x from one side of this to the other: the compiler does not know what asynchronous products do.
template <int kN>
__device__ __forceinline__ void pin(float (&x)[kN][4]) {
#pragma unroll
  for (int i = 0; i < kN * 4; ++i) asm volatile("" : "+f"(x[i / 4][i % 4])::"memory");
}
template <int kN>
__device__ __forceinline__ void pin(uint32_t (&x)[kN][4]) {
#pragma unroll
  for (int i = 0; i < kN * 4; ++i) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// Panels of 64 columns (128 bytes a row, swizzled, 1024-byte aligned) as operand. `panel_bytes`: from one panel to the next,
// where rows are what is summed over. Addresses, below 256 KB, add up in units of 16 bytes.
__device__ __forceinline__ constexpr uint32_t wgmma_place(uint32_t shared, uint32_t panel_bytes) {
  return shared >> 4 | panel_bytes >> 4 << 16;
}
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t place) {
  constexpr uint64_t kEightRows = 1024 >> 4, kSwizzle128 = 1;
  return place | kEightRows << 32 | kSwizzle128 << 62;
}

// Lists of registers for the two products below.
#define FLASH_R32                                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_R48 \
  FLASH_R32       \
  ", "            \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_R56 \
  FLASH_R48       \
  ", "            \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_R64 \
  FLASH_R56       \
  ", "            \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_R96                                                                                        \
  FLASH_R64                                                                                              \
  ", "                                                                                                   \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_R128                                                                                     \
  FLASH_R96                                                                                            \
  ", "                                                                                                 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FLASH_D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FLASH_D8(n) FLASH_D4(n), FLASH_D4(n + 1)
#define FLASH_D32(n) FLASH_D8(n), FLASH_D8(n + 2), FLASH_D8(n + 4), FLASH_D8(n + 6)
#define FLASH_D48(n) FLASH_D32(n), FLASH_D8(n + 8), FLASH_D8(n + 10)
#define FLASH_D56(n) FLASH_D48(n), FLASH_D8(n + 12)
#define FLASH_D64(n) FLASH_D32(n), FLASH_D32(n + 8)
#define FLASH_D96(n) FLASH_D64(n), FLASH_D32(n + 16)
#define FLASH_D128(n) FLASH_D96(n), FLASH_D32(n + 24)

#define FLASH_WGMMA_SHARED(columns, type, registers, a_at, b_at, accumulate_at)                                   \
  if constexpr (kN == columns)                                                                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #accumulate_at ", 0; wgmma.mma_async.sync.aligned.m64n" #columns \
               "k16.f32." type "." type " {" FLASH_R##registers "}, %" #a_at ", %" #b_at ", p, 1, 1, 0, 0;}"      \
               : FLASH_D##registers(0)                                                                            \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define FLASH_WGMMA_REGISTERS(columns, type, registers, a0, a1, a2, a3, b_at, accumulate_at)                           \
  if constexpr (kN == columns)                                                                                         \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #accumulate_at ", 0; wgmma.mma_async.sync.aligned.m64n" #columns      \
               "k16.f32." type "." type " {" FLASH_R##registers "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_at \
                                                                ", p, 1, 1, 1;}"                                       \
               : FLASH_D##registers(0)                                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))
#define FLASH_WGMMA_ALL_SHARED(type)             \
  FLASH_WGMMA_SHARED(64, type, 32, 32, 33, 34);  \
  FLASH_WGMMA_SHARED(96, type, 48, 48, 49, 50);  \
  FLASH_WGMMA_SHARED(112, type, 56, 56, 57, 58); \
  FLASH_WGMMA_SHARED(128, type, 64, 64, 65, 66)
#define FLASH_WGMMA_ALL_REGISTERS(type)                           \
  FLASH_WGMMA_REGISTERS(64, type, 32, 32, 33, 34, 35, 36, 37);    \
  FLASH_WGMMA_REGISTERS(96, type, 48, 48, 49, 50, 51, 52, 53);    \
  FLASH_WGMMA_REGISTERS(128, type, 64, 64, 65, 66, 67, 68, 69);   \
  FLASH_WGMMA_REGISTERS(192, type, 96, 96, 97, 98, 99, 100, 101); \
  FLASH_WGMMA_REGISTERS(256, type, 128, 128, 129, 130, 131, 132, 133)

// d = (accumulate ? d : 0) + a · bᵀ: rows of both are in shared memory.
template <DataType kType, int kN, int kTiles>
__device__ __forceinline__ void wgmma_rows(float (&d)[kTiles][4], uint32_t a_place, uint32_t b_place, bool accumulate) {
  const uint64_t a = wgmma_operand(a_place), b = wgmma_operand(b_place);
  static_assert(kTiles * 8 == kN && (kN == 64 || kN == 96 || kN == 112 || kN == 128));
  if constexpr (kType == DataType::kBFloat16) {
    FLASH_WGMMA_ALL_SHARED("bf16");
  } else {
    FLASH_WGMMA_ALL_SHARED("f16");
  }
}

// d = (accumulate ? d : 0) + a · b: a is in registers, rows of b are what is summed over.
template <DataType kType, int kN, int kTiles>
__device__ __forceinline__ void wgmma_columns(float (&d)[kTiles][4], const uint32_t (&a)[4], uint32_t b_place,
                                              bool accumulate) {
  const uint64_t b = wgmma_operand(b_place);
  static_assert(kTiles * 8 == kN && (kN == 64 || kN == 96 || kN == 128 || kN == 192 || kN == 256));
  if constexpr (kType == DataType::kBFloat16) {
    FLASH_WGMMA_ALL_REGISTERS("bf16");
  } else {
    FLASH_WGMMA_ALL_REGISTERS("f16");
  }
}

#undef FLASH_WGMMA_ALL_REGISTERS
#undef FLASH_WGMMA_ALL_SHARED
#undef FLASH_WGMMA_REGISTERS
#undef FLASH_WGMMA_SHARED
#undef FLASH_D128
#undef FLASH_D96
#undef FLASH_D64
#undef FLASH_D56
#undef FLASH_D48
#undef FLASH_D32
#undef FLASH_D8
#undef FLASH_D4
#undef FLASH_R128
#undef FLASH_R96
#undef FLASH_R64
#undef FLASH_R56
#undef FLASH_R48
#undef FLASH_R32

// The registers that each thread of this warpgroup may use from here on.
template <int kRegisters>
__device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash::ptx
