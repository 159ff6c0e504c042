// Rows of a tensor to operands of a product, and back.
#pragma once

#include <algorithm>
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

// Elements of a row as Reals: where they are, or converted some at a time: use(first, count, elements). `first` is a
// multiple of kLanes and of kRowBlock.
inline constexpr int64_t kSomeElements = 480;

template <class Real, class Use>
void with_row(DataType dtype, const Operand& x, int64_t offset, int64_t dim, const Use& use) {
  if (dtype == kNative<Real>) {
    use(int64_t{0}, dim, static_cast<const Real*>(x.data) + offset);
    return;
  }
  static_assert(kSomeElements % kLanes == 0 && kSomeElements % kRowBlock == 0);
  Real converted[kSomeElements];
  const auto* row = static_cast<const char*>(x.data) + offset * bytes_of(dtype);
  for (int64_t first = 0; first < dim; first += kSomeElements) {
    const int64_t some = std::min(kSomeElements, dim - first);
    micro_kernels<Real>().load(dtype, row + first * bytes_of(dtype), some, converted);
    use(first, some, static_cast<const Real*>(converted));
  }
}

// Parts of 16 elements, `stride` apart, zero behind the last element.
template <class Real>
void put_in_parts(const Real* row, int64_t count, int64_t stride, Real* to) {
  int64_t d = 0;
  for (; d + kLanes <= count; d += kLanes, to += stride)
    for (int64_t i = 0; i < kLanes; ++i) to[i] = row[d + i];
  if (d == count) return;
  for (int64_t i = 0; i < kLanes; ++i) to[i] = d + i < count ? row[d + i] : Real(0);
}

// Packs `rows` rows as A: [block][part of 16 elements][6][16]. Those outside `readable` are not read and become 0, as
// do elements behind the last.
template <class Real>
void pack_row_blocks(DataType dtype, const Operand& x, int64_t offset, Range readable, int64_t rows, int64_t dim,
                     Real* out) {
  const int64_t padded = round_up(dim, kLanes);
  if (readable.begin > 0 || readable.end < rows) std::fill(out, out + round_up(rows, kRowBlock) * padded, Real(0));
  for (int64_t r = readable.begin; r < readable.end; ++r) {
    Real* to = out + r / kRowBlock * kRowBlock * padded + r % kRowBlock * kLanes;
    with_row<Real>(dtype, x, offset + r * x.row_stride, dim, [&](int64_t first, int64_t count, const Real* row) {
      put_in_parts(row, count, kRowBlock * kLanes, to + first * kRowBlock);
    });
  }
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
    with_row<Real>(dtype, x, offset + r * x.row_stride, dim, [&](int64_t first, int64_t count, const Real* row) {
      Real* to = out + first * rows + r * kRowBlock;
      int64_t d = 0;
      for (; d + kRowBlock <= count; d += kRowBlock, to += rows * kRowBlock)
        for (int64_t i = 0; i < kRowBlock; ++i) to[i] = row[d + i];
      for (int64_t i = 0; d + i < count; ++i) to[i] = row[d + i];
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
  for (int64_t r = 0; r < rows; ++r)
    with_row<Real>(dtype, x, offset + r * x.row_stride, dim, [&](int64_t first, int64_t count, const Real* row) {
      put_in_parts(row, count, capacity * kLanes, out + first * capacity + r * kLanes);
    });
}

// Rows that are no array of Reals are converted some at a time.
inline constexpr int64_t kConvertRows = kLanes, kConvertColumns = 64;

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
      Real converted[kConvertRows * kConvertColumns];
      const auto* rows_of_panel = static_cast<const char*>(x.data) + offset * bytes_of(dtype);
      for (int64_t c = 0; c < dim; c += kConvertColumns) {
        const int64_t some = std::min(kConvertColumns, dim - c);
        for (int64_t n = 0; n < some_lanes; ++n)
          micro_kernels<Real>().load(dtype, rows_of_panel + (n * x.row_stride + c) * bytes_of(dtype), some,
                                     converted + n * kConvertColumns);
        micro_kernels<Real>().transpose(converted, kConvertColumns, some_lanes, some, factor, out + c * kLanes, kLanes);
      }
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
        micro_kernels<Real>().store(
            dtype, converted + n * kConvertColumns, some,
            static_cast<char*>(x.data) + (offset + (r + n) * x.row_stride + d) * bytes_of(dtype));
    }
}

// Rows of the operand = factor · in[panel][row][16]; a factor of 0 gives 0 whatever `in` holds.
template <class Real>
void unpack_row_panels(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, Real factor,
                       const Real* in, int64_t panel_stride) {
  Real scaled[kSomeElements];
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t first = 0; first < dim; first += kSomeElements) {
      const int64_t some = std::min(kSomeElements, dim - first);
      const Real* from = in + first / kLanes * panel_stride + r * kLanes;
      for (int64_t d = 0; d < some; d += kLanes, from += panel_stride)  // whole panels: their ends are never read
        for (int64_t lane = 0; lane < kLanes; ++lane) scaled[d + lane] = factor == 0 ? Real(0) : factor * from[lane];
      micro_kernels<Real>().store(dtype, scaled, some,
                                  static_cast<char*>(x.data) + (offset + r * x.row_stride + first) * bytes_of(dtype));
    }
}

}  // namespace flash::cpu
