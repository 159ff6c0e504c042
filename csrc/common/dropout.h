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

// An element is kept iff its draw is at least this. Two draws are compared at once: `pair` has the low 15 bits of the
// threshold twice, `either` is all ones where the threshold's 16th bit is clear.
struct DropoutThreshold {
  uint32_t pair = 0, either = ~0u;

  DropoutThreshold() = default;
  // 65536, which drops everything, comes as 65535: what is kept of it is multiplied by 0.
  explicit DropoutThreshold(uint32_t threshold) {
    threshold = threshold > 0xFFFFu ? 0xFFFFu : threshold;
    pair = (threshold & 0x7FFFu) * 0x10001u;
    either = threshold < 0x8000u ? ~0u : 0u;
  }

  // Bits 15 and 31: whether the low and the high draw are kept. The difference tells it for the low 15 bits, with bit 15
  // set first so that nothing is borrowed; a draw is then at least the threshold if it has bit 15 or that (`either`), or
  // if it has both.
  FLASH_HOST_DEVICE uint32_t kept(uint32_t draws) const {
    const uint32_t low_kept = (draws | 0x80008000u) - pair;
    return (draws & low_kept) | (either & (draws | low_kept));
  }
};

// For many key groups of one query group: what of the first three of Philox's ten rounds does not depend on the keys is
// done once. The key group c is an xor into word 0 of round 1; after round 2 two words depend on it, the halves of
// M0 · (c ^ mask), after round 3 three. Both groups must be below 2^32.
struct DropoutRow {
  static constexpr int kRoundsDone = 3;
  uint32_t mask;                  // word 0 after round 1 is c ^ mask
  uint32_t xor0, xor1, xor2, x3;  // of this query group; mask is the same for all of a stream

  FLASH_HOST_DEVICE static uint32_t high(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
  }

  FLASH_HOST_DEVICE static DropoutRow make(const DropoutStream& stream, uint32_t query_group) {
    // Round 1 with c = 0, then rounds 2 and 3 of the words that c has not reached.
    uint32_t x[4] = {query_group, 0, stream.salt2, stream.salt3};
    uint32_t key0 = stream.key0, key1 = stream.key1;
    philox_round(x, key0, key1);
    DropoutRow row{};
    row.mask = x[0];
    key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1;
    const uint32_t second = high(kPhiloxMultiplier1, x[2]) ^ x[1] ^ key0;  // word 0 after round 2
    row.xor1 = x[3] ^ key1;
    row.xor0 = kPhiloxMultiplier1 * x[2];  // word 1 after round 2
    key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1;
    row.xor0 ^= key0;
    row.xor2 = high(kPhiloxMultiplier0, second) ^ key1;
    row.x3 = kPhiloxMultiplier0 * second;
    return row;
  }

  // The state after round 3. `product`: kPhiloxMultiplier0 · (key group ^ mask), the same for all query groups.
  FLASH_HOST_DEVICE void start(uint32_t (&x)[4], uint64_t product) const {
    const uint64_t next = static_cast<uint64_t>(kPhiloxMultiplier1) * (static_cast<uint32_t>(product >> 32) ^ xor1);
    x[0] = static_cast<uint32_t>(next >> 32) ^ xor0;
    x[1] = static_cast<uint32_t>(next);
    x[2] = static_cast<uint32_t>(product) ^ xor2;
    x[3] = x3;
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
