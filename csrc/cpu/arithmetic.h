// How the tile loop stores its operands and multiplies them; the loop is a template over such a class. Here: in the
// type of the softmax, fp32 or fp64, to which other types are converted when they are packed (in bf16:
// bf16_arithmetic.h).
//
// The products of forward and backward, all of the form of micro_kernels.h:
//
//   scores     S[key][lane]  = K[key][dim] · Q[dim][lane]            and dP from V and dO
//   combine    O[dim][lane] += V^T[dim][key] · P[key][lane]          and dQ from K and dS
//   outer     dV[key][dim]  += P[key][query] · dO[query][dim]        and dK from dS and Q
#pragma once

#include <cmath>

#include "cpu/key_tiles.h"
#include "cpu/tile.h"

namespace flash::cpu {

template <class Real_>
struct RealArithmetic {
  using Real = Real_;
  using Element = Real;                           // of packed operands
  using Keys = RowOperand<Real>;                  // rows of K or V, or what their columns are
  struct ThreadState {};                          // what a thread sets up for an item
  static constexpr int64_t kKeyStep = kRowBlock;  // a part of a packed tile of keys begins at a multiple of this
  static constexpr int64_t kKeyPad = 1;           // products write whole multiples of this many keys
  static constexpr bool kFused = false;           // whether there is a scores_to_weights
  static constexpr int64_t kGroupPanels = 4;      // of queries that go through the products together
  static constexpr bool kInPlace = true;          // operands can be rows where they are, and scores

  static const char* name() { return micro_kernels<Real>().name; }

  // Short sequences get smaller tiles, so that a call at seqlen 16 needs little memory.
  static int64_t forward_keys(int64_t longest_k) { return tile_keys(longest_k, 192); }
  static int64_t tile_keys(int64_t longest_k, int64_t most) {
    return std::clamp<int64_t>(round_up(longest_k, kRowBlock), kRowBlock, most);
  }

  static int64_t key_elements(int64_t keys, int64_t dim) {
    return std::max(round_up(keys, kRowBlock) * round_up(dim, kLanes), keys * round_up(dim, kRowBlock));
  }
  static int64_t query_elements(int64_t panels, int64_t dim) { return panels * dim * kLanes; }
  static int64_t weight_elements(int64_t /*keys*/, int64_t /*panels*/) { return 0; }

  // A tile of K or V whose row 0 is at `offset`, as A: its rows, or its columns.
  static void pack_key_rows(DataType dtype, const Operand& x, int64_t offset, Range readable, int64_t keys, int64_t dim,
                            Element* tile) {
    pack_row_blocks(dtype, x, offset, readable, keys, dim, tile);
  }
  static void pack_key_columns(DataType dtype, const Operand& x, int64_t offset, Range readable, int64_t keys,
                               int64_t dim, Element* tile) {
    pack_column_blocks(dtype, x, offset, readable, keys, dim, tile);
  }
  // The packed tile from key `first` on.
  static Keys key_rows(const Element* tile, int64_t first, int64_t /*keys*/, int64_t dim) {
    return packed_rows(tile + first * round_up(dim, kLanes), dim);
  }
  static Keys key_columns(const Element* tile, int64_t first, int64_t keys, int64_t /*dim*/) {
    return packed_columns(tile + first * kRowBlock, keys);
  }
  // The same where the tensor is.
  static Keys key_rows_in_place(const Operand& x, int64_t offset) { return rows_in_place<Real>(x, offset); }
  static Keys key_columns_in_place(const Operand& x, int64_t offset) { return columns_in_place<Real>(x, offset); }

  static void pack_queries(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim, double scale,
                           int64_t panels, Element* out) {
    pack_lanes(dtype, x, offset, rows, dim, static_cast<Real>(scale), panels, out);
  }

  // Scores are finished when the product is. Q takes of the scale what is exact, its power of two, so that q·k overflows
  // no sooner than the score; the sum takes what is left. A scale that rounded every element of Q would cost up to
  // eps · Σ |q_d k_d|, which is all there is where large terms cancel.
  static double query_scale(const AttentionParams& p) { return split(p).power; }
  static Real product_scale(const AttentionParams& p) { return split(p).rest; }

  static void scores(Real factor, Keys k, TileSize /*size*/, int64_t keys, int64_t dim, const Element* q,
                     int64_t panels, Real* s, int64_t s_panel) {
    micro_kernels<Real>().multiply({keys, dim, panels, k, q, kLanes, dim * kLanes, s, kLanes, s_panel, false, factor});
  }

  static bool scores_to_weights(const AttentionParams& /*p*/, const HeadContext<Real>& /*head*/,
                                const TilePlace& /*tile*/, bool /*is_clean*/, TileSize /*size*/, Keys /*k*/,
                                const Element* /*q*/, Real* /*row_max*/, Real* /*row_sum*/, Element* /*weights*/) {
    return false;
  }

  static void combine(Keys v, TileSize size, int64_t keys, int64_t dim, const Element* weights, int64_t panels, Real* o,
                      int64_t o_panel, bool accumulate) {
    micro_kernels<Real>().multiply(
        {dim, keys, panels, v, weights, kLanes, size.panel_elements(), o, kLanes, o_panel, accumulate});
  }

  // By which scores are still to be multiplied.
  static Real score_scale(const AttentionParams& /*p*/) { return 1; }

  static bool softmax(const SoftmaxStep<Real>& step, Real /*scale*/, Element* /*weights*/) {
    return micro_kernels<Real>().softmax_step(step);
  }

  // Weights of keys that no row of the panel sees.
  static void clear_weights(Element* weights, int64_t keys, int64_t end) {
    std::fill(weights + keys * kLanes, weights + end * kLanes, Real(0));
  }

  static void drop_weights(const uint8_t* keep, int64_t keys, Element* weights) {
    micro_kernels<Real>().drop(keep, keys, weights);
  }

  // Rows of a tensor = factor[lane] · x[d][lane], of one panel. A factor of 0 gives 0 whatever x holds.
  static void store_lanes(DataType dtype, const Operand& to, int64_t offset, int64_t rows, int64_t dim,
                          const Real* factor, Real* x) {
    micro_kernels<Real>().scale_lanes(dim, factor, x);
    unpack_lanes(dtype, to, offset, rows, dim, x);
  }

  // ---- Backward ----

  static void store_rows(DataType dtype, const Operand& to, int64_t offset, int64_t rows, int64_t dim, Real factor,
                         const Real* x, int64_t panel_stride) {
    unpack_row_panels(dtype, to, offset, rows, dim, factor, x, panel_stride);
  }

  static TileSize backward_tile(int64_t longest_q, int64_t longest_k) {
    return {std::clamp<int64_t>(round_up(longest_q, kLanes), kLanes, 64), tile_keys(longest_k, 144)};
  }

  // Rows of Q or dO as B of `outer`: [panel of dims][row][16], or where they are.
  struct QueryRows {
    const Real* data;
    int64_t stride, panel_stride;
  };
  static int64_t query_row_elements(int64_t rows, int64_t dim) { return rows * round_up(dim, kLanes); }
  static QueryRows query_rows(DataType dtype, const Operand& x, int64_t offset, int64_t rows, int64_t dim,
                              int64_t capacity, bool in_place, Element* copy) {
    if (in_place && dim % kLanes == 0) return {static_cast<const Real*>(x.data) + offset, x.row_stride, kLanes};
    pack_row_panels(dtype, x, offset, rows, dim, capacity, copy);
    return {copy, kLanes, capacity * kLanes};
  }

  // P and dS as operands: of `outer` (p, ds), of `combine` (ds_lanes).
  struct Gradients {
    const Element *p, *ds, *ds_lanes;
  };
  static int64_t gradient_elements(TileSize /*size*/) { return 0; }
  static Gradients gradients(const Real* p, const Real* ds, Element* /*operands*/, TileSize /*size*/) {
    return {p, ds, ds};
  }
  static void gradient_step(const GradientStep<Real>& step, Real /*scale*/, int64_t /*panel*/, Element* /*operands*/,
                            TileSize /*size*/) {
    micro_kernels<Real>().gradient_step(step);
  }
  // After P and dS of a panel were changed, or for a panel without rows (null).
  static void store_gradients(int64_t /*panel*/, int64_t /*keys*/, const Real* /*p*/, const Real* /*ds*/,
                              Element* /*operands*/, TileSize /*size*/) {}

  // Of these keys and rows of a tile, at which a, b and c begin.
  static void outer(const Element* a, Range keys, Range rows, TileSize size, QueryRows b, int64_t dim, Real* c,
                    int64_t c_panel) {
    const Element* part = a + rows.begin / kLanes * size.panel_elements() + keys.begin * kLanes;
    micro_kernels<Real>().multiply({keys.size(),
                                    rows.size(),
                                    divide_up(dim, kLanes),
                                    {part, kRowBlock * kLanes, kLanes, 1, size.panel_elements()},
                                    b.data + rows.begin * b.stride,
                                    b.stride,
                                    b.panel_stride,
                                    c + keys.begin * kLanes,
                                    kLanes,
                                    c_panel,
                                    true});
  }

 private:
  // The scale = power · rest: a signed power of two, and a number in [1, 2).
  struct Scale {
    Real power, rest;
  };
  static Scale split(const AttentionParams& p) {
    const Real scale = static_cast<Real>(p.score.scale);
    if (scale == 0 || !std::isfinite(scale)) return {scale, 1};
    int exponent = 0;
    const Real fraction = std::frexp(scale, &exponent);  // in [1/2, 1)
    return {std::ldexp(std::copysign(Real(1), scale), exponent - 1), 2 * std::fabs(fraction)};
  }
};

}  // namespace flash::cpu
