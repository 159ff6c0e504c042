// bf16 products on AMX tiles (Sapphire Rapids and newer), and what packs, exponentiates and converts around them.
#include <immintrin.h>

#include "cpu/isa/isa.h"

namespace flash::cpu::isa {
namespace {

struct TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);

// Inline assembly, because GCC 12's _tile_loadconfig says that it reads 8 bytes, and the rest is optimised away.
void begin() {
  alignas(64) const TileConfiguration configuration;
  asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
}

void end() { _tile_release(); }

// ---- Products -------------------------------------------------------------------------------------------------------

// kRows × kPanels blocks of C, the whole depth: accumulators in tiles 0 to 3, A in 4 and 5, B in 6 and 7.
template <int kRows, int kPanels>
inline __attribute__((always_inline)) void multiply_blocks(const Bf16Product& p, int64_t row_block, int64_t panel) {
  const Bf16* a0 = p.a + row_block * p.a_row_stride;
  const Bf16* a1 = a0 + p.a_row_stride;
  const Bf16* b0 = p.b + panel * p.b_panel_stride;
  const Bf16* b1 = b0 + p.b_panel_stride;
  float* c0 = p.c + panel * p.c_panel_stride + row_block * 256;
  float* c1 = c0 + p.c_panel_stride;
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
  if (p.accumulate) {
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
    _tile_loadd(4, a0 + k * kBlock, 64);
    _tile_loadd(6, b0 + k * kBlock, 64);
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
}

void multiply(const Bf16Product& p) {
  int64_t panel = 0;
  for (; panel + 2 <= p.panels; panel += 2) {
    int64_t row = 0;
    for (; row + 2 <= p.row_blocks; row += 2) multiply_blocks<2, 2>(p, row, panel);
    if (row < p.row_blocks) multiply_blocks<1, 2>(p, row, panel);
  }
  if (panel == p.panels) return;
  int64_t row = 0;
  for (; row + 2 <= p.row_blocks; row += 2) multiply_blocks<2, 1>(p, row, panel);
  if (row < p.row_blocks) multiply_blocks<1, 1>(p, row, panel);
}

// ---- Packing --------------------------------------------------------------------------------------------------------

// Elements [first, first + count of the mask) of row `row`, zero where the row or the element is not there.
struct Source {
  const Bf16Rows& x;

  __mmask32 mask(int64_t first) const {
    const int64_t left = x.dim - first;
    return left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
  }
  const Bf16* row(int64_t row, int64_t first) const { return x.data + row * x.stride + first; }
  bool has(int64_t row) const { return x.first <= row && row < x.end; }

  __m512i load32(int64_t r, int64_t first) const {
    return has(r) ? _mm512_maskz_loadu_epi16(mask(first), row(r, first)) : _mm512_setzero_si512();
  }
  __m256i load16(int64_t r, int64_t first) const {
    const __mmask16 some = static_cast<__mmask16>(mask(first));
    return has(r) ? _mm256_maskz_loadu_epi16(some, row(r, first)) : _mm256_setzero_si256();
  }
  // 16 elements of two rows, interleaved: what one 32-bit lane of an operand pairs up.
  __m512i pair(int64_t r, int64_t first) const {
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load16(r, first)), load16(r + 1, first), 1);
    return _mm512_permutexvar_epi16(interleave(), both);
  }
  static __m512i interleave() {
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_load_si512(kOrder);
  }
};

// Transposes 16 × 16 words of 32 bits.
inline __attribute__((always_inline)) void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

void store_block(const __m512i (&r)[16], Bf16* out) {
  for (int i = 0; i < 16; ++i) _mm512_store_si512(out + 32 * i, r[i]);
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void pack_a_rows(const Bf16Rows& x, Bf16* out) {
  const Source source{x};
  for (int64_t row = 0; row < x.rows; row += 16)
    for (int64_t d = 0; d < x.dim; d += 32, out += kBlock) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = source.load32(row + i, d);
      store_block(r, out);
    }
}

void pack_a_columns(const Bf16Rows& x, Bf16* out) {
  const Source source{x};
  for (int64_t d = 0; d < x.dim; d += 16)
    for (int64_t row = 0; row < x.rows; row += 32, out += kBlock) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = source.pair(row + 2 * i, d);
      transpose(r);
      store_block(r, out);
    }
}

void pack_b_columns(const Bf16Rows& x, Bf16* out) {
  const Source source{x};
  for (int64_t row = 0; row < x.rows; row += 16)
    for (int64_t d = 0; d < x.dim; d += 32, out += kBlock) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = source.load32(row + i, d);
      transpose(r);
      store_block(r, out);
    }
}

void pack_b_rows(const Bf16Rows& x, Bf16* out) {
  const Source source{x};
  for (int64_t d = 0; d < x.dim; d += 16)
    for (int64_t row = 0; row < x.rows; row += 32, out += kBlock) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = source.pair(row + 2 * i, d);
      store_block(r, out);
    }
}

void store_some(Bf16* out, __m512 x, int64_t count) {
  const auto some = static_cast<__mmask16>(count >= 16 ? 0xFFFF : (1 << count) - 1);
  _mm256_mask_storeu_epi16(out, some, (__m256i)_mm512_cvtneps_pbh(x));
}

void unpack_lanes(const float* x, const float* factor, int64_t rows, int64_t dim, Bf16* out, int64_t stride) {
  const __m512 factors = _mm512_loadu_ps(factor);
  const __mmask16 nonzero = _mm512_cmp_ps_mask(factors, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  for (int64_t d = 0; d < dim; d += 16) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i)
      r[i] = d + i < dim ? (__m512i)_mm512_maskz_mul_ps(nonzero, _mm512_load_ps(x + (d + i) * kLanes), factors)
                         : _mm512_setzero_si512();
    transpose(r);
    for (int lane = 0; lane < 16; ++lane)
      if (lane < rows) store_some(out + lane * stride + d, (__m512)r[lane], dim - d);
  }
}

void unpack_rows(const float* x, int64_t panel_stride, float factor, int64_t rows, int64_t dim, Bf16* out,
                 int64_t stride) {
  const __m512 factors = _mm512_set1_ps(factor);
  const __mmask16 nonzero = factor == 0 ? 0 : 0xFFFF;
  for (int64_t d = 0; d < dim; d += 16, x += panel_stride)
    for (int64_t row = 0; row < rows; ++row)
      store_some(out + row * stride + d, _mm512_maskz_mul_ps(nonzero, _mm512_load_ps(x + row * kLanes), factors),
                 dim - d);
}

// ---- Softmax --------------------------------------------------------------------------------------------------------

// e^x to 2e-7, for the LSE is fp32; 0 for -inf, NaN for NaN.
inline __m512 exponential(__m512 x) {
  const __m512 t = _mm512_max_ps(_mm512_set1_ps(-200.0f), _mm512_mul_ps(x, _mm512_set1_ps(1.4426950408889634f)));
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(t, n);
  // 2^f on [-1/2, 1/2]: degree 5, least relative error with exactly 1 at 0.
  __m512 p = _mm512_set1_ps(1.3264727e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.671513e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5507336e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022242e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// Two rows of 16 lanes as pairs.
inline __m512i pairs(__m512 first, __m512 second) {
  return _mm512_permutexvar_epi16(Source::interleave(), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

bool softmax_step(const SoftmaxStep<float>& t, float scale, Bf16* weights) {
  const __m512 before = _mm512_loadu_ps(t.row_max), factor = _mm512_set1_ps(scale);
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  __m512 most[4] = {nothing, nothing, nothing, nothing};
  int64_t j = 0;
  for (; j + 4 <= t.keys; j += 4)
    for (int n = 0; n < 4; ++n) most[n] = _mm512_max_ps(most[n], _mm512_load_ps(t.scores + (j + n) * kLanes));
  for (; j < t.keys; ++j) most[0] = _mm512_max_ps(most[0], _mm512_load_ps(t.scores + j * kLanes));
  const __m512 seen = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
  const __m512 after = _mm512_max_ps(before, _mm512_mul_ps(seen, factor));
  // A row that has seen nothing keeps -inf as its maximum and subtracts 0.
  const __m512 reference =
      _mm512_mask_mov_ps(after, _mm512_cmp_ps_mask(after, nothing, _CMP_EQ_OQ), _mm512_setzero_ps());
  __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  const auto weight = [&](int64_t key) {
    return exponential(_mm512_fmsub_ps(_mm512_load_ps(t.scores + key * kLanes), factor, reference));
  };
  for (j = 0; j + 2 <= t.keys; j += 2) {
    const __m512 p0 = weight(j), p1 = weight(j + 1);
    sums[0] = _mm512_add_ps(sums[0], p0);
    sums[1] = _mm512_add_ps(sums[1], p1);
    _mm512_store_si512(weights + j * kLanes, pairs(p0, p1));
  }
  if (j < t.keys) {
    const __m512 p = weight(j);
    sums[0] = _mm512_add_ps(sums[0], p);
    _mm512_store_si512(weights + j * kLanes, pairs(p, _mm512_setzero_ps()));
    j += 2;
  }
  for (const int64_t padded = divide_up(t.keys, 32) * 32; j < padded; j += 2)
    _mm512_store_si512(weights + j * kLanes, _mm512_setzero_si512());
  const __m512 rescale = exponential(_mm512_sub_ps(before, reference));
  _mm512_storeu_ps(t.row_max, after);
  _mm512_storeu_ps(t.row_sum, _mm512_fmadd_ps(_mm512_loadu_ps(t.row_sum), rescale, _mm512_add_ps(sums[0], sums[1])));
  _mm512_storeu_ps(t.rescale, rescale);
  return _mm512_cmp_ps_mask(rescale, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0;
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// P and dS of a panel, key by key as `at(key)` gives them, to the three operands.
template <class At>
inline __attribute__((always_inline)) void store_operands(const Bf16Gradients& g, int64_t keys, const At& at) {
  const auto store_row = [&](int64_t key, __m512 p, __m512 ds) {
    const int64_t place = key / 16 * g.row_stride + key % 16 * 32;
    _mm256_store_si256(reinterpret_cast<__m256i*>(g.p_rows + place), (__m256i)_mm512_cvtneps_pbh(p));
    _mm256_store_si256(reinterpret_cast<__m256i*>(g.ds_rows + place), (__m256i)_mm512_cvtneps_pbh(ds));
  };
  const __m512 zero = _mm512_setzero_ps();
  const int64_t padded = divide_up(keys, 32) * 32;
  for (int64_t j = 0; j < padded; j += 2) {
    __m512 p[2] = {zero, zero}, ds[2] = {zero, zero};
    for (int n = 0; n < 2; ++n) {
      if (j + n < keys) at(j + n, p[n], ds[n]);
      store_row(j + n, p[n], ds[n]);
    }
    _mm512_store_si512(g.ds_pairs + j * kLanes, pairs(ds[0], ds[1]));
  }
}

void gradient_step(const GradientStep<float>& t, float scale, const Bf16Gradients& g) {
  const __m512 factor = _mm512_set1_ps(scale), keep_scale = _mm512_set1_ps(t.keep_scale);
  const __m512 delta = _mm512_loadu_ps(t.delta), reference = _mm512_loadu_ps(t.reference);
  // P = e^(S - R) · 2^-L, where 2^-L is 0 for a row that sees nothing.
  const __m512 log2_sum = _mm512_loadu_ps(t.log2_sum);
  const __m512 inverse_sum = exponential(_mm512_mul_ps(log2_sum, _mm512_set1_ps(-0.6931471805599453f)));
  store_operands(g, t.keys, [&](int64_t key, __m512& p, __m512& ds) {
    const __m512 s = _mm512_load_ps(t.scores + key * kLanes), dp = _mm512_load_ps(t.gradients + key * kLanes);
    p = _mm512_mul_ps(exponential(_mm512_fmsub_ps(s, factor, reference)), inverse_sum);
    ds = _mm512_mul_ps(p, _mm512_fmsub_ps(dp, keep_scale, delta));
  });
}

void store_gradients(int64_t keys, const float* p, const float* ds, const Bf16Gradients& g) {
  store_operands(g, keys, [&](int64_t key, __m512& p_row, __m512& ds_row) {
    if (p == nullptr) return;
    p_row = _mm512_load_ps(p + key * kLanes);
    ds_row = _mm512_load_ps(ds + key * kLanes);
  });
}

}  // namespace

const Bf16Kernels amx_bf16{"amx",          begin,       end,          multiply,    pack_a_rows,  pack_a_columns,
                           pack_b_columns, pack_b_rows, unpack_lanes, unpack_rows, softmax_step, gradient_step,
                           store_gradients};

}  // namespace flash::cpu::isa
