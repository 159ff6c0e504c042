// Which attention weights are kept: a pure function of (seed, sequence, head, query position, key position), the same
// on every backend, for every tile size and layout.
//
// One Philox call gives sixteen draws of 8 bits, for the queries {q, q+8} and the keys {k, k+1} + {0, 8, 16, 24}, k even.
// That is exactly what one thread owns in the accumulator of mma m16n8 over four neighbouring n8 tiles: rows r, r+8 and
// of each tile two columns. In the transposed accumulator of the backward (keys along m16, queries along n8) two threads
// share two calls over 32 keys and two n8 tiles of queries: lanes that differ in bit 2 own k and k+1 of the same queries.
//
// A weight is kept iff its draw is at least p · 256, which is not whole: T = round(p · 65536) has 8 bits more. So a block
// of 16 queries × 32 keys has one threshold, T >> 8 or one more, and the second as often as the low byte of T says. Each
// weight is dropped with probability T / 65536 exactly. Two weights of a block share what decides the threshold, which
// correlates them by at most (T % 256 / 256) (1 - T % 256 / 256) / 65536 / (p (1 - p)): 4e-5 at p = 0.1. Over blocks the
// choice follows a lattice that fills the unit interval evenly, so that the share of dropped weights comes out right.
#pragma once

#include "common/philox.h"

namespace flash {

inline constexpr int64_t kDropoutQueries = 16;  // a block of 16 × 32 holds 8 × 4 groups
inline constexpr int64_t kDropoutKeys = 32;

// The group that a position belongs to, and the position's place in it.
FLASH_HOST_DEVICE int64_t dropout_query_group(int64_t q) { return (q >> 4) * 8 + (q & 7); }
FLASH_HOST_DEVICE int64_t dropout_key_group(int64_t k) { return (k >> 5) * 4 + ((k >> 1) & 3); }
FLASH_HOST_DEVICE int dropout_word(int64_t k) { return static_cast<int>((k & 1) * 2 + ((k >> 4) & 1)); }
FLASH_HOST_DEVICE int dropout_byte(int64_t q, int64_t k) { return static_cast<int>((k >> 3 & 1) * 2 + (q >> 3 & 1)); }

// Which draws are at least `least`, a number from 0 to 256; four at once. `bytes` has the low 7 bits of it four times
// (256 like 128 + 128), `either` is all ones where it is below 128.
struct DropoutCut {
  uint32_t bytes = 0, either = ~0u;

  DropoutCut() = default;
  FLASH_HOST_DEVICE explicit DropoutCut(uint32_t least)
      : bytes((least < 128 ? least : least - 128) * 0x01010101u), either(least < 128 ? ~0u : 0u) {}

  // Bits 7, 15, 23 and 31: whether that byte's draw is kept. The difference tells it for the low 7 bits, with bit 7 set
  // first so that nothing is borrowed; a draw is then at least `least` if it has bit 7 or that (`either`), or if it has
  // both.
  FLASH_HOST_DEVICE uint32_t kept(uint32_t draws) const {
    const uint32_t low_kept = (draws | 0x80808080u) - bytes;
    return (draws & low_kept) | (either & (draws | low_kept));
  }
};

// round(p · 65536) for comparing.
struct DropoutThreshold {
  DropoutCut cuts[2];
  uint32_t raised_below = 0;  // blocks whose phase is less than this have the higher cut

  DropoutThreshold() = default;
  FLASH_HOST_DEVICE explicit DropoutThreshold(uint32_t threshold)
      : cuts{DropoutCut(threshold >> 8), DropoutCut((threshold >> 8) + 1)}, raised_below(threshold << 24) {}

  FLASH_HOST_DEVICE DropoutCut cut(uint32_t phase) const { return cuts[phase < raised_below]; }
};

// All draws of one (sequence, head). Made once per tile: it costs one Philox call itself.
struct DropoutStream {
  uint32_t key0, key1, salt2, salt3;

  FLASH_HOST_DEVICE Philox4 draws(int64_t query_group, int64_t key_group) const {
    const auto g = static_cast<uint64_t>(query_group), c = static_cast<uint64_t>(key_group);
    const Philox4 counter{{static_cast<uint32_t>(g), static_cast<uint32_t>(c), salt2 ^ static_cast<uint32_t>(g >> 32),
                           salt3 ^ static_cast<uint32_t>(c >> 32)}};
    return philox4x32(counter, key0, key1);
  }

  // A block's place in [0, 2^32): a lattice in two dimensions with the powers of 1 / 1.3247..., the plastic number, as
  // steps (Roberts, "The unreasonable effectiveness of quasirandom sequences", 2018), moved by a random number.
  FLASH_HOST_DEVICE uint32_t phase(int64_t query_block, int64_t key_block) const {
    return key1 + static_cast<uint32_t>(query_block) * 0xC13FA9A9u + static_cast<uint32_t>(key_block) * 0x91E10DA5u;
  }

  FLASH_HOST_DEVICE bool keeps(int64_t q, int64_t k, const DropoutThreshold& threshold) const {
    const uint32_t word = draws(dropout_query_group(q), dropout_key_group(k)).x[dropout_word(k)];
    const uint32_t kept = threshold.cut(phase(q / kDropoutQueries, k / kDropoutKeys)).kept(word);
    return kept >> (8 * dropout_byte(q, k) + 7) & 1;
  }
};

FLASH_HOST_DEVICE uint32_t high_product(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

// For many key groups of one query group: what of the first three of Philox's rounds does not depend on the keys is done
// once. The key group c is an xor into word 0 of round 1; after round 2 two words depend on it, the halves of
// M0 · (c ^ mask), after round 3 three. Both groups must be below 2^32.
struct DropoutRow {
  static constexpr int kRoundsDone = 3;
  uint32_t mask;                  // word 0 after round 1 is c ^ mask
  uint32_t xor0, xor1, xor2, x3;  // of this query group; mask is the same for all of a stream

  FLASH_HOST_DEVICE static DropoutRow make(const DropoutStream& stream, uint32_t query_group) {
    // Round 1 with c = 0, then rounds 2 and 3 of the words that c has not reached.
    uint32_t x[4] = {query_group, 0, stream.salt2, stream.salt3};
    uint32_t key0 = stream.key0, key1 = stream.key1;
    philox_round(x, key0, key1);
    DropoutRow row{};
    row.mask = x[0];
    key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1;
    const uint32_t second = high_product(kPhiloxMultiplier1, x[2]) ^ x[1] ^ key0;  // word 0 after round 2
    row.xor1 = x[3] ^ key1;
    row.xor0 = kPhiloxMultiplier1 * x[2];  // word 1 after round 2
    key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1;
    row.xor0 ^= key0;
    row.xor2 = high_product(kPhiloxMultiplier0, second) ^ key1;
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

// The same for many query groups of one key group, and two rounds. The query group is in word 0: round 1 multiplies it, and
// after round 2 three words depend on it.
struct DropoutColumn {
  static constexpr int kRoundsDone = 2;
  uint32_t xor_high, xor0, xor2, x3;

  FLASH_HOST_DEVICE static DropoutColumn make(const DropoutStream& stream, uint32_t key_group) {
    const uint32_t key0 = stream.key0 + kPhiloxWeyl0, key1 = stream.key1 + kPhiloxWeyl1;              // of round 2
    const uint32_t first = high_product(kPhiloxMultiplier1, stream.salt2) ^ key_group ^ stream.key0;  // word 0 after 1
    return {stream.salt3 ^ stream.key1, (kPhiloxMultiplier1 * stream.salt2) ^ key0,
            high_product(kPhiloxMultiplier0, first) ^ key1, kPhiloxMultiplier0 * first};
  }

  // The state after round 2.
  FLASH_HOST_DEVICE void start(uint32_t (&x)[4], uint32_t query_group) const {
    const uint64_t product = static_cast<uint64_t>(kPhiloxMultiplier0) * query_group;
    const uint64_t next = static_cast<uint64_t>(kPhiloxMultiplier1) * (static_cast<uint32_t>(product >> 32) ^ xor_high);
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
  const Philox4 stream = philox4x32(counter, static_cast<uint32_t>(s0), static_cast<uint32_t>(s0 >> 32));
  return {stream.x[0], stream.x[1], stream.x[2], stream.x[3]};
}

}  // namespace flash
