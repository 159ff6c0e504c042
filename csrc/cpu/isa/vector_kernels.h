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
  static constexpr int kMinExponent = -126, kMaxExponent = 128;
  static constexpr int kDegree = 7;
  static constexpr float kRound =
      12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, which is left in the low bits
};
template <>
struct Bits<double> {
  using Int = int64_t;
  using Word = uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr int kMinExponent = -1022, kMaxExponent = 1024;
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

  // 2^x. Exactly 1 at 0, exactly 0 below the smallest normal number, +inf from 2^128 (2^1024) on, NaN for NaN. x = n +
  // f with |f| <= 1/2; 2^f by its Taylor series, whose rest is below 1e-8 (fp32, degree 7) and 1e-17 (fp64, degree 13).
  static Vector exp2(Vector x) {
    constexpr double kLn2 = 0.693147180559945309417232121458176568;
    const Vector most = broadcast(Real(Bits<Real>::kMaxExponent));
    const Vector clamped = select(x > most, most, x);
    const Vector shifted = clamped + broadcast(Bits<Real>::kRound);
    const Vector f = clamped - (shifted - broadcast(Bits<Real>::kRound));
    double coefficient[Bits<Real>::kDegree + 1] = {1.0};  // ln2^k / k!
    for (int k = 1; k <= Bits<Real>::kDegree; ++k) coefficient[k] = coefficient[k - 1] * kLn2 / k;
    Vector p = broadcast(Real(coefficient[Bits<Real>::kDegree]));
    for (int k = Bits<Real>::kDegree - 1; k >= 0; --k) p = p * f + broadcast(Real(coefficient[k]));
    const Vector scaled = (Vector)((Words)p + ((Words)shifted << Bits<Real>::kMantissa));
    const Vector flushed = select(x < broadcast(Real(Bits<Real>::kMinExponent)), Vector{}, scaled);
    return select(x == x, flushed, x);
  }

  // kR rows × (kV · kWidth) lanes of C stay in registers over the whole depth.
  template <int kR, int kV>
  static inline __attribute__((always_inline)) void multiply_block(const Product<Real>& p, int64_t row, int64_t lane) {
    Vector c[kR][kV];
    Real* out = p.c + row * p.c_stride + lane;
    for (int r = 0; r < kR; ++r)
      for (int v = 0; v < kV; ++v) c[r][v] = p.accumulate ? load(out + r * p.c_stride + v * kWidth) : Vector{};
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
    for (int r = 0; r < kR; ++r)
      for (int v = 0; v < kV; ++v) store(out + r * p.c_stride + v * kWidth, c[r][v]);
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

  static constexpr Real kLog2E = Real(1.44269504088896340735992468100189214L);
  static constexpr Real kInfinity = Real(__builtin_inf());

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
        const Vector p = exp2((load(scores + j * t.stride) - reference) * broadcast(kLog2E));
        store(scores + j * t.stride, p);
        sum += p;
      }
      const Vector rescale = exp2((before - reference) * broadcast(kLog2E));
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
      const Vector reference = load(t.reference + lane), log2_sum = load(t.log2_sum + lane);
      for (int64_t j = 0; j < t.keys; ++j) {
        Real* s = t.scores + j * t.stride + lane;
        store(s, exp2((load(s) - reference) * broadcast(kLog2E) - log2_sum));
      }
    }
  }

  static constexpr MicroKernels<Real> kernels(const char* name) {
    return {name, multiply, softmax_step, probabilities};
  }
};

}  // namespace
}  // namespace flash::cpu
