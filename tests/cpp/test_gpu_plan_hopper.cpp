// Which calls Hopper's own kernels get, and which of their tiles. Built with UBSan by test_common.py; prints the number of
// checks.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <tuple>
#include <vector>

#include "expect.h"
#include "gpu/plan.h"
#include "gpu_cards.h"

using namespace flash;

// Hopper's kernels on Hopper alone, for what they have; mma_sync's for all else, as without them.
static void test_families() {
  const std::vector<KernelKey> old = all_keys(), keys = keys_with_wgmma();
  for (const Card& card : {kT4, kA100, kRtx3090, kRtx4090, kH200, kB200, kRtx5090})
    for (int64_t dim = 1; dim <= 256; ++dim)
      for (Variant variant : kVariants)
        for (int64_t length : {0, 512, 10000, 100000})
          for (bool reachable : {false, true})
            for (bool window : {false, true}) {
              Request request{DataType::kFloat16, dim, dim, variant, length, 0, 0, window, reachable};
              const bool hopper = card.capability == 90 && reachable && variant != Variant::biased;
              const auto choice = choose_kernel(keys, request, card);
              EXPECT(choice && family_of(choice->key) == (hopper ? Family::wgmma : Family::mma_sync));
              EXPECT((refusal_of_wgmma(request, card) == nullptr) == hopper);
              request.family = Family::wgmma;
              const auto forced = choose_kernel(keys, request, card);
              EXPECT(forced.has_value() == hopper);
              EXPECT(!choose_kernel(old, request, card));
              if (hopper) {
                EXPECT(forced->key == choice->key && forced->tile == choice->tile);
                const wgmma::Tile tile = wgmma::fwd_tiles(choice->key)[choice->tile];
                EXPECT(choice->key.variant == variant && choice->key.head_dim >= dim);
                EXPECT(choice->key.head_dim == 64 || choice->key.head_dim - dim < 64);
                EXPECT(tile.warpgroups > 0 && tile.shared_bytes(choice->key.head_dim) <= card.block_shared);
                EXPECT((window ? tile.from_keys_of_windows : tile.from_keys) <= length);
                EXPECT(fwd_tile_size(*choice, 1).rows == tile.rows() && fwd_tile_size(*choice, 1).keys == tile.keys);
              }
              request.family = Family::mma_sync;
              const auto other = choose_kernel(keys, request, card);
              request.family = Family::any;
              const auto without = choose_kernel(old, request, card);
              EXPECT(other && without && other->key == without->key && other->tile == without->tile);
              const mma_sync::Tile tile = mma_sync::fwd_tiles(other->key)[other->tile];
              EXPECT(fwd_tile_size(*other, 1).rows == tile.rows && fwd_tile_size(*other, 1).keys == tile.keys);
            }
  // Backward has one family, whatever the table says, and a card with too little memory its kernels of mma_sync.
  for (int dim : kDims) {
    const Request request{DataType::kFloat16, dim, dim, Variant::plain, 1000};
    const auto backward = choose_kernel(keys, request, kH200, choose_bwd_tile);
    EXPECT(backward && family_of(backward->key) == Family::mma_sync);
    const auto forward = choose_kernel(keys, request, {90, 48 << 10, 49 << 10, 60 << 20});
    EXPECT(!forward || family_of(forward->key) == Family::mma_sync);
  }
}

// Longer sequences, with and without a diagonal, get the tiles that are made for them.
static void test_wgmma_lengths() {
  for (const KernelKey& key : keys_with_wgmma()) {
    if (family_of(key) != Family::wgmma) continue;
    const wgmma::Tiles tiles = wgmma::fwd_tiles(key);
    for (int64_t length : {0, 1, 4096, 8191, 8192, 16383, 16384, 1 << 20})
      for (bool window : {false, true}) {
        int first = 0;
        while ((window ? tiles[first].from_keys_of_windows : tiles[first].from_keys) > length) ++first;
        const Request request{key.dtype, key.head_dim, key.head_dim, key.variant, length, 0, 0, window};
        EXPECT(choose_kernel(keys_with_wgmma(), request, kH200)->tile == first);
      }
  }
}

// Few queries: the tile that makes an eighth fewer rows of them, or one that packs the heads of a group.
static void test_wgmma_queries() {
  for (const KernelKey& key : keys_with_wgmma()) {
    if (family_of(key) != Family::wgmma) continue;
    const wgmma::Tiles tiles = wgmma::fwd_tiles(key);
    for (int64_t keys : {100, 5000, 100000})
      for (bool window : {false, true})
        for (int64_t group : {1, 2, 3, 7, 8, 64, 65, 128})
          for (int64_t queries : {1, 5, 64, 65, 128, 129, 200, 256, 257, 384, 600, 1000, 4096, 100000})
            for (int64_t of_block : {0, 256}) {
              Request request{key.dtype, key.head_dim, key.head_dim, key.variant, keys, of_block, of_block, window};
              request.queries = queries, request.group = group;
              const auto choice = choose_kernel(keys_with_wgmma(), request, kH200);
              EXPECT(choice && choice->key == key && wgmma_tile_fits(key, choice->tile, kH200, request));
              const wgmma::Tile& tile = tiles[choice->tile];
              const TileSize size = fwd_tile_size(*choice, group);
              EXPECT((size.packed_queries > 0) == tile.packs_heads && size.rows == tile.rows());
              EXPECT(size.queries == (tile.packs_heads ? tile.warpgroups * size.packed_queries : tile.rows()));
              // Of all that serve the call, none makes much less work.
              const int64_t rows = divide_up(queries, size.queries) * size.rows * (tile.packs_heads ? 1 : group);
              for (int i = 0; i < static_cast<int>(tiles.size()); ++i) {
                const int64_t from = window ? tiles[i].from_keys_of_windows : tiles[i].from_keys;
                if (keys < from || !wgmma_tile_fits(key, i, kH200, request)) continue;
                if (!tiles[i].packs_heads) {
                  EXPECT(7 * rows <= 8 * group * divide_up(queries, tiles[i].rows()) * tiles[i].rows());
                } else {
                  const int64_t of_tile = tiles[i].warpgroups * (64 / group);
                  EXPECT(3 * rows <= 4 * divide_up(queries, of_tile) * tiles[i].rows() || choice->tile == i);
                }
              }
              if (tile.packs_heads) {
                EXPECT(key.variant == Variant::plain && group > 1 && group <= 64 && of_block == 0);
                EXPECT(size.packed_queries * group <= 64 && (size.packed_queries + 1) * group > 64);
              }
              if (key.variant == Variant::plain && of_block == 0 && 1 < group && group <= 64 && queries <= 64 / group)
                EXPECT(tile.packs_heads);
              if (group == 8 && queries == 200) EXPECT(!tile.packs_heads);  // 1664 rows instead of 2048 are not enough
              if (group == 1) EXPECT(!tile.packs_heads);
            }
  }
  // Few rows for nothing are no reason for another tile, and no number of queries is too large to ask about.
  Request request{DataType::kBFloat16, 128, 128, Variant::plain, 5000};
  request.queries = 4096;
  EXPECT(fwd_tile_size(*choose_kernel(keys_with_wgmma(), request, kH200), 1).rows == 192);  // 4224 instead of 4096
  for (int64_t queries : {int64_t{1} << 40, int64_t{1} << 60, INT64_MAX})
    for (int64_t group : {0, 1, 8, 64, 1000}) {
      request.queries = queries, request.group = group;
      const auto choice = choose_kernel(keys_with_wgmma(), request, kH200);
      EXPECT(choice && family_of(choice->key) == Family::wgmma && fwd_tile_size(*choice, group).packed_queries == 0);
    }
}

// A launch of packed heads counts tiles of key heads.
static void test_wgmma_packed_launch() {
  FwdParams p;
  p.batch = 3, p.heads = 16, p.heads_k = 2, p.dim = p.dim_v = 128;
  p.rows_q.rows = 40, p.rows_k.rows = 700;
  p.dtype = DataType::kBFloat16;
  for (Operand* x : {&p.q, &p.k, &p.v}) *x = {nullptr, 700 * 2048, 2048, 128};
  const Request request = request_of(p, Variant::plain, 40, 700);
  EXPECT(request.queries == 40 && request.group == 8);
  const auto choice = choose_kernel(keys_with_wgmma(), request, kH200);
  const auto launch = make_launch(p, *choice, 40, 700, kH200.l2_bytes);
  EXPECT(launch->packed_queries == 8 && launch->blocks == 3 * 2 * 3);  // 16 queries a tile
  std::set<std::tuple<int64_t, int64_t, int>> found;
  for (uint32_t i = 0; i < launch->blocks; ++i) {
    const TileIndex tile = launch->late_order.tile(i);
    EXPECT(tile.batch < 3 && tile.head < 2 && tile.m_block < 3);
    EXPECT(found.insert({tile.batch, tile.head, tile.m_block}).second);
  }
  p.q.head_stride = kMostStride / 8;  // too far apart for an axis of groups
  EXPECT(request_of(p, Variant::plain, 40, 700).group == 1);
  p.q.head_stride -= 8;
  EXPECT(request_of(p, Variant::plain, 40, 700).group == 8);
}

static void test_wgmma_blocks() {
  for (int dim : {64, 96, 128, 192, 256})
    for (Variant variant : kVariants)
      for (int64_t rows : {16, 64, 128, 192, 256})
        for (int64_t of_block : {16, 64, 96, 128, 256})
          for (int64_t length : {100, 100000}) {
            const Request request{DataType::kBFloat16, dim, dim, variant, length, rows, of_block};
            const auto choice = choose_kernel(keys_with_wgmma(), request, kH200);
            EXPECT(choice);
            const TileSize tile = fwd_tile_size(*choice, 1);
            const bool whole = rows % tile.rows == 0 && of_block % tile.keys == 0;
            EXPECT(whole || choice->key.variant == Variant::biased);
            if (family_of(choice->key) == Family::wgmma) EXPECT(whole && variant != Variant::biased);
            // No tile of theirs has 64 rows; all have one for blocks of 128 or 256.
            if (rows <= 64) EXPECT(family_of(choice->key) == Family::mma_sync);
            if (rows == of_block && rows >= 128 && variant != Variant::biased)
              EXPECT(family_of(choice->key) == Family::wgmma);
          }
  FwdParams p;
  p.batch = 2, p.heads = p.heads_k = 2, p.dim = p.dim_v = 128;
  p.rows_q.rows = 300, p.rows_k.rows = 700;
  const int32_t kind = 1;
  p.block_mask.kinds = &kind;
  p.block_mask.rows = p.block_mask.keys = 128;
  p.dtype = DataType::kBFloat16;
  for (Operand* x : {&p.q, &p.k, &p.v}) *x = {nullptr, 700 * 256, 256, 128};
  const auto half = choose_kernel(keys_with_wgmma(), request_of(p, Variant::plain, 300, 700), kH200);
  EXPECT(half && family_of(half->key) == Family::wgmma);
  const TileSize tile = fwd_tile_size(*half, 1);
  const auto launch = make_launch(p, *half, 300, 700, kH200.l2_bytes);
  EXPECT(launch->blocks == 2 * 2 * divide_up(300, tile.rows) && launch->tile == half->tile);
  EXPECT(launch->tiles.own_tiles == divide_up(300, tile.rows) &&
         launch->tiles.other_tiles == divide_up(700, tile.keys));
}

// What a tensor map can describe. Strides of axes that have no second element decide nothing.
static void test_tma() {
  FwdParams p;
  p.batch = 3, p.heads = 4, p.heads_k = 2, p.dim = p.dim_v = 64;
  p.rows_q.rows = p.rows_k.rows = 100;
  for (Operand* x : {&p.q, &p.k, &p.v}) *x = {nullptr, 100 * 4 * 64, 4 * 64, 64};
  const auto with = [&p](auto change) {
    FwdParams other = p;
    change(other);
    const bool reachable = is_reachable_by_tma(other);
    EXPECT(request_of(other, Variant::plain, 50, 100).reachable_by_tma == reachable);
    return reachable;
  };
  constexpr int64_t kFar = int64_t{1} << 39;
  static constexpr int32_t kOffsets[] = {0, 50, 60, 100};
  EXPECT(with([](FwdParams&) {}));
  for (Operand AttentionParams::* x : {&AttentionParams::q, &AttentionParams::k, &AttentionParams::v})
    for (int64_t Operand::* stride : {&Operand::batch_stride, &Operand::row_stride, &Operand::head_stride}) {
      for (int64_t value : {int64_t{0}, int64_t{-64}, int64_t{36}, kFar, 2 * kFar})
        EXPECT(!with([&](FwdParams& o) { o.*x.*stride = value; }));
      EXPECT(with([&](FwdParams& o) { o.*x.*stride = kFar - 8; }));
    }
  for (int64_t value : {int64_t{0}, int64_t{-64}, kFar}) {
    EXPECT(with([&](FwdParams& o) { o.batch = 1, o.q.batch_stride = o.k.batch_stride = value; }));
    EXPECT(with([&](FwdParams& o) { o.rows_k.rows = 1, o.k.row_stride = o.v.row_stride = value; }));
    EXPECT(!with([&](FwdParams& o) { o.rows_q.rows = 1, o.k.row_stride = value; }));
    EXPECT(with([&](FwdParams& o) { o.heads_k = 1, o.k.head_stride = value; }));
    EXPECT(!with([&](FwdParams& o) { o.heads_k = 1, o.q.head_stride = value; }));
    EXPECT(with([&](FwdParams& o) {
      o.q.batch_stride = o.v.batch_stride = value;
      o.rows_q.cu_seqlens = o.rows_k.cu_seqlens = {kOffsets, false};
    }));
  }
  for (int64_t FwdParams::* size : {&FwdParams::batch, &FwdParams::heads, &FwdParams::dim, &FwdParams::dim_v})
    EXPECT(!with([&](FwdParams& o) { o.*size = 0; }));
  EXPECT(!with([](FwdParams& o) { o.rows_q.rows = 0; }) && !with([](FwdParams& o) { o.rows_k.rows = 0; }));
  EXPECT(!with([](FwdParams& o) { o.dim = 60; }) && !with([](FwdParams& o) { o.dim_v = 36; }));
  EXPECT(!with([](FwdParams& o) { o.v.data = reinterpret_cast<void*>(8); }));
  EXPECT(with([](FwdParams& o) { o.v.data = reinterpret_cast<void*>(16); }));
  EXPECT(!with([](FwdParams& o) { o.rows_k.rows = int64_t{1} << 31; }));
  for (bool causal : {false, true}) {
    p.window = {};
    p.window.causal = causal;
    EXPECT(request_of(p, Variant::plain, 50, 100).has_window == causal);
  }
  p.window = {false, false, -1, 7};
  EXPECT(request_of(p, Variant::plain, 50, 100, Family::wgmma).has_window);
  EXPECT(request_of(p, Variant::plain, 50, 100, Family::wgmma).family == Family::wgmma);
}

int main() {
  test_families();
  test_wgmma_lengths();
  test_wgmma_queries();
  test_wgmma_packed_launch();
  test_wgmma_blocks();
  test_tma();
  std::printf("%ld checks\n", checks);
}
