// Tile sizes of the mma.sync kernels. Plain C++: the host chooses by them, too.
#pragma once

#include <array>

#include "common/kernel_key.h"

namespace flash::mma_sync {

// One CTA computes `rows` query rows of a head against `keys` keys at a time. Each warp, or pair of warps, has its own
// rows.
struct Tile {
  int rows = 0, keys = 0, warps = 0;
  int stages = 1;               // buffers for a block of K and V
  bool q_in_registers = false;  // Q's fragments are kept, not read again for every block
  int ctas = 1;                 // on an SM at once, as far as registers allow
  int from_keys = 0;            // the length of sequences from which on it is the better choice
  int split = 1;                // 2: pairs of warps share rows (warp_pair.cuh)
  bool takes_blocks = true;     // whether block masks are served: where a register too many spills, they are not

  constexpr int threads() const { return 32 * warps; }
  constexpr int warp_rows() const { return rows / warps * split; }
  constexpr int q_bytes(int head_dim) const { return rows * head_dim * 2; }
  constexpr int kv_bytes(int head_dim) const { return keys * head_dim * 2; }
  constexpr int pair_bytes() const { return split == 1 ? 0 : rows * keys * 2 + rows * 2 * 4; }  // P, and two numbers
  constexpr int shared_bytes(int head_dim) const {
    return q_bytes(head_dim) + 2 * stages * kv_bytes(head_dim) + pair_bytes();
  }
};

// What a CTA takes beside its tiles, at most; setup.py looks at what kernels really take.
inline constexpr int kStaticShared = 512;

// In order of preference: the first that suits the card and the call is used. Unused places have no rows.
using Tiles = std::array<Tile, 4>;

// What an H200 preferred; numbers are TFLOP/s, of the 620 that mma.sync alone reaches there.
//
// Rows are many for each warp, because with 16 of them reading K and V from shared memory takes longer than the
// products (d 128: 360 instead of 433): 32 up to head dim 128, 16 at 192, where O leaves no registers
// for more, and 32 for a pair of warps at 256 (410 instead of 362). Two buffers for K and V gain 5 to 15 % where they fit beside another
// CTA, and a second CTA is worth more than larger tiles up to some length: it computes while the other starts and ends.
// Options take registers, which decides the rest.
constexpr Tiles fwd_tiles(KernelKey key) {
  if (key.arch == Arch::sm75) {  // 64 KB; not measured, for want of a card
    if (key.head_dim <= 64) return {{{128, 64, 4, 1, true, 2}}};
    if (key.head_dim <= 128) return {{{128, 32, 8, 1, false, 1}}};
    if (key.head_dim <= 192) return {{{64, 32, 4, 1, false, 1}}};
    return {{{32, 32, 2, 1, false, 1}}};
  }
  if (key.head_dim <= 64) {
    if (key.variant <= Variant::dropout) return {{{128, 64, 4, 2, true, 2}}};
    return {{{128, 32, 4, 2, true, 2}}};
  }
  if (key.head_dim <= 128) {
    if (key.variant == Variant::biased) return {{{128, 64, 8, 1, true, 1}, {128, 32, 8, 1, true, 1}}};
    if (key.variant == Variant::modified) return {{{128, 32, 4, 1, false, 2}}};
    if (key.variant == Variant::dropout) return {{{128, 64, 4, 1, false, 2}, {128, 32, 4, 1, false, 2}}};
    return {{{256, 64, 8, 2, false, 1, 8192, 1, false},
             {128, 64, 4, 2, false, 2},
             {128, 32, 4, 2, false, 2},
             {128, 32, 4, 1, false, 2}}};
  }
  constexpr Tile kSmall{128, 32, 8, 1, false, 1};  // for 99 KB
  if (key.head_dim <= 192) {
    if (key.variant >= Variant::dropout) return {{{128, 64, 8, 1, false, 1}, kSmall}};
    return {{{128, 96, 8, 1, false, 1, 1536}, {128, 64, 8, 1, false, 1}, kSmall}};
  }
  constexpr Tile kPairs{64, 64, 4, 1, false, 2, 0, 2}, kMorePairs{128, 64, 8, 1, false, 1, 0, 2};
  if (key.variant >= Variant::dropout) return {{kPairs, kMorePairs, kSmall}};
  return {{{128, 96, 8, 1, false, 1, 4096, 2}, kPairs, kMorePairs, kSmall}};
}

// One CTA computes dK and dV of `keys` keys of a head, `rows` query rows at a time. `key_warps` of its warps share out
// the keys, the others the rows (for S) and the columns (for dK and dV); `dq_row_warps` share out the rows of dQ.
struct BwdTile {
  int rows = 0, keys = 0, warps = 0, key_warps = 0, dq_row_warps = 0;
  int stages = 1;  // buffers for a block of Q and dO
  int ctas = 1;
  bool takes_blocks = true;  // as above

  constexpr int threads() const { return 32 * warps; }
  constexpr int kv_bytes(int head_dim) const { return keys * head_dim * 2; }
  constexpr int q_bytes(int head_dim) const { return rows * head_dim * 2; }
  constexpr int score_bytes() const { return rows * keys * 2; }  // of P or dS
  constexpr int table_floats() const { return 4 * rows + 4; }    // QueryTable
  constexpr int shared_bytes(int head_dim) const {
    return 2 * kv_bytes(head_dim) + 2 * stages * q_bytes(head_dim) + 2 * score_bytes() +
           stages * (table_floats() + 1) * 4;  // and a pair of steps
  }
};

// In order of preference: the first that fits the card is used. Behind those, others that a benchmark may choose.
using BwdTiles = std::array<BwdTile, 5>;

constexpr BwdTiles bwd_tiles(KernelKey key) {
  const bool takes_blocks = key.head_dim < 256 || (key.arch != Arch::sm75 && key.variant != Variant::plain);
  if (key.arch == Arch::sm75) {  // 64 KB
    if (key.head_dim <= 64) return {{{64, 64, 4, 2, 2, 1}}};
    if (key.head_dim <= 128) return {{{32, 64, 4, 2, 2, 1}}};
    if (key.head_dim <= 192) return {{{32, 32, 4, 2, 2, 1}}};
    return {{{32, 16, 2, 1, 1, 1, 1, takes_blocks}}};
  }
  if (key.head_dim <= 64) {
    if (key.variant == Variant::dropout) return {{{128, 128, 8, 4, 4, 2}, {64, 128, 8, 4, 4, 2}, {64, 64, 4, 2, 2, 2}}};
    if (key.variant >= Variant::dropout) return {{{64, 128, 8, 4, 4, 2}, {64, 64, 4, 2, 2, 2}}};
    constexpr BwdTile kOfDropout{64, 128, 8, 4, 4, 2}, kMoreRows{128, 64, 4, 2, 4, 1, 2};
    return {{{128, 128, 8, 4, 4, 2}, {64, 64, 4, 2, 2, 2}, kOfDropout, kMoreRows}};
  }
  if (key.head_dim <= 96) return {{{64, 128, 8, 4, 4, 2}, {64, 64, 4, 2, 2, 1}}};
  if (key.head_dim <= 128) {
    if (key.variant == Variant::biased) return {{{64, 64, 8, 2, 2, 1}}};
    if (key.variant == Variant::dropout) return {{{64, 128, 8, 4, 2, 2}, {64, 64, 8, 2, 2, 1}}};
    constexpr BwdTile kTwoCtas{64, 64, 4, 2, 2, 1, 2};
    return {{{64, 128, 8, 4, 2, 2}, {64, 64, 8, 2, 2, 1}, kTwoCtas}};
  }
  if (key.head_dim <= 192) return {{{64, 64, 8, 2, 2, 2}, {64, 64, 8, 2, 2, 1}, {32, 32, 4, 2, 2, 1}}};
  return {{{64, 64, 8, 2, 2, 2, 1, takes_blocks}, {64, 64, 8, 2, 2, 1}, {32, 32, 4, 2, 2, 1}}};
}

}  // namespace flash::mma_sync
