// The two numbers that backward keeps per row: the paper's m and ℓ, as (R, log2 ℓ).
//
//   ℓ = Σ_j exp(S_j - R)  (+ exp(sink - R)),     P_j = exp2((S_j - R) · log2 e - log2 ℓ),     LSE = R + ln 2 · log2 ℓ
//
// R, the reference in the exponent, is in units of the logits S (natural logarithm); any number near the row's maximum
// serves, as long as numerator and denominator use the same one. One LSE cannot replace the pair: at logits of 1e4 an
// fp32 LSE has an absolute error of 5e-4, and so would every probability that is rebuilt from it. A row that sees
// nothing has R = 0, log2 ℓ = -inf; one that sees nothing but a sink has R = sink, log2 ℓ = +inf (not the 0 of a sum that
// is exp(sink - R) alone): it has no P, and neither its q nor its dO counts.
//
// A sink of +inf or NaN is to a row what a key's logit of +inf or NaN is: exp(inf - inf) is NaN in the sum, and so are O,
// LSE and gradients of the row. One that sees nothing else divides nothing by that sum: O = 0, LSE = sink.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace flash {

template <class Real>
inline constexpr Real kLog2E = Real(1.44269504088896340735992468100189214L);
template <class Real>
inline constexpr Real kLn2 = Real(0.693147180559945309417232121458176568L);

template <class Real>
struct RowStatistics {
  Real reference = 0;
  Real log2_sum = -INFINITY;
};

// The reference that an online softmax may subtract: a row whose maximum is still -inf has seen nothing, 0 keeps it
// free of NaN.
template <class Real>
FLASH_HOST_DEVICE Real finite_reference(Real row_max) {
  return row_max == -INFINITY ? Real(0) : row_max;
}

template <class Real>
FLASH_HOST_DEVICE RowStatistics<Real> make_statistics(Real row_max, Real row_sum) {
  return {finite_reference(row_max), std::log2(row_sum)};
}

template <class Real>
FLASH_HOST_DEVICE bool sees_sink_alone(RowStatistics<Real> row) {
  return row.log2_sum == INFINITY;
}

template <class Real>
FLASH_HOST_DEVICE Real log_sum_exp(RowStatistics<Real> row) {
  return sees_sink_alone(row) ? row.reference : row.reference + kLn2<Real> * row.log2_sum;
}

// What backward subtracts in place of log2 ℓ: +inf for an empty row, so that every P of it is 0 whatever S is.
template <class Real>
FLASH_HOST_DEVICE Real log2_sum_for_backward(RowStatistics<Real> row) {
  return row.log2_sum == -INFINITY ? Real(INFINITY) : row.log2_sum;
}

// What backward subtracts from S: 0 for a row without keys, of which the sink alone may be no number.
template <class Real>
FLASH_HOST_DEVICE Real reference_for_backward(RowStatistics<Real> row) {
  return log2_sum_for_backward(row) == INFINITY ? Real(0) : row.reference;
}

// The sink's own weight, exp(sink - LSE).
template <class Real>
FLASH_HOST_DEVICE Real sink_weight(RowStatistics<Real> row, Real sink) {
  const Real weight = std::exp2((sink - row.reference) * kLog2E<Real> - log2_sum_for_backward(row));
  return sees_sink_alone(row) ? Real(1) : weight;
}

// How far two partial results over disjoint keys must be scaled to share one reference.
template <class Real>
struct Merge {
  Real row_max;
  Real scale_a, scale_b;  // multiply the sums (and unnormalised outputs) of a and b
};

template <class Real>
FLASH_HOST_DEVICE Merge<Real> merge(Real max_a, Real max_b) {
  const Real row_max = max_a > max_b ? max_a : max_b;
  const Real reference = finite_reference(row_max);
  return {row_max, std::exp2((max_a - reference) * kLog2E<Real>), std::exp2((max_b - reference) * kLog2E<Real>)};
}

}  // namespace flash
