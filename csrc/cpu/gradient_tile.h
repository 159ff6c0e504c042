// The heart of backward, for the main pass and the bias pass: P and dS of one tile, recomputed from Q, K, V and the
// statistics.
//
//   P = exp2((S - R) · log2 e - log2 ℓ),   dP = V dO^T (dropped like P),   dS = P ∘ (dP - delta),   delta = rowsum(dO ∘ O) - dLSE
#pragma once

#include "cpu/tile.h"

namespace flash::cpu {

template <class Real>
struct GradientTile {
  Real* q_lanes;             // [dim][lane], times scale
  Real* dout_lanes;          // [dim_v][lane]
  Real *q_copy, *dout_copy;  // [row][dim_lanes], [row][dim_v_lanes]
  Real* probabilities;       // [key][lane]: P, after dropout but without its factor 1 / (1 - p)
  Real* dlogits;             // [key][lane]: dS with respect to the logits (what a bias receives)
  Real* dscores;             // [key][lane]: dS with respect to scale · q·k
  Real* derivative;          // of the softcap
  Real *reference, *log2_sum, *delta;
  uint8_t* keep;
  int64_t lanes;
  int64_t reals;

  GradientTile(Real* piece, const AttentionParams& p, TileSize size) : lanes(size.rows) {
    const int64_t tile = size.keys * lanes;
    const bool capped = p.score.softcap > 0;
    Carver<Real> carve(piece);
    q_lanes = carve.take(p.dim * lanes);
    q_copy = carve.take(lanes * round_up(p.dim, kLanes));
    dout_lanes = carve.take(p.dim_v * lanes);
    dout_copy = carve.take(lanes * round_up(p.dim_v, kLanes));
    probabilities = carve.take(tile);
    dlogits = carve.take(tile);
    derivative = carve.take(capped ? tile : 0);
    dscores = capped ? derivative : dlogits;
    reference = carve.take(lanes);
    log2_sum = carve.take(lanes);
    delta = carve.take(lanes);
    keep = reinterpret_cast<uint8_t*>(carve.take(p.dropout.given() ? tile : 0));
    reals = carve.used();
  }

  void load_queries(const BwdParams& p, const RowArray& deltas, const HeadContext<Real>& head, Range rows) const {
    const Rows& q = head.sequence.q;
    const int64_t first = q.first() + rows.begin, n = rows.size();
    const Real scale = static_cast<Real>(p.score.scale);
    pack_lanes(p.dtype, p.q, p.q.offset(q.batch, head.head, first), n, p.dim, scale, q_lanes, lanes);
    pack_lanes(p.dtype, p.dout, p.dout.offset(q.batch, head.head, first), n, p.dim_v, Real(1), dout_lanes, lanes);
    const auto read = [&](const RowArray& array, int64_t r) {
      return static_cast<const Real*>(array.data)[array.offset(q.batch, head.head, first + r)];
    };
    for (int64_t r = 0; r < lanes; ++r) {
      // Lanes beyond the rows look like empty rows: P = 0.
      const RowStatistics<Real> row =
          r < n ? RowStatistics<Real>{read(p.reference, r), read(p.log2_sum, r)} : RowStatistics<Real>{};
      reference[r] = row.reference;
      log2_sum[r] = log2_sum_for_backward(row);
      delta[r] = r < n ? read(deltas, r) : Real(0);
    }
  }

  // The rows of Q and dO, for dK and dV. The columns are padded to whole vectors, unless `in_place`.
  RowsView<Real> q_rows(const BwdParams& p, const HeadContext<Real>& head, Range rows, bool in_place) const {
    return rows_of(p.dtype, p.q, head, rows, p.dim, in_place, q_copy);
  }
  RowsView<Real> dout_rows(const BwdParams& p, const HeadContext<Real>& head, Range rows, bool in_place) const {
    return rows_of(p.dtype, p.dout, head, rows, p.dim_v, in_place, dout_copy);
  }

  void compute(const BwdParams& p, const HeadContext<Real>& head, const TilePlace& tile, RowsView<Real> k,
               RowsView<Real> v) const {
    const MicroKernels<Real>& kernels = micro_kernels<Real>();
    logits<Real>(p, head, tile, q_lanes, k, probabilities, p.score.softcap > 0 ? derivative : nullptr, lanes);
    kernels.probabilities({tile.keys, lanes, probabilities, lanes, reference, log2_sum});
    kernels.multiply({tile.keys, p.dim_v, lanes, v.data, v.stride, 1, dout_lanes, lanes, dlogits, lanes, false});
    const Real keep_scale = static_cast<Real>(p.dropout.keep_scale);
    if (p.dropout.given()) {
      dropout_tile(p.dropout, head.dropout, tile, keep, lanes);
      drop(keep, tile, dlogits, lanes);
    }
    for (int64_t j = 0; j < tile.keys; ++j)
      for (int64_t r = 0; r < lanes; ++r) {
        const int64_t x = j * lanes + r;
        dlogits[x] = probabilities[x] * (dlogits[x] * keep_scale - delta[r]);
      }
    if (p.dropout.given()) drop(keep, tile, probabilities, lanes);
    if (p.score.softcap > 0)
      for (int64_t x = 0; x < tile.keys * lanes; ++x) dscores[x] = derivative[x] * dlogits[x];
  }

 private:
  static RowsView<Real> rows_of(DataType dtype, const Operand& x, const HeadContext<Real>& head, Range rows,
                                int64_t dim, bool in_place, Real* copy) {
    const Rows& q = head.sequence.q;
    const int64_t offset = x.offset(q.batch, head.head, q.first() + rows.begin);
    return view_rows(dtype, x, offset, rows.size(), dim, in_place && dim % kLanes == 0, copy, round_up(dim, kLanes));
  }
};

}  // namespace flash::cpu
