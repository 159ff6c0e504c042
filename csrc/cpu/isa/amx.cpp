// bf16 products on AMX tiles (Sapphire Rapids and newer).
#include "cpu/isa/bf16_kernels.h"
#include "cpu/isa/isa.h"

namespace flash::cpu::isa {
namespace {

struct TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);

struct Tiles {
  // Inline assembly, because GCC 12's _tile_loadconfig says that it reads 8 bytes, and the rest is optimised away.
  static void begin() {
    alignas(64) const TileConfiguration configuration;
    asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
  }
  static void end() { _tile_release(); }

  // Accumulators in tiles 0 to 3, A in 4 and 5, B in 6 and 7.
  template <int kRows, int kPanels>
  static inline __attribute__((always_inline)) void multiply(const Blocks& p, bool accumulate) {
    const Bf16 *a1 = p.a + p.a_row_stride, *b1 = p.b + p.b_panel_stride;
    float *c0 = p.c, *c1 = p.c + p.c_panel_stride;
    asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
    if (accumulate) {
      _tile_loadd(0, c0, 64);
      if constexpr (kPanels > 1) _tile_loadd(1, c1, 64);
      if constexpr (kRows > 1) _tile_loadd(2, c0 + 256, 64);
      if constexpr (kRows > 1 && kPanels > 1) _tile_loadd(3, c1 + 256, 64);
    } else {
      _tile_zero(0);
      if constexpr (kPanels > 1) _tile_zero(1);
      if constexpr (kRows > 1) _tile_zero(2);
      if constexpr (kRows > 1 && kPanels > 1) _tile_zero(3);
    }
    for (int64_t k = 0; k < p.depth_blocks; ++k) {
      _tile_loadd(4, p.a + k * kBlock, 64);
      _tile_loadd(6, p.b + k * kBlock, 64);
      if constexpr (kPanels > 1) _tile_loadd(7, b1 + k * kBlock, 64);
      if constexpr (kRows > 1) _tile_loadd(5, a1 + k * kBlock, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kPanels > 1) _tile_dpbf16ps(1, 4, 7);
      if constexpr (kRows > 1) _tile_dpbf16ps(2, 5, 6);
      if constexpr (kRows > 1 && kPanels > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c0, 64);
    if constexpr (kPanels > 1) _tile_stored(1, c1, 64);
    if constexpr (kRows > 1) _tile_stored(2, c0 + 256, 64);
    if constexpr (kRows > 1 && kPanels > 1) _tile_stored(3, c1 + 256, 64);
    asm volatile("" ::: "memory");
  }
};

}  // namespace

const Bf16Kernels amx_bf16 = make_bf16_kernels<Tiles>("amx");

}  // namespace flash::cpu::isa
