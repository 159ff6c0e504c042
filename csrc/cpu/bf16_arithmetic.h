// The arithmetic of bf16 tensors where the CPU multiplies bf16 itself: operands stay bf16, P and dS are rounded to it,
// all sums and the softmax are fp32.
#pragma once

#include "cpu/arithmetic.h"

namespace flash::cpu {

struct Bf16Arithmetic {
  using Real = float;
  using Element = Bf16;
  using Keys = const Bf16*;

  // A thread's tile registers.
  struct ThreadState {
    const uint32_t before = kernels().begin();
    ThreadState() = default;
    ~ThreadState() { kernels().end(before); }
    ThreadState(const ThreadState&) = delete;
    ThreadState& operator=(const ThreadState&) = delete;
  };

  static constexpr int64_t kKeyStep = 32, kKeyPad = 32, kGroupPanels = 2;
  static constexpr bool kFused = true;
  static constexpr bool kInPlace = false;

  static const Bf16Kernels& kernels() { return *bf16_kernels(); }
  static const char* name() { return kernels().name; }

  static int64_t row_blocks(int64_t rows) { return divide_up(rows, 16); }
  static int64_t depth_blocks(int64_t depth) { return divide_up(depth, 32); }

  // Many keys: few passes over O.
  static int64_t forward_keys(int64_t longest_k) { return std::clamp<int64_t>(round_up(longest_k, 32), 32, 512); }
  static TileSize backward_tile(int64_t longest_q, int64_t longest_k) {
    return {std::clamp<int64_t>(round_up(longest_q, 32), 32, 128),
            std::clamp<int64_t>(round_up(longest_k, 32), 32, 128)};
  }

  static int64_t key_elements(int64_t keys, int64_t dim) { return keys * round_up(dim, 32); }
  static int64_t query_elements(int64_t panels, int64_t dim) { return panels * kLanes * round_up(dim, 32); }
  static int64_t weight_elements(int64_t keys, int64_t panels) { return keys * panels * kLanes; }

  static Bf16Rows rows(const Operand& x, int64_t offset, int64_t rows, Range readable, int64_t dim) {
    return {static_cast<const Bf16*>(x.data) + offset, x.row_stride, rows, readable.begin, readable.end, dim};
  }

  static void pack_key_rows(DataType, const Operand& x, int64_t offset, Range readable, int64_t keys, int64_t dim,
                            Element* tile) {
    kernels().pack_a_rows(rows(x, offset, keys, readable, dim), tile);
  }
  static void pack_key_columns(DataType, const Operand& x, int64_t offset, Range readable, int64_t keys, int64_t dim,
                               Element* tile) {
    kernels().pack_a_columns(rows(x, offset, keys, readable, dim), tile);
  }
  static Keys key_rows(const Element* tile, int64_t first, int64_t /*keys*/, int64_t dim) {
    return tile + row_blocks(first) * depth_blocks(dim) * kBlock;
  }
  static Keys key_columns(const Element* tile, int64_t first, int64_t /*keys*/, int64_t /*dim*/) {
    return tile + depth_blocks(first) * kBlock;
  }

  static Keys key_rows_in_place(const Operand& /*x*/, int64_t /*offset*/) { return nullptr; }
  static Keys key_columns_in_place(const Operand& /*x*/, int64_t /*offset*/) { return nullptr; }

  static void pack_queries(DataType, const Operand& x, int64_t offset, int64_t count, int64_t dim, double /*scale*/,
                           int64_t panels, Element* out) {
    kernels().pack_b_columns(rows(x, offset, panels * kLanes, {0, count}, dim), out);
  }

  static double query_scale(const AttentionParams& /*p*/) { return 1; }
  static Real product_scale(const AttentionParams& /*p*/) { return 1; }

  static void scores(Real /*factor*/, Keys k, TileSize /*size*/, int64_t keys, int64_t dim, const Element* q,
                     int64_t panels, Real* s, int64_t s_panel) {
    const int64_t depth = depth_blocks(dim);
    kernels().multiply({row_blocks(keys), depth, panels, k, depth * kBlock, q, depth * kBlock, s, s_panel, false});
  }

  // The weights of a tile's panels in one go, where they begin and end with whole steps of keys. False: do it in steps.
  static bool scores_to_weights(const AttentionParams& p, const HeadContext<Real>& head, const TilePlace& tile,
                                bool is_clean, TileSize size, Keys k, const Element* q, Real* row_max, Real* row_sum,
                                Element* weights) {
    struct Context {
      const AttentionParams& p;
      const HeadContext<Real>& head;
      const TilePlace& tile;
      Real scale;
    };
    const auto adjust = [](const void* given, const PanelPart& part, float* scores) {
      const auto& context = *static_cast<const Context*>(given);
      TilePlace panel = context.tile.panel(part.panel);
      panel.first_key += part.first_key;
      panel.keys = part.keys;
      adjust_logits<Real>(context.p, context.head, panel, context.scale, scores, nullptr);
    };
    if (tile.keys % kKeyStep != 0) return false;
    const Context context{p, head, tile, score_scale(p)};
    const int64_t depth = depth_blocks(p.dim);
    return kernels().scores_to_weights({tile.keys, depth, static_cast<int>(divide_up(tile.rows, kLanes)), k,
                                        depth * kBlock, q, depth * kBlock, is_clean ? nullptr : +adjust, &context,
                                        scale_left(p, context.scale), row_max, row_sum, weights,
                                        size.panel_elements()});
  }

  static void combine(Keys v, TileSize size, int64_t keys, int64_t dim, const Element* weights, int64_t panels, Real* o,
                      int64_t o_panel, bool accumulate) {
    kernels().multiply({row_blocks(dim), depth_blocks(keys), panels, v, depth_blocks(size.keys) * kBlock, weights,
                        size.panel_elements(), o, o_panel, accumulate});
  }

  static Real score_scale(const AttentionParams& p) { return static_cast<Real>(p.score.scale); }

  static bool softmax(const SoftmaxStep<Real>& step, Real scale, Element* weights) {
    return kernels().softmax_step(step, scale, weights);
  }

  static void clear_weights(Element* weights, int64_t keys, int64_t end) {
    const int64_t from = round_up(keys, 32) * kLanes, to = round_up(end, 32) * kLanes;
    if (from < to) std::fill(weights + from, weights + to, Bf16{0});
  }

  static void drop_weights(const uint8_t* keep, int64_t keys, Element* weights) { kernels().drop(keep, keys, weights); }

  static void store_lanes(DataType, const Operand& to, int64_t offset, int64_t rows, int64_t dim, const Real* factor,
                          Real* x) {
    kernels().unpack_lanes(x, factor, rows, dim, static_cast<Bf16*>(to.data) + offset, to.row_stride);
  }

  // ---- Backward ----

  static void store_rows(DataType, const Operand& to, int64_t offset, int64_t rows, int64_t dim, Real factor,
                         const Real* x, int64_t panel_stride) {
    kernels().unpack_rows(x, panel_stride, factor, rows, dim, static_cast<Bf16*>(to.data) + offset, to.row_stride);
  }

  using QueryRows = const Bf16*;
  static int64_t query_row_elements(int64_t rows, int64_t dim) { return rows * round_up(dim, kLanes); }
  static QueryRows query_rows(DataType, const Operand& x, int64_t offset, int64_t count, int64_t dim, int64_t capacity,
                              bool /*in_place*/, Element* copy) {
    kernels().pack_b_rows(rows(x, offset, capacity, {0, count}, dim), copy);
    return copy;
  }

  struct Gradients {
    const Element *p, *ds, *ds_lanes;
  };
  static int64_t gradient_elements(TileSize size) { return 3 * size.rows * size.keys; }
  static Gradients gradients(const Real* /*p*/, const Real* /*ds*/, Element* operands, TileSize size) {
    const int64_t elements = size.rows * size.keys;
    return {operands, operands + elements, operands + 2 * elements};
  }
  static Bf16Gradients panel_operands(int64_t panel, Element* operands, TileSize size) {
    const int64_t elements = size.rows * size.keys, place = panel / 2 * kBlock + panel % 2 * kLanes;
    return {operands + place, operands + elements + place, depth_blocks(size.rows) * kBlock,
            operands + 2 * elements + panel * size.panel_elements()};
  }

  static void gradient_step(const GradientStep<Real>& step, Real scale, int64_t panel, Element* operands,
                            TileSize size) {
    kernels().gradient_step(step, scale, panel_operands(panel, operands, size));
  }
  static void store_gradients(int64_t panel, int64_t keys, const Real* p, const Real* ds, Element* operands,
                              TileSize size) {
    kernels().store_gradients(keys, p, ds, panel_operands(panel, operands, size));
  }

  static void outer(const Element* a, Range keys, Range rows, TileSize size, QueryRows b, int64_t dim, Real* c,
                    int64_t c_panel) {
    const int64_t stride = depth_blocks(size.rows) * kBlock, place = depth_blocks(rows.begin) * kBlock;
    kernels().multiply({row_blocks(keys.size()), depth_blocks(rows.size()), divide_up(dim, kLanes),
                        a + row_blocks(keys.begin) * stride + place, stride, b + place, stride, c + keys.begin * kLanes,
                        c_panel, true});
  }
};

// Calls use(arithmetic) with the class that serves the call.
template <class Use>
auto with_arithmetic(const AttentionParams& p, const Use& use) {
  if (p.dtype == DataType::kFloat64) return use(RealArithmetic<double>());
  if (p.dtype == DataType::kBFloat16 && bf16_kernels() != nullptr) return use(Bf16Arithmetic());
  return use(RealArithmetic<float>());
}

}  // namespace flash::cpu
