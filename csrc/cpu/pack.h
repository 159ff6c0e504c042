// Rows of a tensor to operands of a product, and back.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/visibility.h"
#include "cpu/convert.h"
#include "cpu/micro_kernels.h"

namespace flash::cpu {

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

template <class Real>
constexpr DataType kNative = std::is_same_v<Real, double> ? DataType::kFloat64 : DataType::kFloat32;

// Rows where they are, as A: themselves, or what their columns are.
template <class Real>
RowOperand<Real> rows_in_place(const Operand& x, int64_t offset) {
  return {static_cast<const Real*>(x.data) + offset, kRowBlock * x.row_stride, x.row_stride, 1, kLanes};
}
template <class Real>
RowOperand<Real> columns_in_place(const Operand& x, int64_t offset) {
  return {static_cast<const Real*>(x.data) + offset, kRowBlock, 1, x.row_stride, kLanes * x.row_stride};
}

// Packs `rows` rows as A: [block][part of 16 elements][6][16]. Those outside `readable` are not read and become 0, as
// do elements behind the last.
template <class Real>
void pack_row_blocks(DataType dtype, const Operand& x, int64_t offset, Range readable, int64_t rows, int64_t dim,
                     Real* out) {
  const int64_t padded = round_up(dim, kLanes);
  if (readable.begin > 0 || readable.end < rows) std::fill(out, out + round_up(rows, kRowBlock) * padded, Real(0));
  for (int64_t r = readable.begin; r < readable.end; ++r)
    with_loader<Real>(dtype, x.data, offset + r * x.row_stride, [&](auto load) {
      Real* to = out + r / kRowBlock * kRowBlock * padded + r % kRowBlock * kLanes;
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes, to += kRowBlock * kLanes)
        for (int64_t i = 0; i < kLanes; ++i) to[i] = load(d + i);
      for (int64_t i = 0; d + i < padded; ++i) to[i] = d + i < dim ? load(d + i) : Real(0);
    });
}
template <class Real>
RowOperand<Real> packed_rows(const Real* data, int64_t dim) {
  return {data, kRowBlock * round_up(dim, kLanes), kLanes, 1, kRowBlock * kLanes};
}

// Packs their columns as A: [block of the dim][row][6].
template <class Real>
void pack_column_blocks(DataType dtype, const Operand& x, int64_t offset, Range readable, int64_t rows, int64_t dim,
                        Real* out) {
  if (readable.begin > 0 || readable.end < rows) std::fill(out, out + rows * round_up(dim, kRowBlock), Real(0));
  for (int64_t r = readable.begin; r < readable.end; ++r)
    with_loader<Real>(dtype, x.data, offset + r * x.row_stride, [&](auto load) {
      Real* to = out + r * kRowBlock;
      int64_t d = 0;
      for (; d + kRowBlock <= dim; d += kRowBlock, to += rows * kRowBlock)
        for (int64_t i = 0; i < kRowBlock; ++i) to[i] = load(d + i);
      for (int64_t i = 0; d + i < dim; ++i) to[i] = load(d + i);
    });
}
template <class Real>
RowOperand<Real> packed_columns(const Real* data, int64_t rows) {
  return {data, kRowBlock * rows, 1, kRowBlock, kRowBlock * kLanes};
}

// Rows in panels along the dim: out[panel][row][16], zero behind the last element. A panel holds `capacity` rows.
template <class Real>
void pack_row_panels(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, int64_t capacity,
                     Real* out) {
  with_loader<Real>(dtype, x.data, offset, [&](auto load) {
    for (int64_t r = 0; r < rows; ++r) {
      Real* to = out + r * kLanes;
      const int64_t row = r * x.row_stride;
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes, to += capacity * kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) to[lane] = load(row + d + lane);
      if (d == dim) continue;
      for (int64_t lane = 0; lane < kLanes; ++lane) to[lane] = d + lane < dim ? load(row + d + lane) : Real(0);
    }
  });
}

// Rows that are no array of Reals are converted some at a time.
inline constexpr int64_t kConvertRows = kLanes, kConvertColumns = 64;

// out[c][lane] = factor · element c of row `lane`, in one panel; convert(row, first, count, to) gives `count` elements.
template <class Real, class Convert>
void lanes_from_rows(int64_t rows, int64_t columns, Real factor, const Convert& convert, Real* out) {
  Real converted[kConvertRows * kConvertColumns];
  for (int64_t r = 0; r < rows; r += kConvertRows)
    for (int64_t c = 0; c < columns; c += kConvertColumns) {
      const int64_t some_rows = std::min(kConvertRows, rows - r), some = std::min(kConvertColumns, columns - c);
      for (int64_t n = 0; n < some_rows; ++n) convert(r + n, c, some, converted + n * kConvertColumns);
      micro_kernels<Real>().transpose(converted, kConvertColumns, some_rows, some, factor, out + c * kLanes + r,
                                      kLanes);
    }
}

// out[panel][d][lane] = factor · row `16 panel + lane` of the operand; lanes from `rows` on become 0.
template <class Real>
void pack_lanes(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, Real factor,
                int64_t panels, Real* out) {
  for (int64_t panel = 0; panel < panels; ++panel, out += dim * kLanes, offset += kLanes * x.row_stride) {
    const int64_t some_lanes = std::clamp<int64_t>(rows - panel * kLanes, 0, kLanes);
    if (dtype == kNative<Real>) {
      micro_kernels<Real>().transpose(static_cast<const Real*>(x.data) + offset, x.row_stride, some_lanes, dim, factor,
                                      out, kLanes);
    } else {
      const auto convert = [&](int64_t row, int64_t first, int64_t count, Real* to) {
        with_loader<Real>(dtype, x.data, offset + row * x.row_stride + first, [&](auto load) {
          for (int64_t c = 0; c < count; ++c) to[c] = load(c);
        });
      };
      lanes_from_rows(some_lanes, dim, factor, convert, out);
    }
    if (some_lanes < kLanes)
      for (int64_t d = 0; d < dim; ++d) std::fill(out + d * kLanes + some_lanes, out + (d + 1) * kLanes, Real(0));
  }
}

// Row `lane` of the operand = in[d][lane], for the lanes of one panel.
template <class Real>
void unpack_lanes(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, const Real* in) {
  if (dtype == kNative<Real>) {
    micro_kernels<Real>().transpose(in, kLanes, dim, rows, Real(1), static_cast<Real*>(x.data) + offset, x.row_stride);
    return;
  }
  Real converted[kConvertRows * kConvertColumns];
  for (int64_t r = 0; r < rows; r += kConvertRows)
    for (int64_t d = 0; d < dim; d += kConvertColumns) {
      const int64_t some_rows = std::min(kConvertRows, rows - r), some = std::min(kConvertColumns, dim - d);
      micro_kernels<Real>().transpose(in + d * kLanes + r, kLanes, some, some_rows, Real(1), converted,
                                      kConvertColumns);
      for (int64_t n = 0; n < some_rows; ++n)
        with_storer<Real>(dtype, x.data, offset + (r + n) * x.row_stride + d, [&](auto store) {
          for (int64_t c = 0; c < some; ++c) store(c, converted[n * kConvertColumns + c]);
        });
    }
}

// Rows of the operand = factor · in[panel][row][16]; a factor of 0 gives 0 whatever `in` holds.
template <class Real>
void unpack_row_panels(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, Real factor,
                       const Real* in, int64_t panel_stride) {
  with_storer<Real>(dtype, x.data, offset, [&](auto store) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = r * x.row_stride;
      const Real* from = in + r * kLanes;
      for (int64_t d = 0; d < dim; d += kLanes, from += panel_stride) {
        const int64_t some = std::min(kLanes, dim - d);
        if (factor == 0) {
          for (int64_t lane = 0; lane < some; ++lane) store(row + d + lane, Real(0));
        } else if (some == kLanes) {
          for (int64_t lane = 0; lane < kLanes; ++lane) store(row + d + lane, factor * from[lane]);
        } else {
          for (int64_t lane = 0; lane < some; ++lane) store(row + d + lane, factor * from[lane]);
        }
      }
    }
  });
}

}  // namespace flash::cpu
