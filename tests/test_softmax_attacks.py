"""Scores that an online softmax could stumble over: far apart, growing, huge, infinite, hidden; on every backend.

The bounds are those of all tests (`oracle.assert_no_worse_than_naive`), beside naive attention in fp32 too; the LSE is
compared with fp64.
"""

from __future__ import annotations

import math

import cases
import oracle
import pytest
import torch
from cases import Target
from torch import Tensor

from flash_attn import flash_attn_func

HALVES = (torch.bfloat16, torch.float16)
ROWS = [(target, dtype) for target in (*cases.TARGETS, *cases.KERNELS) for dtype in HALVES]
everywhere = pytest.mark.parametrize(
    ("target", "dtype"), [pytest.param(t, d, id=f"{t}-{cases.NAMES[d]}", marks=cases.marks(t)) for t, d in ROWS]
)


def inputs(dtype: torch.dtype, *, rows: int = 200, keys: int = 700, heads: int = 2, dim: int = 64) -> list[Tensor]:
    return [torch.randn(1, n, heads, dim, dtype=dtype) for n in (rows, keys, keys)]


def attend(
    target: Target, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] = (-1, -1), **options: object
) -> tuple[Tensor, Tensor]:
    on_device = [x.to(target.device) for x in (q, k, v)]
    out, lse = flash_attn_func(*on_device, return_lse=True, backend=target.backend, window_size=window, **options)
    return out.cpu(), lse.cpu()


def same_rows(target: Target, found: tuple[Tensor, Tensor], clean: tuple[Tensor, Tensor], rows: Tensor) -> bool:
    """Whether these rows have the same bits. (The CPU's bf16 tiles raise the references of neighbouring rows together:
    there, to a rounding.)"""
    (out, lse), (clean_out, clean_lse) = found, clean
    pairs = ((out[:, rows], clean_out[:, rows]), (lse[:, :, rows], clean_lse[:, :, rows]))
    if target == cases.CPU and out.dtype == torch.bfloat16:
        return all(torch.allclose(x, y, rtol=torch.finfo(x.dtype).eps, atol=1e-6) for x, y in pairs)
    return all(torch.equal(x, y) for x, y in pairs)


def check(target: Target, q: Tensor, k: Tensor, v: Tensor, **options: object) -> None:
    out, lse = attend(target, q, k, v, **options)
    described = oracle.Options(**options)
    want, want_lse = oracle.attention(q, k, v, options=described)[:2]
    naive = [oracle.naive_attention(q, k, v, options=described)[0]]
    naive += [
        oracle.naive_attention(q, k, v, options=described, shuffle=torch.Generator().manual_seed(n))[0]
        for n in range(cases.ORDERS - 1)
    ]
    oracle.assert_no_worse_than_naive(out, want, naive)
    # Logits in half precision are so wrong here that this alone would let zeros pass. In fp32 they are not.
    in_full = oracle.naive_attention(q.float(), k.float(), v.float(), options=described)[0]
    oracle.assert_no_worse_than_naive(out, want, in_full)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=1e-4)


@everywhere
@pytest.mark.parametrize("deviation", (16, 64))
@pytest.mark.parametrize("causal", (False, True))
def test_wide_logits(target: Target, dtype: torch.dtype, deviation: int, causal: bool):
    """Logits of this standard deviation: the first block's maximum is far below those of later ones."""
    q, k, v = inputs(dtype)
    check(target, q * deviation, k, v, causal=causal)


@everywhere
@pytest.mark.parametrize("step", (3, 30, 3000))
@pytest.mark.parametrize("backwards", (False, True))
def test_scores_that_rise_along_the_keys(target: Target, dtype: torch.dtype, step: int, backwards: bool):
    """From key to key by step / 700, in both directions: every block of keys has a new maximum."""
    q, k, v = inputs(dtype)
    ramp = torch.linspace(0, step, k.shape[1])
    q[..., 0], k[..., 0] = 8, (ramp.flip(0) if backwards else ramp)[None, :, None].to(dtype)
    check(target, q, k, v)


@everywhere
@pytest.mark.parametrize("first", (False, True))
def test_blocks_far_below_the_rest(target: Target, dtype: torch.dtype, first: bool):
    """128 keys at either end of the sequence whose weights are zeros beside the others'."""
    q, k, v = inputs(dtype)
    q[..., 0] = 8
    k[..., 0] = 0
    k[:, slice(0, 128) if first else slice(-128, None), :, 0] = -2000
    check(target, q, k, v)


@everywhere
@pytest.mark.parametrize("where", (0, 300, 699))
def test_one_hot_rows(target: Target, dtype: torch.dtype, where: int):
    """One key has all of the weight; in bf16 the others' logits are 1e4 below."""
    q, k, v = inputs(dtype)
    q[..., 0], k[..., 0] = 100, 0
    k[:, where, :, 0] = 800
    check(target, q, k, v)


@everywhere
@pytest.mark.parametrize("size", (1.0, 240.0))
def test_equal_rows(target: Target, dtype: torch.dtype, size: float):
    """All weights are equal: O is the mean of V, also where logits are beyond 2^22."""
    q, k, v = inputs(dtype)
    q[:], k[:] = size, size
    out, lse = attend(target, q, k, v, softmax_scale=1.0)
    mean = v.double().mean(1, keepdim=True).expand(out.shape)
    assert (out.double() - mean).abs().max() <= 2 * torch.finfo(dtype).eps * mean.abs().max()
    logit = 64 * size * size
    torch.testing.assert_close(lse, torch.full_like(lse, logit + math.log(k.shape[1])), rtol=2e-7, atol=1e-5)


@everywhere
def test_huge_equal_rows(target: Target, dtype: torch.dtype):
    """133120 in bf16 makes logits of 1e12, beyond what fp32 tells apart by one."""
    if dtype == torch.float16:
        pytest.skip("fp16 ends at 65504")
    q, k, v = inputs(dtype)
    q[:], k[:] = 133120, 133120
    out, _ = attend(target, q, k, v)
    mean = v.double().mean(1, keepdim=True).expand(out.shape)
    assert (out.double() - mean).abs().max() <= 2 * torch.finfo(dtype).eps * mean.abs().max()


@everywhere
@pytest.mark.parametrize("window", ((-1, 0), (150, 0), (40, 40)))
def test_blocks_that_are_hidden_from_some_rows(target: Target, dtype: torch.dtype, window: tuple[int, int]):
    """Rows whose first blocks are hidden have no reference yet when others have; then it comes with a jump."""
    q, k, v = inputs(dtype, rows=700)
    q[:, ::3] *= 30
    check(target, q, k, v, window=window)


@everywhere
@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
def test_what_is_no_number_stays_in_its_row(target: Target, dtype: torch.dtype, value: float):
    """In a query: the other rows keep their bits."""
    q, k, v = inputs(dtype)
    clean = attend(target, q, k, v)
    q[0, 77, 1, 5] = value
    found = attend(target, q, k, v)
    assert same_rows(target, found, clean, torch.arange(q.shape[1]) != 77)
    assert found[0][0, 77, 1].isnan().all() and torch.equal(found[0][:, :, 0], clean[0][:, :, 0])


@everywhere
@pytest.mark.parametrize("value", (math.inf, math.nan))
def test_what_is_no_number_in_a_key_reaches_who_sees_it(target: Target, dtype: torch.dtype, value: float):
    """As in naive attention: rows that see the key have NaN where their score is +inf or NaN."""
    q, k, v = inputs(dtype)
    k[0, 400, 0, 3] = value
    out, _ = attend(target, q, k, v)
    want = oracle.attention(q, k, v)[0]
    assert torch.equal(out[:, :, 0].isnan(), want[:, :, 0].isnan())
    assert out[:, :, 1].isfinite().all()


@everywhere
@pytest.mark.parametrize("options", ({}, {"softcap": 20.0}), ids=("plain", "softcap"))
def test_a_row_does_not_depend_on_its_neighbours(target: Target, dtype: torch.dtype, options: dict):
    """Rows that make others wait for a repair of their reference, or whose logits reach the softcap, change no bit of
    theirs."""
    q, k, v = inputs(dtype)
    clean = attend(target, q, k, v, **options)
    q[:, 5::7] *= 50
    assert same_rows(target, attend(target, q, k, v, **options), clean, torch.arange(q.shape[1]) % 7 != 5)


@everywhere
def test_flat_rows_of_many_keys(target: Target, dtype: torch.dtype):
    """Sums beyond 2^14 by length alone: no single block is to blame."""
    q, k, v = inputs(dtype, rows=16, keys=40_000, heads=1)
    q[:] = 0
    out, lse = attend(target, q, k, v)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(40_000)), rtol=1e-6, atol=0)
    mean = v.double().mean(1, keepdim=True).expand(out.shape)
    assert (out.double() - mean).abs().max() <= 4e-4
