// What happens to a panel between the products, over the vectors of vector_kernels.h: softcap, ALiBi, bias, masks,
// dropout. The same rules: internal linkage, no library function.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu/isa/vector_kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flash::cpu {
namespace {

// A type that depends on template arguments: GCC takes the size of another before it knows them.
template <class Element, int kBytes>
struct VectorOf {
  typedef Element Type __attribute__((vector_size(kBytes)));
};

template <class Vector>
inline __attribute__((always_inline)) void read(Vector& x, const void* p) {
  std::memcpy(&x, p, sizeof(x));
}

// Lane j of a pair (a, b) of vectors, as an index into both, when blocks of kBlock lanes change places: lower(j) builds
// the first vector, upper(j) the second.
template <int kWidth, int kBlock>
struct Exchange {
  static constexpr int lower(int j) { return (j & kBlock) == 0 ? j : kWidth + j - kBlock; }
  static constexpr int upper(int j) { return (j & kBlock) == 0 ? j + kBlock : kWidth + j; }
};

// Transposes kWidth vectors of kWidth lanes: halves, quarters, ... change places.
template <int kWidth, int kBlock = kWidth / 2, class Vector>
inline __attribute__((always_inline)) void transpose_square(Vector (&r)[kWidth]) {
  if constexpr (kBlock > 0) {
    [&]<int... kLane>(std::integer_sequence<int, kLane...>) {
      using Places = Exchange<kWidth, kBlock>;
      for (int i = 0; i < kWidth; ++i) {
        if ((i & kBlock) != 0) continue;
        const Vector a = r[i], b = r[i + kBlock];
        r[i] = __builtin_shufflevector(a, b, Places::lower(kLane)...);
        r[i + kBlock] = __builtin_shufflevector(a, b, Places::upper(kLane)...);
      }
    }(std::make_integer_sequence<int, kWidth>());
    transpose_square<kWidth, kBlock / 2>(r);
  }
}

inline const char* copy_bytes(char* to, const char* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  return to;
}

inline constexpr int64_t kFlags = 32;

// Bit i: whether flags[i] is not 0.
inline __attribute__((always_inline)) uint32_t bits_of(const char* flags) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(flags));
  return _mm256_test_epi8_mask(x, x);
#elif defined(__AVX2__)
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(flags));
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256())));
#elif defined(__SSE2__)
  const auto half = [](const char* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(x, _mm_setzero_si128())));
  };
  return ~(half(flags) | half(flags + 16) << 16);
#else
  uint32_t bits = 0;
  for (int i = 0; i < kFlags; ++i) bits |= static_cast<uint32_t>(flags[i] != 0) << i;
  return bits;
#endif
}

template <class Real, int kVectorBytes, class V>
struct Panels {
  static constexpr int kWidth = V::kWidth, kPanelVectors = V::kPanelVectors;
  using Vector = typename V::Vector;
  using Integers = typename V::Integers;
  using Int = typename Bits<Real>::Int;
  using Floats = typename VectorOf<float, kWidth * 4>::Type;
  using Words32 = typename VectorOf<uint32_t, kWidth * 4>::Type;
  using Chars = typename VectorOf<int8_t, kWidth>::Type;

  static Vector absolute(Vector x) { return V::select(x < Vector{}, -x, x); }

  // ---- Types ----

  // Calls use(elements, first, count) with kWidth elements from `first` on in memory, where the last may be a copy.
  template <int kBytes, class Use>
  static void for_each_vector(const void* from, int64_t count, const Use& use) {
    const auto* data = static_cast<const char*>(from);
    alignas(64) char rest[kWidth * kBytes] = {};
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) use(data + i * kBytes, i, static_cast<int64_t>(kWidth));
    if (i < count) use(copy_bytes(rest, data + i * kBytes, (count - i) * kBytes), i, count - i);
  }

  template <class Element>
  static Vector from_elements(const char* at) {
    typename VectorOf<Element, kWidth * sizeof(Element)>::Type x;
    read(x, at);
    return __builtin_convertvector(x, Vector);
  }
  template <DataType kType>
  static Vector from_half_elements(const char* at) {
    typename VectorOf<uint16_t, kWidth * 2>::Type x;
    read(x, at);
    return from_halves<kType>(__builtin_convertvector(x, Words32));
  }

  static void load(DataType type, const void* from, int64_t count, Real* to) {
    const auto put = [to](Vector x, int64_t first, int64_t some) {
      if (some == kWidth) return V::store(to + first, x);
      for (int64_t i = 0; i < some; ++i) to[first + i] = x[i];
    };
    switch (type) {
      case DataType::kFloat64:
        return for_each_vector<8>(from, count, [&](auto at, auto i, auto n) { put(from_elements<double>(at), i, n); });
      case DataType::kFloat32:
        return for_each_vector<4>(from, count, [&](auto at, auto i, auto n) { put(from_elements<float>(at), i, n); });
      case DataType::kFloat16:
        return for_each_vector<2>(
            from, count, [&](auto at, auto i, auto n) { put(from_half_elements<DataType::kFloat16>(at), i, n); });
      case DataType::kBFloat16:
        return for_each_vector<2>(
            from, count, [&](auto at, auto i, auto n) { put(from_half_elements<DataType::kBFloat16>(at), i, n); });
    }
  }

  static Words32 either(Words32 condition, Words32 a, Words32 b) { return (condition & a) | (~condition & b); }

  // As to_fp16 and to_bf16 of cpu/convert.h.
  template <DataType kType>
  static Words32 to_halves(Vector x) {
    const Words32 bits = (Words32) __builtin_convertvector(x, Floats), size = bits & 0x7FFFFFFFu;
    const auto is_nan = (Words32)(size > 0x7F800000u);
    if constexpr (kType == DataType::kBFloat16)
      return either(is_nan, (bits >> 16) | 0x0040u, (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    const Words32 normal = (size - (112u << 23) + 0x0FFFu + ((size >> 13) & 1u)) >> 13;  // may carry into Inf: right
    const Words32 small = (Words32)((Floats)size + 0.5f) - 0x3F000000u;  // the addition rounds at fp16's last place
    const Words32 large = either(is_nan, Words32{} + 0x7E00u, Words32{} + 0x7C00u);
    const Words32 finite = either((Words32)(size < 0x38800000u), small, normal);
    return ((bits >> 16) & 0x8000u) | either((Words32)(size >= 0x47800000u), large, finite);
  }

  template <DataType kType>
  static void store_halves(const Real* from, int64_t count, void* to) {
    for_each_vector<sizeof(Real)>(from, count, [&](const char* at, int64_t first, int64_t some) {
      Vector x;
      read(x, at);
      const auto halves = __builtin_convertvector(to_halves<kType>(x), typename VectorOf<uint16_t, kWidth * 2>::Type);
      auto* out = static_cast<uint16_t*>(to) + first;
      if (some == kWidth) {
        std::memcpy(out, &halves, sizeof(halves));
      } else {
        for (int64_t i = 0; i < some; ++i) out[i] = halves[i];
      }
    });
  }

  static void store(DataType type, const Real* from, int64_t count, void* to) {
    switch (type) {
      case DataType::kFloat64:
        for (int64_t i = 0; i < count; ++i) static_cast<double*>(to)[i] = from[i];
        return;
      case DataType::kFloat32:
        for (int64_t i = 0; i < count; ++i) static_cast<float*>(to)[i] = static_cast<float>(from[i]);
        return;
      case DataType::kFloat16:
        return store_halves<DataType::kFloat16>(from, count, to);
      case DataType::kBFloat16:
        return store_halves<DataType::kBFloat16>(from, count, to);
    }
  }

  static void transpose(const Real* in, int64_t in_stride, int64_t rows, int64_t columns, Real factor, Real* out,
                        int64_t out_stride) {
    int64_t r = 0;
    for (; r + kWidth <= rows; r += kWidth) {
      int64_t c = 0;
      for (; c + kWidth <= columns; c += kWidth) {
        Vector square[kWidth];
        for (int i = 0; i < kWidth; ++i) square[i] = V::broadcast(factor) * V::load(in + (r + i) * in_stride + c);
        transpose_square<kWidth>(square);
        for (int i = 0; i < kWidth; ++i) V::store(out + (c + i) * out_stride + r, square[i]);
      }
      for (; c < columns; ++c)
        for (int i = 0; i < kWidth; ++i) out[c * out_stride + r + i] = factor * in[(r + i) * in_stride + c];
    }
    for (; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) out[c * out_stride + r] = factor * in[r * in_stride + c];
  }

  static void scale_lanes(int64_t rows, const Real* factor, Real* x) {
    for (int v = 0; v < kPanelVectors; ++v) {
      const Vector by = V::load(factor + v * kWidth);
      Real* at = x + v * kWidth;
      for (int64_t row = 0; row < rows; ++row, at += kLanes)
        V::store(at, V::select(by == Vector{}, Vector{}, V::load(at) * by));
    }
  }

  // ---- Logits ----

  // tanh = (e^2y - 1) / (e^2y + 1), with e^2y - 1 = 2^n · (e^r - 1) + (2^n - 1), which is as good for small y.
  static void softcap(int64_t count, Real scale, Real softcap, Real* scores, Real* derivative) {
    // Finite, because infinity times a score of 0 is no number; tanh does not tell the difference.
    const Real ratio = scale == 0 ? Real(0) : scale / softcap, largest = Bits<Real>::kLargest;
    const Vector factor = V::broadcast(ratio > largest ? largest : ratio < -largest ? -largest : ratio);
    const Vector cap = V::broadcast(softcap), one = V::broadcast(Real(1)), two = V::broadcast(Real(2));
    const Vector most = V::broadcast(Real(Bits<Real>::kTanhIsOne));
    for (int64_t i = 0; i < count; i += kWidth) {
      const Vector y = factor * V::load(scores + i), size = absolute(y), x = two * V::select(size > most, most, size);
      const Vector shifted = x * V::broadcast(V::kLog2E) + V::broadcast(Bits<Real>::kRound);
      const Vector n = shifted - V::broadcast(Bits<Real>::kRound);
      const Vector r = (x - n * V::broadcast(Bits<Real>::kLn2High)) - n * V::broadcast(Bits<Real>::kLn2Low);
      using Words = typename V::Words;
      const Vector power = (Vector)((Words)one + ((Words)shifted << Bits<Real>::kMantissa));
      const Vector less_one = power * (r * V::exp_series_less_one(r)) + (power - one);
      const Vector t = less_one / (less_one + two);
      V::store(scores + i, cap * V::select(y < Vector{}, -t, t));
      if (derivative != nullptr) V::store(derivative + i, (one - t) * (one + t));
    }
  }

  static void add_alibi(int64_t keys, Real scale, Real slope, int64_t distance, Real* scores) {
    Integers lane[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v)
      for (int i = 0; i < kWidth; ++i) lane[v][i] = static_cast<Int>(v * kWidth + i);
    for (int64_t j = 0; j < keys; ++j)
      for (int v = 0; v < kPanelVectors; ++v, scores += kWidth) {
        const Vector d = __builtin_convertvector(lane[v] + static_cast<Int>(distance - j), Vector);
        V::store(scores, V::broadcast(scale) * V::load(scores) - V::broadcast(slope) * absolute(d));
      }
  }

  // fp16 or bf16 in the low halves of words. fp16: its exponent and fraction, moved, are the number times 2^-112; the
  // multiplication rounds nothing and is right for subnormal numbers too.
  template <DataType kType>
  static Vector from_halves(Words32 bits) {
    if constexpr (kType == DataType::kBFloat16) return __builtin_convertvector((Floats)(bits << 16), Vector);
    const Words32 size = (bits & 0x7FFFu) << 13, sign = (bits & 0x8000u) << 16;
    const Words32 scaled = (Words32)((Floats)size * 0x1p112f);
    const Words32 special = size | 0x7F800000u;  // Inf, NaN
    const auto is_special = (Words32)(size >= 0x0F800000u);
    return __builtin_convertvector((Floats)(sign | (is_special & special) | (~is_special & scaled)), Vector);
  }

  template <DataType kType>
  static constexpr bool kIsHalf = kType == DataType::kFloat16 || kType == DataType::kBFloat16;
  template <DataType kType>
  static constexpr int64_t kBytes = kIsHalf<kType>                ? 2
                                    : kType == DataType::kFloat64 ? 8
                                                                  : 4;

  // Transposes kWidth rows × kKeys keys, of which `rows` × `keys` are there, and adds them to kWidth lanes of the scores.
  // kWhole: all are there.
  template <DataType kType, bool kWhole>
  static inline __attribute__((always_inline)) void add_square(const char* at, int64_t row_bytes, int64_t rows,
                                                               int64_t keys, Vector scale, Real* scores) {
    using Element =
        std::conditional_t<kIsHalf<kType>, uint32_t, std::conditional_t<kType == DataType::kFloat64, double, float>>;
    typename VectorOf<Element, kWidth * sizeof(Element)>::Type r[kWidth];
    alignas(64) char copy[kWidth][sizeof(r[0])];
    if constexpr (!kWhole) {
      std::memset(copy, 0, sizeof(copy));
      for (int64_t i = 0; i < rows; ++i) copy_bytes(copy[i], at + i * row_bytes, keys * kBytes<kType>);
    }
    for (int i = 0; i < kWidth; ++i) {
      const char* row = at + i * row_bytes;
      if constexpr (kWhole) prefetch(row);
      read(r[i], kWhole ? row : copy[i]);
    }
    transpose_square<kWidth>(r);
    const auto add = [&](int64_t key, Vector values) {
      Real* to = scores + key * kLanes;
      if (kWhole || key < keys)
        V::store(to, V::select(values == V::broadcast(-V::kInfinity), values, scale * V::load(to) + values));
    };
    for (int j = 0; j < kWidth; ++j) {
      if constexpr (kIsHalf<kType>) {
        add(2 * j, from_halves<kType>(r[j] & 0xFFFFu));
        add(2 * j + 1, from_halves<kType>(r[j] >> 16));
      } else {
        add(j, __builtin_convertvector(r[j], Vector));
      }
    }
  }

  // scores[key][lane] = scale · scores + element (row lane, key). Words of 16-bit elements hold two keys.
  template <DataType kType>
  static void add_rows(const PanelRows& x, Real scale, Real* scores) {
    constexpr int64_t kKeys = kWidth * (kIsHalf<kType> ? 2 : 1);
    const int64_t row_bytes = x.row_stride * kBytes<kType>;
    const auto* data = static_cast<const char*>(x.data);
    const Vector factor = V::broadcast(scale);
    for (int64_t first = 0; first < x.keys; first += kKeys)
      for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
        const int64_t keys = V::smaller(kKeys, x.keys - first), rows = V::smaller(kWidth, x.rows - lane);
        const char* at = data + lane * row_bytes + first * kBytes<kType>;
        Real* to = scores + first * kLanes + lane;
        if (keys == kKeys && rows == kWidth) {
          add_square<kType, true>(at, row_bytes, rows, keys, factor, to);
        } else {
          add_square<kType, false>(at, row_bytes, rows, keys, factor, to);
        }
      }
  }

  static void add_bias(const PanelRows& x, Real scale, Real* scores) {
    switch (x.dtype) {
      case DataType::kFloat64:
        return add_rows<DataType::kFloat64>(x, scale, scores);
      case DataType::kFloat32:
        return add_rows<DataType::kFloat32>(x, scale, scores);
      case DataType::kFloat16:
        return add_rows<DataType::kFloat16>(x, scale, scores);
      case DataType::kBFloat16:
        return add_rows<DataType::kBFloat16>(x, scale, scores);
    }
  }

  // ---- Masks ----

  static Integers lanes_of(const uint8_t* flags) {  // all bits where the byte is not zero
    Chars x;
    read(x, flags);
    return __builtin_convertvector(x != 0, Integers);
  }

  static void hide_masked(const PanelBytes& x, Real* scores) {
    alignas(64) char rest[kFlags] = {};
    for (int64_t first = 0; first < x.keys; first += kFlags) {
      const int64_t some = V::smaller(kFlags, x.keys - first);
      alignas(64) uint32_t bits[kLanes] = {};  // of a lane: its keys
      for (int64_t row = 0; row < x.rows; ++row) {
        const auto* at = reinterpret_cast<const char*>(x.data + row * x.row_stride + first);
        prefetch(at);
        bits[row] = bits_of(some < kFlags ? copy_bytes(rest, at, some) : at);
      }
      for (int v = 0; v < kPanelVectors; ++v) {
        Words32 lanes;
        read(lanes, bits + v * kWidth);
        Integers left = __builtin_convertvector(lanes, Integers);
        Real* to = scores + first * kLanes + v * kWidth;
        for (int64_t j = 0; j < some; ++j, to += kLanes, left >>= 1)
          V::store(to, V::select((left & 1) != 0, V::load(to), V::broadcast(-V::kInfinity)));
      }
    }
  }

  // The rows of a mask or bias lie far apart: no hardware sees ahead. Two lines, because the next one is wanted at once;
  // into the second cache, because rows a power of two apart drive each other out of the first. Where nothing is, nothing
  // happens.
  static void prefetch(const char* at) { __builtin_prefetch(at + 128, 0, 2); }

  static void hide_outside(const KeyBounds& bounds, int64_t first, int64_t last, Real* scores) {
    using Bounds = typename VectorOf<int32_t, kWidth * 4>::Type;
    for (int v = 0; v < kPanelVectors; ++v) {
      Bounds begin, end;
      read(begin, bounds.begin + v * kWidth);
      read(end, bounds.end + v * kWidth);
      for (auto j = static_cast<int32_t>(first); j < last; ++j) {
        Real* s = scores + j * kLanes + v * kWidth;
        const Integers seen = __builtin_convertvector((begin <= j) & (end > j), Integers);
        V::store(s, V::select(seen, V::load(s), V::broadcast(-V::kInfinity)));
      }
    }
  }

  // ---- Dropout ----

  static constexpr int kDraws = kVectorBytes / 8;  // counters in a vector, one in 64 bits
  using Counters = typename VectorOf<uint64_t, kVectorBytes>::Type;

  // Of the low 32 bits of each.
  static Counters product(Counters a, Counters b) {
#if defined(__AVX512F__)
    if constexpr (kVectorBytes == 64) return (Counters)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#endif
#if defined(__AVX2__)
    if constexpr (kVectorBytes == 32) return (Counters)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#endif
#if defined(__SSE2__)
    if constexpr (kVectorBytes == 16) return (Counters)_mm_mul_epu32((__m128i)a, (__m128i)b);
#endif
    return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
  }

  // philox4x32 of common/philox.h; the upper halves of the counters may hold anything.
  static void philox(Counters (&c)[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 7; ++round) {
      const Counters product0 = product(c[0], Counters{} + 0xD2511F53u),
                     product1 = product(c[2], Counters{} + 0xCD9E8D57u);
      c[0] = (product1 >> 32) ^ c[1] ^ key0;
      c[2] = (product0 >> 32) ^ c[3] ^ key1;
      c[1] = product1;
      c[3] = product0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }

  static constexpr int64_t kQueryGroups = 8, kKeyGroups = 4, kGroups = kQueryGroups * kKeyGroups, kBlockKeys = 32;

  struct Places {
    uint64_t query[kGroups], key[kGroups];
  };
  static constexpr Places places() {
    Places places{};
    for (uint64_t i = 0; i < kGroups; ++i) {
      places.query[i] = i % kQueryGroups;
      places.key[i] = i / kQueryGroups;
    }
    return places;
  }

  // The 8 × 4 groups of each block of 16 rows × 32 keys, 2 rows × 8 keys each (common/dropout.h): group 8 · c + g has the
  // rows g, g + 8 and the keys 2 c, 2 c + 1 of each eight.
  static void dropout_panel(const DropoutPanel& x, uint8_t* keep) {
    static constexpr Places kPlaces = places();
    alignas(64) uint32_t words[4][kGroups];
    const int64_t last = x.first_key + x.keys;
    for (int64_t k0 = x.first_key / kBlockKeys * kBlockKeys; k0 < last; k0 += kBlockKeys) {
      const auto key_block = static_cast<uint64_t>(k0 / kBlockKeys), key_group = key_block * kKeyGroups;
      for (int64_t group = 0; group < kGroups; group += kDraws) {
        Counters query, key;
        read(query, kPlaces.query + group);
        read(key, kPlaces.key + group);
        Counters c[4] = {query + x.query_group, key + key_group, Counters{} + (x.salt2 ^ (x.query_group >> 32)),
                         Counters{} + (x.salt3 ^ (key_group >> 32))};
        philox(c, x.key0, x.key1);
        for (int word = 0; word < 4; ++word) {
          const auto low = __builtin_convertvector(c[word], typename VectorOf<uint32_t, kDraws * 4>::Type);
          std::memcpy(words[word] + group, &low, sizeof(low));
        }
      }
      const uint32_t phase = x.phase + static_cast<uint32_t>(key_block) * x.phase_step;
      const uint32_t least = (x.threshold >> 8) + (phase < x.threshold << 24);
      for (int64_t j = 0; j < kBlockKeys; ++j) {
        const int64_t key = k0 + j - x.first_key;
        if (0 <= key && key < x.keys)
          compare(words[j % 2 * 2 + j / 16] + j / 2 % kKeyGroups * kQueryGroups, j / 8 % 2 * 16, least,
                  keep + key * kLanes);
      }
    }
  }

  // One key: the draws of its rows are a byte of eight words, then the byte above.
  static void compare(const uint32_t* words, int64_t shift, uint32_t least, uint8_t* keep) {
    typename VectorOf<uint32_t, 32>::Type drawn;
    using Flags = typename VectorOf<uint8_t, 8>::Type;
    read(drawn, words);
    const Flags low = __builtin_convertvector((drawn >> shift & 0xFFu) >= least, Flags) & 1;
    const Flags high = __builtin_convertvector((drawn >> (shift + 8) & 0xFFu) >= least, Flags) & 1;
    std::memcpy(keep, &low, sizeof(low));
    std::memcpy(keep + kQueryGroups, &high, sizeof(high));
  }

  static void drop(const uint8_t* keep, int64_t keys, Real* x) {
    for (int64_t at = 0; at < keys * kLanes; at += kWidth)
      V::store(x + at, V::select(lanes_of(keep + at), V::load(x + at), Vector{}));
  }
};

// Everything of one instruction set.
template <class Real, int kVectorBytes, int kRows, int kVectors, int64_t kSlice>
constexpr MicroKernels<Real> make_kernels(const char* name) {
  using V = Vectors<Real, kVectorBytes, kRows, kVectors, kSlice>;
  using P = Panels<Real, kVectorBytes, V>;
  return {name,        V::multiply,    V::softmax_step, V::gradient_step, P::load,
          P::store,    P::transpose,   P::scale_lanes,  P::softcap,       P::add_alibi,
          P::add_bias, P::hide_masked, P::hide_outside, P::dropout_panel, P::drop};
}

}  // namespace
}  // namespace flash::cpu
