// The micro-kernels, written once over a vector type of kVectorBytes; each isa/*.cpp instantiates them under its own
// flags. All of it has internal linkage: inline code compiled for a newer instruction set and merged by the linker
// would crash older CPUs. For the same reason nothing here calls a library function.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/micro_kernels.h"

namespace flash::cpu {
namespace {

template <class Real>
struct Bits;
template <>
struct Bits<float> {
  using Int = int32_t;
  using Word = uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr int kMinExponent = -126, kMaxExponent = 127;
  static constexpr float kLowest = -87.33654f, kHighest = 88.37626f;  // ln 2^-126; less than ln 2^127.5: n stays 127
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr int kDegree = 7;
  static constexpr float kLargest = 3.40282347e38f;
  static constexpr float kTanhIsOne = 10;  // from here on tanh rounds to 1
  static constexpr float kRound =
      12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, which is left in the low bits
};
template <>
struct Bits<double> {
  using Int = int64_t;
  using Word = uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr int kMinExponent = -1022, kMaxExponent = 1023;
  static constexpr double kLowest = -708.39641853226408, kHighest = 709.43613930310391;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  static constexpr int kDegree = 13;
  static constexpr double kLargest = 1.7976931348623157e308;
  static constexpr double kTanhIsOne = 20;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 · 2^52
};

// kRows × kVectors accumulators fill the registers: see each instruction set's choice. A product sums over kSlice of
// its depth at a time.
template <class Real, int kVectorBytes, int kRows, int kVectors, int64_t kSlice>
struct Vectors {
  static constexpr int kWidth = kVectorBytes / sizeof(Real), kPanelVectors = kLanes / kWidth;
  static_assert(kLanes % kWidth == 0 && kSlice % kLanes == 0);
  using Int = typename Bits<Real>::Int;
  typedef Real Vector __attribute__((vector_size(kVectorBytes)));
  typedef Int Integers __attribute__((vector_size(kVectorBytes)));
  typedef typename Bits<Real>::Word Words
      __attribute__((vector_size(kVectorBytes)));  // wrap where Integers would overflow

  static constexpr Real kLog2E = Real(1.44269504088896340735992468100189214L);
  static constexpr Real kInfinity = Real(__builtin_inf());

  static Vector load(const Real* p) {
    Vector v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store(Real* p, Vector v) { std::memcpy(p, &v, sizeof(v)); }
  static Vector broadcast(Real x) { return x - Vector{}; }
  static Vector select(Integers condition, Vector a, Vector b) { return condition ? a : b; }
  static Vector maximum(Vector a, Vector b) { return select(a > b, a, b); }

  // x, within [low, high] or up to high + a little, or NaN.
  template <bool kAbove>
  static Vector clamp(Vector x, Real low, Real high) {
    const Vector raised = select(x < broadcast(low), broadcast(low), x);
    return kAbove ? select(raised > broadcast(high), broadcast(high), raised) : raised;
  }

  // p · 2^n for |log p| <= ln 2 / 2 + a little, where `shifted` = n + kRound and x is what the caller exponentiates, in
  // units in which `low` ... `high` are the ends of the normal range: 0 below it, +inf above it, NaN for NaN. Without
  // kAbove x is known not to lie above.
  template <bool kAbove>
  static Vector scale_by_power_of_2(Vector p, Vector shifted, Vector x, Real low, Real high) {
    const Vector scaled = (Vector)((Words)p + ((Words)shifted << Bits<Real>::kMantissa));
    const Vector finite = kAbove ? select(x > broadcast(high), broadcast(kInfinity), scaled) : scaled;
    return select(x == x, select(x < broadcast(low), Vector{}, finite), x);
  }

  // (e^r - 1) / r for |r| <= ln 2 / 2 by its Taylor series; the rest of that of e^r is below 1e-8 (fp32, degree 7) and
  // 1e-17 (fp64, degree 13).
  static Vector exp_series_less_one(Vector r) {
    double coefficient[Bits<Real>::kDegree + 1] = {1.0};  // 1 / k!
    for (int k = 1; k <= Bits<Real>::kDegree; ++k) coefficient[k] = coefficient[k - 1] / k;
    Vector p = broadcast(Real(coefficient[Bits<Real>::kDegree]));
    for (int k = Bits<Real>::kDegree - 1; k > 0; --k) p = p * r + broadcast(Real(coefficient[k]));
    return p;
  }
  static Vector exp_series(Vector r) { return exp_series_less_one(r) * r + broadcast(Real(1)); }

  // e^x, exactly 1 at 0. x = n · ln 2 + r, with ln 2 in two parts, so that r is exact however large x is: through 2^(x
  // · log2 e) the rounding of the product would cost |x| units in the last place.
  template <bool kAbove>
  static Vector exp(Vector x) {
    const Vector clamped = clamp<kAbove>(x, Bits<Real>::kLowest, Bits<Real>::kHighest);
    const Vector shifted = clamped * broadcast(kLog2E) + broadcast(Bits<Real>::kRound);
    const Vector n = shifted - broadcast(Bits<Real>::kRound);
    const Vector r = (clamped - n * broadcast(Bits<Real>::kLn2High)) - n * broadcast(Bits<Real>::kLn2Low);
    return scale_by_power_of_2<kAbove>(exp_series(r), shifted, x, Bits<Real>::kLowest, Bits<Real>::kHighest);
  }

  // 2^x, exact for whole numbers. For numbers of a row, not for elements.
  static Vector exp2(Vector x) {
    constexpr Real kMin = Bits<Real>::kMinExponent, kMax = Bits<Real>::kMaxExponent;
    const Vector clamped = clamp<true>(x, kMin, kMax);
    const Vector shifted = clamped + broadcast(Bits<Real>::kRound);
    const Vector f = clamped - (shifted - broadcast(Bits<Real>::kRound));
    return scale_by_power_of_2<true>(exp_series(f * broadcast(Real(0.693147180559945309417232121458176568L))), shifted,
                                     x, kMin, kMax);
  }

  // Where vector v, counted over all panels, lies in a row of a matrix with lanes.
  static int64_t offset(int64_t v, int64_t panel_stride) {
    return v / kPanelVectors * panel_stride + v % kPanelVectors * kWidth;
  }

  // kR rows × kV vectors of C stay in registers over the whole depth, or a slice of it.
  template <int kR, int kV>
  static inline __attribute__((always_inline)) void multiply_block(const Product<Real>& p, int64_t row,
                                                                   int64_t vector) {
    int64_t b_offset[kV];
    for (int v = 0; v < kV; ++v) b_offset[v] = offset(vector + v, p.b_panel_stride);
    // Local, or each step would read them again.
    const int64_t a_row = p.a.row_stride, a_depth = p.a.depth_stride, b_step = p.b_stride;
    const Real* a = p.a.data + row / kRows * p.a.block_stride;
    const Real* b = p.b;
    int64_t k = 0;
    do {
      Vector c[kR][kV] = {};
      for (const int64_t slice = smaller(p.depth, k + kSlice); k < slice; k += kLanes, a += p.a.panel_stride) {
        const Real* column = a;
        for (int64_t rest = smaller(slice - k, kLanes); rest > 0; --rest, column += a_depth, b += b_step) {
          Vector bv[kV];
          for (int v = 0; v < kV; ++v) bv[v] = load(b + b_offset[v]);
          for (int r = 0; r < kR; ++r) {
            const Vector av = broadcast(column[r * a_row]);
            for (int v = 0; v < kV; ++v) c[r][v] += av * bv[v];
          }
        }
      }
      // The sum of a slice is added to C as a whole: rounding grows with the number of slices, not with the depth.
      const bool accumulate = p.accumulate || k > kSlice;
      const Vector factor = broadcast(k < p.depth ? Real(1) : p.factor);
      for (int v = 0; v < kV; ++v) {
        Real* out = p.c + row * p.c_stride + offset(vector + v, p.c_panel_stride);
        for (int r = 0; r < kR; ++r, out += p.c_stride)
          store(out, factor * (accumulate ? load(out) + c[r][v] : c[r][v]));
      }
    } while (k < p.depth);
  }

  static constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

  // All rows of kV vectors: what they need of B stays in the first cache while A passes by.
  template <int kV>
  static inline __attribute__((always_inline)) void multiply_vectors(const Product<Real>& p, int64_t vector) {
    static_assert(kRows == kRowBlock && kRows == 6, "the switch below covers what is left of 6 rows");
    int64_t row = 0;
    for (; row + kRows <= p.rows; row += kRows) multiply_block<kRows, kV>(p, row, vector);
    switch (p.rows - row) {
      case 5:
        return multiply_block<5, kV>(p, row, vector);
      case 4:
        return multiply_block<4, kV>(p, row, vector);
      case 3:
        return multiply_block<3, kV>(p, row, vector);
      case 2:
        return multiply_block<2, kV>(p, row, vector);
      case 1:
        return multiply_block<1, kV>(p, row, vector);
    }
  }

  static void multiply(const Product<Real>& p) {
    const int64_t vectors = p.panels * kPanelVectors;
    int64_t v = 0;
    for (; v + kVectors <= vectors; v += kVectors) multiply_vectors<kVectors>(p, v);
    if constexpr (kVectors > kPanelVectors)
      for (; v < vectors; ++v) multiply_vectors<1>(p, v);
  }

  static bool softmax_step(const SoftmaxStep<Real>& t) {
    Integers moved = {};
    for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
      Real* scores = t.scores + lane;
      const Vector before = load(t.row_max + lane);
      // Four maxima and sums side by side: the next one need not wait for the last.
      Vector most[4] = {before, before, before, before};
      int64_t j = 0;
      for (; j + 4 <= t.keys; j += 4)
        for (int n = 0; n < 4; ++n) most[n] = maximum(most[n], load(scores + (j + n) * kLanes));
      for (; j < t.keys; ++j) most[0] = maximum(most[0], load(scores + j * kLanes));
      const Vector after = maximum(maximum(most[0], most[1]), maximum(most[2], most[3]));
      // A row that has seen nothing keeps -inf as its maximum and subtracts 0: exp(-inf) = 0, not NaN.
      const Vector reference = select(after == broadcast(-kInfinity), Vector{}, after);
      const auto exponentiate = [&](int64_t key) {
        const Vector p = exp<false>(load(scores + key * kLanes) - reference);
        store(scores + key * kLanes, p);
        return p;
      };
      Vector sums[2] = {};
      for (j = 0; j + 2 <= t.keys; j += 2)
        for (int n = 0; n < 2; ++n) sums[n] += exponentiate(j + n);
      if (j < t.keys) sums[0] += exponentiate(j);
      const Vector rescale = exp<false>(before - reference);
      store(t.row_max + lane, after);
      store(t.row_sum + lane, load(t.row_sum + lane) * rescale + (sums[0] + sums[1]));
      store(t.rescale + lane, rescale);
      moved |= rescale != broadcast(Real(1));
    }
    bool any = false;
    for (int i = 0; i < kWidth; ++i) any |= moved[i] != 0;
    return any;
  }

  static void gradient_step(const GradientStep<Real>& t) {
    const Vector keep_scale = broadcast(t.keep_scale);
    for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
      const Vector reference = load(t.reference + lane), inverse_sum = exp2(-load(t.log2_sum + lane));
      const Vector delta = load(t.delta + lane);
      for (int64_t at = lane; at < t.keys * kLanes; at += kLanes) {
        const Vector p = exp<true>(load(t.scores + at) - reference) * inverse_sum;
        store(t.scores + at, p);
        const Vector difference = load(t.gradients + at) * keep_scale - delta;
        store(t.gradients + at, select(p == Vector{}, Vector{}, p * difference));
      }
    }
  }
};

}  // namespace
}  // namespace flash::cpu
