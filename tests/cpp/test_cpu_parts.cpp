// Parts of csrc/cpu that the ops cannot show alone: conversions, exp2, the product micro-kernel, the work list.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cpu/convert.h"
#include "cpu/micro_kernels.h"
#include "cpu/schedule.h"

using namespace flash;
using namespace flash::cpu;

static long checks = 0;
#define EXPECT(condition)                                                   \
  do {                                                                      \
    ++checks;                                                               \
    if (!(condition)) {                                                     \
      std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                         \
    }                                                                       \
  } while (0)

// Value of the bits of a binary16 or bfloat16 number, by the definition of the format.
static double value(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
  const int exponent = (bits >> mantissa_bits) & top, mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == top) return mantissa != 0 ? NAN : sign * INFINITY;
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias));
}

template <int kExponentBits, class From, class To>
static void test_conversion(From from, To to) {
  for (uint32_t b = 0; b < 0x10000; ++b) {
    const auto bits = static_cast<uint16_t>(b);
    const double exact = value(bits, kExponentBits);
    const float x = from(bits);
    if (std::isnan(exact)) {
      EXPECT(std::isnan(x) && std::isnan(from(to(x))));
      continue;
    }
    EXPECT(double(x) == exact && std::signbit(x) == std::signbit(exact));
    EXPECT(to(x) == bits);
    // Between two neighbours: the nearer one, and the even one of two equally near.
    const auto next_bits = static_cast<uint16_t>(bits + 1);
    const double next = value(next_bits, kExponentBits);
    if (!std::isfinite(exact) || !std::isfinite(next)) continue;
    const double middle = (exact + next) / 2;
    EXPECT(to(static_cast<float>(middle)) == (bits % 2 == 0 ? bits : next_bits));
    EXPECT(to(std::nextafter(static_cast<float>(middle), static_cast<float>(exact))) == bits);
    EXPECT(to(std::nextafter(static_cast<float>(middle), static_cast<float>(next))) == next_bits);
  }
}

// probabilities() computes exp(S - R) · 2^-L.
template <class Real>
static Real exp_of(Real s, Real minus_l) {
  constexpr int64_t kN = 16;
  std::vector<Real> scores(kN, s);
  const std::vector<Real> zero(kN, Real(0)), log2_sum(kN, -minus_l);
  micro_kernels<Real>().probabilities({1, kN, scores.data(), kN, zero.data(), log2_sum.data()});
  return scores[3];
}

template <class Real>
static void test_exp(double tolerance, Real lowest, Real highest) {
  const Real zero = 0;
  for (Real x = lowest; x < highest; x += Real(0.00731)) {
    EXPECT(std::fabs(double(exp_of(x, zero)) / std::exp(double(x)) - 1) < tolerance);
    EXPECT(std::fabs(double(exp_of(zero, x)) / std::exp2(double(x)) - 1) < tolerance);
  }
  EXPECT(exp_of(zero, zero) == 1 && exp_of(zero, Real(1)) == 2 && exp_of(zero, Real(-3)) == Real(0.125));
  for (Real x : {Real(-INFINITY), 3 * lowest, Real(-3e38f)}) EXPECT(exp_of(x, zero) == 0 && exp_of(zero, x) == 0);
  for (Real x : {Real(INFINITY), 3 * highest, Real(3e38f)})
    EXPECT(std::isinf(exp_of(x, zero)) && std::isinf(exp_of(zero, x)));
  EXPECT(std::isnan(exp_of(Real(NAN), zero)) && std::isnan(exp_of(-Real(NAN), zero)) &&
         std::isnan(exp_of(zero, Real(NAN))));
}

template <class Real>
static void test_product(double tolerance) {
  std::mt19937 generator(1);
  std::uniform_real_distribution<double> uniform(-1, 1);
  for (int64_t rows : {0, 1, 2, 3, 5, 6, 7, 11, 12, 19})
    for (int64_t depth : {0, 1, 2, 7, 33})
      for (int64_t lanes : {16, 48, 64, 80})
        for (bool transposed : {false, true})
          for (bool accumulate : {false, true}) {
            std::vector<Real> a(rows * depth + 1), b(depth * lanes + 1), c(rows * lanes + 1);
            for (auto* x : {&a, &b, &c})
              for (Real& e : *x) e = static_cast<Real>(uniform(generator));
            const std::vector<Real> before = c;
            const int64_t row_stride = transposed ? 1 : depth, depth_stride = transposed ? rows : 1;
            micro_kernels<Real>().multiply(
                {rows, depth, lanes, a.data(), row_stride, depth_stride, b.data(), lanes, c.data(), lanes, accumulate});
            for (int64_t r = 0; r < rows; ++r)
              for (int64_t l = 0; l < lanes; ++l) {
                double exact = accumulate ? before[r * lanes + l] : 0;
                for (int64_t d = 0; d < depth; ++d)
                  exact += double(a[r * row_stride + d * depth_stride]) * b[d * lanes + l];
                EXPECT(std::fabs(c[r * lanes + l] - exact) < tolerance);
              }
            EXPECT(c.back() == before.back());
          }
}

static void test_items() {
  const int64_t lengths[] = {0, 5, 0, 0, 17, 1, 0};
  AttentionParams p;
  const int64_t cu[] = {0, 0, 5, 5, 5, 22, 23, 23};
  p.batch = 7;
  p.rows_q.cu_seqlens = p.rows_k.cu_seqlens = {cu, true};
  const Sequences sequences(p);
  for (int64_t units : {1, 3})
    for (int64_t block : {1, 4, 16}) {
      const BlockItems items(sequences, units, block, [](const Sequence& s) { return s.q.length; });
      int64_t item = 0;
      for (int64_t s = 0; s < 7; ++s)
        for (int64_t unit = 0; unit < units; ++unit)
          for (int64_t b = 0; b * block < lengths[s]; ++b, ++item) {
            const auto [sequence, found_unit, found_block] = items[item];
            EXPECT(sequence == s && found_unit == unit && found_block == b);
          }
      EXPECT(items.count() == item);
    }
  EXPECT(sequences.longest_q == 17);
}

int main() {
  test_conversion<5>(from_fp16, to_fp16);
  test_conversion<8>(from_bf16, to_bf16);
  EXPECT(to_fp16(65519.0f) == 0x7BFF && to_fp16(65520.0f) == 0x7C00 && to_fp16(-1e10f) == 0xFC00 &&
         to_fp16(1e-9f) == 0);
  for (int set = 0; set <= static_cast<int>(best_instruction_set()); ++set) {
    EXPECT(limit_instruction_set(static_cast<InstructionSet>(set)) == static_cast<InstructionSet>(set));
    test_exp<float>(2.5e-7, -87.3f, 88.3f);
    test_exp<double>(1e-15, -708.3, 709.4);
    test_product<float>(1e-5);
    test_product<double>(1e-13);
  }
  test_items();
  std::printf("%ld checks\n", checks);
}
