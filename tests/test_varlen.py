"""Packed sequences: values and gradients against the oracle, isolation, empty sequences, gaps, trailing rows."""

from __future__ import annotations

import math
from dataclasses import replace

import cases
import pytest
import torch
from cases import Case, Target, with_targets

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func

BF16 = torch.bfloat16
BASE = Case(varlen=True, batch=4, seqlen_q=65, seqlen_k=97, seed=3)

CASES = [
    replace(BASE, **options).differentiable
    for options in (
        {}, {"causal": True}, {"window": (9, 4)}, {"dtype": BF16, "heads": 6, "heads_k": 2}, {"dtype": torch.float64},
        {"dtype": torch.float16, "causal": True}, {"cu_dtype": torch.int64}, {"trailing": 17}, {"slack": 30},
        {"softcap": 4.0, "causal": True, "lse_grad": True}, {"alibi": "heads"}, {"alibi": "batch_heads",
        "causal": True},
        {"bias": "bhqk"}, {"bias": "bhqk", "slack": 3, "dtype": BF16, "bias_fp32": True}, {"bias": "11qk",
        "bias_inf": True},
        {"bias": "b11k"}, {"bias": "1h11", "lse_grad": True}, {"mask": "bhqk"}, {"mask": "b11k", "slack": 5},
        {"mask": "qk", "causal": True}, {"sink": True, "causal": True, "lse_grad": True}, {"dropout_p": 0.2,
        "heads": 4},
        {"seqused_k": True}, {"seqused_q": True}, {"leftpad_k": True, "causal": True}, {"leftpad_q": True,
        "causal": True},
        {"seqused_q": True, "seqused_k": True, "leftpad_q": True, "leftpad_k": True, "trailing": 5, "bias": "bhqk",
         "mask": "1hqk", "alibi": "heads", "dropout_p": 0.1, "sink": True, "window": (20, 9), "lse_grad": True},
        {"dim": 33, "dim_v": 5}, {"dim": 8, "dim_v": 130, "heads": 4, "heads_k": 1}, {"batch": 1}, {"batch": 0},
        {"seqlen_q": 0}, {"seqlen_k": 0}, {"seqlen_q": 1, "seqlen_k": 300}, {"seqlen_q": 200, "seqlen_k": 2},
        {"batch": 40, "seqlen_q": 7, "seqlen_k": 9, "causal": True}, {"deterministic": True, "heads": 4},
        *({"layout": x} for x in cases.LAYOUTS[1:]), *({"data": d, "dtype": BF16} for d in cases.DATA[1:]),
    )
]  # fmt: skip


@with_targets(CASES)
def test_values_and_gradients(case: Case, target: Target):
    cases.check(case, target.device, target.backend)


def packed(target: Target, lens_q, lens_k, *, heads=4, heads_k=2, dim=16, dtype=torch.float32, trailing=0):
    """q, k, v with gradients, and the two cu_seqlens."""
    total_q, total_k = sum(lens_q) + trailing, sum(lens_k) + trailing
    shapes = ((total_q, heads, dim), (total_k, heads_k, dim), (total_k, heads_k, dim))
    tensors = [torch.randn(s, dtype=dtype).to(target.device).requires_grad_() for s in shapes]
    cu = [
        torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=target.device) for n in (lens_q, lens_k)
    ]
    return tensors, cu


@pytest.mark.parametrize("causal", (False, True))
def test_equals_a_loop_over_sequences(causal, target):
    lens_q, lens_k = [5, 0, 65, 1, 40], [9, 4, 65, 0, 17]
    (q, k, v), (cu_q, cu_k) = packed(target, lens_q, lens_k)
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 65, 65, causal=causal, return_lse=True, backend=target.backend
    )
    parts = [
        flash_attn_func(a[None], b[None], c[None], causal=causal, return_lse=True, backend=target.backend)
        for a, b, c in zip(q.split(lens_q), k.split(lens_k), v.split(lens_k), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat([o[0] for o, _ in parts]))
    torch.testing.assert_close(lse, torch.cat([x[0] for _, x in parts], 1))
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    want = torch.autograd.grad([o for o, _ in parts], (q, k, v), [d[None] for d in dout.split(lens_q)])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_packed_functions_equal_unpacked(target):
    cu = torch.tensor([0, 5, 5, 30], dtype=torch.int32, device=target.device)
    qkv = torch.randn(30, 3, 4, 16, device=target.device)
    want = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 25, 25, causal=True, backend=target.backend)
    got = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 25, causal=True, backend=target.backend)
    assert torch.equal(got, want)
    q, kv = qkv[:, 0], torch.randn(40, 2, 2, 16, device=target.device)
    cu_k = torch.tensor([0, 10, 12, 40], dtype=torch.int32, device=target.device)
    want = flash_attn_varlen_func(q, *kv.unbind(1), cu, cu_k, 25, 28, backend=target.backend)
    got = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu_k, 25, 28, backend=target.backend)
    assert torch.equal(got, want)


def test_max_seqlen_may_be_a_tensor_or_too_large(target):
    (q, k, v), (cu_q, cu_k) = packed(target, [5, 9], [9, 3])
    want = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 9, backend=target.backend)
    got = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 1000, 4096, backend=target.backend)
    assert torch.equal(got, want)
    longest = (cu_q[1:] - cu_q[:-1]).max().item(), (cu_k[1:] - cu_k[:-1]).max().item()
    assert torch.equal(flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, backend=target.backend), want)


@pytest.mark.parametrize("fill", (math.nan, math.inf))
def test_sequences_do_not_touch_each_other(fill, target):
    """NaN all over the middle sequence: the others, forward and backward, are bitwise what they were."""
    lens = [33, 20, 65]
    tensors, (cu, _) = packed(target, lens, lens, heads=2)
    out = flash_attn_varlen_func(*tensors, cu, cu, 65, 65, causal=True, backend=target.backend)
    dout = torch.randn_like(out)
    want = [out.detach(), *torch.autograd.grad(out, tensors, dout)]
    dout[33:53] = fill
    dirty = [t.detach().clone() for t in tensors]
    for t in dirty:
        t[33:53] = fill
        t.requires_grad_()
    out = flash_attn_varlen_func(*dirty, cu, cu, 65, 65, causal=True, backend=target.backend)
    others = torch.ones(118, dtype=torch.bool, device=target.device)
    others[33:53] = False
    for got, w in zip([out.detach(), *torch.autograd.grad(out, dirty, dout)], want, strict=True):
        assert torch.equal(got[others], w[others])


def test_trailing_rows_are_zero_and_not_read(target):
    tensors, (cu_q, cu_k) = packed(target, [5, 9], [9, 3], trailing=40)
    with torch.no_grad():
        for t in tensors:
            t[14:] = math.nan
            t[12 if t is not tensors[0] else 14 :] = math.nan
    out, lse = flash_attn_varlen_func(*tensors, cu_q, cu_k, 9, 9, return_lse=True, backend=target.backend)
    assert (out[14:] == 0).all() and (lse[:, 14:] == -math.inf).all() and out.isfinite().all()
    for t, grad in zip(tensors, torch.autograd.grad(out, tensors, torch.randn_like(out)), strict=True):
        assert grad.isfinite().all() and (grad[14 if t is tensors[0] else 12 :] == 0).all()


def test_order_of_sequences_does_not_matter(target):
    lens = [33, 1, 0, 65]
    (q, k, v), (cu, _) = packed(target, lens, lens)
    out = flash_attn_varlen_func(q, k, v, cu, cu, 65, 65, causal=True, backend=target.backend)
    order = [3, 0, 2, 1]
    shuffled = [torch.cat([t.split(lens)[n] for n in order]) for t in (q, k, v)]
    cu2 = torch.tensor([0, 65, 98, 98, 99], dtype=torch.int32, device=target.device)
    got = flash_attn_varlen_func(*shuffled, cu2, cu2, 65, 65, causal=True, backend=target.backend)
    torch.testing.assert_close(got, torch.cat([out.split(lens)[n] for n in order]))


def test_many_short_sequences(target):
    """200 sequences of 1 to 7 rows: gradients, no tile shared by two sequences."""
    case = Case(
        varlen=True, batch=200, seqlen_q=7, seqlen_k=7, dim=64, dim_v=64, heads=2, heads_k=1, causal=True, seed=8
    )
    cases.check(case.differentiable, target.device, target.backend)


def test_int64_and_int32_metadata_agree_bitwise(target):
    tensors, (cu_q, cu_k) = packed(target, [5, 9, 40], [9, 3, 33])
    want = flash_attn_varlen_func(*tensors, cu_q, cu_k, 40, 33, backend=target.backend)
    got = flash_attn_varlen_func(*tensors, cu_q.long(), cu_k.long(), 40, 33, backend=target.backend)
    assert torch.equal(got, want)


def test_metadata_with_strides(target):
    """cu_seqlens and lengths as views with a step."""
    tensors, (cu_q, cu_k) = packed(target, [5, 9, 40], [9, 3, 33])
    used = torch.tensor([7, 2, 20], dtype=torch.int32, device=target.device)
    want = flash_attn_varlen_func(*tensors, cu_q, cu_k, 40, 33, seqused_k=used, backend=target.backend)
    cu_q, cu_k, used = (torch.stack([t, t + 1000], 1)[:, 0] for t in (cu_q, cu_k, used))
    got = flash_attn_varlen_func(*tensors, cu_q, cu_k, 40, 33, seqused_k=used, backend=target.backend)
    assert torch.equal(got, want)


def test_metadata_may_change_after_forward(target):
    """cu_seqlens written between forward and backward: an error or the old gradient, never a mixture."""
    tensors, (cu_q, cu_k) = packed(target, [5, 9], [9, 3])
    out = flash_attn_varlen_func(*tensors, cu_q, cu_k, 9, 9, backend=target.backend)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    cu_q.copy_(torch.tensor([0, 14, 14]))
    try:
        got = torch.autograd.grad(out, tensors, dout)
    except RuntimeError:
        return
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_gaps_hold_nothing(target):
    """Segments longer than what is used: gaps are NaN, get zero output, LSE −inf and zero gradients."""
    cu = torch.tensor([0, 30, 70, 90], dtype=torch.int32, device=target.device)
    used = torch.tensor([20, 33, 1], dtype=torch.int32, device=target.device)
    real = torch.zeros(90, dtype=torch.bool, device=target.device)
    for start, n in ((0, 20), (30, 33), (70, 1)):
        real[start : start + n] = True
    tensors = [torch.randn(90, 2, 8, device=target.device) for _ in range(3)]
    compact = [t[real].requires_grad_() for t in tensors]
    cu_compact = torch.tensor([0, 20, 53, 54], dtype=torch.int32, device=target.device)
    for t in tensors:
        t[~real] = math.nan
        t.requires_grad_()
    out, lse = flash_attn_varlen_func(*tensors, cu, cu, 40, 40, causal=True, seqused_q=used, seqused_k=used,
                                      return_lse=True, backend=target.backend)  # fmt: skip
    want, want_lse = flash_attn_varlen_func(*compact, cu_compact, cu_compact, 33, 33, causal=True, return_lse=True,
                                            backend=target.backend)  # fmt: skip
    torch.testing.assert_close(out[real], want)
    torch.testing.assert_close(lse[:, real], want_lse)
    assert (out[~real] == 0).all() and (lse[:, ~real] == -math.inf).all()
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, tensors, dout.masked_fill(~real[:, None, None], math.nan))
    for g, w in zip(got, torch.autograd.grad(want, compact, dout[real]), strict=True):
        torch.testing.assert_close(g[real], w, rtol=1e-5, atol=1e-6)
        assert (g[~real] == 0).all()


def test_rows_before_the_first_sequence(target):
    """cu_seqlens that begin behind row 0: the rows before belong to nobody."""
    tensors, (cu_q, cu_k) = packed(target, [5, 9], [9, 3])
    ahead = [torch.cat([torch.full_like(t[:4], math.nan), t.detach()]).requires_grad_() for t in tensors]
    want = flash_attn_varlen_func(*tensors, cu_q, cu_k, 9, 9, causal=True, backend=target.backend)
    out = flash_attn_varlen_func(*ahead, cu_q + 4, cu_k + 4, 9, 9, causal=True, backend=target.backend)
    assert torch.equal(out[4:], want) and (out[:4] == 0).all()
    dout = torch.randn_like(out)
    for g, w in zip(torch.autograd.grad(out, ahead, dout), torch.autograd.grad(want, tensors, dout[4:]), strict=True):
        torch.testing.assert_close(g[4:], w)
        assert (g[:4] == 0).all()
