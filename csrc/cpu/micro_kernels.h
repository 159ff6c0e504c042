// The seam between the tile loop and the instruction sets: everything that costs time per element of a tile is one of
// these functions. A tile keeps query rows along its lanes: S^T is [key][lane], so softmax never reduces across a
// vector, and every product of forward and backward has the one form C[row][lane] += A[row][depth] · B[depth][lane].
//
// Lanes come in panels of 16. A matrix with lanes is stored panel by panel: [panel][row][16 lanes].
#pragma once

#include <cstdint>

#include "common/params.h"

namespace flash::cpu {

inline constexpr int64_t kLanes = 16;  // of a panel

// Rows of C that a micro-kernel computes together; the rows of A lie in blocks of as many.
inline constexpr int64_t kRowBlock = 6;

// A(row, k) = data[row / 6 · block_stride + row % 6 · row_stride + k / 16 · panel_stride + k % 16 · depth_stride]
template <class Real>
struct RowOperand {
  const Real* data;
  int64_t block_stride, row_stride, depth_stride, panel_stride;
};

// C = A · B or C + A · B, times `factor`.
//   B(k, panel, lane) = b[panel · b_panel_stride + k · b_stride + lane],   C(row, panel, lane) alike
template <class Real>
struct Product {
  int64_t rows, depth, panels;
  RowOperand<Real> a;
  const Real* b;
  int64_t b_stride, b_panel_stride;
  Real* c;
  int64_t c_stride, c_panel_stride;
  bool accumulate;
  Real factor = 1;
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

// One panel of backward: S becomes P = exp2((S - reference) · log2 e - log2_sum), dP becomes
// dS = P · (keep_scale · dP - delta), and 0 where P is 0: a hidden key's dP may be NaN.
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

// What belongs to a panel in a tensor of rows and keys, the elements of a row side by side.
struct PanelRows {
  DataType dtype;
  const void* data;
  int64_t row_stride, rows, keys;
};
struct PanelBytes {
  const uint8_t* data;
  int64_t row_stride, rows, keys;
};

// The keys that each lane sees, counted from the panel's first.
struct KeyBounds {
  int32_t begin[kLanes], end[kLanes];
};

// A panel's place in the random numbers of common/dropout.h: its first row is a multiple of 16, `query_group` is that
// row's; `phase` is that of these rows and the first keys of all, `phase_step` what each block of keys adds.
struct DropoutPanel {
  uint32_t key0, key1, salt2, salt3, threshold, phase, phase_step;
  uint64_t query_group;
  int64_t first_key, keys;
};

template <class Real>
struct MicroKernels {
  const char* name;
  void (*multiply)(const Product<Real>&);
  bool (*softmax_step)(const SoftmaxStep<Real>&);
  void (*gradient_step)(const GradientStep<Real>&);

  // Elements of any type to Reals, and back, rounded to nearest, ties to even.
  void (*load)(DataType, const void* from, int64_t count, Real* to);
  void (*store)(DataType, const Real* from, int64_t count, void* to);
  // out[c][r] = factor · in[r][c]
  void (*transpose)(const Real* in, int64_t in_stride, int64_t rows, int64_t columns, Real factor, Real* out,
                    int64_t out_stride);
  // x[row][lane] *= factor[lane]; a factor of 0 gives 0 whatever x holds.
  void (*scale_lanes)(int64_t rows, const Real* factor, Real* x);

  // The first three begin with s = scale · s.
  // s = softcap · tanh(s / softcap); `derivative` (may be null) becomes 1 - tanh². count: a multiple of kLanes.
  void (*softcap)(int64_t count, Real scale, Real softcap, Real* scores, Real* derivative);
  // s[key][lane] -= slope · |distance + lane - key|, which is below 2^31.
  void (*add_alibi)(int64_t keys, Real scale, Real slope, int64_t distance, Real* scores);
  // -inf hides a key, whatever its score is.
  void (*add_bias)(const PanelRows&, Real scale, Real* scores);
  // s = -inf where the byte is 0; for keys [first, last), where a lane does not see them.
  void (*hide_masked)(const PanelBytes&, Real* scores);
  void (*hide_outside)(const KeyBounds&, int64_t first, int64_t last, Real* scores);
  // keep[key][lane] = whether dropout keeps the element; x = 0 where it does not.
  void (*dropout_panel)(const DropoutPanel&, uint8_t* keep);
  void (*drop)(const uint8_t* keep, int64_t keys, Real* x);
};

// ---- bf16 operands with fp32 sums -----------------------------------------------------------------------------------

using Bf16 = uint16_t;

inline constexpr int64_t kBlock =
    512;  // elements of a block: 16 rows × 32 of depth, or 16 pairs of depth × 16 lanes × 2

// C (+)= A · B in blocks. C as in Product, with whole blocks of rows.
//   A: [block of 16 rows][block of depth][16][32];  B: [panel][block of depth][16 pairs][16 lanes][2]
struct Bf16Product {
  int64_t row_blocks, depth_blocks, panels;
  const Bf16* a;
  int64_t a_row_stride;  // between blocks of rows
  const Bf16* b;
  int64_t b_panel_stride;
  float* c;
  int64_t c_panel_stride;
  bool accumulate;
};

// Rows to be packed; those outside [first, end) are not read and count as zero.
struct Bf16Rows {
  const Bf16* data;
  int64_t stride, rows, first, end, dim;
};

struct PanelPart {
  int64_t panel, first_key, keys;
};

// S = K · Q and its weights in one: softmax_step of each panel, but it gives up where a row's reference would have to
// move.
struct Bf16Weights {
  int64_t keys, depth_blocks;  // keys: a multiple of 32
  int panels;                  // 1 or 2
  const Bf16* k;
  int64_t k_row_stride;
  const Bf16* q;
  int64_t q_panel_stride;
  // From scores [key][lane] of some keys of a panel to what `scale` makes logits of; or null.
  void (*adjust)(const void* context, const PanelPart&, float* scores);
  const void* context;
  float scale;
  float *row_max, *row_sum;  // [panel][lane]
  Bf16* weights;
  int64_t weights_panel_stride;
};

// Where a panel's P and dS go: as A, row = key, depth = query (`row_stride` between blocks of keys), and dS as B.
struct Bf16Gradients {
  Bf16 *p_rows, *ds_rows;
  int64_t row_stride;
  Bf16* ds_pairs;
};

struct Bf16Kernels {
  const char* name;
  uint32_t (*begin)();  // before and after a thread's work; `end` gets what `begin` gave
  void (*end)(uint32_t);
  void (*multiply)(const Bf16Product&);
  // A of X and of X^T, B of X^T and of X, for rows X.
  void (*pack_a_rows)(const Bf16Rows&, Bf16*);
  void (*pack_a_columns)(const Bf16Rows&, Bf16*);
  void (*pack_b_columns)(const Bf16Rows&, Bf16*);
  void (*pack_b_rows)(const Bf16Rows&, Bf16*);
  // Rows of a tensor: row `lane` = factor[lane] · x[d][lane], of one panel; row r = factor · x[panel of dims][r][16]. A
  // factor of 0 gives 0 whatever x holds.
  void (*unpack_lanes)(const float* x, const float* factor, int64_t rows, int64_t dim, Bf16* out, int64_t stride);
  void (*unpack_rows)(const float* x, int64_t panel_stride, float factor, int64_t rows, int64_t dim, Bf16* out,
                      int64_t stride);
  // softmax_step of scale · scores, which stay; the weights become B.
  bool (*softmax_step)(const SoftmaxStep<float>&, float scale, Bf16* weights);
  // Whether it was done; if not, nothing has changed but the weights.
  bool (*scores_to_weights)(const Bf16Weights&);
  // gradient_step of scale · scores, which stay, as dP does.
  void (*gradient_step)(const GradientStep<float>&, float scale, const Bf16Gradients&);
  void (*drop)(const uint8_t* keep, int64_t keys, Bf16* weights);
  // Only the conversion; null for zeros.
  void (*store_gradients)(int64_t keys, const float* p, const float* ds, const Bf16Gradients&);
};

// ---- The choice -----------------------------------------------------------------------------------------------------

// In ascending order; each includes those below.
enum class InstructionSet : int { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// The best that this machine has and gains by.
InstructionSet best_instruction_set();

// For tests: uses no more than `most` from now on, in the whole process. Returns what is used then.
InstructionSet limit_instruction_set(InstructionSet most);

// The micro-kernels of the best set that is allowed.
template <class Real>
const MicroKernels<Real>& micro_kernels();

// Those for bf16, or null where that is converted to fp32.
const Bf16Kernels* bf16_kernels();

}  // namespace flash::cpu
