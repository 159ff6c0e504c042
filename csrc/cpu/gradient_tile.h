// The heart of backward, for the main pass and the bias pass: P and dS of one tile, recomputed from Q, K, V and the
// statistics.
//
//   P = exp2((S - R) · log2 e - log2 ℓ),   dP = V dO^T (dropped like P),
//   dS = P ∘ (dP - delta),   delta = rowsum(dO ∘ O) - dLSE
#pragma once

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
  Element *q_lanes, *dout_lanes;  // [panel][dim][lane]; Q times scale
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
    Arithmetic::pack_queries(p.dtype, sources.q.x, sources.q.offset, rows.size(), p.dim, p.score.scale, panels,
                             q_lanes);
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
      reference[r] = row.reference;
      log2_sum[r] = log2_sum_for_backward(row);
      delta[r] = is_row ? read(deltas, r) : Real(0);
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

  void compute(const BwdParams& p, const HeadContext<Real>& head, const TilePlace& tile, Keys k, Keys v) const {
    const int64_t panels = divide_up(tile.rows, kLanes);
    Arithmetic::scores(k, size, tile.keys, p.dim, q_lanes, panels, scores, size.panel_elements());
    Arithmetic::scores(v, size, tile.keys, p.dim_v, dout_lanes, panels, dlogits, size.panel_elements());
    for (int64_t panel = 0; panel < panels; ++panel) compute_panel(p, head, tile.panel(panel), panel);
    if (!only_dlogits && panels % 2 != 0 && panels < size.panels())  // blocks of bf16 depth hold two panels
      Arithmetic::store_gradients(panels, tile.keys, nullptr, nullptr, operands, size);
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
      for (int64_t i = 0; i < elements; ++i) x[i] *= ds[i];
    }
    if (only_dlogits) return;
    Arithmetic::store_gradients(index, panel.keys, s, capped ? derivative + at : ds, operands, size);
  }
};

}  // namespace flash::cpu
