"""Forward values of every option against the fp64 oracle, and the properties that hold exactly."""

from __future__ import annotations

import math

import cases
import oracle
import pytest
import torch
from cases import Case, Target, with_targets
from oracle import Options

import flash_attn
from flash_attn import flash_attn_func

HALF, BF16, FP64 = torch.float16, torch.bfloat16, torch.float64

CASES = [
    # plain, all dtypes, odd sizes
    *(Case(dtype=d, seqlen_q=65, seqlen_k=97, dim=40, dim_v=40) for d in cases.NAMES),
    *(Case(seqlen_q=n, seqlen_k=m) for n, m in ((1, 1), (2, 3), (1, 257), (257, 1), (129, 196), (0, 5), (5, 0), (0,
    0))),
    Case(batch=0), *(Case(heads=0, heads_k=0, dtype=d) for d in cases.NAMES), Case(batch=1, heads=1, heads_k=1),
    Case(heads=0, heads_k=0, dtype=BF16, causal=True, grads="qkv"),
    # head dims
    *(Case(dim=d, dim_v=d, seqlen_q=17, dtype=BF16) for d in (1, 2, 3, 7, 8, 9, 31, 64, 72, 96, 127, 256, 257)),
    *(Case(dim=d, dim_v=e, seqlen_q=19) for d, e in ((8, 16), (32, 24), (1, 33), (128, 40), (16, 1), (3, 130))),
    # heads
    *(Case(heads=h, heads_k=k, seqlen_q=9) for h, k in ((6, 3), (8, 2), (5, 1), (9, 3))),
    # causal and windows, both aspect ratios
    *(Case(causal=True, seqlen_q=n, seqlen_k=m) for n, m in ((33, 33), (5, 97), (97, 5), (65, 64), (64, 65), (1, 33))),
    *(
        Case(window=w, seqlen_q=n, seqlen_k=m, causal=c)
        for w, n, m, c in (
            ((0, 0), 33, 33, False), ((3, 5), 97, 65, False), ((-1, 4), 65, 97, False), ((7, -1), 97, 65, False),
            ((7, -1), 65, 65, True), ((7, 9), 65, 65, True), ((1000, 1000), 33, 65, False), ((0, 1), 129, 129, False),
            ((2**31 - 1, 2**31 - 1), 33, 65, False), ((64, 0), 257, 129, False),
        )
    ),
    # score changes
    *(Case(softcap=c, scale=s) for c, s in ((15.0, None), (0.5, 1.0), (50.0, 4.0), (1e-3, None), (1e6, None))),
    *(Case(scale=s) for s in (0.0, 1.0, -0.5, 1e-6)),
    *(Case(alibi=a, seqlen_q=n, seqlen_k=m, causal=c) for a in ("heads", "batch_heads")
      for n, m, c in ((33, 65, False), (65, 33, True))),
    *(Case(bias=p, seqlen_k=37) for p in ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "bhq1", "1111", "qk", "1k", "k",
    "hq1")),
    Case(bias="bhqk", bias_fp32=True, dtype=BF16), Case(bias="1hqk", bias_inf=True, dtype=HALF),
    Case(bias="bh1k", bias_inf=True, bias_fp32=True, dtype=HALF),
    *(Case(mask=p, seqlen_k=37) for p in ("bhqk", "1hqk", "b11k", "11q1", "1111", "qk", "k", "hqk")),
    Case(mask="bhqk", bias="1hqk", alibi="heads", softcap=5.0, causal=True, window=(20, -1), sink=True, dtype=BF16),
    # lengths
    *(Case(seqlen_q=65, seqlen_k=97, batch=3, causal=c, **{n: True for n in names})
      for c in (False, True)
      for names in (("seqused_k",), ("leftpad_k",), ("seqused_q",), ("leftpad_q",), ("seqused_k", "leftpad_k"),
                    ("seqused_q", "leftpad_q", "seqused_k", "leftpad_k"))),
    Case(seqused_k=True, leftpad_k=True, length_dtype=torch.int64, bias="bhqk", mask="b11k", alibi="heads",
    window=(9, 3)),
    # sinks
    Case(sink=True), Case(sink=True, dtype=BF16, heads=10, heads_k=2), Case(sink=True, causal=True, seqlen_q=65,
    seqlen_k=7),
    Case(sink=True, seqlen_k=0),
    # data and strides
    *(Case(data=d, dtype=t, seqlen_q=65, seqlen_k=129, dim=64, dim_v=64) for d in cases.DATA[1:]
      for t in (torch.float32, BF16, HALF)),
    # LSE near 0, where an ulp of the sum is more than one of LSE
    *(Case(batch=1, heads=1, heads_k=1, seqlen_q=n, seqlen_k=m, dim=4, dim_v=2, dtype=BF16, causal=True, mask=p,
           varlen=not p, seed=s)
      for n, m, p, s in ((1, 5, "", 1900755083), (2, 2, "bh1k", 121575541))),
    # large terms of q·k that cancel beside a softcap, which leaves no large logit to compare with
    *(Case(batch=3, heads=4, heads_k=2, seqlen_q=65, seqlen_k=16, dim=24, dim_v=24, causal=True, window=(3, 64),
           softcap=3.0, data="outliers", seed=s) for s in (35, 74)),
    Case(batch=1, heads=9, heads_k=3, seqlen_q=97, seqlen_k=2, dim=64, dim_v=3, softcap=3.0, seqused_k=True,
         data="outliers", seed=436131655),
    *(Case(layout=x, dtype=t, bias="bhqk", seqlen_k=65) for x in cases.LAYOUTS[1:] for t in (torch.float32, BF16)),
]  # fmt: skip


@with_targets(CASES)
def test_values(case: Case, target: Target):
    cases.check(case, target.device, target.backend)


def qkv(
    target: Target, *, batch=2, seqlen_q=33, seqlen_k=33, heads=4, heads_k=2, dim=16, dim_v=None, dtype=torch.float32
):
    """Random q, k, v on the target."""
    shapes = ((seqlen_q, heads, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim_v or dim))
    return [torch.randn(batch, *s, dtype=dtype).to(target.device) for s in shapes]


def test_default_scale_is_of_the_true_head_dim(target):
    q, k, v = qkv(target, dim=17)
    assert torch.equal(
        flash_attn_func(q, k, v, backend=target.backend),
        flash_attn_func(q, k, v, softmax_scale=1 / math.sqrt(17), backend=target.backend),
    )


def test_window_equal_to_causal(target):
    q, k, v = qkv(target, batch=1, seqlen_q=257, seqlen_k=257, heads=2)
    causal = flash_attn_func(q, k, v, causal=True, backend=target.backend)
    for window in ((-1, 0), (257, 0), (256, 0)):
        torch.testing.assert_close(flash_attn_func(q, k, v, window_size=window, backend=target.backend), causal)


def test_window_takes_lists_and_scalar_tensors(target):
    q, k, v = qkv(target)
    want = flash_attn_func(q, k, v, window_size=(3, 4), backend=target.backend)
    for window in ([3, 4], torch.tensor([3, 4]), (torch.tensor(3), torch.tensor(4))):
        assert torch.equal(flash_attn_func(q, k, v, window_size=window, backend=target.backend), want)


def test_inputs_are_not_written(target):
    tensors = qkv(target)
    copies = [t.clone() for t in tensors]
    flash_attn_func(*tensors, causal=True, backend=target.backend)
    assert all(torch.equal(t, c) for t, c in zip(tensors, copies, strict=True))


def test_output_is_contiguous_and_fresh(target):
    q, k, v = qkv(target, seqlen_q=1, seqlen_k=1, heads=1, heads_k=1)
    out = flash_attn_func(q, k, v, backend=target.backend)
    assert out.is_contiguous() and out.data_ptr() not in (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert torch.equal(out, v)


def test_packed_functions_equal_unpacked(target):
    qkv_packed = torch.randn(2, 33, 3, 4, 16, device=target.device)
    want = flash_attn_func(*qkv_packed.unbind(2), causal=True, backend=target.backend)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv_packed, causal=True, backend=target.backend), want)
    q, kv = torch.randn(2, 9, 4, 16, device=target.device), torch.randn(2, 33, 2, 2, 16, device=target.device)
    want = flash_attn_func(q, *kv.unbind(2), window_size=(5, 3), backend=target.backend)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, window_size=(5, 3), backend=target.backend), want)


def test_repeatable(target):
    q, k, v = qkv(target, seqlen_q=129, seqlen_k=257)
    first = flash_attn_func(q, k, v, backend=target.backend)
    assert all(torch.equal(flash_attn_func(q, k, v, backend=target.backend), first) for _ in range(3))


def test_result_does_not_depend_on_batch_mates_or_heads(target):
    q, k, v = qkv(target, batch=3, seqlen_q=65, seqlen_k=97)
    whole = flash_attn_func(q, k, v, backend=target.backend)
    alone = flash_attn_func(q[1:2], k[1:2], v[1:2], backend=target.backend)
    torch.testing.assert_close(whole[1:2], alone, rtol=1e-6, atol=1e-6)


def test_tensors_that_are_no_options_change_nothing(target):
    """A mask of all True, a zero bias, zero slopes, an unlimited window and full lengths are no options."""
    q, k, v = qkv(target)
    want = flash_attn_func(q, k, v, backend=target.backend)
    full = torch.full((2,), 33, dtype=torch.int32, device=target.device)
    for option in (
        {"mask": torch.ones(33, 33, dtype=torch.bool, device=target.device)},
        {"bias": torch.zeros(1, 1, 1, 1, device=target.device)},
        {"alibi_slopes": torch.zeros(4, device=target.device)},
        {"window_size": (33, 33)},
        {"seqused_k": full, "leftpad_k": full * 0, "seqused_q": full, "leftpad_q": full * 0},
        {"learnable_sink": torch.full((4,), -math.inf, device=target.device)},
        {"dropout_p": 1e-16},
        {"deterministic": True},
    ):
        torch.testing.assert_close(flash_attn_func(q, k, v, backend=target.backend, **option), want)


def test_nan_in_a_hidden_bias_or_behind_a_mask(target):
    """S = −inf where not visible, whatever stood there."""
    q, k, v = qkv(target, batch=1)
    hidden = torch.ones(33, 33, dtype=torch.bool).triu(1)
    bias = torch.randn(33, 33)
    want = flash_attn_func(q, k, v, causal=True, bias=bias.to(target.device), backend=target.backend)
    bad = bias.masked_fill(hidden, math.nan).to(target.device)
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True, bias=bad, backend=target.backend), want)
    torch.testing.assert_close(
        flash_attn_func(q, k, v, mask=~hidden.to(target.device), bias=bad, backend=target.backend), want
    )


@pytest.mark.parametrize("fill", (math.nan, math.inf))
def test_keys_beyond_every_row_are_not_read(target, fill):
    """Keys outside [leftpad, seqused) hold NaN or Inf."""
    q, k, v = qkv(target, seqlen_k=97)
    used, pad = (torch.tensor(t, dtype=torch.int32, device=target.device) for t in ([50, 97], [3, 65]))
    want = flash_attn_func(q, k, v, seqused_k=used, leftpad_k=pad, backend=target.backend, return_lse=True)
    for t in (k, v):
        t[0, :3], t[0, 50:], t[1, :65] = fill, fill, fill
    got = flash_attn_func(q, k, v, seqused_k=used, leftpad_k=pad, backend=target.backend, return_lse=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_nan_in_a_query_reaches_its_row_only(target):
    q, k, v = qkv(target, seqlen_q=65)
    want, want_lse = flash_attn_func(q, k, v, backend=target.backend, return_lse=True)
    q[0, 17, 1, 3] = math.nan
    out, lse = flash_attn_func(q, k, v, backend=target.backend, return_lse=True)
    assert out[0, 17, 1].isnan().all() and lse[0, 1, 17].isnan()
    out[0, 17, 1], lse[0, 1, 17] = want[0, 17, 1], want_lse[0, 1, 17]
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_nan_in_a_visible_key_is_seen(target):
    """NaN in a key that a row sees reaches that row: it is not swallowed by the running maximum."""
    for name in "kv":
        q, k, v = qkv(target, seqlen_q=9, seqlen_k=65)
        {"k": k, "v": v}[name][0, 40] = math.nan
        out = flash_attn_func(q, k, v, backend=target.backend)
        assert out[0].isnan().all() and out[1].isfinite().all(), name


def test_infinite_values_are_not_lost(target):
    """+inf in a value that every row sees gives +inf there."""
    q, k, v = qkv(target, seqlen_q=9, seqlen_k=65)
    v[0, 40, 0, 5] = math.inf
    out = flash_attn_func(q, k, v, backend=target.backend)
    assert (out[0, :, :2, 5] == math.inf).all() and out[1].isfinite().all() and out[0, :, 2:].isfinite().all()


def test_return_values(target):
    q, k, v = qkv(target, seqlen_k=65, dtype=HALF)
    out = flash_attn_func(q, k, v, backend=target.backend)
    pair = flash_attn_func(q, k, v, return_lse=True, backend=target.backend)
    triple = flash_attn_func(q, k, v, return_attn_probs=True, backend=target.backend)
    both = flash_attn_func(q, k, v, return_attn_probs=True, return_lse=True, backend=target.backend)
    assert isinstance(out, torch.Tensor) and len(pair) == 2 and len(triple) == len(both) == 3
    assert torch.equal(out, pair[0]) and torch.equal(out, triple[0]) and torch.equal(pair[1], triple[1])
    assert triple[2].numel() == 0
    assert pair[1].shape == (2, 4, 33) and pair[1].dtype == torch.float32 and out.dtype == HALF
    assert flash_attn_func(*(t.double() for t in (q, k, v)), return_lse=True, backend=target.backend)[1].dtype == FP64


def test_large_logits_keep_their_differences(target):
    """Logits of 1e4 that differ by a few units: the softmax of the differences, in fp32."""
    k = torch.zeros(1, 65, 1, 8)
    k[0, :, 0, 0], k[0, :, 0, 1] = 1e4, torch.linspace(-4, 4, 65)
    q = torch.tensor([1.0, 1.0, 0, 0, 0, 0, 0, 0]).expand(1, 3, 1, 8)
    v = torch.randn(1, 65, 1, 8)
    out, lse = flash_attn_func(*(t.to(target.device) for t in (q, k, v)), softmax_scale=1.0, backend=target.backend,
                               return_lse=True)  # fmt: skip
    want, want_lse = oracle.attention(q, k, v, options=Options(scale=1.0))
    naive, naive_lse = oracle.naive_attention(q, k, v, options=Options(scale=1.0))
    oracle.assert_no_worse_than_naive(out, want, naive)
    oracle.assert_no_worse_than_naive(lse, want_lse, naive_lse)


@pytest.mark.parametrize("dim", (3, 300))
@pytest.mark.parametrize("option", ("plain", "softcap", "alibi", "bias"))
@pytest.mark.parametrize("dtype", (torch.float32, FP64), ids=("fp32", "fp64"))
def test_large_terms_cancel(target, dtype, option, dim):
    """q·k of two large terms whose sum, and every partial sum, is exactly 0 in q's dtype: so is the logit, however
    large scale · |q_d k_d| is. A scale that rounds the elements of q instead of their sum loses that."""
    large = 3000.0 if dtype == torch.float32 else 5e7
    q, k = torch.zeros(1, 33, 1, dim, dtype=dtype), torch.zeros(1, 65, 1, dim, dtype=dtype)
    q[..., 0], q[..., -1] = large + 1, large
    k[..., 0], k[..., -1] = large, -large - 1
    v = torch.randn(1, 65, 1, 8, dtype=dtype)
    options = {
        "plain": {},
        "softcap": {"softcap": 3.0},
        "alibi": {"alibi_slopes": torch.zeros(1, device=target.device)},
        "bias": {"bias": torch.zeros(65, dtype=dtype, device=target.device)},
    }[option]
    q, k, v = (t.to(target.device).requires_grad_() for t in (q, k, v))
    out, lse = flash_attn_func(q, k, v, return_lse=True, backend=target.backend, **options)
    tight = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-14, "atol": 1e-15}
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(65)), **tight)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), **tight)
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(dv, torch.full_like(dv, 33 / 65), **tight)


def test_very_negative_logits(target):
    """All logits near −1e30: exp underflows unless the row maximum is taken out first."""
    q, k, v = qkv(target, batch=1, heads=1, heads_k=1)
    bias = torch.full((33, 33), -1e30, device=target.device)
    bias[:, 7] = -1e29
    out, lse = flash_attn_func(q, k, v, bias=bias, backend=target.backend, return_lse=True)
    torch.testing.assert_close(out, v[:, 7:8].expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, -1e29))


def test_oracle_itself():
    """The oracle agrees with torch's attention where that is defined."""
    q, k, v = (t.double() for t in qkv(cases.CPU, seqlen_q=17))
    mask = torch.rand(2, 1, 17, 33) < 0.7
    mask[..., 0] = True
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(oracle.attention(q, k, v, options=Options(mask=mask))[0], want, rtol=1e-12, atol=1e-12)
    causal = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k[:, :17].transpose(1, 2), v[:, :17].transpose(1, 2), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(
        oracle.attention(q, k[:, :17], v[:, :17], options=Options(causal=True))[0], causal, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("sink", "most"), ((False, 1.01), (True, 1 + 2 * 3)))
def test_an_lse_near_0_is_good_to_an_ulp_of_its_parts(sink, most):
    """Beside LSE ≈ 0 the bound is an ulp of 1 (of the sum under the logarithm), and not much more."""
    case = Case(batch=1, heads=1, heads_k=1, seqlen_q=1, seqlen_k=1, dim=1, dim_v=1, scale=1e-3, sink=sink)
    eps = torch.finfo(torch.float32).eps
    assert eps <= cases.expected(case).unavoidable["lse"] <= most * eps


def test_comparison_sees_nan_and_errors():
    """`assert_no_worse_than_naive` is not blind: NaN, infinities and wrong values fail."""
    good = torch.randn(5, dtype=torch.float64)
    oracle.assert_no_worse_than_naive(good.float(), good, good.float())
    for wrong in (math.nan, math.inf, -math.inf, 3.0):
        bad = good.clone()
        bad[2] = wrong
        with pytest.raises(AssertionError):
            oracle.assert_no_worse_than_naive(bad.float(), good, good.float())
        if wrong != 3.0:
            with pytest.raises(AssertionError):
                oracle.assert_no_worse_than_naive(good.float(), bad, bad.float())
    with pytest.raises(AssertionError):
        oracle.assert_no_worse_than_naive(good.float()[:4], good, good.float())
