// Forward: Algorithm 1 of Dao, Fu, Ermon, Rudra, Ré, "FlashAttention" (2022). One item is a block of query rows of one
// head; it walks the key tiles that its rows see, keeps the running maximum m and sum ℓ and the unnormalised output
// O^T, and normalises once. K and V of a head are packed before that, once for all its query blocks; heads are taken in
// waves, so that only some of them are packed at a time.
#include <utility>

#include "cpu/attention.h"
#include "cpu/backward_passes.h"
#include "cpu/bf16_arithmetic.h"
#include "cpu/key_tiles.h"

namespace flash::cpu {
namespace {

// Packed keys and values of a wave, for each thread: they shall stay in its cache until they are read.
constexpr int64_t kWaveBytes = 1 << 20;

template <class Arithmetic>
class ForwardPass {
  using Real = typename Arithmetic::Real;
  using Element = typename Arithmetic::Element;
  using Keys = typename Arithmetic::Keys;

  // Rows that go through the products together. A row's result depends on its group and on the tile of keys, not on the
  // block that the group belongs to.
  static constexpr int64_t kGroupPanels = Arithmetic::kGroupPanels, kGroupRows = kGroupPanels * kLanes;

 public:
  ForwardPass(const FwdParams& p, Sequences sequences, const ThreadPool& given)
      : p_(p),
        sequences_(std::move(sequences)),
        pool_(pool_for(given, score_elements(p, sequences_) * static_cast<double>(p.dim + p.dim_v))),
        size_{block_rows(p, sequences_, pool_), fit_blocks<Arithmetic>(Arithmetic::forward_keys(sequences_.longest_k),
                                                                       sequences_.longest_k, p.block_mask)},
        in_place_(Arithmetic::kInPlace && p.dtype == kNative<Real> && sequences_.longest_q <= kGroupRows),
        k_tile_(Arithmetic::key_elements(size_.keys, p.dim)),
        v_tile_(Arithmetic::key_elements(size_.keys, p.dim_v)) {}

  void run() {
    const Workspace<Real> workspace(pool_.threads, Buffers(nullptr, *this).reals);
    for (int64_t unit = 0; unit < all_units();) {
      unit = fill_wave(unit);
      const Workspace<Element> packed(1, in_place_ ? 0 : tiles_ * (k_tile_ + v_tile_));
      packed_ = packed.piece(0);
      if (!in_place_) pool_.for_each(tiles_, [&](int, int64_t tile) { pack(tile); });
      const std::vector<int64_t> order = longest_first();
      pool_.for_each(items_, [&](int worker, int64_t item) {
        run_item(order.empty() ? item : order[item], Buffers(workspace.piece(worker), *this));
      });
    }
  }

  // Of the first wave, where all sequences are alike: counted, for there may be more units than memory could list.
  Plan plan(int64_t backward_bytes) const {
    int64_t items = 0, packed_bytes = 0;
    if (const int64_t units = all_units(); units > 0) {
      const Sequence& s = sequences_.all.front();
      const int64_t unit_bytes = in_place_ ? 0 : tile_bytes(divide_up(s.k.length, size_.keys));
      const int64_t wave =
          unit_bytes == 0 ? units : std::clamp<int64_t>(kWaveBytes * pool_.threads / unit_bytes, 1, units);
      items = wave * divide_up(s.q.length, size_.rows) * p_.group();
      packed_bytes = wave * unit_bytes;
    }
    const int64_t workers = pool_.workers(items);
    const int64_t bytes = workers * Buffers(nullptr, *this).reals * static_cast<int64_t>(sizeof(Real)) + packed_bytes;
    return {Arithmetic::name(), size_.rows, size_.keys, static_cast<int>(workers), bytes, backward_bytes};
  }

 private:
  static constexpr int64_t kMostRows = 256;  // of a block

  // A tile of keys that comes from a farther cache shall serve many rows, but no thread shall wait for a long block.
  static int64_t block_rows(const FwdParams& p, const Sequences& sequences, const ThreadPool& pool) {
    if (sequences.longest_q <= kGroupRows) return std::max(kLanes, round_up(sequences.longest_q, kLanes));
    int64_t rows = kMostRows;
    const auto items = [&] {
      return p.heads * sum_over<int64_t>(sequences, [&](const Sequence& s) { return divide_up(s.q.length, rows); });
    };
    while (rows > kGroupRows && items() < 8 * pool.threads) rows /= 2;
    return rows;
  }

  struct Buffers {
    Real *scores, *rescale;  // of a group: [panel][key][lane], logits, then probabilities
    Element* weights;        // of a group
    Real *out_lanes, *row_max, *row_sum;
    Element* q_lanes;
    uint8_t* keep;
    int64_t reals;

    Buffers(Real* piece, const ForwardPass& pass) {
      const AttentionParams& p = pass.p_;
      const TileSize size = pass.size_;
      Carver<Real> carve(piece);
      const int64_t panels = std::min(kGroupPanels, size.panels());
      scores = carve.take(panels * size.panel_elements());
      rescale = carve.take(panels * kLanes);
      weights = carve.template take_as<Element>(Arithmetic::weight_elements(size.keys, panels));
      if constexpr (Arithmetic::kInPlace) weights = scores;
      out_lanes = carve.take(round_up(p.dim_v, kLanes) * size.rows);
      row_max = carve.take(size.rows);
      row_sum = carve.take(size.rows);
      q_lanes = carve.template take_as<Element>(Arithmetic::query_elements(size.panels(), p.dim));
      keep = carve.template take_as<uint8_t>(p.dropout.given() ? size.panel_elements() : 0);
      reals = carve.used();
    }

    // Those of the group that begins with a panel.
    Buffers of_group(int64_t panel, const FwdParams& p) const {
      Buffers group = *this;
      group.out_lanes += panel * round_up(p.dim_v, kLanes) * kLanes;
      group.row_max += panel * kLanes;
      group.row_sum += panel * kLanes;
      group.q_lanes += Arithmetic::query_elements(panel, p.dim);
      return group;
    }
  };

  int64_t all_units() const { return p_.heads == 0 ? 0 : sequences_.count * p_.heads_k; }
  int64_t tile_bytes(int64_t tiles) const {
    return tiles * (k_tile_ + v_tile_) * static_cast<int64_t>(sizeof(Element));
  }

  // Takes units from `unit` on; returns the first of the next wave.
  int64_t fill_wave(int64_t unit) {
    units_.clear();
    tiles_ = items_ = 0;
    for (; unit < all_units(); ++unit) {
      const Sequence& s = sequences_.all[unit / p_.heads_k];
      const Unit next{&s, unit % p_.heads_k, divide_up(s.q.length, size_.rows), tiles_, items_};
      const int64_t tiles = tiles_ + next.tiles(size_);
      if (!units_.empty() && !in_place_ && tile_bytes(tiles) > kWaveBytes * pool_.threads) break;
      units_.push_back(next);
      tiles_ = tiles;
      items_ += next.blocks * p_.group();
    }
    return unit;
  }

  // Packs a tile of K and V: the keys that some row of the sequence sees, and no other is read.
  void pack(int64_t tile) const {
    const Unit& unit = unit_of(units_, &Unit::first_tile, tile);
    const Sequence& s = *unit.sequence;
    const int64_t first = (tile - unit.first_tile) * size_.keys;
    const Visibility visibility = make_visibility(p_.window, s.q.length, s.k.length);
    const Range seen = intersect({first, first + size_.keys}, visibility.keys_of_any({0, s.q.length}));
    if (seen.empty()) return;
    const Range readable{seen.begin - first, seen.end - first};
    const int64_t row = s.k.first() + first;
    Element* to = packed_ + tile * (k_tile_ + v_tile_);
    Arithmetic::pack_key_rows(p_.dtype, p_.k, p_.k.offset(s.k.batch, unit.head_k, row), readable, size_.keys, p_.dim,
                              to);
    Arithmetic::pack_key_columns(p_.dtype, p_.v, p_.v.offset(s.k.batch, unit.head_k, row), readable, size_.keys,
                                 p_.dim_v, to + k_tile_);
  }

  // One head's block of rows. Under a causal mask the last rows have the most work: longest first.
  struct Item {
    const Unit& unit;
    int64_t head;
    Range rows;
  };
  Item item_of(int64_t item) const {
    const Unit& unit = unit_of(units_, &Unit::first_item, item);
    const int64_t index = item - unit.first_item, block = unit.blocks - 1 - index / p_.group();
    return {unit, unit.head_k * p_.group() + index % p_.group(),
            intersect({block * size_.rows, (block + 1) * size_.rows}, {0, unit.sequence->q.length})};
  }

  // Under a block mask: those that visit most blocks first. Empty: in their own order.
  std::vector<int64_t> longest_first() const {
    if (!p_.block_mask.given() || pool_.threads == 1) return {};
    std::vector<std::pair<int64_t, int64_t>> work;
    for (int64_t i = 0; i < items_; ++i) {
      const Item item = item_of(i);
      const HeadBlocks blocks = head_blocks(p_, *item.unit.sequence, item.head);
      int64_t visited = 0;
      for (int64_t m = blocks.rows.block_of(item.rows.begin); m <= blocks.rows.block_of(item.rows.end - 1); ++m)
        visited += blocks.key_lists[m * (1 + blocks.keys.blocks)];
      work.emplace_back(-visited, i);
    }
    std::sort(work.begin(), work.end());
    std::vector<int64_t> order;
    for (const auto& [visited, item] : work) order.push_back(item);
    return order;
  }

  void run_item(int64_t index, const Buffers& buffers) const {
    const auto [unit, head_index, rows] = item_of(index);
    const HeadContext<Real> head(p_, *unit.sequence, head_index);
    [[maybe_unused]] const typename Arithmetic::ThreadState state;
    accumulate(unit, head, rows, buffers);
    finish(head, rows, buffers);
  }

  // m, ℓ, O^T over all visible keys.
  void accumulate(const Unit& unit, const HeadContext<Real>& head, Range rows, const Buffers& buffers) const {
    const Rows& q = head.sequence.q;
    const int64_t panels = divide_up(rows.size(), kLanes), out_panel = round_up(p_.dim_v, kLanes) * kLanes;
    Arithmetic::pack_queries(p_.dtype, p_.q, p_.q.offset(q.batch, head.head, q.first() + rows.begin), rows.size(),
                             p_.dim, Arithmetic::query_scale(p_), panels, buffers.q_lanes);
    std::fill(buffers.row_max, buffers.row_max + panels * kLanes, -INFINITY);
    std::fill(buffers.row_sum, buffers.row_sum + panels * kLanes, Real(0));

    std::fill(buffers.out_lanes, buffers.out_lanes + panels * out_panel, Real(0));
    bool started[kMostRows / kGroupRows] = {};  // of a group: whether there is anything in O^T
    for (Range seen = head.visibility.keys_of_any(rows); !seen.empty();) {
      seen.begin = head.blocks.next_key(rows, seen.begin);
      if (seen.empty()) break;
      const int64_t n = seen.begin / size_.keys;
      for (int64_t panel = 0; panel < panels; panel += kGroupPanels) {
        const int64_t first = rows.begin + panel * kLanes;
        attend_tile(unit, head, {first, std::min(first + kGroupRows, rows.end)}, n, started[panel / kGroupPanels],
                    buffers.of_group(panel, p_));
      }
      seen.begin = (n + 1) * size_.keys;
    }
  }

  // Adds what tile n of the keys gives to a group of rows.
  void attend_tile(const Unit& unit, const HeadContext<Real>& head, Range rows, int64_t n, bool& started,
                   const Buffers& buffers) const {
    // Only keys that some row sees take part, but for what rounds them up to a step.
    const Range seen = head.visibility.keys_of_any(rows);
    const Range in_tile = intersect({n * size_.keys, (n + 1) * size_.keys}, seen);
    if (in_tile.empty()) return;
    const int64_t step = in_place_ ? 1 : Arithmetic::kKeyStep;
    for_each_stretch(head, rows, in_tile, n * size_.keys, step, [&](Range keys) {
      for_each_part(head, rows, keys, [&](Range part, bool is_clean) {
        attend(unit, head, {rows.begin, rows.size(), part.begin, part.size()}, n, is_clean,
               !std::exchange(started, true), buffers);
      });
    });
  }

  // Cuts the keys of a tile into what can be done in one way: in whole steps, and clean, which means that every row
  // sees every key and that nothing changes the logits.
  template <class Use>
  void for_each_part(const HeadContext<Real>& head, Range rows, Range keys, const Use& use) const {
    if (!Arithmetic::kFused) return use(keys, false);
    const Real scale = Arithmetic::score_scale(p_);
    const bool is_plain = !changes_logits(p_) && !p_.mask.given() && scale_left(p_, scale) == scale;
    Range left = is_plain ? intersect(keys, head.visibility.keys_of_all(rows)) : keys;
    while (!left.empty()) {
      const Range same = is_plain ? head.blocks.full_keys(rows, left) : left;
      const Range steps = whole_steps(same);
      if (same.empty()) break;
      left.begin = same.end;
      if (steps.empty()) continue;
      if (keys.begin < steps.begin) use({keys.begin, steps.begin}, false);
      use(steps, is_plain);
      keys.begin = steps.end;
    }
    if (!keys.empty()) use(keys, false);
  }

  static Range whole_steps(Range keys) {
    return {round_up(keys.begin, Arithmetic::kKeyStep), keys.end / Arithmetic::kKeyStep * Arithmetic::kKeyStep};
  }

  // A part of tile n.
  void attend(const Unit& unit, const HeadContext<Real>& head, const TilePlace& part, int64_t n, bool is_clean,
              bool is_first, const Buffers& buffers) const {
    const int64_t panels = divide_up(part.rows, kLanes);
    const Keys k = keys_of(unit, n, part.key_range()), v = values_of(unit, n, part.key_range());
    if (!Arithmetic::scores_to_weights(p_, head, part, is_clean, size_, k, buffers.q_lanes, buffers.row_max,
                                       buffers.row_sum, buffers.weights)) {
      Arithmetic::scores(Arithmetic::product_scale(p_), k, size_, part.keys, p_.dim, buffers.q_lanes, panels,
                         buffers.scores, size_.panel_elements());
      for (int64_t panel = 0; panel < panels; ++panel) softmax(head, part.panel(panel), panel, is_first, buffers);
    }
    if (p_.dropout.given())
      for (int64_t panel = 0; panel < panels; ++panel) drop_panel(head, part.panel(panel), panel, buffers);
    Arithmetic::combine(v, size_, part.keys, p_.dim_v, buffers.weights, panels, buffers.out_lanes,
                        round_up(p_.dim_v, kLanes) * kLanes, !is_first);
  }

  Keys keys_of(const Unit& unit, int64_t n, Range keys) const {
    if constexpr (Arithmetic::kInPlace)
      if (in_place_) return Arithmetic::key_rows_in_place(p_.k, offset_in_place(p_.k, unit, keys));
    return Arithmetic::key_rows(packed_tile(unit, n), keys.begin - n * size_.keys, size_.keys, p_.dim);
  }
  Keys values_of(const Unit& unit, int64_t n, Range keys) const {
    if constexpr (Arithmetic::kInPlace)
      if (in_place_) return Arithmetic::key_columns_in_place(p_.v, offset_in_place(p_.v, unit, keys));
    return Arithmetic::key_columns(packed_tile(unit, n) + k_tile_, keys.begin - n * size_.keys, size_.keys, p_.dim_v);
  }
  static int64_t offset_in_place(const Operand& x, const Unit& unit, Range keys) {
    const Rows& k = unit.sequence->k;
    return x.offset(k.batch, unit.head_k, k.first() + keys.begin);
  }
  const Element* packed_tile(const Unit& unit, int64_t n) const {
    return packed_ + (unit.first_tile + n) * (k_tile_ + v_tile_);
  }

  // Scores of one panel to weights; what O^T holds so far is rescaled to the new maximum.
  void softmax(const HeadContext<Real>& head, const TilePlace& whole, int64_t index, bool is_first,
               const Buffers& buffers) const {
    const TilePlace panel = without_last_keys(head, whole);
    Real* scores = buffers.scores + index * size_.panel_elements();
    Element* weights = buffers.weights + index * size_.panel_elements();
    Real* rescale = buffers.rescale + index * kLanes;
    const Real scale = adjust_logits<Real>(p_, head, panel, Arithmetic::score_scale(p_), scores, nullptr);
    const bool moved = Arithmetic::softmax(
        {panel.keys, scores, buffers.row_max + index * kLanes, buffers.row_sum + index * kLanes, rescale}, scale,
        weights);
    Arithmetic::clear_weights(weights, panel.keys, whole.keys);
    if (moved && !is_first) {
      micro_kernels<Real>().scale_lanes(p_.dim_v, rescale,
                                        buffers.out_lanes + index * round_up(p_.dim_v, kLanes) * kLanes);
    }
  }

  // Without keys behind the last one that the panel's rows see: under a causal mask that is half of a tile.
  static TilePlace without_last_keys(const HeadContext<Real>& head, TilePlace panel) {
    const int64_t end = head.visibility.keys_of_any(panel.row_range()).end;
    panel.keys = std::clamp<int64_t>(end - panel.first_key, 0, panel.keys);
    return panel;
  }

  void drop_panel(const HeadContext<Real>& head, const TilePlace& whole, int64_t index, const Buffers& buffers) const {
    const TilePlace panel = without_last_keys(head, whole);
    dropout_panel(p_.dropout, head.dropout, panel, buffers.keep);
    Arithmetic::drop_weights(buffers.keep, panel.keys, buffers.weights + index * size_.panel_elements());
  }

  // The sink joins the sum, O is normalised, the statistics are written.
  void finish(const HeadContext<Real>& head, Range rows, const Buffers& buffers) const {
    const Rows& q = head.sequence.q;
    const Real keep_scale = static_cast<Real>(p_.dropout.keep_scale);
    // The factors take the place of the maxima.
    Real* factor = buffers.row_max;
    std::fill(factor + rows.size(), factor + round_up(rows.size(), kLanes), Real(0));
    for (int64_t r = 0; r < rows.size(); ++r) {
      Real row_max = buffers.row_max[r], row_sum = buffers.row_sum[r], scale = 1;
      const Real sink = p_.sink == nullptr ? -INFINITY : static_cast<const Real*>(p_.sink)[head.head];
      const bool sees_sink_alone = row_sum == 0 && sink != -INFINITY;
      if (p_.sink != nullptr && !sees_sink_alone) {
        const Merge<Real> with_sink = merge(row_max, sink);
        row_max = with_sink.row_max;
        row_sum = row_sum * with_sink.scale_a + with_sink.scale_b;
        scale = with_sink.scale_a;
      }
      factor[r] = row_sum == 0 ? Real(0) : scale * keep_scale / row_sum;
      const RowStatistics<Real> statistics =
          sees_sink_alone ? RowStatistics<Real>{sink, INFINITY} : make_statistics(row_max, row_sum);
      const auto write = [&](const RowArray& array, Real x) {
        static_cast<Real*>(array.data)[array.offset(q.batch, head.head, q.first() + rows.begin + r)] = x;
      };
      write(p_.reference, statistics.reference);
      write(p_.log2_sum, statistics.log2_sum);
      write(p_.lse, log_sum_exp(statistics));
    }
    Real* out = buffers.out_lanes;
    for (int64_t first = 0; first < rows.size(); first += kLanes, out += round_up(p_.dim_v, kLanes) * kLanes) {
      Arithmetic::store_lanes(p_.dtype, p_.out, p_.out.offset(q.batch, head.head, q.first() + rows.begin + first),
                              std::min(kLanes, rows.size() - first), p_.dim_v, factor + first, out);
    }
  }

  const FwdParams& p_;
  const Sequences sequences_;
  const ThreadPool pool_;
  const TileSize size_;
  const bool in_place_;
  const int64_t k_tile_, v_tile_;  // elements of a packed tile
  std::vector<Unit> units_;        // of the current wave
  int64_t tiles_ = 0, items_ = 0;
  Element* packed_ = nullptr;
};

template <class Arithmetic>
Plan plan_as(const AttentionParams& shape, const ThreadPool& pool) {
  FwdParams p;
  static_cast<AttentionParams&>(p) = shape;
  return ForwardPass<Arithmetic>(p, Sequences::of_plan(p), pool)
      .plan(backward_workspace_bytes<typename Arithmetic::Real>(shape, pool));
}

}  // namespace

void forward(const FwdParams& params, const ThreadPool& pool) {
  with_arithmetic(params,
                  [&](auto arithmetic) { ForwardPass<decltype(arithmetic)>(params, Sequences(params), pool).run(); });
}

Plan plan(const AttentionParams& shape, const ThreadPool& pool) {
  return with_arithmetic(shape, [&](auto arithmetic) { return plan_as<decltype(arithmetic)>(shape, pool); });
}

}  // namespace flash::cpu
