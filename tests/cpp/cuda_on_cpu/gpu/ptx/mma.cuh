// Fragments as the real file describes them; lanes show theirs to each other between two barriers of their warp.
#pragma once

#include "gpu/ptx/copy.cuh"
#include "gpu/ptx/math.cuh"

namespace flash::ptx {

inline uint32_t shown_a[cuda_on_cpu::kMostThreads][4], shown_b[cuda_on_cpu::kMostThreads][2];
inline uint32_t shown_address[cuda_on_cpu::kMostThreads];

template <DataType kType, int kDepth>
void multiply_shown(float (&d)[4]) {
  __syncwarp();
  const unsigned first = cuda_on_cpu::warp_begin(), lane = cuda_on_cpu::lane();
  const auto element = [](uint32_t pair, int k) { return unpack_low<kType>(k % 2 == 0 ? pair & 0xFFFFu : pair >> 16); };
  for (int c = 0; c < 4; ++c) {
    const unsigned row = lane / 4 + 8 * (c / 2), column = 2 * (lane % 4) + c % 2;
    for (int k = 0; k < kDepth; ++k) {
      const unsigned place = k % 8 / 2, half = k / 8;
      const uint32_t a = shown_a[first + row % 8 * 4 + place][row / 8 + 2 * half];
      d[c] += element(a, k) * element(shown_b[first + column * 4 + place][half], k);
    }
  }
  __syncwarp();
}

template <DataType kType>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
  std::copy(c, c + 4, d);
  std::copy(a, a + 4, shown_a[threadIdx.x]);
  shown_b[threadIdx.x][0] = b0, shown_b[threadIdx.x][1] = b1;
  multiply_shown<kType, 16>(d);
}

inline void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  shown_a[threadIdx.x][0] = a0, shown_a[threadIdx.x][1] = a1;
  shown_b[threadIdx.x][0] = b0;
  multiply_shown<DataType::kFloat16, 8>(d);
}

// Element (row, column) of matrix m, whose rows lie where eight lanes say.
inline uint16_t shown_element(int m, unsigned row, unsigned column) {
  return load_shared<uint16_t>(shown_address[cuda_on_cpu::warp_begin() + 8 * m + row] + 2 * column);
}

template <bool kTransposed>
void ldmatrix(uint32_t (&x)[4], uint32_t address) {
  shown_address[threadIdx.x] = address;
  __syncwarp();
  const unsigned row = cuda_on_cpu::lane() / 4, column = cuda_on_cpu::lane() % 4 * 2;
  for (int m = 0; m < 4; ++m) {
    const auto element = [&](unsigned c) {
      return static_cast<uint32_t>(kTransposed ? shown_element(m, c, row) : shown_element(m, row, c));
    };
    x[m] = element(column) | element(column + 1) << 16;
  }
  __syncwarp();
}
inline void ldmatrix_x4(uint32_t (&x)[4], uint32_t address) { ldmatrix<false>(x, address); }
inline void ldmatrix_x4_trans(uint32_t (&x)[4], uint32_t address) { ldmatrix<true>(x, address); }

}  // namespace flash::ptx
