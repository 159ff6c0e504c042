// The seam between the tile loop and the instruction sets: everything that costs time per element of a tile is one of
// these functions. A tile keeps query rows along its lanes: S^T is [key][lane], so softmax never reduces across a
// vector, and every product of forward and backward has the one form C[row][lane] += A[row][depth] · B[depth][lane].
//
// Lanes come in panels of 16. A matrix with lanes is stored panel by panel: [panel][row][16 lanes].
#pragma once

#include <cstdint>

namespace flash::cpu {

inline constexpr int64_t kLanes = 16;  // of a panel

// C (+)= A · B.
//   A(row, k)         = a[row · a_row_stride + k / 16 · a_panel_stride + k % 16 · a_depth_stride]
//   B(k, panel, lane) = b[panel · b_panel_stride + k · b_stride + lane],   C(row, panel, lane) alike
template <class Real>
struct Product {
  int64_t rows, depth, panels;
  const Real* a;
  int64_t a_row_stride, a_depth_stride, a_panel_stride;
  const Real* b;
  int64_t b_stride, b_panel_stride;
  Real* c;
  int64_t c_stride, c_panel_stride;
  bool accumulate;
};

// One step of the online softmax over the scores of one panel (paper, Algorithm 1, lines 10 to 12): updates the running
// maximum and sum, turns the scores into exp(S - maximum), and returns in `rescale` what earlier sums and outputs must
// be multiplied by. Returns whether any lane's factor differs from 1.
template <class Real>
struct SoftmaxStep {
  int64_t keys;
  Real* scores;
  Real* row_max;
  Real* row_sum;
  Real* rescale;
};

// One panel of backward: S becomes P = exp2((S - reference) · log2 e - log2_sum), dP becomes dS = P · (keep_scale · dP -
// delta).
template <class Real>
struct GradientStep {
  int64_t keys;
  Real* scores;
  Real* gradients;
  const Real* reference;
  const Real* log2_sum;
  const Real* delta;
  Real keep_scale;
};

template <class Real>
struct MicroKernels {
  const char* name;
  void (*multiply)(const Product<Real>&);
  bool (*softmax_step)(const SoftmaxStep<Real>&);
  void (*gradient_step)(const GradientStep<Real>&);
};

// In ascending order; each includes those below.
enum class InstructionSet : int { kPortable, kAvx2, kAvx512, kAmx };

// What this machine has.
InstructionSet best_instruction_set();

// For tests: uses no more than `most` from now on, in the whole process. Returns what is used then.
InstructionSet limit_instruction_set(InstructionSet most);

// The micro-kernels of the best set that is allowed.
template <class Real>
const MicroKernels<Real>& micro_kernels();

}  // namespace flash::cpu
