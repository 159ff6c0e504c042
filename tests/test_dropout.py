"""Dropout: a pure function of (seed, sequence, head, query position, key position), whatever layout and tile."""

from __future__ import annotations

import math

import cases
import oracle
import pytest
import torch
from cases import Case, Target, with_targets

from flash_attn import dropout_mask, flash_attn_func, flash_attn_varlen_func

SEED = torch.tensor([0x123456789ABCDEF, -42])

CASES = [
    c.differentiable
    for c in (
        *(Case(dropout_p=p, dtype=d, seqlen_q=65, seqlen_k=97) for p in (0.1, 0.5, 0.99) for d in cases.NAMES),
        *(Case(dropout_p=0.3, seqlen_q=n, seqlen_k=m, causal=True) for n, m in ((129, 129), (5, 130), (130, 5), (1,
        33))),
        Case(dropout_p=0.3, heads=6, heads_k=2, dim=24, dim_v=40), Case(dropout_p=0.3, window=(5, 3), lse_grad=True),
        Case(dropout_p=0.3, softcap=2.0, bias="bhqk", mask="b11k", alibi="heads"), Case(dropout_p=0.3, sink=True),
        Case(dropout_p=0.3, leftpad_q=True, leftpad_k=True, seqused_q=True, seqused_k=True, causal=True),
        Case(dropout_p=0.3, leftpad_q=True, leftpad_k=True, bias="bhqk"),
        *(Case(dropout_p=p, lse_grad=True) for p in (1e-16, 1.0, 2.0**-17, 2.0**-18, 0.99999)),
    )
]  # fmt: skip


@with_targets(CASES)
def test_values_and_gradients(case: Case, target: Target):
    cases.check(case, target.device, target.backend)


@pytest.mark.parametrize("p", (0.0, 1e-16, 0.1, 0.5, 1.0))
@pytest.mark.parametrize("sizes", ((1, 1, 1, 1), (2, 3, 129, 97), (1, 70, 17, 300), (0, 2, 3, 4), (2, 2, 0, 5)))
def test_mask_equals_the_definition(p, sizes):
    """Bit for bit against an independent Philox."""
    got = dropout_mask(SEED, p, *sizes)
    assert got.dtype == torch.bool and got.shape == sizes
    assert torch.equal(got, oracle.keep_mask(SEED.tolist(), p, *sizes))


@pytest.mark.parametrize("seed", ((0, 0), (-1, -1), (2**63 - 1, -(2**63)), (1 << 32, 5), (5, 1 << 32)))
def test_every_bit_of_the_seed_counts(seed):
    got = dropout_mask(torch.tensor(seed), 0.5, 2, 2, 33, 65)
    assert torch.equal(got, oracle.keep_mask(seed, 0.5, 2, 2, 33, 65))
    for word in (0, 1):
        for bit in (0, 31, 32, 63):
            other = list(seed)
            other[word] ^= 1 << bit if bit < 63 else -(1 << 63)
            assert not torch.equal(dropout_mask(torch.tensor(other), 0.5, 2, 2, 33, 65), got)


@pytest.mark.parametrize("p", (0.1, 0.25, 0.5, 0.997, 0.7 / 256))
def test_mask_is_fair(p):
    """Kept shares, rows, columns, heads and sequences: within 5 standard deviations, and not correlated."""
    sizes = (4, 4, 256, 256)
    keep = dropout_mask(SEED, p, *sizes).double()
    deviation = math.sqrt(p * (1 - p))
    for dims in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3)):
        mean = keep.mean(dims)
        count = keep.numel() / mean.numel()
        assert (mean - (1 - p)).abs().max() < 5 * deviation / math.sqrt(count)
    z = (keep - (1 - p)) / deviation
    for dim in range(4):
        for shift in (1, 8, 16, 32):
            if shift < sizes[dim]:
                n = sizes[dim] - shift
                correlation = (z.narrow(dim, 0, n) * z.narrow(dim, shift, n)).mean().abs()
                assert correlation < 5 / math.sqrt(z.numel() * n / sizes[dim]), (dim, shift)


@pytest.mark.parametrize("p", (0.1, 100 / 65536))
def test_probability_is_finer_than_draws(p):
    """Draws have 8 bits, thresholds 16: over 2^24 weights and 64 seeds the share of p itself, not of 26 / 256 or 0."""
    counts = torch.stack([(~dropout_mask(torch.tensor([seed, 7]), p, 1, 1, 512, 512)).sum() for seed in range(64)])
    n, exact = 64 * 512**2, round(p * 65536) / 65536
    assert abs(counts.sum() / n - exact) < 5 * math.sqrt(exact * (1 - exact) / n)
    # The spread over seeds is that of independent weights too: its variance, chi-squared with 63 degrees of freedom.
    variance = counts.double().var() / (512**2 * exact * (1 - exact))
    assert 0.4 < variance < 1.9


@pytest.mark.parametrize("p", (0.1, 0.5, 0.9))
def test_mask_is_the_one_that_is_used(p, target):
    q, k = torch.zeros(2, 70, 4, 8, device=target.device), torch.zeros(2, 131, 2, 8, device=target.device)
    v = torch.eye(131, device=target.device)[None, :, None].expand(2, 131, 2, 131)
    seed = SEED.to(target.device)
    out = flash_attn_func(q, k, v, dropout_p=p, dropout_seed=seed, backend=target.backend)
    keep = dropout_mask(seed, p, 2, 4, 70, 131)
    assert torch.equal((out != 0).transpose(1, 2), keep)
    torch.testing.assert_close(out.transpose(1, 2), keep / (131 * (1 - p)))


def test_same_mask_in_every_layout(target):
    """Dense, GQA, varlen, left-padded, windowed calls with one seed drop the same (sequence, head, i, j)."""
    seed, p = SEED.to(target.device), 0.4
    lens = [70, 33, 129]
    keep = dropout_mask(seed, p, 3, 4, 129, 129)

    def used(out: torch.Tensor, b: int, n: int) -> None:
        assert torch.equal((out != 0).transpose(0, 1), keep[b, :, :n, :n])

    def values(n: int, heads: int) -> torch.Tensor:
        return torch.eye(129, device=target.device)[:n, None].expand(n, heads, 129)

    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device=target.device)
    q = torch.zeros(sum(lens), 4, 8, device=target.device)
    for heads_k in (1, 2, 4):
        k, v = q[:, :heads_k], torch.cat([values(n, heads_k) for n in lens])
        out = flash_attn_varlen_func(q, k, v, cu, cu, 129, 129, dropout_p=p, dropout_seed=seed, backend=target.backend)
        for b, part in enumerate(out.split(lens)):
            used(part[..., : lens[b]], b, lens[b])
    pads = torch.tensor([129 - n for n in lens], dtype=torch.int32, device=target.device)
    k, v = torch.zeros(3, 129, 2, 8, device=target.device), torch.zeros(3, 129, 2, 129, device=target.device)
    for b, n in enumerate(lens):
        v[b, 129 - n :] = values(n, 2)
    out = flash_attn_func(
        k[:, :, :1].expand(-1, -1, 4, -1), k, v, dropout_p=p, dropout_seed=seed, leftpad_q=pads, leftpad_k=pads,
        backend=target.backend,
    )  # fmt: skip
    for b, n in enumerate(lens):
        used(out[b, 129 - n :, :, :n], b, n)
    causal = flash_attn_func(k[..., :1, :].expand(-1, -1, 4, -1), k, torch.eye(129, device=target.device)[None, :,
        None].expand(
        3, 129, 2, 129), dropout_p=p, dropout_seed=seed, causal=True, backend=target.backend)  # fmt: skip
    assert torch.equal((causal != 0).transpose(1, 2), keep.tril())


def test_gradient_uses_the_mask_of_the_forward(target):
    """dV = dropout(P)ᵀ dO with uniform P and dO = identity shows the mask itself."""
    seed, p, n, m = SEED.to(target.device), 0.3, 70, 131
    q, k = torch.zeros(2, n, 2, 8, device=target.device), torch.zeros(2, m, 2, 8, device=target.device)
    v = torch.randn(2, m, 2, n, device=target.device, requires_grad=True)
    out = flash_attn_func(q, k, v, dropout_p=p, dropout_seed=seed, backend=target.backend)
    dout = torch.eye(n, device=target.device)[None, :, None].expand(2, n, 2, n)
    (dv,) = torch.autograd.grad(out, v, dout)
    keep = dropout_mask(seed, p, 2, 2, n, m)
    torch.testing.assert_close(dv.permute(0, 2, 3, 1), keep / (m * (1 - p)))


def test_seed_is_drawn_from_the_generator(target):
    """manual_seed reproduces; calls differ; without dropout no number is drawn."""
    q = torch.randn(1, 65, 2, 8, device=target.device)

    def call(**options):
        return flash_attn_func(q, q, q, backend=target.backend, **{"dropout_p": 0.3, **options})

    torch.manual_seed(1)
    first, second = call(), call()
    torch.manual_seed(1)
    assert torch.equal(call(), first) and torch.equal(call(), second)
    assert not torch.equal(first, second)
    assert torch.equal(call(dropout_seed=SEED.to(target.device)), call(dropout_seed=SEED.to(target.device)))
    state = torch.get_rng_state()
    call(dropout_p=0.0)
    call(dropout_seed=SEED.to(target.device))
    assert torch.equal(torch.get_rng_state(), state)


def test_lse_is_that_of_the_undropped_softmax(target):
    q = torch.randn(1, 65, 2, 8, device=target.device)
    want = flash_attn_func(q, q, q, return_lse=True, backend=target.backend)[1]
    for p in (0.5, 1.0):
        assert torch.equal(flash_attn_func(q, q, q, dropout_p=p, return_lse=True, backend=target.backend)[1], want)


def test_mean_over_seeds_is_the_undropped_result(target):
    q = torch.randn(1, 9, 1, 4, device=target.device)
    want = flash_attn_func(q, q, q, backend=target.backend)
    q400 = q.expand(400, -1, -1, -1)
    mean = flash_attn_func(q400, q400, q400, dropout_p=0.5, backend=target.backend).mean(0, keepdim=True)
    assert (mean - want).abs().max() < 5 * float(q.abs().max()) / math.sqrt(400)


def test_far_positions():
    """Group numbers beyond 2³² enter the counter: the definition is 64-bit."""
    assert not torch.equal(oracle.keep_mask((1, 2), 0.5, 1, 1, 33, 65),
                           oracle.keep_mask((1, 2), 0.5, 1, 1, 33, 65, q_start=1 << 33))  # fmt: skip
    assert not torch.equal(oracle.keep_mask((1, 2), 0.5, 1, 1, 33, 65),
                           oracle.keep_mask((1, 2), 0.5, 1, 1, 33, 65, k_start=1 << 34))  # fmt: skip


def test_philox_known_answers():
    """Random123's published vectors for philox4x32."""
    ones = 0xFFFFFFFF
    for rounds, bits, want in (
        (10, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (10, ones, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (7, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, ones, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ):
        assert tuple(int(w) for w in oracle.philox((bits,) * 4, (bits,) * 2, rounds)) == want
