// The op schemas: the only place where a signature is written.
#include <torch/csrc/stable/library.h>

// Layouts: q (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_k, dim), v (batch, seqlen_k, heads_k, dim_v);
// with cu_seqlens (total_q, heads, dim) and so on. lse (batch, heads, seqlen_q) or (heads, total_q); statistics (2,
// lse...): reference, log2 of the sum. bias and mask (batch | 1, heads | 1, rows | 1, columns | 1), of packed sequences
// with max_seqlen rows and columns. block_kinds and what follows: of a block mask, as flash_attn/block_mask.py builds
// them, all or none. family: of the GPU kernels that may serve a forward; 0 any, 1 mma_sync, 2 wgmma.
#define FLASH_ATTN_OPTIONS                                                                                   \
  "float softmax_scale, bool causal=False, int window_left=-1, int window_right=-1, bool upper_left=False, " \
  "float softcap=0, float dropout_p=0, Tensor? dropout_seed=None, Tensor? alibi_slopes=None, "               \
  "Tensor? mask=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, "         \
  "SymInt max_seqlen_k=0, Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? leftpad_q=None, "          \
  "Tensor? leftpad_k=None, bool deterministic=False, Tensor? block_kinds=None, "                             \
  "Tensor? block_patterns=None, Tensor? key_lists=None, Tensor? query_lists=None, int family=0"

STABLE_TORCH_LIBRARY(flash_attn, m) {
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sink, " FLASH_ATTN_OPTIONS
        ") -> (Tensor out, Tensor lse, Tensor statistics)");
  // The same for a call that has nothing but these options: of each argument an op costs some 0.1 µs, given or not.
  m.def(
      "attention_forward_plain(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, int window_left, "
      "int window_right, bool upper_left, float softcap) -> (Tensor out, Tensor lse, Tensor statistics)");
  // wants_*: which gradients to compute; the others come back without elements.
  m.def(
      "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor statistics, "
      "Tensor? bias, Tensor? sink, bool wants_dq, bool wants_dk, bool wants_dv, bool wants_dbias, bool "
      "wants_dsink, " FLASH_ATTN_OPTIONS ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)");
  // What a call of this shape would use on the CPU: numbers (tile rows, tile keys, threads, bytes of workspace forward,
  // backward), and the letters of the instruction set's name. dtype: 0 fp64, 1 fp32, 2 fp16, 3 bf16.
  m.def(
      "cpu_plan(int dtype, int batch, int heads, int heads_k, int seqlen_q, int seqlen_k, int dim, int dim_v, "
      "bool dropout, bool softcap) -> (Tensor numbers, Tensor instruction_set)");
  // For tests: allow no instruction set beyond this one (0 portable, 1 AVX2, 2 AVX-512, 3 AVX512-BF16, 4 AMX); returns the
  // one that is used then.
  m.def("cpu_limit_instruction_set(int most) -> int");
  // What a call would use on a GPU (dtype in the order of DataType, variant of Variant): numbers (arch, head dim, variant,
  // tile rows, tile keys, family, queries that the rows are of), or none and the letters of the reason. block_*: of a block
  // mask; 0: there is none. queries: of the longest sequence; group: query heads of a key head.
  m.def(
      "gpu_plan(int device, int dtype, int dim, int dim_v, int variant, int keys, int block_rows=0, int block_keys=0, "
      "bool has_window=False, bool reachable=True, int family=0, int queries=0, int group=1) -> (Tensor numbers, "
      "Tensor reason)");
  // Whether q, k and v lie so that wgmma kernels can read them: gpu_plan's `reachable`.
  m.def("gpu_is_reachable(Tensor q, Tensor k, Tensor v) -> bool");
  // For tests: as if GPUs had no more than this capability (10 · major + minor) and shared memory; 0 = no limit.
  m.def("gpu_limit_card(int capability, int block_shared) -> int");
  // For benchmarks: forward (csrc/gpu/wgmma/tiles.h) or backward (csrc/gpu/mma_sync/tiles.h) takes this tile of those that
  // its kernel has, and refuses if there is none; -1 = the first that fits the card.
  m.def("gpu_choose_fwd_tile(int tile) -> int");
  m.def("gpu_choose_bwd_tile(int tile) -> int");
}
