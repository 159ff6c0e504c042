// The ops for CUDA tensors: on the tensors' device, on the caller's stream, never waiting for the device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding/build_params.h"
#include "binding/check.h"
#include "gpu/dispatch.h"

namespace flash {
namespace {

static_assert(kLastFamily == static_cast<int64_t>(Family::wgmma));

// The device of a call's tensors, made current, and the caller's stream on it.
struct Here {
  int32_t device;
  std::optional<torch::stable::accelerator::DeviceGuard> guard;  // asking first costs less
  void* stream = nullptr;

  explicit Here(const Tensor& q) : device(q.get_device_index()) {
    if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  }
};

std::tuple<Tensor, Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, const OptionalTensor& bias,
                                           const OptionalTensor& sink, const CallOptions& options) {
  const Here here(q);
  q = with_unit_stride(q), k = with_unit_stride(k), v = with_unit_stride(v);
  const Forward call = build_forward(q, k, v, bias, sink, options);
  const FwdParams& params = call.params;
  const bool packed = params.rows_q.cu_seqlens.given();
  std::vector<Tensor> memory;  // until the launch is on the stream
  const auto allocate_bytes = [&](int64_t bytes) {
    memory.push_back(allocate(q, {divide_up(bytes, 4)}, torch::headeronly::ScalarType::Int, false));
    return memory.back().data_ptr();
  };
  const std::string problem = gpu::forward(params, packed ? options.max_seqlen_q : params.rows_q.rows,
                                           packed ? options.max_seqlen_k : params.rows_k.rows, here.device, here.stream,
                                           static_cast<Family>(options.family), allocate_bytes);
  FLASH_CHECK(problem.empty(), "attention_forward: ", problem);
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
    bool deterministic, OptionalTensor block_kinds, OptionalTensor block_patterns, OptionalTensor key_lists,
    OptionalTensor query_lists, int64_t family) {
  using torch::headeronly::ScalarType;
  const CallOptions options{softmax_scale, causal,         window_left,  window_right, upper_left,   softcap,
                            dropout_p,     dropout_seed,   alibi_slopes, mask,         cu_seqlens_q, cu_seqlens_k,
                            max_seqlen_q,  max_seqlen_k,   seqused_q,    seqused_k,    leftpad_q,    leftpad_k,
                            block_kinds,   block_patterns, key_lists,    query_lists,  family};
  const Here here(q);
  q = with_unit_stride(q), k = with_unit_stride(k), v = with_unit_stride(v), dout = with_unit_stride(dout);
  if (dlse.has_value()) dlse = torch::stable::contiguous(*dlse);
  const Backward call = build_backward(dout, dlse, q, k, v, out, statistics, bias, sink, options,
                                       {wants_dq, wants_dk, wants_dv, wants_dbias, wants_dsink});
  const BwdParams& params = call.params;
  FLASH_CHECK(!params.block_mask.given() || !wants_dq || !deterministic,
              "attention_backward: under a block mask the kernels add to dq in any order; call it outside of "
              "torch.compile, where PyTorch code takes their place");
  const bool packed = params.rows_q.cu_seqlens.given();
  gpu::BwdPlan plan =
      gpu::plan_backward(params, packed ? max_seqlen_q : params.rows_q.rows, packed ? max_seqlen_k : params.rows_k.rows,
                         here.device, wants_dq && deterministic);
  FLASH_CHECK(plan.reason.empty(), "attention_backward: ", plan.reason);
  const bool sums_bias = wants_dbias && (params.bias_batch == 1 || params.bias_heads == 1 || params.bias_rows == 1 ||
                                         params.bias_columns == 1);
  FLASH_CHECK(
      !deterministic || !sums_bias,
      "attention_backward: the kernels add the gradient of a bias that broadcasts in any order; expand the bias, "
      "or call it outside of torch.compile, where PyTorch code takes its place");

  BwdLaunch& launch = plan.launch;
  const Tensor numbers = allocate(q, {plan.memory.numbers}, ScalarType::Float, false);
  launch.numbers = static_cast<float*>(numbers.data_ptr());
  const Tensor dq_sum = allocate(q, {wants_dq ? plan.memory.dq_sum : 0}, ScalarType::Float, false);
  if (wants_dq) launch.dq_sum = static_cast<float*>(dq_sum.data_ptr());
  Tensor steps;  // of a block mask
  if (params.block_mask.given()) {
    steps = allocate(q, {divide_up(launch.tiles.bytes(), 4)}, ScalarType::Int, false);
    launch.tiles.lie_at(steps.data_ptr());
  }
  const Tensor turns = allocate(q, {wants_dq && deterministic ? plan.memory.turns : 0}, ScalarType::Int, true);
  if (turns.numel() > 0) launch.turns = static_cast<int*>(turns.data_ptr());
  Tensor dbias = call.dbias;
  const bool rounds_dbias = wants_dbias && params.dbias.dtype != DataType::kFloat32;
  Tensor dbias_sum =
      rounds_dbias ? allocate(q, {dbias.sizes().begin(), dbias.sizes().end()}, ScalarType::Float, false) : dbias;
  if (wants_dbias) {
    torch::stable::zero_(dbias_sum);
    launch.dbias_sum = params.dbias;
    launch.dbias_sum.data = dbias_sum.data_ptr();
  }
  const std::string problem = gpu::backward(params, plan, here.stream);
  FLASH_CHECK(problem.empty(), "attention_backward: ", problem);
  if (rounds_dbias) torch::stable::copy_(dbias, dbias_sum);
  return {call.dq, call.dk, call.dv, dbias, call.dsink};
}

Tensor letters(const std::string& text) {
  const std::array<int64_t, 1> size{static_cast<int64_t>(text.size())};
  const Tensor result = torch::stable::empty(size, torch::headeronly::ScalarType::Byte);
  std::copy(text.begin(), text.end(), static_cast<uint8_t*>(result.data_ptr()));
  return result;
}

std::tuple<Tensor, Tensor> gpu_plan(int64_t device, int64_t dtype, int64_t dim, int64_t dim_v, int64_t variant,
                                    int64_t keys, int64_t block_rows, int64_t block_keys, bool has_window,
                                    bool reachable, int64_t family, int64_t queries, int64_t group) {
  FLASH_CHECK(dtype >= 0 && dtype <= static_cast<int64_t>(DataType::kBFloat16), "dtype must be in [0, 3], is ", dtype);
  FLASH_CHECK(variant >= 0 && variant <= 3, "variant must be in [0, 3], is ", variant);
  const gpu::Plan plan =
      gpu::plan({static_cast<DataType>(dtype), dim, dim_v, static_cast<Variant>(variant), keys, block_rows, block_keys,
                 has_window, reachable, static_cast<Family>(checked_family(family)), queries, group},
                static_cast<int>(device));
  std::array<int64_t, 7> values{};
  if (plan.choice) {
    const KernelKey key = plan.choice->key;
    const TileSize tile = fwd_tile_size(*plan.choice, group);
    values = {
        static_cast<int64_t>(key.arch),       key.head_dim, static_cast<int64_t>(key.variant), tile.rows, tile.keys,
        static_cast<int64_t>(family_of(key)), tile.queries};
  }
  const std::array<int64_t, 1> count{plan.choice ? static_cast<int64_t>(values.size()) : 0};
  const Tensor numbers = torch::stable::empty(count, torch::headeronly::ScalarType::Long);
  std::copy(values.begin(), values.begin() + count[0], static_cast<int64_t*>(numbers.data_ptr()));
  return {numbers, letters(plan.reason)};
}

// What the kernels would read: x, or the copy that with_unit_stride makes of it.
Operand operand_of(const Tensor& x) {
  const int64_t d = x.dim() - 1, row = x.size(d - 1) * x.size(d);
  if (x.size(d) > 1 && x.stride(d) != 1) return {nullptr, x.size(d - 2) * row, row, x.size(d)};
  return {x.data_ptr(), d == 3 ? x.stride(0) : 0, x.stride(d - 2), x.stride(d - 1)};
}

bool gpu_is_reachable(Tensor q, Tensor k, Tensor v) {
  for (const Tensor* x : {&q, &k, &v}) {
    const int64_t d = x->dim() - 1;
    FLASH_CHECK(d == 2 || d == 3, "q, k and v must have 3 or 4 dimensions, one has ", d + 1);
    if (!is_reachable_by_tma(operand_of(*x), d == 3 ? x->size(0) : 1, x->size(d - 2), x->size(d - 1), x->size(d)))
      return false;
  }
  return true;
}

int64_t gpu_limit_card(int64_t capability, int64_t block_shared) {
  gpu::limit_card(static_cast<int>(capability), static_cast<int>(block_shared));
  return capability;
}

int64_t checked_tile(int64_t tile) {
  FLASH_CHECK(tile >= -1 && tile < 1000, "tile must be in [-1, 1000), is ", tile);
  return tile;
}

int64_t gpu_choose_fwd_tile(int64_t tile) {
  gpu::choose_fwd_tile_by_hand(static_cast<int>(checked_tile(tile)));
  return tile;
}

int64_t gpu_choose_bwd_tile(int64_t tile) {
  gpu::choose_bwd_tile_by_hand(static_cast<int>(checked_tile(tile)));
  return tile;
}

}  // namespace
}  // namespace flash

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CompositeExplicitAutograd, m) {
  m.impl("gpu_plan", TORCH_BOX(&flash::gpu_plan));
  m.impl("gpu_limit_card", TORCH_BOX(&flash::gpu_limit_card));
  m.impl("gpu_choose_fwd_tile", TORCH_BOX(&flash::gpu_choose_fwd_tile));
  m.impl("gpu_choose_bwd_tile", TORCH_BOX(&flash::gpu_choose_bwd_tile));
}

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&flash::attention_forward));
  m.impl("attention_backward", TORCH_BOX(&flash::attention_backward));
  m.impl("gpu_is_reachable", TORCH_BOX(&flash::gpu_is_reachable));
  m.impl("attention_forward_plain", TORCH_BOX(&flash::attention_forward_plain));
}
