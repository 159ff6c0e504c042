// From Kᵀ-first scores and dP to P and dS, for the D fragments of a warp that hold keys along m16 and queries along n8:
// [m16][n8][c], c: keys {r, r, r + 8, r + 8}, queries {2l, 2l + 1} of each n8 tile.
#pragma once

#include "common/dropout.h"
#include "common/score.h"
#include "common/sequence.h"
#include "common/statistics.h"
#include "common/visibility.h"
#include "gpu/ptx/copy.cuh"
#include "gpu/ptx/math.cuh"

namespace flash {

// Where a thread's fragments lie in the plane of one head: its first key and query, counted within the sequence.
struct GradientPlace {
  int key, query;
  int keys, rows;  // of the sequence
};

// What the elements of one query share. P = exp2(S · c - shift): R · log2 e + log2 ℓ in one number, unless it is so large
// that its rounding would show (`far`): then R is subtracted first, as in the forward.
struct QueryNumbers {
  float shift = INFINITY, delta = 0, reference = 0, log2_sum = 0;  // of a row that is not there: P = 0

  static constexpr float kFar = 1 << 20;

  QueryNumbers() = default;
  __device__ __forceinline__ QueryNumbers(RowStatistics<float> row, float delta_of_row)
      : delta(delta_of_row), reference(row.reference), log2_sum(log2_sum_for_backward(row)) {
    shift = fmaf(reference, kLog2E<float>, log2_sum);
  }
};

// Those of kRows queries in shared memory, number by number.
template <int kRows>
struct QueryTable {
  uint32_t shared;

  __device__ __forceinline__ void store(int row, const QueryNumbers& numbers) const {
    const float all[4] = {numbers.shift, numbers.delta, numbers.reference, numbers.log2_sum};
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::store_shared_4(shared + (i * kRows + row) * 4, __float_as_uint(all[i]));
  }
  __device__ __forceinline__ float number(int index, int row) const {
    return __uint_as_float(ptx::load_shared_4(shared + (index * kRows + row) * 4));
  }
  __device__ __forceinline__ bool sees_nothing(int row) const { return number(3, row) == INFINITY; }
  __device__ __forceinline__ bool is_special(int row) const {
    return fabsf(number(2, row)) >= QueryNumbers::kFar || sees_nothing(row);
  }
  // Of the queries row and row + 1; row is even.
  __device__ __forceinline__ float2 shifts(int row) const { return ptx::load_shared_8(shared + row * 4); }
  __device__ __forceinline__ float2 deltas(int row) const { return ptx::load_shared_8(shared + (kRows + row) * 4); }
  __device__ __forceinline__ float2 references(int row) const {
    return ptx::load_shared_8(shared + (2 * kRows + row) * 4);
  }
  __device__ __forceinline__ float2 log2_sums(int row) const {
    return ptx::load_shared_8(shared + (3 * kRows + row) * 4);
  }
};

// What changes logits of a launch beside the scale: all of it at run time, element by element.
template <DataType kType>
struct LogitOptions {
  const BwdParams& p;
  const Sequence& sequence;
  int64_t head;
  float softcap, slope;
  int64_t diagonal;

  // s = scale · q·k on entry. Returns whether the row may see the key; `derivative` is that of the softcap.
  __device__ __forceinline__ bool apply(float& s, float& derivative, int query, int key) const {
    if (softcap > 0) {
      const Softcapped<float> capped = apply_softcap(s, softcap);
      s = capped.value, derivative = capped.derivative;
    }
    if (slope != 0) s += alibi(slope, query, key, diagonal);
    const int64_t row = sequence.q.leftpad + query, column = sequence.k.leftpad + key;
    if (p.bias.given()) {
      const int64_t at = p.bias.offset(sequence.index, head, row, column);
      s += p.bias.dtype == DataType::kFloat32 ? static_cast<const float*>(p.bias.data)[at]
                                              : ptx::unpack_low<kType>(static_cast<const uint16_t*>(p.bias.data)[at]);
    }
    return !p.mask.given() ||
           static_cast<const uint8_t*>(p.mask.data)[p.mask.offset(sequence.index, head, row, column)] != 0;
  }
};

// Which of a thread's elements dropout keeps. A call of Philox has the queries q, q + 8 of two neighbouring n8 tiles and
// four keys 8 apart.
template <int kM, int kN>
struct GradientDropout {
  uint32_t kept[(kM * kN + 7) / 8] = {};  // four bits for each n8 tile

  __device__ __forceinline__ void draw(const DropoutStream& stream, const GradientPlace& place,
                                       DropoutThreshold threshold) {
    constexpr int kKeySlots = 2 * kM < 4 ? 2 * kM : 4;  // of a call that this thread has
#pragma unroll
    for (int m = 0; m < kM; m += kKeySlots / 2)
#pragma unroll
      for (int n = 0; n < kN; n += 2)
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const int key = place.key + 16 * m, query = place.query + 8 * n + column;
          const DropoutDraws draws = stream.draws(dropout_query_group(query), dropout_key_group(key));
          const int first_slot = dropout_key_slot(key);
#pragma unroll
          for (int slot = 0; slot < kKeySlots; ++slot) {
            const uint32_t both = threshold.kept(first_slot + slot == 0   ? draws.words.x[0]
                                                 : first_slot + slot == 1 ? draws.words.x[1]
                                                 : first_slot + slot == 2 ? draws.words.x[2]
                                                                          : draws.words.x[3]);
            const int c = slot % 2 * 2 + column;
            keep(m + slot / 2, n, c, both >> 15 & 1);
            keep(m + slot / 2, n + 1, c, both >> 31);
          }
        }
  }

  __device__ __forceinline__ void keep(int m, int n, int c, uint32_t flag) {
    const int tile = m * kN + n;
    kept[tile / 8] |= flag << (tile % 8 * 4 + c);
  }
  __device__ __forceinline__ bool keeps(int m, int n, int c) const {
    const int tile = m * kN + n;
    return kept[tile / 8] >> (tile % 8 * 4 + c) & 1;
  }
};

}  // namespace flash
