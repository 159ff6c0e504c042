// Rows of a tensor to operands of a product, and back.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/convert.h"
#include "cpu/micro_kernels.h"

namespace flash::cpu {

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

template <class Real>
constexpr DataType kNative = std::is_same_v<Real, double> ? DataType::kFloat64 : DataType::kFloat32;

// Rows as Reals, elements side by side: a copy, or where they are.
template <class Real>
struct RowsView {
  const Real* data;
  int64_t stride;
};

template <class Real>
RowsView<Real> rows_in_place(const Operand& x, int64_t offset) {
  return {static_cast<const Real*>(x.data) + offset, x.row_stride};
}

// out[row][0 .. dim) = rows of the operand.
template <class Real>
void pack_rows(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, Real* out) {
  for (int64_t r = 0; r < rows; ++r, out += dim)
    with_loader<Real>(dtype, x.data, offset + r * x.row_stride, [&](auto load) {
      for (int64_t d = 0; d < dim; ++d) out[d] = load(d);
    });
}

// The same in panels along the dim: out[panel][row][16], zero behind the last element. A panel holds `capacity` rows.
template <class Real>
void pack_row_panels(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, int64_t capacity,
                     Real* out) {
  for (int64_t first = 0; first < dim; first += kLanes, out += capacity * kLanes) {
    const int64_t some = std::min(kLanes, dim - first);
    for (int64_t r = 0; r < rows; ++r)
      with_loader<Real>(dtype, x.data, offset + r * x.row_stride + first, [&](auto load) {
        Real* to = out + r * kLanes;
        if (some == kLanes) {
          for (int64_t lane = 0; lane < kLanes; ++lane) to[lane] = load(lane);
        } else {
          for (int64_t lane = 0; lane < kLanes; ++lane) to[lane] = lane < some ? load(lane) : Real(0);
        }
      });
  }
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

// Rows that are no array of Reals are converted some at a time.
inline constexpr int64_t kConvertRows = 4, kConvertColumns = 128;

// out[c][lane] = factor · element c of row `lane`, in one panel; convert(row, first, count, to) gives `count` elements.
template <class Real, class Convert>
void lanes_from_rows(int64_t rows, int64_t columns, Real factor, const Convert& convert, Real* out) {
  Real converted[kConvertRows * kConvertColumns];
  for (int64_t r = 0; r < rows; r += kConvertRows)
    for (int64_t c = 0; c < columns; c += kConvertColumns) {
      const int64_t some_rows = std::min(kConvertRows, rows - r), some = std::min(kConvertColumns, columns - c);
      for (int64_t n = 0; n < some_rows; ++n) convert(r + n, c, some, converted + n * kConvertColumns);
      transpose(converted, kConvertColumns, some_rows, some, factor, out + c * kLanes + r, kLanes);
    }
}

// out[panel][d][lane] = factor · row `16 panel + lane` of the operand; lanes from `rows` on become 0.
template <class Real>
void pack_lanes(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, Real factor,
                int64_t panels, Real* out) {
  for (int64_t panel = 0; panel < panels; ++panel, out += dim * kLanes, offset += kLanes * x.row_stride) {
    const int64_t some_lanes = std::clamp<int64_t>(rows - panel * kLanes, 0, kLanes);
    if (dtype == kNative<Real>) {
      transpose(static_cast<const Real*>(x.data) + offset, x.row_stride, some_lanes, dim, factor, out, kLanes);
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
    transpose(in, kLanes, dim, rows, Real(1), static_cast<Real*>(x.data) + offset, x.row_stride);
    return;
  }
  Real converted[kConvertRows * kConvertColumns];
  for (int64_t r = 0; r < rows; r += kConvertRows)
    for (int64_t d = 0; d < dim; d += kConvertColumns) {
      const int64_t some_rows = std::min(kConvertRows, rows - r), some = std::min(kConvertColumns, dim - d);
      transpose(in + d * kLanes + r, kLanes, some, some_rows, Real(1), converted, kConvertColumns);
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
  for (int64_t first = 0; first < dim; first += kLanes, in += panel_stride) {
    const int64_t some = std::min(kLanes, dim - first);
    for (int64_t r = 0; r < rows; ++r)
      with_storer<Real>(dtype, x.data, offset + r * x.row_stride + first, [&](auto store) {
        for (int64_t lane = 0; lane < some; ++lane) store(lane, factor == 0 ? Real(0) : factor * in[r * kLanes + lane]);
      });
  }
}

// x[d][lane] *= factor[lane] in one panel; a factor of 0 gives 0 whatever x holds.
template <class Real>
void scale_lanes(Real* x, int64_t dim, const Real* factor) {
  for (int64_t d = 0; d < dim; ++d, x += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) x[lane] = factor[lane] == 0 ? Real(0) : x[lane] * factor[lane];
}

}  // namespace flash::cpu
