// The ops for CPU tensors.
#include <pthread.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>

#include "binding/build_params.h"
#include "binding/check.h"
#include "cpu/attention.h"
#include "cpu/micro_kernels.h"

namespace flash {
namespace {

// torch's thread pool does not survive a fork: a child that entered it would wait for threads that are not there. A
// forked child (a DataLoader worker, say) therefore computes on its own thread.
bool is_forked_child = false;
[[maybe_unused]] const int watch_forks = pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; });

cpu::ThreadPool torch_pool() {
  if (is_forked_child) return {};
  return {static_cast<int>(torch::stable::get_num_threads()), [](int workers, void (*task)(int, void*), void* context) {
            torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
              for (int64_t worker = begin; worker < end; ++worker) task(static_cast<int>(worker), context);
            });
          }};
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, const OptionalTensor& bias,
                                           const OptionalTensor& sink, const CallOptions& options) {
  q = with_unit_stride(q), k = with_unit_stride(k), v = with_unit_stride(v);
  const Forward call = build_forward(q, k, v, bias, sink, options);
  check_contents(call.params, bias, options);
  cpu::forward(call.params, torch_pool());
  return {call.out, call.lse, call.statistics};
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(
    Tensor q, Tensor k, Tensor v, OptionalTensor bias, OptionalTensor sink, double softmax_scale, bool causal,
    int64_t window_left, int64_t window_right, bool upper_left, double softcap, double dropout_p,
    OptionalTensor dropout_seed, OptionalTensor alibi_slopes, OptionalTensor mask, OptionalTensor cu_seqlens_q,
    OptionalTensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, OptionalTensor seqused_q,
    OptionalTensor seqused_k, OptionalTensor leftpad_q, OptionalTensor leftpad_k, bool /*deterministic*/,
    OptionalTensor block_kinds, OptionalTensor block_patterns, OptionalTensor key_lists, OptionalTensor query_lists,
    int64_t family) {
  return forward(
      q, k, v, bias, sink,
      {softmax_scale, causal,    window_left,  window_right,   upper_left,   softcap,      dropout_p, dropout_seed,
       alibi_slopes,  mask,      cu_seqlens_q, cu_seqlens_k,   max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
       leftpad_q,     leftpad_k, block_kinds,  block_patterns, key_lists,    query_lists,  family});
}

std::tuple<Tensor, Tensor, Tensor> attention_forward_plain(Tensor q, Tensor k, Tensor v, double softmax_scale,
                                                           bool causal, int64_t window_left, int64_t window_right,
                                                           bool upper_left, double softcap) {
  return forward(q, k, v, {}, {}, {softmax_scale, causal, window_left, window_right, upper_left, softcap});
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor dout, OptionalTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor statistics, OptionalTensor bias,
    OptionalTensor sink, bool wants_dq, bool wants_dk, bool wants_dv, bool wants_dbias, bool wants_dsink,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, bool upper_left, double softcap,
    double dropout_p, OptionalTensor dropout_seed, OptionalTensor alibi_slopes, OptionalTensor mask,
    OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    OptionalTensor seqused_q, OptionalTensor seqused_k, OptionalTensor leftpad_q, OptionalTensor leftpad_k,
    bool /*deterministic*/, OptionalTensor block_kinds, OptionalTensor block_patterns, OptionalTensor key_lists,
    OptionalTensor query_lists, int64_t family) {
  const CallOptions options{softmax_scale, causal,         window_left,  window_right, upper_left,   softcap,
                            dropout_p,     dropout_seed,   alibi_slopes, mask,         cu_seqlens_q, cu_seqlens_k,
                            max_seqlen_q,  max_seqlen_k,   seqused_q,    seqused_k,    leftpad_q,    leftpad_k,
                            block_kinds,   block_patterns, key_lists,    query_lists,  family};
  q = with_unit_stride(q), k = with_unit_stride(k), v = with_unit_stride(v), dout = with_unit_stride(dout);
  if (dlse.has_value()) dlse = torch::stable::contiguous(*dlse);
  const Backward call = build_backward(dout, dlse, q, k, v, out, statistics, bias, sink, options,
                                       {wants_dq, wants_dk, wants_dv, wants_dbias, wants_dsink});
  check_contents(call.params, bias, options);
  cpu::backward(call.params, torch_pool());
  return {call.dq, call.dk, call.dv, call.dbias, call.dsink};
}

std::tuple<Tensor, Tensor> cpu_plan(int64_t dtype, int64_t batch, int64_t heads, int64_t heads_k, int64_t seqlen_q,
                                    int64_t seqlen_k, int64_t dim, int64_t dim_v, bool dropout, bool softcap) {
  static constexpr int64_t kSomeSeed[2] = {};
  AttentionParams shape;
  FLASH_CHECK(dtype >= 0 && dtype <= static_cast<int64_t>(DataType::kBFloat16), "dtype must be in [0, 3], is ", dtype);
  FLASH_CHECK(batch >= 0 && heads >= 0 && heads_k >= 0 && seqlen_q >= 0 && seqlen_k >= 0 && dim >= 0 && dim_v >= 0,
              "sizes must be at least 0; batch, heads, heads_k, seqlen_q, seqlen_k, dim, dim_v are ", batch, ", ",
              heads, ", ", heads_k, ", ", seqlen_q, ", ", seqlen_k, ", ", dim, ", ", dim_v);
  FLASH_CHECK(heads == 0 || (heads_k > 0 && heads % heads_k == 0), "heads_k = ", heads_k,
              " must divide heads = ", heads);
  // Bytes are counted in int64, and more than a tensor's for its workspace.
  const double rows = static_cast<double>(std::max(seqlen_q, seqlen_k)) + 1024;
  const double elements = static_cast<double>(std::max<int64_t>(batch, 1)) *
                          static_cast<double>(std::max<int64_t>(heads, 1)) * rows *
                          (static_cast<double>(std::max(dim, dim_v)) + 1024);
  FLASH_CHECK(elements < 0x1p58, "q, k and v would have up to ", elements, " elements, too many to plan for");
  shape.dtype = static_cast<DataType>(dtype);
  shape.batch = batch;
  shape.heads = heads;
  shape.heads_k = heads_k;
  shape.rows_q.rows = seqlen_q;
  shape.rows_k.rows = seqlen_k;
  shape.dim = dim;
  shape.dim_v = dim_v;
  shape.dropout.seed = dropout ? kSomeSeed : nullptr;
  shape.score.softcap = softcap ? 1 : 0;
  const cpu::Plan plan = cpu::plan(shape, torch_pool());

  using torch::headeronly::ScalarType;
  const std::array<int64_t, 5> values{plan.tile_rows, plan.tile_keys, plan.threads, plan.forward_bytes,
                                      plan.backward_bytes};
  const std::string_view name = plan.instruction_set;
  const std::array<int64_t, 1> count{static_cast<int64_t>(values.size())}, letters{static_cast<int64_t>(name.size())};
  const Tensor numbers = torch::stable::empty(count, ScalarType::Long);
  const Tensor instruction_set = torch::stable::empty(letters, ScalarType::Byte);
  std::copy(values.begin(), values.end(), static_cast<int64_t*>(numbers.data_ptr()));
  std::copy(name.begin(), name.end(), static_cast<uint8_t*>(instruction_set.data_ptr()));
  return {numbers, instruction_set};
}

int64_t cpu_limit_instruction_set(int64_t most) {
  FLASH_CHECK(most >= 0, "most must be at least 0, is ", most);
  return static_cast<int64_t>(cpu::limit_instruction_set(static_cast<cpu::InstructionSet>(most)));
}

}  // namespace
}  // namespace flash

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CompositeExplicitAutograd, m) {
  m.impl("cpu_plan", TORCH_BOX(&flash::cpu_plan));
  m.impl("cpu_limit_instruction_set", TORCH_BOX(&flash::cpu_limit_instruction_set));
}

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&flash::attention_forward));
  m.impl("attention_forward_plain", TORCH_BOX(&flash::attention_forward_plain));
  m.impl("attention_backward", TORCH_BOX(&flash::attention_backward));
}
