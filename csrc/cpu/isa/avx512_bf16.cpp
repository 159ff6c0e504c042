// bf16 products through vdpbf16ps: two products and a sum in each of 16 lanes. Worth it where it is as fast as an FMA, as
// on AMD's cores since Zen 4 (230 GFLOP/s of a core's 115 in fp32); Intel's without AMX reach half their fp32 rate.
#include "cpu/isa/bf16_kernels.h"
#include "cpu/isa/isa.h"

namespace flash::cpu::isa {
namespace {

struct Vectors {
  static constexpr int kStepRows = 8;  // with two panels 16 accumulators: its latency is 6

  static void begin() {}
  static void end() {}

  template <int kRows, int kPanels>
  static inline __attribute__((always_inline)) void multiply(const Blocks& p, bool accumulate) {
    for (int row = 0; row < kRows * 16; row += kStepRows) multiply_rows<kPanels>(p, row, accumulate);
  }

 private:
  // Rows of one block, the whole depth.
  template <int kPanels>
  static void multiply_rows(const Blocks& p, int row, bool accumulate) {
    const Bf16 *a = p.a + row / 16 * p.a_row_stride + row % 16 * 32, *b = p.b;
    const int64_t b_stride = p.b_panel_stride;  // local, or each step would read it again
    __m512 sums[kStepRows][kPanels];
    for (auto& row_sums : sums)
      for (__m512& sum : row_sums) sum = _mm512_setzero_ps();
    for (int64_t block = 0; block < p.depth_blocks; ++block, a += kBlock - 32)
      for (int pair = 0; pair < 16; ++pair, a += 2, b += 2 * kLanes) {
        __m512i lanes[kPanels];
        for (int panel = 0; panel < kPanels; ++panel) lanes[panel] = _mm512_load_si512(b + panel * b_stride);
        for (int r = 0; r < kStepRows; ++r) {
          int32_t two;
          __builtin_memcpy(&two, a + r * 32, sizeof(two));
          for (int panel = 0; panel < kPanels; ++panel)
            sums[r][panel] = _mm512_dpbf16_ps(sums[r][panel], (__m512bh)_mm512_set1_epi32(two), (__m512bh)lanes[panel]);
        }
      }
    float* c = p.c + row * kLanes;
    for (int panel = 0; panel < kPanels; ++panel, c += p.c_panel_stride)
      for (int r = 0; r < kStepRows; ++r) {
        const __m512 sum = sums[r][panel];
        _mm512_store_ps(c + r * kLanes, accumulate ? _mm512_add_ps(_mm512_load_ps(c + r * kLanes), sum) : sum);
      }
  }
};

}  // namespace

const Bf16Kernels avx512_bf16 = make_bf16_kernels<Vectors>("avx512_bf16");

}  // namespace flash::cpu::isa
