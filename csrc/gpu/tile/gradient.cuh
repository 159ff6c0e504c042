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
// the keys k, k + 1 + {0, 8, 16, 24} of two neighbouring m16 tiles, k even. Lanes that differ in bit 2 have k and k + 1:
// the one draws for the even queries, the other for the odd ones, and they exchange what each needs.
template <int kM, int kN>
struct GradientDropout {
  static constexpr int kKeyBlocks = (kM + 1) / 2, kQueryBlocks = kN / 2;
  static_assert((kM == 1 || kM % 2 == 0) && kN % 2 == 0);
  uint32_t kept[kKeyBlocks][kQueryBlocks] = {};

  __device__ __forceinline__ void keep_all() {
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n) kept[m][n] = ~0u;
  }

  __device__ __forceinline__ void draw(const DropoutStream& stream, const GradientPlace& place,
                                       const DropoutThreshold& threshold) {
    const bool odd = place.key % 2;
    const bool far = place.key / 16 % 2;  // of a single m16 tile
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m) {
      const int key = place.key + 32 * m;
      const auto column = DropoutColumn::make(stream, static_cast<uint32_t>(dropout_key_group(key)));
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n) {
        const int query = place.query + 16 * n + odd;
        uint32_t x[4];
        column.start(x, static_cast<uint32_t>(dropout_query_group(query)));
#pragma unroll
        for (int round = DropoutColumn::kRoundsDone; round < kPhiloxRounds; ++round)
          philox_round(x, stream.key0 + round * kPhiloxWeyl0, stream.key1 + round * kPhiloxWeyl1);
        const DropoutCut cut = threshold.cut(
            stream.phase(query / static_cast<int>(kDropoutQueries), key / static_cast<int>(kDropoutKeys)));
        // Of even keys and of odd ones: bits 7 and 6 of each byte are m16 tiles 1 and 0, or 7 a single one's.
        uint32_t keys[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          keys[i] = kM == 1 ? cut.kept(far ? x[2 * i + 1] : x[2 * i]) & 0x80808080u
                            : (cut.kept(x[2 * i + 1]) & 0x80808080u) | (cut.kept(x[2 * i]) & 0x80808080u) >> 1;
        const uint32_t mine = odd ? keys[1] : keys[0];
        const uint32_t others = __shfl_xor_sync(~0u, odd ? keys[0] : keys[1], 4);
        kept[m][n] = odd ? others | mine >> 2 : mine | others >> 2;  // even queries, odd queries
      }
    }
  }

  __device__ __forceinline__ bool keeps(int m, int n, int c) const {
    const int byte = c / 2 * 2 + n % 2, far = kM == 1 ? 1 : m % 2;
    return ptx::has_bits(kept[m / 2][n / 2], 1u << (8 * byte + 6 + far - 2 * (c % 2)));
  }
};

}  // namespace flash
