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

  constexpr int threads() const { return 32 * warps; }
  constexpr int warp_rows() const { return rows / warps; }
  constexpr int q_bytes(int head_dim) const { return rows * head_dim * 2; }
  constexpr int kv_bytes(int head_dim) const { return keys * head_dim * 2; }
  constexpr int shared_bytes(int head_dim) const { return q_bytes(head_dim) + 2 * stages * kv_bytes(head_dim); }
};

// In order of preference: the first that the card has the shared memory for is used. Unused places have no rows.
using Tiles = std::array<Tile, 3>;

// Warps of 32 rows: with 16, reading K and V from shared memory takes longer than the products. From head dim 192 on,
// the registers leave no choice.
constexpr Tiles fwd_tiles(KernelKey key) {
  const bool turing = key.arch == Arch::sm75;
  if (key.head_dim <= 64) return {{{128, 64, 4, 1, true, 2}}};
  if (turing) {
    if (key.head_dim <= 128) return {{{128, 32, 8, 1, false, 1}}};
    return {{{64, 32, 4, 1, false, 1}, {32, 32, 2, 1, false, 1}}};
  }
  if (key.head_dim <= 128) {
    if (key.variant == Variant::biased) return {{{128, 64, 8, 1, true, 1}, {128, 32, 8, 1, true, 1}}};
    if (key.variant == Variant::modified) return {{{128, 32, 4, 1, false, 2}}};
    return {{{256, 64, 8, 2, false, 1}, {128, 32, 4, 1, false, 2}}};
  }
  return {{{128, 64, 8, 1, false, 1}, {128, 32, 8, 1, false, 1}}};
}

}  // namespace flash::mma_sync
