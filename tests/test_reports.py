"""Faults that users reported against attention libraries: masks, NaN, extreme values, empty and packed sequences.

The identifiers (T01 …) name the project's collection of such reports; each test states what is right.
"""

from __future__ import annotations

import math

import cases
import oracle
import pytest
import torch
from cases import Target
from oracle import Options

from flash_attn import flash_attn_func, flash_attn_varlen_func

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ORACLE_NAMES = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "alibi"}


def randn(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def agree(q, k, v, target: Target = cases.CPU, *, bias=None, sink=None, dout=None, max_seqlen=None, grads=True, **o):
    """Holds out, LSE and all gradients against the oracle and naive. Returns (out, lse, [dq, dk, dv, dbias])."""
    leaves = [t.detach().to(target.device) for t in (q, k, v, bias, sink) if t is not None]
    leaves = [t.requires_grad_(grads) for t in leaves]
    rest = list(leaves[3:])
    tensors = {
        "bias": rest.pop(0) if bias is not None else None, "learnable_sink": rest.pop(0) if sink is not None else None,
        **{n: t.to(target.device) if isinstance(t, torch.Tensor) else t for n, t in o.items()},
    }  # fmt: skip
    if max_seqlen is not None:
        tensors |= dict(zip(("max_seqlen_q", "max_seqlen_k"), max_seqlen, strict=True))
    function = flash_attn_func if max_seqlen is None else flash_attn_varlen_func
    out, lse = function(*leaves[:3], **tensors, return_lse=True, backend=target.backend)

    options = Options(**{ORACLE_NAMES.get(n, n): t for n, t in o.items()})
    results, unavoidable, records = [], {}, []
    dout = randn(*out.shape, dtype=q.dtype) if dout is None else dout
    for compute in (torch.float64, q.dtype):
        twins = [t.detach().cpu().clone().requires_grad_(grads) for t in leaves]
        tail = list(twins[3:])
        b, s = tail.pop(0) if bias is not None else None, tail.pop(0) if sink is not None else None
        if compute == torch.float64:
            answer = oracle.attention(*twins[:3], b, s, options, records)
        else:
            answer = oracle.naive_attention(*twins[:3], b, s, options)
        found = [None] * len(twins)
        if answer[0].requires_grad:  # not where there is no sequence
            found = torch.autograd.grad(answer[0], twins, dout.to(answer[0].dtype), allow_unused=True)
        found = [torch.zeros_like(t) if g is None else g for g, t in zip(found, twins, strict=True)]
        results.append((answer[0].detach(), answer[1].detach(), found))
    (want, want_lse, want_grads), (naive, naive_lse, naive_grads) = results
    if q.dtype in (HALF, BF16):
        wide = [t.detach().cpu().float() for t in leaves[:3]]
        extra = [None if t is None else t.detach().cpu().float() for t in (bias, sink)]
        naive_lse = oracle.naive_attention(*wide, *extra, options)[1]
    oracle.assert_no_worse_than_naive(lse, want_lse, naive_lse, name="lse")
    oracle.assert_no_worse_than_naive(out, want, naive)
    got_grads = []
    if grads:
        unavoidable = oracle.rounding(
            *(t.detach().cpu() for t in leaves[:3]), want, dout, None, bias, sink, options, records
        )
        got_grads = torch.autograd.grad(out, leaves, dout.to(target.device))
        names = "qkv" + "b" * (bias is not None) + "s" * (sink is not None)
        for n, g, w, x in zip(names, got_grads, want_grads, naive_grads, strict=True):
            oracle.assert_no_worse_than_naive(g, w, x, name=f"d{n}", dtype=q.dtype, unavoidable=unavoidable.get(n, 0.0))
    return out.detach().cpu(), lse.detach().cpu(), [g.cpu() for g in got_grads]


def qkv(batch, seqlen_q, seqlen_k, heads, heads_k, dim, dtype=FP32, dim_v=None):
    return (randn(batch, seqlen_q, heads, dim, dtype=dtype), randn(batch, seqlen_k, heads_k, dim, dtype=dtype),
            randn(batch, seqlen_k, heads_k, dim_v or dim, dtype=dtype))  # fmt: skip


def cumulative(*lens: int) -> torch.Tensor:
    return torch.tensor([sum(lens[:n]) for n in range(len(lens) + 1)], dtype=torch.int32)


def packed(lens_q, lens_k, heads, heads_k, dim, dtype=FP32, factor=1.0):
    """q, k, v and the keyword arguments of a varlen call."""
    q, k, v = (
        factor * randn(sum(n), h, dim, dtype=dtype) for n, h in ((lens_q, heads), (lens_k, heads_k), (lens_k, heads_k))
    )
    options = {"cu_seqlens_q": cumulative(*lens_q), "cu_seqlens_k": cumulative(*lens_k)}
    return (q, k, v), options, (max(lens_q), max(lens_k))


# ---- Masks, empty rows, NaN, extreme values -------------------------------------------------------------------------


def test_t01_rows_whose_mask_is_all_false(target):
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    out, lse, (_, dk, dv) = agree(*qkv(1, 8, 8, 1, 1, 8), target, mask=mask)
    assert (out[0, 4:] == 0).all() and (lse[0, 0, 4:] == -math.inf).all()
    assert (dk[0, 4:] == 0).all() and (dv[0, 4:] == 0).all()


def test_t02_most_negative_finite_bias(target):
    """finfo.min is a number: on some keys weight 0, on all keys of a row a uniform average."""
    q, k, v = qkv(1, 441, 441, 2, 2, 64)
    bias = torch.zeros(1, 1, 441, 441)
    bias[..., :128] = torch.finfo(FP32).min
    _, _, grads = agree(q, k, v, target, bias=bias)
    assert all(g.isfinite().all() for g in grads) and (grads[2][:, :128] == 0).all()
    bias = torch.zeros(1, 1, 9, 441)
    bias[..., 3, :] = torch.finfo(FP32).min
    out, lse, grads = agree(q[:, :9], k, v, target, bias=bias)
    torch.testing.assert_close(out[:, 3], v.mean(1))
    assert all(g.isfinite().all() for g in grads) and lse.isfinite().all()


def test_t04_left_padded_sample(target):
    q, k, v = qkv(2, 33, 33, 4, 4, 128, dtype=BF16)
    pads = torch.tensor([0, 27], dtype=torch.int32)
    for t in (q, k, v):
        t[1, :27] = math.nan
    out = flash_attn_func(*(t.to(target.device) for t in (q, k, v)), causal=True, leftpad_q=pads.to(target.device),
                          leftpad_k=pads.to(target.device), backend=target.backend).cpu()  # fmt: skip
    assert (out[1, :27] == 0).all()
    alone = agree(q[1:, 27:], k[1:, 27:], v[1:, 27:], target, causal=True)[0]
    oracle.assert_no_worse_than_naive(out[1:, 27:], alone.double(), alone)
    # the same as a key mask: padded query rows see no key of their own past
    out = flash_attn_func(*(t.nan_to_num(0.0).to(target.device) for t in (q, k, v)), causal=True,
        backend=target.backend,
                          mask=(torch.arange(33) >= pads[:, None])[:, None, None].to(target.device)).cpu()  # fmt: skip
    assert (out[1, :27] == 0).all()
    oracle.assert_no_worse_than_naive(out[1:, 27:], alone.double(), alone)


def test_t05_block_diagonal_mask(target):
    half = qkv(1, 600, 600, 2, 2, 80, dtype=BF16)
    q, k, v = (x.float() for x in half)
    segment = torch.full((600,), -1)
    spans = ((0, 128), (128, 256), (256, 384), (543, 600))
    for n, (a, b) in enumerate(spans):
        segment[a:b] = n
    mask = (segment[:, None] == segment[None, :]) & (segment[:, None] >= 0)
    out, lse, _ = agree(q, k, v, target, mask=mask)
    assert (out[:, 384:543] == 0).all() and (lse[..., 384:543] == -math.inf).all()
    for a, b in spans:
        part = flash_attn_func(q[:, a:b], k[:, a:b], v[:, a:b])
        torch.testing.assert_close(out[:, a:b], part)
    agree(*half, target, mask=mask)


def test_t07_unused_cache_slots(target):
    """K and V beyond the used length are NaN."""
    q, k, v = qkv(2, 3, 3, 1, 1, 64, dtype=HALF)
    for t in (k, v):
        t[0, 1:] = math.nan
    out, _, grads = agree(q, k, v, target, seqused_k=torch.tensor([1, 3], dtype=torch.int32))
    torch.testing.assert_close(out[0], v[0, :1].expand(3, 1, 64), rtol=0, atol=0)
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_t08_tail_of_a_page(target):
    """107 valid rows of 256, the tail NaN: the dense 107 × 107."""
    half = qkv(1, 107, 256, 8, 2, 128, dtype=BF16)
    for t in half[1:]:
        t[:, 107:] = math.nan
    used = torch.tensor([107], dtype=torch.int32)
    agree(*half, target, seqused_k=used, causal=True)
    q, k, v = (x.float() for x in half)
    out, _, _ = agree(q, k, v, target, seqused_k=used, causal=True)
    torch.testing.assert_close(out, flash_attn_func(q, k[:, :107], v[:, :107], causal=True))


def test_t10_nan_in_queries_stays_nan(target):
    q, k, v = qkv(2, 16, 16, 4, 4, 8)
    bad = q.clone()
    bad[1, 5] = math.nan
    out, _ = flash_attn_func(*(t.to(target.device) for t in (bad, k, v)), return_lse=True, backend=target.backend)
    assert out[1, 5].isnan().all() and int(out.isnan().sum()) == 4 * 8
    assert flash_attn_func(*(t.to(target.device) for t in (q * math.nan, k, v)), backend=target.backend).isnan().all()


@pytest.mark.parametrize("seqlen", (1, 3, 129))
def test_t11_huge_equal_inputs_are_exact(seqlen, target):
    x = torch.full((1, seqlen, 1, 64), 133120.0, dtype=BF16, device=target.device)
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    out = flash_attn_func(*leaves, backend=target.backend)
    assert (out == 133120).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, leaves, torch.ones_like(out)))


@pytest.mark.parametrize("level", (1e3, 1e4))
def test_t13_large_activations(level, target):
    """fp32 around 1e3 … 1e4: finite gradients that match fp64 as well as naive ones do."""
    tensors = [level + randn(2, 50, 4, 64) for _ in range(3)]
    _, _, grads = agree(*tensors, target)
    assert all(g.isfinite().all() for g in grads)


def test_t14_linear_bias_at_257(target):
    i = torch.arange(257)
    _, _, grads = agree(*qkv(1, 257, 257, 1, 1, 64, dtype=BF16), target, causal=True,
                        bias=(i[:, None] - i[None, :]).to(BF16)[None, None])  # fmt: skip
    assert all(g.isfinite().all() for g in grads)


def test_t16_empty_rows_have_lse_minus_infinity(target):
    _, lse, _ = agree(*qkv(2, 5, 0, 2, 2, 8), target)
    assert (lse == -math.inf).all()
    _, lse, _ = agree(*qkv(2, 9, 4, 2, 2, 8), target, causal=True)
    assert (lse[..., :5] == -math.inf).all() and lse[..., 5:].isfinite().all()


def test_t17_nothing_is_left_from_an_earlier_call(target):
    """Short and ragged lengths right after a call full of NaN."""
    bad = [t * math.nan for t in qkv(2, 200, 520, 2, 2, 64)]
    for sizes in ((9, 9), (101, 53), (1001, 503)):
        flash_attn_func(*(t.to(target.device) for t in bad), backend=target.backend)
        agree(*qkv(1, *sizes, 1, 1, 64), target)


def test_t19_zero_upstream_gradient(target):
    q, k, v = qkv(1, 65, 65, 2, 2, 64, dtype=HALF)
    _, _, grads = agree(q, k, v, target, causal=True, bias=randn(1, 2, 65, 65, dtype=HALF), dout=torch.zeros_like(q))
    assert all((g == 0).all() for g in grads)


# ---- Empty shapes, packed metadata ----------------------------------------------------------------------------------


def test_t20_empty_batch(target):
    q, k, v = qkv(0, 3952, 16, 10, 10, 64, dtype=HALF)
    out, lse, grads = agree(q, k, v, target)
    assert out.shape == (0, 3952, 10, 64) and out.dtype == HALF and lse.shape == (0, 10, 3952)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_t22_all_sizes_zero():
    x = torch.zeros(0, 2, 0, 0, dtype=BF16)
    try:
        assert flash_attn_func(x, x, x).shape == x.shape
    except (ValueError, RuntimeError) as error:
        assert "dim" in str(error)


def test_t23_no_keys(target):
    out, lse, grads = agree(*qkv(1, 5, 0, 3, 3, 8), target)
    assert (out == 0).all() and (lse == -math.inf).all() and (grads[0] == 0).all()
    tensors, o, longest = packed([1, 1, 1], [4, 0, 7], 3, 3, 8)  # decode, one request of length 0
    out, lse, grads = agree(*tensors, target, **o, max_seqlen=longest)
    assert (out[1] == 0).all() and (lse[:, 1] == -math.inf).all() and (grads[0][1] == 0).all()


def test_t25_keys_without_queries(target):
    tensors, o, longest = packed([150, 0, 150], [100, 100, 100], 2, 2, 32)
    _, _, (_, dk, dv) = agree(*tensors, target, **o, max_seqlen=longest)
    assert (dk[100:200] == 0).all() and (dv[100:200] == 0).all()


def test_t26_decode_with_empty_sequences(target):
    tensors, o, _ = packed([1, 0, 1], [3, 0, 5], 9, 3, 64, dtype=BF16)
    agree(*tensors, target, **o, max_seqlen=(1, 5), causal=True)


def test_t28_leading_empty_sequences(target):
    tensors, o, longest = packed([0, 0, 1023], [0, 1, 2045], 2, 2, 128)
    _, _, (_, dk, dv) = agree(*tensors, target, **o, max_seqlen=longest)
    assert (dk[0] == 0).all() and (dv[0] == 0).all()


def test_t29_one_key_has_no_query_gradient(target):
    """max_seqlen_k is larger than the truth; causal: only the last query of a sequence sees its one key."""
    tensors, o, _ = packed([76, 34, 146], [1, 1, 1], 1, 1, 32, dtype=HALF, factor=3)
    out, _, (dq, dk, _) = agree(*tensors, target, **o, max_seqlen=(146, 3), causal=True)
    last = o["cu_seqlens_q"][1:].long() - 1
    assert torch.equal(out[last], tensors[2]) and int((out != 0).any(-1).sum()) == 3
    assert dq.isfinite().all() and dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4


def test_t31_gaps_between_sequences(target):
    cu, used = cumulative(3, 4, 2), torch.tensor([2, 3, 1], dtype=torch.int32)
    real = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 0]).bool()
    tensors = [randn(9, 2, 16).masked_fill(~real[:, None, None], math.nan) for _ in range(3)]
    dout = randn(9, 2, 16).masked_fill(~real[:, None, None], math.nan)
    leaves = [t.to(target.device).requires_grad_() for t in tensors]
    o = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "seqused_q": used, "seqused_k": used}
    out = flash_attn_varlen_func(*leaves, max_seqlen_q=4, max_seqlen_k=4, backend=target.backend,
                                 **{n: t.to(target.device) for n, t in o.items()})  # fmt: skip
    grads = torch.autograd.grad(out, leaves, dout.to(target.device))
    copies = [t[real].requires_grad_() for t in tensors]
    dense = cumulative(2, 3, 1)
    want = oracle.attention(*copies, options=Options(cu_seqlens_q=dense, cu_seqlens_k=dense))[0]
    want_grads = torch.autograd.grad(want, copies, dout[real].double())
    for got, w in zip((out.detach(), *grads), (want.detach(), *want_grads), strict=True):
        torch.testing.assert_close(got.cpu()[real], w.float(), rtol=1e-4, atol=1e-5)
        assert (got.cpu()[~real] == 0).all()


@pytest.mark.parametrize("lens", ((0, 1, 65, 0), (33, 33)))
def test_t32_nothing_behind_cu_seqlens(lens, target):
    """A poisoned entry behind cu_seqlens and rows behind the last sequence: neither read nor written."""
    poisoned = torch.cat([cumulative(*lens), torch.tensor([2**31 - 1, -5], dtype=torch.int32)])
    cu = poisoned[: len(lens) + 1]
    total = sum(lens)
    q, k, v = (randn(total + 64, 2, 16) for _ in range(3))
    for t in (q, k, v):
        t[total:] = math.nan
    copies = [t.clone() for t in (q, k, v)]
    out = flash_attn_varlen_func(*(t.to(target.device) for t in (q, k, v)), cu.to(target.device), cu.to(target.device),
                                 max(lens), max(lens), causal=True, backend=target.backend).cpu()  # fmt: skip
    want = oracle.attention(
        q[:total], k[:total], v[:total], options=Options(causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    )
    torch.testing.assert_close(out[:total], want[0].float(), rtol=1e-5, atol=1e-6)
    assert (out[total:] == 0).all() and poisoned[-2] == 2**31 - 1
    assert all(torch.equal(t[:total], c[:total]) for t, c in zip((q, k, v), copies, strict=True))


def test_t34_two_hundred_short_sequences(target):
    lens = [1 + n % 7 for n in range(200)]
    tensors, o, longest = packed(lens, lens, 2, 2, 64)
    agree(*tensors, target, **o, max_seqlen=longest)


def test_t35_every_backend_isolates_segments():
    tensors, o, longest = packed([33, 65, 7], [33, 65, 7], 2, 2, 16)
    for target in cases.TARGETS:
        agree(*tensors, target, **o, max_seqlen=longest)


def test_t83_checkpoint_of_packed_dropout(target):
    """Non-reentrant checkpoint of the packed varlen call: the gradient as without, each saved tensor unpacked once."""
    from torch.utils.checkpoint import checkpoint

    from flash_attn import flash_attn_varlen_qkvpacked_func

    x = torch.randn(98, 3, 2, 16, device=target.device, requires_grad=True)
    cu = cumulative(33, 65).to(target.device)

    def attention(t):
        return flash_attn_varlen_qkvpacked_func(t, cu, 65, dropout_p=0.2, causal=True, backend=target.backend)

    torch.manual_seed(3)
    want = torch.autograd.grad(attention(x).square().sum(), x)[0]
    torch.manual_seed(3)
    got = torch.autograd.grad(checkpoint(attention, x, use_reentrant=False).square().sum(), x)[0]
    torch.testing.assert_close(got, want)
    unpacked: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t.data_ptr()) or t):
        attention(x).sum().backward()
    assert len(unpacked) <= 12
