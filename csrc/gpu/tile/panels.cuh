// How a tile of rows × kHeadDim 16-bit elements lies in shared memory, so that no access has a bank conflict.
//
// It is cut into panels of 64 columns (32 where 64 does not divide the head dim), one after the other; a panel row is
// 8 (4) chunks of 16 bytes, and chunk c of row r stands in place c ^ r % 8 (c ^ r / 2 % 4). The eight rows that one
// ldmatrix phase reads then lie in eight different groups of four banks, and so do eight neighbours that are copied.
#pragma once

#include "gpu/ptx/copy.cuh"
#include "gpu/ptx/mma.cuh"

namespace flash {

template <int kHeadDim>
struct Panels {
  static constexpr int kChunks = kHeadDim % 64 == 0 ? 8 : 4;
  static constexpr int kColumns = 8 * kChunks;
  static constexpr int kCount = kHeadDim / kColumns;
  static constexpr int kRowBytes = 16 * kChunks;

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    const int swizzle = kChunks == 8 ? row & 7 : row >> 1 & 3;
    return row * kRowBytes + ((chunk ^ swizzle) << 4);
  }
};

// Reads 16 × 16 blocks of a tile of kRows rows by ldmatrix.x4. Swizzles repeat every 8 rows, so a block's address is
// this lane's address in block (0, 0), an exclusive or and a constant.
template <int kRows, int kHeadDim>
struct BlockReader {
  using Layout = Panels<kHeadDim>;
  uint32_t address;

  // Matrices in the order (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), then columns 8-15: Q as A fragment, and V
  // transposed as B fragments of two n8 tiles.
  static __device__ __forceinline__ BlockReader rows_first(uint32_t tile, int lane) {
    return {tile + Layout::offset(lane & 15, lane >> 4)};
  }

  // (rows 0-7, columns 0-7), (rows 0-7, columns 8-15), then rows 8-15: K as B fragments of two n8 tiles.
  static __device__ __forceinline__ BlockReader columns_first(uint32_t tile, int lane) {
    return {tile + Layout::offset((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1)};
  }

  __device__ __forceinline__ uint32_t block(int row_block, int column_block) const {
    constexpr int kBlocks = Layout::kChunks / 2;
    const int panel = column_block / kBlocks, within = column_block % kBlocks;
    return (address ^ (within * 32)) + panel * kRows * Layout::kRowBytes + row_block * 16 * Layout::kRowBytes;
  }

  __device__ __forceinline__ void load(uint32_t (&x)[4], int row_block, int column_block) const {
    ptx::ldmatrix_x4(x, block(row_block, column_block));
  }
  __device__ __forceinline__ void load_transposed(uint32_t (&x)[4], int row_block, int column_block) const {
    ptx::ldmatrix_x4_trans(x, block(row_block, column_block));
  }
};

}  // namespace flash
