// What happens to the logits of a tile between QK^T and the softmax, one panel at a time: softcap, ALiBi, bias, masks;
// and dropout. A panel is 16 query rows (lanes) × `keys` keys, [key][lane].
#pragma once

#include <utility>

#include "common/block_mask.h"
#include "common/dropout.h"
#include "common/score.h"
#include "common/sequence.h"
#include "common/statistics.h"
#include "common/visibility.h"
#include "cpu/pack.h"

namespace flash::cpu {

// One head of one sequence.
template <class Real>
struct HeadContext {
  Sequence sequence;
  int64_t head = 0;
  Visibility visibility;
  HeadBlocks blocks;
  Real alibi_slope = 0;
  DropoutStream dropout{};

  HeadContext(const AttentionParams& p, const Sequence& s, int64_t h)
      : sequence(s),
        head(h),
        visibility(make_visibility(p.window, s.q.length, s.k.length)),
        blocks(head_blocks(p, s, h)),
        alibi_slope(flash::alibi_slope<Real>(p.score, s.index, h)) {
    if (p.dropout.given()) dropout = dropout_stream(p.dropout.seed, s.index, h);
  }
};

// Where a panel or tile lies: positions, counted within the sequence.
struct TilePlace {
  int64_t first_row, rows;
  int64_t first_key, keys;

  Range row_range() const { return {first_row, first_row + rows}; }
  Range key_range() const { return {first_key, first_key + keys}; }

  TilePlace panel(int64_t index) const {
    const int64_t before = index * kLanes;
    return {first_row + before, std::clamp<int64_t>(rows - before, 0, kLanes), first_key, keys};
  }
};

// Calls use(stretch) with the stretches of `keys` that some of the rows visits, in their order; each begins some times
// `step` behind the first key of the tile, and keys that come in by that are hidden like others.
template <class Real, class Use>
void for_each_stretch(const HeadContext<Real>& head, Range rows, Range keys, int64_t first_key, int64_t step,
                      const Use& use) {
  const auto at_step = [=](int64_t key) { return first_key + (key - first_key) / step * step; };
  Range next = head.blocks.visited_keys(rows, keys);
  while (!next.empty()) {
    Range stretch{at_step(next.begin), next.end};
    next = head.blocks.visited_keys(rows, {stretch.end, keys.end});
    for (; !next.empty() && at_step(next.begin) < stretch.end;
         next = head.blocks.visited_keys(rows, {stretch.end, keys.end}))
      stretch.end = next.end;
    use(stretch);
  }
}

// s = scale · s + alibi.
template <class Real>
void add_alibi(Real scale, Real slope, const TilePlace& panel, int64_t diagonal, Real* scores) {
  const int64_t distance = panel.first_row + diagonal - panel.first_key;  // of lane 0 from key 0
  constexpr int64_t kFar = int64_t{1} << 30;
  if (distance > -kFar && distance < kFar && panel.keys < kFar - kLanes) {
    micro_kernels<Real>().add_alibi(panel.keys, scale, slope, distance, scores);
    return;
  }
  for (int64_t j = 0; j < panel.keys; ++j, scores += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      scores[lane] = scale * scores[lane] + alibi(slope, panel.first_row + lane, panel.first_key + j, diagonal);
}

// Calls use(rows, row stride, first key, keys) with the panel's elements of a bias or mask side by side: where they
// are, or copied some keys at a time.
template <class T, class Use>
void with_adjacent_keys(const T* data, int64_t row_stride, int64_t column_stride, const TilePlace& panel,
                        const Use& use) {
  if (column_stride == 1) {
    use(data, row_stride, int64_t{0}, panel.keys);
    return;
  }
  constexpr int64_t kSomeKeys = 64;
  T copy[kLanes * kSomeKeys];
  for (int64_t first = 0; first < panel.keys; first += kSomeKeys) {
    const int64_t some = std::min(kSomeKeys, panel.keys - first);
    for (int64_t row = 0; row < panel.rows; ++row)
      for (int64_t c = 0; c < some; ++c)
        copy[row * kSomeKeys + c] = data[row * row_stride + (first + c) * column_stride];
    use(static_cast<const T*>(copy), kSomeKeys, first, some);
  }
}

// s = scale · s + bias.
template <class Real>
void add_bias(const AttentionParams& p, const HeadContext<Real>& head, const TilePlace& panel, Real scale,
              Real* scores) {
  const int64_t origin = p.bias.offset(head.sequence.index, head.head, head.sequence.q.leftpad + panel.first_row,
                                       head.sequence.k.leftpad + panel.first_key);
  const auto add = [&]<class T>(const T* data) {
    with_adjacent_keys(data + origin, p.bias.row_stride, p.bias.column_stride, panel,
                       [&](const T* rows, int64_t stride, int64_t first, int64_t keys) {
                         micro_kernels<Real>().add_bias({p.bias.dtype, rows, stride, panel.rows, keys}, scale,
                                                        scores + first * kLanes);
                       });
  };
  switch (bytes_of(p.bias.dtype)) {
    case 8:
      return add(static_cast<const uint64_t*>(p.bias.data));
    case 4:
      return add(static_cast<const uint32_t*>(p.bias.data));
    default:
      return add(static_cast<const uint16_t*>(p.bias.data));
  }
}

// s = -inf where the mask is false.
template <class Real>
void apply_mask(const AttentionParams& p, const HeadContext<Real>& head, const TilePlace& panel, Real* scores) {
  const auto* origin = static_cast<const uint8_t*>(p.mask.data) +
                       p.mask.offset(head.sequence.index, head.head, head.sequence.q.leftpad + panel.first_row,
                                     head.sequence.k.leftpad + panel.first_key);
  with_adjacent_keys(origin, p.mask.row_stride, p.mask.column_stride, panel,
                     [&](const uint8_t* rows, int64_t stride, int64_t first, int64_t keys) {
                       micro_kernels<Real>().hide_masked({rows, stride, panel.rows, keys}, scores + first * kLanes);
                     });
}

// s = -inf where causal, window or lengths hide the key. Keys that every lane sees are not looked at. `lanes_beyond`: also
// in lanes beyond the rows, whose zeros times a NaN of K would else be NaN in a product of whole panels.
template <class Real>
void hide_keys(const Visibility& visibility, const TilePlace& panel, bool lanes_beyond, Real* scores) {
  const Range all = lanes_beyond ? Range{} : intersect(visibility.keys_of_all(panel.row_range()), panel.key_range());
  const int64_t all_begin = all.empty() ? panel.keys : all.begin - panel.first_key;
  const int64_t all_end = all.empty() ? panel.keys : all.end - panel.first_key;
  if (all_begin == 0 && all_end == panel.keys) return;
  KeyBounds bounds{};
  for (int64_t lane = 0; lane < panel.rows; ++lane) {
    const Range keys = intersect(visibility.keys(panel.first_row + lane), panel.key_range());
    bounds.begin[lane] = static_cast<int32_t>(keys.begin - panel.first_key);
    bounds.end[lane] = static_cast<int32_t>(std::max(keys.begin, keys.end) - panel.first_key);
  }
  micro_kernels<Real>().hide_outside(bounds, 0, all_begin, scores);
  micro_kernels<Real>().hide_outside(bounds, all_end, panel.keys, scores);
}

// s = -inf where the block mask hides the key.
template <class Real>
void hide_blocks(const HeadBlocks& blocks, const TilePlace& panel, Real* scores) {
  blocks.for_each_block(panel.row_range(), panel.key_range(), [&](int32_t kind, Range rows, Range keys) {
    if (kind == kFullBlock) return;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      const uint8_t* visible = kind == kHiddenBlock ? nullptr : blocks.pattern_row(kind, i);
      Real* s = scores + (keys.begin - panel.first_key) * kLanes + i - panel.first_row;
      int64_t of_block = (keys.begin + blocks.keys.leftpad) % blocks.keys.size;
      for (int64_t j = keys.begin; j < keys.end; ++j, ++of_block, s += kLanes)
        if (visible == nullptr || visible[of_block] == 0) *s = -INFINITY;
    }
  });
}

template <class Real>
void scale_panel(Real scale, int64_t keys, Real* scores) {
  for (int64_t i = 0; i < keys * kLanes; ++i) scores[i] *= scale;
}

// Whether adjust_logits does more than hide keys.
inline bool changes_logits(const AttentionParams& p) {
  return p.score.softcap > 0 || p.score.alibi_slopes != nullptr || p.bias.given();
}

// What adjust_logits leaves to be multiplied: all of the scale, unless something is added to scaled scores, or -inf
// would be turned around, or scale · log2 e might not be a normal number.
template <class Real>
Real scale_left(const AttentionParams& p, Real scale) {
  const bool plain = Real(0x1p-60) < scale && scale < Real(0x1p+60);
  return changes_logits(p) || !plain ? Real(1) : scale;
}

// From s, where scale · s = scale · q·k, of one panel to the logits: softcap, ALiBi, bias; -inf where a row does not
// see a key. `softcap_derivative` ([key][lane], may be null) receives d(softcapped)/d(s). Lanes beyond the rows hold
// finite values or -inf if K is finite; where K is not, see hide_keys. Returns what is left of the scale: see scale_left.
template <class Real>
Real adjust_logits(const AttentionParams& p, const HeadContext<Real>& head, const TilePlace& panel, Real scale,
                   Real* scores, Real* softcap_derivative) {
  const Real left = scale_left(p, scale);
  if (p.score.softcap > 0)
    micro_kernels<Real>().softcap(panel.keys * kLanes, std::exchange(scale, left), static_cast<Real>(p.score.softcap),
                                  scores, softcap_derivative);
  if (p.score.alibi_slopes != nullptr)
    add_alibi(std::exchange(scale, left), head.alibi_slope, panel, head.visibility.diagonal, scores);
  if (p.bias.given()) add_bias(p, head, panel, std::exchange(scale, left), scores);
  if (scale != left) scale_panel(scale, panel.keys, scores);
  if (p.mask.given()) apply_mask(p, head, panel, scores);
  if (head.blocks.given()) hide_blocks(head.blocks, panel, scores);
  // Of these two alone a key may be hidden from all rows, and still be seen by the lanes beyond them.
  const bool hides_rows_alone = p.bias.given() || head.blocks.given();
  hide_keys(head.visibility, panel, hides_rows_alone && panel.rows < kLanes, scores);
  return left;
}

// keep[key][lane] = whether dropout keeps the element, in one panel.
inline void dropout_panel(const Dropout& dropout, const DropoutStream& stream, const TilePlace& panel, uint8_t* keep) {
  static_assert(kDropoutQueries == kLanes);
  const auto draw = [&](int64_t first_row, int64_t first_key, int64_t keys, uint8_t* to) {
    const uint32_t phase = stream.phase(first_row / kDropoutQueries, 0);
    micro_kernels<float>().dropout_panel({stream.key0, stream.key1, stream.salt2, stream.salt3, dropout.threshold,
                                          phase, stream.phase(first_row / kDropoutQueries, 1) - phase,
                                          static_cast<uint64_t>(dropout_query_group(first_row)), first_key, keys},
                                         to);
  };
  const int64_t shift = panel.first_row % kLanes, aligned = panel.first_row - shift;
  if (shift == 0) {
    draw(aligned, panel.first_key, panel.keys, keep);
    return;
  }
  constexpr int64_t kSomeKeys = 64;
  uint8_t lower[kSomeKeys * kLanes], upper[kSomeKeys * kLanes];
  for (int64_t j = 0; j < panel.keys; j += kSomeKeys) {
    const int64_t some = std::min(kSomeKeys, panel.keys - j);
    draw(aligned, panel.first_key + j, some, lower);
    draw(aligned + kLanes, panel.first_key + j, some, upper);
    for (int64_t i = 0; i < some; ++i, keep += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane)
        keep[lane] =
            lane + shift < kLanes ? lower[i * kLanes + lane + shift] : upper[i * kLanes + lane + shift - kLanes];
  }
}

}  // namespace flash::cpu
