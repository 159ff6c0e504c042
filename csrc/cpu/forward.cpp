// Forward: Algorithm 1 of Dao, Fu, Ermon, Rudra, Ré, "FlashAttention" (2022). One item is a block of query rows of one
// head; it walks the key blocks that its rows see, keeps the running maximum m and sum ℓ and the unnormalised output
// O^T, and normalises once.
#include "cpu/attention.h"
#include "cpu/backward_passes.h"
#include "cpu/schedule.h"
#include "cpu/tile.h"

namespace flash::cpu {
namespace {

template <class Real>
struct Buffers {
  Real *q_lanes, *k_rows, *v_rows, *scores, *out_lanes, *row_max, *row_sum, *rescale;
  uint8_t* keep;
  int64_t reals;

  Buffers(Real* piece, const AttentionParams& p, TileSize tile) {
    Carver<Real> carve(piece);
    q_lanes = carve.take(p.dim * tile.rows);     // [dim][lane], times scale
    k_rows = carve.take(tile.keys * p.dim);      // [key][dim]
    v_rows = carve.take(tile.keys * p.dim_v);    // [key][dim_v]
    scores = carve.take(tile.keys * tile.rows);  // [key][lane]: logits, then probabilities
    out_lanes = carve.take(p.dim_v * tile.rows);
    row_max = carve.take(tile.rows);
    row_sum = carve.take(tile.rows);
    rescale = carve.take(tile.rows);
    keep = reinterpret_cast<uint8_t*>(carve.take(p.dropout.given() ? tile.keys * tile.rows : 0));
    reals = carve.used();
  }
};

// m, ℓ, O^T over all visible key blocks.
template <class Real>
void accumulate(const FwdParams& p, const HeadContext<Real>& head, Range rows, TileSize size, bool in_place,
                const Buffers<Real>& buffers) {
  const MicroKernels<Real>& kernels = micro_kernels<Real>();
  const int64_t lanes = size.rows, head_k = head.head / p.group();
  const Rows& q = head.sequence.q;
  const Rows& k = head.sequence.k;
  pack_lanes(p.dtype, p.q, p.q.offset(q.batch, head.head, q.first() + rows.begin), rows.size(), p.dim,
             static_cast<Real>(p.score.scale), buffers.q_lanes, lanes);
  std::fill(buffers.row_max, buffers.row_max + lanes, -INFINITY);
  std::fill(buffers.row_sum, buffers.row_sum + lanes, Real(0));

  const BlockRange blocks = head.visibility.key_blocks(rows, size.keys);
  if (blocks.begin >= blocks.end) std::fill(buffers.out_lanes, buffers.out_lanes + p.dim_v * lanes, Real(0));
  for (int64_t n = blocks.begin; n < blocks.end; ++n) {
    // Only keys that some row sees are read.
    const Range keys = intersect({n * size.keys, (n + 1) * size.keys}, head.visibility.keys_of_any(rows));
    const TilePlace tile{rows.begin, rows.size(), keys.begin, keys.size()};
    const int64_t first_key = k.first() + keys.begin;
    const RowsView<Real> k_rows = view_rows(p.dtype, p.k, p.k.offset(k.batch, head_k, first_key), keys.size(), p.dim,
                                            in_place, buffers.k_rows, p.dim);
    const RowsView<Real> v_rows = view_rows(p.dtype, p.v, p.v.offset(k.batch, head_k, first_key), keys.size(), p.dim_v,
                                            in_place, buffers.v_rows, p.dim_v);

    logits<Real>(p, head, tile, buffers.q_lanes, k_rows, buffers.scores, nullptr, lanes);
    const bool moved = kernels.softmax_step(
        {keys.size(), lanes, buffers.scores, lanes, buffers.row_max, buffers.row_sum, buffers.rescale});
    if (moved && n != blocks.begin) {
      for (int64_t d = 0; d < p.dim_v; ++d)
        for (int64_t r = 0; r < lanes; ++r) buffers.out_lanes[d * lanes + r] *= buffers.rescale[r];
    }
    if (p.dropout.given()) {
      dropout_tile(p.dropout, head.dropout, tile, buffers.keep, lanes);
      drop(buffers.keep, tile, buffers.scores, lanes);
    }
    kernels.multiply({p.dim_v, keys.size(), lanes, v_rows.data, 1, v_rows.stride, buffers.scores, lanes,
                      buffers.out_lanes, lanes, n != blocks.begin});
  }
}

// The sink joins the sum, O is normalised, the statistics are written.
template <class Real>
void finish(const FwdParams& p, const HeadContext<Real>& head, Range rows, const Buffers<Real>& buffers,
            int64_t lanes) {
  const Rows& q = head.sequence.q;
  const Real keep_scale = static_cast<Real>(p.dropout.keep_scale);
  Real* factor = buffers.rescale;
  for (int64_t r = 0; r < rows.size(); ++r) {
    Real row_max = buffers.row_max[r], row_sum = buffers.row_sum[r], scale = 1;
    if (p.sink != nullptr) {
      const Merge<Real> with_sink = merge(row_max, static_cast<const Real*>(p.sink)[head.head]);
      row_max = with_sink.row_max;
      row_sum = row_sum * with_sink.scale_a + with_sink.scale_b;
      scale = with_sink.scale_a;
    }
    factor[r] = row_sum == 0 ? Real(0) : scale * keep_scale / row_sum;
    const RowStatistics<Real> statistics = make_statistics(row_max, row_sum);
    const auto write = [&](const RowArray& array, Real x) {
      static_cast<Real*>(array.data)[array.offset(q.batch, head.head, q.first() + rows.begin + r)] = x;
    };
    write(p.reference, statistics.reference);
    write(p.log2_sum, statistics.log2_sum);
    write(p.lse, log_sum_exp(statistics));
  }
  std::fill(factor + rows.size(), factor + lanes, Real(0));
  scale_lanes(buffers.out_lanes, p.dim_v, factor, rows.size(), lanes);
  unpack_lanes(p.dtype, p.out, p.out.offset(q.batch, head.head, q.first() + rows.begin), rows.size(), p.dim_v,
               buffers.out_lanes, lanes);
}

// Everything about a call that its shape decides.
template <class Real>
struct Setup {
  Sequences sequences;
  TileSize size;
  bool in_place;
  BlockItems items;
  ThreadPool pool;
  int64_t worker_reals;

  Setup(const AttentionParams& p, const ThreadPool& given)
      : sequences(p),
        size(tile_size(sequences.longest_q, sequences.longest_k)),
        in_place(reads_in_place<Real>(p, sequences.longest_q, size)),
        items(sequences, p.heads, size.rows, [](const Sequence& s) { return s.q.length; }),
        pool(pool_for(given, score_elements(p, sequences) * static_cast<double>(p.dim + p.dim_v))),
        worker_reals(Buffers<Real>(nullptr, p, size).reals) {}
};

template <class Real>
void forward_as(const FwdParams& p, const ThreadPool& given) {
  const Setup<Real> setup(p, given);
  const BlockItems& items = setup.items;
  const TileSize size = setup.size;
  const Workspace<Real> workspace(setup.pool.workers(items.count()), setup.worker_reals);
  setup.pool.for_each(items.count(), [&](int worker, int64_t i) {
    const BlockItems::Item item = items[i];
    const HeadContext<Real> head(p, setup.sequences.all[item.sequence], item.unit);
    const Buffers<Real> buffers(workspace.piece(worker), p, size);
    // Under a causal mask the last rows have the most work: longest first.
    const int64_t block = items.blocks_of(item.sequence) - 1 - item.block;
    const Range rows = intersect({block * size.rows, (block + 1) * size.rows}, {0, head.sequence.q.length});
    accumulate(p, head, rows, size, setup.in_place, buffers);
    finish(p, head, rows, buffers, size.rows);
  });
}

template <class Real>
Plan plan_as(const AttentionParams& p, const ThreadPool& given) {
  const Setup<Real> setup(p, given);
  const int workers = setup.pool.workers(setup.items.count());
  const int64_t bytes = workers * setup.worker_reals * static_cast<int64_t>(sizeof(Real));
  return {micro_kernels<Real>().name,
          setup.size.rows,
          setup.size.keys,
          workers,
          bytes,
          backward_workspace_bytes<Real>(p, given)};
}

}  // namespace

void forward(const FwdParams& params, const ThreadPool& pool) {
  params.dtype == DataType::kFloat64 ? forward_as<double>(params, pool) : forward_as<float>(params, pool);
}

Plan plan(const AttentionParams& shape, const ThreadPool& pool) {
  return shape.dtype == DataType::kFloat64 ? plan_as<double>(shape, pool) : plan_as<float>(shape, pool);
}

}  // namespace flash::cpu
