// Tile sizes of the mma.sync kernels. Plain C++: the host chooses by them, too.
#pragma once

#include <array>

#include "common/kernel_key.h"

namespace flash::mma_sync {

// One CTA computes `rows` query rows of a head, each warp rows / warps of them, against `keys` keys at a time.
struct Tile {
  int rows = 0, keys = 0, warps = 0;
  int stages = 1;               // buffers for a block of K and V
  bool q_in_registers = false;  // Q's fragments are kept, not read again for every block
  int ctas = 1;                 // on an SM at once, as far as registers allow
  int from_keys = 0;            // the length of sequences from which on it is the better choice

  constexpr int threads() const { return 32 * warps; }
  constexpr int warp_rows() const { return rows / warps; }
  constexpr int q_bytes(int head_dim) const { return rows * head_dim * 2; }
  constexpr int kv_bytes(int head_dim) const { return keys * head_dim * 2; }
  constexpr int shared_bytes(int head_dim) const { return q_bytes(head_dim) + 2 * stages * kv_bytes(head_dim); }
};

// What a CTA takes beside its tiles.
inline constexpr int kStaticShared = 512;

// In order of preference: the first that suits the card and the call is used. Unused places have no rows.
using Tiles = std::array<Tile, 3>;

// What an H200 preferred; numbers are TFLOP/s, of the 620 that mma.sync alone reaches there.
//
// Warps have 32 rows up to head dim 128: with 16, reading K and V from shared memory takes longer than the products
// (d 128: 250 instead of 360). From 192 on O leaves no registers for it, and more keys at a time make up for some.
// (Spills that sm_80 code would have rule out 64 keys at head dim 128, 407 instead of 400 at 16k, and three CTAs at
// 64.) Two buffers for K and V gain 3 to 7 % over one. What a variant adds to registers decides the rest.
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
    if (key.variant == Variant::dropout) return {{{128, 32, 4, 2, false, 2}, {128, 32, 4, 1, false, 2}}};
    return {{{128, 64, 4, 2, false, 2}, {128, 32, 4, 2, false, 2}, {128, 32, 4, 1, false, 2}}};
  }
  if (key.variant >= Variant::dropout) return {{{128, 64, 8, 1, false, 1}, {128, 32, 8, 1, false, 1}}};
  return {{{128, 96, 8, 1, false, 1, 1536}, {128, 64, 8, 1, false, 1}, {128, 32, 8, 1, false, 1}}};
}

}  // namespace flash::mma_sync
