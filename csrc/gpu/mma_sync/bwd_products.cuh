// Matrix products of the backward with mma.sync, whose operands all come from shared memory.
#pragma once

#include "gpu/mma_sync/bwd_work.cuh"
#include "gpu/mma_sync/products.cuh"

namespace flash::mma_sync {

// What D starts from where it starts from nothing.
struct Zeros {
  float zeros[4] = {};
  __device__ __forceinline__ const float (&operator()(int, int) const)[4] { return zeros; }
};

// D = C + A · B, whose fragments come from load_a(fragment, m16, k16) and load_b(fragment, n16, k16). Fragments of B are
// read one ahead of the products that use them, those of A after their last use. `beside(step)` is other work that has
// its turn after each block's products: the tensor cores are busy for longer than it takes to ask them. `c(m8, n8)`: D
// itself, or what D is to start from.
template <KernelKey kKey, int kDepth, int kM, int kN, class C, class LoadA, class LoadB, class Beside>
__device__ __forceinline__ void add_product(float (&d)[kM][kN][4], const C& c, const LoadA& load_a, const LoadB& load_b,
                                            const Beside& beside) {
  constexpr int kBlocks = kN / 2;
  uint32_t a[kM][4], b[2][4];
  load_b(b[0], 0, 0);
#pragma unroll
  for (int m = 0; m < kM; ++m) load_a(a[m], m, 0);
#pragma unroll
  for (int depth = 0; depth < kDepth; ++depth)
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int step = depth * kBlocks + block, next = step + 1;
      if (next < kDepth * kBlocks) load_b(b[next % 2], next % kBlocks, next / kBlocks);
      const uint32_t (&now)[4] = b[step % 2];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int n = 2 * block + half;
          if (depth == 0)
            multiply<kKey>(d[m][n], a[m], now[2 * half], now[2 * half + 1], c(m, n));
          else
            multiply<kKey>(d[m][n], a[m], now[2 * half], now[2 * half + 1]);
        }
        if (block + 1 == kBlocks && depth + 1 < kDepth) load_a(a[m], m, depth + 1);
      }
      beside(step);
    }
}

}  // namespace flash::mma_sync
