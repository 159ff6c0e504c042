// The GPU's backward kernels on the CPU (cuda_on_cpu/), thread by thread, against sums in fp64: their values here, their
// barriers under ThreadSanitizer. Prints the number of checks.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "block_tile_steps.h"
#include "expect.h"
#include "gpu/mma_sync/bwd.cuh"
#include "gpu/plan.h"
#include "random_blocks.h"

using namespace flash;

struct Options {
  bool causal = false;
  int64_t left = -1;
  double softcap = 0, dropout = 0;
  bool bias = false, mask = false, deterministic = false, empty_rows = false;
  uint8_t spoiled = 0xFF;  // bytes of shared memory at the start: 0xFF is NaN and every flag set, 0 is none set
  bool far = false;        // some queries and keys are so large that logits pass 2^20
  BlockOptions blocks;
};

struct Shape {
  int64_t batch, heads, heads_k, rows, keys, dim;
};

// Tensors of one call, their gradients as the kernels give them, and the same in fp64.
template <DataType kType>
struct Call {
  Shape shape;
  BwdParams p;
  std::vector<uint16_t> q, k, v, out, dout, dq, dk, dv, bias;
  std::vector<uint8_t> mask;
  std::vector<float> reference, log2_sum, dlse, sink, dsink, dbias;
  std::vector<double> true_dq, true_dk, true_dv, true_dbias, true_dsink;
  int64_t seed[2] = {77, -5};
  RandomBlocks blocks;
  std::mt19937 generator{1};

  static float value(uint16_t x) { return ptx::unpack_low<kType>(x); }

  std::vector<uint16_t> random(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> x(count);
    for (uint16_t& e : x) e = static_cast<uint16_t>(ptx::pack<kType>(normal(generator), 0));
    return x;
  }

  Operand operand(std::vector<uint16_t>& x, int64_t rows, int64_t heads) {
    return {x.data(), rows * heads * shape.dim, heads * shape.dim, shape.dim};
  }

  Call(const Shape& s, const Options& o) : shape(s), blocks(o.blocks, s.rows, s.keys, s.heads) {
    p.block_mask = blocks.mask;
    const int64_t of_q = s.batch * s.rows * s.heads * s.dim, of_k = s.batch * s.keys * s.heads_k * s.dim;
    q = random(of_q), out = random(of_q), dout = random(of_q), dq = random(of_q);
    k = random(of_k), v = random(of_k), dk = random(of_k), dv = random(of_k);
    bias = random(s.heads * s.rows * s.keys);
    mask.resize(s.rows * s.keys);
    for (uint8_t& m : mask) m = generator() % 4 != 0;
    p.dtype = kType;
    p.batch = s.batch, p.heads = s.heads, p.heads_k = s.heads_k, p.dim = p.dim_v = s.dim;
    p.rows_q.rows = s.rows, p.rows_k.rows = s.keys;
    p.q = operand(q, s.rows, s.heads), p.out = operand(out, s.rows, s.heads), p.dq = operand(dq, s.rows, s.heads);
    p.dout = operand(dout, s.rows, s.heads);
    p.k = operand(k, s.keys, s.heads_k), p.v = operand(v, s.keys, s.heads_k);
    p.dk = operand(dk, s.keys, s.heads_k), p.dv = operand(dv, s.keys, s.heads_k);
    p.score.scale = 1 / std::sqrt(static_cast<double>(s.dim));
    p.score.softcap = o.softcap;
    p.window = {o.causal, false, o.left, -1};
    if (o.bias) {
      static_cast<Broadcast&>(p.bias) = {bias.data(), 0, s.rows * s.keys, s.keys, 1};
      p.bias.dtype = kType;
    }
    // Every third query has one dimension alone, a huge one, and weighs the eight keys that have it all the same.
    if (o.far) {
      for (int64_t i = 0; i < s.rows * s.heads; i += 3) {
        std::fill_n(q.begin() + i * s.dim, s.dim, uint16_t{0});
        q[i * s.dim] = static_cast<uint16_t>(ptx::pack<kType>(0x1p23f, 0));
      }
      for (int64_t j = 0; j < s.keys * s.heads_k; ++j)
        k[j * s.dim] = static_cast<uint16_t>(ptx::pack<kType>(j % s.keys < 8 ? 2 : 0, 0));
    }
    // Rows 0, 7, 14, ... see nothing, and hold NaN.
    if (o.empty_rows)
      for (int64_t i = 0; i < s.rows; i += 7) std::fill_n(mask.begin() + i * s.keys, s.keys, uint8_t{0});
    if (o.mask || o.empty_rows) static_cast<Broadcast&>(p.mask) = {mask.data(), 0, 0, s.keys, 1};
    if (o.dropout > 0) p.dropout = {seed, static_cast<uint32_t>(o.dropout * 65536), 1 / (1 - o.dropout)};
    const int64_t numbers = s.batch * s.heads * s.rows;
    for (auto* x : {&reference, &log2_sum, &dlse}) x->resize(numbers);
    const RowArray array{nullptr, s.heads * s.rows, s.rows};
    p.reference = p.log2_sum = p.dlse = array;
    p.reference.data = reference.data(), p.log2_sum.data = log2_sum.data(), p.dlse.data = dlse.data();
    std::normal_distribution<float> normal;
    for (float& x : dlse) x = normal(generator);
    sink.resize(s.heads), dsink.resize(s.heads);
    for (float& x : sink) x = normal(generator);
    if (!o.empty_rows) p.sink = sink.data(), p.dsink = dsink.data();
    dbias.resize(bias.size());
    true_dq.resize(of_q), true_dk.resize(of_k), true_dv.resize(of_k), true_dbias.resize(bias.size());
    true_dsink.resize(s.heads);
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t i = 0; i < s.rows; ++i) {
          add_row(b, h, i);
          if (log2_sum[(b * s.heads + h) * s.rows + i] > -INFINITY) continue;
          for (auto* x : {&q, &dout}) std::fill_n(x->begin() + p.q.offset(b, h, i), s.dim, uint16_t{0x7FFF});
        }
  }

  // The gradients of one row by their definition; its statistics and O on the way.
  void add_row(int64_t b, int64_t h, int64_t i) {
    const int64_t n = shape.keys, dim = shape.dim, head_k = h / p.group(),
                  at_row = (b * shape.heads + h) * shape.rows + i;
    const Range seen = make_visibility(p.window, shape.rows, n).keys(i);
    const int64_t at_q = p.q.offset(b, h, i);
    const auto at_k = [&](int64_t j) { return p.k.offset(b, head_k, j); };
    const auto dot = [&](const std::vector<uint16_t>& x, int64_t at_x, const std::vector<uint16_t>& y, int64_t at_y) {
      double sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += static_cast<double>(value(x[at_x + d])) * value(y[at_y + d]);
      return sum;
    };
    std::vector<double> weight(n, 0), derivative(n, 1), logit(n, -INFINITY), dp(n, 0), kept(n, 1);
    const double sink_logit = p.sink == nullptr ? -INFINITY : sink[h];
    double most = sink_logit;
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      if ((p.mask.given() && !mask[i * n + j]) || !head_blocks(p, sequence(p, b), h).sees(i, j)) continue;
      double s = p.score.scale * dot(q, at_q, k, at_k(j));
      if (p.score.softcap > 0) {
        const double t = std::tanh(s / p.score.softcap);
        s = p.score.softcap * t, derivative[j] = 1 - t * t;
      }
      if (p.bias.given()) s += value(bias[(h * shape.rows + i) * n + j]);
      logit[j] = s, most = std::max(most, s);
    }
    reference[at_row] = most == -INFINITY ? 0 : static_cast<float>(most);
    log2_sum[at_row] = -INFINITY;
    if (most == -INFINITY) return;
    const double sink_weight = std::exp(sink_logit - static_cast<double>(reference[at_row]));
    double sum = sink_weight, dot_sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += weight[j] = std::exp(logit[j] - reference[at_row]);
    log2_sum[at_row] = static_cast<float>(std::log2(sum));
    const DropoutStream stream = dropout_stream(seed, b, h);
    const DropoutThreshold threshold(p.dropout.threshold);
    for (int64_t d = 0; d < dim; ++d) {
      double o = 0;
      for (int64_t j = 0; j < n; ++j) {
        if (d == 0) weight[j] /= sum;
        if (d == 0 && p.dropout.given()) kept[j] = stream.keeps(i, j, threshold) ? p.dropout.keep_scale : 0;
        o += weight[j] * kept[j] * value(v[at_k(j) + d]);
      }
      out[at_q + d] = static_cast<uint16_t>(ptx::pack<kType>(static_cast<float>(o), 0));
    }
    dot_sum = dot(out, at_q, dout, at_q) - dlse[at_row];
    true_dsink[h] -= sink_weight / sum * dot_sum;
    for (int64_t j = 0; j < n; ++j) {
      if (weight[j] == 0) continue;
      dp[j] = kept[j] * dot(dout, at_q, v, at_k(j));
      const double dlogit = weight[j] * (dp[j] - dot_sum), ds = dlogit * derivative[j] * p.score.scale;
      true_dbias[(h * shape.rows + i) * n + j] += dlogit;
      for (int64_t d = 0; d < dim; ++d) {
        true_dq[at_q + d] += ds * value(k[at_k(j) + d]);
        true_dk[at_k(j) + d] += ds * value(q[at_q + d]);
        true_dv[at_k(j) + d] += weight[j] * kept[j] * value(dout[at_q + d]);
      }
    }
  }
};

template <class Found, class Value>
static void compare(const char* name, const std::vector<Found>& found, const std::vector<double>& want,
                    const Value& value, double tolerance) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    ++checks;
    difference += std::pow(value(found[i]) - want[i], 2), size += want[i] * want[i];
  }
  if (std::sqrt(difference) <= tolerance * std::sqrt(size)) return;
  std::printf("%s: relative error %g\n", name, std::sqrt(difference / size));
  std::exit(1);
}

// Key blocks that visit most rows of the heads that share them come first; all are there.
static void check_order(const BwdParams& p, const BlockTiles& tiles) {
  const int64_t shared = tiles.head_planes == 0 ? 1 : p.group();
  for (int64_t plane = 0; plane < tiles.planes; plane += shared) {
    const auto visited = [&](int64_t tile) {
      int64_t sum = 0;
      for (int64_t i = 0; i < shared; ++i) sum += tiles.counts[(plane + i) * tiles.own_tiles + tile];
      return sum;
    };
    std::vector<int> places(tiles.own_tiles, 0);
    for (int i = 0; i < tiles.own_tiles; ++i) {
      const uint16_t* order = tiles.order + plane * tiles.own_tiles + i;
      ++places.at(order[0]);
      EXPECT(i == 0 || visited(order[-1]) >= visited(order[0]));
    }
    for (int count : places) EXPECT(count == 1);
  }
}

template <KernelKey kKey, int kTile = 0>
static void test(const char* name, const Shape& shape, const Options& options = {}) {
  using F = mma_sync::Bwd<kKey, kTile>;
  Call<kKey.dtype> call(shape, options);
  const BwdParams& p = call.p;
  const Choice choice{kKey, kTile};
  BwdLaunch launch = *make_bwd_launch(p, choice, shape.rows, shape.keys, 40 << 20, options.deterministic);
  const BwdMemory memory = bwd_memory(launch, p, choice);
  std::vector<float4> dq_sum(memory.dq_sum / 4, {NAN, NAN, NAN, NAN});  // kernels make the zeros
  std::vector<int> turns(memory.turns);
  std::vector<float4> numbers(memory.numbers / 4);
  launch.numbers = &numbers.data()->x;
  launch.dq_sum = &dq_sum.data()->x;
  if (options.deterministic) launch.turns = turns.data();
  const std::vector<uint16_t> steps = make_steps<true>(p, launch, F::kKeys, F::kRows);
  check_order(p, launch.tiles);
  if (options.bias) {
    launch.dbias_sum = p.bias;
    launch.dbias_sum.data = call.dbias.data();
  }
  // What a CTA has not written is NaN.
  const auto spoil = [&] { std::fill(std::begin(mma_sync::shared), std::end(mma_sync::shared), options.spoiled); };
  const auto blocks = static_cast<unsigned>(shape.batch * shape.heads);
  constexpr int kLanes = F::kHeadDim <= 64 ? 8 : F::kHeadDim <= 128 ? 16 : 32;
  const auto run = [&](unsigned ctas, int threads, const auto& kernel) {
    cuda_on_cpu::launch(ctas, threads, kernel, spoil);
  };
  run(static_cast<unsigned>(launch.m_blocks) * blocks, kRowThreads, [&] {
    numbers_kernel<kKey.dtype, typename F::Table, kLanes, F::kRows * F::kHeadDim>(
        p, launch.numbers, launch.dq_sum, launch.m_blocks, launch.all_tiles, launch.vectorised_dout);
  });
  if (p.sink != nullptr)
    run(static_cast<unsigned>(shape.heads), kRowThreads,
        [&] { sink_kernel<typename F::Table>(p, launch.numbers, launch.m_blocks, launch.all_tiles); });
  run(launch.blocks, F::kThreads, [&] {
    const auto of_masks = [&]<mma_sync::Masks kMasks>() {
      mma_sync::bwd_kernel<kKey.arch, kKey.dtype, kKey.head_dim, kKey.variant, kTile, kMasks, F::kThreads, 1>(p,
                                                                                                              launch);
    };
    if constexpr (mma_sync::has_kernel_of_masks(kKey, kTile))
      launch.tiles.steps == nullptr ? of_masks.template operator()<mma_sync::Masks::none>()
                                    : of_masks.template operator()<mma_sync::Masks::given>();
    else
      of_masks.template operator()<mma_sync::Masks::any>();
  });
  run(static_cast<unsigned>(launch.m_blocks) * blocks, F::kThreads,
      [&] { mma_sync::dq_kernel<kKey.arch, kKey.dtype, kKey.head_dim, kKey.variant, kTile, F::kThreads>(p, launch); });
  std::fprintf(stderr, "%s\n", name);
  const auto half = [](uint16_t x) { return Call<kKey.dtype>::value(x); };
  const auto number = [](float x) { return x; };
  constexpr double kRounding = kKey.dtype == DataType::kBFloat16 ? 5e-3 : 1e-3;  // of P and dS, and of the results
  compare("dq", call.dq, call.true_dq, half, kRounding);
  compare("dk", call.dk, call.true_dk, half, kRounding);
  compare("dv", call.dv, call.true_dv, half, kRounding);
  compare("dsink", call.dsink, call.true_dsink, number, kRounding);
  if (options.bias) compare("dbias", call.dbias, call.true_dbias, number, kRounding);
}

// With FLASH_ATTN_FEW_CASES: fewer, which compile in a fifth of the time.
int main() {
  constexpr DataType kBf16 = DataType::kBFloat16, kFp16 = DataType::kFloat16;
  using enum Variant;
  constexpr Arch kAmpere = Arch::sm80, kTuring = Arch::sm75;
  const Options all{.causal = true, .softcap = 3, .dropout = 0.2, .bias = true, .mask = true};
  test<KernelKey{kAmpere, kBf16, 64, plain}>("dim 64", {1, 2, 1, 150, 140, 64}, {.left = 60, .deterministic = true});
  test<KernelKey{kAmpere, kBf16, 64, biased}>("dim 61, all options", {1, 2, 1, 70, 140, 61}, all);
  test<KernelKey{kAmpere, kBf16, 64, biased}>("softcap below fp32", {1, 1, 1, 20, 40, 64}, {.softcap = 1e-50});
  test<KernelKey{kAmpere, kBf16, 96, biased}>("NaN in rows that see nothing", {1, 1, 1, 70, 70, 96},
                                              {.empty_rows = true});
  const BlockOptions large{128, 128}, small{32, 16, 0.3};
  test<KernelKey{kAmpere, kBf16, 64, plain}>("dim 64, blocks", {1, 2, 1, 140, 260, 64},
                                             {.causal = true, .blocks = large});
  test<KernelKey{kAmpere, kBf16, 64, biased}>("dim 64, small blocks", {1, 2, 1, 140, 140, 64}, {.blocks = small});
  test<KernelKey{kTuring, kFp16, 64, biased}>("Turing, dim 64", {1, 1, 1, 70, 70, 64}, all);
#ifndef FLASH_ATTN_FEW_CASES
  const BlockOptions some{16, 48, 0.5, true};
  test<KernelKey{kAmpere, kBf16, 128, plain}>("dim 128", {1, 2, 1, 130, 140, 128}, {.left = 30, .deterministic = true});
  test<KernelKey{kAmpere, kBf16, 64, dropout}>("dim 64, few blocks, dropout", {1, 4, 1, 200, 300, 64},
                                               {.dropout = 0.3, .blocks = {128, 128, 0.3}});
  test<KernelKey{kAmpere, kBf16, 128, plain}>("dim 128, blocks", {2, 2, 2, 200, 300, 128}, {.blocks = {64, 128}});
  test<KernelKey{kAmpere, kBf16, 64, biased}>("dim 64, elements, all options", {1, 2, 1, 140, 140, 64},
                                              {.causal = true, .softcap = 3, .bias = true, .blocks = some});
  test<KernelKey{kAmpere, kBf16, 64, plain}>("dim 64, nothing visited", {1, 1, 1, 70, 70, 64},
                                             {.blocks = {128, 128, 0}});
  test<KernelKey{kAmpere, kBf16, 64, plain}, 1>("dim 64, less shared memory", {1, 1, 1, 70, 75, 64}, {.causal = true});
  test<KernelKey{kAmpere, kBf16, 64, plain}>("far queries", {1, 1, 1, 70, 140, 64}, {.far = true});
  test<KernelKey{kAmpere, kBf16, 64, dropout}>("far queries, dropout", {1, 1, 1, 70, 70, 64},
                                               {.dropout = 0.2, .far = true});
  test<KernelKey{kAmpere, kBf16, 64, biased}>("far queries, mask", {1, 1, 1, 70, 70, 64}, {.mask = true, .far = true});
  test<KernelKey{kAmpere, kBf16, 64, plain}, 2>("dim 64, fewer rows", {2, 1, 1, 130, 140, 64}, {.left = 50});
  test<KernelKey{kAmpere, kBf16, 64, plain}, 3>("dim 64, fewer keys", {1, 2, 1, 150, 75, 64}, {.causal = true});
  test<KernelKey{kAmpere, kBf16, 64, plain}, 3>("dim 64, fewer keys, far queries", {1, 1, 1, 150, 75, 64},
                                                {.spoiled = 0, .far = true});
  test<KernelKey{kAmpere, kBf16, 128, plain}, 1>("dim 128, less shared memory", {1, 1, 1, 70, 75, 128});
  test<KernelKey{kAmpere, kBf16, 128, plain}, 2>("dim 128, two CTAs", {1, 1, 1, 70, 75, 128},
                                                 {.causal = true, .deterministic = true});
  test<KernelKey{kAmpere, kBf16, 128, dropout}>("dim 128, dropout", {1, 1, 1, 70, 140, 128}, {.dropout = 0.3});
  test<KernelKey{kAmpere, kBf16, 128, biased}>("dim 100, all options", {1, 1, 1, 70, 70, 100}, all);
  test<KernelKey{kAmpere, kBf16, 32, plain}>("dim 32", {2, 1, 1, 140, 70, 32});
  test<KernelKey{kAmpere, kBf16, 64, plain}>("more queries than keys", {1, 1, 1, 150, 70, 64}, {.causal = true});
  test<KernelKey{kAmpere, kFp16, 96, plain}>("dim 96", {1, 1, 1, 70, 90, 96});
  test<KernelKey{kAmpere, kBf16, 192, plain}>("dim 192", {1, 1, 1, 70, 70, 192});
  test<KernelKey{kAmpere, kBf16, 256, plain}, 1>("dim 256", {1, 1, 1, 70, 70, 256}, {.causal = true});
  test<KernelKey{kTuring, kFp16, 128, biased}>("Turing, dim 128", {1, 2, 1, 40, 70, 128});
  test<KernelKey{kTuring, kFp16, 256, biased}>("Turing, dim 256", {1, 1, 1, 40, 40, 256});
#endif
  std::printf("%ld checks\n", checks);
}
