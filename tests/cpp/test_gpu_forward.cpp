// The GPU's forward kernels on the CPU (cuda_on_cpu/), thread by thread, against sums in fp64: their values here, their
// barriers under ThreadSanitizer. Prints the number of checks.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "block_tile_steps.h"
#include "gpu/mma_sync/fwd.cuh"
#include "gpu/plan.h"
#include "random_blocks.h"

using namespace flash;

static long checks = 0;

struct Options {
  bool causal = false;
  int64_t left = -1;
  double softcap = 0, dropout = 0;
  bool bias = false, sink = false;
  BlockOptions blocks;
  int64_t leftpad = 0;  // of the queries and, plus 5, of the keys
};

static void expect_close(double found, double want, double tolerance) {
  ++checks;
  if (std::fabs(found - want) <= tolerance * (1 + std::fabs(want))) return;
  std::printf("got %g instead of %g\n", found, want);
  std::exit(1);
}

// One head of `rows` queries and `keys` keys.
template <KernelKey kKey, int kTile = 0>
static void test(const char* name, int64_t rows, int64_t keys, int64_t dim, const Options& options = {}) {
  constexpr DataType kType = kKey.dtype;
  using F = mma_sync::Fwd<kKey, kTile>;
  std::fprintf(stderr, "%s\n", name);
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto random = [&](int64_t count) {
    std::vector<uint16_t> x(count);
    for (uint16_t& e : x) e = static_cast<uint16_t>(ptx::pack<kType>(normal(generator), 0));
    return x;
  };
  const auto value = [](uint16_t x) { return static_cast<double>(ptx::unpack_low<kType>(x)); };
  std::vector<uint16_t> q = random(rows * dim), k = random(keys * dim), v = random(keys * dim),
                        out = random(rows * dim);
  std::vector<uint16_t> bias = random(rows * keys);
  std::vector<float> lse(rows), reference(rows), log2_sum(rows), sink{normal(generator)};
  const int64_t seed[2] = {77, -5};
  FwdParams p;
  p.dtype = kType;
  p.batch = p.heads = p.heads_k = 1, p.dim = p.dim_v = dim;
  p.rows_q.rows = rows, p.rows_k.rows = keys;
  p.q = {q.data(), 0, dim, 0}, p.k = {k.data(), 0, dim, 0}, p.v = {v.data(), 0, dim, 0},
  p.out = {out.data(), 0, dim, 0};
  p.lse.data = lse.data(), p.reference.data = reference.data(), p.log2_sum.data = log2_sum.data();
  p.score.scale = 1 / std::sqrt(static_cast<double>(dim));
  p.score.softcap = options.softcap;
  p.window = {options.causal, false, options.left, -1};
  if (options.bias) {
    static_cast<Broadcast&>(p.bias) = {bias.data(), 0, 0, keys, 1};
    p.bias.dtype = kType;
  }
  if (options.sink) p.sink = sink.data();
  if (options.dropout > 0)
    p.dropout = {seed, static_cast<uint32_t>(options.dropout * 65536), 1 / (1 - options.dropout)};

  const int64_t leftpads[2] = {options.leftpad, options.leftpad + 5};
  const RandomBlocks blocks(options.blocks, leftpads[0] + rows, leftpads[1] + keys, 1);
  p.block_mask = blocks.mask;
  if (options.leftpad > 0) {
    p.rows_q.leftpad = {&leftpads[0], true}, p.rows_k.leftpad = {&leftpads[1], true};
    p.rows_q.rows += leftpads[0], p.rows_k.rows += leftpads[1];
    const auto before = [&](auto& x, int64_t by) { x.data = static_cast<uint16_t*>(x.data) - by * dim; };
    before(p.q, leftpads[0]), before(p.out, leftpads[0]), before(p.k, leftpads[1]), before(p.v, leftpads[1]);
    for (RowArray* x : {&p.lse, &p.reference, &p.log2_sum}) x->data = static_cast<float*>(x->data) - leftpads[0];
  }
  const Sequence whole = sequence(p, 0);
  const HeadBlocks mask = head_blocks(p, whole, 0);

  FwdLaunch launch = *make_launch(p, {kKey, kTile}, p.rows_q.rows, p.rows_k.rows, 40 << 20);
  const std::vector<uint16_t> steps = make_steps<false>(p, launch, F::kRows, F::kKeys);
  cuda_on_cpu::launch(
      launch.blocks, F::kThreads,
      [&] { mma_sync::fwd_kernel<kKey.arch, kType, kKey.head_dim, kKey.variant, kTile, F::kThreads, 1>(p, launch); },
      // What a CTA has not written is NaN.
      [] { std::fill(std::begin(mma_sync::shared), std::end(mma_sync::shared), uint8_t{0xFF}); });

  const Visibility visibility = make_visibility(p.window, rows, keys);
  const DropoutStream stream = dropout_stream(seed, 0, 0);
  const DropoutThreshold threshold(p.dropout.threshold);
  for (int64_t i = 0; i < rows; ++i) {
    const Range seen = visibility.keys(i);
    double sum = options.sink ? std::exp(sink[0]) : 0;
    std::vector<double> total(dim, 0);
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      if (!mask.sees(i, j)) continue;
      double s = 0;
      for (int64_t d = 0; d < dim; ++d) s += value(q[i * dim + d]) * value(k[j * dim + d]);
      s *= p.score.scale;
      if (options.softcap > 0) s = options.softcap * std::tanh(s / options.softcap);
      if (options.bias) s += value(bias[i * keys + j]);
      const double weight = std::exp(s);
      sum += weight;
      if (p.dropout.given() && !stream.keeps(i, j, threshold)) continue;
      for (int64_t d = 0; d < dim; ++d) total[d] += weight * p.dropout.keep_scale * value(v[j * dim + d]);
    }
    sum == 0 ? expect_close(lse[i] == -INFINITY, 1, 0) : expect_close(lse[i], std::log(sum), 1e-5);
    for (int64_t d = 0; d < dim; ++d)
      expect_close(value(out[i * dim + d]), sum == 0 ? 0 : total[d] / sum, kType == DataType::kBFloat16 ? 1e-2 : 2e-3);
  }
}

// With FLASH_ATTN_FEW_CASES: fewer, which compile in a fifth of the time.
int main() {
  constexpr DataType kBf16 = DataType::kBFloat16, kFp16 = DataType::kFloat16;
  using enum Variant;
  constexpr Arch kAmpere = Arch::sm80, kTuring = Arch::sm75;
  const Options all{.causal = true, .softcap = 3, .dropout = 0.2, .bias = true, .sink = true};
  test<KernelKey{kAmpere, kBf16, 64, plain}>("dim 64", 150, 200, 64, {.causal = true});
  test<KernelKey{kAmpere, kBf16, 128, dropout}>("dim 128, dropout", 130, 200, 128, {.dropout = 0.3});
  test<KernelKey{kAmpere, kBf16, 64, biased}>("dim 61, all options", 70, 140, 61, all);
  test<KernelKey{kAmpere, kBf16, 64, biased}>("softcap below fp32", 20, 40, 64, {.softcap = 1e-50, .bias = true});
  const BlockOptions large{128, 128}, small{32, 16, 0.3};
  test<KernelKey{kAmpere, kBf16, 64, plain}>("dim 64, blocks", 300, 700, 64, {.causal = true, .blocks = large});
  test<KernelKey{kAmpere, kBf16, 64, biased}>("dim 64, small blocks", 150, 200, 64, {.blocks = small});
  test<KernelKey{kTuring, kFp16, 64, plain}>("Turing, dim 64", 70, 140, 64, {.left = 40});
#ifndef FLASH_ATTN_FEW_CASES
  const BlockOptions some{16, 48, 0.5, true};
  test<KernelKey{kAmpere, kBf16, 64, dropout}>("dim 64, dropout", 130, 300, 64, {.causal = true, .dropout = 0.3});
  test<KernelKey{kAmpere, kBf16, 128, plain}, 0>("dim 128", 257, 300, 128, {.sink = true});
  test<KernelKey{kAmpere, kBf16, 128, plain}, 1>("dim 128, second tile", 130, 200, 128, {.causal = true});
  test<KernelKey{kAmpere, kBf16, 128, plain}, 3>("dim 128, last tile", 130, 200, 128, {.left = 50});
  test<KernelKey{kAmpere, kBf16, 128, plain}, 1>("dim 128, blocks", 300, 700, 128, {.left = 300, .blocks = large});
  test<KernelKey{kAmpere, kBf16, 128, dropout}>("dim 128, blocks, dropout", 300, 500, 128,
                                                {.dropout = 0.2, .blocks = {128, 256, 0.6}});
  test<KernelKey{kAmpere, kBf16, 256, plain}, 1>("dim 256, blocks", 130, 300, 256, {.blocks = {64, 64}});
  test<KernelKey{kAmpere, kBf16, 128, biased}>("dim 128, elements", 130, 200, 128, {.causal = true, .blocks = some});
  test<KernelKey{kAmpere, kBf16, 64, biased}>("dim 64, left pads", 130, 200, 64,
                                              {.causal = true, .blocks = some, .leftpad = 9});
  test<KernelKey{kAmpere, kBf16, 64, plain}>("dim 64, nothing visited", 130, 200, 64, {.blocks = {128, 64, 0}});
  test<KernelKey{kAmpere, kBf16, 128, modified}>("dim 128, softcap", 130, 100, 128, {.softcap = 2, .dropout = 0.1});
  test<KernelKey{kAmpere, kFp16, 96, plain}>("dim 96", 130, 100, 96);
  test<KernelKey{kAmpere, kBf16, 192, plain}>("dim 192", 130, 200, 192);
  test<KernelKey{kAmpere, kBf16, 256, plain}>("dim 256, pairs", 130, 200, 256, {.causal = true});
  test<KernelKey{kAmpere, kBf16, 256, dropout}>("dim 256, pairs, dropout", 70, 200, 256, {.dropout = 0.2});
  test<KernelKey{kTuring, kFp16, 256, biased}>("Turing, dim 256", 70, 70, 256, all);
#endif
  std::printf("%ld checks\n", checks);
}
