// Rows of an operand between global and shared memory. Rows outside the wanted range and columns beyond the true head
// dim become zeros, because 0 · NaN is NaN: what is not ours must not reach a matrix product.
#pragma once

#include "common/visibility.h"
#include "gpu/tile/panels.cuh"

namespace flash {

// One head of an operand: row i of the sequence is at data + i · row_stride.
struct HeadRows {
  const uint16_t* data;  // 16-bit elements of either type
  int64_t row_stride;
  int dim;
  bool vectorised;  // rows start at multiples of 16 bytes
};

// What one thread copies of each tile of kRows rows: chunk tid % kChunks of the rows tid / kChunks + i · kStep, in all
// panels. Neighbours read whole lines of 128 bytes (64 where panels are narrow).
// kAnyAlignment: rows may start anywhere; else all are vectorised, and there is no branch: with one, the copies cannot
// move in among the products, which cost 8 %.
template <Arch kArch, int kRows, int kHeadDim, int kThreads, bool kAnyAlignment>
struct TileCopy {
  using Layout = Panels<kHeadDim>;
  static constexpr int kStep = kThreads / Layout::kChunks;
  static_assert(kThreads % Layout::kChunks == 0 && kStep % 8 == 0, "swizzles are the same in all of a thread's rows");

  // tile = rows [first, first + kRows) of the head, those in [begin, end).
  static __device__ __forceinline__ void load(uint32_t tile, const HeadRows& head, int first, int begin, int end) {
    const int chunk = threadIdx.x % Layout::kChunks, row0 = threadIdx.x / Layout::kChunks;
    const uint16_t* from = head.data + (first + row0) * head.row_stride + chunk * 8;
    const uint32_t target = tile + Layout::offset(row0, chunk);
    const int columns = head.dim - chunk * 8;
    const auto place = static_cast<uint32_t>(first + row0 - begin), places = static_cast<uint32_t>(end - begin);
#pragma unroll
    for (int row = 0; row < kRows; row += kStep, from += kStep * head.row_stride) {
      if (kRows % kStep != 0 && row0 + row >= kRows) break;
      const bool inside = place + row < places;
#pragma unroll
      for (int panel = 0; panel < Layout::kCount; ++panel)
        copy_chunk(target + (panel * kRows + row) * Layout::kRowBytes, from + panel * Layout::kColumns,
                   inside ? columns - panel * Layout::kColumns : 0, head.vectorised);
    }
  }

  // shared = `columns` elements, at most 8, then zeros.
  static __device__ __forceinline__ void copy_chunk(uint32_t shared, const uint16_t* source, int columns,
                                                    bool vectorised) {
    columns = columns < 0 ? 0 : columns > 8 ? 8 : columns;
    const bool whole_chunks = !kAnyAlignment || vectorised;
    if (whole_chunks) {
      if constexpr (kArch >= Arch::sm80)
        ptx::cp_async_16(shared, source, 2 * columns);
      else
        ptx::store_shared_16(shared, load_chunk(source, columns));
    } else {
#pragma unroll 1
      for (int pair = 0; pair < 4; ++pair) {
        const uint32_t low = 2 * pair < columns ? source[2 * pair] : 0;
        const uint32_t high = 2 * pair + 1 < columns ? source[2 * pair + 1] : 0;
        ptx::store_shared_4(shared + 4 * pair, low | high << 16);
      }
    }
  }

  // `columns` elements, then zeros.
  static __device__ __forceinline__ uint4 load_chunk(const uint16_t* source, int columns) {
    if (columns == 8) return *reinterpret_cast<const uint4*>(source);
    uint32_t pairs[4] = {};
#pragma unroll
    for (int d = 0; d < 7; ++d)
      if (d < columns) pairs[d / 2] |= static_cast<uint32_t>(source[d]) << (16 * (d % 2));
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }

  static __device__ __forceinline__ void commit() {
    if constexpr (kArch >= Arch::sm80) ptx::cp_async_commit();
  }
  template <int kPending>
  static __device__ __forceinline__ void wait() {
    if constexpr (kArch >= Arch::sm80) ptx::cp_async_wait<kPending>();
  }
};

}  // namespace flash
