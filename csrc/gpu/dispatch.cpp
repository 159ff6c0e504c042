#include "gpu/dispatch.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <mutex>
#include <span>

namespace flash::gpu {
namespace {

using FwdFunction = int (*)(const FwdParams&, const FwdLaunch&, void*);
using BwdFunction = int (*)(const BwdParams&, const BwdLaunch&, void*);

// Every line of the table that this build selected.
constexpr KernelKey kFwdTable[] = {
#define FWD(family, arch, dtype, head_dim, variant) KernelKey{Arch::arch, table::dtype, head_dim, Variant::variant},
#define BWD(family, arch, dtype, head_dim, variant)
#include "selected_kernels.def"
#undef FWD
#undef BWD
    {}};  // so that there is one
constexpr KernelKey kBwdTable[] = {
#define FWD(family, arch, dtype, head_dim, variant)
#define BWD(family, arch, dtype, head_dim, variant) KernelKey{Arch::arch, table::dtype, head_dim, Variant::variant},
#include "selected_kernels.def"
#undef FWD
#undef BWD
    {}};
constexpr std::span kFwdKeys(kFwdTable, std::size(kFwdTable) - 1), kBwdKeys(kBwdTable, std::size(kBwdTable) - 1);
constexpr FwdFunction kFwdFunctions[] = {
#define FWD(family, arch, dtype, head_dim, variant) \
  &family::launch_fwd<KernelKey{Arch::arch, table::dtype, head_dim, Variant::variant}>,
#define BWD(family, arch, dtype, head_dim, variant)
#include "selected_kernels.def"
#undef FWD
#undef BWD
    nullptr};
constexpr BwdFunction kBwdFunctions[] = {
#define FWD(family, arch, dtype, head_dim, variant)
#define BWD(family, arch, dtype, head_dim, variant) \
  &family::launch_bwd<KernelKey{Arch::arch, table::dtype, head_dim, Variant::variant}>,
#include "selected_kernels.def"
#undef FWD
#undef BWD
    nullptr};

std::atomic<int> capability_limit = 0, shared_limit = 0, fwd_tile_by_hand = -1, bwd_tile_by_hand = -1;

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
                attribute(cudaDevAttrL2CacheSize, device), attribute(cudaDevAttrMultiProcessorCount, device)};
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

namespace {

std::string no_kernel(const char* what, const Request& request, int device, const Card& card) {
  return std::string("no ") + what + "kernel for " + name_of(request.dtype) + " and head dim " +
         std::to_string(std::max(request.dim, request.dim_v)) + " on " + describe(device, card);
}

std::string no_fwd_kernel(const Request& request, int device, const Card& card) {
  if (request.family != Family::wgmma) return no_kernel("", request, device, card);
  if (const char* refusal = refusal_of_wgmma(request, card))
    return refusal + (card.capability == 90 ? std::string() : ", not on " + describe(device, card));
  Request without_blocks = request;
  without_blocks.block_rows = without_blocks.block_keys = 0;
  if (request.block_rows > 0 && choose_kernel(kFwdKeys, without_blocks, card))
    return "no tile of the wgmma kernels lies in one block of " + std::to_string(request.block_rows) + " × " +
           std::to_string(request.block_keys);
  return no_kernel("wgmma ", request, device, card);
}

std::string no_tile(int tile, const char* what) {
  return "no tile " + std::to_string(tile) + " of the chosen " + what + "kernel fits the card and the call";
}

constexpr const char* kTooMany = "more rows or heads than one launch can cover";

std::string describe_error(int error) {
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // said here, it is not to be found by whoever launches next
  return std::string("the launch failed: ") + cudaGetErrorString(static_cast<cudaError_t>(error));
}

// Kernels count the tiles that they have taken. Launches on a stream, one after the other, can share the kernel's own
// counters; a graph may be replayed on any stream, beside others, and takes its counters along.
int give_counter(FwdLaunch& launch, void* stream, const Allocate& allocate) {
  const auto of_call = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(of_call, &status)) return error;
  if (status == cudaStreamCaptureStatusNone) return cudaSuccess;
  constexpr size_t kBytes = 2 * sizeof(uint32_t);
  launch.counter = static_cast<uint32_t*>(allocate(kBytes));
  return cudaMemsetAsync(launch.counter, 0, kBytes, of_call);
}

template <class Function>
Function function_of(KernelKey key, std::span<const KernelKey> keys, const Function* functions) {
  return functions[std::find(keys.begin(), keys.end(), key) - keys.begin()];
}

}  // namespace

Plan plan(const Request& request, int device) {
  const Card card = card_of(device);
  if (std::optional<Choice> choice = choose_kernel(kFwdKeys, request, card)) return {choice, ""};
  return {std::nullopt, no_fwd_kernel(request, device, card)};
}

std::string forward(const FwdParams& params, int64_t max_rows_q, int64_t max_rows_k, int device, void* stream,
                    Family family, const Allocate& allocate) {
  const Request request = request_of(params, variant_of(params), max_rows_q, max_rows_k, family);
  Plan found = plan(request, device);
  if (!found.choice) return found.reason;
  const Card card = card_of(device);
  if (const int tile = fwd_tile_by_hand; tile >= 0) {
    if (family_of(found.choice->key) != Family::wgmma || !wgmma_tile_fits(found.choice->key, tile, card, request))
      return no_tile(tile, "");
    found.choice->tile = tile;
  }
  auto launch = make_launch(params, *found.choice, max_rows_q, max_rows_k, card.l2_bytes);
  if (!launch) return kTooMany;
  if (launch->blocks == 0) return "";
  launch->device = device;
  launch->sm_count = card.sm_count;
  if (params.block_mask.given()) launch->tiles.lie_at(allocate(launch->tiles.bytes()));
  if (family_of(found.choice->key) == Family::wgmma)
    if (const int error = give_counter(*launch, stream, allocate)) return describe_error(error);
  return describe_error(function_of(found.choice->key, kFwdKeys, kFwdFunctions)(params, *launch, stream));
}

BwdPlan plan_backward(const BwdParams& params, int64_t max_rows_q, int64_t max_rows_k, int device, bool takes_turns) {
  const Card card = card_of(device);
  const Request request = request_of(params, bwd_variant_of(params), max_rows_q, max_rows_k);
  std::optional<Choice> choice = choose_kernel(kBwdKeys, request, card, choose_bwd_tile);
  if (!choice)
    return {choice,
            no_kernel("backward ", request, device, card) + (params.block_mask.given() ? " under a block mask" : ""),
            {},
            {}};
  if (const int tile = bwd_tile_by_hand; tile >= 0) {
    if (!bwd_tile_fits(choice->key, tile, card, request)) return {choice, no_tile(tile, "backward "), {}, {}};
    choice->tile = tile;
  }
  auto launch = make_bwd_launch(params, *choice, max_rows_q, max_rows_k, card.l2_bytes, takes_turns);
  if (!launch) return {choice, kTooMany, {}, {}};
  launch->device = device;
  return {choice, "", *launch, bwd_memory(*launch, params, *choice)};
}

std::string backward(const BwdParams& params, const BwdPlan& plan, void* stream) {
  return describe_error(function_of(plan.choice->key, kBwdKeys, kBwdFunctions)(params, plan.launch, stream));
}

void choose_fwd_tile_by_hand(int tile) { fwd_tile_by_hand = tile; }

void choose_bwd_tile_by_hand(int tile) { bwd_tile_by_hand = tile; }

void limit_card(int capability, int block_shared) {
  capability_limit = capability;
  shared_limit = block_shared;
}

}  // namespace flash::gpu
