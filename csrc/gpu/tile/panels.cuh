// How a tile of rows × kHeadDim 16-bit elements lies in shared memory, so that no access has a bank conflict.
//
// It is cut into panels of 64 columns (32 where 64 does not divide the head dim), one after the other; a panel row is
// 8 (4) chunks of 16 bytes, and chunk c of row r stands in place c ^ r % 8 (c ^ r / 2 % 4). The eight rows that one
// ldmatrix phase reads then lie in eight different groups of four banks, and so do eight neighbours that are copied.
//
// The backward also reads pairs of rows 8 apart (dealt_query) and writes 16 bytes in two neighbouring rows by four lanes
// each. That is free of conflicts, too, where bits 3 and 4 of the row have a part in it: the second kind of swizzle,
// which repeats every 32 rows.
#pragma once

#include "gpu/ptx/copy.cuh"
#include "gpu/ptx/math.cuh"
#include "gpu/ptx/mma.cuh"

namespace flash {

template <int kHeadDim, int kPeriod = 8>
struct Panels {
  static constexpr int kChunks = kHeadDim % 64 == 0 ? 8 : 4;
  static constexpr int kColumns = 8 * kChunks;
  static constexpr int kCount = kHeadDim / kColumns;
  static constexpr int kRowBytes = 16 * kChunks;
  static_assert(kPeriod == 8 || kPeriod == 32);

  // What a row's chunks are exclusive-ored with. Every bit of it is an exclusive or of bits of the row.
  static __device__ __forceinline__ constexpr int swizzle(int row) {
    if (kPeriod == 32) return ((row >> 1 ^ row >> 3) & 3) | (kChunks == 8 ? (row & 1) << 2 : 0);
    return kChunks == 8 ? row & 7 : row >> 1 & 3;
  }
  // Within a panel.
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ swizzle(row)) << 4);
  }
  // The address `rows` below and `chunks` to the right, in a tile of kRows rows, of one whose row and chunk (within its
  // panel) have zeros where these two have ones: an exclusive or and a constant, if these two are constants.
  template <int kRows>
  static __device__ __forceinline__ uint32_t moved(uint32_t address, int rows, int chunks) {
    return (address ^ ((swizzle(rows) ^ chunks % kChunks) << 4)) + (chunks / kChunks * kRows + rows) * kRowBytes;
  }
};

// Of 32 queries a thread's D fragments have four pairs, 8 apart. In this order they are neighbours: bits 1 and 2 change
// places with bits 3 and 4 (and twice is not at all).
__device__ __forceinline__ constexpr int dealt_query(int query) {
  return (query & ~30) | (query & 6) << 2 | (query >> 2 & 6);
}

// Reads 16 × 16 blocks of a tile of kRows rows by ldmatrix.x4. All addresses are moved from this lane's in one block
// whose row and column are multiples of what a caller's blocks span.
template <int kRows, int kHeadDim, int kPeriod = 8>
struct BlockReader {
  using Layout = Panels<kHeadDim, kPeriod>;
  uint32_t address;

  static __device__ __forceinline__ BlockReader at(uint32_t tile, int row, int chunk) {
    return {tile + chunk / Layout::kChunks * kRows * Layout::kRowBytes + Layout::offset(row, chunk % Layout::kChunks)};
  }

  // Matrices in the order (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), then columns 8-15: Q as A fragment, and V
  // transposed as B fragments of two n8 tiles.
  static __device__ __forceinline__ BlockReader rows_first(uint32_t tile, int lane, int row_block = 0,
                                                           int column_block = 0) {
    return at(tile, 16 * row_block + (lane & 15), 2 * column_block + (lane >> 4));
  }

  // (rows 0-7, columns 0-7), (rows 0-7, columns 8-15), then rows 8-15: K as B fragments of two n8 tiles.
  static __device__ __forceinline__ BlockReader columns_first(uint32_t tile, int lane, int row_block = 0,
                                                              int column_block = 0) {
    return at(tile, 16 * row_block + (lane & 7) + (lane >> 4 << 3), 2 * column_block + (lane >> 3 & 1));
  }

  // As rows_first, of rows in the order of dealt_query.
  static __device__ __forceinline__ BlockReader dealt_rows_first(uint32_t tile, int lane, int column_block) {
    return at(tile, dealt_query(lane & 15), 2 * column_block + (lane >> 4));
  }

  // The same in registers, and not to be made anew.
  __device__ __forceinline__ BlockReader kept() const { return {ptx::opaque(address)}; }
  // For a tile like this one.
  __device__ __forceinline__ BlockReader behind(uint32_t bytes) const { return {address + bytes}; }

  __device__ __forceinline__ uint32_t block(int row_block, int column_block) const {
    return Layout::template moved<kRows>(address, 16 * row_block, 2 * column_block);
  }
  // `bytes` behind, in a tile like this one.
  __device__ __forceinline__ void load(uint32_t (&x)[4], int row_block, int column_block, int bytes = 0) const {
    ptx::ldmatrix_x4(x, block(row_block, column_block) + bytes);
  }
  __device__ __forceinline__ void load_transposed(uint32_t (&x)[4], int row_block, int column_block,
                                                  int bytes = 0) const {
    ptx::ldmatrix_x4_trans(x, block(row_block, column_block) + bytes);
  }
  __device__ __forceinline__ void load_dealt_transposed(uint32_t (&x)[4], int row_block, int column_block,
                                                        int bytes = 0) const {
    ptx::ldmatrix_x4_trans(
        x, Layout::template moved<kRows>(address, dealt_query(16 * row_block), 2 * column_block) + bytes);
  }
};

}  // namespace flash
