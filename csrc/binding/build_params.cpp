#include "binding/build_params.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "binding/check.h"
#include "common/block_mask.h"
#include "common/sequence.h"

namespace flash {
namespace {

using torch::headeronly::ScalarType;
using Sizes = std::vector<int64_t>;

DataType data_type(ScalarType dtype, const char* name) {
  switch (dtype) {
    case ScalarType::Double:
      return DataType::kFloat64;
    case ScalarType::Float:
      return DataType::kFloat32;
    case ScalarType::Half:
      return DataType::kFloat16;
    case ScalarType::BFloat16:
      return DataType::kBFloat16;
    default:
      FLASH_CHECK(false, name, " must be fp64, fp32, fp16 or bf16");
  }
  return DataType::kFloat32;
}

int32_t dtype_code(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return aoti_torch_dtype_float64();
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    default:
      FLASH_CHECK(dtype == ScalarType::Int, "no tensor of this dtype is allocated here");
      return aoti_torch_dtype_int32();
  }
}

// The type of softmax, statistics, slopes and sink.
ScalarType compute_type(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

void check_same_device(const Tensor& x, const Tensor& q, const char* name) {
  FLASH_CHECK(x.device() == q.device(), name, " must be on the device of q");
}

void check_shape(const Tensor& x, const Sizes& shape, const char* name) {
  bool same = x.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i) same = x.size(static_cast<int64_t>(i)) == shape[i];
  FLASH_CHECK(same, name, " has a shape that does not fit the other tensors");
}

// (batch, row, head, dim), or (row, head, dim) of packed sequences.
Operand operand(const Tensor& x, bool packed, const char* name) {
  const int64_t d = packed ? 2 : 3;
  FLASH_CHECK(x.dim() == d + 1, name, " must have ", d + 1, " dimensions, has ", x.dim());
  FLASH_CHECK(x.size(d) <= 1 || x.stride(d) == 1 || x.numel() == 0, name, " must have stride 1 in its last dimension");
  return {x.data_ptr(), packed ? 0 : x.stride(0), x.stride(d - 2), x.stride(d - 1)};
}

// (batch, head, row), or (head, row) of packed sequences.
RowArray row_array(const Tensor& x, bool packed, int64_t first = 0) {
  const int64_t heads = packed ? 0 : 1, element = static_cast<int64_t>(x.element_size());
  return {static_cast<char*>(x.data_ptr()) + first * element, packed ? 0 : x.size(1) * x.size(2), x.size(heads + 1)};
}

IndexArray index_array(const OptionalTensor& x, const Tensor& q, int64_t size, const char* name) {
  if (!x.has_value()) return {};
  check_shape(*x, {size}, name);
  check_same_device(*x, q, name);
  FLASH_CHECK(x->is_contiguous(), name, " must be contiguous");
  const ScalarType dtype = x->scalar_type();
  FLASH_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, name, " must be int32 or int64");
  // An empty tensor may have no memory; what it stands for is still given.
  static constexpr int64_t kNothing = 0;
  return {x->numel() == 0 ? &kNothing : x->data_ptr(), dtype == ScalarType::Long};
}

RowLayout row_layout(const Tensor& x, const Tensor& q, int64_t batch, const OptionalTensor& cu_seqlens,
                     const OptionalTensor& seqused, const OptionalTensor& leftpad) {
  RowLayout layout;
  layout.rows = x.size(cu_seqlens.has_value() ? 0 : 1);
  layout.cu_seqlens = index_array(cu_seqlens, q, batch + 1, "cu_seqlens");
  layout.seqused = index_array(seqused, q, batch, "seqused");
  layout.leftpad = index_array(leftpad, q, batch, "leftpad");
  return layout;
}

Broadcast broadcast(const Tensor& x, const Tensor& q, const AttentionParams& p, const char* name) {
  check_same_device(x, q, name);
  FLASH_CHECK(x.dim() == 4, name, " must have 4 dimensions, has ", x.dim());
  const bool packed = p.rows_q.cu_seqlens.given();
  const std::array<int64_t, 4> full{p.batch, p.heads, packed ? -1 : p.rows_q.rows, packed ? -1 : p.rows_k.rows};
  for (int64_t d = 0; d < 4; ++d)
    FLASH_CHECK(x.size(d) == 1 || full[d] < 0 || x.size(d) == full[d], name, " dimension ", d, " is ", x.size(d),
                ", must be 1 or ", full[d]);
  const auto stride = [&](int64_t d) { return x.size(d) == 1 ? 0 : x.stride(d); };
  return {x.data_ptr(), stride(0), stride(1), stride(2), stride(3)};
}

BlockMask block_mask(const Tensor& q, const AttentionParams& p, const CallOptions& options) {
  const bool given = options.block_kinds.has_value();
  FLASH_CHECK(given == options.block_patterns.has_value() && given == options.key_lists.has_value() &&
                  given == options.query_lists.has_value(),
              "block_kinds, block_patterns, key_lists and query_lists go together");
  if (!given) return {};
  const Tensor &kinds = *options.block_kinds, &patterns = *options.block_patterns;
  FLASH_CHECK(kinds.dim() == 4 && (kinds.size(0) == 1 || kinds.size(0) == p.batch) &&
                  (kinds.size(1) == 1 || kinds.size(1) == p.heads),
              "block_kinds must be (batch or 1, heads or 1, q blocks, k blocks)");
  FLASH_CHECK(patterns.dim() == 3 && patterns.size(1) > 0 && patterns.size(2) > 0,
              "block_patterns must be (patterns, rows, keys)");
  check_shape(*options.key_lists, {kinds.size(0), kinds.size(1), kinds.size(2), 1 + kinds.size(3)}, "key_lists");
  check_shape(*options.query_lists, {kinds.size(0), kinds.size(1), kinds.size(3), 1 + kinds.size(2)}, "query_lists");
  for (const Tensor* x : {&kinds, &*options.key_lists, &*options.query_lists})
    FLASH_CHECK(x->scalar_type() == ScalarType::Int && x->is_contiguous() && x->device() == q.device(),
                "block_kinds, key_lists and query_lists must be contiguous int32 on the device of q");
  FLASH_CHECK(patterns.scalar_type() == ScalarType::Bool && patterns.is_contiguous() && patterns.device() == q.device(),
              "block_patterns must be contiguous bool on the device of q");
  BlockMask mask;
  mask.rows = patterns.size(1);
  mask.keys = patterns.size(2);
  mask.q_blocks = kinds.size(2);
  mask.k_blocks = kinds.size(3);
  if (!p.rows_q.cu_seqlens.given())
    FLASH_CHECK(
        mask.q_blocks == divide_up(p.rows_q.rows, mask.rows) && mask.k_blocks == divide_up(p.rows_k.rows, mask.keys),
        "block_kinds must have as many blocks as q and k have rows");
  static constexpr int32_t kNothing = 0;  // an empty tensor may have no memory; it is still given
  const auto data = [](const Tensor& x) {
    return x.numel() == 0 ? &kNothing : static_cast<const int32_t*>(x.data_ptr());
  };
  mask.kinds = data(kinds);
  mask.patterns = static_cast<const uint8_t*>(patterns.data_ptr());
  mask.key_lists = data(*options.key_lists);
  mask.query_lists = data(*options.query_lists);
  mask.head_planes = kinds.size(1) == 1 ? 0 : 1;
  mask.batch_planes = kinds.size(0) == 1 ? 0 : kinds.size(1);
  mask.pattern_count = patterns.size(0);
  return mask;
}

void build_common(AttentionParams& p, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                  const OptionalTensor& sink, const CallOptions& options) {
  const bool packed = options.cu_seqlens_q.has_value();
  FLASH_CHECK(packed == options.cu_seqlens_k.has_value(), "cu_seqlens_q and cu_seqlens_k go together");
  const ScalarType dtype = q.scalar_type(), compute = compute_type(dtype);
  p.dtype = data_type(dtype, "q");
  FLASH_CHECK(k.scalar_type() == dtype && v.scalar_type() == dtype, "q, k and v must have one dtype");
  check_same_device(k, q, "k");
  check_same_device(v, q, "v");
  p.q = operand(q, packed, "q");
  p.k = operand(k, packed, "k");
  p.v = operand(v, packed, "v");
  const int64_t head_axis = packed ? 1 : 2;
  FLASH_CHECK(!packed || options.cu_seqlens_q->numel() > 0, "cu_seqlens_q must have batch + 1 elements, has none");
  p.batch = packed ? options.cu_seqlens_q->numel() - 1 : q.size(0);
  p.heads = q.size(head_axis);
  p.heads_k = k.size(head_axis);
  p.dim = q.size(head_axis + 1);
  p.dim_v = v.size(head_axis + 1);
  const Sizes rows_k = packed ? Sizes{k.size(0)} : Sizes{p.batch, k.size(1)};
  const auto shape_k = [&](int64_t dim) {
    Sizes shape = rows_k;
    shape.insert(shape.end(), {p.heads_k, dim});
    return shape;
  };
  check_shape(k, shape_k(p.dim), "k");
  check_shape(v, shape_k(p.dim_v), "v");
  FLASH_CHECK(p.heads == 0 || (p.heads_k > 0 && p.heads % p.heads_k == 0), "heads_k = ", p.heads_k,
              " must divide heads = ", p.heads);
  if (p.heads_k == 0) p.heads_k = 1;  // no heads at all: nothing is read
  p.rows_q = row_layout(q, q, p.batch, options.cu_seqlens_q, options.seqused_q, options.leftpad_q);
  p.rows_k = row_layout(k, q, p.batch, options.cu_seqlens_k, options.seqused_k, options.leftpad_k);

  FLASH_CHECK(std::isfinite(options.softmax_scale), "softmax_scale must be finite, is ", options.softmax_scale);
  FLASH_CHECK(options.softcap >= 0 && options.softcap <= 1e30, "softcap must be in [0, 1e30], is ", options.softcap);
  FLASH_CHECK(options.window_left >= -1 && options.window_right >= -1,
              "window_left and window_right must be at least -1, are ", options.window_left, " and ",
              options.window_right);
  FLASH_CHECK(!packed || (options.max_seqlen_q >= 0 && options.max_seqlen_k >= 0),
              "max_seqlen_q and max_seqlen_k must be at least 0, are ", options.max_seqlen_q, " and ",
              options.max_seqlen_k);
  checked_family(options.family);
  p.score.scale = options.softmax_scale;
  p.score.softcap = options.softcap;
  if (options.alibi_slopes.has_value()) {
    const Tensor& slopes = *options.alibi_slopes;
    check_same_device(slopes, q, "alibi_slopes");
    FLASH_CHECK(slopes.scalar_type() == compute, "alibi_slopes must be fp32, fp64 with fp64 q");
    FLASH_CHECK(slopes.dim() == 2 && (slopes.size(0) == 1 || slopes.size(0) == p.batch) && slopes.size(1) == p.heads,
                "alibi_slopes must be (batch or 1, heads)");
    p.score.alibi_slopes = slopes.numel() == 0 ? nullptr : slopes.data_ptr();
    p.score.alibi_batch_stride = slopes.size(0) == 1 ? 0 : slopes.stride(0);
    p.score.alibi_head_stride = slopes.stride(1);
  }
  p.window = {options.causal, options.upper_left, options.window_left, options.window_right};
  if (bias.has_value()) {
    static_cast<Broadcast&>(p.bias) = broadcast(*bias, q, p, "bias");
    FLASH_CHECK(bias->scalar_type() == dtype || bias->scalar_type() == ScalarType::Float,
                "bias must have q's dtype or fp32");
    p.bias.dtype = data_type(bias->scalar_type(), "bias");
  }
  if (options.mask.has_value()) {
    FLASH_CHECK(options.mask->scalar_type() == ScalarType::Bool, "mask must be bool");
    static_cast<Broadcast&>(p.mask) = broadcast(*options.mask, q, p, "mask");
  }
  p.block_mask = block_mask(q, p, options);
  if (sink.has_value()) {
    check_shape(*sink, {p.heads}, "sink");
    check_same_device(*sink, q, "sink");
    FLASH_CHECK(sink->scalar_type() == compute && sink->is_contiguous(),
                "sink must be contiguous fp32, fp64 with fp64 q");
    p.sink = sink->data_ptr();
  }
  FLASH_CHECK(options.dropout_p >= 0 && options.dropout_p <= 1, "dropout_p must be in [0, 1], is ", options.dropout_p);
  p.dropout.threshold = static_cast<uint32_t>(std::floor(options.dropout_p * 65536 + 0.5));
  if (p.dropout.threshold > 0) {
    FLASH_CHECK(options.dropout_seed.has_value(), "dropout needs dropout_seed");
    const Tensor& seed = *options.dropout_seed;
    check_shape(seed, {2}, "dropout_seed");
    check_same_device(seed, q, "dropout_seed");
    FLASH_CHECK(seed.scalar_type() == ScalarType::Long && seed.is_contiguous(),
                "dropout_seed must be contiguous int64");
    p.dropout.seed = static_cast<const int64_t*>(seed.data_ptr());
    p.dropout.keep_scale = options.dropout_p < 1 ? 1 / (1 - options.dropout_p) : 0;
  }
}

// Rows that belong to no sequence keep what the tensor was made with: 0, and -inf for the LSE.
bool has_unused_rows(const RowLayout& rows) {
  return rows.cu_seqlens.given() || rows.seqused.given() || rows.leftpad.given();
}

Tensor gradient(const Tensor& x, bool wanted, bool zeros) {
  const Sizes shape = wanted ? Sizes(x.sizes().begin(), x.sizes().end()) : Sizes{0};
  return allocate(x, shape, x.scalar_type(), zeros);
}

}  // namespace

int64_t checked_family(int64_t family) {
  FLASH_CHECK(family >= 0 && family <= kLastFamily, "family must be in [0, ", kLastFamily, "], is ", family);
  return family;
}

// Through the C function and not through new_empty, which looks the op up by name: 1 µs instead of 2.5 for each output.
Tensor allocate(const Tensor& like, const Sizes& shape, ScalarType dtype, bool zeros) {
  Sizes strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0; stride *= std::max<int64_t>(shape[d], 1)) strides[d] = stride;
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                                                  dtype_code(dtype), device_type, device_index, &handle));
  Tensor result(handle);
  if (zeros) torch::stable::zero_(result);
  return result;
}

Tensor with_unit_stride(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  const bool has = last < 0 || x.size(last) <= 1 || x.stride(last) == 1;
  return has ? x : torch::stable::contiguous(x);
}

Forward build_forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                      const OptionalTensor& sink, const CallOptions& options) {
  Forward call;
  FwdParams& p = call.params;
  build_common(p, q, k, v, bias, sink, options);
  const bool packed = p.rows_q.cu_seqlens.given(), unused = has_unused_rows(p.rows_q);
  const ScalarType compute = compute_type(q.scalar_type());
  const Sizes out_shape = packed ? Sizes{q.size(0), p.heads, p.dim_v} : Sizes{p.batch, q.size(1), p.heads, p.dim_v};
  const Sizes lse_shape = packed ? Sizes{p.heads, q.size(0)} : Sizes{p.batch, p.heads, q.size(1)};
  Sizes statistics_shape = lse_shape;
  statistics_shape.insert(statistics_shape.begin(), 2);

  call.out = allocate(q, out_shape, q.scalar_type(), unused);
  call.lse = allocate(q, lse_shape, compute, false);
  call.statistics = allocate(q, statistics_shape, compute, unused);
  if (unused) {
    torch::stable::fill_(call.lse, -INFINITY);
    Tensor log2_sum = torch::stable::select(call.statistics, 0, 1);
    torch::stable::fill_(log2_sum, -INFINITY);
  }
  p.out = operand(call.out, packed, "out");
  p.lse = row_array(call.lse, packed);
  p.reference = p.lse;
  p.reference.data = call.statistics.data_ptr();
  p.log2_sum = row_array(call.lse, packed);
  p.log2_sum.data =
      static_cast<char*>(call.statistics.data_ptr()) + call.lse.numel() * static_cast<int64_t>(call.lse.element_size());
  return call;
}

Backward build_backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& statistics, const OptionalTensor& bias,
                        const OptionalTensor& sink, const CallOptions& options, Wanted wanted) {
  Backward call;
  BwdParams& p = call.params;
  build_common(p, q, k, v, bias, sink, options);
  const bool packed = p.rows_q.cu_seqlens.given();
  const ScalarType compute = compute_type(q.scalar_type());
  const Sizes out_shape = packed ? Sizes{q.size(0), p.heads, p.dim_v} : Sizes{p.batch, q.size(1), p.heads, p.dim_v};
  const Sizes lse_shape = packed ? Sizes{p.heads, q.size(0)} : Sizes{p.batch, p.heads, q.size(1)};
  Sizes statistics_shape = lse_shape;
  statistics_shape.insert(statistics_shape.begin(), 2);
  check_shape(dout, out_shape, "dout");
  check_shape(out, out_shape, "out");
  check_shape(statistics, statistics_shape, "statistics");
  check_same_device(dout, q, "dout");
  check_same_device(out, q, "out");
  check_same_device(statistics, q, "statistics");
  FLASH_CHECK(dout.scalar_type() == q.scalar_type() && out.scalar_type() == q.scalar_type(),
              "dout and out must have q's dtype");
  FLASH_CHECK(statistics.scalar_type() == compute && statistics.is_contiguous(),
              "statistics must be what the forward returned");
  p.dout = operand(dout, packed, "dout");
  p.out = operand(out, packed, "out");
  const int64_t rows = statistics.numel() / 2;
  p.reference = {statistics.data_ptr(), packed ? 0 : p.heads * q.size(1), q.size(packed ? 0 : 1)};
  p.log2_sum = p.reference;
  p.log2_sum.data = static_cast<char*>(statistics.data_ptr()) + rows * static_cast<int64_t>(statistics.element_size());
  if (dlse.has_value()) {
    check_shape(*dlse, lse_shape, "dlse");
    check_same_device(*dlse, q, "dlse");
    FLASH_CHECK(dlse->scalar_type() == compute && dlse->is_contiguous(), "dlse must be contiguous, in the LSE's dtype");
    p.dlse = row_array(*dlse, packed);
  }

  // Nobody writes dk and dv without queries; nor, on a GPU, those of a sequence whose lengths are impossible.
  const bool unused_k = has_unused_rows(p.rows_k) || has_unused_rows(p.rows_q) || p.heads == 0;
  call.dq = gradient(q, wanted.dq, has_unused_rows(p.rows_q));
  call.dk = gradient(k, wanted.dk, unused_k);
  call.dv = gradient(v, wanted.dv, unused_k);
  if (wanted.dq) p.dq = operand(call.dq, packed, "dq");
  if (wanted.dk) p.dk = operand(call.dk, packed, "dk");
  if (wanted.dv) p.dv = operand(call.dv, packed, "dv");
  FLASH_CHECK(!wanted.dbias || bias.has_value(), "a gradient of bias is wanted, but there is no bias");
  FLASH_CHECK(!wanted.dsink || sink.has_value(), "a gradient of sink is wanted, but there is no sink");
  call.dbias = gradient(wanted.dbias ? *bias : q, wanted.dbias, false);
  call.dsink = gradient(wanted.dsink ? *sink : q, wanted.dsink, false);
  if (wanted.dbias) {
    static_cast<Broadcast&>(p.dbias) = broadcast(call.dbias, q, p, "dbias");
    p.dbias.dtype = p.bias.dtype;
    p.bias_batch = bias->size(0);
    p.bias_heads = bias->size(1);
    p.bias_rows = bias->size(2);
    p.bias_columns = bias->size(3);
  }
  if (wanted.dsink) p.dsink = call.dsink.data_ptr();
  return call;
}

namespace {

// What would lead outside the tensors: of a mask that Python built, none is found.
void check_blocks(const AttentionParams& p, const CallOptions& options) {
  const BlockMask& mask = p.block_mask;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, b);
    FLASH_CHECK(
        s.q.leftpad + s.q.length <= mask.q_blocks * mask.rows && s.k.leftpad + s.k.length <= mask.k_blocks * mask.keys,
        "block_kinds has ", mask.q_blocks, " × ", mask.k_blocks, " blocks, too few for sequence ", b);
  }
  const auto check_lists = [](const Tensor& lists, const char* name) {
    const int64_t width = lists.size(3), blocks = width - 1;
    const auto* list = static_cast<const int32_t*>(lists.data_ptr());
    for (int64_t i = 0; i < lists.numel() / width; ++i, list += width) {
      bool good = 0 <= list[0] && list[0] <= blocks;
      for (int64_t j = 1; good && j <= list[0]; ++j)
        good = (j == 1 ? 0 : list[j - 1] + 1) <= list[j] && list[j] < blocks;
      FLASH_CHECK(good, name, " must hold a count and so many ascending numbers of blocks in [0, ", blocks, ")");
    }
  };
  check_lists(*options.key_lists, "key_lists");
  check_lists(*options.query_lists, "query_lists");
  const auto* kinds = static_cast<const int32_t*>(options.block_kinds->data_ptr());
  const int64_t end = kFirstPattern + options.block_patterns->size(0), count = options.block_kinds->numel();
  FLASH_CHECK(std::all_of(kinds, kinds + count, [&](int32_t kind) { return 0 <= kind && kind < end; }),
              "block_kinds must be in [0, ", end, "), two more than there are patterns");
}

}  // namespace

void check_contents(const AttentionParams& p, const OptionalTensor& bias, const CallOptions& options) {
  const auto check_side = [&](const RowLayout& layout, int64_t max_seqlen, const char* side) {
    if (!has_unused_rows(layout)) return;
    if (layout.cu_seqlens.given())
      FLASH_CHECK(layout.cu_seqlens[0] >= 0 && layout.cu_seqlens[p.batch] <= layout.rows, "cu_seqlens_", side,
                  " must lie in [0, ", layout.rows, "], the rows of the tensor; it runs from ", layout.cu_seqlens[0],
                  " to ", layout.cu_seqlens[p.batch]);
    for (int64_t b = 0; b < p.batch; ++b) {
      int64_t capacity = layout.rows;
      if (layout.cu_seqlens.given()) {
        capacity = layout.cu_seqlens[b + 1] - layout.cu_seqlens[b];
        FLASH_CHECK(capacity >= 0, "cu_seqlens_", side, " must not decrease: element ", b + 1, " is ",
                    layout.cu_seqlens[b + 1], " after ", layout.cu_seqlens[b]);
      }
      const int64_t used = layout.seqused.given() ? layout.seqused[b] : capacity;
      const int64_t leftpad = layout.leftpad.given() ? layout.leftpad[b] : 0;
      FLASH_CHECK(used >= 0 && used <= capacity, "seqused_", side, "[", b, "] = ", used, " must be in [0, ", capacity,
                  "]");
      FLASH_CHECK(leftpad >= 0 && leftpad <= used, "leftpad_", side, "[", b, "] = ", leftpad, " must be in [0, ", used,
                  "], the used length");
    }
    // Only now: an offset that is wrong makes wrong lengths.
    for (int64_t b = 0; b < p.batch && layout.cu_seqlens.given(); ++b) {
      const int64_t capacity = layout.cu_seqlens[b + 1] - layout.cu_seqlens[b];
      FLASH_CHECK(capacity <= max_seqlen, "max_seqlen_", side, " = ", max_seqlen, " is less than the ", capacity,
                  " rows of sequence ", b);
    }
  };
  check_side(p.rows_q, options.max_seqlen_q, "q");
  check_side(p.rows_k, options.max_seqlen_k, "k");

  // Of packed sequences, bias and mask must reach every row and column, unless they broadcast.
  const auto check_extent = [&](const OptionalTensor& x, const char* name) {
    if (!x.has_value() || !p.rows_q.cu_seqlens.given()) return;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = sequence(p, b);
      const int64_t rows = s.q.leftpad + s.q.length, columns = s.k.leftpad + s.k.length;
      FLASH_CHECK(x->size(2) == 1 || rows <= x->size(2), name, " has ", x->size(2), " rows, sequence ", b, " needs ",
                  rows);
      FLASH_CHECK(x->size(3) == 1 || columns <= x->size(3), name, " has ", x->size(3), " columns, sequence ", b,
                  " needs ", columns);
    }
  };
  check_extent(bias, "bias");
  check_extent(options.mask, "mask");
  if (p.block_mask.given()) check_blocks(p, options);
}

}  // namespace flash
