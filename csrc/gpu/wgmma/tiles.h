// Tile sizes of the wgmma kernels. Plain C++: the host chooses by them, too.
#pragma once

#include <array>

#include "common/kernel_key.h"

namespace flash::wgmma {

inline constexpr int kWarpgroupRows = 64;

// A team of consumer warpgroups computes kWarpgroupRows rows with each of them, against `keys` keys at a time: queries of a
// head, or all heads of a group of a query and then of the next. A CTA has one team or two, each with tiles and buffers of
// its own, and one more warpgroup, which loads for all. Q, K and V lie in panels of 64 columns.
struct Tile {
  int warpgroups = 0, keys = 0;
  int q_stages = 1, kv_stages = 2;   // buffers
  int64_t from_keys = 0;             // the length of sequences from which on it is the better choice
  int64_t from_keys_of_windows = 0;  // the same of calls with a diagonal
  bool long_turns = false;           // a warpgroup's turn ends when S is there, not when the products are asked for
  int teams = 1;
  bool packs_heads = false;  // its rows are all heads of a group: for few queries

  constexpr int rows() const { return kWarpgroupRows * warpgroups; }
  // Queries of a warpgroup of which it has all heads of a group.
  static constexpr int packed_queries(int group) { return kWarpgroupRows / group; }
  // Queries of the tile, where so many heads are a group.
  constexpr int queries(int group) const { return packs_heads ? warpgroups * packed_queries(group) : rows(); }
  constexpr int threads() const { return 128 * (teams * warpgroups + 1); }
  static constexpr int columns(int head_dim) { return (head_dim + 63) / 64 * 64; }
  constexpr int q_bytes(int head_dim) const { return rows() * columns(head_dim) * 2; }
  constexpr int kv_bytes(int head_dim) const { return keys * columns(head_dim) * 2; }
  // Barriers and messages, and the buffers.
  constexpr int team_bytes(int head_dim) const {
    return 1024 + q_stages * q_bytes(head_dim) + 2 * kv_stages * kv_bytes(head_dim);
  }
  constexpr int shared_bytes(int head_dim) const { return teams * team_bytes(head_dim); }
};

// In order of preference: the first that suits the card, the length and the block mask is used. The last ones serve some block
// masks, and benchmarks. Unused places have no warpgroups.
using Tiles = std::array<Tile, 4>;

constexpr Tiles fwd_tiles(KernelKey key) {
  constexpr Tile kSquare{2, 128, 2, 2}, kFlat{2, 64, 2, 3};  // also those for block masks
  const bool is_modified = key.variant >= Variant::modified, is_plain = key.variant == Variant::plain;
  const auto packed = [](Tile tile) {
    tile.packs_heads = true;
    return tile;
  };
  if (key.head_dim <= 64) {
    // Two teams are the best where tiles are short, as they are under a diagonal: one computes while the other begins and
    // ends. And they are for block masks, in whose rows of 128 the larger tiles do not lie.
    constexpr Tile kTeams{2, 64, 1, 4, 0, 0, false, 2};
    if (is_plain) return {{{3, 128, 2, 3, 8192, 8192, true}, {4, 64, 2, 3, 0, 4096}, kTeams, packed(kTeams)}};
    if (is_modified) return {{{3, 96, 2, 2, 2048, 2048}, kSquare, kFlat}};
    return {{kTeams}};
  }
  if (key.head_dim <= 96) {
    if (is_plain) return {{{3, 112, 2, 2, 4096, 8192}, {3, 96, 2, 2, 4096, 4096}, kSquare, packed(kSquare)}};
    return {{is_modified ? kFlat : kSquare}};
  }
  if (key.head_dim <= 128) {
    if (is_plain) return {{{3, 64, 2, 3, 4096, 4096}, kSquare, kFlat, packed(kSquare)}};
    if (is_modified) return {{kSquare, kFlat}};
    return {{kSquare}};
  }
  constexpr Tile kLarge{2, 64, 1, 2};
  if (key.head_dim <= 192 && is_plain) return {{{2, 96, 1, 2, 4096, 8192}, kLarge, packed(kLarge)}};
  if (is_plain) return {{kLarge, packed(kLarge)}};
  return {{kLarge}};
}

}  // namespace flash::wgmma
