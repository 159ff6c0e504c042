// The part that counts threads alone.
#pragma once

#include <cuda_runtime.h>

#include <condition_variable>
#include <map>

namespace flash::ptx {

struct Mbarrier {
  int arrivals = 0, missing = 0, phase = 0;
};
inline std::mutex mbarrier_mutex;
inline std::condition_variable mbarrier_phase_ended;
inline std::map<uint32_t, Mbarrier> mbarriers;

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  const std::lock_guard lock(mbarrier_mutex);
  mbarriers[barrier] = {arrivals, arrivals, 0};
}
inline void mbarrier_arrive(uint32_t barrier) {
  const std::lock_guard lock(mbarrier_mutex);
  Mbarrier& at = mbarriers.at(barrier);
  if (--at.missing > 0) return;
  at.missing = at.arrivals, ++at.phase;
  mbarrier_phase_ended.notify_all();
}
inline constexpr int kArrivalsOfWarp = 1;
inline void mbarrier_arrive_of_warp(uint32_t barrier, int lane) {
  if (lane == 0) mbarrier_arrive(barrier);
}
inline void mbarrier_wait(uint32_t barrier, int parity) {
  std::unique_lock lock(mbarrier_mutex);
  mbarrier_phase_ended.wait(lock, [&] { return mbarriers.at(barrier).phase % 2 != parity; });
}

}  // namespace flash::ptx
