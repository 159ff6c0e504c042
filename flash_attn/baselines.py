"""Attention in plain PyTorch, with the options of `flash_attn_func`: Algorithm 0, to compare with, and 1, to read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_attn import checks, dispatch, reference
from flash_attn.block_mask import BlockMask, lists_of


def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Standard attention, which writes the seqlen_q × seqlen_k matrices to memory: the baseline, on any device.

    Matrix products in q's dtype, softmax in fp32 (fp64 for fp64), gradients by autograd, to any order. Arguments,
    results and errors as in `flash_attn_func`; dense layout only.

    Source: the FlashAttention paper (2022), Algorithm 0.
    """
    q, k, v, bias = dispatch.autocast(q, k, v, bias)
    bias, sink, problem = checks.attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        mask=mask,
        learnable_sink=learnable_sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        dropout_seed=dropout_seed,
        blocks=lists_of(block_mask),
    )
    out, lse = reference.standard_forward(q, k, v, bias, sink, checks.draw_seed(problem, q))
    return (out, lse) if return_lse else out


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """FlashAttention in plain PyTorch, written to be read (reference.py): tiles, linear memory, any device.

    Source: the FlashAttention paper (2022), Algorithms 1 and 4.

    Equivalent to: `flash_attn_func(..., backend="reference")`.
    """
    return dispatch.attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=False,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        learnable_sink=learnable_sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        dropout_seed=dropout_seed,
        return_lse=return_lse,
        backend="reference",
    )
