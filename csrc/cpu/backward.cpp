// Backward: Algorithm 4 of the FlashAttention paper, key-stationary and in parallel over (sequence, key/value head,
// chunk of keys).
//
// A chunk owns its dK and dV: it adds to them in a fixed order of query tiles. dQ needs every chunk: a chunk puts its
// part of a query tile's dQ into a slot of its own, and the slots are summed in the order of the chunks. So all three
// gradients come out the same on any number of threads, one long head still feeds every core, and memory stays bounded:
// query tiles are taken some at a time (a phase), and there are no more slots per chunk.
#include "cpu/attention.h"
#include "cpu/backward_passes.h"
#include "cpu/bf16_arithmetic.h"
#include "cpu/gradient_tile.h"

namespace flash::cpu {
namespace {

// Of a phase. Under a block mask a packed tile of keys serves few of the query tiles, so phases are longer.
int64_t phase_tiles(const AttentionParams& p) { return p.block_mask.given() ? 64 : 16; }

// One key/value head of one sequence.
struct KeyHead {
  const Sequence* sequence;
  int64_t head_k;
  int64_t first_chunk, chunks;  // in the wave
  int64_t query_blocks;         // per query head
  int64_t tiles;                // query blocks of all heads of the group
};

struct Chunk {
  int64_t unit;       // in the wave
  int64_t index;      // in the unit
  int64_t first_acc;  // row of the accumulators
};

// Chunks are long, so that packing a query tile is paid over many keys, but there shall be eight of them and more for
// the threads. A function of the shape alone: it decides the order of summation.
int64_t chunk_keys(const AttentionParams& p, const Sequences& sequences, TileSize size) {
  const int64_t units = std::max<int64_t>(1, p.batch * p.heads_k);
  const int64_t wanted = divide_up(sequences.longest_k * units, 8);
  return round_up(std::clamp<int64_t>(wanted, 256, p.block_mask.given() ? 2048 : 1024), size.keys);
}

template <class Arithmetic>
class MainPass {
  using Real = typename Arithmetic::Real;
  using Element = typename Arithmetic::Element;
  using Keys = typename Arithmetic::Keys;

 public:
  MainPass(const BwdParams& p, const Sequences& sequences, const RowArray& delta, const ThreadPool& pool)
      : p_(p),
        sequences_(sequences),
        delta_(delta),
        pool_(pool),
        size_(tile_size(p, sequences)),
        in_place_(Arithmetic::kInPlace && p.dtype == kNative<Real> && sequences.longest_q <= size_.rows),
        phase_tiles_(phase_tiles(p)),
        chunk_keys_(chunk_keys(p, sequences, size_)),
        packed_tiles_(in_place_ ? 0 : divide_up(std::min(chunk_keys_, sequences.longest_k), size_.keys)),
        k_tile_(Arithmetic::key_elements(size_.keys, p.dim)),
        v_tile_(Arithmetic::key_elements(size_.keys, p.dim_v)),
        dim_lanes_(round_up(p.dim, kLanes)),
        dim_v_lanes_(round_up(p.dim_v, kLanes)),
        workspace_(p.q.data == nullptr ? 0 : pool.threads, WorkerBuffers(nullptr, *this).reals) {}

  // Units are taken in waves, enough of them to keep the threads busy: accumulators exist for one wave only.
  void run() {
    for (int64_t unit = 0; unit < all_units();) {
      unit = fill_wave(unit);
      run_wave();
    }
  }

  // Of the first wave, with all three gradients wanted, where all sequences are alike (as ForwardPass::plan).
  int64_t workspace_reals() const {
    int64_t of_wave = 0;
    if (const int64_t units = all_units(); units > 0) {
      const Sequence& s = sequences_.all.front();
      const int64_t chunks = divide_up(s.k.length, chunk_keys_);
      const int64_t tiles = divide_up(s.q.length, size_.rows) * p_.group();
      const int64_t wave = chunks == 0 ? units : std::min(units, divide_up(enough_chunks(), chunks));
      of_wave = wave * (chunks * std::min(tiles, phase_tiles_) * slot_reals() +
                        padded(s.k.length) * (dim_lanes_ + dim_v_lanes_));
    }
    return pool_.threads * WorkerBuffers(nullptr, *this).reals + of_wave;
  }

 private:
  struct WorkerBuffers {
    GradientTile<Arithmetic> tile;
    Element *k_rows, *k_columns, *v_rows;  // the packed tiles of a chunk
    Real* dq_lanes;
    int64_t reals;

    WorkerBuffers(Real* piece, const MainPass& pass) : tile(piece, pass.p_, pass.size_) {
      Carver<Real> carve(piece == nullptr ? nullptr : piece + tile.reals);
      k_rows = carve.template take_as<Element>(pass.packed_tiles_ * pass.k_tile_);
      k_columns = carve.template take_as<Element>(pass.packed_tiles_ * pass.k_tile_);
      v_rows = carve.template take_as<Element>(pass.packed_tiles_ * pass.v_tile_);
      dq_lanes = carve.take(pass.slot_reals());
      reals = tile.reals + carve.used();
    }
  };

  static TileSize tile_size(const BwdParams& p, const Sequences& sequences) {
    TileSize size = Arithmetic::backward_tile(sequences.longest_q, sequences.longest_k);
    size.keys = fit_blocks<Arithmetic>(size.keys, sequences.longest_k, p.block_mask);
    return size;
  }

  static int64_t padded(int64_t keys) { return round_up(keys, Arithmetic::kKeyPad); }
  int64_t slot_reals() const { return round_up(p_.dim, kLanes) * size_.rows; }

  int64_t all_units() const { return p_.heads == 0 ? 0 : sequences_.count * p_.heads_k; }
  int64_t enough_chunks() const { return 8 * pool_.threads; }

  // Takes units from `unit` on; returns the first of the next wave.
  int64_t fill_wave(int64_t unit) {
    units_.clear();
    chunks_.clear();
    accumulator_rows_ = slots_per_chunk_ = 0;
    while (unit < all_units() && static_cast<int64_t>(chunks_.size()) < enough_chunks()) add_unit(unit++);
    return unit;
  }

  void add_unit(int64_t unit) {
    const Sequence& s = sequences_.all[unit / p_.heads_k];
    const int64_t chunks = divide_up(s.k.length, chunk_keys_), query_blocks = divide_up(s.q.length, size_.rows);
    units_.push_back(
        {&s, unit % p_.heads_k, static_cast<int64_t>(chunks_.size()), chunks, query_blocks, query_blocks * p_.group()});
    for (int64_t c = 0; c < chunks; ++c)
      chunks_.push_back({static_cast<int64_t>(units_.size()) - 1, c, accumulator_rows_ + c * chunk_keys_});
    accumulator_rows_ += padded(s.k.length);
    slots_per_chunk_ = std::max(slots_per_chunk_, std::min(units_.back().tiles, phase_tiles_));
  }

  void run_wave() {
    int64_t phases = 1;
    for (const KeyHead& unit : units_) phases = std::max(phases, divide_up(unit.tiles, phase_tiles_));
    const int64_t chunks = static_cast<int64_t>(chunks_.size());
    const Workspace<Real> dk(1, wants_dk() ? accumulator_rows_ * dim_lanes_ : 0);
    const Workspace<Real> dv(1, wants_dv() ? accumulator_rows_ * dim_v_lanes_ : 0);
    const Workspace<Real> slots(wants_dq() ? chunks * slots_per_chunk_ : 0, slot_reals());
    std::vector<uint8_t> written(static_cast<size_t>(chunks * slots_per_chunk_));
    dk_ = dk.piece(0);
    dv_ = dv.piece(0);
    for (int64_t phase = 0; phase < phases; ++phase) {
      pool_.for_each(chunks,
                     [&](int worker, int64_t c) { run_chunk(worker, chunks_[c], c, phase, slots, written.data()); });
      if (wants_dq()) {
        pool_.for_each(static_cast<int64_t>(units_.size()) * slots_per_chunk_, [&](int worker, int64_t i) {
          const int64_t slot = i % slots_per_chunk_;
          sum_slots(worker, units_[i / slots_per_chunk_], phase * phase_tiles_ + slot, slots, written.data());
        });
      }
    }
  }

  // What the query tiles of one phase give to a chunk's dK and dV, and the chunk's part of their dQ.
  void run_chunk(int worker, const Chunk& chunk, int64_t slot_row, int64_t phase, const Workspace<Real>& slots,
                 uint8_t* written) const {
    const KeyHead& unit = units_[chunk.unit];
    const Rows& k = unit.sequence->k;
    const int64_t last_phase = std::max<int64_t>(0, divide_up(unit.tiles, phase_tiles_) - 1);
    if (phase > last_phase) return;
    const WorkerBuffers buffers(workspace_.piece(worker), *this);
    const Range keys = intersect({chunk.index * chunk_keys_, (chunk.index + 1) * chunk_keys_}, {0, k.length});
    Real* dk = dk_ + chunk.first_acc * dim_lanes_;
    Real* dv = dv_ + chunk.first_acc * dim_v_lanes_;
    if (phase == 0) {
      if (wants_dk()) std::fill(dk, dk + padded(keys.size()) * dim_lanes_, Real(0));
      if (wants_dv()) std::fill(dv, dv + padded(keys.size()) * dim_v_lanes_, Real(0));
    }
    const int64_t first_tile = phase * phase_tiles_, end_tile = std::min((phase + 1) * phase_tiles_, unit.tiles);
    if (!in_place_) pack_keys(unit, keys, first_tile, end_tile, buffers);
    [[maybe_unused]] const typename Arithmetic::ThreadState state;
    for (int64_t t = first_tile; t < end_tile; ++t) {
      const HeadContext<Real> head(p_, *unit.sequence, unit.head_k * p_.group() + t / unit.query_blocks);
      const Range rows = rows_of_tile(unit, t), seen = keys_of_tile(head, rows, keys);
      const int64_t slot = slot_row * slots_per_chunk_ + t % phase_tiles_;
      written[slot] = !seen.empty();
      if (!seen.empty()) run_tile(head, rows, keys, seen, buffers, dk, dv, slots.piece(wants_dq() ? slot : 0));
    }
    if (phase == last_phase) {
      write_keys(p_.dk, unit, keys, p_.dim, dk, static_cast<Real>(p_.score.scale));
      write_keys(p_.dv, unit, keys, p_.dim_v, dv, static_cast<Real>(p_.dropout.keep_scale));
    }
  }

  // From the first visited key of `among` to the last that some row of a query tile could see without a block mask.
  static Range keys_of_tile(const HeadContext<Real>& head, Range rows, Range among) {
    Range seen = intersect(among, head.visibility.keys_of_any(rows));
    if (!seen.empty()) seen.begin = head.blocks.next_key(rows, seen.begin);
    return seen;
  }

  Range rows_of_tile(const KeyHead& unit, int64_t t) const {
    const int64_t block = t % unit.query_blocks;
    return intersect({block * size_.rows, (block + 1) * size_.rows}, {0, unit.sequence->q.length});
  }

  // Packs the keys of a chunk that `keys_of_tile` has for some query tile; others are not read.
  void pack_keys(const KeyHead& unit, Range chunk, int64_t first_tile, int64_t end_tile,
                 const WorkerBuffers& buffers) const {
    const Rows& k = unit.sequence->k;
    for (int64_t n = 0; chunk.begin + n * size_.keys < chunk.end; ++n) {
      const int64_t first = chunk.begin + n * size_.keys, row = k.first() + first;
      Range in_tile{};
      for (int64_t t = first_tile; t < end_tile && in_tile.size() < size_.keys; ++t) {
        const HeadContext<Real> head(p_, *unit.sequence, unit.head_k * p_.group() + t / unit.query_blocks);
        const Range seen = keys_of_tile(head, rows_of_tile(unit, t), intersect(chunk, {first, first + size_.keys}));
        if (!seen.empty())
          in_tile =
              in_tile.empty() ? seen : Range{std::min(in_tile.begin, seen.begin), std::max(in_tile.end, seen.end)};
      }
      if (in_tile.empty()) continue;
      const Range readable{in_tile.begin - first, in_tile.end - first};
      const int64_t k_offset = p_.k.offset(k.batch, unit.head_k, row),
                    v_offset = p_.v.offset(k.batch, unit.head_k, row);
      Arithmetic::pack_key_rows(p_.dtype, p_.k, k_offset, readable, size_.keys, p_.dim, buffers.k_rows + n * k_tile_);
      if (wants_dq())
        Arithmetic::pack_key_columns(p_.dtype, p_.k, k_offset, readable, size_.keys, p_.dim,
                                     buffers.k_columns + n * k_tile_);
      Arithmetic::pack_key_rows(p_.dtype, p_.v, v_offset, readable, size_.keys, p_.dim_v, buffers.v_rows + n * v_tile_);
    }
  }

  void run_tile(const HeadContext<Real>& head, Range rows, Range chunk, Range seen, const WorkerBuffers& buffers,
                Real* dk, Real* dv, Real* slot) const {
    const GradientTile<Arithmetic>& tile = buffers.tile;
    const auto sources = tile.load_queries(p_, delta_, head, rows);
    const auto q_rows = tile.rows_of(p_.dtype, sources.q, rows, p_.dim, in_place_, tile.q_rows);
    const auto dout_rows = tile.rows_of(p_.dtype, sources.dout, rows, p_.dim_v, in_place_, tile.dout_rows);
    const int64_t accumulator_panel = padded(chunk.size()) * kLanes, slot_panel = round_up(p_.dim, kLanes) * kLanes;
    bool first = true;
    for (int64_t n = 0; chunk.begin + n * size_.keys < chunk.end; ++n) {
      const int64_t first_key = chunk.begin + n * size_.keys;
      const Range in_tile = intersect({first_key, first_key + size_.keys}, seen);
      if (in_tile.empty()) continue;
      for_each_stretch(head, rows, in_tile, first_key, in_place_ ? 1 : Arithmetic::kKeyStep, [&](Range keys) {
        const auto keys_of = [&](const Operand& x, auto view, auto view_in_place, const Element* packed, int64_t dim) {
          if constexpr (Arithmetic::kInPlace) {
            const Rows& rows_k = head.sequence.k;
            const int64_t row = rows_k.first() + keys.begin;
            if (in_place_) return view_in_place(x, x.offset(rows_k.batch, head.head / p_.group(), row));
          }
          return view(packed, keys.begin - first_key, size_.keys, dim);
        };
        const Keys k =
            keys_of(p_.k, Arithmetic::key_rows, Arithmetic::key_rows_in_place, buffers.k_rows + n * k_tile_, p_.dim);
        const Keys v =
            keys_of(p_.v, Arithmetic::key_rows, Arithmetic::key_rows_in_place, buffers.v_rows + n * v_tile_, p_.dim_v);
        const TilePlace place{rows.begin, rows.size(), keys.begin, keys.size()};
        tile.compute(p_, head, place, k, v);
        const auto gradients = tile.gradients();
        const int64_t at = (keys.begin - chunk.begin) * kLanes;
        const Keys columns = !wants_dq() ? Keys{}
                                         : keys_of(p_.k, Arithmetic::key_columns, Arithmetic::key_columns_in_place,
                                                   buffers.k_columns + n * k_tile_, p_.dim);
        tile.for_each_step(head, place, [&](const auto& step, int64_t before) {
          const Range new_keys{before, step.keys}, their_rows{step.panel * kLanes, rows.size()};
          if (wants_dv() && !new_keys.empty())
            Arithmetic::outer(gradients.p, new_keys, their_rows, size_, dout_rows, p_.dim_v, dv + at,
                              accumulator_panel);
          if (wants_dk() && !new_keys.empty())
            Arithmetic::outer(gradients.ds, new_keys, their_rows, size_, q_rows, p_.dim, dk + at, accumulator_panel);
          if (wants_dq())
            Arithmetic::combine(columns, size_, step.keys, p_.dim,
                                gradients.ds_lanes + step.panel * size_.panel_elements(), step.panels,
                                slot + step.panel * slot_panel, slot_panel, !first);
        });
        first = false;
      });
    }
  }

  void write_keys(const Operand& x, const KeyHead& unit, Range keys, int64_t dim, const Real* panels,
                  Real factor) const {
    if (x.data == nullptr) return;
    const Rows& k = unit.sequence->k;
    Arithmetic::store_rows(p_.dtype, x, x.offset(k.batch, unit.head_k, k.first() + keys.begin), keys.size(), dim,
                           factor, panels, padded(keys.size()) * kLanes);
  }

  void sum_slots(int worker, const KeyHead& unit, int64_t t, const Workspace<Real>& slots,
                 const uint8_t* written) const {
    if (t >= unit.tiles) return;
    const WorkerBuffers buffers(workspace_.piece(worker), *this);
    const int64_t panel_reals = round_up(p_.dim, kLanes) * kLanes, reals = slot_reals();
    Real* sum = nullptr;
    for (int64_t c = unit.first_chunk; c < unit.first_chunk + unit.chunks; ++c) {
      const int64_t slot = c * slots_per_chunk_ + t % phase_tiles_;
      if (!written[slot]) continue;
      Real* part = slots.piece(slot);
      if (sum == nullptr) {
        sum = part;  // the others are added to the first
        continue;
      }
      for (int64_t x = 0; x < reals; ++x) sum[x] += part[x];
    }
    if (sum == nullptr) {
      std::fill(buffers.dq_lanes, buffers.dq_lanes + reals, Real(0));
      sum = buffers.dq_lanes;
    }
    const Range rows = rows_of_tile(unit, t);
    const Rows& q = unit.sequence->q;
    const int64_t head = unit.head_k * p_.group() + t / unit.query_blocks;
    for (int64_t first = 0; first < rows.size(); first += kLanes, sum += panel_reals) {
      Real scale[kLanes];  // 0 in rows that see nothing: a key's NaN reaches all rows of a product
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t row = std::min(first + lane, rows.size() - 1);
        const int64_t at = p_.log2_sum.offset(q.batch, head, q.first() + rows.begin + row);
        scale[lane] =
            std::isinf(static_cast<const Real*>(p_.log2_sum.data)[at]) ? Real(0) : static_cast<Real>(p_.score.scale);
      }
      Arithmetic::store_lanes(p_.dtype, p_.dq, p_.dq.offset(q.batch, head, q.first() + rows.begin + first),
                              std::min(kLanes, rows.size() - first), p_.dim, scale, sum);
    }
  }

  bool wants_dq() const { return p_.dq.data != nullptr; }
  bool wants_dk() const { return p_.dk.data != nullptr; }
  bool wants_dv() const { return p_.dv.data != nullptr; }

  const BwdParams& p_;
  const Sequences& sequences_;
  const RowArray delta_;
  const ThreadPool pool_;
  const TileSize size_;
  const bool in_place_;
  const int64_t phase_tiles_;
  const int64_t chunk_keys_;       // keys of a chunk, a multiple of the tile
  const int64_t packed_tiles_;     // of a chunk
  const int64_t k_tile_, v_tile_;  // elements of a packed tile
  const int64_t dim_lanes_, dim_v_lanes_;
  const Workspace<Real> workspace_;
  std::vector<KeyHead> units_;  // of the current wave
  std::vector<Chunk> chunks_;
  int64_t accumulator_rows_ = 0;
  int64_t slots_per_chunk_ = 0;  // of dQ: for the query tiles of a phase
  Real *dk_ = nullptr, *dv_ = nullptr;
};

ThreadPool backward_pool(const AttentionParams& p, const Sequences& sequences, const ThreadPool& pool) {
  return pool_for(pool, 2.5 * score_elements(p, sequences) * static_cast<double>(p.dim + p.dim_v));
}

template <class Real>
void backward_as(const BwdParams& p, const ThreadPool& pool) {
  const Sequences sequences(p);
  const ThreadPool threads = backward_pool(p, sequences, pool);
  const bool packed = p.rows_q.cu_seqlens.given();
  const int64_t rows = p.rows_q.rows;
  const Workspace<Real> deltas(1, (packed ? 1 : p.batch) * p.heads * rows);
  const RowArray delta{deltas.piece(0), packed ? 0 : p.heads * rows, rows};
  prepare_pass<Real>(p, sequences, delta, threads);
  if (p.dq.data != nullptr || p.dk.data != nullptr || p.dv.data != nullptr)
    main_pass<Real>(p, sequences, delta, threads);
  if (p.dbias.given()) bias_pass<Real>(p, sequences, delta, threads);
}

}  // namespace

template <class Real>
void main_pass(const BwdParams& p, const Sequences& sequences, const RowArray& delta, const ThreadPool& pool) {
  with_arithmetic(p, [&](auto arithmetic) {
    if constexpr (std::is_same_v<typename decltype(arithmetic)::Real, Real>)
      MainPass<decltype(arithmetic)>(p, sequences, delta, pool).run();
  });
}

template <class Real>
int64_t backward_workspace_bytes(const AttentionParams& shape, const ThreadPool& pool) {
  BwdParams p;
  static_cast<AttentionParams&>(p) = shape;
  const Sequences sequences = Sequences::of_plan(p);
  const int64_t deltas = p.batch * p.heads * sequences.longest_q;
  int64_t reals = deltas;
  with_arithmetic(p, [&](auto arithmetic) {
    if constexpr (std::is_same_v<typename decltype(arithmetic)::Real, Real>)
      reals += MainPass<decltype(arithmetic)>(p, sequences, {}, backward_pool(p, sequences, pool)).workspace_reals();
  });
  return reals * static_cast<int64_t>(sizeof(Real));
}

template int64_t backward_workspace_bytes<float>(const AttentionParams&, const ThreadPool&);
template int64_t backward_workspace_bytes<double>(const AttentionParams&, const ThreadPool&);

void backward(const BwdParams& params, const ThreadPool& pool) {
  params.dtype == DataType::kFloat64 ? backward_as<double>(params, pool) : backward_as<float>(params, pool);
}

}  // namespace flash::cpu
