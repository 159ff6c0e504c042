// From the blocks of a mask to the tiles of a kernel: how far it is from each tile to the next that is visited, and which
// tiles have most to visit. Nothing waits for the host.
#pragma once

#include "common/block_mask.h"
#include "gpu/tile/block_tiles.h"

namespace flash {

inline constexpr int kBlockTileThreads = 256;
inline constexpr int kTileWords = static_cast<int>(BlockTiles::kMost) / 32 + 1;  // of a bit for each tile and one more

// The first tile from `tile` on whose bit is set, or the last before it; `none` if there is none.
template <bool kOn>
__device__ __forceinline__ int nearest_tile(const uint32_t* bits, int words, int tile, int none) {
  int word = tile / 32;
  const uint32_t from_tile = ~0u << tile % 32;
  uint32_t found = bits[word] & (kOn ? from_tile : ~from_tile);
  while (found == 0) {
    word += kOn ? 1 : -1;
    if (word < 0 || word == words) return none;
    found = bits[word];
  }
  return 32 * word + (kOn ? __ffs(static_cast<int>(found)) - 1 : 31 - __clz(static_cast<int>(found)));
}

// A CTA makes the steps of one own tile. `kByKeys`: own tiles are tiles of keys, and steps lead on; else of rows, and steps
// lead back. Sizes: of the tiles.
template <bool kByKeys, class Params>
__global__ void __launch_bounds__(kBlockTileThreads)
    block_tiles_kernel(const __grid_constant__ Params p, const __grid_constant__ BlockTiles tiles, int own_size,
                       int other_size) {
  static __shared__ uint32_t visited_bits[kTileWords], full_bits[kTileWords];
  const int64_t own = blockIdx.x % tiles.own_tiles, plane = blockIdx.x / tiles.own_tiles;
  const int64_t heads = tiles.head_planes == 0 ? 1 : p.heads, batch = plane / heads, head = plane % heads;
  const BlockMask& mask = p.block_mask;
  const int32_t* kinds =
      mask.kinds + (batch * mask.batch_planes + head * mask.head_planes) * mask.q_blocks * mask.k_blocks;
  // Rows and columns of the mask. Nobody has checked the left pads: what lies outside the mask is hidden.
  const int64_t first_row = p.rows_q.leftpad.given() ? p.rows_q.leftpad[batch] : 0;
  const int64_t first_key = p.rows_k.leftpad.given() ? p.rows_k.leftpad[batch] : 0;
  const int rows = kByKeys ? other_size : own_size, keys = kByKeys ? own_size : other_size;
  const int words = tiles.other_tiles / 32 + 1, thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  for (int other = thread; other < 32 * words; other += kBlockTileThreads) {
    const int64_t row = first_row + (kByKeys ? other : own) * rows, key = first_key + (kByKeys ? own : other) * keys;
    bool visited = false, full = true;
    if (other < tiles.other_tiles && row >= 0 && key >= 0) {
      const int64_t m_end = smaller(mask.q_blocks, divide_up(row + rows, mask.rows));
      const int64_t n_end = smaller(mask.k_blocks, divide_up(key + keys, mask.keys));
      for (int64_t m = row / mask.rows; m < m_end; ++m)
        for (int64_t n = key / mask.keys; n < n_end; ++n) {
          visited |= kinds[m * mask.k_blocks + n] != kHiddenBlock;
          full &= kinds[m * mask.k_blocks + n] == kFullBlock;
        }
    }
    const uint32_t all_visited = __ballot_sync(~0u, visited), all_full = __ballot_sync(~0u, visited && full);
    if (lane == 0) visited_bits[other / 32] = all_visited, full_bits[other / 32] = all_full;
  }
  __syncthreads();
  uint16_t* steps = tiles.steps + int64_t{blockIdx.x} * tiles.row_steps();
  for (int other = thread; other <= tiles.other_tiles; other += kBlockTileThreads) {
    const int nearest = nearest_tile<kByKeys>(visited_bits, words, other, kByKeys ? tiles.other_tiles : -1);
    const bool full = (full_bits[other / 32] >> lane & 1) != 0;
    steps[other] =
        static_cast<uint16_t>((kByKeys ? nearest - other : other - 1 - nearest) | (full ? 0 : BlockTiles::kNotFull));
  }
  if (!kByKeys || !tiles.ordered || thread >= 32) return;
  // Of those that some of the keys sees, in a sequence as long as its tensor: an order need not be exact.
  const Range seen =
      make_visibility(p.window, p.rows_q.rows, p.rows_k.rows).rows_of_any({own * own_size, (own + 1) * own_size});
  uint32_t count = 0;
  for (int word = static_cast<int>(seen.begin) / rows / 32; word < words; ++word) {
    const int64_t row = int64_t{32 * word + lane} * rows;
    count += row + rows > seen.begin && row < seen.end ? visited_bits[word] >> lane & 1 : 0;
  }
  for (int distance = 16; distance > 0; distance /= 2) count += __shfl_xor_sync(~0u, count, distance);
  if (lane == 0) tiles.counts[blockIdx.x] = static_cast<uint16_t>(count);
}

// Puts own tiles in order, by what they visit in all planes of the heads that share keys: a warp finds the place of one.
// Of such planes the first gets it.
static __global__ void __launch_bounds__(kBlockTileThreads)
    block_order_kernel(const __grid_constant__ BlockTiles tiles, int shared_planes) {
  const int64_t index = (int64_t{blockIdx.x} * kBlockTileThreads + threadIdx.x) / 32;
  const int64_t plane = index / tiles.own_tiles;
  if (plane >= tiles.planes || plane % shared_planes != 0) return;
  const int own = static_cast<int>(index - plane * tiles.own_tiles), lane = static_cast<int>(threadIdx.x % 32);
  const uint16_t* counts = tiles.counts + plane * tiles.own_tiles;
  const auto visited = [&](int tile) {
    int sum = 0;
    for (int i = 0; i < shared_planes; ++i) sum += counts[i * tiles.own_tiles + tile];
    return sum;
  };
  const int mine = visited(own);
  int place = 0;
#pragma unroll 4
  for (int first = 0; first < tiles.own_tiles; first += 32) {
    const int tile = first + lane;
    const int others = tile < tiles.own_tiles ? visited(tile) : -1;
    place += __popc(__ballot_sync(~0u, others > mine || (others == mine && tile < own)));
  }
  if (lane == 0) tiles.order[plane * tiles.own_tiles + place] = static_cast<uint16_t>(own);
}

#if defined(__CUDACC__)

// Fills what a launch has of a block mask, if it has one.
template <bool kByKeys, class Params>
void make_block_tiles(const Params& params, const BlockTiles& tiles, int own_size, int other_size,
                      cudaStream_t stream) {
  if (tiles.steps == nullptr || tiles.tiles() == 0) return;
  block_tiles_kernel<kByKeys, Params>
      <<<static_cast<uint32_t>(tiles.tiles()), kBlockTileThreads, 0, stream>>>(params, tiles, own_size, other_size);
  if (!tiles.ordered) return;
  block_order_kernel<<<static_cast<uint32_t>(divide_up(32 * tiles.tiles(), kBlockTileThreads)), kBlockTileThreads, 0,
                       stream>>>(tiles, tiles.head_planes == 0 ? 1 : static_cast<int>(params.group()));
}

#endif

}  // namespace flash
