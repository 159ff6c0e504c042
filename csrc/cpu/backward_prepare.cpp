#include "cpu/backward_passes.h"
#include "cpu/tile.h"

namespace flash::cpu {
namespace {

template <class Real>
Real read(const RowArray& array, const Rows& q, int64_t head, int64_t i) {
  return static_cast<const Real*>(array.data)[array.offset(q.batch, head, q.first() + i)];
}

// In eight sums, which the compiler can put into a vector.
template <class Real>
Real dot(const Real* a, const Real* b, int64_t n) {
  Real sums[8] = {}, rest = 0;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int64_t lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  for (; i < n; ++i) rest += a[i] * b[i];
  for (const Real sum : sums) rest += sum;
  return rest;
}

// Of two rows of any type.
template <class Real>
Real dot_of_rows(DataType dtype, const Operand& a, int64_t offset_a, const Operand& b, int64_t offset_b, int64_t dim) {
  Real sum = 0;
  with_row<Real>(dtype, a, offset_a, dim, [&](int64_t first, int64_t count, const Real* x) {
    with_row<Real>(dtype, b, offset_b + first, count,
                   [&](int64_t again, int64_t some, const Real* y) { sum += dot(x + again, y, some); });
  });
  return sum;
}

// dsink = -Σ P_sink · delta with P_sink = exp(sink - LSE): the sink is a logit like any other whose value row is zero.
template <class Real>
void sink_gradient(const BwdParams& p, const Sequences& sequences, const RowArray& delta, int64_t head) {
  const Real sink = static_cast<const Real*>(p.sink)[head];
  double sum = 0;
  for (const Sequence& s : sequences.all) {
    for (int64_t i = 0; i < s.q.length; ++i) {
      const RowStatistics<Real> row{read<Real>(p.reference, s.q, head, i), read<Real>(p.log2_sum, s.q, head, i)};
      sum -= static_cast<double>(sink_weight(row, sink)) * static_cast<double>(read<Real>(delta, s.q, head, i));
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
      const Real log2_sum = read<Real>(p.log2_sum, q, head, i);
      if (!std::isinf(log2_sum))
        sum = dot_of_rows<Real>(p.dtype, p.dout, p.dout.offset(q.batch, head, row), p.out,
                                p.out.offset(q.batch, head, row), p.dim_v);
      if (log2_sum != -INFINITY && p.dlse.data != nullptr) sum -= read<Real>(p.dlse, q, head, i);
      static_cast<Real*>(delta.data)[delta.offset(q.batch, head, row)] = sum;
    }
  });
  if (p.dsink != nullptr)
    pool.for_each(p.heads, [&](int, int64_t head) { sink_gradient<Real>(p, sequences, delta, head); });
}

template void prepare_pass<float>(const BwdParams&, const Sequences&, const RowArray&, const ThreadPool&);
template void prepare_pass<double>(const BwdParams&, const Sequences&, const RowArray&, const ThreadPool&);

}  // namespace flash::cpu
