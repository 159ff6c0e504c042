// Where a sequence's rows live: dense, packed (varlen), left padded, partly used. Everything above counts positions 0
// .. length-1.
#pragma once

#include "common/params.h"

namespace flash {

// Position i of the sequence is row `segment + leftpad + i` of the tensor (batch index `batch`)
// and row (or column) `leftpad + i` of bias and mask.
struct Rows {
  int64_t batch = 0;    // dense: the sequence's index; varlen: 0
  int64_t segment = 0;  // first row of the segment in the tensor
  int64_t leftpad = 0;
  int64_t length = 0;

  FLASH_HOST_DEVICE int64_t first() const { return segment + leftpad; }
};

struct Sequence {
  int64_t index = 0;  // in the batch
  Rows q, k;
};

FLASH_HOST_DEVICE Rows rows_of_sequence(const RowLayout& layout, int64_t b) {
  Rows rows;
  int64_t capacity = layout.rows;
  if (layout.cu_seqlens.given()) {
    rows.segment = layout.cu_seqlens[b];
    capacity = layout.cu_seqlens[b + 1] - rows.segment;
  } else {
    rows.batch = b;
  }
  rows.leftpad = layout.leftpad.given() ? layout.leftpad[b] : 0;
  rows.length = (layout.seqused.given() ? layout.seqused[b] : capacity) - rows.leftpad;
  return rows;
}

// Whether the rows lie inside their tensor (and, if max_rows >= 0, are no more than that): on a GPU nobody has checked.
FLASH_HOST_DEVICE bool rows_are_possible(const RowLayout& layout, const Rows& rows, int64_t b, int64_t max_rows) {
  const bool packed = layout.cu_seqlens.given();
  const int64_t begin = packed ? layout.cu_seqlens[b] : 0, end = packed ? layout.cu_seqlens[b + 1] : layout.rows;
  const int64_t before = packed && b > 0 ? layout.cu_seqlens[b - 1] : 0;
  const int64_t used = rows.leftpad + rows.length;
  return 0 <= begin && before <= begin && begin <= end && end <= layout.rows && 0 <= rows.leftpad && 0 <= rows.length &&
         used <= end - begin && (max_rows < 0 || end - begin <= max_rows);
}

FLASH_HOST_DEVICE Sequence sequence(const AttentionParams& params, int64_t b) {
  return {b, rows_of_sequence(params.rows_q, b), rows_of_sequence(params.rows_k, b)};
}

}  // namespace flash
