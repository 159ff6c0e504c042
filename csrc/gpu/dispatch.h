// The GPU backend: what the binding calls.
#pragma once

#include <functional>
#include <string>

#include "common/params.h"
#include "gpu/plan.h"

namespace flash::gpu {

// What serves a call, or in a sentence why nothing does.
struct Plan {
  std::optional<Choice> choice;
  std::string reason;
};

// `device` is a CUDA ordinal.
Plan plan(const Request& request, int device);

// Writes out, lse and the statistics of every real row; rows outside the sequences are left as they are. Returns what
// went wrong, or nothing. `max_rows_*`: of the longest sequence. The device must be current; nothing waits for it.
// `family`: the kernels that may serve it. `allocate`: memory that lasts until the launch has run.
using Allocate = std::function<void*(int64_t bytes)>;
std::string forward(const FwdParams& params, int64_t max_rows_q, int64_t max_rows_k, int device, void* stream,
                    Family family, const Allocate& allocate);

// The launch of a backward, and the memory that it needs; or in a sentence why there is none.
struct BwdPlan {
  std::optional<Choice> choice;
  std::string reason;
  BwdLaunch launch;
  BwdMemory memory;
};

// `takes_turns`: dQ is to repeat bit for bit.
BwdPlan plan_backward(const BwdParams& params, int64_t max_rows_q, int64_t max_rows_k, int device, bool takes_turns);

// Writes the gradients of every real row; launch.numbers and the sums must have their memory by now. Returns what went
// wrong, or nothing.
std::string backward(const BwdParams& params, const BwdPlan& plan, void* stream);

// For benchmarks: forward (of wgmma) or backward takes this tile of each kernel's, or the first that fits (-1).
void choose_fwd_tile_by_hand(int tile);
void choose_bwd_tile_by_hand(int tile);

// For tests: as if the card had no more than this capability and shared memory. 0: no limit.
void limit_card(int capability, int block_shared);

}  // namespace flash::gpu
