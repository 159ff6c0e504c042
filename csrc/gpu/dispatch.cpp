#include "gpu/dispatch.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <mutex>

namespace flash::gpu {
namespace {

using FwdFunction = int (*)(const FwdParams&, const FwdLaunch&, void*);

// Every line of the table that this build selected.
constexpr std::array kFwdKeys{
#define FWD(family, arch, dtype, head_dim, variant) KernelKey{Arch::arch, table::dtype, head_dim, Variant::variant},
#include "selected_kernels.def"
#undef FWD
};
constexpr std::array<FwdFunction, kFwdKeys.size()> kFwdFunctions{
#define FWD(family, arch, dtype, head_dim, variant) \
  &family::launch_fwd<KernelKey{Arch::arch, table::dtype, head_dim, Variant::variant}>,
#include "selected_kernels.def"
#undef FWD
};

std::atomic<int> capability_limit = 0, shared_limit = 0;

int attribute(cudaDeviceAttr what, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, what, device);
  return value;
}

// Asked once for each device: attributes never change.
Card card_of(int device) {
  constexpr int kCached = 64;
  static std::array<Card, kCached> cards;
  static std::array<std::once_flag, kCached> once;
  const auto ask = [device] {
    return Card{attribute(cudaDevAttrComputeCapabilityMajor, device) * 10 +
                    attribute(cudaDevAttrComputeCapabilityMinor, device),
                attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
                attribute(cudaDevAttrL2CacheSize, device)};
  };
  Card card;
  if (device < kCached) {
    std::call_once(once[device], [&] { cards[device] = ask(); });
    card = cards[device];
  } else {
    card = ask();
  }
  if (const int limit = capability_limit; limit > 0) card.capability = std::min(card.capability, limit);
  if (const int limit = shared_limit; limit > 0) {
    card.block_shared = std::min(card.block_shared, limit);
    card.sm_shared = std::min(card.sm_shared, limit + kReservedShared);
  }
  return card;
}

std::string name_of(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat64:
      return "fp64";
    case DataType::kFloat32:
      return "fp32";
    case DataType::kFloat16:
      return "fp16";
    default:
      return "bf16";
  }
}

std::string describe(int device, const Card& card) {
  cudaDeviceProp properties;
  const bool known = cudaGetDeviceProperties(&properties, device) == cudaSuccess;
  return std::string(known ? properties.name : "the GPU") + " (compute capability " +
         std::to_string(card.capability / 10) + "." + std::to_string(card.capability % 10) + ", " +
         std::to_string(card.block_shared / 1024) + " KB of shared memory)";
}

}  // namespace

Plan plan(const Request& request, int device) {
  const Card card = card_of(device);
  if (std::optional<Choice> choice = choose_kernel(kFwdKeys, request, card)) return {choice, ""};
  const int64_t dim = std::max(request.dim, request.dim_v);
  return {std::nullopt, "no kernel for " + name_of(request.dtype) + " and head dim " + std::to_string(dim) + " on " +
                            describe(device, card)};
}

std::string forward(const FwdParams& params, int64_t max_rows_q, int64_t max_rows_k, int device, void* stream) {
  const Plan found = plan({params.dtype, params.dim, params.dim_v, variant_of(params), max_rows_k}, device);
  if (!found.choice) return found.reason;
  auto launch = make_launch(params, *found.choice, max_rows_q, card_of(device).l2_bytes);
  if (!launch) return "more rows or heads than one launch can cover";
  if (launch->blocks == 0) return "";
  launch->device = device;
  const auto key = std::find(kFwdKeys.begin(), kFwdKeys.end(), found.choice->key);
  const int error = kFwdFunctions[key - kFwdKeys.begin()](params, *launch, stream);
  if (error == cudaSuccess) return "";
  return std::string("the launch failed: ") + cudaGetErrorString(static_cast<cudaError_t>(error));
}

void limit_card(int capability, int block_shared) {
  capability_limit = capability;
  shared_limit = block_shared;
}

}  // namespace flash::gpu
