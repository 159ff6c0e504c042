// Which attention weights are kept: a pure function of (seed, sequence, head, query position, key position), the same
// on every backend, for every tile size and layout.
//
// One Philox call gives eight 16-bit draws, for the queries {q, q+8} and the keys {k, k+8, k+16, k+24}. That is exactly
// what one thread owns in the accumulator of mma m16n8 over four neighbouring n8 tiles: rows r, r+8 and, for each of
// its two columns c, the columns c, c+8, c+16, c+24. The transposed accumulator of the backward (keys along m16,
// queries along n8) owns keys k, k+8 and queries q, q+8 of two neighbouring n8 tiles: four of the eight, all eight over
// 32 keys.
#pragma once

#include "common/philox.h"

namespace flash {

inline constexpr int64_t kDropoutQueries = 16;  // a block of 16 × 32 holds 8 × 8 groups
inline constexpr int64_t kDropoutKeys = 32;

// The group that a position belongs to, and the position's place in it.
FLASH_HOST_DEVICE int64_t dropout_query_group(int64_t q) { return (q >> 4) * 8 + (q & 7); }
FLASH_HOST_DEVICE int64_t dropout_key_group(int64_t k) { return (k >> 5) * 8 + (k & 7); }
FLASH_HOST_DEVICE int dropout_query_slot(int64_t q) { return static_cast<int>((q >> 3) & 1); }
FLASH_HOST_DEVICE int dropout_key_slot(int64_t k) { return static_cast<int>((k >> 3) & 3); }

// The draws of one group: [query slot][key slot].
struct DropoutDraws {
  Philox4 words;

  FLASH_HOST_DEVICE uint32_t draw(int query_slot, int key_slot) const {
    return (words.x[key_slot] >> (16 * query_slot)) & 0xFFFFu;
  }
};

// All draws of one (sequence, head). Made once per tile: it costs one Philox call itself.
struct DropoutStream {
  uint32_t key0, key1, salt2, salt3;

  FLASH_HOST_DEVICE DropoutDraws draws(int64_t query_group, int64_t key_group) const {
    const auto g = static_cast<uint64_t>(query_group), c = static_cast<uint64_t>(key_group);
    const Philox4 counter{{static_cast<uint32_t>(g), static_cast<uint32_t>(c), salt2 ^ static_cast<uint32_t>(g >> 32),
                           salt3 ^ static_cast<uint32_t>(c >> 32)}};
    return {philox4x32_10(counter, key0, key1)};
  }

  FLASH_HOST_DEVICE uint32_t draw(int64_t q, int64_t k) const {
    return draws(dropout_query_group(q), dropout_key_group(k)).draw(dropout_query_slot(q), dropout_key_slot(k));
  }
};

FLASH_HOST_DEVICE DropoutStream dropout_stream(const int64_t seed[2], int64_t sequence, int64_t head) {
  const auto s0 = static_cast<uint64_t>(seed[0]), s1 = static_cast<uint64_t>(seed[1]);
  const Philox4 counter{{static_cast<uint32_t>(head), static_cast<uint32_t>(sequence), static_cast<uint32_t>(s1),
                         static_cast<uint32_t>(s1 >> 32)}};
  const Philox4 stream = philox4x32_10(counter, static_cast<uint32_t>(s0), static_cast<uint32_t>(s0 >> 32));
  return {stream.x[0], stream.x[1], stream.x[2], stream.x[3]};
}

}  // namespace flash
