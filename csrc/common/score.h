// From q·k to the logit: softcap and ALiBi, value and derivative. (Bias adds, masks select: nothing to define here.)
#pragma once

#include <cmath>
#include <limits>

#include "common/host_device.h"
#include "common/params.h"

namespace flash {

template <class Real>
struct Softcapped {
  Real value;       // softcap · tanh(s / softcap)
  Real derivative;  // 1 - tanh²(s / softcap)
};

template <class Real>
FLASH_HOST_DEVICE Softcapped<Real> apply_softcap(Real s, Real softcap) {
  const Real t = std::tanh(s / softcap);
  return {softcap * t, (Real(1) - t) * (Real(1) + t)};
}

// Softcap as a Real: 0 where there is none, and only there. What is below the smallest normal number caps like it: all
// logits are 0 beside 1.
template <class Real>
inline constexpr double kLeastSoftcap = std::numeric_limits<Real>::min();
template <class Real>
FLASH_HOST_DEVICE Real softcap_of(const Score& score) {
  constexpr double kLeast = kLeastSoftcap<Real>;
  return static_cast<Real>(score.softcap > 0 && score.softcap < kLeast ? kLeast : score.softcap);
}

// -slope · |i + diagonal - j|: the distance between a key and the row's place on the diagonal (Visibility::diagonal).
template <class Real>
FLASH_HOST_DEVICE Real alibi(Real slope, int64_t i, int64_t j, int64_t diagonal) {
  const int64_t distance = i + diagonal - j;
  return -slope * static_cast<Real>(distance < 0 ? -distance : distance);
}

template <class Real>
FLASH_HOST_DEVICE Real alibi_slope(const Score& score, int64_t batch, int64_t head) {
  if (score.alibi_slopes == nullptr) return Real(0);
  return static_cast<const Real*>(
      score.alibi_slopes)[batch * score.alibi_batch_stride + head * score.alibi_head_stride];
}

}  // namespace flash
