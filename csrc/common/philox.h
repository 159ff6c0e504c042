// Philox4x32, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011), with the seven rounds from which on it passes all of BigCrush (their table 2).
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash {

struct Philox4 {
  uint32_t x[4];
};

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u,
                          kPhiloxWeyl1 = 0xBB67AE85u;  // the keys of the next round: + these

inline constexpr int kPhiloxRounds = 7;

FLASH_HOST_DEVICE void philox_round(uint32_t (&x)[4], uint32_t key0, uint32_t key1) {
  const uint64_t product0 = static_cast<uint64_t>(kPhiloxMultiplier0) * x[0];
  const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultiplier1) * x[2];
  x[0] = static_cast<uint32_t>(product1 >> 32) ^ x[1] ^ key0;
  x[1] = static_cast<uint32_t>(product1);
  x[2] = static_cast<uint32_t>(product0 >> 32) ^ x[3] ^ key1;
  x[3] = static_cast<uint32_t>(product0);
}

FLASH_HOST_DEVICE Philox4 philox4x32(Philox4 counter, uint32_t key0, uint32_t key1, int rounds = kPhiloxRounds) {
  for (int round = 0; round < rounds; ++round) {
    philox_round(counter.x, key0, key1);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

}  // namespace flash
