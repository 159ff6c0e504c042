// What forward and backward share: sizes of a tile, packing rows into it, and its logits.
// A tile is `rows` queries (lanes) × `keys` keys; S^T is [key][lane].
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/dropout.h"
#include "common/score.h"
#include "common/sequence.h"
#include "common/statistics.h"
#include "common/visibility.h"
#include "cpu/convert.h"
#include "cpu/micro_kernels.h"
#include "cpu/parallel.h"

namespace flash::cpu {

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// 64 × 128: S^T is 32 KB in fp32. Short sequences get smaller tiles, so that a call at seqlen 16 needs little memory.
struct TileSize {
  int64_t rows;  // a multiple of kLanes
  int64_t keys;
};

inline TileSize tile_size(int64_t longest_q, int64_t longest_k) {
  return {std::clamp<int64_t>(round_up(longest_q, kLanes), kLanes, 64), std::clamp<int64_t>(longest_k, 1, 128)};
}

// out[row][0 .. dim) = rows of the operand; columns up to `stride` become 0.
template <class Real>
void pack_rows(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, Real* out, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r, out += stride) {
    with_loader<Real>(dtype, x.data, offset + r * x.row_stride, [&](auto load) {
      for (int64_t d = 0; d < dim; ++d) out[d] = load(d);
    });
    std::fill(out + dim, out + stride, Real(0));
  }
}

// Rows of an operand as Reals: a copy, or where they are.
template <class Real>
struct RowsView {
  const Real* data;
  int64_t stride;
};

template <class Real>
constexpr DataType kNative = std::is_same_v<Real, double> ? DataType::kFloat64 : DataType::kFloat32;

// Whether rows are read where they are. A copy pays where they are read by many query blocks: rows of a tensor are far
// apart, often by a power of two, and evict one another from the cache.
template <class Real>
bool reads_in_place(const AttentionParams& p, int64_t longest_q, TileSize size) {
  return p.dtype == kNative<Real> && longest_q <= size.rows;
}

template <class Real>
RowsView<Real> view_rows(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, bool in_place,
                         Real* buffer, int64_t stride) {
  if (in_place) return {static_cast<const Real*>(x.data) + offset, x.row_stride};
  pack_rows(dtype, x, offset, rows, dim, buffer, stride);
  return {buffer, stride};
}

// out[c][r] = factor · in[r][c], 4 × 4 elements at a time in fp32.
template <class Real>
void transpose(const Real* in, int64_t in_stride, int64_t rows, int64_t columns, Real factor, Real* out,
               int64_t out_stride) {
  int64_t r = 0;
  if constexpr (std::is_same_v<Real, float>) {
    typedef float Four __attribute__((vector_size(16)));
    for (; r + 4 <= rows; r += 4) {
      int64_t c = 0;
      for (; c + 4 <= columns; c += 4) {
        Four x[4];
        for (int n = 0; n < 4; ++n) {
          std::memcpy(&x[n], in + (r + n) * in_stride + c, sizeof(Four));
          x[n] *= factor;
        }
        const Four low01 = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5),
                   high01 = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
        const Four low23 = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5),
                   high23 = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
        const Four y[4] = {
            __builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
            __builtin_shufflevector(high01, high23, 0, 1, 4, 5), __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
        for (int n = 0; n < 4; ++n) std::memcpy(out + (c + n) * out_stride + r, &y[n], sizeof(Four));
      }
      for (; c < columns; ++c)
        for (int n = 0; n < 4; ++n) out[c * out_stride + r + n] = factor * in[(r + n) * in_stride + c];
    }
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) out[c * out_stride + r] = factor * in[r * in_stride + c];
}

// Rows of another type are converted some at a time.
inline constexpr int64_t kConvertRows = 4, kConvertColumns = 128;

// out[d][lane] = factor · row `lane` of the operand; lanes from `rows` up to `lanes` become 0.
template <class Real>
void pack_lanes(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, Real factor, Real* out,
                int64_t lanes) {
  if (dtype == kNative<Real>) {
    transpose(static_cast<const Real*>(x.data) + offset, x.row_stride, rows, dim, factor, out, lanes);
  } else {
    Real converted[kConvertRows * kConvertColumns];
    for (int64_t r = 0; r < rows; r += kConvertRows)
      for (int64_t d = 0; d < dim; d += kConvertColumns) {
        const int64_t some_rows = std::min(kConvertRows, rows - r), some = std::min(kConvertColumns, dim - d);
        for (int64_t n = 0; n < some_rows; ++n)
          with_loader<Real>(dtype, x.data, offset + (r + n) * x.row_stride + d, [&](auto load) {
            for (int64_t c = 0; c < some; ++c) converted[n * kConvertColumns + c] = load(c);
          });
        transpose(converted, kConvertColumns, some_rows, some, factor, out + d * lanes + r, lanes);
      }
  }
  if (rows < lanes)
    for (int64_t d = 0; d < dim; ++d) std::fill(out + d * lanes + rows, out + (d + 1) * lanes, Real(0));
}

// x[d][lane] *= factor[lane]; a factor of 0 gives 0 whatever x holds.
template <class Real>
void scale_lanes(Real* x, int64_t dim, const Real* factor, int64_t rows, int64_t lanes) {
  for (int64_t d = 0; d < dim; ++d)
    for (int64_t r = 0; r < lanes; ++r) x[d * lanes + r] *= factor[r];
  for (int64_t r = 0; r < rows; ++r)
    if (factor[r] == 0)
      for (int64_t d = 0; d < dim; ++d) x[d * lanes + r] = 0;
}

// Rows of the operand = in[d][lane].
template <class Real>
void unpack_lanes(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, const Real* in,
                  int64_t lanes) {
  if (dtype == kNative<Real>) {
    transpose(in, lanes, dim, rows, Real(1), static_cast<Real*>(x.data) + offset, x.row_stride);
    return;
  }
  Real converted[kConvertRows * kConvertColumns];
  for (int64_t r = 0; r < rows; r += kConvertRows)
    for (int64_t d = 0; d < dim; d += kConvertColumns) {
      const int64_t some_rows = std::min(kConvertRows, rows - r), some = std::min(kConvertColumns, dim - d);
      transpose(in + d * lanes + r, lanes, some, some_rows, Real(1), converted, kConvertColumns);
      for (int64_t n = 0; n < some_rows; ++n)
        with_storer<Real>(dtype, x.data, offset + (r + n) * x.row_stride + d, [&](auto store) {
          for (int64_t c = 0; c < some; ++c) store(c, converted[n * kConvertColumns + c]);
        });
    }
}

// One head of one sequence.
template <class Real>
struct HeadContext {
  Sequence sequence;
  int64_t head = 0;
  Visibility visibility;
  Real alibi_slope = 0;
  DropoutStream dropout{};

  HeadContext(const AttentionParams& p, const Sequence& s, int64_t h)
      : sequence(s),
        head(h),
        visibility(make_visibility(p.window, s.q.length, s.k.length)),
        alibi_slope(flash::alibi_slope<Real>(p.score, s.index, h)) {
    if (p.dropout.given()) dropout = dropout_stream(p.dropout.seed, s.index, h);
  }
};

// Where a tile lies: positions, counted within the sequence.
struct TilePlace {
  int64_t first_row, rows;
  int64_t first_key, keys;

  Range row_range() const { return {first_row, first_row + rows}; }
  Range key_range() const { return {first_key, first_key + keys}; }
};

// The logits of a tile from packed operands: S^T = K · (scale Q)^T, softcap, ALiBi, bias; -inf where a row does not see
// a key. `softcap_derivative` ([key][lane], may be null) receives d(softcapped)/d(s). Lanes beyond the rows hold finite
// values if K is finite, and nothing reads them.
template <class Real>
void logits(const AttentionParams& p, const HeadContext<Real>& head, const TilePlace& tile, const Real* q_lanes,
            RowsView<Real> k, Real* scores, Real* softcap_derivative, int64_t lanes) {
  micro_kernels<Real>().multiply({tile.keys, p.dim, lanes, k.data, k.stride, 1, q_lanes, lanes, scores, lanes, false});

  if (p.score.softcap > 0) {
    const Real softcap = static_cast<Real>(p.score.softcap);
    for (int64_t x = 0; x < tile.keys * lanes; ++x) {
      const Softcapped<Real> capped = apply_softcap(scores[x], softcap);
      scores[x] = capped.value;
      if (softcap_derivative != nullptr) softcap_derivative[x] = capped.derivative;
    }
  }
  if (head.alibi_slope != 0) {
    for (int64_t j = 0; j < tile.keys; ++j)
      for (int64_t r = 0; r < tile.rows; ++r)
        scores[j * lanes + r] +=
            alibi(head.alibi_slope, tile.first_row + r, tile.first_key + j, head.visibility.diagonal);
  }
  const int64_t bias_row = head.sequence.q.leftpad + tile.first_row,
                bias_column = head.sequence.k.leftpad + tile.first_key;
  if (p.bias.given()) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t offset = p.bias.offset(head.sequence.index, head.head, bias_row + r, bias_column);
      with_loader<Real>(p.bias.dtype, p.bias.data, offset, [&](auto load) {
        for (int64_t j = 0; j < tile.keys; ++j) scores[j * lanes + r] += load(j * p.bias.column_stride);
      });
    }
  }
  if (p.mask.given()) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const auto* allowed = static_cast<const uint8_t*>(p.mask.data) +
                            p.mask.offset(head.sequence.index, head.head, bias_row + r, bias_column);
      for (int64_t j = 0; j < tile.keys; ++j)
        if (allowed[j * p.mask.column_stride] == 0) scores[j * lanes + r] = -INFINITY;
    }
  }
  const Range seen_by_all = head.visibility.keys_of_all(tile.row_range());
  if (tile.first_key < seen_by_all.begin || tile.first_key + tile.keys > seen_by_all.end) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const Range keys = head.visibility.keys(tile.first_row + r);
      for (int64_t j = 0; j < tile.keys; ++j)
        if (!keys.contains(tile.first_key + j)) scores[j * lanes + r] = -INFINITY;
    }
  }
}

// keep[key][lane] = whether dropout keeps the element.
inline void dropout_tile(const Dropout& dropout, const DropoutStream& stream, const TilePlace& tile, uint8_t* keep,
                         int64_t lanes) {
  const Range rows = tile.row_range(), keys = tile.key_range();
  for (int64_t q0 = rows.begin / kDropoutQueries * kDropoutQueries; q0 < rows.end; q0 += kDropoutQueries)
    for (int64_t k0 = keys.begin / kDropoutKeys * kDropoutKeys; k0 < keys.end; k0 += kDropoutKeys)
      for (int64_t group = 0; group < 64; ++group) {
        const int64_t q1 = q0 + group / 8, k1 = k0 + group % 8;
        const DropoutDraws draws = stream.draws(dropout_query_group(q1), dropout_key_group(k1));
        for (int query_slot = 0; query_slot < 2; ++query_slot)
          for (int key_slot = 0; key_slot < 4; ++key_slot) {
            const int64_t q = q1 + 8 * query_slot, k = k1 + 8 * key_slot;
            if (!rows.contains(q) || !keys.contains(k)) continue;
            keep[(k - keys.begin) * lanes + (q - rows.begin)] = draws.draw(query_slot, key_slot) >= dropout.threshold;
          }
      }
}

template <class Real>
void drop(const uint8_t* keep, const TilePlace& tile, Real* x, int64_t lanes) {
  for (int64_t j = 0; j < tile.keys; ++j)
    for (int64_t r = 0; r < tile.rows; ++r)
      if (keep[j * lanes + r] == 0) x[j * lanes + r] = 0;
}

}  // namespace flash::cpu
