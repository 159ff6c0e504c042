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
#include "gpu/tile/panels.cuh"
#include "gpu/tile/score.cuh"

namespace flash {

// Where a thread's fragments lie in the plane of one head: its first key and query, counted within the sequence.
struct GradientPlace {
  int key, query;
  int keys, rows;  // of the sequence
};

// What the elements of one query share. P = exp2(S · c - shift): R · log2 e + log2 ℓ in one number, unless it is so large
// that its rounding would show: then R is subtracted first (rebase_far), as in the forward, and shift is log2 ℓ.
struct QueryNumbers {
  float shift = INFINITY, delta = 0, reference = 0;  // of a row that is not there: P = 0

  static constexpr float kFar = 1 << 20;

  QueryNumbers() = default;
  __device__ __forceinline__ QueryNumbers(RowStatistics<float> row, float delta_of_row)
      : shift(log2_sum_for_backward(row)), delta(delta_of_row), reference(reference_for_backward(row)) {
    if (!is_far(reference)) shift = fmaf(reference, kLog2E<float>, shift);
  }
  static __device__ __forceinline__ bool is_far(float reference) { return fabsf(reference) >= kFar; }
  __device__ __forceinline__ bool sees_nothing() const { return shift == INFINITY; }
  __device__ __forceinline__ bool is_special() const { return is_far(reference) || sees_nothing(); }
};

// Those of a block of kRows queries as threads want to read them, first in global memory, then in shared memory: 16 bytes
// at a time, of the queries 2l, 2l + 1 of the n8 tiles of a warp's D fragments. kDealt: in the order of dealt_query, so
// that those of four n8 tiles are neighbours.
template <int kRowsOf, bool kDealtOf>
struct QueryTable {
  static constexpr int kRows = kRowsOf;
  static constexpr bool kDealt = kDealtOf;
  // [shift of each query], [-delta of queries 2i, 2i + 1, 2i, 2i + 1], [reference], whether some query is special
  static constexpr int kDeltas = kRows, kReferences = 3 * kRows, kSpecial = 4 * kRows, kFloats = 4 * kRows + 4;
  uint32_t shared;

  static __device__ __forceinline__ constexpr int place(int row) { return kDealt ? dealt_query(row) : row; }

  static __device__ __forceinline__ void store(float* table, int row, const QueryNumbers& numbers) {
    table[place(row)] = numbers.shift;
    float* deltas = table + kDeltas + row / 2 * 4 + row % 2;
    deltas[0] = deltas[2] = -numbers.delta;
    table[kReferences + row] = numbers.reference;
  }
  static __device__ __forceinline__ float minus_delta(const float* table, int row) {
    return table[kDeltas + row / 2 * 4 + row % 2];
  }

  __device__ __forceinline__ float number(int at) const { return __uint_as_float(ptx::load_shared_4(shared + 4 * at)); }
  __device__ __forceinline__ bool is_special() const { return ptx::load_shared_4(shared + 4 * kSpecial) != 0; }
  __device__ __forceinline__ bool sees_nothing(int row) const { return number(place(row)) == INFINITY; }
  __device__ __forceinline__ float reference(int row) const { return number(kReferences + row); }

  // Of the n8 tiles from row `first` on: [n8][c].
  template <int kN>
  __device__ __forceinline__ void shifts(float (&x)[kN][2], int first, int lane) const {
    if constexpr (kDealt) {
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        const uint4 all = ptx::load_shared_16(shared + 4 * (first + n / 4 * 32 + lane % 4 * 8 + n % 4 * 2));
        x[n][0] = __uint_as_float(all.x), x[n][1] = __uint_as_float(all.y);
        x[n + 1][0] = __uint_as_float(all.z), x[n + 1][1] = __uint_as_float(all.w);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 both = ptx::load_shared_8(shared + 4 * (first + 8 * n + lane % 4 * 2));
        x[n][0] = both.x, x[n][1] = both.y;
      }
    }
  }
  // What a D fragment of the n8 tile at row `first` starts from for dP - delta: [c].
  __device__ __forceinline__ void minus_deltas(float (&x)[4], int first, int lane) const {
    const uint4 all = ptx::load_shared_16(shared + 4 * (kDeltas + 2 * first + lane % 4 * 4));
    x[0] = __uint_as_float(all.x), x[1] = __uint_as_float(all.y);
    x[2] = __uint_as_float(all.z), x[3] = __uint_as_float(all.w);
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
      const float bias = bias_at<kType>(p, at);
      if (bias == -INFINITY) return false;  // whatever s is
      s += bias;
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
