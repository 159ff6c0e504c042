// The passes of backward, in the order in which attention.h's backward() runs them.
#pragma once

#include "common/params.h"
#include "cpu/parallel.h"
#include "cpu/schedule.h"

namespace flash::cpu {

// delta[row] = rowsum(dO ∘ O) - dLSE, 0 for rows that see nothing; then dsink.
template <class Real>
void prepare_pass(const BwdParams& p, const Sequences& sequences, const RowArray& delta, const ThreadPool& pool);

// dQ, dK, dV.
template <class Real>
void main_pass(const BwdParams& p, const Sequences& sequences, const RowArray& delta, const ThreadPool& pool);

// The scratch of dQ, dK, dV together, beside inputs and outputs.
template <class Real>
int64_t backward_workspace_bytes(const AttentionParams& shape, const ThreadPool& pool);

// dbias.
template <class Real>
void bias_pass(const BwdParams& p, const Sequences& sequences, const RowArray& delta, const ThreadPool& pool);

}  // namespace flash::cpu
