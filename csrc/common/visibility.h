// Which keys a query sees under causal, window and lengths: one half-open interval per row, the only definition of it.
// Bool masks, block masks and biases of -inf hide more keys inside that interval; nothing ever widens it.
//
// Interval ends never decrease from one row to the next, so whole tiles are judged by their first and last row.
#pragma once

#include "common/params.h"

namespace flash {

struct Range {
  int64_t begin = 0, end = 0;

  FLASH_HOST_DEVICE bool empty() const { return begin >= end; }
  FLASH_HOST_DEVICE int64_t size() const { return empty() ? 0 : end - begin; }
  FLASH_HOST_DEVICE bool contains(int64_t x) const { return begin <= x && x < end; }
};

FLASH_HOST_DEVICE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FLASH_HOST_DEVICE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
FLASH_HOST_DEVICE Range intersect(Range a, Range b) { return {larger(a.begin, b.begin), smaller(a.end, b.end)}; }
FLASH_HOST_DEVICE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Key blocks that a tile of rows visits, and those among them in which every row sees every key (no element mask
// needed).
struct BlockRange {
  int64_t begin = 0, end = 0;            // visited
  int64_t full_begin = 0, full_end = 0;  // full_begin >= full_end: none is full

  FLASH_HOST_DEVICE bool is_full(int64_t block) const { return full_begin <= block && block < full_end; }
};

struct Visibility {
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t diagonal = 0;  // row i stands at key i + diagonal
  int64_t left = 0;      // row i sees keys i + diagonal - left ... i + diagonal + right
  int64_t right = 0;

  FLASH_HOST_DEVICE Range keys(int64_t i) const {
    return {larger(0, i + diagonal - left), smaller(seqlen_k, i + diagonal + right + 1)};
  }

  // Keys that at least one of the rows sees (empty rows between do not matter: ends are monotone).
  FLASH_HOST_DEVICE Range keys_of_any(Range rows) const {
    if (rows.empty()) return {};
    return {keys(rows.begin).begin, keys(rows.end - 1).end};
  }

  // Keys that every one of the rows sees.
  FLASH_HOST_DEVICE Range keys_of_all(Range rows) const {
    if (rows.empty()) return {};
    return {keys(rows.end - 1).begin, keys(rows.begin).end};
  }

  // Rows that see at least one of the keys.
  FLASH_HOST_DEVICE Range rows_of_any(Range wanted) const {
    const Range k = intersect(wanted, {0, seqlen_k});
    if (k.empty()) return {};
    return {larger(0, k.begin - right - diagonal), smaller(seqlen_q, k.end - 1 + left - diagonal + 1)};
  }

  // Rows that see every one of the keys.
  FLASH_HOST_DEVICE Range rows_of_all(Range wanted) const {
    if (wanted.empty() || wanted.begin < 0 || wanted.end > seqlen_k) return {};
    return {larger(0, wanted.end - 1 - right - diagonal), smaller(seqlen_q, wanted.begin + left - diagonal + 1)};
  }

  FLASH_HOST_DEVICE BlockRange key_blocks(Range rows, int64_t block) const {
    const Range any = keys_of_any(rows), all = keys_of_all(rows);
    if (any.empty()) return {};
    BlockRange range{any.begin / block, divide_up(any.end, block), 0, 0};
    if (!all.empty()) {
      range.full_begin = divide_up(all.begin, block);
      range.full_end = all.end / block;
    }
    return range;
  }
};

FLASH_HOST_DEVICE Visibility make_visibility(const Window& window, int64_t seqlen_q, int64_t seqlen_k) {
  // No distance between a row and a key exceeds seqlen_q + seqlen_k: a wider window is unlimited, and sums stay small.
  const int64_t unlimited = seqlen_q + seqlen_k;
  const int64_t left = window.left < 0 ? unlimited : smaller(window.left, unlimited);
  const int64_t right = window.causal ? 0 : window.right < 0 ? unlimited : smaller(window.right, unlimited);
  return {seqlen_q, seqlen_k, window.upper_left ? 0 : seqlen_k - seqlen_q, left, right};
}

}  // namespace flash
