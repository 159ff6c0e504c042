// Running items on the caller's threads. The library owns no threads: the binding lends torch's pool, so that
// torch.set_num_threads counts here too.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace flash::cpu {

struct ThreadPool {
  int threads = 1;
  // Calls task(worker, context) once for every worker in [0, workers), possibly one after the other.
  void (*run)(int workers, void (*task)(int worker, void* context), void* context) = nullptr;

  // Calls body(worker, item) for every item in [0, items), in any order and place: results must not depend on either.
  // Items are handed out one by one in ascending order: put the longest first.
  template <class Body>
  void for_each(int64_t items, const Body& body) const {
    if (workers(items) <= 1) {
      for (int64_t item = 0; item < items; ++item) body(0, item);
      return;
    }
    struct Context {
      std::atomic<int64_t> next{0};
      int64_t items;
      const Body* body;
    } context{.items = items, .body = &body};
    const auto task = [](int worker, void* opaque) {
      auto& c = *static_cast<Context*>(opaque);
      for (int64_t item; (item = c.next.fetch_add(1, std::memory_order_relaxed)) < c.items;) (*c.body)(worker, item);
    };
    run(workers(items), task, &context);
  }

  int workers(int64_t items) const { return static_cast<int>(items < threads ? items : threads); }
};

// Scratch for all workers of a region, taken before the region starts: running out of memory is then an exception on
// the caller's thread. Every piece starts on a cache line.
template <class Real>
class Workspace {
 public:
  Workspace(int64_t pieces, int64_t reals) : stride_(padded(reals)) {
    const size_t bytes = static_cast<size_t>(pieces) * static_cast<size_t>(stride_) * sizeof(Real);
    data_.reset(static_cast<Real*>(std::aligned_alloc(kAlignment, bytes > 0 ? bytes : kAlignment)));
    if (!data_) throw std::bad_alloc();
  }

  Real* piece(int64_t i) const { return data_.get() + i * stride_; }

 private:
  static constexpr int64_t kAlignment = 64;
  static int64_t padded(int64_t reals) {
    constexpr int64_t kReals = kAlignment / static_cast<int64_t>(sizeof(Real));
    return (reals + kReals - 1) / kReals * kReals;
  }
  struct Free {
    void operator()(Real* p) const { std::free(p); }
  };
  int64_t stride_;
  std::unique_ptr<Real, Free> data_;
};

// Cuts a worker's piece into named buffers.
template <class Real>
class Carver {
 public:
  explicit Carver(Real* begin) : begin_(begin) {}
  Real* take(int64_t reals) {
    Real* p = begin_ == nullptr ? nullptr : begin_ + used_;
    used_ += (reals + 15) / 16 * 16;
    return p;
  }
  template <class Element>
  Element* take_as(int64_t elements) {
    return reinterpret_cast<Element*>(take((elements * static_cast<int64_t>(sizeof(Element)) + sizeof(Real) - 1) /
                                           static_cast<int64_t>(sizeof(Real))));
  }
  int64_t used() const { return used_; }

 private:
  Real* begin_;
  int64_t used_ = 0;
};

}  // namespace flash::cpu
