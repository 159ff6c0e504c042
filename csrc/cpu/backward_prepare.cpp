#include "cpu/backward_passes.h"
#include "cpu/tile.h"

namespace flash::cpu {
namespace {

template <class Real>
Real read(const RowArray& array, const Rows& q, int64_t head, int64_t i) {
  return static_cast<const Real*>(array.data)[array.offset(q.batch, head, q.first() + i)];
}

// dsink = -Σ P_sink · delta with P_sink = exp(sink - LSE): the sink is a logit like any other whose value row is zero.
template <class Real>
void sink_gradient(const BwdParams& p, const Sequences& sequences, const RowArray& delta, int64_t head) {
  const Real sink = static_cast<const Real*>(p.sink)[head];
  double sum = 0;
  for (const Sequence& s : sequences.all) {
    for (int64_t i = 0; i < s.q.length; ++i) {
      const RowStatistics<Real> row{read<Real>(p.reference, s.q, head, i), read<Real>(p.log2_sum, s.q, head, i)};
      const Real weight = std::exp2((sink - row.reference) * kLog2E<Real> - log2_sum_for_backward(row));
      sum -= static_cast<double>(weight) * static_cast<double>(read<Real>(delta, s.q, head, i));
    }
  }
  static_cast<Real*>(p.dsink)[head] = static_cast<Real>(sum);
}

}  // namespace

template <class Real>
void prepare_pass(const BwdParams& p, const Sequences& sequences, const RowArray& delta, const ThreadPool& pool) {
  constexpr int64_t kBlock = 256;
  const BlockItems items(sequences, p.heads, kBlock, [](const Sequence& s) { return s.q.length; });
  pool.for_each(items.count(), [&](int, int64_t item) {
    const auto [index, head, block] = items[item];
    const Rows& q = sequences.all[index].q;
    for (int64_t i = block * kBlock; i < std::min((block + 1) * kBlock, q.length); ++i) {
      const int64_t row = q.first() + i;
      Real sum = 0;
      if (read<Real>(p.log2_sum, q, head, i) != -INFINITY) {
        with_loader<Real>(p.dtype, p.dout.data, p.dout.offset(q.batch, head, row), [&](auto dout) {
          with_loader<Real>(p.dtype, p.out.data, p.out.offset(q.batch, head, row), [&](auto out) {
            for (int64_t d = 0; d < p.dim_v; ++d) sum += dout(d) * out(d);
          });
        });
        if (p.dlse.data != nullptr) sum -= read<Real>(p.dlse, q, head, i);
      }
      static_cast<Real*>(delta.data)[delta.offset(q.batch, head, row)] = sum;
    }
  });
  if (p.dsink != nullptr)
    pool.for_each(p.heads, [&](int, int64_t head) { sink_gradient<Real>(p, sequences, delta, head); });
}

template void prepare_pass<float>(const BwdParams&, const Sequences&, const RowArray&, const ThreadPool&);
template void prepare_pass<double>(const BwdParams&, const Sequences&, const RowArray&, const ThreadPool&);

}  // namespace flash::cpu
