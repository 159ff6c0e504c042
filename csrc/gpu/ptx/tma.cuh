// The copy engine: boxes of a tensor to shared memory, by one thread. sm_90.
#pragma once

#include <cstdint>

namespace flash::ptx {

// What this thread has written to shared memory is seen by copies and products that nobody executes.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// shared = the map's box at (column, row, head, batch); what is outside of the tensor is zero. Arrives with the bytes of the
// whole box.
__device__ __forceinline__ void tma_load(uint32_t shared, const void* tensor_map, uint32_t barrier, int column, int row,
                                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(tensor_map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// The same of a map of groups of heads: a box has all heads of one, of several rows.
__device__ __forceinline__ void tma_load_groups(uint32_t shared, const void* tensor_map, uint32_t barrier, int column,
                                                int row, int group, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(shared),
      "l"(tensor_map), "r"(barrier), "r"(column), "r"(0), "r"(row), "r"(group), "r"(batch)
      : "memory");
}

}  // namespace flash::ptx
