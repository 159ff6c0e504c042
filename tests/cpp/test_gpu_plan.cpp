// Which kernel, tile and order a call gets, for cards that nobody has to own. Built with UBSan by test_common.py; prints
// the number of checks.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <tuple>
#include <vector>

#include "expect.h"
#include "gpu/plan.h"
#include "gpu_cards.h"

using namespace flash;

static void test_every_request_fits() {
  const std::vector<KernelKey> keys = all_keys();
  for (const Card& card : {kT4, kA100, kRtx3090, kH200, kRtx5090})
    for (DataType dtype : {DataType::kFloat16, DataType::kBFloat16})
      for (int64_t dim = 1; dim <= 256; ++dim)
        for (Variant variant : kVariants)
          for (int64_t length : {0, 512, 100000}) {
            const auto choice = choose_kernel(keys, {dtype, dim, 1 + dim / 2, variant, length}, card);
            if (card.capability < 80 && dtype == DataType::kBFloat16) {
              EXPECT(!choice);  // never fp16 instead
              continue;
            }
            EXPECT(choice);
            const mma_sync::Tile tile = mma_sync::fwd_tiles(choice->key)[choice->tile];
            EXPECT(tile.rows > 0 && tile.from_keys <= length);
            EXPECT(tile.shared_bytes(choice->key.head_dim) + mma_sync::kStaticShared <= card.block_shared);
            EXPECT(choice->key.arch == (card.capability < 80 ? Arch::sm75 : Arch::sm80));
            EXPECT(choice->key.dtype == dtype && choice->key.variant == variant);
            EXPECT(choice->key.head_dim >= dim && choice->key.head_dim - dim < 64);
          }
}

// A card with less shared memory gets a smaller tile, or, in the end, an older kernel or none: never one that does not
// fit.
static void test_every_backward_fits() {
  std::vector<KernelKey> keys;
  for (int dim : kDims) {
    keys.push_back({Arch::sm75, DataType::kFloat16, dim, Variant::biased});
    for (Variant variant : {Variant::plain, Variant::dropout, Variant::biased})
      keys.push_back({Arch::sm80, DataType::kBFloat16, dim, variant});
  }
  for (const Card& card : {kT4, kA100, kRtx3090, kH200, kRtx5090})
    for (int64_t dim = 1; dim <= 256; ++dim)
      for (Variant variant : kVariants) {
        const DataType dtype = card.capability < 80 ? DataType::kFloat16 : DataType::kBFloat16;
        const auto choice = choose_kernel(keys, {dtype, dim, dim, variant, 1000}, card, choose_bwd_tile);
        EXPECT(choice && choice->key.variant >= variant);
        const mma_sync::BwdTile tile = mma_sync::bwd_tiles(choice->key)[choice->tile];
        EXPECT(tile.shared_bytes(choice->key.head_dim) + mma_sync::kStaticShared <= card.block_shared);
      }
}

static void test_backward_launch() {
  const KernelKey key{Arch::sm80, DataType::kBFloat16, 128, Variant::plain};
  BwdParams p;
  p.batch = 3, p.heads = 8, p.heads_k = 2, p.dim = p.dim_v = 128;
  p.rows_q.rows = 1000, p.rows_k.rows = 500;
  const Choice choice{key, 0};
  const mma_sync::BwdTile tile = mma_sync::bwd_tiles(key)[0];
  auto launch = make_bwd_launch(p, choice, 1000, 500, kH200.l2_bytes);
  EXPECT(launch && launch->group == 4 && launch->blocks == 3 * 2 * divide_up(500, tile.keys));
  EXPECT(launch->all_tiles == 3 * divide_up(1000, tile.rows));
  EXPECT(bwd_memory(*launch, p, choice).dq_sum == launch->all_tiles * 8 * tile.rows * 128);
  // Packed sequences: one block more than the rows fill is enough for each, and memory does not grow with the longest.
  const int32_t cu[] = {0, 1, 1, 1000};
  p.rows_q.cu_seqlens = {cu, false};
  launch = make_bwd_launch(p, choice, 999, 500, kH200.l2_bytes);
  EXPECT(launch->all_tiles == 1000 / tile.rows + 3);
  for (int64_t b = 0; b < 3; ++b) {
    const int64_t next = b + 1 < 3 ? cu[b + 1] / tile.rows + b + 1 : launch->all_tiles;
    EXPECT(cu[b] / tile.rows + b + divide_up(cu[b + 1] - cu[b], tile.rows) <= next);
  }
  EXPECT(!make_bwd_launch(p, choice, int64_t{1} << 29, 500, kH200.l2_bytes));
  p.heads = 0, p.heads_k = 1;
  EXPECT(make_bwd_launch(p, choice, 999, 500, kH200.l2_bytes)->blocks == 0);
}

static void test_less_shared_memory() {
  const std::vector<KernelKey> keys = all_keys();
  for (int dim : kDims) {
    int last = 1 << 30;
    for (int kb : {227, 163, 99, 64, 48, 16}) {
      const Card card{80, kb << 10, (kb + 1) << 10, 40 << 20};
      const auto choice = choose_kernel(keys, {DataType::kFloat16, dim, dim, Variant::plain, 100000}, card);
      if (kb >= 99) EXPECT(choice && choice->key.arch == Arch::sm80);
      if (kb == 64) EXPECT(choice);
      if (kb == 16) EXPECT(!choice);
      if (!choice) continue;
      const int bytes = mma_sync::fwd_tiles(choice->key)[choice->tile].shared_bytes(choice->key.head_dim);
      EXPECT(bytes <= kb << 10);
      EXPECT(bytes <= last);
      last = bytes;
    }
  }
  const auto tile = [&](const Card& card, int dim) {
    const auto choice = choose_kernel(keys, {DataType::kBFloat16, dim, dim, Variant::plain, 100000}, card);
    return mma_sync::fwd_tiles(choice->key)[choice->tile];
  };
  EXPECT(tile(kH200, 128).rows == 256 && tile(kRtx3090, 128).keys == 32);
  EXPECT(tile(kH200, 256).keys == 96 && tile(kA100, 256).keys == 64 && tile(kRtx3090, 256).keys == 32);
}

static void test_smaller_tables() {
  const std::vector<KernelKey> one{{Arch::sm80, DataType::kBFloat16, 128, Variant::biased}};
  EXPECT(choose_kernel(one, {DataType::kBFloat16, 33, 64, Variant::plain, 1}, kH200));  // more than is needed
  EXPECT(!choose_kernel(one, {DataType::kBFloat16, 33, 129, Variant::plain, 1}, kH200));
  EXPECT(!choose_kernel(one, {DataType::kFloat16, 64, 64, Variant::plain, 1}, kH200));
  EXPECT(!choose_kernel(one, {DataType::kBFloat16, 64, 64, Variant::plain, 1}, kT4));
  EXPECT(!choose_kernel({}, {DataType::kBFloat16, 64, 64, Variant::plain, 1}, kH200));
}

static void test_variant() {
  AttentionParams p;
  EXPECT(variant_of(p) == Variant::plain);
  for (double scale : {0.0, -1.0, 1e-30, 1e30}) {
    p.score.scale = scale;
    EXPECT(variant_of(p) == Variant::modified);
  }
  p.score.scale = 0.1;
  p.score.softcap = 3;
  EXPECT(variant_of(p) == Variant::modified);
  p.q.row_stride = 36;
  EXPECT(variant_of(p) == Variant::biased);
  AttentionParams dropped;
  const int64_t seed[2] = {1, 2};
  dropped.dropout.seed = seed;
  EXPECT(variant_of(dropped) == Variant::dropout);
  dropped.dim = 60;  // rows are not whole pieces of 16 bytes
  EXPECT(variant_of(dropped) == Variant::biased);
}

static void test_divisor() {
  for (uint32_t value :
       {1u, 2u, 3u, 5u, 7u, 24u, 63u, 64u, 65u, 1000u, 65537u, (1u << 28) - 1, 1u << 28, (1u << 30) + 1})
    for (uint64_t x = 0; x < 1u << 31; x = x * 3 / 2 + 1)
      for (uint64_t y : {x, x / value * value, x / value * value + value - 1})
        if (y < 1u << 31) EXPECT(Divisor(value).divide(static_cast<uint32_t>(y)) == y / value);
}

// Every (sequence, head, row block) exactly once, the longest first.
static void test_order() {
  for (uint32_t m_blocks : {1, 2, 7})
    for (uint32_t heads : {1, 3, 8})
      for (uint32_t batch : {1, 2, 5}) {
        const auto check = [&](const auto& order) {
          std::set<std::tuple<int64_t, int64_t, int>> seen;
          for (uint32_t i = 0; i < m_blocks * heads * batch; ++i) {
            const TileIndex tile = order.tile(i);
            EXPECT(tile.batch < batch && tile.head < heads && tile.m_block >= 0 && tile.m_block < int(m_blocks));
            EXPECT(seen.insert({tile.batch, tile.head, tile.m_block}).second);
            EXPECT(i > 0 || tile.m_block == int(m_blocks) - 1);
          }
        };
        for (uint32_t group : {1, 4, 32}) {
          check(TileOrder(m_blocks, heads, heads * batch, group));
          for (bool has_late : {false, true}) check(LateTileOrder(m_blocks, heads, heads * batch, group, has_late));
        }
      }
}

static void test_launch() {
  FwdParams p;
  p.batch = 70000;
  p.heads = p.heads_k = 2;
  p.dim = p.dim_v = 64;
  p.rows_q.rows = p.rows_k.rows = 300;
  const Choice choice{{Arch::sm80, DataType::kBFloat16, 64, Variant::plain}, 0};
  const auto launch = make_launch(p, choice, 300, 0, 60 << 20);
  EXPECT(launch && launch->blocks == 70000u * 2 * 3);  // one grid axis: no limit of 65,535
  p.batch = int64_t(1) << 31;
  EXPECT(!make_launch(p, choice, 300, 0, 60 << 20));
  p.batch = 1;
  EXPECT(!make_launch(p, choice, int64_t(1) << 30, 0, 60 << 20));
  p.rows_q.rows = 0;
  EXPECT(make_launch(p, choice, 0, 0, 60 << 20)->blocks == 0);
  p.window.causal = true;
  for (int64_t keys : {1, 1000, 100000, 10000000}) {
    p.rows_k.rows = keys;
    const uint32_t group = head_group(p, 60 << 20);
    EXPECT(group >= 4 && group <= 32);
  }
  // No heads: no launch, and nothing is divided by them.
  BwdParams none;
  none.batch = 2, none.heads = 0, none.heads_k = 1, none.dim = none.dim_v = 64;
  none.rows_q.rows = none.rows_k.rows = 300;
  p.rows_q.rows = p.rows_k.rows = 300, p.heads = 0, p.heads_k = 1;
  for (bool causal : {false, true}) {
    none.window.causal = p.window.causal = causal;
    EXPECT(request_of(p, Variant::plain, 300, 300).group == 1 &&
           make_launch(p, choice, 300, 300, 60 << 20)->blocks == 0);
    for (bool takes_turns : {false, true})
      EXPECT(make_bwd_launch(none, choice, 300, 300, 60 << 20, takes_turns)->blocks == 0);
  }
}

// Under a block mask: kernels that look at no elements only where a tile lies in one block.
static void test_blocks() {
  const std::vector<KernelKey> keys = all_keys();
  for (const Card& card : {kT4, kA100, kRtx3090, kH200, kRtx5090})
    for (int dim : kDims)
      for (Variant variant : kVariants)
        for (int64_t rows : {16, 48, 64, 128, 256})
          for (int64_t of_block : {16, 64, 96, 128, 256}) {
            Request request{DataType::kFloat16, dim, dim, variant, 10000, rows, of_block};
            const auto choice = choose_kernel(keys, request, card);
            EXPECT(choice && choice->key.head_dim == dim);
            const mma_sync::Tile tile = mma_sync::fwd_tiles(choice->key)[choice->tile];
            EXPECT(tile.takes_blocks);
            EXPECT(choice->key.variant == Variant::biased || (rows % tile.rows == 0 && of_block % tile.keys == 0));
            // The default size has kernels of the simplest variant.
            if (rows == 128 && of_block == 128 && card.capability >= 80 && (dim <= 128 || card.block_shared > 160000))
              EXPECT(choice->key.variant == variant);
          }
  FwdParams p;
  p.batch = 3, p.heads = p.heads_k = 2, p.dim = p.dim_v = 64;
  p.rows_q.rows = 300, p.rows_k.rows = 700;
  const int32_t kind = 1;
  p.block_mask.kinds = &kind;
  p.block_mask.rows = p.block_mask.keys = 128;
  const Choice choice{{Arch::sm80, DataType::kBFloat16, 64, Variant::plain}, 0};
  BlockTiles tiles = make_launch(p, choice, 300, 700, 60 << 20)->tiles;
  EXPECT(tiles.own_tiles == 3 && tiles.other_tiles == 11 && tiles.planes == 1 && tiles.bytes() == 3 * 12 * 2);
  p.block_mask.head_planes = 1;
  EXPECT(make_launch(p, choice, 300, 700, 60 << 20)->tiles.planes == 2);
  const int64_t pads[3] = {};
  p.rows_k.leftpad = {pads, true};  // blocks lie otherwise in each sequence
  EXPECT(make_launch(p, choice, 300, 700, 60 << 20)->tiles.planes == 6 && variant_of(p) == Variant::biased);
  EXPECT(!make_launch(p, choice, 300, int64_t{64} << 15, 60 << 20));  // more tiles than a step can pass
}

// Backward's key blocks in turns, a row block a step, on a card with so many places for CTAs: steps it takes until all
// have added to all row blocks that they see.
static long steps_in_turns(const BwdParams& p, const BwdLaunch& launch, int keys, int rows, int places) {
  struct Cta {
    int key_block = 0;
    std::vector<int> row_blocks;
    int64_t head = 0;
    size_t done = 0;
  };
  const Visibility visibility = make_visibility(p.window, p.rows_q.rows, p.rows_k.rows);
  std::vector<Cta> ctas(launch.blocks);
  const auto row_blocks = static_cast<int>(divide_up(p.rows_q.rows, rows));
  for (uint32_t i = 0; i < launch.blocks; ++i) {
    const TileIndex tile = launch.turn_order.key_block(launch.order, i);
    EXPECT(0 <= tile.batch && tile.batch < p.batch && tile.m_block >= 0);
    const int64_t first_key = int64_t{tile.m_block} * keys;
    if (first_key >= p.rows_k.rows) continue;
    ctas[i].head = tile.batch * p.heads + tile.head;
    ctas[i].key_block = tile.m_block;
    const Range range = visibility.rows_of_any({first_key, first_key + keys});
    if (range.empty()) continue;
    const int begin = static_cast<int>(range.begin) / rows, end = static_cast<int>(divide_up(range.end, rows));
    for (int m = begin; m < end; ++m) ctas[i].row_blocks.push_back(m);
  }
  std::vector<int> added(p.batch * p.heads * row_blocks);
  std::vector<size_t> running;
  long steps = 0;
  for (size_t next = 0;; ++steps) {
    while (next < ctas.size() && running.size() < static_cast<size_t>(places))
      if (const size_t cta = next++; !ctas[cta].row_blocks.empty()) running.push_back(cta);
    if (running.empty()) return steps;
    const size_t oldest = ctas[running.front()].done;
    // What is added in a step is seen in the next.
    std::vector<int*> adds;
    for (size_t cta : running) {
      const int m = ctas[cta].row_blocks[ctas[cta].done];
      int& turn = added[ctas[cta].head * row_blocks + m];
      const Range of_block{int64_t{m} * rows, std::min(p.rows_q.rows, int64_t{m + 1} * rows)};
      if (turn == TurnOrder::turn(visibility, of_block, ctas[cta].key_block, keys))
        adds.push_back(&turn), ++ctas[cta].done;
    }
    EXPECT(ctas[running.front()].done == oldest + 1);  // all wait for earlier CTAs alone, the earliest for none
    for (int* turn : adds) ++*turn;
    std::erase_if(running, [&](size_t cta) { return ctas[cta].done == ctas[cta].row_blocks.size(); });
  }
}

static void test_turns() {
  const KernelKey key{Arch::sm80, DataType::kBFloat16, 128, Variant::plain};
  const mma_sync::BwdTile tile = mma_sync::bwd_tiles(key)[0];
  for (int sms : {1, 5, 20, 132})
    for (int64_t rows : {1, 70, 500, 4096})
      for (int64_t keys : {1, 300, 1000, 4096})
        for (int64_t heads : {1, 5})
          for (const Window& window : {Window{}, Window{true}, Window{true, true}, Window{false, false, 200, 100},
                                       Window{false, false, -1, 90}, Window{false, false, 300, -1}}) {
            BwdParams p;
            p.batch = 2, p.heads = p.heads_k = heads, p.dim = p.dim_v = 128;
            p.rows_q.rows = rows, p.rows_k.rows = keys;
            p.window = window;
            const auto launch = make_bwd_launch(p, {key, 0}, rows, keys, kH200.l2_bytes, true);
            steps_in_turns(p, *launch, tile.keys, tile.rows, sms);
          }
  // Under a diagonal, as many heads as an H200's L2 cache holds what they share of.
  const struct {
    int64_t dim, rows;
    uint32_t heads;
  } kGroups[] = {{256, 16384, 1}, {256, 8192, 2}, {256, 4096, 4}, {128, 16384, 2}, {64, 16384, 4}, {64, 512, 32}};
  for (const auto& [dim, rows, heads] : kGroups) {
    BwdParams p;
    p.batch = 1, p.heads = p.heads_k = 16, p.dim = p.dim_v = dim;
    p.rows_q.rows = p.rows_k.rows = rows;
    p.window.causal = true;
    EXPECT(bwd_head_group(p, rows, true, kH200.l2_bytes) == heads);
    EXPECT(bwd_head_group(p, rows, false, kH200.l2_bytes) == head_group(p, kH200.l2_bytes));
    EXPECT(bwd_head_group(p, 100 * rows, true, kH200.l2_bytes) == heads);  // an overstated max_seqlen
    p.rows_q.rows = p.rows_k.rows = 100 * rows;  // of packed sequences, of which none is longer
    EXPECT(bwd_head_group(p, rows, true, kH200.l2_bytes) == heads);
  }
  // On an H200 waiting takes little.
  constexpr int kSms = 132;
  for (bool causal : {false, true})
    for (int64_t seqlen : {512, 2048, 4096, 16384}) {
      BwdParams p;
      p.batch = 16384 / seqlen, p.heads = p.heads_k = 16, p.dim = p.dim_v = 128;
      p.rows_q.rows = p.rows_k.rows = seqlen;
      p.window.causal = causal;
      BwdLaunch launch = *make_bwd_launch(p, {key, 0}, seqlen, seqlen, kH200.l2_bytes, true);
      const long taken = steps_in_turns(p, launch, tile.keys, tile.rows, kSms);
      const long rows = seqlen / tile.rows, blocks = seqlen / tile.keys, step = tile.keys / tile.rows;
      const long of_head = causal ? rows * blocks - step * blocks * (blocks - 1) / 2 : rows * blocks;
      const long least = of_head * p.batch * p.heads / kSms;
      EXPECT(taken <= least * 108 / 100 + 1);
    }
}

int main() {
  test_every_request_fits();
  test_blocks();
  test_every_backward_fits();
  test_backward_launch();
  test_less_shared_memory();
  test_smaller_tables();
  test_variant();
  test_divisor();
  test_order();
  test_launch();
  test_turns();
  std::printf("%ld checks\n", checks);
}
