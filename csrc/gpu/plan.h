// Which kernel a call gets: pure functions of the call's shape and the card's numbers, tested without a GPU.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>
#include <span>
#include <tuple>

#include "common/kernel_key.h"
#include "common/score.h"
#include "common/visibility.h"
#include "gpu/families.h"
#include "gpu/mma_sync/tiles.h"
#include "gpu/wgmma/tiles.h"

namespace flash {

// What decides about a card.
struct Card {
  int capability = 0;    // 10 · major + minor
  int block_shared = 0;  // bytes of shared memory that a CTA may ask for
  int sm_shared = 0;     // bytes that an SM has for all of its CTAs, of which each takes kReservedShared more
  int64_t l2_bytes = 0;
  int sm_count = 0;
};

// Namespaces of kernels, and folders.
enum class Family : int { any, mma_sync, wgmma };

constexpr Family family_of(KernelKey key) { return key.arch == Arch::sm90 ? Family::wgmma : Family::mma_sync; }

struct Request {
  DataType dtype = DataType::kFloat32;
  int64_t dim = 0, dim_v = 0;
  Variant variant = Variant::plain;
  int64_t keys = 0;                        // of the longest sequence
  int64_t block_rows = 0, block_keys = 0;  // of a block mask without elements or left pads; 0: there is none
  bool has_window = false;                 // a diagonal
  bool reachable_by_tma = true;            // q, k and v
  Family family = Family::any;             // that the call asks for
  int64_t queries = 0;                     // of the longest sequence
  int64_t group = 1;                       // query heads of a key head

  // Whether a tile lies in one block of the mask: then no element of it has to be hidden.
  bool in_one_block(int tile_rows, int tile_keys) const {
    return block_rows == 0 || (block_rows % tile_rows == 0 && block_keys % tile_keys == 0);
  }
};

// Whether rows can be read or written 16 bytes at a time.
inline bool is_vectorised(const Operand& x, int64_t dim) {
  return dim % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.batch_stride % 8 == 0 &&
         x.row_stride % 8 == 0 && x.head_stride % 8 == 0;
}

inline constexpr int64_t kMostStride = int64_t{1} << 39;  // of a tensor map: 2^40 bytes

// Whether a tensor map can describe an operand: no axis is empty, strides are positive and below kMostStride, coordinates
// int32.
inline bool is_reachable_by_tma(const Operand& x, int64_t batch, int64_t rows, int64_t heads, int64_t dim) {
  const auto fits = [](int64_t size, int64_t stride) {
    return size == 1 || (size > 1 && stride > 0 && stride < kMostStride);
  };
  return dim > 0 && is_vectorised(x, dim) && rows < int64_t{1} << 31 && fits(batch, x.batch_stride) &&
         fits(rows, x.row_stride) && fits(heads, x.head_stride);
}
inline bool is_reachable_by_tma(const AttentionParams& p) {
  const int64_t batch = p.rows_q.cu_seqlens.given() ? 1 : p.batch;  // packed sequences lie behind each other
  return is_reachable_by_tma(p.q, batch, p.rows_q.rows, p.heads, p.dim) &&
         is_reachable_by_tma(p.k, batch, p.rows_k.rows, p.heads_k, p.dim) &&
         is_reachable_by_tma(p.v, batch, p.rows_k.rows, p.heads_k, p.dim_v);
}

inline bool has_window(const AttentionParams& p) {
  return p.window.causal || p.window.left >= 0 || p.window.right >= 0;
}

inline Request request_of(const AttentionParams& p, Variant variant, int64_t queries, int64_t keys,
                          Family family = Family::any) {
  Request request{p.dtype, p.dim, p.dim_v, variant, keys};
  request.queries = queries;
  // A group of heads is an axis of a tensor map then, as long as is_reachable_by_tma allows.
  if (p.group() * p.q.head_stride < kMostStride) request.group = std::max<int64_t>(1, p.group());
  if (p.block_mask.given()) request.block_rows = p.block_mask.rows, request.block_keys = p.block_mask.keys;
  request.has_window = has_window(p);
  request.reachable_by_tma = is_reachable_by_tma(p);
  request.family = family;
  return request;
}

struct Choice {
  KernelKey key;
  int tile;
};

inline constexpr int kReservedShared = 1024;

// Why no kernel of the wgmma family can serve a request on any table; null: one may.
inline const char* refusal_of_wgmma(const Request& request, const Card& card) {
  // Code for sm_90a runs on nothing newer.
  if (card.capability != 90) return "wgmma kernels run on compute capability 9.0 alone";
  if (!request.reachable_by_tma)
    return "wgmma kernels read q, k and v by TMA: none may be empty, addresses, strides and head dims must be whole 16 "
           "bytes, and strides positive";
  if (request.variant == Variant::biased)
    return "wgmma kernels have no bias, no mask, and no block mask with elements or left pads";
  return nullptr;
}

// Whether a tile is there, fits the card, and can serve the request's block mask.
inline bool wgmma_tile_fits(KernelKey key, int tile, const Card& card, const Request& request) {
  const wgmma::Tiles tiles = wgmma::fwd_tiles(key);
  if (tile >= static_cast<int>(tiles.size()) || tiles[tile].warpgroups == 0) return false;
  if (tiles[tile].packs_heads && (request.group < 2 || request.group > wgmma::kWarpgroupRows || request.block_rows > 0))
    return false;
  return tiles[tile].shared_bytes(key.head_dim) <= card.block_shared &&
         request.in_one_block(tiles[tile].rows(), tiles[tile].keys);
}

// Rows of the tiles for a key head's queries, those that are for nothing among them.
inline int64_t rows_of_tiles(const wgmma::Tile& tile, const Request& request) {
  if (request.queries == 0) return 1;  // nobody knows them: all tiles are as good
  const int64_t heads = tile.packs_heads ? 1 : std::max<int64_t>(1, request.group);
  const int64_t queries = std::min(request.queries, kMostRows);  // no launch has more
  return heads * divide_up(queries, tile.queries(static_cast<int>(request.group))) * tile.rows();
}

// The first that suits the length of keys, unless another one makes an eighth fewer rows of few queries. One that packs
// heads, where it makes a quarter fewer.
inline std::optional<int> choose_wgmma_tile(KernelKey key, const Card& card, const Request& request) {
  const wgmma::Tiles tiles = wgmma::fwd_tiles(key);
  std::array<int64_t, std::tuple_size_v<wgmma::Tiles>> rows{};  // 0: the tile is none of those to choose from
  int64_t least = std::numeric_limits<int64_t>::max();          // of those that do not pack heads
  std::optional<int> packed, found;
  for (int i = 0; i < static_cast<int>(tiles.size()); ++i) {
    const int64_t from_keys = request.has_window ? tiles[i].from_keys_of_windows : tiles[i].from_keys;
    if (request.keys < from_keys || !wgmma_tile_fits(key, i, card, request)) continue;
    rows[i] = rows_of_tiles(tiles[i], request);
    if (tiles[i].packs_heads)
      packed = i;
    else
      least = std::min(least, rows[i]);
  }
  for (int i = 0; i < static_cast<int>(tiles.size()) && !found; ++i)
    if (rows[i] > 0 && i != packed && 7 * rows[i] <= 8 * least) found = i;
  return packed && (!found || 4 * rows[*packed] <= 3 * rows[*found]) ? packed : found;
}

// The first tile for that many keys of which as many CTAs fit on an SM as its registers allow; if there is none, the
// last that fits at all.
inline std::optional<int> choose_mma_sync_tile(KernelKey key, const Card& card, const Request& request) {
  const mma_sync::Tiles tiles = mma_sync::fwd_tiles(key);
  std::optional<int> fits;
  for (int i = 0; i < static_cast<int>(tiles.size()) && tiles[i].rows > 0; ++i) {
    const int bytes = tiles[i].shared_bytes(key.head_dim) + mma_sync::kStaticShared;
    if (bytes > card.block_shared || request.keys < tiles[i].from_keys) continue;
    if (request.block_rows > 0 && !tiles[i].takes_blocks) continue;
    if (key.variant != Variant::biased && !request.in_one_block(tiles[i].rows, tiles[i].keys)) continue;
    fits = i;
    if (tiles[i].ctas * (bytes + kReservedShared) <= card.sm_shared) break;
  }
  return fits;
}

inline std::optional<int> choose_tile(KernelKey key, const Card& card, const Request& request) {
  if (family_of(key) == Family::mma_sync) return choose_mma_sync_tile(key, card, request);
  if (refusal_of_wgmma(request, card) != nullptr) return std::nullopt;
  return choose_wgmma_tile(key, card, request);
}

struct TileSize {
  int rows = 0, keys = 0;
  int packed_queries = 0;  // as in FwdLaunch
  int queries = 0;         // that the rows are of
};

// `group`: query heads of a key head.
inline TileSize fwd_tile_size(Choice choice, int64_t group) {
  if (family_of(choice.key) == Family::wgmma) {
    const wgmma::Tile tile = wgmma::fwd_tiles(choice.key)[choice.tile];
    const auto heads = static_cast<int>(tile.packs_heads ? group : 1);
    return {tile.rows(), tile.keys, tile.packs_heads ? tile.packed_queries(heads) : 0, tile.queries(heads)};
  }
  const mma_sync::Tile tile = mma_sync::fwd_tiles(choice.key)[choice.tile];
  return {tile.rows, tile.keys, 0, tile.rows};
}

// Whether a backward tile is there, fits the card, and can serve the request's block mask.
inline bool bwd_tile_fits(KernelKey key, int tile, const Card& card, const Request& request) {
  const mma_sync::BwdTiles tiles = mma_sync::bwd_tiles(key);
  if (tile >= static_cast<int>(tiles.size()) || tiles[tile].rows == 0) return false;
  const mma_sync::BwdTile& t = tiles[tile];
  return t.shared_bytes(key.head_dim) + mma_sync::kStaticShared <= card.block_shared &&
         (request.block_rows == 0 || t.takes_blocks) &&
         (key.variant == Variant::biased || request.in_one_block(t.rows, t.keys));
}

// The first that does. Only mma_sync has backward kernels.
inline std::optional<int> choose_bwd_tile(KernelKey key, const Card& card, const Request& request) {
  if (family_of(key) != Family::mma_sync) return std::nullopt;
  for (int i = 0; i < static_cast<int>(mma_sync::BwdTiles().size()); ++i)
    if (bwd_tile_fits(key, i, card, request)) return i;
  return std::nullopt;
}

using ChooseTile = std::optional<int> (*)(KernelKey key, const Card& card, const Request& request);

// The newest architecture, then the smallest head dim, then the smallest variant that serve the request.
inline std::optional<Choice> choose_kernel(std::span<const KernelKey> table, const Request& request, const Card& card,
                                           ChooseTile choose = choose_tile) {
  const int64_t dim = std::max(request.dim, request.dim_v);
  std::optional<Choice> best;
  for (const KernelKey& key : table) {
    if (static_cast<int>(key.arch) > card.capability || key.dtype != request.dtype || key.head_dim < dim ||
        key.variant < request.variant || (request.family != Family::any && request.family != family_of(key)))
      continue;
    const std::optional<int> tile = choose(key, card, request);
    if (!tile) continue;
    const auto rank = [](const KernelKey& k) {
      return std::tuple(-static_cast<int>(k.arch), k.head_dim, static_cast<int>(k.variant));
    };
    if (!best || rank(key) < rank(best->key)) best = Choice{key, *tile};
  }
  return best;
}

// The simplest variant that has what the call needs. A scale that is not well inside fp32's range, or not positive, is
// applied before the maximum is taken.
inline Variant variant_of(const AttentionParams& p) {
  const bool vectorised = is_vectorised(p.q, p.dim) && is_vectorised(p.k, p.dim) && is_vectorised(p.v, p.dim_v);
  if (p.bias.given() || p.mask.given() || !vectorised) return Variant::biased;
  // Blocks with elements, or anywhere: beside bias and mask is where elements are looked at.
  if (p.block_mask.given() && (p.block_mask.pattern_count > 0 || p.rows_q.leftpad.given() || p.rows_k.leftpad.given()))
    return Variant::biased;
  const bool plain_scale = 0x1p-60 < p.score.scale && p.score.scale < 0x1p+60;
  if (p.score.softcap > 0 || p.score.alibi_slopes != nullptr || !plain_scale) return Variant::modified;
  return p.dropout.given() ? Variant::dropout : Variant::plain;
}

// Heads whose tiles are dealt out together. Without a diagonal all row blocks of a head cost the same: one head after
// the other. With one, the long row blocks of several heads come first, as many as the better half of the L2 cache holds the keys of.
// Measured on a GPU with 60 MB of L2: less than 8 leaves a tail of long tiles at the end, more than 32 gains nothing.
// Packed sequences of mixed lengths have the least of them: with as many as a sequence's keys allow they took 3 % longer.
inline uint32_t head_group(const AttentionParams& p, int64_t l2_bytes) {
  if (!has_window(p) || p.heads == 0) return 1;
  const int64_t head_bytes = std::max<int64_t>(1, p.rows_k.rows * (p.dim + p.dim_v) * 2 / p.group());
  // A power of two, which mostly divides the heads: a smaller last group has a longer tail.
  const auto fitting = std::bit_floor(static_cast<uint64_t>(l2_bytes * 9 / 16 / head_bytes));
  return static_cast<uint32_t>(std::clamp<uint64_t>(fitting, 8, 32));
}

inline constexpr int64_t kMostBlocks = 0x7FFFFFFF;  // of a grid

// What launches of both directions say of the call.
template <class Launch>
void describe_inputs(Launch& launch, const AttentionParams& p) {
  launch.scale = static_cast<float>(p.score.scale);
  launch.keep_scale = static_cast<float>(p.dropout.keep_scale);
  launch.threshold = DropoutThreshold(p.dropout.threshold);
  launch.vectorised_qk = is_vectorised(p.q, p.dim) && is_vectorised(p.k, p.dim);
  launch.vectorised_v = is_vectorised(p.v, p.dim_v);
}

// What a launch under a block mask needs of it, still without memory.
inline BlockTiles block_tiles(const AttentionParams& p, int64_t own_tiles, int64_t other_tiles, bool ordered) {
  BlockTiles tiles;
  const BlockMask& mask = p.block_mask;
  if (!mask.given()) return tiles;
  const bool shifted = p.rows_q.leftpad.given() || p.rows_k.leftpad.given();
  const int64_t heads = mask.head_planes == 0 ? 1 : p.heads, batches = mask.batch_planes == 0 && !shifted ? 1 : p.batch;
  tiles.ordered = ordered;
  tiles.own_tiles = static_cast<int>(own_tiles);
  tiles.other_tiles = static_cast<int>(other_tiles);
  tiles.planes = batches * heads;
  tiles.head_planes = mask.head_planes == 0 ? 0 : 1;
  tiles.batch_planes = batches == 1 ? 0 : static_cast<int>(heads);
  tiles.mask_rows = Divisor(static_cast<uint32_t>(mask.rows));
  tiles.mask_keys = Divisor(static_cast<uint32_t>(mask.keys));
  return tiles;
}

// `max_rows_*`: of the longest sequence. nullopt: more tiles than a grid can have, or rows than positions.
inline std::optional<FwdLaunch> make_launch(const FwdParams& p, Choice choice, int64_t max_rows_q, int64_t max_rows_k,
                                            int64_t l2_bytes) {
  const TileSize tile = fwd_tile_size(choice, p.group());
  const int64_t heads_of_tiles = tile.packed_queries > 0 ? p.heads_k : p.heads;
  const int64_t all_heads = p.batch * heads_of_tiles, m_blocks = divide_up(max_rows_q, tile.queries);
  if (max_rows_q > kMostRows || std::min(max_rows_k, p.rows_k.rows) > kMostRows || all_heads > kMostBlocks ||
      all_heads * m_blocks > kMostBlocks ||
      (p.block_mask.given() && divide_up(max_rows_k, tile.keys) > BlockTiles::kMost))
    return std::nullopt;
  FwdLaunch launch;
  const auto blocks = static_cast<uint32_t>(m_blocks), heads = static_cast<uint32_t>(heads_of_tiles);
  const uint32_t group = head_group(p, l2_bytes);
  launch.packed_queries = tile.packed_queries;
  if (family_of(choice.key) == Family::wgmma)
    launch.late_order = LateTileOrder(blocks, heads, static_cast<uint32_t>(all_heads), group, has_window(p));
  else
    launch.order = TileOrder(blocks, heads, static_cast<uint32_t>(all_heads), group);
  launch.blocks = static_cast<uint32_t>(all_heads * m_blocks);
  launch.tile = choice.tile;
  launch.group = Divisor(static_cast<uint32_t>(p.group()));
  describe_inputs(launch, p);
  launch.softcap = SoftcapTerms(softcap_of<float>(p.score), launch.scale);
  launch.vectorised_out = is_vectorised(p.out, p.dim_v);
  launch.max_rows_q = max_rows_q;
  launch.tiles = block_tiles(p, m_blocks, divide_up(max_rows_k, tile.keys), false);
  return launch;
}

inline Variant bwd_variant_of(const BwdParams& p) {
  return is_vectorised(p.dout, p.dim_v) ? variant_of(p) : Variant::biased;
}

// What backward needs beside its results.
struct BwdMemory {
  int64_t numbers = 0, dq_sum = 0;  // floats
  int64_t turns = 0;
};

inline BwdMemory bwd_memory(const BwdLaunch& launch, const BwdParams& p, Choice choice) {
  const int64_t tiles = launch.all_tiles * p.heads;
  const mma_sync::BwdTile tile = mma_sync::bwd_tiles(choice.key)[choice.tile];
  return {tiles * tile.table_floats(), tiles * tile.rows * choice.key.head_dim, tiles};
}

// Heads whose key blocks are dealt out together. In turns (turns.h) many heads have fewer key blocks each that wait, but who
// waits for the memory of a row block makes all others wait: as many as the L2 cache holds Q, dO and the sums of dQ of.
// Measured with 1 to 16 heads under a diagonal: four times as many cost 3 to 25 %, half as many up to 2 %.
inline uint32_t bwd_head_group(const BwdParams& p, int64_t max_rows_q, bool takes_turns, int64_t l2_bytes) {
  if (!takes_turns) return head_group(p, l2_bytes);
  const int64_t rows = std::min(p.rows_q.rows, max_rows_q);
  const int64_t head_bytes = std::max<int64_t>(1, rows * p.group() * (4 * p.dim + 2 * (p.dim + p.dim_v)));
  const int64_t fitting = std::clamp<int64_t>(l2_bytes / (has_window(p) ? 1 : 2) / head_bytes, 1, 32);
  return static_cast<uint32_t>(has_window(p) ? std::bit_floor(static_cast<uint64_t>(fitting)) : fitting);
}

// `max_rows_*`: of the longest sequence. `takes_turns`: dQ is to repeat bit for bit. nullopt: more tiles than a grid can
// have, or rows than positions, or turns under a block mask: a key block that it skips would never end its turn.
inline std::optional<BwdLaunch> make_bwd_launch(const BwdParams& p, Choice choice, int64_t max_rows_q,
                                                int64_t max_rows_k, int64_t l2_bytes, bool takes_turns = false) {
  const mma_sync::BwdTile tile = mma_sync::bwd_tiles(choice.key)[choice.tile];
  const int64_t key_heads = p.heads == 0 ? 0 : p.batch * p.heads_k;  // heads_k is 1 where there are no heads
  const int64_t n_blocks = divide_up(max_rows_k, tile.keys);
  const int64_t m_blocks = divide_up(max_rows_q, tile.rows);
  constexpr int64_t kLeastRows = 16;  // of a block, in all launches
  if (max_rows_q > kMostRows || max_rows_k > kMostRows || key_heads * n_blocks > kMostBlocks ||
      p.batch * p.heads * divide_up(max_rows_q, kLeastRows) > kMostBlocks ||
      (p.block_mask.given() && (takes_turns || std::max(n_blocks, m_blocks) > BlockTiles::kMost)))
    return std::nullopt;
  BwdLaunch launch;
  launch.order = TileOrder(static_cast<uint32_t>(n_blocks), static_cast<uint32_t>(p.heads_k),
                           static_cast<uint32_t>(key_heads), bwd_head_group(p, max_rows_q, takes_turns, l2_bytes));
  launch.turn_order = {takes_turns};
  launch.blocks = static_cast<uint32_t>(key_heads * n_blocks);
  launch.tile = choice.tile;
  launch.m_blocks = static_cast<int>(m_blocks);
  launch.group = p.group();
  launch.all_tiles = p.rows_q.cu_seqlens.given() ? p.rows_q.rows / tile.rows + p.batch : p.batch * m_blocks;
  describe_inputs(launch, p);
  launch.inverse_scale = 1 / launch.scale;  // used where variant_of lets a plain scale through
  launch.vectorised_dout = is_vectorised(p.dout, p.dim_v);
  launch.vectorised_out = is_vectorised(p.out, p.dim_v);
  launch.vectorised_dq = is_vectorised(p.dq, p.dim);
  launch.vectorised_dk = is_vectorised(p.dk, p.dim);
  launch.vectorised_dv = is_vectorised(p.dv, p.dim_v);
  launch.max_rows_q = max_rows_q;
  launch.max_rows_k = max_rows_k;
  launch.tiles = block_tiles(p, n_blocks, m_blocks, true);
  return launch;
}

}  // namespace flash
