// The CPU backend: what the binding calls.
#pragma once

#include "common/params.h"
#include "cpu/parallel.h"

namespace flash::cpu {

// Writes out, lse and the statistics of every real row; rows outside the sequences are left as they are.
void forward(const FwdParams& params, const ThreadPool& pool);

// Writes the gradients that are wanted: every element of dbias and dsink, and the real rows of dq, dk, dv.
// All of them are bitwise repeatable, whatever the number of threads.
void backward(const BwdParams& params, const ThreadPool& pool);

// What a call of this shape would use; reads no tensor.
struct Plan {
  const char* instruction_set;
  int64_t tile_rows, tile_keys;
  int threads;
  int64_t forward_bytes, backward_bytes;  // workspace beside inputs and outputs; backward without dbias
};

Plan plan(const AttentionParams& shape, const ThreadPool& pool);

}  // namespace flash::cpu
