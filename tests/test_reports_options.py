"""Faults that users reported against attention libraries: causal, window, ALiBi, softcap, heads, bias, dropout.

The identifiers (T37 …) name the project's collection of such reports; each test states what is right.
"""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from oracle import Options
from test_memory import measure
from test_reports import BF16, FP32, HALF, agree, cumulative, packed, qkv, randn

from flash_attn import dropout_mask, flash_attn_func, flash_attn_varlen_func

# ---- Causal, window, ALiBi, softcap ---------------------------------------------------------------------------------


def test_t37_causal_is_lower_right(target):
    q, k = torch.zeros(1, 2, 1, 5), torch.zeros(1, 5, 1, 5)
    v = torch.eye(5)[None, :, None]
    out = flash_attn_func(*(t.to(target.device) for t in (q, k, v)), causal=True, backend=target.backend).cpu()
    want = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0], [0.2] * 5])
    torch.testing.assert_close(out[0, :, 0], want)


def test_t38_windows_that_equal_causal(target):
    q, k, v = (t.to(target.device) for t in qkv(1, 257, 257, 2, 2, 128, dtype=HALF))
    causal = flash_attn_func(q, k, v, causal=True, backend=target.backend)
    for window in ((-1, 0), (257, 0), (256, 0)):
        torch.testing.assert_close(flash_attn_func(q, k, v, window_size=window, backend=target.backend), causal)


def test_t40_window_with_more_queries_than_keys(target):
    out, lse, _ = agree(*qkv(1, 129, 65, 2, 2, 32), target, window_size=(32, 64))
    i, j = torch.arange(129)[:, None], torch.arange(65)[None, :]
    visible = (j >= i + 65 - 129 - 32) & (j <= i + 65 - 129 + 64)
    none = ~visible.any(1)
    assert torch.equal(lse[0, 0] == -math.inf, none) and (out[0, none] == 0).all()


@pytest.mark.parametrize("window", ((-128, 0), (0, -2), (-2, -2)))
def test_t41_negative_windows_are_refused(window):
    with pytest.raises(ValueError, match="window_size"):
        flash_attn_func(*qkv(1, 5, 5, 1, 1, 8), window_size=window)


def test_t43_padding_and_causal_both_count(target):
    q, k, v = qkv(2, 7, 7, 2, 2, 16)
    pads = torch.tensor([2, 4], dtype=torch.int32)
    mask = (torch.arange(7) >= pads[:, None])[:, None, None]
    out, _, _ = agree(q, k, v, target, causal=True, mask=mask)
    used, _, _ = agree(q, k, v, target, causal=True, leftpad_q=pads, leftpad_k=pads)
    for b in range(2):
        torch.testing.assert_close(out[b, pads[b] :], used[b, pads[b] :])
        assert (out[b, : pads[b]] == 0).all()


def test_t44_alibi_is_the_same_in_every_layout(target):
    """Dense, varlen, used lengths and left pads; distances count from the lower-right diagonal."""
    slopes = 2.0 ** -torch.arange(1.0, 9.0)
    q, k, v = qkv(1, 5, 33, 8, 8, 16)
    dense, _, _ = agree(q, k, v, target, alibi_slopes=slopes, causal=True)
    varlen, _, _ = agree(q[0], k[0], v[0], target, alibi_slopes=slopes, causal=True, cu_seqlens_q=cumulative(5),
                         cu_seqlens_k=cumulative(33), max_seqlen=(5, 33))  # fmt: skip
    cache = [
        torch.cat([torch.full((1, 7, 8, 16), math.nan), t, torch.full((1, 31, 8, 16), math.nan)], 1) for t in (k, v)
    ]
    used, _, _ = agree(q, *cache, target, alibi_slopes=slopes, causal=True, seqused_k=torch.tensor([40],
        dtype=torch.int32),
                       leftpad_k=torch.tensor([7], dtype=torch.int32))  # fmt: skip
    torch.testing.assert_close(varlen[None], dense)
    torch.testing.assert_close(used, dense)


def test_t46_softcap_formula(target):
    """c · tanh(s / c) after the scale and before bias and mask, up to logits of ±100; the gradient has 1 − tanh²."""
    q, k, v = qkv(1, 33, 65, 2, 2, 16)
    bias, mask = randn(1, 2, 33, 65), torch.rand(33, 65) < 0.8
    agree(10 * q, 10 * k, v, target, softcap=15.0, bias=bias, mask=mask)
    # by hand for one pair of keys
    q, k = torch.full((1, 1, 1, 1), 20.0), torch.tensor([2.0, 1.0]).view(1, 2, 1, 1)
    _, lse = flash_attn_func(*(t.to(target.device) for t in (q, k, k)), softmax_scale=0.5, softcap=15.0,
        return_lse=True,
                             backend=target.backend)  # fmt: skip
    want = math.log(sum(math.exp(15 * math.tanh(s / 15)) for s in (20.0, 10.0)))
    assert abs(float(lse) - want) < 1e-5


@pytest.mark.parametrize("longest", ((128, 217), (217, 128)))
def test_t47_varlen_with_softcap(longest, target):
    lens = [[1 + int(x) for x in torch.randint(0, n, (3,))] + [n] for n in longest]
    tensors, o, longest = packed(*lens, 2, 2, 128)
    agree(*tensors, target, **o, max_seqlen=longest, causal=True, softcap=15.0)


def test_t49_lse_of_capped_logits(target):
    agree(*qkv(2, 15, 127, 8, 4, 128, dtype=HALF), target, softcap=8.0)


# ---- Heads, head dims, strides, bias --------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", ((6, 3), (8, 2)))
@pytest.mark.parametrize("dims", ((16, 32), (32, 16)))
def test_t50_groups(heads, dims, target):
    agree(*qkv(2, 33, 65, *heads, dims[0], dim_v=dims[1]), target)
    agree(*qkv(1, 33, 65, *heads, dims[0], dim_v=dims[1], dtype=BF16), target, causal=True)


def test_t52_odd_groups(target):
    agree(*qkv(1, 33, 65, 24, 8, 128, dtype=BF16), target)
    agree(*qkv(1, 33, 65, 10, 2, 64, dtype=BF16), target, sink=randn(10, dtype=BF16))


def test_t53_strides_of_the_upstream_gradient(target):
    q, k, v = (t.to(target.device).requires_grad_() for t in qkv(2, 32, 32, 4, 1, 128, dtype=HALF))
    out = flash_attn_func(q, k, v, backend=target.backend)
    transposed = torch.randn(2, 4, 32, 128, device=target.device).half().transpose(1, 2)
    for dout in (torch.ones((), device=target.device).half().expand(out.shape), transposed):
        got = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        want = torch.autograd.grad(out, (q, k, v), dout.contiguous(), retain_graph=True)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def test_t55_strides_of_axes_of_size_one(target):
    memory = randn(1 << 20)
    for size, stride in (
        ((2, 9, 2, 1), (36, 4, 2, 2)),
        ((2, 1, 2, 8), (16, 1 << 18, 8, 1)),
        ((1, 9, 1, 8), (999999, 8, 77777, 1)),
    ):
        q, k, v = (torch.as_strided(memory, size, stride, n * 1000) for n in range(3))
        want = agree(*(t.clone(memory_format=torch.contiguous_format) for t in (q, k, v)), target)[0]
        got = flash_attn_func(*(t.to(target.device) for t in (q, k, v)), backend=target.backend).cpu()
        torch.testing.assert_close(got, want)


def test_t56_permuted_views(target):
    """Stored (batch, seqlen, heads, dim), used with the middle axes exchanged: B84 S3 H3."""
    stored = [randn(84, 3, 3, 64) for _ in range(3)]
    q, k, v = (t.transpose(1, 2).to(target.device) for t in stored)
    want = agree(*(t.transpose(1, 2).contiguous() for t in stored), target)[0]
    torch.testing.assert_close(flash_attn_func(q, k, v, backend=target.backend).cpu(), want)


@pytest.mark.parametrize("seqlen_k", (33, 65, 545))
def test_t58_expanded_keys(seqlen_k, target):
    """K and V of one head expanded over 8, D 512, bf16, with a mask."""
    q = randn(1, 9, 8, 512, dtype=BF16)
    k, v = (randn(1, seqlen_k, 1, 512, dtype=BF16).expand(-1, -1, 8, -1) for _ in range(2))
    mask = torch.rand(1, 1, 9, seqlen_k) < 0.7
    out, _, _ = agree(q, k, v, target, mask=mask)
    dense = flash_attn_func(*(t.contiguous().to(target.device) for t in (q, k, v)), mask=mask.to(target.device),
                            backend=target.backend)  # fmt: skip
    torch.testing.assert_close(out, dense.cpu())


def test_t59_transposed_values(target):
    q, k, v = qkv(1, 33, 65, 2, 2, 256, dtype=HALF)
    view = v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # the same values, last stride 65
    assert view.stride(-1) == 65
    got = flash_attn_func(*(t.to(target.device) for t in (q, k, view)), backend=target.backend)
    assert torch.equal(got, flash_attn_func(*(t.to(target.device) for t in (q, k, v)), backend=target.backend))
    agree(q, k, view, target)


@pytest.mark.parametrize("dim", (320, 512))
@pytest.mark.parametrize("causal", (False, True))
def test_t61_large_head_dims(dim, causal, target):
    agree(*qkv(1, 33, 65, 8, 4, dim, dtype=BF16), target, causal=causal)


@pytest.mark.parametrize("dims", ((8, 16), (32, 24), (4, 2), (128, 96), (128, 40), (192, 128)))
def test_t62_other_head_dim_of_values(dims, target):
    out, _, _ = agree(*qkv(2, 33, 65, 4, 2, dims[0], dim_v=dims[1]), target, causal=True)
    assert out.shape[-1] == dims[1]
    agree(*qkv(1, 65, 33, 2, 2, dims[0], dim_v=dims[1], dtype=HALF), target)


@pytest.mark.parametrize("seqlen_k", (43, 77, 300, 498))
def test_t64_bias_of_any_alignment(seqlen_k, target):
    """Odd lengths, a slice of a larger tensor at an odd offset, strides no multiple of 8; bool as mask."""
    q, k, v = qkv(2, 19, seqlen_k, 8, 8, 32, dtype=HALF)
    agree(q, k, v, target, bias=randn(2, 8, 19, seqlen_k, dtype=HALF))
    large = randn(2, 8, 23, seqlen_k + 5, dtype=HALF)
    part = large[:, :, 1:20, 3 : 3 + seqlen_k]
    options = {"backend": target.backend}
    got = flash_attn_func(*(t.to(target.device) for t in (q, k, v)), bias=part.to(target.device), **options)
    want = flash_attn_func(
        *(t.to(target.device) for t in (q, k, v)), bias=part.contiguous().to(target.device), **options
    )
    assert torch.equal(got, want)
    transposed = randn(2, 8, seqlen_k, 19, dtype=HALF).transpose(2, 3)
    agree(q, k, v, target, bias=transposed)
    agree(q, k, v, target, mask=torch.rand(2, 8, 19, seqlen_k + 3)[..., 2:-1] < 0.7)


def test_t65_mask_and_bias_with_other_broadcasts(target):
    """(B·N) sequences, mask (B·N, 1, 1, Sk) and bias (B, 1 → N, H, Sq, Sk) expanded: right values."""
    batch, n, heads, seqlen = 2, 4, 4, 17
    q, k, v = qkv(batch * n, seqlen, seqlen, heads, heads, 16)
    mask = torch.rand(batch * n, 1, 1, seqlen) < 0.8
    bias = randn(batch, 1, heads, seqlen, seqlen)
    flat = bias.expand(-1, n, -1, -1, -1).flatten(0, 1)
    agree(q, k, v, target, mask=mask, bias=flat)


def test_t65_t68_broadcasts_are_not_written_out():
    """Mask (B, 1, S, S), mask (B, 1, 1, S), bias (1, H, 1, S) with 12 heads: no H-fold copy in forward and backward."""
    measure("""
    n, heads = 1024, 12
    q, k, v = (torch.randn(4, n, heads, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, heads, 1, n, requires_grad=True)
    for shape in ((4, 1, n, n), (4, 1, 1, n)):
        mask = torch.rand(shape) < 0.9
        def run():
            out = flash_attn.flash_attn_func(q, k, v, mask=mask, bias=bias)
            torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out))
        small = flash_attn.flash_attn_func(q[:1, :9], k[:1, :9], v[:1, :9], bias=bias[..., :9])
        torch.autograd.grad(small, (q, bias), torch.ones_like(small))  # torch imports much on its first backward
        used = peak_above(run)
        print(used / MB)
        assert used < 25 * MB, used  # (4, 12, n, n) bytes: 50 MB
    """)


def test_t67_only_the_bias_needs_a_gradient(target):
    q, k, v = (t.to(target.device) for t in qkv(2, 33, 65, 2, 2, 16))
    bias = randn(1, 2, 33, 65)
    leaf = bias.to(target.device).requires_grad_()
    out = flash_attn_func(q, k, v, bias=leaf, causal=True, backend=target.backend)
    dout = torch.randn_like(out)
    out.backward(dout)
    twin = bias.requires_grad_()
    want = oracle.attention(q.cpu(), k.cpu(), v.cpu(), twin, None, Options(causal=True))[0]
    want.backward(dout.cpu().double())
    torch.testing.assert_close(leaf.grad.cpu(), twin.grad, rtol=1e-4, atol=1e-5)
    assert q.grad is None and k.grad is None and v.grad is None


def test_t110_short_queries_over_ragged_keys(target):
    for seqlen_q in range(1, 9):
        for seqlen_k in (38, 39, 70):
            dim = (64, 96, 128)[seqlen_q % 3]
            agree(*qkv(1, seqlen_q, seqlen_k, 2, 1, dim), target, causal=True, grads=False)


def test_t112_left_padded_decode(target):
    q, k, v = qkv(2, 1, 5, 4, 2, 16)
    pads, used = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([5, 5], dtype=torch.int32)
    k[0, :2], v[0, :2] = math.nan, math.nan
    out, _, _ = agree(q, k, v, target, causal=True, leftpad_k=pads, seqused_k=used)
    for b, pad in enumerate((2, 0)):
        alone = flash_attn_func(q[b : b + 1], k[b : b + 1, pad:], v[b : b + 1, pad:], causal=True)
        torch.testing.assert_close(out[b : b + 1], alone)


def test_t131_real_activations(target):
    """Batch 2, groups of 8, D 256, bf16, causal, with an offset in K and outlier channels: dq is not 5 × too large."""
    q, k, v = qkv(2, 33, 33, 16, 2, 256, dtype=FP32)
    k = k + 8 * torch.randn(256)
    for t in (q, k):
        t[..., :3] *= 10
    k[..., 7] *= 100
    agree(*(t.to(BF16) for t in (q, k, v)), target, causal=True)


# ---- Dropout --------------------------------------------------------------------------------------------------------


def test_t79_masks_differ_between_calls(target):
    q, k, v = (t.to(target.device) for t in qkv(1, 33, 33, 2, 2, 16))
    a, b = (flash_attn_func(q, k, v, dropout_p=0.3, backend=target.backend) for _ in range(2))
    assert not torch.equal(a, b)
    seed = torch.tensor([7, 8], device=target.device)
    a, b = (flash_attn_func(q, k, v, dropout_p=0.3, dropout_seed=seed, backend=target.backend) for _ in range(2))
    assert torch.equal(a, b)


def test_t80_dropout_with_causal_beyond_64(target):
    """Against attention with the exported mask, forward and gradients."""
    seed = torch.tensor([11, -12], device=target.device)
    leaves = [t.to(target.device).requires_grad_() for t in qkv(2, 129, 129, 2, 2, 32)]
    out = flash_attn_func(*leaves, dropout_p=0.1, dropout_seed=seed, causal=True, backend=target.backend)
    keep = dropout_mask(seed, 0.1, 2, 2, 129, 129).cpu()
    twins = [t.detach().cpu().requires_grad_() for t in leaves]
    want = oracle.attention(*twins, options=Options(causal=True, keep=keep, dropout_p=0.1))[0]
    dout = torch.randn_like(out)
    torch.testing.assert_close(out.cpu(), want.float(), rtol=1e-4, atol=1e-5)
    got = torch.autograd.grad(out, leaves, dout)
    for g, w in zip(got, torch.autograd.grad(want, twins, dout.cpu().double()), strict=True):
        torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-5)


def test_t85_tiny_and_whole_probabilities(target):
    leaves = [t.to(target.device).requires_grad_() for t in qkv(1, 33, 33, 2, 2, 16)]
    want = flash_attn_func(*leaves, backend=target.backend)
    assert torch.equal(flash_attn_func(*leaves, dropout_p=1e-16, backend=target.backend), want)
    out, lse = flash_attn_func(*leaves, dropout_p=1.0, return_lse=True, backend=target.backend)
    assert (out == 0).all() and lse.isfinite().all()
    assert all((g == 0).all() for g in torch.autograd.grad(out, leaves, torch.ones_like(out)))


def test_t44_t112_same_rows_in_varlen_and_padded(target):
    """Left-padded batch and packed sequences of the same data give the same rows."""
    lens = [3, 9]
    (q, k, v), o, longest = packed(lens, lens, 4, 2, 16)
    want = flash_attn_varlen_func(*(t.to(target.device) for t in (q, k, v)), o["cu_seqlens_q"].to(target.device),
                                  o["cu_seqlens_k"].to(target.device), *longest, causal=True,
                                  backend=target.backend).cpu()  # fmt: skip
    padded = []
    for t in (q, k, v):
        rows = torch.full((2, 9, *t.shape[1:]), math.nan)
        rows[0, 6:], rows[1] = t[:3], t[3:]
        padded.append(rows)
    pads = torch.tensor([6, 0], dtype=torch.int32)
    out, _, _ = agree(*padded, target, causal=True, leftpad_q=pads, leftpad_k=pads)
    torch.testing.assert_close(torch.cat([out[0, 6:], out[1]]), want)
