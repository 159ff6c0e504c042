// The seam between the tile loop and the instruction sets: everything that costs time per element of a tile is one of
// these functions. A tile keeps query rows along its lanes: S^T is [key][lane], so softmax never reduces across a
// vector, and every product of forward and backward has the one form C[row][lane] += A[row][depth] · B[depth][lane].
#pragma once

#include <cstdint>

namespace flash::cpu {

inline constexpr int64_t kLanes = 16;  // lanes come in multiples of this, buffers are padded to it

// C (+)= A · B.  A(row, depth) = a[row · a_row_stride + depth · a_depth_stride];  B and C have unit stride along lanes.
template <class Real>
struct Product {
  int64_t rows, depth, lanes;
  const Real* a;
  int64_t a_row_stride, a_depth_stride;
  const Real* b;
  int64_t b_stride;
  Real* c;
  int64_t c_stride;
  bool accumulate;
};

// One step of the online softmax over scores [keys][lanes] (paper, Algorithm 1, lines 10 to 12): updates the running
// maximum and sum, turns the scores into exp(S - maximum), and returns in `rescale` what earlier sums and outputs must
// be multiplied by. Returns whether any lane's factor differs from 1.
template <class Real>
struct SoftmaxStep {
  int64_t keys, lanes;
  Real* scores;
  int64_t stride;
  Real* row_max;
  Real* row_sum;
  Real* rescale;
};

// Scores [keys][lanes] to probabilities exp2((S - reference) · log2 e - log2_sum).
template <class Real>
struct Probabilities {
  int64_t keys, lanes;
  Real* scores;
  int64_t stride;
  const Real* reference;
  const Real* log2_sum;
};

template <class Real>
struct MicroKernels {
  const char* name;
  void (*multiply)(const Product<Real>&);
  bool (*softmax_step)(const SoftmaxStep<Real>&);
  void (*probabilities)(const Probabilities<Real>&);
};

// In ascending order; each includes those below.
enum class InstructionSet : int { kPortable, kAvx2, kAvx512 };

// What this machine has.
InstructionSet best_instruction_set();

// For tests: uses no more than `most` from now on, in the whole process. Returns what is used then.
InstructionSet limit_instruction_set(InstructionSet most);

// The micro-kernels of the best set that is allowed.
template <class Real>
const MicroKernels<Real>& micro_kernels();

}  // namespace flash::cpu
