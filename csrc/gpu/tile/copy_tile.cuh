// Rows of an operand between global and shared memory. Rows outside the wanted range and columns beyond the true head
// dim become zeros, because 0 · NaN is NaN: what is not ours must not reach a matrix product.
#pragma once

#include "common/visibility.h"
#include "gpu/tile/panels.cuh"

namespace flash {

// shared[0 .. 16) = global[0 .. 16), both aligned.
template <Arch kArch>
__device__ __forceinline__ void copy_16(uint32_t shared, const void* global) {
  if constexpr (kArch >= Arch::sm80)
    ptx::cp_async_16(shared, global, true);
  else
    ptx::store_shared_16(shared, *static_cast<const uint4*>(global));
}

template <Arch kArch>
__device__ __forceinline__ void copy_4(uint32_t shared, const void* global) {
  if constexpr (kArch >= Arch::sm80)
    ptx::cp_async_4(shared, global);
  else
    ptx::store_shared_4(shared, *static_cast<const uint32_t*>(global));
}

// One head of an operand: row i of the sequence is at data + i · row_stride.
struct HeadRows {
  const uint16_t* data;  // 16-bit elements of either type
  int64_t row_stride;
  int dim;
  bool vectorised;  // rows start at multiples of 16 bytes, and are whole numbers of them
};

// What one thread copies of a tile of kRows rows: chunk tid % kChunks of the rows tid / kChunks + i · kStep, in all
// panels. Neighbours read whole lines of 128 bytes (64 where panels are narrow). Slices are copied one by one, so that a
// caller can put products between them.
// kAnyAlignment: rows may start anywhere; else all are vectorised, and there is no branch: with one, the copies cannot
// move in among the products, which cost 8 %.
template <Arch kArch, int kRows, int kHeadDim, int kThreads, bool kAnyAlignment, int kPeriod = 8>
struct TileCopy {
  using Layout = Panels<kHeadDim, kPeriod>;
  // Whether copies are free of branches, and wait for nothing.
  static constexpr bool kCanBeSpread = kArch >= Arch::sm80 && !kAnyAlignment;
  static constexpr int kStep = kThreads / Layout::kChunks;
  static constexpr int kSlices = (kRows + kStep - 1) / kStep;
  static_assert(kThreads % Layout::kChunks == 0 && (kStep & (kStep - 1)) == 0);

  const uint16_t* from;    // of this thread's next row
  uint32_t target;         // in shared memory, of its first row
  int64_t step;            // elements between two rows of this thread
  uint32_t place, places;  // of the next row among the wanted ones; their number
  int columns;             // that there are from this thread's chunk of the first panel on
  bool vectorised;

  // tile = rows [first, first + kRows) of the head, those in [begin, end).
  __device__ __forceinline__ TileCopy(uint32_t tile, const HeadRows& head, int first, int begin, int end) {
    const int chunk = threadIdx.x % Layout::kChunks, row0 = threadIdx.x / Layout::kChunks;
    from = head.data + (first + row0) * head.row_stride + chunk * 8;
    target = tile + Layout::offset(row0, chunk);
    step = kStep * head.row_stride;
    place = static_cast<uint32_t>(first + row0 - begin), places = static_cast<uint32_t>(end - begin);
    columns = head.dim - chunk * 8;
    vectorised = head.vectorised;
  }

  // The same of a tile whose rows are all wanted but those from `end` on, by a thread that has kept first_target(tile).
  __device__ __forceinline__ TileCopy(uint32_t kept_target, const HeadRows& head, int first, int end, uint32_t thread)
      : from(head.data + (first + thread / Layout::kChunks) * head.row_stride + thread % Layout::kChunks * 8),
        target(kept_target),
        step(kStep * head.row_stride),
        place(first + thread / Layout::kChunks),
        places(end),
        columns(head.dim - static_cast<int>(thread % Layout::kChunks) * 8),
        vectorised(head.vectorised) {}

  static __device__ __forceinline__ uint32_t first_target(uint32_t tile) {
    return tile + Layout::offset(threadIdx.x / Layout::kChunks, threadIdx.x % Layout::kChunks);
  }

  // The next of kSlices parts of the tile: every kStep-th row. After all of them it is the turn of the tile below, to
  // wherever `target` then is.
  __device__ __forceinline__ void copy(int slice) {
    const int row = slice * kStep;
    if (kRows % kStep != 0 && row + threadIdx.x / Layout::kChunks >= kRows) return;
    const bool inside = place < places;
#pragma unroll
    for (int panel = 0; panel < Layout::kCount; ++panel)
      copy_chunk(Layout::template moved<kRows>(target, row, panel * Layout::kChunks), from + panel * Layout::kColumns,
                 inside ? columns - panel * Layout::kColumns : 0);
    place += kStep;
    from += step;
  }

  __device__ __forceinline__ void copy_all() {
    // Where copies go through registers, there are none for all of them at once.
#pragma unroll(kCanBeSpread ? kSlices : 1)
    for (int slice = 0; slice < kSlices; ++slice) copy(slice);
    converge();
  }

  // Lanes may have taken different branches, and the compiler need not join them before the next ldmatrix or mma, which
  // want the whole warp.
  static __device__ __forceinline__ void converge() {
    if constexpr (!kCanBeSpread) __syncwarp();
  }

  // shared = `columns` elements, then zeros.
  __device__ __forceinline__ void copy_chunk(uint32_t shared, const uint16_t* source, int columns) const {
    if (!kAnyAlignment || vectorised) {
      if constexpr (kArch >= Arch::sm80)
        ptx::cp_async_16(shared, source, columns > 0);
      else
        ptx::store_shared_16(shared, columns > 0 ? *reinterpret_cast<const uint4*>(source) : uint4{});
    } else {
#pragma unroll 1
      for (int pair = 0; pair < 4; ++pair) {
        const uint32_t low = 2 * pair < columns ? source[2 * pair] : 0;
        const uint32_t high = 2 * pair + 1 < columns ? source[2 * pair + 1] : 0;
        ptx::store_shared_4(shared + 4 * pair, low | high << 16);
      }
    }
  }

  // Until this thread's copies are there.
  static __device__ __forceinline__ void wait() {
    if constexpr (kArch >= Arch::sm80) ptx::cp_async_wait_all();
  }
};

}  // namespace flash
