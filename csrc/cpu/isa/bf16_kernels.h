// The bf16 micro-kernels, written once over the instructions that multiply blocks: what packs, exponentiates and converts
// around the products. The rules of vector_kernels.h: internal linkage, no library function.
//
// The instructions are a class Products with
//   static void begin(), end();  // before and after a thread's work
//   // kRows × kPanels blocks of C, at most 2 × 2, the whole depth
//   template <int kRows, int kPanels> static void multiply(const Blocks&, bool accumulate);
#pragma once

#include <immintrin.h>

#include "cpu/micro_kernels.h"

namespace flash::cpu {
namespace {

template <class Products>
uint32_t begin() {
  Products::begin();
  // vdpbf16ps, tdpbf16ps and vcvtneps2bf16 take subnormal numbers for 0 anyway: the vector units shall not be slow for
  // their sake.
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON);
  return before;
}

template <class Products>
void end(uint32_t before) {
  _mm_setcsr(before);
  Products::end();
}

// ---- Products -------------------------------------------------------------------------------------------------------

// Where some blocks of C and their operands begin.
struct Blocks {
  const Bf16* a;
  int64_t a_row_stride;
  const Bf16* b;
  int64_t b_panel_stride;
  int64_t depth_blocks;
  float* c;
  int64_t c_panel_stride;
};

template <class Products, int kPanels>
inline __attribute__((always_inline)) void multiply_panels(const Bf16Product& p, int64_t panel) {
  Blocks blocks{p.a,
                p.a_row_stride,
                p.b + panel * p.b_panel_stride,
                p.b_panel_stride,
                p.depth_blocks,
                p.c + panel * p.c_panel_stride,
                p.c_panel_stride};
  int64_t row = 0;
  for (; row + 2 <= p.row_blocks; row += 2, blocks.a += 2 * p.a_row_stride, blocks.c += 2 * 256)
    Products::template multiply<2, kPanels>(blocks, p.accumulate);
  if (row < p.row_blocks) Products::template multiply<1, kPanels>(blocks, p.accumulate);
}

template <class Products>
void multiply(const Bf16Product& p) {
  int64_t panel = 0;
  for (; panel + 2 <= p.panels; panel += 2) multiply_panels<Products, 2>(p, panel);
  if (panel < p.panels) multiply_panels<Products, 1>(p, panel);
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

// 16 rows × 32 elements at a time: blocks of A as they are, transposed, of B of X^T.
template <bool kTransposed>
void pack_rows(const Bf16Rows& x, Bf16* out) {
  const Source source{x};
  for (int64_t row = 0; row < x.rows; row += 16)
    for (int64_t d = 0; d < x.dim; d += 32, out += kBlock) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = source.load32(row + i, d);
      if constexpr (kTransposed) transpose(r);
      store_block(r, out);
    }
}

// 16 pairs of rows × 16 elements: blocks of B as they are, transposed, of A of X^T.
template <bool kTransposed>
void pack_pairs(const Bf16Rows& x, Bf16* out) {
  const Source source{x};
  for (int64_t d = 0; d < x.dim; d += 16)
    for (int64_t row = 0; row < x.rows; row += 32, out += kBlock) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = source.pair(row + 2 * i, d);
      if constexpr (kTransposed) transpose(r);
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

// 2^x to 1e-7, for the LSE is fp32; exactly 1 at 0, 0 for -inf, NaN for NaN. vreduceps gives 0 for ±inf, and vscalefps
// takes floor(x) itself.
inline __m512 exponential2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  // 2^f on [0, 1): degree 5, least relative error with exactly 1 at 0.
  __m512 p = _mm512_set1_ps(1.86713008e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.0170303e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.57999131e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4016445e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93151312e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

// 2^(score · scale · log2 e - reference · log2 e - more), lane by lane.
struct Exponent {
  static constexpr float kLog2E = 1.4426950408889634f;

  __m512 scale, reference, more;
  __m512 scale2, shift2;  // of the short form score · scale2 - shift2
  __mmask16 far;          // lanes in which shift2 is so large that its own rounding would show

  Exponent() = default;
  Exponent(float factor, __m512 subtracted, __m512 also)
      : scale(_mm512_set1_ps(factor)), reference(subtracted), more(also) {
    constexpr float kFar = 1 << 20;
    scale2 = _mm512_set1_ps(factor * kLog2E);
    shift2 = _mm512_fmadd_ps(reference, _mm512_set1_ps(kLog2E), more);
    far = _mm512_cmp_ps_mask(_mm512_abs_ps(reference), _mm512_set1_ps(kFar), _CMP_GE_OQ);
  }

  inline __attribute__((always_inline)) __m512 power(__m512 scores) const {
    const __m512 near = _mm512_fmsub_ps(scores, scale2, shift2);
    return exponential2(__builtin_expect(far == 0, 1) ? near : _mm512_mask_mov_ps(near, far, exact(scores)));
  }

  // The largest score of a row, of which the reference was made, gives 0: its product must be rounded as it was there,
  // which the compiler would not do if it saw the difference.
  __attribute__((noinline)) __m512 exact(__m512 scores) const {
    __m512 logits = _mm512_mul_ps(scores, scale);
    asm("" : "+v"(logits));
    return _mm512_fmsub_ps(_mm512_sub_ps(logits, reference), _mm512_set1_ps(kLog2E), more);
  }
};

// Two rows of 16 lanes as pairs.
inline __m512i pairs(__m512 first, __m512 second) {
  return _mm512_permutexvar_epi16(Source::interleave(), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

inline __m512 nothing_seen() { return _mm512_set1_ps(-__builtin_inff()); }

// The largest of `keys` scores per lane.
inline __m512 largest(const float* scores, int64_t keys) {
  __m512 most[4] = {nothing_seen(), nothing_seen(), nothing_seen(), nothing_seen()};
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4)
    for (int n = 0; n < 4; ++n) most[n] = _mm512_max_ps(most[n], _mm512_load_ps(scores + (j + n) * kLanes));
  for (; j < keys; ++j) most[0] = _mm512_max_ps(most[0], _mm512_load_ps(scores + j * kLanes));
  return _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
}

// The running softmax of one panel, with a lazy reference: a row keeps the reference that it has, at first the maximum
// of its first kFirstKeys, and takes the true maximum only where the sum of its weights shows that the reference lies
// far below. A row's result depends on nothing but the row.
struct Weigher {
  static constexpr int64_t kFirstKeys = 32;
  static constexpr float kMost = 4096;  // of the sum of a tile's weights: O shall not overflow sooner than it must

  float scale;  // from scores to logits
  __m512 reference;
  __m512 sums[2];
  Exponent exponent;

  // With the reference so far (-inf: none), and the first `keys` scores.
  void begin(float to_logits, const float* row_max, const float* scores, int64_t keys) {
    scale = to_logits;
    const __m512 before = _mm512_loadu_ps(row_max);
    const __mmask16 is_new = is_nothing(before);
    refer_to(is_new == 0 ? before
                         : _mm512_mask_mul_ps(before, is_new, largest(scores, keys < kFirstKeys ? keys : kFirstKeys),
                                              _mm512_set1_ps(scale)));
  }

  static __mmask16 is_nothing(__m512 x) { return _mm512_cmp_ps_mask(x, nothing_seen(), _CMP_EQ_OQ); }

  // A row that has seen nothing keeps -inf as its reference and subtracts 0.
  static __m512 subtracted(__m512 reference) {
    return _mm512_mask_mov_ps(reference, is_nothing(reference), _mm512_setzero_ps());
  }

  void refer_to(__m512 to) {
    reference = to;
    exponent = Exponent(scale, subtracted(to), _mm512_setzero_ps());
    sums[0] = sums[1] = _mm512_setzero_ps();
  }

  inline __attribute__((always_inline)) __m512 weight(const float* scores) const {
    return exponent.power(_mm512_load_ps(scores));
  }

  // Weights of `keys` scores as B, padded with zeros to a block.
  inline __attribute__((always_inline)) void weigh(const float* scores, int64_t keys, Bf16* weights) {
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
      const __m512 p0 = weight(scores + j * kLanes), p1 = weight(scores + (j + 1) * kLanes);
      sums[0] = _mm512_add_ps(sums[0], p0);
      sums[1] = _mm512_add_ps(sums[1], p1);
      _mm512_store_si512(weights + j * kLanes, pairs(p0, p1));
    }
    if (j < keys) {
      const __m512 p = weight(scores + j * kLanes);
      sums[0] = _mm512_add_ps(sums[0], p);
      _mm512_store_si512(weights + j * kLanes, pairs(p, _mm512_setzero_ps()));
      j += 2;
    }
    for (const int64_t padded = divide_up(keys, 32) * 32; j < padded; j += 2)
      _mm512_store_si512(weights + j * kLanes, _mm512_setzero_si512());
  }

  __m512 sum() const { return _mm512_add_ps(sums[0], sums[1]); }

  // Rows whose reference does not do.
  __mmask16 failed() const {
    return is_nothing(reference) | _mm512_cmp_ps_mask(sum(), _mm512_set1_ps(kMost), _CMP_NLE_UQ);
  }
};

bool softmax_step(const SoftmaxStep<float>& t, float scale, Bf16* weights) {
  const __m512 before = _mm512_loadu_ps(t.row_max);
  Weigher weigher;
  weigher.begin(scale, t.row_max, t.scores, t.keys);
  weigher.weigh(t.scores, t.keys, weights);
  if (const __mmask16 failed = weigher.failed()) {
    const __m512 most = _mm512_mul_ps(largest(t.scores, t.keys), _mm512_set1_ps(scale));
    weigher.refer_to(_mm512_mask_max_ps(weigher.reference, failed, before, most));
    weigher.weigh(t.scores, t.keys, weights);
  }
  const __m512 rescale = Exponent(1, Weigher::subtracted(weigher.reference), _mm512_setzero_ps()).power(before);
  _mm512_storeu_ps(t.row_max, weigher.reference);
  _mm512_storeu_ps(t.row_sum, _mm512_fmadd_ps(_mm512_loadu_ps(t.row_sum), rescale, weigher.sum()));
  _mm512_storeu_ps(t.rescale, rescale);
  return _mm512_cmp_ps_mask(rescale, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0;
}

// Scores of some keys at a time go no further than the first cache; the next product is issued before the exponentials
// of the last, which need other ports.
template <class Products, int kPanels>
inline __attribute__((always_inline)) bool weigh_panels(const Bf16Weights& t) {
  constexpr int64_t kStep = 64, kPanel = kStep * kLanes;
  alignas(64) float scores[2][kPanels * kPanel];
  Blocks blocks{t.k, t.k_row_stride, t.q, t.q_panel_stride, t.depth_blocks, nullptr, kPanel};
  const auto step_from = [&](int64_t key) { return t.keys - key < kStep ? t.keys - key : kStep; };
  const auto multiply_step = [&](int64_t key) {
    blocks.c = scores[key / kStep % 2];
    for (int64_t end = key + step_from(key); key < end; key += 32, blocks.a += 2 * t.k_row_stride, blocks.c += kBlock)
      Products::template multiply<2, kPanels>(blocks, false);
  };
  const auto adjust_step = [&](int64_t key) {
    if (t.adjust == nullptr) return;
    for (int panel = 0; panel < kPanels; ++panel)
      t.adjust(t.context, {panel, key, step_from(key)}, scores[key / kStep % 2] + panel * kPanel);
  };
  multiply_step(0);
  adjust_step(0);
  Weigher weighers[kPanels];
  for (int panel = 0; panel < kPanels; ++panel)
    weighers[panel].begin(t.scale, t.row_max + panel * kLanes, scores[0] + panel * kPanel, t.keys);
  for (int64_t key = 0; key < t.keys; key += kStep) {
    if (key + kStep < t.keys) multiply_step(key + kStep);
    if (key > 0) adjust_step(key);
    for (int panel = 0; panel < kPanels; ++panel)
      weighers[panel].weigh(scores[key / kStep % 2] + panel * kPanel, step_from(key),
                            t.weights + panel * t.weights_panel_stride + key * kLanes);
  }
  for (const Weigher& weigher : weighers)
    if (weigher.failed() != 0) return false;
  for (int panel = 0; panel < kPanels; ++panel) {
    const __m512 before = _mm512_loadu_ps(t.row_sum + panel * kLanes);
    _mm512_storeu_ps(t.row_max + panel * kLanes, weighers[panel].reference);
    _mm512_storeu_ps(t.row_sum + panel * kLanes, _mm512_add_ps(before, weighers[panel].sum()));
  }
  return true;
}

template <class Products>
bool scores_to_weights(const Bf16Weights& t) {
  return t.panels == 2 ? weigh_panels<Products, 2>(t) : weigh_panels<Products, 1>(t);
}

void drop(const uint8_t* keep, int64_t keys, Bf16* weights) {
  const __m128i zero = _mm_setzero_si128();
  for (int64_t j = 0; j < keys; j += 2, keep += 2 * kLanes, weights += 2 * kLanes) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keep));
    const __m128i second = j + 1 < keys ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(keep + kLanes)) : zero;
    const __m256i flags = _mm256_set_m128i(_mm_unpackhi_epi8(first, second), _mm_unpacklo_epi8(first, second));
    const __mmask32 kept = _mm256_test_epi8_mask(flags, flags);
    _mm512_store_si512(weights, _mm512_maskz_loadu_epi16(kept, weights));
  }
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
  const __m512 keep_scale = _mm512_set1_ps(t.keep_scale), delta = _mm512_loadu_ps(t.delta);
  // log2_sum is +inf for a row that sees nothing.
  const Exponent exponent(scale, _mm512_loadu_ps(t.reference), _mm512_loadu_ps(t.log2_sum));
  store_operands(g, t.keys, [&](int64_t key, __m512& p, __m512& ds) {
    const __m512 s = _mm512_load_ps(t.scores + key * kLanes), dp = _mm512_load_ps(t.gradients + key * kLanes);
    p = exponent.power(s);
    const __mmask16 counts = _mm512_cmp_ps_mask(p, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    ds = _mm512_maskz_mul_ps(counts, p, _mm512_fmsub_ps(dp, keep_scale, delta));
  });
}

void store_gradients(int64_t keys, const float* p, const float* ds, const Bf16Gradients& g) {
  store_operands(g, keys, [&](int64_t key, __m512& p_row, __m512& ds_row) {
    if (p == nullptr) return;
    p_row = _mm512_load_ps(p + key * kLanes);
    ds_row = _mm512_load_ps(ds + key * kLanes);
  });
}

// Everything of one instruction set.
template <class Products>
constexpr Bf16Kernels make_bf16_kernels(const char* name) {
  return {name,
          begin<Products>,
          end<Products>,
          multiply<Products>,
          pack_rows<false>,
          pack_pairs<true>,
          pack_rows<true>,
          pack_pairs<false>,
          unpack_lanes,
          unpack_rows,
          softmax_step,
          scores_to_weights<Products>,
          gradient_step,
          drop,
          store_gradients};
}

}  // namespace
}  // namespace flash::cpu
