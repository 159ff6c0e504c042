// csrc/common is for the device too: every header compiles there, without a spill.
#include "common/dropout.h"
#include "common/params.h"
#include "common/score.h"
#include "common/sequence.h"
#include "common/statistics.h"
#include "common/visibility.h"
using namespace flash;
__global__ void use_everything(FwdParams p, float* out) {
  const Sequence s = sequence(p, blockIdx.x);
  const Visibility v = make_visibility(p.window, s.q.length, s.k.length);
  const Range r = v.keys(threadIdx.x);
  const auto m = merge<float>(out[0], out[1]);
  const auto st = make_statistics<float>(m.row_max, m.scale_a);
  out[threadIdx.x] = r.size() + log_sum_exp(st) + apply_softcap<float>(out[2], 3.f).value +
                     alibi<float>(alibi_slope<float>(p.score, 0, 1), 1, 2, 3) +
                     dropout_stream(p.dropout.seed, 1, 2).keeps(3, 4, DropoutThreshold(p.dropout.threshold)) +
                     softcap_of<float>(p.score) + log2_sum_for_backward(st);
}
