// Forward with wgmma: Algorithm 1 of Dao, Fu, Ermon, Rudra, Ré, "FlashAttention" (2022), on Hopper.
//
// Grid: one CTA an SM, whose teams of warpgroups take tiles of query rows from a counter until there are none. Of warpgroup
// 0, one thread for each team finds the next tile and its key blocks, and one warp has the copy engine fill rings of buffers.
// Each other warpgroup owns 64 rows with S, P and O in registers. QKᵀ of a block is asked for together with P V of the block
// before, and the softmax of one warpgroup runs beside the products of the others: they take turns in asking.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "gpu/passes/block_tiles.cuh"
#include "gpu/ptx/barrier.cuh"
#include "gpu/ptx/wgmma.cuh"
#include "gpu/tile/epilogue.cuh"
#include "gpu/tile/launch.cuh"
#include "gpu/tile/score.cuh"
#include "gpu/wgmma/producer.cuh"
#include "gpu/wgmma/softmax.cuh"

namespace flash::wgmma {

// What a consumer warp keeps from tile to tile.
template <class F>
struct Consumer {
  const TeamMemory<F>& memory;
  int team, warpgroup, warp, lane;  // of the CTA; of the team; of the warpgroup; of the warp
  Messages<F>& messages = memory.messages;
  Ring<F::kStagesQ> q;
  Ring<F::kStages> k, v;
  Ring<2> slot;

  // One lane of each warp says that the warp needs a buffer no longer.
  __device__ __forceinline__ void release(const uint64_t& empty) const {
    ptx::mbarrier_arrive_of_warp(memory.address(empty), lane);
  }
  __device__ __forceinline__ void wait(const uint64_t& full, int parity) const {
    ptx::mbarrier_wait(memory.address(full), parity);
  }

  __device__ __forceinline__ void release_tile() {
    __syncwarp();
    release(messages.tile_empty[slot.stage]);
    slot.advance();
  }

  // Warpgroups ask for products one after the other.
  __device__ __forceinline__ void wait_for_turn() const { ptx::barrier_sync(turn_of(warpgroup), 256); }
  __device__ __forceinline__ void end_turn() const {
    ptx::barrier_arrive(turn_of((warpgroup + 1) % F::kWarpgroups), 256);
  }
  __device__ __forceinline__ int turn_of(int other) const {
    return 1 + (F::kTeams == 1 ? 0 : team * F::kWarpgroups) + other;
  }
};

// Asks for S = Q Kᵀ.
template <class F>
__device__ __forceinline__ void multiply_score(float (&rS)[F::kN][4], uint32_t q, uint32_t k) {
#pragma unroll
  for (int depth = 0; depth < F::kDepth; ++depth) {
    const int panel = depth / 4, step = depth % 4 * 2;  // 16 columns are 32 bytes
    ptx::wgmma_rows<F::kKey.dtype, F::kKeys>(rS, q + panel * (F::kPanelBytesQ >> 4) + step,
                                             k + panel * (F::kPanelBytesKV >> 4) + step, depth > 0);
  }
}

// Asks for O += P V.
template <class F>
__device__ __forceinline__ void multiply_value(float (&rO)[F::kO][4], const uint32_t (&rP)[F::kValueDepth][4],
                                               uint32_t v) {
#pragma unroll
  for (int depth = 0; depth < F::kValueDepth; ++depth)
    ptx::wgmma_columns<F::kKey.dtype, F::kHeadDim>(rO, rP[depth], v + depth * (16 * 128 >> 4), true);
}

// The sink joins the sum, and the statistics are stored. `factor`: what normalises O's two rows.
template <class F>
__device__ __forceinline__ void finish_rows(float (&factor)[2], const FwdParams& p, const FwdLaunch& launch,
                                            const TileWork& work, const LazySoftmax& softmax, ScoreUnit unit,
                                            const QueryOfRow (&own_rows)[2], int lane) {
  float sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = row_sum_of(softmax.row_sum[0][half]);
    factor[half] = sum[half] == 0 ? 0.f : (F::kDropout ? launch.keep_scale : 1.f) * ptx::reciprocal(sum[half]);
  }
  // Lanes 0 and 1 of the four that share two rows have one each.
  const int half = lane & 1;
  const float reference = half == 0 ? softmax.reference[0][0] : softmax.reference[0][1];
  const QueryOfRow row = half == 0 ? own_rows[0] : own_rows[1];
  const float sink = p.sink == nullptr ? -INFINITY : static_cast<const float*>(p.sink)[work.head + row.head];
  const FinishedRow finished = finish_row(reference, half == 0 ? sum[0] : sum[1], sink, unit);
  if (p.sink != nullptr) {
    const float normalise = finished.normalise * (F::kDropout ? launch.keep_scale : 1.f);
    factor[0] = __shfl_sync(~0u, normalise, lane & ~1), factor[1] = __shfl_sync(~0u, normalise, lane | 1);
  }
  if (lane % 4 < 2 && work.is_there(row)) work.store_statistics(p, row, finished.statistics);
}

template <class F>
__device__ __forceinline__ void store_output(const FwdParams& p, const TileWork& work, const float (&rO)[F::kO][4],
                                             const float (&factor)[2], const QueryOfRow (&own_rows)[2], int lane) {
  uint16_t* const first = work.out_of(p, own_rows[0]);
  const auto row_of = [&](int half) {
    return F::kPacksHeads ? work.out_of(p, own_rows[half]) : first + 8 * half * p.out.row_stride;
  };
  store_fragments<F::kKey.dtype>(static_cast<int>(p.dim_v), rO, factor, lane, row_of,
                                 [&](int half) { return work.is_there(own_rows[half]); });
}

// A tile whose rows see no key, or whose lengths cannot be.
template <class F>
__device__ __forceinline__ void store_special(const FwdParams& p, const FwdLaunch& launch, const TileWork& work,
                                              ScoreUnit unit, int thread, int lane) {
  if (work.state == TileWork::kImpossible) {
    const int heads = F::kPacksHeads ? static_cast<int>(launch.group.value) : 1;
#pragma unroll 1
    for (int head = work.head; head < work.head + heads; ++head) store_nan(p, work.batch, head, thread, F::kConsumers);
    return;
  }
#pragma unroll 1
  for (int i = thread / 32; i < F::kRows; i += F::kConsumers / 32) {
    const QueryOfRow row = query_of_row<F>(launch, i / 64, i % 64);
    if (!work.is_there(row)) continue;
    uint16_t* out = work.out_of(p, row);
#pragma unroll 1
    for (int d = lane; d < p.dim_v; d += 32) out[d] = 0;
    const float sink = p.sink == nullptr ? -INFINITY : static_cast<const float*>(p.sink)[work.head + row.head];
    if (lane == 0) work.store_statistics(p, row, finish_row(-INFINITY, 0, sink, unit).statistics);
  }
}

template <class F>
__device__ __forceinline__ void consume(Consumer<F>& self, const FwdParams& p, const FwdLaunch& launch) {
  Messages<F>& messages = self.messages;
  const ScoreUnit unit =
      F::kModified ? ScoreUnit{1.f, kLog2E<float>} : ScoreUnit{launch.scale, launch.scale * kLog2E<float>};
  const int own_row = 64 * self.warpgroup + 16 * self.warp;  // the warp's first in a tile
  float rS[1][F::kN][4], rO[1][F::kO][4];
  uint32_t rP[F::kValueDepth][4];
  int block = 0;  // what the loader says of the keys that S is of
  // Operands: this warpgroup's rows of the first buffer for Q, and the first buffers for K and V.
  const TeamMemory<F>& memory = self.memory;
  const uint32_t q0 = ptx::wgmma_place(memory.begin + memory.kQ, 16) + self.warpgroup * (F::kBytesOfWarpgroup >> 4);
  const uint32_t k0 = ptx::wgmma_place(memory.begin + memory.kK, 16);
  const uint32_t v0 = ptx::wgmma_place(memory.begin + memory.kV, F::kPanelBytesKV);

  const auto release_v = [&] { self.release(messages.v_empty[self.v.stage]), self.v.advance(); };
  const auto release_q = [&] { self.release(messages.q_empty[self.q.stage]), self.q.advance(); };
  const auto release_k = [&] {
    __syncwarp();  // everybody has read what the loader says of it
    if (F::kStagesQ == 1 && (block & kIsLast) != 0) release_q();
    self.release(messages.k_empty[self.k.stage]), self.k.advance();
  };
  const auto read_block = [&] { block = *static_cast<volatile int*>(&messages.block[self.k.stage]); };
  const int last_query = F::kPacksHeads ? (self.warpgroup + 1) * launch.packed_queries - 1 : 64 * self.warpgroup + 63;
  // Blocks behind the last key that this warpgroup's rows see, at the head of a tile's: they are passed over.
  // The last block of a tile is none of them, so that there is a first one.
  const auto pass_over_k = [&](const TileWork& work) {
    int passed = 0;
    while (true) {
      self.wait(messages.k_full[self.k.stage], self.k.parity);
      read_block();
      const int end = work.seen_end + last_query;
      if ((block & (kHasHidden | kIsLast)) != kHasHidden || (block & kBlockNumber) * F::kKeys < end) return passed;
      release_k();
      ++passed;
    }
  };
  const auto pass_over_v = [&](int passed) {
    for (; passed > 0; --passed) {
      self.wait(messages.v_full[self.v.stage], self.v.parity);
      release_v();
      self.wait_for_turn();
      self.end_turn();
    }
  };
  const auto wait_for_k = [&] { self.wait(messages.k_full[self.k.stage], self.k.parity); };
  const auto ask_for_score = [&] {
    ptx::wgmma_fence();
    ptx::pin(rS[0]);
    multiply_score<F>(rS[0], q0 + self.q.stage * (F::kBytesQ >> 4), k0 + self.k.stage * (F::kBytesKV >> 4));
  };
  const auto ask_for_value = [&] {
    self.wait(messages.v_full[self.v.stage], self.v.parity);
    ptx::wgmma_fence();
    ptx::pin(rP);
    ptx::pin(rO[0]);
    multiply_value<F>(rO[0], rP, v0 + self.v.stage * (F::kBytesKV >> 4));
    ptx::wgmma_commit();
  };

  bool has_score = false;  // of the tile's first block
  while (true) {
    self.wait(messages.tile_full[self.slot.stage], self.slot.parity);
    const TileWork& work = messages.tile[self.slot.stage];
    if (work.state != TileWork::kBlocks) {
      if (work.state == TileWork::kEnd) break;
      store_special<F>(p, launch, work, unit, static_cast<int>(threadIdx.x) % 128 + 128 * self.warpgroup, self.lane);
      self.release_tile();
      continue;
    }
    const auto place = [&] {
      return FragmentPlace{work.first_row + own_row + self.lane / 4, self.lane % 4 * 2, work.rows, work.keys};
    };
    const auto query_of = [&](int half) {
      return query_of_row<F>(launch, self.warpgroup, 16 * self.warp + self.lane / 4 + 8 * half);
    };
    LazySoftmax softmax(unit);
    WarpDropout<1, F::kDropout ? F::kKeys : 0, (F::kConsumerRegisters > 112)> dropout;
    if constexpr (F::kDropout) dropout.begin(work.dropout, place().row, place().column);
    const bool drops = F::kKey.variant == Variant::dropout || (F::kDropout && p.dropout.given());
    const float slope = F::kModified ? alibi_slope<float>(p.score, work.batch, work.head) : 0.f;
    const auto draw = [&] {
      if constexpr (F::kDropout)
        if (drops) dropout.draw(work.dropout, (block & kBlockNumber) * F::kKeys);
    };
    const auto finish_score = [&] {
      const int first_key = (block & kBlockNumber) * F::kKeys;
      if constexpr (F::kModified)
        scale_and_modify(rS, place(), launch.scale, launch.softcap, slope, work.visibility.diagonal, first_key);
      if ((block & kHasHidden) != 0) {
        const auto place_of_first = place();
        const DiagonalInterval of_first =
            DiagonalInterval{work.seen_begin, work.seen_end}.below(F::kPacksHeads ? 0 : own_row + self.lane / 4);
        hide_unseen(rS, first_key + place_of_first.column, place_of_first.keys,
                    [&](int, int half) { return of_first.below(F::kPacksHeads ? query_of(half).query : 8 * half); });
      }
    };
    const auto drop = [&] {
      if constexpr (F::kDropout)
        if (drops) {
#pragma unroll
          for (int depth = 0; depth < F::kValueDepth; ++depth)
            dropout.drop(rP[depth], 0, depth, work.dropout, (block & kBlockNumber) * F::kKeys, launch.threshold);
        }
    };

    // Maxima of the first block are the rows' first references.
    if (!has_score) {
      self.wait(messages.q_full[self.q.stage], self.q.parity);
      const int passed = pass_over_k(work);
      ask_for_score();
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(rS[0]);
      release_k();
      pass_over_v(passed);
    }
#pragma unroll
    for (int i = 0; i < F::kO * 4; ++i) rO[0][i / 4][i % 4] = 0;
    finish_score();
    begin_rows<F::kModified ? F::kN : 4>(softmax, rS[0], unit.to_log2);
    draw();
    float sum[2];
    bool asks = make_block<F::kKey.dtype>(softmax, rP, sum, rS[0], unit.to_log2);

    // S of the next block beside P V of this one
#pragma unroll 1
    while (true) {
      // What is rare stands outside of the inner loop: instructions that are jumped over have to be fetched all the same.
      if (asks) repair<F::kKey.dtype>(softmax, rP, sum, rS[0], rO[0], unit.to_log2, self.lane);
      add_sums(softmax, sum);
      drop();
      if (!__any_sync(~0u, (block & kIsLast) == 0)) break;
#pragma unroll 1
      while (true) {
        wait_for_k();
        self.wait_for_turn();
        ask_for_score();
        ptx::wgmma_commit();
        ask_for_value();
        if (!F::kTile.long_turns) self.end_turn();
        read_block();
        ptx::wgmma_wait<1>();
        if (F::kTile.long_turns) self.end_turn();
        ptx::pin(rS[0]);
        release_k();
        finish_score();
        ptx::wgmma_wait<0>();
        ptx::pin(rO[0]);
        release_v();
        draw();  // here, where it fills the gaps between exponentials
        asks = make_block<F::kKey.dtype>(softmax, rP, sum, rS[0], unit.to_log2);
        if (asks || !__any_sync(~0u, (block & kIsLast) == 0)) break;
        add_sums(softmax, sum);
        drop();
      }
    }

    if (F::kStagesQ > 1) release_q();

    // P V of the last block, and beside the end of this tile S of the next tile's first block
    ask_for_value();
    Ring<2> next = self.slot;
    next.advance();
    self.wait(messages.tile_full[next.stage], next.parity);
    has_score = messages.tile[next.stage].state == TileWork::kBlocks;
    int passed = 0;
    if (has_score) {
      self.wait(messages.q_full[self.q.stage], self.q.parity);
      passed = pass_over_k(messages.tile[next.stage]);
    }
    ask_for_score();  // of whatever is there, if there is no next one: a branch would make all products wait for each other
    ptx::wgmma_commit();
    float factor[2];
    const QueryOfRow own_rows[2] = {query_of(0), query_of(1)};
    finish_rows<F>(factor, p, launch, work, softmax, unit, own_rows, self.lane);
    ptx::wgmma_wait<1>();
    ptx::pin(rO[0]);
    release_v();
    store_output<F>(p, work, rO[0], factor, own_rows, self.lane);
    self.release_tile();
    ptx::wgmma_wait<0>();
    ptx::pin(rS[0]);
    if (has_score) release_k();
    pass_over_v(passed);
  }
}

template <class F>
__device__ __forceinline__ void init_messages(const TeamMemory<F>& memory) {
  constexpr int kReaders = 4 * F::kWarpgroups * ptx::kArrivalsOfWarp;
  const auto init = [&](auto& full, auto& empty, int readers) {
    for (uint64_t& x : full) ptx::mbarrier_init(memory.address(x), 1);
    for (uint64_t& x : empty) ptx::mbarrier_init(memory.address(x), readers);
  };
  Messages<F>& messages = memory.messages;
  init(messages.q_full, messages.q_empty, kReaders);
  init(messages.k_full, messages.k_empty, kReaders);
  init(messages.v_full, messages.v_empty, kReaders);
  init(messages.tile_full, messages.tile_empty, kReaders + 1);  // and the loader
  for (TileWork& work : messages.tile) work.has_lengths = false;
}

// (The key comes in parts: nvcc 13 writes stubs that do not compile for kernels with class-type arguments.)
template <Arch kArch, DataType kType, int kHeadDim, Variant kVariant, int kTile, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ FwdLaunch launch,
               const __grid_constant__ TensorMaps maps, uint32_t* counter) {
  using F = Fwd<KernelKey{kArch, kType, kHeadDim, kVariant}, kTile>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);

  if (threadIdx.x == 0) {
    if ((ptx::shared_address(shared) & 0xFFFFFF) != kSharedBegin) __trap();
    for (int team = 0; team < F::kTeams; ++team) init_messages(TeamMemory<F>(shared, team));
    ptx::mbarrier_init_fence();
  }
  if constexpr (F::kPacksHeads) {
    // Rows that are left over of a warpgroup's keep these zeros.
    for (int team = 0; team < F::kTeams; ++team)
      for (int i = threadIdx.x; i < F::kStagesQ * F::kBytesQ / 16; i += kThreads)
        ptx::store_shared_16(TeamMemory<F>(shared, team).begin + TeamMemory<F>::kQ + 16 * i, uint4{});
    ptx::async_proxy_fence();
  }
  __syncthreads();  // all barriers are there

  const auto warp_of_warpgroup = [] { return __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32 % 4), 0); };
  if (warpgroup == 0) {
    ptx::give_registers_back<F::kProducerRegisters>();
    const int warp = warp_of_warpgroup(), team = F::kTeams == 1 ? 0 : warp / 2;
    if (warp >= 2 * F::kTeams) return;
    const TeamMemory<F> memory(shared, team);
    if (warp % 2 == 0)
      Loader<F>{p, launch, maps, memory, ptx::elect_one()}.run();
    else if (ptx::elect_one())
      schedule<F>(p, launch, counter, memory, team);
    return;
  }
  ptx::take_registers<F::kConsumerRegisters>();
  const int team = F::kTeams == 1 ? 0 : (warpgroup - 1) / F::kWarpgroups, own = (warpgroup - 1) % F::kWarpgroups;
  const TeamMemory<F> memory(shared, team);
  Consumer<F> self{memory, team, own, warp_of_warpgroup(), static_cast<int>(threadIdx.x % 32)};
  if (own == F::kWarpgroups - 1) self.end_turn();  // the first one's turn comes first
  consume<F>(self, p, launch);
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// Zero whenever no launch is running.
static __device__ uint32_t stream_counters[2 * kMostStreams];

// This unit's counters of a stream: launches of one stream run one after the other. nullptr: there are too many streams.
static uint32_t* counters_of(cudaStream_t stream, int device) {
  static std::mutex mutex;
  static std::unordered_map<unsigned long long, int> places;  // by the stream's number, which no other will ever have
  unsigned long long number = 0;
  void* counters = nullptr;
  if (cudaStreamGetId(stream, &number) != cudaSuccess ||
      cudaGetSymbolAddress(&counters, stream_counters) != cudaSuccess) {
    cudaGetLastError();  // or the launch would be blamed
    return nullptr;
  }
  const std::lock_guard lock(mutex);
  const unsigned long long key = number * 64 + device;
  auto found = places.find(key);
  if (found == places.end()) {
    if (places.size() >= kMostStreams) return nullptr;
    found = places.emplace(key, static_cast<int>(places.size())).first;
  }
  return static_cast<uint32_t*>(counters) + 2 * found->second;
}

template <KernelKey kKey, int kTile>
int launch_tile(const FwdParams& params, const FwdLaunch& launch, void* given_stream) {
  using F = Fwd<kKey, kTile>;
  constexpr int kSharedBytes = F::kTile.shared_bytes(F::kHeadDim);
  const auto kernel = fwd_kernel<kKey.arch, kKey.dtype, kKey.head_dim, kKey.variant, kTile, F::kThreads>;
  const auto stream = static_cast<cudaStream_t>(given_stream);
  static std::atomic<uint64_t> allowed{0};
  if (const cudaError_t error = allow_shared(kernel, kSharedBytes, launch.device, allowed); error != cudaSuccess)
    return error;
  if (!launch.vectorised_out) return cudaErrorInvalidValue;  // as V is, O is
  TensorMaps maps;
  if (!make_tensor_maps(maps, params, F::kKeys, launch.packed_queries)) return cudaErrorInvalidValue;
  uint32_t* counter = launch.counter != nullptr ? launch.counter : counters_of(stream, launch.device);
  const bool is_borrowed = counter == nullptr;
  if (is_borrowed) {
    void* memory = nullptr;
    if (const cudaError_t error = cudaMallocAsync(&memory, 8, stream); error != cudaSuccess) return error;
    if (const cudaError_t error = cudaMemsetAsync(memory, 0, 8, stream); error != cudaSuccess) return error;
    counter = static_cast<uint32_t*>(memory);
  }
  make_block_tiles<false>(params, launch.tiles, F::kRows, F::kKeys, stream);
  const uint32_t ctas = std::min(launch.blocks, static_cast<uint32_t>(launch.sm_count));
  kernel<<<ctas, F::kThreads, kSharedBytes, stream>>>(params, launch, maps, counter);
  const cudaError_t error = cudaGetLastError();
  if (is_borrowed) cudaFreeAsync(counter, stream);
  return error;
}

template <KernelKey kKey, int kTile = 0>
int launch_tile_from(const FwdParams& params, const FwdLaunch& launch, void* stream) {
  constexpr Tiles kTiles = fwd_tiles(kKey);
  if constexpr (kTile < static_cast<int>(kTiles.size()) && kTiles[kTile].warpgroups > 0) {
    if (launch.tile == kTile) return launch_tile<kKey, kTile>(params, launch, stream);
    return launch_tile_from<kKey, kTile + 1>(params, launch, stream);
  }
  return cudaErrorInvalidValue;
}

template <KernelKey kKey>
int launch_fwd(const FwdParams& params, const FwdLaunch& launch, void* stream) {
  return launch_tile_from<kKey>(params, launch, stream);
}

}  // namespace flash::wgmma

#define FLASH_ATTN_INSTANTIATE_FWD(family, arch, dtype, head_dim, variant)                                   \
  template int flash::family::launch_fwd<flash::KernelKey{flash::Arch::arch, flash::table::dtype, head_dim,  \
                                                          flash::Variant::variant}>(const flash::FwdParams&, \
                                                                                    const flash::FwdLaunch&, void*);
