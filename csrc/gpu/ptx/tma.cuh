// The copy engine: boxes of a tensor to shared memory, by one thread. sm_90.
#pragma once

#include <cstdint>

namespace flash::ptx {

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

}  // namespace flash::ptx
