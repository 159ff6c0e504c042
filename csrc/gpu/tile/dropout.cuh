// Dropout of P for the D fragments of a warp (softmax.cuh says who owns what): draws of 8 bits, compared four at a time,
// and masks for P after it was packed to 16 bits.
#pragma once

#include "common/dropout.h"
#include "gpu/ptx/math.cuh"

namespace flash {

// All draws of a warp's tile of 16 · kM queries × kKeys keys: one Philox call of a thread for each 16 × 32 of them.
// `stream` is in shared memory and read anew for each part, because registers are scarce; kKeepRows: there are some for
// what the calls of a row share.
template <int kM, int kKeys, bool kKeepRows>
struct WarpDropout {
  static constexpr int kBlocks = kKeys / static_cast<int>(kDropoutKeys);
  static constexpr int kUnits = 1 + kPhiloxRounds - DropoutRow::kRoundsDone;  // parts that the work comes in

  DropoutRow kept_rows[kKeepRows ? kM : 1] = {};
  uint32_t key_group, query_group;  // of this thread's first column and row
  uint32_t x[kM][kBlocks][4] = {};

  // `row`, `column`: this thread's first ones.
  __device__ __forceinline__ void begin(const DropoutStream& stream, int row, int column) {
    key_group = static_cast<uint32_t>(dropout_key_group(column));
    query_group = static_cast<uint32_t>(dropout_query_group(row));
    if constexpr (kKeepRows) {
#pragma unroll
      for (int m = 0; m < kM; ++m) kept_rows[m] = DropoutRow::make(stream, query_group + 8 * m);
    }
  }
  __device__ __forceinline__ DropoutRow row(const DropoutStream& stream, int m) const {
    return kKeepRows ? kept_rows[kKeepRows ? m : 0] : DropoutRow::make(stream, query_group + 8 * m);
  }

  __device__ __forceinline__ void draw(const DropoutStream& stream, int first_key) {
#pragma unroll
    for (int index = 0; index < kUnits; ++index) unit(index, stream, first_key);
  }

  // A part of it in the turn of `step` among kSteps.
  template <int kSteps>
  __device__ __forceinline__ void draw_among(int step, const DropoutStream& stream, int first_key) {
#pragma unroll
    for (int index = 0; index < kUnits; ++index)
      if (index * kSteps / kUnits == step) unit(index, stream, first_key);
  }

  // The first three rounds, or one of the others, of all calls side by side: they share the round's keys.
  __device__ __forceinline__ void unit(int index, const DropoutStream& stream, int first_key) {
    const uint32_t group = static_cast<uint32_t>(dropout_key_group(first_key)) + key_group;
    const uint32_t round = DropoutRow::kRoundsDone + index - 1;
    const uint32_t key0 = stream.key0 + round * kPhiloxWeyl0, key1 = stream.key1 + round * kPhiloxWeyl1;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint64_t product = static_cast<uint64_t>(kPhiloxMultiplier0) * ((group + 4 * block) ^ row(stream, 0).mask);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if (index == 0)
          row(stream, m).start(x[m][block], product);
        else
          philox_round(x[m][block], key0, key1);
        // Here, and not where the draws are used: compilers like to move what has no effect down to its use.
#pragma unroll
        for (uint32_t& word : x[m][block]) word = ptx::opaque(word);
      }
    }
  }

  // P of one k16 step as A fragment: zeros where dropout drops.
  __device__ __forceinline__ void drop(uint32_t (&rP)[4], int m, int depth, const DropoutStream& stream, int first_key,
                                       const DropoutThreshold& threshold) const {
    const int block = depth / 2;
    const int key_block = first_key / static_cast<int>(kDropoutKeys) + block;
    const DropoutCut cut = threshold.cut(stream.phase(query_group / 8 + m, key_block));
    const uint32_t even = cut.kept(x[m][block][depth % 2]), odd = cut.kept(x[m][block][2 + depth % 2]);
    // The top bits of byte i of both columns become the mask of fragment i.
    rP[0] &= ptx::permute_signs<0xCC88>(even, odd);
    rP[1] &= ptx::permute_signs<0xDD99>(even, odd);
    rP[2] &= ptx::permute_signs<0xEEAA>(even, odd);
    rP[3] &= ptx::permute_signs<0xFFBB>(even, odd);
  }
};

// Nothing is drawn, nothing is dropped.
template <int kM, bool kKeepRows>
struct WarpDropout<kM, 0, kKeepRows> {};

}  // namespace flash
