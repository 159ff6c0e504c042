"""The functions of flash-attn's Triton variant: dense attention with a bias, causal aligned to the upper left corner.

They take arguments by position, as the autograd functions that they stand for did. Unlike those: any dtype, head dim
and device that `flash_attn_func` takes, and the bias has a gradient.
"""

from __future__ import annotations

from torch import Tensor

from flash_attn import checks, dispatch


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """out (batch, seqlen_q, heads, dim_v) of q, k, v (batch, seqlen, heads, dim) and a bias that broadcasts to
    (batch, heads, seqlen_q, seqlen_k). With `causal`, query i sees key j iff j <= i."""
    return dispatch.attention(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        bias=bias,
        mask=None,
        block_mask=None,
        learnable_sink=None,
        seqused_q=None,
        seqused_k=None,
        leftpad_q=None,
        leftpad_k=None,
        dropout_seed=None,
        return_lse=False,
        backend="auto",
        upper_left=True,
    )


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, bias: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """`flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], ...)`; kv (batch, seqlen_k, 2, heads_k, dim)."""
    return flash_attn_func(q, *checks.packed("kv", kv, 2, is_varlen=False), bias, causal, softmax_scale)


def flash_attn_qkvpacked_func(
    qkv: Tensor, bias: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """`flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], ...)`; qkv (batch, seqlen, 3, heads, dim)."""
    return flash_attn_func(*checks.packed("qkv", qkv, 3, is_varlen=False), bias, causal, softmax_scale)
