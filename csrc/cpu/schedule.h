// Which work there is: sequences cut into blocks of rows, as one list of items.
#pragma once

#include <algorithm>
#include <vector>

#include "common/sequence.h"
#include "common/visibility.h"
#include "cpu/parallel.h"

namespace flash::cpu {

struct Sequences {
  std::vector<Sequence> all;
  int64_t longest_q = 0, longest_k = 0;
  int64_t count = 0;  // all.size(), but where one stands for all

  explicit Sequences(const AttentionParams& p) : Sequences(p, p.batch) {}

  // Of a plan, where all have the same length: the first stands for them.
  static Sequences of_plan(const AttentionParams& p) { return {p, std::min<int64_t>(p.batch, 1)}; }

 private:
  Sequences(const AttentionParams& p, int64_t some) : count(p.batch) {
    all.reserve(static_cast<size_t>(some));
    for (int64_t b = 0; b < some; ++b) {
      all.push_back(sequence(p, b));
      longest_q = std::max(longest_q, all.back().q.length);
      longest_k = std::max(longest_k, all.back().k.length);
    }
  }
};

// The sum of a number over all sequences.
template <class Value, class NumberOf>
Value sum_over(const Sequences& sequences, const NumberOf& number_of) {
  Value sum = 0;
  for (const Sequence& s : sequences.all) sum += number_of(s);
  if (sequences.all.empty()) return sum;
  return sum * static_cast<Value>(sequences.count / static_cast<int64_t>(sequences.all.size()));
}

// Items (sequence, unit, block): `units` heads of each sequence, each cut into blocks of `block` rows. The item list
// itself is never stored: one running count per sequence finds an item again.
class BlockItems {
 public:
  struct Item {
    int64_t sequence, unit, block;
  };

  template <class LengthOf>
  BlockItems(const Sequences& sequences, int64_t units, int64_t block, const LengthOf& length_of) : units_(units) {
    first_.reserve(sequences.all.size() + 1);
    first_.push_back(0);
    for (const Sequence& s : sequences.all) first_.push_back(first_.back() + units * divide_up(length_of(s), block));
  }

  int64_t count() const { return first_.back(); }

  Item operator[](int64_t item) const {
    const auto after = std::upper_bound(first_.begin(), first_.end(), item);
    const int64_t s = after - first_.begin() - 1, blocks = (*after - first_[s]) / units_, rest = item - first_[s];
    return {s, rest / blocks, rest % blocks};
  }

  int64_t blocks_of(int64_t sequence) const {
    return units_ == 0 ? 0 : (first_[sequence + 1] - first_[sequence]) / units_;
  }

 private:
  int64_t units_;
  std::vector<int64_t> first_;
};

// Waking threads costs some microseconds: below about a million multiply-adds one thread is faster.
inline ThreadPool pool_for(const ThreadPool& pool, double multiply_adds) {
  return multiply_adds < 1e6 ? ThreadPool{} : pool;
}

inline double score_elements(const AttentionParams& p, const Sequences& sequences) {
  const auto pairs = [](const Sequence& s) {
    return static_cast<double>(s.q.length) * static_cast<double>(s.k.length);
  };
  return sum_over<double>(sequences, pairs) * static_cast<double>(p.heads);
}

}  // namespace flash::cpu
