// The heart of backward, for the main pass and the bias pass: P and dS of one tile, recomputed from Q, K, V and the
// statistics.
//
//   P = exp2((S - R) · log2 e - log2 ℓ),   dP = V dO^T (dropped like P),
//   dS = P ∘ (dP - delta),   delta = rowsum(dO ∘ O) - dLSE
#pragma once

#include <utility>

#include "cpu/arithmetic.h"

namespace flash::cpu {

template <class Arithmetic>
struct GradientTile {
  using Real = typename Arithmetic::Real;
  using Element = typename Arithmetic::Element;
  using Keys = typename Arithmetic::Keys;
  using QueryRows = typename Arithmetic::QueryRows;

  TileSize size;
  Real* scores;      // [panel][key][lane]: P, after dropout but without its factor 1 / (1 - p)
  Real* dlogits;     // dS with respect to the logits (what a bias receives)
  Real* derivative;  // null without softcap; its derivative, then dS with respect to scale · q·k
  Real *reference, *log2_sum, *delta;
  Element *q_lanes, *dout_lanes;  // [panel][dim][lane]; Q times query_scale
  Element *q_rows, *dout_rows;    // copies for `outer`
  Element* operands;              // P and dS, where the arithmetic needs them in another type
  uint8_t* keep;
  uint8_t *q_copy, *dout_copy;  // see Source
  bool only_dlogits;            // P and dS are not wanted as operands
  int64_t reals;

  GradientTile(Real* piece, const AttentionParams& p, TileSize tile_size, bool only_dlogits_wanted = false)
      : size(tile_size), only_dlogits(only_dlogits_wanted) {
    const int64_t elements = size.rows * size.keys;
    Carver<Real> carve(piece);
    scores = carve.take(elements);
    dlogits = carve.take(elements);
    derivative = p.score.softcap > 0 ? carve.take(elements) : nullptr;
    reference = carve.take(size.rows);
    log2_sum = carve.take(size.rows);
    delta = carve.take(size.rows);
    q_lanes = carve.template take_as<Element>(Arithmetic::query_elements(size.panels(), p.dim));
    dout_lanes = carve.template take_as<Element>(Arithmetic::query_elements(size.panels(), p.dim_v));
    q_rows = carve.template take_as<Element>(Arithmetic::query_row_elements(size.rows, p.dim));
    dout_rows = carve.template take_as<Element>(Arithmetic::query_row_elements(size.rows, p.dim_v));
    operands = carve.template take_as<Element>(Arithmetic::gradient_elements(size));
    keep = carve.template take_as<uint8_t>(p.dropout.given() ? size.panel_elements() : 0);
    q_copy = carve.template take_as<uint8_t>(size.rows * p.dim * bytes_of(p.dtype));
    dout_copy = carve.template take_as<uint8_t>(size.rows * p.dim_v * bytes_of(p.dtype));
    reals = carve.used();
  }

  // Q or dO of a tile's rows: where they are, or copied with zeros for rows that see nothing. Those contribute nothing,
  // but a zero weight does not keep their NaN away.
  struct Source {
    Operand x;
    int64_t offset;
  };
  struct Sources {
    Source q, dout;
  };

  Sources load_queries(const BwdParams& p, const RowArray& deltas, const HeadContext<Real>& head, Range rows) const {
    const int64_t panels = divide_up(rows.size(), kLanes);
    const Sources sources = load_numbers(p, deltas, head, rows);
    Arithmetic::pack_queries(p.dtype, sources.q.x, sources.q.offset, rows.size(), p.dim, Arithmetic::query_scale(p),
                             panels, q_lanes);
    Arithmetic::pack_queries(p.dtype, sources.dout.x, sources.dout.offset, rows.size(), p.dim_v, 1, panels, dout_lanes);
    return sources;
  }

  Sources load_numbers(const BwdParams& p, const RowArray& deltas, const HeadContext<Real>& head, Range rows) const {
    const Rows& q = head.sequence.q;
    const int64_t first = q.first() + rows.begin, panels = divide_up(rows.size(), kLanes);
    const auto read = [&](const RowArray& array, int64_t r) {
      return static_cast<const Real*>(array.data)[array.offset(q.batch, head.head, first + r)];
    };
    bool any_empty = false;
    for (int64_t r = 0; r < panels * kLanes; ++r) {
      // Lanes beyond the rows look like empty rows: P = 0.
      const bool is_row = r < rows.size();
      const RowStatistics<Real> row =
          is_row ? RowStatistics<Real>{read(p.reference, r), read(p.log2_sum, r)} : RowStatistics<Real>{};
      reference[r] = reference_for_backward(row);
      log2_sum[r] = log2_sum_for_backward(row);
      delta[r] = is_row && !is_empty(r) ? read(deltas, r) : Real(0);
      any_empty |= is_row && is_empty(r);
    }
    const auto source = [&](const Operand& x, int64_t dim, uint8_t* copy) -> Source {
      const int64_t offset = x.offset(q.batch, head.head, first), element = bytes_of(p.dtype);
      if (!any_empty) return {x, offset};
      const auto* from = static_cast<const uint8_t*>(x.data) + offset * element;
      for (int64_t r = 0; r < rows.size(); ++r)
        for (int64_t b = 0; b < dim * element; ++b)
          copy[r * dim * element + b] = is_empty(r) ? uint8_t{0} : from[r * x.row_stride * element + b];
      return {{copy, 0, dim, 0}, 0};
    };
    return {source(p.q, p.dim, q_copy), source(p.dout, p.dim_v, dout_copy)};
  }

  bool is_empty(int64_t row) const { return log2_sum[row] == Real(INFINITY); }

  // The same rows as an operand of `outer`.
  QueryRows rows_of(DataType dtype, const Source& source, Range rows, int64_t dim, bool in_place, Element* copy) const {
    return Arithmetic::query_rows(dtype, source.x, source.offset, rows.size(), dim, size.rows, in_place, copy);
  }

  // Panels that see none but the first `keys` of a tile: under a causal mask that is half of the tile.
  struct Step {
    int64_t panel, panels, keys;
  };

  // Calls use(step, keys of the step before) for all panels of a tile, with ascending keys.
  template <class Use>
  void for_each_step(const HeadContext<Real>& head, const TilePlace& tile, const Use& use) const {
    constexpr int64_t kPanels = Arithmetic::kGroupPanels;
    const int64_t panels = divide_up(tile.rows, kLanes);
    const auto keys_of = [&](int64_t panel) {
      if (only_dlogits) return tile.keys;  // which are read for all keys
      const int64_t row = tile.first_row + panel * kLanes;
      const Range rows{row, std::min(row + kPanels * kLanes, tile.first_row + tile.rows)};
      const int64_t keys = head.visibility.keys_of_any(rows).end - tile.first_key;
      return std::clamp<int64_t>(round_up(keys, Arithmetic::kKeyPad), 0, tile.keys);
    };
    int64_t before = 0;
    for (int64_t panel = 0, next; panel < panels; panel = next) {
      const int64_t keys = keys_of(panel);
      for (next = panel + kPanels; next < panels && keys_of(next) == keys;) next += kPanels;
      next = std::min(next, panels);
      use(Step{panel, next - panel, keys}, std::exchange(before, keys));
    }
  }

  void compute(const BwdParams& p, const HeadContext<Real>& head, const TilePlace& tile, Keys k, Keys v) const {
    for_each_step(head, tile, [&](const Step& step, int64_t) {
      const int64_t at = step.panel * size.panel_elements();
      Arithmetic::scores(Arithmetic::product_scale(p), k, size, step.keys, p.dim,
                         q_lanes + Arithmetic::query_elements(step.panel, p.dim), step.panels, scores + at,
                         size.panel_elements());
      Arithmetic::scores(1, v, size, step.keys, p.dim_v, dout_lanes + Arithmetic::query_elements(step.panel, p.dim_v),
                         step.panels, dlogits + at, size.panel_elements());
      const int64_t end = step.panel + step.panels;
      TilePlace seen = tile;
      seen.keys = step.keys;
      for (int64_t panel = step.panel; panel < end; ++panel) compute_panel(p, head, seen.panel(panel), panel);
      if (!only_dlogits && end % 2 != 0 && end < size.panels())  // blocks of bf16 depth hold two panels
        Arithmetic::store_gradients(end, step.keys, nullptr, nullptr, operands, size);
    });
  }

  typename Arithmetic::Gradients gradients() const {
    return Arithmetic::gradients(scores, derivative != nullptr ? derivative : dlogits, operands, size);
  }

 private:
  void compute_panel(const BwdParams& p, const HeadContext<Real>& head, const TilePlace& panel, int64_t index) const {
    const int64_t at = index * size.panel_elements(), elements = panel.keys * kLanes;
    Real *s = scores + at, *ds = dlogits + at;
    const bool capped = derivative != nullptr;
    const Real scale = adjust_logits(p, head, panel, Arithmetic::score_scale(p), s, capped ? derivative + at : nullptr);
    if (p.dropout.given()) {
      dropout_panel(p.dropout, head.dropout, panel, keep);
      micro_kernels<Real>().drop(keep, panel.keys, ds);
    }
    const int64_t lane = index * kLanes;
    const GradientStep<Real> step{
        panel.keys, s, ds, reference + lane, log2_sum + lane, delta + lane, static_cast<Real>(p.dropout.keep_scale)};
    if (!p.dropout.given() && !capped && !only_dlogits) {
      Arithmetic::gradient_step(step, scale, index, operands, size);
      return;
    }
    if (scale != 1) scale_panel(scale, panel.keys, s);
    micro_kernels<Real>().gradient_step(step);
    if (p.dropout.given()) micro_kernels<Real>().drop(keep, panel.keys, s);
    if (capped) {
      Real* x = derivative + at;
      for (int64_t i = 0; i < elements; ++i) x[i] = ds[i] == 0 ? Real(0) : x[i] * ds[i];
    }
    if (only_dlogits) return;
    Arithmetic::store_gradients(index, panel.keys, s, capped ? derivative + at : ds, operands, size);
  }
};

}  // namespace flash::cpu
