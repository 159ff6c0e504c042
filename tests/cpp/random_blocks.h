// A random block mask for tests of kernels.
#pragma once

#include <random>
#include <vector>

#include "common/block_mask.h"

struct BlockOptions {
  int64_t rows = 0, keys = 0;  // of a block; 0: no mask
  double density = 0.5;
  bool patterns = false;
};

struct RandomBlocks {
  std::vector<int32_t> kinds;
  std::vector<uint8_t> patterns;
  flash::BlockMask mask;

  RandomBlocks(const BlockOptions& o, int64_t rows, int64_t keys, int64_t heads) {
    if (o.rows == 0) return;
    std::mt19937 generator(3);
    mask.rows = o.rows, mask.keys = o.keys;
    mask.q_blocks = flash::divide_up(rows, o.rows), mask.k_blocks = flash::divide_up(keys, o.keys);
    mask.head_planes = heads == 1 ? 0 : 1;
    mask.pattern_count = o.patterns ? 2 : 0;
    kinds.resize(heads * mask.q_blocks * mask.k_blocks);
    for (int32_t& kind : kinds)
      kind = std::bernoulli_distribution(o.density)(generator)
                 ? 1 + static_cast<int32_t>(generator() % (o.patterns ? 3 : 1))
                 : 0;
    patterns.resize(mask.pattern_count * o.rows * o.keys);
    for (uint8_t& element : patterns) element = generator() % 3 != 0;
    mask.kinds = kinds.data(), mask.patterns = patterns.data();
  }
};
