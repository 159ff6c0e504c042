// Parts of csrc/cpu that the ops cannot show alone: conversions, micro-kernels, dropout of any place, the work list.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "cpu/convert.h"
#include "cpu/micro_kernels.h"
#include "cpu/schedule.h"
#include "cpu/tile.h"
#include "expect.h"

using namespace flash;
using namespace flash::cpu;

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

// gradient_step() computes P = exp(S - R) · 2^-L.
template <class Real>
static Real exp_of(Real s, Real minus_l) {
  std::vector<Real> scores(kLanes, s), gradients(kLanes, Real(0));
  const std::vector<Real> zero(kLanes, Real(0)), log2_sum(kLanes, -minus_l);
  micro_kernels<Real>().gradient_step(
      {1, scores.data(), gradients.data(), zero.data(), log2_sum.data(), zero.data(), Real(1)});
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
static void test_gradient_step(double tolerance) {
  std::mt19937 generator(2);
  std::uniform_real_distribution<double> uniform(-3, 3);
  constexpr int64_t kKeys = 5;
  std::vector<Real> s(kKeys * kLanes), dp(s.size()), reference(kLanes), log2_sum(kLanes), delta(kLanes);
  for (auto* x : {&s, &dp, &reference, &log2_sum, &delta})
    for (Real& e : *x) e = static_cast<Real>(std::round(8 * uniform(generator)) / 8);  // differences are exact
  std::vector<Real> p = s, ds = dp;
  const Real keep_scale = Real(1.25);
  micro_kernels<Real>().gradient_step(
      {kKeys, p.data(), ds.data(), reference.data(), log2_sum.data(), delta.data(), keep_scale});
  for (int64_t i = 0; i < kKeys * kLanes; ++i) {
    const int64_t lane = i % kLanes;
    const double exact = std::exp(double(s[i]) - reference[lane]) * std::exp2(-double(log2_sum[lane]));
    EXPECT(std::fabs(p[i] / exact - 1) < tolerance);
    EXPECT(std::fabs(ds[i] - exact * (dp[i] * double(keep_scale) - delta[lane])) < 20 * tolerance * exact);
  }
}

template <class Real>
static void test_softmax_step(double tolerance) {
  std::mt19937 generator(3);
  std::uniform_real_distribution<double> uniform(-9, 9);
  for (int64_t keys : {1, 2, 3, 4, 5, 8, 11}) {
    std::vector<Real> s(keys * kLanes), row_max(kLanes), row_sum(kLanes), rescale(kLanes);
    for (Real& x : s) x = static_cast<Real>(std::round(8 * uniform(generator)) / 8);  // differences are exact
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      row_max[lane] = lane == 0 ? Real(-INFINITY) : lane == 1 ? Real(20) : Real(1);
      row_sum[lane] = lane == 0 ? Real(0) : Real(lane);
      if (lane == 2)
        for (int64_t j = 0; j < keys; ++j) s[j * kLanes + lane] = -INFINITY;  // sees nothing here
    }
    std::vector<Real> p = s, most = row_max, sum = row_sum;
    micro_kernels<Real>().softmax_step({keys, p.data(), most.data(), sum.data(), rescale.data()});
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      double exact_max = row_max[lane], exact_sum;
      for (int64_t j = 0; j < keys; ++j) exact_max = std::max(exact_max, double(s[j * kLanes + lane]));
      EXPECT(most[lane] == exact_max);
      const double factor = std::exp(row_max[lane] - exact_max);
      EXPECT(std::fabs(rescale[lane] - factor) <= tolerance * factor);
      exact_sum = row_sum[lane] * factor;
      for (int64_t j = 0; j < keys; ++j) {
        const double exact = std::exp(s[j * kLanes + lane] - exact_max);
        EXPECT(std::fabs(p[j * kLanes + lane] - exact) <= tolerance * exact);
        exact_sum += exact;
      }
      EXPECT(std::fabs(sum[lane] - exact_sum) <= 8 * tolerance * exact_sum);
    }
  }
}

template <class Real>
static void test_product(double tolerance) {
  std::mt19937 generator(1);
  std::uniform_real_distribution<double> uniform(-1, 1);
  for (int64_t rows : {0, 1, 2, 3, 4, 5, 6, 13})
    for (int64_t depth : {0, 1, 7, 33, 300})
      for (int64_t panels : {1, 3, 5})
        for (int layout : {0, 1, 2, 3})  // of A: rows, columns, panels of 16 columns, blocks of 6 rows
          for (bool accumulate : {false, true}) {
            const int64_t lanes = panels * kLanes, padded = (depth + kLanes - 1) / kLanes * kLanes;
            std::vector<Real> a((rows + kRowBlock) * padded + 1), b(depth * lanes + 1), c(rows * lanes + 1);
            for (auto* x : {&a, &b, &c})
              for (Real& e : *x) e = static_cast<Real>(uniform(generator));
            const std::vector<Real> before = c;
            const int64_t row_stride = layout == 0 ? depth : layout == 2 ? kLanes : 1;
            const int64_t depth_stride = layout == 1 ? rows : layout == 3 ? kRowBlock : 1;
            const int64_t panel_stride = layout == 2 ? rows * kLanes : kLanes * depth_stride;
            const int64_t block_stride = layout == 3 ? kRowBlock * depth : kRowBlock * row_stride;
            const Real factor = rows % 2 == 0 ? Real(1) : Real(-1.5);
            micro_kernels<Real>().multiply({rows,
                                            depth,
                                            panels,
                                            {a.data(), block_stride, row_stride, depth_stride, panel_stride},
                                            b.data(),
                                            kLanes,
                                            depth * kLanes,
                                            c.data(),
                                            kLanes,
                                            rows * kLanes,
                                            accumulate,
                                            factor});
            for (int64_t r = 0; r < rows; ++r)
              for (int64_t l = 0; l < lanes; ++l) {
                const int64_t at = l / kLanes * rows * kLanes + r * kLanes + l % kLanes;
                double exact = accumulate ? before[at] : 0;
                for (int64_t d = 0; d < depth; ++d)
                  exact += double(a[r / kRowBlock * block_stride + r % kRowBlock * row_stride +
                                    d / kLanes * panel_stride + d % kLanes * depth_stride]) *
                           b[l / kLanes * depth * kLanes + d * kLanes + l % kLanes];
                EXPECT(std::fabs(c[at] - factor * exact) < (depth > 100 ? 3 : 1) * std::fabs(factor) * tolerance);
              }
            EXPECT(c.back() == before.back());
          }
}

// X Y^T, X Y, X^T Y^T and X^T Y of rows X and Y in bf16, some of them and the ends of blocks not there.
static void test_bf16_products(const Bf16Kernels& kernels) {
  std::mt19937 generator(4);
  std::uniform_real_distribution<float> uniform(-1, 1);
  struct Matrix {
    int64_t rows, dim;
    std::vector<Bf16> data;
    std::vector<double> exact;
    Bf16Rows part() const { return {data.data(), dim, rows, 1, rows - 2, dim}; }
    double at(int64_t r, int64_t d) const { return 1 <= r && r < rows - 2 && d < dim ? exact[r * dim + d] : 0; }
  };
  const auto matrix = [&](int64_t rows, int64_t dim) {
    Matrix m{rows, dim, std::vector<Bf16>(rows * dim), std::vector<double>(rows * dim)};
    for (int64_t i = 0; i < rows * dim; ++i) {
      m.data[i] = to_bf16(uniform(generator));
      m.exact[i] = from_bf16(m.data[i]);
    }
    return m;
  };
  // Rows are whole blocks, dims any: what is behind them is zero.
  for (int64_t a_rows : {32, 96})
    for (int64_t b_rows : {32, 160})
      for (bool a_turned : {false, true})
        for (bool b_turned : {false, true})
          for (bool accumulate : {false, true}) {
            // C[r][l] = sum over depth of A[r][d] · B[d][l]
            const int64_t depth = a_turned ? a_rows : 70;
            const Matrix x = matrix(a_rows, 70);
            const Matrix y = b_turned ? matrix(b_rows, depth) : matrix(round_up(depth, 32), 41);
            const int64_t rows = a_turned ? round_up(x.dim, 16) : a_rows, blocks = (depth + 31) / 32;
            const int64_t panels = (b_turned ? b_rows : round_up(y.dim, 16)) / 16;
            const auto aligned = [](int64_t elements) {
              return std::unique_ptr<Bf16, decltype(&std::free)>(
                  static_cast<Bf16*>(std::aligned_alloc(64, elements * sizeof(Bf16))), &std::free);
            };
            const auto a = aligned(rows * blocks * 32), b = aligned(panels * blocks * kBlock);
            const auto c_memory = aligned(panels * rows * kLanes * 2);
            float* c = reinterpret_cast<float*>(c_memory.get());
            std::fill(c, c + panels * rows * kLanes, 2.0f);
            (a_turned ? kernels.pack_a_columns : kernels.pack_a_rows)(x.part(), a.get());
            (b_turned ? kernels.pack_b_columns : kernels.pack_b_rows)(y.part(), b.get());
            const uint32_t before = kernels.begin();
            kernels.multiply({rows / 16, blocks, panels, a.get(), blocks * kBlock, b.get(), blocks * kBlock, c,
                              rows * kLanes, accumulate});
            kernels.end(before);
            for (int64_t r = 0; r < rows; ++r)
              for (int64_t l = 0; l < panels * kLanes; ++l) {
                double exact = accumulate ? 2 : 0;
                for (int64_t d = 0; d < depth; ++d)
                  exact += (a_turned ? x.at(d, r) : x.at(r, d)) * (b_turned ? y.at(l, d) : y.at(d, l));
                EXPECT(std::fabs(c[l / kLanes * rows * kLanes + r * kLanes + l % kLanes] - exact) < 2e-5);
              }
          }
}

template <class Real>
static void test_softcap(double tolerance) {
  std::vector<Real> s;
  for (double x = -400; x < 400; x += 0.37) s.push_back(static_cast<Real>(x));
  for (double x : {0.0, -0.0, 1e-30, -1e-5, 1e-3, 1e30, -1e30, double(INFINITY), -double(INFINITY), double(NAN)})
    s.push_back(static_cast<Real>(x));
  s.resize(round_up(s.size(), kLanes));
  const Real cap = 15, scale = Real(0.25);
  std::vector<Real> capped = s, derivative(s.size());
  micro_kernels<Real>().softcap(s.size(), scale, cap, capped.data(), derivative.data());
  for (size_t i = 0; i < s.size(); ++i) {
    const double t = std::tanh(double(s[i]) * scale / cap);
    if (std::isnan(t)) {
      EXPECT(std::isnan(capped[i]));
    } else {
      EXPECT(std::fabs(capped[i] - cap * t) <= tolerance * std::fabs(cap * t));
      EXPECT(std::fabs(derivative[i] - (1 - t * t)) <= 4 * tolerance);
    }
  }
}

// Every 16-bit number to Reals and back, as the scalar functions convert it, and what lies between two of them.
template <class Real>
static void test_types() {
  for (DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
    const bool half = dtype == DataType::kFloat16;
    std::vector<uint16_t> bits(65536), back(65536);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
    std::vector<Real> reals(65536), between(65536);
    for (int64_t first = 0; first < 65536; first += 53) {
      const int64_t some = std::min<int64_t>(53, 65536 - first);
      micro_kernels<Real>().load(dtype, bits.data() + first, some, reals.data() + first);
    }
    const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
    for (int64_t i = 0; i < 65536; ++i) {
      const float exact = half ? from_fp16(bits[i]) : from_bf16(bits[i]);
      EXPECT(same(static_cast<float>(reals[i]), exact));
      const uint32_t word = std::bit_cast<uint32_t>(exact);
      between[i] = std::bit_cast<float>(word + (half ? 0x0FFFu : 0x7FFFu) + static_cast<uint32_t>(i % 3));
    }
    for (const auto* x : {&reals, &between}) {
      for (int64_t first = 0; first < 65536; first += 53)
        micro_kernels<Real>().store(dtype, x->data() + first, std::min<int64_t>(53, 65536 - first),
                                    back.data() + first);
      for (int64_t i = 0; i < 65536; ++i) {
        const auto value = static_cast<float>((*x)[i]);
        EXPECT(back[i] == (half ? to_fp16(value) : to_bf16(value)));
      }
    }
  }
}

// Every 16-bit number, and rows that are not there.
template <class Real>
static void test_bias() {
  for (DataType dtype : {DataType::kFloat16, DataType::kBFloat16})
    for (int64_t rows : {16, 5})
      for (int64_t keys : {64, 37}) {
        std::vector<uint16_t> bias(65536);
        for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<uint16_t>(i);
        for (int64_t first = 0; first + rows * 64 <= 65536; first += rows * 64) {
          std::vector<Real> s(keys * kLanes, Real(0));
          micro_kernels<Real>().add_bias({dtype, bias.data() + first, 64, rows, keys}, Real(1), s.data());
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t j = 0; j < keys; ++j) {
              const uint16_t bits = bias[first + r * 64 + j];
              const float exact = dtype == DataType::kFloat16 ? from_fp16(bits) : from_bf16(bits);
              EXPECT(s[j * kLanes + r] == exact || (std::isnan(exact) && std::isnan(s[j * kLanes + r])));
            }
        }
      }
}

template <class Real>
static void test_masks() {
  for (int64_t rows : {16, 7})
    for (int64_t keys : {1, 31, 32, 64, 101}) {
      std::vector<uint8_t> allowed(16 * 128), keep(keys * kLanes);
      for (size_t i = 0; i < allowed.size(); ++i) allowed[i] = i * 7 % 3 == 0 ? 0 : static_cast<uint8_t>(i * 37);
      KeyBounds bounds;
      for (int lane = 0; lane < kLanes; ++lane) {
        bounds.begin[lane] = lane;
        bounds.end[lane] = 3 * lane;
      }
      std::vector<Real> masked(keys * kLanes, Real(1)), outside = masked, dropped = masked;
      for (size_t i = 0; i < keep.size(); ++i) keep[i] = i * 5 % 3 != 0;
      micro_kernels<Real>().hide_masked({allowed.data(), 128, rows, keys}, masked.data());
      micro_kernels<Real>().hide_outside(bounds, 0, keys, outside.data());
      micro_kernels<Real>().drop(keep.data(), keys, dropped.data());
      const Real nothing = -Real(INFINITY);
      for (int64_t j = 0; j < keys; ++j)
        for (int64_t r = 0; r < kLanes; ++r) {
          const int64_t at = j * kLanes + r;
          if (r < rows) EXPECT(masked[at] == (allowed[r * 128 + j] != 0 ? Real(1) : nothing));
          EXPECT(outside[at] == (r <= j && j < 3 * r ? Real(1) : nothing));
          EXPECT(dropped[at] == Real(keep[at]));
        }
    }
}

static void test_dropout() {
  const int64_t seed[2] = {0x123456789ABCDEF, -42};
  const DropoutStream stream = dropout_stream(seed, 3, 5);
  Dropout dropout;
  dropout.threshold = 20000;  // 78.125 / 256
  const DropoutThreshold threshold(dropout.threshold);
  for (int64_t first_row : {int64_t{0}, int64_t{16}, int64_t{21}, (int64_t{1} << 33) + 48})
    for (int64_t first_key : {int64_t{0}, int64_t{7}, int64_t{64}, (int64_t{1} << 34) + 5})
      for (int64_t keys : {1, 32, 75}) {
        std::vector<uint8_t> keep(keys * kLanes, 9);
        dropout_panel(dropout, stream, {first_row, 16, first_key, keys}, keep.data());
        for (int64_t j = 0; j < keys; ++j)
          for (int64_t r = 0; r < kLanes; ++r)
            EXPECT(keep[j * kLanes + r] == stream.keeps(first_row + r, first_key + j, threshold));
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
    test_gradient_step<float>(3e-7);
    test_gradient_step<double>(2e-15);
    test_softmax_step<float>(3e-7);
    test_softmax_step<double>(2e-15);
    test_softcap<float>(6e-7);
    test_softcap<double>(2e-15);
    test_types<float>();
    test_types<double>();
    test_bias<float>();
    test_bias<double>();
    test_masks<float>();
    test_masks<double>();
    test_dropout();
    if (bf16_kernels() != nullptr) test_bf16_products(*bf16_kernels());
  }
  test_items();
  std::printf("%ld checks\n", checks);
}
