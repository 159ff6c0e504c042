// What kernels need of a softcap, made once on the host: as operands in constant memory it takes no registers.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

namespace flash {

// softcap · tanh(x), x = scale · S / softcap. For |x| < 1/2 that is x4 (c0 + x4² (c1 + x4² (c2 + x4² c3))), x4 = 4 x,
// relative error below 2^-20 (minimax of tanh(x) / x, its first coefficient 1).
struct SoftcapTerms {
  float softcap = 0;      // 0: there is none
  float to_4x = 0;        // 4 · scale / softcap
  float nearest_far = 0;  // of |S|: from here on |x| is 1/2 or more
  float c0 = 0, c1 = 0, c2 = 0, c3 = 0;

  SoftcapTerms() = default;
  SoftcapTerms(float of_call, float scale) : softcap(of_call) {
    if (softcap == 0) return;
    constexpr float kLargest = std::numeric_limits<float>::max();  // inf · 0 were no number
    to_4x = std::clamp(4 * scale / softcap, -kLargest, kLargest);
    nearest_far = 2 / std::abs(to_4x);
    c0 = softcap / 4, c1 = softcap * (-0.33328161f / 64), c2 = softcap * (0.13205360f / 1024);
    c3 = softcap * (-0.044750638f / 16384);
  }
};

}  // namespace flash
