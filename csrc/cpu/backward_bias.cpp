// dbias: dS summed over everything that the bias broadcasts over. One item is a block of the bias itself and adds up
// all that falls into it, in a fixed order and in fp64, since a broadcast bias may sum millions of terms: no two items
// share an element, so nothing races and the sum is repeatable. The price is that S and dP are computed once more, and
// only when the bias wants a gradient.
#include "cpu/backward_passes.h"
#include "cpu/bf16_arithmetic.h"
#include "cpu/gradient_tile.h"

namespace flash::cpu {
namespace {

constexpr int64_t kBlockColumns = 1024;

// The arithmetic is that of the forward, whose statistics belong to its scores and to no others.
template <class Arithmetic>
class BiasPass {
  using Real = typename Arithmetic::Real;
  using Element = typename Arithmetic::Element;

 public:
  BiasPass(const BwdParams& p, const Sequences& sequences, const RowArray& delta, const ThreadPool& pool)
      : p_(p),
        sequences_(sequences),
        delta_(delta),
        pool_(pool),
        size_(Arithmetic::backward_tile(sequences.longest_q, sequences.longest_k)),
        block_rows_(p.bias_rows == 1 ? 1 : size_.rows),
        block_columns_(std::min(p.bias_columns, kBlockColumns)),
        workspace_(pool.threads, WorkerBuffers(nullptr, *this).reals) {}

  void run() const {
    const int64_t row_blocks = divide_up(p_.bias_rows, block_rows_),
                  column_blocks = divide_up(p_.bias_columns, block_columns_);
    pool_.for_each(p_.bias_batch * p_.bias_heads * row_blocks * column_blocks, [&](int worker, int64_t item) {
      const int64_t column_block = item % column_blocks, row_block = item / column_blocks % row_blocks;
      const int64_t head = item / column_blocks / row_blocks % p_.bias_heads;
      const int64_t batch = item / column_blocks / row_blocks / p_.bias_heads;
      const Block block{
          batch,
          head,
          {row_block * block_rows_, std::min((row_block + 1) * block_rows_, p_.bias_rows)},
          {column_block * block_columns_, std::min((column_block + 1) * block_columns_, p_.bias_columns)},
      };
      [[maybe_unused]] const typename Arithmetic::ThreadState state;
      run_block(block, WorkerBuffers(workspace_.piece(worker), *this));
    });
  }

 private:
  struct Block {
    int64_t batch, head;  // of the bias
    Range rows, columns;  // of the bias; a broadcast axis has the one index 0
  };

  struct WorkerBuffers {
    GradientTile<Arithmetic> tile;
    Element *k_rows, *v_rows;
    double* sum;  // [row][column] of the block
    int64_t reals;

    WorkerBuffers(Real* piece, const BiasPass& pass) : tile(piece, pass.p_, pass.size_, true) {
      Carver<Real> carve(piece == nullptr ? nullptr : piece + tile.reals);
      k_rows = carve.template take_as<Element>(Arithmetic::key_elements(pass.size_.keys, pass.p_.dim));
      v_rows = carve.template take_as<Element>(Arithmetic::key_elements(pass.size_.keys, pass.p_.dim_v));
      const int64_t doubles = pass.block_rows_ * pass.block_columns_;
      sum = reinterpret_cast<double*>(carve.take(doubles * static_cast<int64_t>(sizeof(double) / sizeof(Real))));
      reals = tile.reals + carve.used();
    }
  };

  bool broadcast_rows() const { return p_.bias_rows == 1; }
  bool broadcast_columns() const { return p_.bias_columns == 1; }

  void run_block(const Block& block, const WorkerBuffers& buffers) const {
    std::fill(buffers.sum, buffers.sum + block_rows_ * block_columns_, 0.0);
    const int64_t first_head = p_.bias_heads == 1 ? 0 : block.head, heads = p_.bias_heads == 1 ? p_.heads : 1;
    const int64_t first_sequence = p_.bias_batch == 1 ? 0 : block.batch;
    const int64_t sequences = p_.bias_batch == 1 ? static_cast<int64_t>(sequences_.all.size()) : 1;
    for (int64_t s = first_sequence; s < first_sequence + sequences; ++s)
      for (int64_t h = first_head; h < first_head + heads; ++h) add_head({p_, sequences_.all[s], h}, block, buffers);

    for (int64_t r = block.rows.begin; r < block.rows.end; ++r) {
      const double* sum = buffers.sum + (r - block.rows.begin) * block_columns_;
      with_storer<Real>(p_.dbias.dtype, p_.dbias.data, p_.dbias.offset(block.batch, block.head, r, 0), [&](auto store) {
        for (int64_t c = block.columns.begin; c < block.columns.end; ++c)
          store(c * p_.dbias.column_stride, static_cast<Real>(sum[c - block.columns.begin]));
      });
    }
  }

  // The positions of one sequence whose bias lies in the block, tile by tile.
  void add_head(const HeadContext<Real>& head, const Block& block, const WorkerBuffers& buffers) const {
    const Rows& q = head.sequence.q;
    const Rows& k = head.sequence.k;
    const Range rows = positions(block.rows, broadcast_rows(), q),
                keys = positions(block.columns, broadcast_columns(), k);
    for (int64_t m = rows.begin; m < rows.end; m += size_.rows) {
      const Range tile_rows = intersect({m, m + size_.rows}, rows);
      const Range seen = intersect(keys, head.visibility.keys_of_any(tile_rows));
      if (seen.empty()) continue;
      buffers.tile.load_queries(p_, delta_, head, tile_rows);
      for (int64_t n = seen.begin; n < seen.end; n += size_.keys) {
        const Range tile_keys = intersect({n, n + size_.keys}, seen);
        if (head.blocks.next_key(tile_rows, n) >= tile_keys.end) continue;
        const int64_t head_k = head.head / p_.group(), row = k.first() + tile_keys.begin;
        const auto pack = [&](const Operand& x, int64_t dim, Element* to) {
          Arithmetic::pack_key_rows(p_.dtype, x, x.offset(k.batch, head_k, row), {0, tile_keys.size()}, size_.keys, dim,
                                    to);
          return Arithmetic::key_rows(to, 0, size_.keys, dim);
        };
        buffers.tile.compute(p_, head, {tile_rows.begin, tile_rows.size(), tile_keys.begin, tile_keys.size()},
                             pack(p_.k, p_.dim, buffers.k_rows), pack(p_.v, p_.dim_v, buffers.v_rows));
        add_tile(tile_rows, tile_keys, q, k, block, buffers);
      }
    }
  }

  static Range positions(Range of_bias, bool broadcast, const Rows& rows) {
    const Range all{0, rows.length};
    return broadcast ? all : intersect(all, {of_bias.begin - rows.leftpad, of_bias.end - rows.leftpad});
  }

  void add_tile(Range rows, Range keys, const Rows& q, const Rows& k, const Block& block,
                const WorkerBuffers& buffers) const {
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      double* sum = buffers.sum + (broadcast_rows() ? 0 : (i + q.leftpad - block.rows.begin) * block_columns_);
      const int64_t row = i - rows.begin;
      const Real* ds = buffers.tile.dlogits + row / kLanes * size_.panel_elements() + row % kLanes;
      for (int64_t j = keys.begin; j < keys.end; ++j, ds += kLanes)
        sum[broadcast_columns() ? 0 : j + k.leftpad - block.columns.begin] += *ds;
    }
  }

  const BwdParams& p_;
  const Sequences& sequences_;
  const RowArray delta_;
  const ThreadPool pool_;
  const TileSize size_;
  const int64_t block_rows_, block_columns_;
  const Workspace<Real> workspace_;
};

}  // namespace

template <class Real>
void bias_pass(const BwdParams& p, const Sequences& sequences, const RowArray& delta, const ThreadPool& pool) {
  if (p.bias_batch * p.bias_heads * p.bias_rows * p.bias_columns == 0) return;
  with_arithmetic(p, [&](auto arithmetic) {
    if constexpr (std::is_same_v<typename decltype(arithmetic)::Real, Real>)
      BiasPass<decltype(arithmetic)>(p, sequences, delta, pool).run();
  });
}

template void bias_pass<float>(const BwdParams&, const Sequences&, const RowArray&, const ThreadPool&);
template void bias_pass<double>(const BwdParams&, const Sequences&, const RowArray&, const ThreadPool&);

}  // namespace flash::cpu
