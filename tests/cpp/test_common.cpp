// csrc/common against the plain definitions, by brute force. Built with UBSan by test_common.py; prints the number of
// checks.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

#include "common/block_mask.h"
#include "common/dropout.h"
#include "common/score.h"
#include "common/sequence.h"
#include "common/statistics.h"
#include "common/visibility.h"
#include "expect.h"

using namespace flash;

// ---- Visibility: every row/key pair against the sentence in the documentation ----

static bool visible(const Window& w, int64_t seqlen_q, int64_t seqlen_k, int64_t i, int64_t j) {
  const int64_t shift = w.upper_left ? 0 : seqlen_k - seqlen_q;
  if (j < 0 || j >= seqlen_k) return false;
  if (w.causal && j > i + shift) return false;
  if (w.left >= 0 && j < i + shift - w.left) return false;
  if (w.right >= 0 && j > i + shift + w.right) return false;
  return true;
}

static void test_tiles(const Window& w, const Visibility& v) {
  const int64_t m = v.seqlen_q, n = v.seqlen_k;
  for (int64_t begin = 0; begin < m; ++begin)
    for (int64_t end = begin + 1; end <= m; ++end) {
      const Range rows{begin, end};
      const Range any = v.keys_of_any(rows), all = v.keys_of_all(rows);
      int64_t first = n, last = -1;
      for (int64_t j = 0; j < n; ++j) {
        int64_t seen = 0;
        for (int64_t i = begin; i < end; ++i) seen += visible(w, m, n, i, j);
        if (seen > 0) first = smaller(first, j), last = j;
        EXPECT(all.contains(j) == (seen == end - begin));
      }
      EXPECT(any.empty() == (last < 0));
      if (last >= 0) EXPECT(any.begin == first && any.end == last + 1);  // the hull, not more: nothing else is read
      for (int64_t block = 1; block <= 4; ++block) {
        const BlockRange blocks = v.key_blocks(rows, block);
        for (int64_t b = 0; b * block < n; ++b) {
          const bool visited = blocks.begin <= b && b < blocks.end;
          EXPECT(visited == !intersect(any, {b * block, (b + 1) * block}).empty());
          bool full = (b + 1) * block <= n;
          for (int64_t j = b * block; j < (b + 1) * block; ++j) full = full && all.contains(j);
          EXPECT(blocks.is_full(b) == full);
          EXPECT(!blocks.is_full(b) || visited);
        }
      }
    }
  for (int64_t begin = 0; begin < n; ++begin)
    for (int64_t end = begin + 1; end <= n; ++end) {
      const Range rows = v.rows_of_any({begin, end});
      int64_t first = m, last = -1;
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = begin; j < end; ++j)
          if (visible(w, m, n, i, j)) first = smaller(first, i), last = i;
      EXPECT(rows.empty() == (last < 0));
      if (last >= 0) EXPECT(rows.begin == first && rows.end == last + 1);
      const Range all = v.rows_of_all({begin, end});
      for (int64_t i = 0; i < m; ++i) {
        bool sees_all = true;
        for (int64_t j = begin; j < end; ++j) sees_all = sees_all && visible(w, m, n, i, j);
        EXPECT(all.contains(i) == sees_all);
      }
      EXPECT(v.rows_of_all({begin, n + 1}).empty());  // no row sees what is not there
    }
}

static void test_visibility() {
  const int64_t sides[] = {-1, 0, 1, 2, 5, 100, int64_t{1} << 62};
  for (int64_t m = 0; m <= 7; ++m)
    for (int64_t n = 0; n <= 7; ++n)
      for (int causal = 0; causal < 2; ++causal)
        for (int upper_left = 0; upper_left < 2; ++upper_left)
          for (const int64_t left : sides)
            for (const int64_t right : sides) {
              const Window w{causal != 0, upper_left != 0, left, right};
              const Visibility v = make_visibility(w, m, n);
              for (int64_t i = 0; i < m; ++i)
                for (int64_t j = 0; j < n; ++j) EXPECT(v.keys(i).contains(j) == visible(w, m, n, i, j));
              test_tiles(w, v);
            }
}

// ---- Sequences ----

static void test_sequence() {
  const int32_t cu32[] = {0, 3, 3, 9};
  const int64_t cu64[] = {0, 3, 3, 9}, used[] = {2, 0, 6}, pad[] = {1, 0, 2};
  RowLayout layout;
  layout.rows = 11;
  for (int b = 0; b < 3; ++b) {
    const Rows dense = rows_of_sequence(layout, b);
    EXPECT(dense.batch == b && dense.first() == 0 && dense.length == 11);
  }
  for (const IndexArray cu : {IndexArray{cu32, false}, IndexArray{cu64, true}}) {
    RowLayout packed = layout;
    packed.cu_seqlens = cu;
    for (int b = 0; b < 3; ++b) {
      const Rows rows = rows_of_sequence(packed, b);
      EXPECT(rows.batch == 0 && rows.first() == cu64[b] && rows.length == cu64[b + 1] - cu64[b] && rows.leftpad == 0);
    }
    packed.seqused = {used, true};
    packed.leftpad = {pad, true};
    for (int b = 0; b < 3; ++b) {
      const Rows rows = rows_of_sequence(packed, b);
      EXPECT(rows.first() == cu64[b] + pad[b] && rows.length == used[b] - pad[b] && rows.leftpad == pad[b]);
    }
  }
}

// ---- Score ----

static void test_score() {
  for (double softcap : {0.5, 15.0, 50.0})
    for (double s = -100; s <= 100; s += 0.73) {
      const auto capped = apply_softcap(s, softcap);
      EXPECT(std::fabs(capped.value - softcap * std::tanh(s / softcap)) <= 1e-14 * softcap);
      const double h = 1e-5;
      const double slope = (softcap * std::tanh((s + h) / softcap) - softcap * std::tanh((s - h) / softcap)) / (2 * h);
      EXPECT(std::fabs(capped.derivative - slope) < 1e-8);
    }
  for (int64_t m = 1; m <= 5; ++m)
    for (int64_t n = 1; n <= 5; ++n)
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) EXPECT(alibi(0.25, i, j, n - m) == -0.25 * std::llabs(i + n - m - j));
}

// ---- Statistics ----

template <class Real>
static void test_statistics(Real tolerance) {
  // A row's sum in two parts and a sink, in any order, equals the whole.
  for (Real offset : {Real(0), Real(-3), Real(1e4)}) {
    const std::vector<Real> logits = {Real(1) + offset, Real(-2) + offset, Real(0.5) + offset, Real(4) + offset,
                                      Real(3.25) + offset};
    for (size_t split = 0; split <= logits.size(); ++split) {
      Real max_a = -INFINITY, max_b = -INFINITY, sum_a = 0, sum_b = 0;
      for (size_t x = 0; x < logits.size(); ++x)
        (x < split ? max_a : max_b) = std::fmax(x < split ? max_a : max_b, logits[x]);
      for (size_t x = 0; x < logits.size(); ++x)
        (x < split ? sum_a : sum_b) += std::exp(logits[x] - (x < split ? max_a : max_b));
      const Merge<Real> both = merge(max_a, max_b);
      const RowStatistics<Real> row = make_statistics(both.row_max, sum_a * both.scale_a + sum_b * both.scale_b);
      double exact = 0;
      for (Real s : logits) exact += std::exp(double(s) - double(logits[3]));
      EXPECT(std::fabs(double(row.log2_sum) - std::log2(exact)) < tolerance);
      EXPECT(row.reference == logits[3]);
      EXPECT(std::fabs(double(log_sum_exp(row)) - (double(logits[3]) + std::log(exact))) <
             tolerance * (1 + std::fabs(offset)));
      // P from the pair keeps full precision however large the logits are; that is what the second number is for.
      const double p = std::exp2((double(logits[4]) - row.reference) * kLog2E<double> - row.log2_sum);
      EXPECT(std::fabs(p - std::exp(double(logits[4]) - double(logits[3])) / exact) < tolerance);
    }
  }
  const RowStatistics<Real> empty = make_statistics(Real(-INFINITY), Real(0));
  EXPECT(empty.reference == 0 && empty.log2_sum == -INFINITY && log_sum_exp(empty) == -INFINITY);
  EXPECT(log2_sum_for_backward(empty) == INFINITY);
  for (Real s : {Real(0), Real(1e30), Real(-INFINITY)})
    EXPECT(std::exp2((s - empty.reference) * kLog2E<Real> - log2_sum_for_backward(empty)) == 0);
  const Merge<Real> nothing = merge(Real(-INFINITY), Real(-INFINITY));
  EXPECT(nothing.row_max == -INFINITY && nothing.scale_a == 0 && nothing.scale_b == 0);
  const Merge<Real> sink_alone = merge(Real(-INFINITY), Real(2));  // an empty row with a sink: R = sink, ℓ = 1
  EXPECT(sink_alone.row_max == 2 && sink_alone.scale_a == 0 && sink_alone.scale_b == 1);
}

// ---- Dropout ----

static void test_philox() {
  // Known answers of the authors' Random123 distribution.
  const struct {
    Philox4 counter;
    uint32_t key[2], expected[4];
    int rounds;
  } known[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}, 10},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}, 10},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
       10},
      {{{0, 0, 0, 0}}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}, 7},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}, 7},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a},
       7},
  };
  for (const auto& k : known) {
    const Philox4 x = philox4x32(k.counter, k.key[0], k.key[1], k.rounds);
    for (int i = 0; i < 4; ++i) EXPECT(x.x[i] == k.expected[i]);
  }
}

// Rounds that are shared between groups change nothing.
static void test_shared_rounds() {
  const int64_t seed[2] = {-3, int64_t{1} << 40};
  const DropoutStream stream = dropout_stream(seed, 2, 7);
  const auto finish = [&](uint32_t (&x)[4], int done, uint32_t g, uint32_t c) {
    for (int round = done; round < kPhiloxRounds; ++round)
      philox_round(x, stream.key0 + round * kPhiloxWeyl0, stream.key1 + round * kPhiloxWeyl1);
    for (int i = 0; i < 4; ++i) EXPECT(x[i] == stream.draws(g, c).x[i]);
  };
  for (uint32_t g : {0u, 1u, 77u, 0xFFFFFFFFu})
    for (uint32_t c : {0u, 5u, 12345678u, 0xFFFFFFFFu}) {
      uint32_t x[4];
      const DropoutRow row = DropoutRow::make(stream, g);
      row.start(x, static_cast<uint64_t>(kPhiloxMultiplier0) * (c ^ row.mask));
      finish(x, DropoutRow::kRoundsDone, g, c);
      DropoutColumn::make(stream, c).start(x, g);
      finish(x, DropoutColumn::kRoundsDone, g, c);
    }
}

static void test_cut() {
  for (uint32_t least = 0; least <= 256; ++least)
    for (uint32_t draw = 0; draw < 256; ++draw)
      for (uint32_t other : {0u, 0x7Fu, 0x80u, 0xFFu, least & 0xFFu}) {
        const uint32_t kept = DropoutCut(least).kept(draw | other << 8 | draw << 16 | other << 24);
        EXPECT((kept >> 7 & 1) == (draw >= least) && (kept >> 23 & 1) == (draw >= least));
        EXPECT((kept >> 15 & 1) == (other >= least) && kept >> 31 == (other >= least));
      }
}

// Over all phases and draws, exactly `threshold` of 65536 pairs are dropped.
static void test_threshold() {
  for (uint32_t threshold :
       {0u, 1u, 255u, 256u, 257u, 0x7FFFu, 0x8000u, 0x8001u, 0xFF00u, 0xFF01u, 0xFFFFu, 0x10000u}) {
    const DropoutThreshold rule(threshold);
    uint32_t dropped = 0;
    for (uint32_t phase = 0; phase < 256; ++phase)
      for (uint32_t draw = 0; draw < 256; ++draw) {
        const bool kept = rule.cut(phase << 24).kept(draw) >> 7 & 1;
        EXPECT(kept == (rule.cut(phase << 24 | 0xFFFFFF).kept(draw) >> 7 & 1));
        dropped += !kept;
      }
    EXPECT(dropped == threshold);
  }
}

using Group = std::pair<int64_t, int64_t>;
using Slot = std::pair<int, int>;  // a word, a byte of it

static void test_groups() {
  // Groups and slots number every position once, and a group is {q, q+8} × ({k, k+1} + {0, 8, 16, 24}).
  std::set<std::pair<Group, Slot>> all;
  for (int64_t q = 0; q < 64; ++q)
    for (int64_t k = 0; k < 64; ++k) {
      const Group group{dropout_query_group(q), dropout_key_group(k)};
      EXPECT(all.insert({group, {dropout_word(k), dropout_byte(q, k)}}).second);
      const int64_t q0 = q / 16 * 16 + q % 8, k0 = k / 32 * 32 + k % 8 / 2 * 2;
      EXPECT(dropout_query_group(q0) == group.first && dropout_key_group(k0) == group.second);
      EXPECT(dropout_word(k) < 4 && dropout_byte(q, k) < 4);
    }
  EXPECT(all.size() == 64 * 64);
  // The definition that other backends are written from.
  const int64_t seed[2] = {0x0123456789abcdef, 0x7edcba9876543210};
  const DropoutThreshold threshold(20000);
  for (int64_t far : {int64_t{0}, int64_t{1} << 33, int64_t{1} << 40}) {
    const DropoutStream stream = dropout_stream(seed, 3, 5);
    for (int64_t q = far; q < far + 20; ++q)
      for (int64_t k = far; k < far + 40; ++k) {
        const Philox4 words = stream.draws((q >> 4) * 8 + (q & 7), (k >> 5) * 4 + (k >> 1 & 3));
        const uint32_t draw = words.x[(k & 1) * 2 + (k >> 4 & 1)] >> (8 * ((k >> 3 & 1) * 2 + (q >> 3 & 1))) & 0xff;
        const auto phase = static_cast<uint32_t>(stream.key1 + (q >> 4) * 0xC13FA9A9 + (k >> 5) * 0x91E10DA5);
        EXPECT(stream.keeps(q, k, threshold) == (draw >= 20000u / 256 + (phase >> 24 < 20000u % 256)));
      }
  }
  const Philox4 a = dropout_stream(seed, 3, 5).draws(0, 0), b = dropout_stream(seed, 5, 3).draws(0, 0);
  EXPECT(a.x[0] != b.x[0] || a.x[1] != b.x[1]);
}

// What a thread of a warp owns in the fp32 accumulator of mma.m16n8: c0, c1 in row lane / 4, c2, c3 eight rows below,
// columns 2 · (lane % 4) + {0, 1} (PTX ISA; wgmma's m64nN gives each of its four warps the same picture of 16 rows).
static std::pair<int, int> accumulator_element(int lane, int c) {
  return {lane / 4 + 8 * (c / 2), 2 * (lane % 4) + c % 2};
}

static void test_fragments() {
  for (int lane = 0; lane < 32; ++lane) {
    // Forward: S is queries (m) × keys (n). Over four n8 tiles a thread needs one Philox call and uses all of it.
    std::set<Group> forward_groups;
    std::set<std::pair<Group, Slot>> forward_draws;
    for (int tile = 0; tile < 4; ++tile)
      for (int c = 0; c < 4; ++c) {
        const auto [row, column] = accumulator_element(lane, c);
        const int64_t q = row, k = 8 * tile + column;
        const Group group{dropout_query_group(q), dropout_key_group(k)};
        forward_groups.insert(group);
        forward_draws.insert({group, {dropout_word(k), dropout_byte(q, k)}});
      }
    EXPECT(forward_groups.size() == 1 && forward_draws.size() == 16);
  }

  // Backward, transposed: S^T is keys (m) × queries (n). Over two n8 tiles of queries and two m16 tiles of keys, lanes
  // that differ in bit 2 use two words each of the same two calls, and together all of them.
  for (int lane = 0; lane < 32; ++lane) {
    std::set<Group> groups;
    std::set<std::pair<Group, Slot>> draws, of_lane;
    for (int of : {lane, lane ^ 4})
      for (int key_tile = 0; key_tile < 2; ++key_tile)
        for (int tile = 0; tile < 2; ++tile)
          for (int c = 0; c < 4; ++c) {
            const auto [row, column] = accumulator_element(of, c);
            const int64_t k = 16 * key_tile + row, q = 8 * tile + column;
            const Group group{dropout_query_group(q), dropout_key_group(k)};
            groups.insert(group);
            draws.insert({group, {dropout_word(k), dropout_byte(q, k)}});
            if (of != lane) continue;
            EXPECT(dropout_word(k) / 2 == lane / 4 % 2 && dropout_word(k) % 2 == key_tile);
            of_lane.insert({group, {dropout_word(k), dropout_byte(q, k)}});
          }
    EXPECT(groups.size() == 2 && draws.size() == 32 && of_lane.size() == 16);
  }
}

// ---- Block masks: stretches of keys against every row and key ----

static void test_block_mask() {
  uint64_t state = 1;
  const auto draw = [&](uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int32_t>((state >> 33) % below);
  };
  for (int round = 0; round < 60; ++round) {
    const int64_t rows = 16 * (1 + draw(3)), keys = 16 * (1 + draw(3)), q_blocks = 1 + draw(4), k_blocks = 1 + draw(6);
    std::vector<int32_t> kinds(q_blocks * k_blocks), key_lists, query_lists;
    for (int32_t& kind : kinds) kind = draw(4);
    std::vector<uint8_t> patterns(2 * rows * keys);
    for (uint8_t& element : patterns) element = static_cast<uint8_t>(draw(2));
    const auto list = [](std::vector<int32_t>& lists, int64_t own, int64_t other, const auto& visits) {
      for (int64_t a = 0; a < own; ++a) {
        const size_t count = lists.size();
        lists.resize(count + 1 + other);
        for (int64_t b = 0; b < other; ++b)
          if (visits(a, b)) lists[count + ++lists[count]] = static_cast<int32_t>(b);
      }
    };
    const auto kind = [&](int64_t m, int64_t n) { return kinds[m * k_blocks + n]; };
    list(key_lists, q_blocks, k_blocks, [&](int64_t m, int64_t n) { return kind(m, n) != kHiddenBlock; });
    list(query_lists, k_blocks, q_blocks, [&](int64_t n, int64_t m) { return kind(m, n) != kHiddenBlock; });

    AttentionParams p;
    p.block_mask = {kinds.data(), patterns.data(), key_lists.data(), query_lists.data(), rows,
                    keys,         q_blocks,        k_blocks};
    Sequence s;
    s.q.leftpad = draw(rows);
    s.k.leftpad = draw(keys);
    s.q.length = larger(1, q_blocks * rows - s.q.leftpad - draw(8));
    s.k.length = larger(1, k_blocks * keys - s.k.leftpad - draw(8));
    const HeadBlocks blocks = head_blocks(p, s, 0);
    const auto kind_of = [&](int64_t i, int64_t j) { return kind((i + s.q.leftpad) / rows, (j + s.k.leftpad) / keys); };
    for (int tile = 0; tile < 20; ++tile) {
      const int64_t first = draw(s.q.length), first_key = draw(s.k.length);
      const Range some_rows{first, smaller(s.q.length, first + 1 + draw(40))};
      const Range some_keys{first_key, smaller(s.k.length, first_key + 1 + draw(90))};
      const auto visited = [&](int64_t j) {
        for (int64_t i = some_rows.begin; i < some_rows.end; ++i)
          if (kind_of(i, j) != kHiddenBlock) return true;
        return false;
      };
      const auto full = [&](int64_t j) {
        for (int64_t i = some_rows.begin; i < some_rows.end; ++i)
          if (kind_of(i, j) != kFullBlock) return false;
        return true;
      };
      const auto first_stretch = [&](const auto& belongs) {
        Range r{some_keys.begin, some_keys.begin};
        while (r.begin < some_keys.end && !belongs(r.begin)) ++r.begin;
        for (r.end = r.begin; r.end < some_keys.end && belongs(r.end);) ++r.end;
        return r;
      };
      const auto same = [](Range a, Range b) {
        return (a.empty() && b.empty()) || (a.begin == b.begin && a.end == b.end);
      };
      EXPECT(same(blocks.visited_keys(some_rows, some_keys), first_stretch(visited)));
      EXPECT(same(blocks.full_keys(some_rows, some_keys), first_stretch(full)));
      int64_t next_row = first;
      const auto row_visits = [&](int64_t i) {
        for (int64_t j = some_keys.begin; j < some_keys.end; ++j)
          if (kind_of(i, j) != kHiddenBlock) return true;
        return false;
      };
      while (next_row < s.q.length && !row_visits(next_row)) ++next_row;
      const int64_t got = blocks.next_row(some_keys, first);
      EXPECT(next_row < s.q.length ? got == next_row : got >= s.q.length);
      for (int64_t i = some_rows.begin; i < some_rows.end; ++i) {
        const int64_t j = some_keys.begin, k = kind_of(i, j);
        const int64_t element = ((k - 2) * rows + (i + s.q.leftpad) % rows) * keys + (j + s.k.leftpad) % keys;
        EXPECT(blocks.sees(i, j) == (k == kFullBlock || (k >= kFirstPattern && patterns[element] != 0)));
      }
    }
  }
  EXPECT(HeadBlocks{}.visited_keys({0, 1}, {3, 9}).begin == 3 && HeadBlocks{}.sees(0, 0));
}

int main() {
  test_visibility();
  test_block_mask();
  test_sequence();
  test_score();
  test_statistics<double>(1e-12);
  test_statistics<float>(1e-5f);
  test_philox();
  test_shared_rounds();
  test_cut();
  test_threshold();
  test_groups();
  test_fragments();
  std::printf("%ld checks\n", checks);
}
