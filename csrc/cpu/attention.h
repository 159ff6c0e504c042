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

}  // namespace flash::cpu
