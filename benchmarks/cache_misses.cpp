// One head of FlashAttention's forward as the paper has it (Algorithm 1: key blocks outside, O, ℓ and m in memory), with
// the library's portable micro-kernels and block sizes from the command line: to be run under a simulated cache, whose
// misses are what the paper counts as accesses to HBM. bench_cache_misses.py drives it.
//
//   cache_misses SEQLEN DIM ROWS COLUMNS MODE
//     ROWS, COLUMNS: B_r, a multiple of 16, and B_c. SEQLEN: a multiple of 16.
//     MODE: "run" computes; "idle" only makes the inputs, so that their misses can be subtracted; "check" compares some
//     rows with fp64 and prints the largest error.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "cpu/isa/isa.h"

namespace {

using flash::cpu::kLanes;
using flash::cpu::kRowBlock;

constexpr size_t kLineBytes = 64;  // no matrix shares a cache line with another

struct Free {
  void operator()(float* x) const { std::free(x); }
};
using Buffer = std::unique_ptr<float[], Free>;

Buffer allocate(int64_t count) {
  const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + kLineBytes - 1) / kLineBytes * kLineBytes;
  auto* data = static_cast<float*>(std::aligned_alloc(kLineBytes, bytes));
  if (data == nullptr) std::exit(3);
  return Buffer(data);
}

struct Attention {
  int64_t seqlen, dim, rows, columns;
  Buffer q = allocate(seqlen * dim);  // scaled; [panel][d][lane], a panel is 16 rows
  Buffer k = allocate(seqlen * dim), v = allocate(seqlen * dim);
  Buffer out = allocate(seqlen * dim);  // like q
  Buffer row_sum = allocate(seqlen), row_max = allocate(seqlen);
  Buffer scores = allocate(rows * columns);  // of a tile: [panel][key][lane]

  void make_inputs() {
    std::minstd_rand random(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (Buffer* x : {&q, &k, &v})
      for (int64_t i = 0; i < seqlen * dim; ++i) (*x)[i] = 3 * uniform(random);
    for (int64_t i = 0; i < seqlen * dim; ++i) q[i] /= std::sqrt(static_cast<float>(dim));
  }

  void run() {
    std::fill_n(out.get(), seqlen * dim, 0.f);  // line 2
    std::fill_n(row_sum.get(), seqlen, 0.f);
    std::fill_n(row_max.get(), seqlen, -std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < seqlen; j += columns)  // line 5
      for (int64_t i = 0; i < seqlen; i += rows)   // line 7
        attend(i, std::min(rows, seqlen - i), j, std::min(columns, seqlen - j));
  }

  // Lines 8 to 13 for rows from i and keys from j on. O is divided by ℓ with the last keys, while it is in the cache.
  void attend(int64_t i, int64_t some_rows, int64_t j, int64_t keys) {
    const auto& kernels = flash::cpu::isa::portable_fp32;
    const int64_t panels = some_rows / kLanes, panel_scores = columns * kLanes, panel_rows = dim * kLanes;
    float *q_i = q.get() + i * dim, *out_i = out.get() + i * dim;
    const float *k_j = k.get() + j * dim, *v_j = v.get() + j * dim;
    kernels.multiply({keys,
                      dim,
                      panels,
                      {k_j, kRowBlock * dim, dim, 1, 16},
                      q_i,
                      kLanes,
                      panel_rows,
                      scores.get(),
                      kLanes,
                      panel_scores,
                      false});
    for (int64_t panel = 0; panel < panels; ++panel) {
      float rescale[kLanes];
      const int64_t row = i + panel * kLanes;
      kernels.softmax_step(
          {keys, scores.get() + panel * panel_scores, row_max.get() + row, row_sum.get() + row, rescale});
      kernels.scale_lanes(dim, rescale, out_i + panel * panel_rows);
    }
    kernels.multiply({dim,
                      keys,
                      panels,
                      {v_j, kRowBlock, 1, dim, 16 * dim},
                      scores.get(),
                      kLanes,
                      panel_scores,
                      out_i,
                      kLanes,
                      panel_rows,
                      true});
    if (j + keys < seqlen) return;
    for (int64_t panel = 0; panel < panels; ++panel) {
      float factor[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane) factor[lane] = 1 / row_sum[i + panel * kLanes + lane];
      kernels.scale_lanes(dim, factor, out_i + panel * panel_rows);
    }
  }

  // The largest difference of some rows of O from softmax(QKᵀ)V in fp64.
  double largest_error() const {
    double largest = 0;
    const auto weights = std::make_unique<double[]>(static_cast<size_t>(seqlen));
    for (int64_t row = 0; row < seqlen; row += std::max<int64_t>(1, seqlen / 37)) {
      const auto at = [&](int64_t d) { return (row / kLanes * dim + d) * kLanes + row % kLanes; };
      double sum = 0;
      for (int64_t j = 0; j < seqlen; ++j) {
        double logit = 0;
        for (int64_t d = 0; d < dim; ++d) logit += static_cast<double>(q[at(d)]) * k[j * dim + d];
        sum += weights[j] = std::exp(logit);
      }
      for (int64_t d = 0; d < dim; ++d) {
        double expected = 0;
        for (int64_t j = 0; j < seqlen; ++j) expected += weights[j] / sum * v[j * dim + d];
        largest = std::max(largest, std::abs(expected - static_cast<double>(out[at(d)])));
      }
    }
    return largest;
  }
};

[[noreturn]] void refuse(const char* name, const char* value, const char* rule) {
  std::fprintf(stderr, "cache_misses: %s %s: %s\n", name, value, rule);
  std::exit(2);
}

int64_t size(const char* name, const char* text, int64_t multiple_of) {
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 10);
  if (*end != 0 || value < 1 || value > 1 << 20) refuse(name, text, "must be a whole number in [1, 1048576]");
  if (value % multiple_of != 0) refuse(name, text, "must be a multiple of 16");
  return value;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) {
    std::fprintf(stderr, "usage: cache_misses SEQLEN DIM ROWS COLUMNS run|idle|check\n");
    return 2;
  }
  const char* mode = arguments[5];
  if (std::strcmp(mode, "run") != 0 && std::strcmp(mode, "idle") != 0 && std::strcmp(mode, "check") != 0)
    refuse("MODE", mode, "must be run, idle or check");
  Attention attention{size("SEQLEN", arguments[1], kLanes), size("DIM", arguments[2], 1),
                      size("ROWS", arguments[3], kLanes), size("COLUMNS", arguments[4], 1)};
  attention.make_inputs();
  if (std::strcmp(mode, "idle") == 0) return 0;
  attention.run();
  if (std::strcmp(mode, "check") == 0) std::printf("%.3e\n", attention.largest_error());
  return 0;
}
