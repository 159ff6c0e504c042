// Dropout of P for the D fragments of a warp (softmax.cuh says who owns what): draws of 16 bits, compared two at a time,
// and masks for P after it was packed to 16 bits.
#pragma once

#include "common/dropout.h"
#include "gpu/ptx/math.cuh"

namespace flash {

// All draws of a warp's tile of 16 · kM queries × kKeys keys.
template <int kM, int kKeys>
struct WarpDropout {
  static constexpr int kGroups = kKeys / static_cast<int>(kDropoutKeys);
  static constexpr int kRounds = 10 - DropoutRow::kRoundsDone;
  static constexpr int kUnits = 1 + kRounds;  // parts that the work for one tile comes in

  DropoutRow rows[kM];
  uint32_t key0, key1;  // of Philox
  uint32_t column;
  uint32_t x[kM][kGroups][2][4] = {};  // [][][column % 2][n8 tile of the group]; low half row r, high half row r + 8

  // `row`, `first_column`: this thread's first ones.
  __device__ __forceinline__ void begin(const DropoutStream& stream, int row, int first_column) {
    key0 = stream.key0, key1 = stream.key1, column = first_column;
#pragma unroll
    for (int m = 0; m < kM; ++m)
      rows[m] = DropoutRow::make(stream, static_cast<uint32_t>(dropout_query_group(row + 16 * m)));
  }

  __device__ __forceinline__ void draw(int first_key) {
#pragma unroll
    for (int index = 0; index < kUnits; ++index) unit(index, first_key);
  }

  // A part of it in the turn of `step` among kSteps.
  template <int kSteps>
  __device__ __forceinline__ void draw_among(int step, int first_key) {
#pragma unroll
    for (int index = 0; index < kUnits; ++index)
      if (index * kSteps / kUnits == step) unit(index, first_key);
  }

  // The first three rounds, or one of the others, of all calls side by side: they share the round's keys.
  __device__ __forceinline__ void unit(int index, int first_key) {
    const uint32_t keys = static_cast<uint32_t>(first_key / static_cast<int>(kDropoutKeys) * 8) + column;
    const uint32_t round = DropoutRow::kRoundsDone + index - 1;
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint64_t product = static_cast<uint64_t>(kPhiloxMultiplier0) * ((keys + 8 * group + c) ^ rows[0].mask);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if (index == 0)
            rows[m].start(x[m][group][c], product);
          else
            philox_round(x[m][group][c], key0 + round * kPhiloxWeyl0, key1 + round * kPhiloxWeyl1);
        // Here, and not where the draws are used: compilers like to move what has no effect down to its use.
#pragma unroll
          for (uint32_t& word : x[m][group][c]) word = ptx::opaque(word);
        }
      }
  }

  // P of one k16 step as A fragment: zeros where dropout drops.
  __device__ __forceinline__ void drop(uint32_t (&rP)[4], int m, int depth, DropoutThreshold threshold) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int group = depth / 2, slot = depth % 2 * 2 + tile;
      const uint32_t even = threshold.kept(x[m][group][0][slot]), odd = threshold.kept(x[m][group][1][slot]);
      // Bits 15 and 31 of the columns become masks of their rows.
      rP[2 * tile] &= ptx::permute_signs<0xDD99>(even, odd);
      rP[2 * tile + 1] &= ptx::permute_signs<0xFFBB>(even, odd);
    }
  }
};

// Nothing is drawn, nothing is dropped.
template <int kM>
struct WarpDropout<kM, 0> {};

}  // namespace flash
