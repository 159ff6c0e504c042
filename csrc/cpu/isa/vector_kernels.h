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
  static constexpr double kRound = 6755399441055744.0;  // 1.5 · 2^52
};

// kRows × kVectors accumulators fill the registers: see each instruction set's choice.
template <class Real, int kVectorBytes, int kRows, int kVectors>
struct Vectors {
  static constexpr int kWidth = kVectorBytes / sizeof(Real);
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
  static Vector select(Integers condition, Vector a, Vector b) {
    return (Vector)((condition & (Integers)a) | (~condition & (Integers)b));
  }
  static Vector maximum(Vector a, Vector b) { return select(a > b, a, b); }

  // p · 2^n for |log p| <= ln 2 / 2 + a little, where `shifted` = n + kRound and x is what the caller exponentiates, in
  // units in which `low` ... `high` are the ends of the normal range: 0 below it, +inf above it, NaN for NaN.
  static Vector scale_by_power_of_2(Vector p, Vector shifted, Vector x, Real low, Real high) {
    const Vector scaled = (Vector)((Words)p + ((Words)shifted << Bits<Real>::kMantissa));
    const Vector flushed =
        select(x < broadcast(low), Vector{}, select(x > broadcast(high), broadcast(kInfinity), scaled));
    return select(x == x, flushed, x);
  }

  // e^r for |r| <= ln 2 / 2 by its Taylor series, whose rest is below 1e-8 (fp32, degree 7) and 1e-17 (fp64, degree
  // 13).
  static Vector exp_series(Vector r) {
    double coefficient[Bits<Real>::kDegree + 1] = {1.0};  // 1 / k!
    for (int k = 1; k <= Bits<Real>::kDegree; ++k) coefficient[k] = coefficient[k - 1] / k;
    Vector p = broadcast(Real(coefficient[Bits<Real>::kDegree]));
    for (int k = Bits<Real>::kDegree - 1; k >= 0; --k) p = p * r + broadcast(Real(coefficient[k]));
    return p;
  }

  // e^x, exactly 1 at 0. x = n · ln 2 + r, with ln 2 in two parts, so that r is exact however large x is: through 2^(x
  // · log2 e) the rounding of the product would cost |x| units in the last place.
  static Vector exp(Vector x) {
    const Vector clamped = select(x < broadcast(Bits<Real>::kLowest), broadcast(Bits<Real>::kLowest),
                                  select(x > broadcast(Bits<Real>::kHighest), broadcast(Bits<Real>::kHighest), x));
    const Vector shifted = clamped * broadcast(kLog2E) + broadcast(Bits<Real>::kRound);
    const Vector n = shifted - broadcast(Bits<Real>::kRound);
    const Vector r = (clamped - n * broadcast(Bits<Real>::kLn2High)) - n * broadcast(Bits<Real>::kLn2Low);
    return scale_by_power_of_2(exp_series(r), shifted, x, Bits<Real>::kLowest, Bits<Real>::kHighest);
  }

  // 2^x, exact for whole numbers. For numbers of a row, not for elements.
  static Vector exp2(Vector x) {
    constexpr Real kMin = Bits<Real>::kMinExponent, kMax = Bits<Real>::kMaxExponent;
    const Vector clamped =
        select(x < broadcast(kMin), broadcast(kMin), select(x > broadcast(kMax), broadcast(kMax), x));
    const Vector shifted = clamped + broadcast(Bits<Real>::kRound);
    const Vector f = clamped - (shifted - broadcast(Bits<Real>::kRound));
    return scale_by_power_of_2(exp_series(f * broadcast(Real(0.693147180559945309417232121458176568L))), shifted, x,
                               kMin, kMax);
  }

  // kR rows × (kV · kWidth) lanes of C stay in registers over the whole depth.
  template <int kR, int kV>
  static inline __attribute__((always_inline)) void multiply_block(const Product<Real>& p, int64_t row, int64_t lane) {
    Vector c[kR][kV] = {};
    const Real* a = p.a + row * p.a_row_stride;
    const Real* b = p.b + lane;
    for (int64_t k = 0; k < p.depth; ++k, a += p.a_depth_stride, b += p.b_stride) {
      Vector bv[kV];
      for (int v = 0; v < kV; ++v) bv[v] = load(b + v * kWidth);
      for (int r = 0; r < kR; ++r) {
        const Vector av = broadcast(a[r * p.a_row_stride]);
        for (int v = 0; v < kV; ++v) c[r][v] += av * bv[v];
      }
    }
    // The sum of a tile is added to C as a whole: rounding grows with the number of tiles, not of keys.
    Real* out = p.c + row * p.c_stride + lane;
    for (int r = 0; r < kR; ++r)
      for (int v = 0; v < kV; ++v) {
        Real* at = out + r * p.c_stride + v * kWidth;
        store(at, p.accumulate ? load(at) + c[r][v] : c[r][v]);
      }
  }

  // kR rows, all lanes.
  template <int kR>
  static inline __attribute__((always_inline)) void multiply_rows(const Product<Real>& p, int64_t row) {
    int64_t lane = 0;
    for (; lane + kVectors * kWidth <= p.lanes; lane += kVectors * kWidth) multiply_block<kR, kVectors>(p, row, lane);
    for (; lane < p.lanes; lane += kWidth) multiply_block<kR, 1>(p, row, lane);
  }

  static void multiply(const Product<Real>& p) {
    static_assert(kLanes % kWidth == 0, "lanes are padded to whole vectors");
    int64_t row = 0;
    for (; row + kRows <= p.rows; row += kRows) multiply_rows<kRows>(p, row);
    for (; row + kRows / 2 <= p.rows; row += kRows / 2) multiply_rows<kRows / 2>(p, row);
    for (; row < p.rows; ++row) multiply_rows<1>(p, row);
  }

  static bool softmax_step(const SoftmaxStep<Real>& t) {
    Integers moved = {};
    for (int64_t lane = 0; lane < t.lanes; lane += kWidth) {
      Real* scores = t.scores + lane;
      const Vector before = load(t.row_max + lane);
      Vector after = before;
      for (int64_t j = 0; j < t.keys; ++j) after = maximum(after, load(scores + j * t.stride));
      // A row that has seen nothing keeps -inf as its maximum and subtracts 0: exp2(-inf) = 0, not NaN.
      const Vector reference = select(after == broadcast(-kInfinity), Vector{}, after);
      Vector sum = {};
      for (int64_t j = 0; j < t.keys; ++j) {
        const Vector p = exp(load(scores + j * t.stride) - reference);
        store(scores + j * t.stride, p);
        sum += p;
      }
      const Vector rescale = exp(before - reference);
      store(t.row_max + lane, after);
      store(t.row_sum + lane, load(t.row_sum + lane) * rescale + sum);
      store(t.rescale + lane, rescale);
      moved |= rescale != broadcast(Real(1));
    }
    bool any = false;
    for (int i = 0; i < kWidth; ++i) any |= moved[i] != 0;
    return any;
  }

  static void probabilities(const Probabilities<Real>& t) {
    for (int64_t lane = 0; lane < t.lanes; lane += kWidth) {
      const Vector reference = load(t.reference + lane), inverse_sum = exp2(-load(t.log2_sum + lane));
      for (int64_t j = 0; j < t.keys; ++j) {
        Real* s = t.scores + j * t.stride + lane;
        store(s, exp(load(s) - reference) * inverse_sum);
      }
    }
  }

  static constexpr MicroKernels<Real> kernels(const char* name) {
    return {name, multiply, softmax_step, probabilities};
  }
};

}  // namespace
}  // namespace flash::cpu
