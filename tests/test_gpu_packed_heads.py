"""Hopper's forward where few queries let heads that share keys share tiles, too. What all calls have in common is in
the other files."""

from __future__ import annotations

from dataclasses import replace

import cases
import pytest
import torch
from cases import Case
from gpu_calls import BF16, HALF, close, qkv

import flash_attn
from flash_attn import flash_attn_func

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cases.HOPPER, reason="needs a Hopper card and its kernels"),
]

OPTIONS = (
    {}, {"causal": True}, {"window": (50, 20)}, {"causal": True, "sink": True}, {"varlen": True},
    {"layout": "heads_first"}, {"varlen": True, "causal": True, "seqused_k": True}, {"leftpad_q": True, "sink": True},
    {"seqused_q": True, "seqused_k": True, "window": (9, 30)}, {"causal": True, "leftpad_k": True, "grads": "qkv"},
)  # fmt: skip


@pytest.mark.parametrize(("heads", "heads_k"), ((4, 2), (3, 1), (10, 2), (7, 1), (16, 2), (64, 2), (64, 1), (65, 1)))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values(heads, heads_k, options):
    """Of queries that go into one tile, and of more; of groups that fill a warpgroup's rows, and that do not."""
    for n, queries in enumerate((1, 5, 33, 130)):
        dim = (64, 128, 96, 256, 192, 40, 104)[(n + heads) % 7]
        lengths = {"seqlen_q": queries, "seqlen_k": 77 + 100 * n}
        case = Case(heads=heads, heads_k=heads_k, dim=dim, dim_v=dim - 8 * (n % 2), **lengths, **options)
        cases.check(replace(case, dtype=BF16 if n % 2 else HALF), "cuda", "wgmma")


@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("heads", (10, 16))
def test_more_tiles_than_fit_on_the_card(heads, dim):
    """CTAs that go from one tile to the next, each with other keys, find what a call for one sequence finds."""
    q, k, v = qkv(batch=300, seqlen_q=33, seqlen_k=1000, heads=heads, heads_k=2, dim=dim)
    used = (torch.arange(300, device="cuda") * 37 % 1001).int()
    for options in ({}, {"causal": True}, {"window_size": (100, 30)}):
        out, lse = flash_attn_func(q, k, v, **options, seqused_k=used, return_lse=True, backend="wgmma")
        for b in (0, 1, 27, 131, 132, 133, 299):
            one = [x[b : b + 1] for x in (q, k, v)]
            alone = flash_attn_func(*one, **options, seqused_k=used[b : b + 1], return_lse=True, backend="wgmma")
            assert torch.equal(out[b : b + 1], alone[0]) and torch.equal(lse[b : b + 1], alone[1])
    close(flash_attn_func(q[:1], k[:1], v[:1], causal=True, backend="wgmma"), q[:1], k[:1], v[:1], causal=True)


def test_graph():
    """Replayed with other values."""
    q, k, v = qkv(batch=50, seqlen_q=5, seqlen_k=300, heads=16, heads_k=2)
    flash_attn_func(q, k, v, causal=True, backend="wgmma")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v, causal=True, backend="wgmma")
    for _ in range(2):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, flash_attn_func(q, k, v, causal=True, backend="wgmma"))


def test_explain_says_so():
    for group, queries, packs in ((8, 1, True), (8, 140, True), (8, 4096, False), (2, 1, True), (1, 1, False)):
        q, k, v = qkv(seqlen_q=queries, heads=2 * group, heads_k=2)
        assert ("heads that share keys" in flash_attn.explain(q, k, v).kernel) == packs, (group, queries)
