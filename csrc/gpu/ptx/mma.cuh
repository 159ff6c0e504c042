// Matrix products of a warp: D (16 × 8, fp32) += A (16 × 16) · B (16 × 8), and how fragments get into registers.
//
// With l = lane % 4 and r = lane / 4 a thread owns
//   D   d[0], d[1]: row r, columns 2l, 2l + 1;  d[2], d[3]: row r + 8
//   A   a[0]: row r, k 2l, 2l + 1;  a[1]: row r + 8;  a[2], a[3]: the same, k + 8
//   B   b[0]: k 2l, 2l + 1 of column r;  b[1]: k + 8
// Two neighbouring D tiles, packed to 16 bits, are therefore an A fragment: P never leaves the registers.
#pragma once

#include <cstdint>

#include "common/kernel_key.h"

namespace flash::ptx {

// d = c + a · b over k = 16; c may be d. sm_80.
template <DataType kType>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             const float (&c)[4]) {
  if constexpr (kType == DataType::kBFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
}

// d += a · b over k = 8, fp16. sm_75.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// Four 8 × 8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8; x[m] receives the
// elements 2l, 2l + 1 of row r of matrix m.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&x)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&x)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

}  // namespace flash::ptx
