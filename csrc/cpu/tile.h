// What happens to the logits of a tile between QK^T and the softmax, one panel at a time: softcap, ALiBi, bias, masks;
// and dropout. A panel is 16 query rows (lanes) × `keys` keys, [key][lane].
#pragma once

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
  Real alibi_slope = 0;
  DropoutStream dropout{};

  HeadContext(const AttentionParams& p, const Sequence& s, int64_t h)
      : sequence(s),
        head(h),
        visibility(make_visibility(p.window, s.q.length, s.k.length)),
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

// Keys that are looked at together where a temporary of [key][lane] is needed.
inline constexpr int64_t kSomeKeys = 64;

// s += alibi.
template <class Real>
void add_alibi(Real slope, const TilePlace& panel, int64_t diagonal, Real* scores) {
  const int64_t base = panel.first_row + diagonal - panel.first_key;  // the distance of lane 0 from key 0
  const bool is_near = base > -(1 << 30) && base < (1 << 30) && panel.keys < (1 << 20);
  for (int64_t j = 0; j < panel.keys; ++j, scores += kLanes) {
    if (is_near) {
      const auto distance = static_cast<int32_t>(base - j);
      for (int32_t lane = 0; lane < kLanes; ++lane)
        scores[lane] -= slope * static_cast<Real>(distance + lane < 0 ? -(distance + lane) : distance + lane);
    } else {
      for (int64_t lane = 0; lane < kLanes; ++lane)
        scores[lane] += alibi(slope, panel.first_row + lane, panel.first_key + j, diagonal);
    }
  }
}

// Calls use(key, values) for every key, with values[lane] = element (row `lane`, key) as convert (of lanes_from_rows)
// gives it.
template <class Real, class Convert, class Use>
void for_each_key(const TilePlace& panel, const Convert& convert, const Use& use) {
  Real values[kSomeKeys * kLanes] = {};
  for (int64_t first = 0; first < panel.keys; first += kSomeKeys) {
    const int64_t some = std::min(kSomeKeys, panel.keys - first);
    lanes_from_rows(
        panel.rows, some, Real(1),
        [&](int64_t row, int64_t c, int64_t count, Real* to) { convert(row, first + c, count, to); }, values);
    for (int64_t j = 0; j < some; ++j) use(first + j, values + j * kLanes);
  }
}

template <class Real>
void add_bias(const AttentionParams& p, const HeadContext<Real>& head, const TilePlace& panel, Real* scores) {
  const int64_t origin = p.bias.offset(head.sequence.index, head.head, head.sequence.q.leftpad + panel.first_row,
                                       head.sequence.k.leftpad + panel.first_key);
  const auto convert = [&](int64_t row, int64_t first, int64_t count, Real* to) {
    const int64_t stride = p.bias.column_stride, offset = origin + row * p.bias.row_stride + first * stride;
    with_loader<Real>(p.bias.dtype, p.bias.data, offset, [&](auto load) {
      if (stride == 1) {
        for (int64_t c = 0; c < count; ++c) to[c] = load(c);
      } else {
        for (int64_t c = 0; c < count; ++c) to[c] = load(c * stride);
      }
    });
  };
  for_each_key<Real>(panel, convert, [&](int64_t j, const Real* values) {
    for (int64_t lane = 0; lane < kLanes; ++lane) scores[j * kLanes + lane] += values[lane];
  });
}

// s = -inf where the mask is false.
template <class Real>
void apply_mask(const AttentionParams& p, const HeadContext<Real>& head, const TilePlace& panel, Real* scores) {
  const auto* origin = static_cast<const uint8_t*>(p.mask.data) +
                       p.mask.offset(head.sequence.index, head.head, head.sequence.q.leftpad + panel.first_row,
                                     head.sequence.k.leftpad + panel.first_key);
  const auto convert = [&](int64_t row, int64_t first, int64_t count, Real* to) {
    const int64_t stride = p.mask.column_stride;
    const uint8_t* allowed = origin + row * p.mask.row_stride + first * stride;
    if (stride == 1) {
      for (int64_t c = 0; c < count; ++c) to[c] = allowed[c] != 0 ? Real(1) : Real(0);
    } else {
      for (int64_t c = 0; c < count; ++c) to[c] = allowed[c * stride] != 0 ? Real(1) : Real(0);
    }
  };
  for_each_key<Real>(panel, convert, [&](int64_t j, const Real* values) {
    Real* s = scores + j * kLanes;
    for (int64_t lane = 0; lane < kLanes; ++lane) s[lane] = values[lane] != 0 ? s[lane] : -Real(INFINITY);
  });
}

// s = -inf where causal, window or lengths hide the key. Keys that every lane sees are not looked at.
template <class Real>
void hide_keys(const Visibility& visibility, const TilePlace& panel, Real* scores) {
  const Range all = intersect(visibility.keys_of_all(panel.row_range()), panel.key_range());
  const int64_t all_begin = all.empty() ? panel.keys : all.begin - panel.first_key;
  const int64_t all_end = all.empty() ? panel.keys : all.end - panel.first_key;
  if (all_begin == 0 && all_end == panel.keys) return;
  int32_t begin[kLanes] = {}, end[kLanes] = {};  // of the keys that a lane sees, counted from the panel's first
  for (int64_t lane = 0; lane < panel.rows; ++lane) {
    const Range keys = intersect(visibility.keys(panel.first_row + lane), panel.key_range());
    begin[lane] = static_cast<int32_t>(keys.begin - panel.first_key);
    end[lane] = static_cast<int32_t>(std::max(keys.begin, keys.end) - panel.first_key);
  }
  const auto hide = [&](int64_t first, int64_t last) {
    for (auto j = static_cast<int32_t>(first); j < last; ++j) {
      Real* s = scores + j * kLanes;
      for (int64_t lane = 0; lane < kLanes; ++lane)
        s[lane] = begin[lane] <= j && j < end[lane] ? s[lane] : -Real(INFINITY);
    }
  };
  hide(0, all_begin);
  hide(all_end, panel.keys);
}

// Whether adjust_logits does more than hide keys.
inline bool changes_logits(const AttentionParams& p) {
  return p.score.softcap > 0 || p.score.alibi_slopes != nullptr || p.bias.given();
}

// From scale · q·k of one panel to the logits: softcap, ALiBi, bias; -inf where a row does not see a key.
// `softcap_derivative` ([key][lane], may be null) receives d(softcapped)/d(s). Lanes beyond the rows hold finite values
// if K is finite, and nothing reads them.
template <class Real>
void adjust_logits(const AttentionParams& p, const HeadContext<Real>& head, const TilePlace& panel, Real* scores,
                   Real* softcap_derivative) {
  if (p.score.softcap > 0) {
    const Real softcap = static_cast<Real>(p.score.softcap);
    for (int64_t x = 0; x < panel.keys * kLanes; ++x) {
      const Softcapped<Real> capped = apply_softcap(scores[x], softcap);
      scores[x] = capped.value;
      if (softcap_derivative != nullptr) softcap_derivative[x] = capped.derivative;
    }
  }
  if (head.alibi_slope != 0) add_alibi(head.alibi_slope, panel, head.visibility.diagonal, scores);
  if (p.bias.given()) add_bias(p, head, panel, scores);
  if (p.mask.given()) apply_mask(p, head, panel, scores);
  hide_keys(head.visibility, panel, scores);
}

// keep[key][lane] = whether dropout keeps the element, in one panel.
inline void dropout_panel(const Dropout& dropout, const DropoutStream& stream, const TilePlace& panel, uint8_t* keep) {
  const Range rows = panel.row_range(), keys = panel.key_range();
  for (int64_t q0 = rows.begin / kDropoutQueries * kDropoutQueries; q0 < rows.end; q0 += kDropoutQueries)
    for (int64_t k0 = keys.begin / kDropoutKeys * kDropoutKeys; k0 < keys.end; k0 += kDropoutKeys)
      for (int64_t group = 0; group < 64; ++group) {
        const int64_t q1 = q0 + group / 8, k1 = k0 + group % 8;
        const DropoutDraws draws = stream.draws(dropout_query_group(q1), dropout_key_group(k1));
        for (int query_slot = 0; query_slot < 2; ++query_slot)
          for (int key_slot = 0; key_slot < 4; ++key_slot) {
            const int64_t q = q1 + 8 * query_slot, k = k1 + 8 * key_slot;
            if (!rows.contains(q) || !keys.contains(k)) continue;
            keep[(k - keys.begin) * kLanes + (q - rows.begin)] = draws.draw(query_slot, key_slot) >= dropout.threshold;
          }
      }
}

template <class Real>
void drop(const uint8_t* keep, int64_t keys, Real* x) {
  for (int64_t i = 0; i < keys * kLanes; ++i) x[i] = keep[i] != 0 ? x[i] : Real(0);
}

}  // namespace flash::cpu
