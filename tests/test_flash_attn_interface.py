"""flash_attn_interface: private functions against public ones; 1.x functions and S_dmask against formulas."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor

import flash_attn
from flash_attn import dropout_mask, flash_attn_func, flash_attn_varlen_func
from flash_attn import flash_attn_interface as interface
from flash_attn import flash_attn_triton as triton
from flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    flash_attn_unpadded_func,
)
from flash_attn.softmax_dmask import softmax_dmask

DOUBLE = dict(dtype=torch.float64)


def operands(
    *leading: int, sq: int = 5, sk: int = 7, heads: int = 4, heads_k: int = 2, dim: int = 8, dtype=torch.float64
):
    """q, k, v and dout; varlen without `leading`."""
    shapes = [(*leading, sq, heads, dim), *[(*leading, sk, heads_k, dim)] * 2, (*leading, sq, heads, dim)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def lengths(*values: int) -> Tensor:
    return torch.tensor([0, *values], dtype=torch.int32).cumsum(0, dtype=torch.int32)


OPTIONS = {  # dropout_p, causal, left, right, softcap, with ALiBi
    "plain": (0.0, False, -1, -1, 0.0, False),
    "causal": (0.0, True, -1, -1, 0.0, False),
    "window": (0.0, False, 2, 1, 0.0, False),
    "softcap, alibi": (0.0, True, 3, 0, 5.0, True),
    "dropout": (0.3, True, -1, -1, 0.0, False),
    "tiny dropout": (1e-30, False, -1, -1, 0.0, False),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_private_functions_equal_the_public_ones(name: str, varlen: bool, dtype: torch.dtype) -> None:
    p, causal, left, right, softcap, with_alibi = OPTIONS[name]
    slopes = torch.tensor([0.5, 0.1, 0.3, 0.2]) if with_alibi else None
    q, k, v, dout = operands(*(() if varlen else (2,)), sq=9, sk=11, dtype=dtype)
    where = (lengths(4, 0, 5), lengths(3, 2, 6), 5, 6) if varlen else ()
    tail = (p, 0.4, causal, left, right, softcap, slopes)
    forward, backward = (
        (_flash_attn_varlen_forward, _flash_attn_varlen_backward)
        if varlen
        else (_flash_attn_forward, _flash_attn_backward)
    )
    out, lse, s_dmask, rng_state = forward(q, k, v, *where, *tail, True)
    assert rng_state.dtype == torch.int64 and rng_state.shape == (2,)
    rounded = (3, 4, 128, 128) if varlen else (2, 4, 128, 128)
    assert s_dmask.shape == (rounded if name == "dropout" else (0,)) and s_dmask.dtype == dtype

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    public = flash_attn_varlen_func if varlen else flash_attn_func
    expected, expected_lse = public(
        *leaves, *where, p, 0.4, causal, (left, right), softcap, slopes, dropout_seed=rng_state, return_lse=True
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)

    expected_gradients = torch.autograd.grad(expected, leaves, dout)
    gradients = [torch.full_like(x, math.nan) for x in (q, k, v)]
    softmax_d = backward(dout, q, k, v, out, lse, *gradients, *where, *tail, False, rng_state)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance)

    delta = (dout * out).double().sum(-1).transpose(-1, -2)
    if varlen:
        assert softmax_d.shape == (4, 9 + 128 * 3)
        delta_d = torch.cat((softmax_d[:, :4], softmax_d[:, 4 + 256 : 9 + 256]), 1)
    else:
        assert softmax_d.shape == (2, 4, 128)
        delta_d = softmax_d[..., :9]
    torch.testing.assert_close(delta_d.double(), delta, rtol=tolerance, atol=4 * tolerance)
    assert softmax_d.count_nonzero() <= delta.numel()


def test_only_the_wanted_gradients_and_foreign_dtypes() -> None:
    q, k, v, dout = operands(1)
    tail = (0.0, 0.3, False, -1, -1, 0.0, None)
    out, lse, _, _ = _flash_attn_forward(q, k, v, *tail, False)
    full = [torch.empty_like(x) for x in (q, k, v)]
    _flash_attn_backward(dout, q, k, v, out, lse, *full, *tail, False)
    dv = torch.empty(v.shape, dtype=torch.float32)
    _flash_attn_backward(dout, q, k, v, out, lse, None, None, dv, *tail, True)
    torch.testing.assert_close(dv, full[2].float())
    dkv = torch.zeros(1, 7, 2, 2, 8, **DOUBLE)
    _flash_attn_backward(dout, q, k, v, out, lse, None, dkv[:, :, 0], dkv[:, :, 1], *tail, False)  # views
    assert torch.equal(dkv[:, :, 0], full[1]) and torch.equal(dkv[:, :, 1], full[2])


def test_nothing_is_recorded_for_autograd() -> None:
    q, k, v, _ = (x.requires_grad_() for x in operands(1))
    assert not any(x.requires_grad for x in _flash_attn_forward(q, k, v, 0.0, 0.3, True, -1, -1, 0.0, None, False))


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_backward_of_rows_that_saw_nothing(empty: float) -> None:
    q, k, v, dout = operands(1, sq=7, sk=3)
    tail = (0.0, 0.3, True, -1, -1, 0.0, None)
    out, lse, _, _ = _flash_attn_forward(q, k, v, *tail, False)
    assert (lse[:, :, :4] == -math.inf).all() and (out[:, :4] == 0).all()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(flash_attn_func(*leaves, softmax_scale=0.3, causal=True), leaves, dout)
    gradients = [torch.full_like(x, math.nan) for x in (q, k, v)]
    lse = torch.where(lse == -math.inf, empty, lse)
    _flash_attn_backward(dout, q, k, v, out, lse, *gradients, *tail, False)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_ring_of_two_key_blocks() -> None:
    """What ring attention does: forward by blocks, merged by LSE; backward by blocks with the LSE of the whole."""
    q, k, v, dout = operands(2, sk=12)
    tail = (0.0, 0.25, False, -1, -1, 0.0, None)
    parts = [_flash_attn_forward(q, k[:, s], v[:, s], *tail, False)[:2] for s in (slice(0, 5), slice(5, 12))]
    out, lse = flash_attn.merge_attention(*zip(*parts, strict=True))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = flash_attn_func(*leaves, softmax_scale=0.25)
    torch.testing.assert_close(out, whole)
    dq, dk, dv = torch.autograd.grad(whole, leaves, dout)
    total = torch.zeros_like(q)
    for s in (slice(0, 5), slice(5, 12)):
        part = [torch.empty_like(x) for x in (q, k[:, s], v[:, s])]
        _flash_attn_backward(dout, q, k[:, s], v[:, s], out, lse, *part, *tail, False)
        total += part[0]
        torch.testing.assert_close(part[1], dk[:, s])
        torch.testing.assert_close(part[2], dv[:, s])
    torch.testing.assert_close(total, dq)


def test_varlen_forward_with_lengths_of_keys() -> None:
    q, k, v, _ = operands(sq=6, sk=10)
    k[[0, 9]] = v[[0, 9]] = math.nan
    where = (lengths(2, 4), lengths(4, 6), 4, 6)
    pads, used = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    result = _flash_attn_varlen_forward(q, k, v, *where, 0.0, 0.3, True, leftpad_k=pads, seqused_k=used)
    expected = flash_attn_varlen_func(q, k, v, *where, 0.0, 0.3, True, leftpad_k=pads, seqused_k=used, return_lse=True)
    assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1]) and result[0].isfinite().all()


def test_private_errors() -> None:
    q, k, v, dout = operands(1)
    tail = (0.2, 0.3, False, -1, -1, 0.0, None)
    out, lse, _, _ = _flash_attn_forward(q, k, v, *tail, False)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    calls = {
        "rng_state": (dout, q, k, v, out, lse, *gradients, *tail, False),
        "softmax_lse": (dout, q, k, v, out, lse[:, :3], *gradients, *tail, False, torch.zeros(2, dtype=torch.int64)),
        "dout": (dout[:, :3], q, k, v, out, lse, *gradients, *tail, False, torch.zeros(2, dtype=torch.int64)),
        "dk": (dout, q, k, v, out, lse, q, q, v, *tail, False, torch.zeros(2, dtype=torch.int64)),
    }
    for name, arguments in calls.items():
        with pytest.raises(RuntimeError, match=name):
            _flash_attn_backward(*arguments)
    with pytest.raises(NotImplementedError, match="block_table"):
        where = (lengths(5), lengths(7), 5, 7)
        _flash_attn_varlen_forward(q[0], k[0], v[0], *where, 0.0, 0.3, True, block_table=torch.zeros(1, 1))


def test_meta_tensors() -> None:
    q, k, v, dout = (x.to("meta") for x in operands(2, sq=130))
    tail = (0.2, 0.3, False, -1, -1, 0.0, None)
    out, lse, s_dmask, seed = _flash_attn_forward(q, k, v, *tail, True)
    shapes = [tuple(x.shape) for x in (out, lse, s_dmask, seed)]
    assert shapes == [(2, 130, 4, 8), (2, 4, 130), (2, 4, 256, 128), (2,)]
    delta = _flash_attn_backward(dout, q, k, v, out, lse, q.clone(), k.clone(), v.clone(), *tail, False, seed)
    assert delta.is_meta and delta.shape == (2, 4, 256)


# ---- S_dmask --------------------------------------------------------------------------------------------------------


def decoded(s_dmask: Tensor, scores: Tensor, lse: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Weights and kept entries from S_dmask as its readers compute them; scores (..., rows, columns), -inf = hidden."""
    rows, columns = scores.shape[-2:]
    entries = s_dmask[..., :rows, :columns]
    maxima = torch.stack([part.amax(-1) for part in scores.split(block, -1)], -1)
    running = maxima.flip(-1).cummax(-1).values.flip(-1)
    scale = torch.where(lse == -math.inf, math.inf, lse)[..., None]
    factors = torch.exp(running.clamp(min=-1e300) - scale)
    factors = factors.repeat_interleave(block, -1)[..., :columns]
    return entries.abs() * factors, ~torch.signbit(entries)


@pytest.mark.parametrize("dim", [8, 48, 72, 120, 130])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("upper_left", [False, True])
def test_s_dmask_dense(dim: int, causal: bool, upper_left: bool) -> None:
    q, k, v, _ = operands(2, sq=150, sk=200, dim=dim)
    k[:, 30:60] *= 3  # a maximum that is not at the end
    seed = torch.tensor([3, 4])
    bias = torch.randn(2, 1, 150, 200, **DOUBLE)
    _, _, problem = flash_attn.checks.attention(
        q, k, v, dropout_p=0.3, causal=causal, upper_left=upper_left, bias=bias, dropout_seed=seed, softcap=20.0
    )
    s_dmask = softmax_dmask(q, k, bias, problem)
    assert s_dmask.shape == (2, 4, 256, 256) and s_dmask.dtype == torch.float64
    products = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / math.sqrt(dim)
    scores = 20 * torch.tanh(products / 20) + bias
    offset = 0 if upper_left else 50
    visible = torch.ones(150, 200, dtype=torch.bool).tril(offset) if causal else torch.ones(150, 200, dtype=torch.bool)
    scores = scores.masked_fill(~visible, -math.inf)
    weights, kept = decoded(s_dmask, scores, scores.logsumexp(-1), _get_block_size_n("cpu", dim, True, causal))
    torch.testing.assert_close(weights, scores.softmax(-1))
    assert torch.equal(kept, dropout_mask(seed, 0.3, 2, 4, 150, 200))
    assert s_dmask.isfinite().all() and s_dmask.abs().max() <= 1
    assert (s_dmask[..., 150:, :] == 0).all() and (s_dmask[..., 200:] == 0).all()
    assert (s_dmask[..., :150, :200].masked_select(~visible) == 0).all()


def test_s_dmask_of_the_private_functions_varlen() -> None:
    q, k, v, _ = operands(sq=9, sk=11)
    cu_q, cu_k = lengths(4, 0, 5), lengths(3, 2, 6)
    out, lse, s_dmask, seed = _flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 5, 6, 0.4, 0.3, True, return_softmax=True)
    keep = dropout_mask(seed, 0.4, 3, 4, 5, 6)
    for b, (rows, columns) in enumerate([(4, 3), (0, 2), (5, 6)]):
        i, j = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_q, cu_k))
        scores = 0.3 * torch.einsum("ihd,jhd->hij", q[i], k[j].repeat_interleave(2, 1))
        scores = scores.masked_fill(~torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows), -math.inf)
        weights, kept = decoded(s_dmask[b], scores, lse[:, i], 128)
        assert torch.equal(kept, keep[b, :, :rows, :columns])
        expected = torch.einsum("hij,jhd->ihd", weights * kept / 0.6, v[j].repeat_interleave(2, 1))
        torch.testing.assert_close(out[i], expected)
        assert (s_dmask[b, :, rows:] == 0).all() and (s_dmask[b, :, :, columns:] == 0).all()


def test_s_dmask_with_left_pads_is_by_rows_of_the_tensors() -> None:
    q, k, v, _ = operands(2, sq=6, sk=140)
    k[:, :3] = q[:, :2] = math.nan
    pads, pads_q, used = torch.tensor([3, 5]), torch.tensor([2, 2]), torch.tensor([140, 131])
    seed = torch.tensor([1, 2])
    _, _, problem = flash_attn.checks.attention(
        q, k, v, dropout_p=0.5, leftpad_k=pads, leftpad_q=pads_q, seqused_k=used, dropout_seed=seed
    )
    s_dmask = softmax_dmask(q, k, None, problem)
    keep = dropout_mask(seed, 0.5, 2, 4, 6, 140)
    for b in range(2):
        j = slice(int(pads[b]), int(used[b]))
        scores = torch.einsum("ihd,jhd->hij", q[b, 2:], k[b].repeat_interleave(2, 1)) / math.sqrt(8)
        hidden = torch.ones(140, dtype=torch.bool)
        hidden[j] = False
        scores = scores.masked_fill(hidden, -math.inf)
        weights, kept = decoded(s_dmask[b, :, 2:], scores, scores.logsumexp(-1), 128)
        torch.testing.assert_close(weights, scores.softmax(-1))
        assert torch.equal(kept[..., j], keep[b, :, :4, : j.stop - j.start])
        assert (s_dmask[b, :, :2] == 0).all() and s_dmask.isfinite().all()


def test_s_dmask_of_nothing() -> None:
    for sizes in ({"sq": 0}, {"sk": 0}):
        q, k, v, _ = operands(1, **sizes)
        *_, problem = flash_attn.checks.attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor([1, 2]))
        rounded = [0 if x.shape[1] == 0 else 128 for x in (q, k)]
        assert softmax_dmask(q, k, None, problem).shape == (1, 4, *rounded)


def test_block_size_n() -> None:
    def sizes(is_dropout: bool) -> list[int]:
        return [_get_block_size_n(torch.device("cpu"), dim, is_dropout, False) for dim in (32, 64, 96, 128, 192, 256)]

    assert sizes(False) == [128, 128, 64, 64, 64, 64]
    assert sizes(True) == [128, 64, 64, 32, 64, 64]
    assert interface.round_multiple(129, 128) == 256 and interface.round_multiple(128, 128) == 128
    x = torch.zeros(3, 4)
    assert interface.maybe_contiguous(x) is x and interface.maybe_contiguous(None) is None
    assert interface.maybe_contiguous(x.T).stride(-1) == 1


# ---- 1.x ------------------------------------------------------------------------------------------------------------


def upper_left(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, factor: Tensor | None = None):
    """out, lse of one sequence (rows, heads, dim), query i seeing keys j <= i; factor (heads, rows, columns)."""
    scores = scale * torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -math.inf)
    weights = scores.softmax(-1) * (1.0 if factor is None else factor)
    out = torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(q.shape[1] // k.shape[1], 1))
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_unpadded(causal: bool, p: float) -> None:
    sizes = [(4, 3), (2, 9), (17, 5)]
    cu_q, cu_k = (lengths(*column) for column in zip(*sizes, strict=True))
    q, k, v, dout = operands(sq=23, sk=17)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(5)
    out, lse, s_dmask = flash_attn_unpadded_func(*leaves, cu_q, cu_k, 17, 9, p, 0.3, causal, True)
    torch.manual_seed(5)
    alone = flash_attn_unpadded_func(*leaves, cu_q, cu_k, 17, 9, p, softmax_scale=0.3, causal=causal)
    assert torch.equal(out, alone)
    assert lse.shape == (3, 4, 32) and s_dmask.shape == (3, 4, 128, 128)
    expected = []
    for b, (rows, columns) in enumerate(sizes):
        i, j = slice(int(cu_q[b]), int(cu_q[b]) + rows), slice(int(cu_k[b]), int(cu_k[b]) + columns)
        kept = ~torch.signbit(s_dmask[b, :, :rows, :columns])
        assert p > 0 or kept.all()
        part, part_lse = upper_left(q[i], k[j], v[j], causal, 0.3, kept / (1 - p))
        expected.append(part)
        torch.testing.assert_close(lse[b, :, :rows], part_lse)
        assert (lse[b, :, rows:] == -math.inf).all()
    torch.testing.assert_close(out, torch.cat(expected))
    for gradient, wanted in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(torch.cat(expected), leaves, dout), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)


def test_unpadded_packed() -> None:
    qkv = torch.randn(9, 3, 2, 8, **DOUBLE)
    cu = lengths(4, 5)
    expected = flash_attn_unpadded_func(*qkv.unbind(1), cu, cu, 5, 5, 0.0, None, True)
    assert torch.equal(interface.flash_attn_unpadded_qkvpacked_func(qkv, cu, 5, 0.0, causal=True), expected)
    kv = qkv[:, 1:]
    assert torch.equal(
        interface.flash_attn_unpadded_kvpacked_func(qkv[:, 0], kv, cu, cu, 5, 5, 0.0, causal=True), expected
    )
    assert torch.equal(interface.flash_attn_unpadded_qkvpacked_split_func(qkv, cu, 4, 5, 1, 0.0, causal=True), expected)
    whole = interface.flash_attn_unpadded_qkvpacked_func(qkv, cu, 130, 0.0, None, True, True)
    out, lse, s0, s1 = interface.flash_attn_unpadded_qkvpacked_split_func(qkv, cu, 4, 130, 1, 0.0, None, True, True)
    assert torch.equal(out, whole[0]) and torch.equal(lse, whole[1])
    assert torch.equal(s0, whole[2][:1, :, :128, :128]) and torch.equal(s1, whole[2][1:])
    with pytest.raises(TypeError, match="dropout_p"):
        interface.flash_attn_unpadded_qkvpacked_func(qkv, cu, 5)


@pytest.mark.parametrize("sizes", [(4, 7), (7, 4)])
def test_triton_variant(sizes: tuple[int, int]) -> None:
    q, k, v, dout = operands(2, sq=sizes[0], sk=sizes[1], heads_k=4)
    bias = torch.randn(1, 4, 1, sizes[1], **DOUBLE, requires_grad=True)
    visible = torch.ones(sizes, dtype=torch.bool).tril()
    out = triton.flash_attn_func(q, k, v, bias, True, 0.3)
    scores = 0.3 * torch.einsum("bihd,bjhd->bhij", q, k) + bias
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    expected = torch.einsum("bhij,bjhd->bihd", weights, v)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, bias, dout, retain_graph=True) for x in (out, expected)))
    assert torch.equal(triton.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), bias, True, 0.3), out)
    qkv = torch.randn(1, 5, 3, 2, 8, **DOUBLE)
    assert torch.equal(
        triton.flash_attn_qkvpacked_func(qkv, None, True), triton.flash_attn_func(*qkv.unbind(2), None, True)
    )


# ---- Names and signatures -------------------------------------------------------------------------------------------

LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
TAIL = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
OLD_TAIL = "dropout_p, softmax_scale=None, causal=False, return_attn_probs=False, deterministic=False"
GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
SIGNATURES = {
    "maybe_contiguous": "x",
    "round_multiple": "x, m",
    "_get_block_size_n": "device, head_dim, is_dropout, is_causal",
    "_flash_attn_forward": f"q, k, v, {TAIL}, return_softmax",
    "_flash_attn_varlen_forward": f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, "
    "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
    "seqused_k=None, zero_tensors=False",
    "_flash_attn_backward": f"{GRADIENTS}, {TAIL}, deterministic, rng_state=None",
    "_flash_attn_varlen_backward": f"{GRADIENTS}, {LENGTHS}, {TAIL}, deterministic, rng_state=None, zero_tensors=False",
    "flash_attn_unpadded_func": f"q, k, v, {LENGTHS}, {OLD_TAIL}",
    "flash_attn_unpadded_kvpacked_func": f"q, kv, {LENGTHS}, {OLD_TAIL}",
    "flash_attn_unpadded_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OLD_TAIL}",
    "flash_attn_unpadded_qkvpacked_split_func": "qkv, cu_seqlens, max_seqlen0, max_seqlen1, batch_size0, " + OLD_TAIL,
}


def shown(function) -> str:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert shown(getattr(interface, name)) == f"({SIGNATURES[name]})"


def test_triton_signatures() -> None:
    tail = "bias=None, causal=False, softmax_scale=None"
    assert shown(triton.flash_attn_func) == f"(q, k, v, {tail})"
    assert shown(triton.flash_attn_kvpacked_func) == f"(q, kv, {tail})"
    assert shown(triton.flash_attn_qkvpacked_func) == f"(qkv, {tail})"


def test_names_that_others_import() -> None:
    for name in interface.__all__:
        assert hasattr(interface, name), name
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        assert getattr(interface, name) is getattr(flash_attn, name)
    for name in ("forward", "varlen_forward", "backward", "varlen_backward"):
        function = getattr(interface, f"_flash_attn_{name}")
        assert getattr(interface, f"_wrapped_flash_attn_{name}") is function
        # Where ring attention looks for argument names, whether it takes this for a function or for a custom op.
        for source in (function, function._init_fn):
            names = inspect.getfullargspec(source).args
            assert {"q", "k", "v", "dropout_p", "softmax_scale", "causal", "softcap", "window_size_left"} <= set(names)
    assert interface.USE_TRITON_ROCM is False
    assert not hasattr(interface, "flash_attn_gpu")
