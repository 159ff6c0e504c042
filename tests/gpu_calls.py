"""Small calls for the tests of what GPU kernels alone can get wrong."""

from __future__ import annotations

import cases
import oracle
import torch

BF16, HALF = torch.bfloat16, torch.float16
FAMILIES = [target.backend for target in cases.KERNELS]


def qkv(*, batch=2, seqlen_q=129, seqlen_k=129, heads=4, heads_k=2, dim=64, dtype=BF16, device="cuda"):
    shapes = ((seqlen_q, heads, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim))
    return [torch.randn(batch, *s, dtype=dtype, device=device) for s in shapes]


def close(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> None:
    want = oracle.attention(*(x.cpu() for x in (q, k, v)), options=oracle.Options(**options))[0]
    naive = oracle.naive_attention(*(x.cpu() for x in (q, k, v)), options=oracle.Options(**options))[0]
    oracle.assert_no_worse_than_naive(out.cpu(), want, naive)
