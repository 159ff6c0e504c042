"""The module that code written for flash-attn 2.8 imports: the public functions, the private ones that other libraries
call, and the functions of flash-attn 1.x that had names of their own.

The private functions are plain Python without autograd: positional order, results and in-place gradients as callers
expect them. `flash_attn_gpu` and the raw extension modules do not exist here, nor do the autograd classes.
`flash_attn_func` is the one of 2.x; what 1.x called so (packed qkv and cu_seqlens) is
`flash_attn_unpadded_qkvpacked_func`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn import checks, dispatch
from flash_attn.autograd import BACKENDS
from flash_attn.block_mask import BlockMask, lists_of
from flash_attn.interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.problem import Problem, compute_dtype
from flash_attn.softmax_dmask import _get_block_size_n, round_multiple, softmax_dmask

__all__ = [
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_unpadded_func",
    "flash_attn_unpadded_kvpacked_func",
    "flash_attn_unpadded_qkvpacked_func",
    "flash_attn_unpadded_qkvpacked_split_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]

USE_TRITON_ROCM = False


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x, copied if consecutive elements of its last axis are not neighbours in memory."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


# ---- Private functions of 2.8 ---------------------------------------------------------------------------------------


def _with_init_fn(function: Callable) -> Callable:
    """`_init_fn`: where callers look for the argument names when they expect a custom op."""
    function._init_fn = function  # type: ignore[attr-defined]
    return function


def _forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, return_softmax: bool) -> tuple[Tensor, ...]:
    """(out, lse, S_dmask, rng_state) of a checked call."""
    backend = BACKENDS[dispatch.choose_backend("auto", q, k, v, problem, None)]
    if problem.has_lengths and problem.drops and q.device.type == "cpu":
        checks.validate_problem(q, k, problem)  # before a seed is drawn, as in the public functions
    problem = checks.draw_seed(problem, q)
    with torch.no_grad():
        out, lse, _ = backend.forward(q, k, v, None, None, problem)
        s_dmask = softmax_dmask(q, k, None, problem) if return_softmax and problem.drops else q.new_empty(0)
    seed = problem.dropout_seed
    return out, lse, s_dmask, torch.zeros(2, dtype=torch.int64, device=q.device) if seed is None else seed


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    targets: tuple[Tensor | None, Tensor | None, Tensor | None],
    problem: Problem,
) -> Tensor:
    """Writes dq, dk, dv of a checked call into `targets` (None: not wanted). Returns rowsum(dout · out), lse's shape.

    The statistics that backends keep, a reference and log2 of the sum per row, are made from the LSE alone: R = LSE,
    log2 l = 0. A row with LSE -inf, or +inf as flash-attn 2 writes it, saw nothing.
    """
    backend = BACKENDS[dispatch.choose_backend("auto", q, k, v, problem, None)]
    if problem.drops and problem.dropout_seed is None:
        raise RuntimeError(
            f"rng_state must be given with dropout_p={problem.dropout_p}: the fourth result of the forward function"
        )
    problem = checks.draw_seed(problem, q)  # drops a seed that nothing needs
    out_shape = (*q.shape[:-1], v.shape[-1])
    for name, x in (("dout", dout), ("out", out)):
        checks.require_tensor(name, x)
        fits = tuple(x.shape) == out_shape and x.dtype == q.dtype
        checks.require(fits, name, x, f"must be {q.dtype} {out_shape}")
        checks.on_device_of_q(name, x, q)
    lse_shape = tuple(q.transpose(-3, -2).shape[:-1])
    checks.require_tensor("softmax_lse", softmax_lse)
    fits = tuple(softmax_lse.shape) == lse_shape and softmax_lse.dtype in (torch.float32, torch.float64)
    checks.require(fits, "softmax_lse", softmax_lse, f"must be float32 or float64 {lse_shape}")
    checks.on_device_of_q("softmax_lse", softmax_lse, q)
    for name, target, x in zip(("dq", "dk", "dv"), targets, (q, k, v), strict=True):
        if target is not None:
            fits = target.shape == x.shape and target.is_floating_point() and target.device == x.device
            rule = f"must be floating point {tuple(x.shape)} on {x.device}"
            checks.require(fits, name, target, rule)

    with torch.no_grad():
        lse = softmax_lse.to(compute_dtype(q.dtype))
        empty = torch.isinf(lse)
        statistics = torch.stack((torch.where(empty, 0.0, lse), torch.where(empty, -math.inf, 0.0).to(lse.dtype)))
        needs = (*(target is not None for target in targets), False, False)
        gradients = backend.backward(dout, None, q, k, v, out, statistics, None, None, problem, needs)
        for target, gradient in zip(targets, gradients, strict=False):
            if target is not None:
                target.copy_(gradient)
        return (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-1, -2).contiguous()


@_with_init_fn
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward of `flash_attn_func` without autograd: (out, softmax_lse, S_dmask, rng_state).

    S_dmask is empty unless `return_softmax` and something is dropped. rng_state, int64 (2,), is the dropout seed that
    `_flash_attn_backward` and `dropout_mask` take; zeros without dropout.
    """
    _, _, problem = checks.attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    return _forward(q, k, v, problem, return_softmax)


@_with_init_fn
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward of `flash_attn_varlen_func` without autograd; results as `_flash_attn_forward`.

    zero_tensors: either way every row is written, those of no sequence with zeros.
    """
    dispatch.refuse("block_table", block_table, "paged keys and values are not built yet")
    _, _, problem = checks.attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        leftpad_k=leftpad_k,
        seqused_k=seqused_k,
    )
    return _forward(q, k, v, problem, return_softmax)


@_with_init_fn
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv, each unless it is None, in any float dtype.

    The softmax is the one that `softmax_lse` (batch, heads, seqlen_q) says, which may be that over more keys than k
    has: gradients of ring attention. One fp32 number a row carries less than what autograd saves: prefer the public
    functions where logits reach thousands.

    Returns softmax_d = rowsum(dout · out), (batch, heads, seqlen_q rounded up to 128), fp32 (fp64 for fp64).
    """
    _, _, problem = checks.attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        dropout_seed=rng_state,
    )
    delta = _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), problem)
    return torch.nn.functional.pad(delta, (0, round_multiple(q.shape[1], 128) - q.shape[1]))


@_with_init_fn
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`_flash_attn_backward` for packed sequences; softmax_lse (heads, total_q).

    Returns softmax_d (heads, total_q + 128 · batch): row r, of sequence b, stands in column r + 128 · b; zeros between.
    zero_tensors: either way every row of dq, dk and dv is written.
    """
    _, _, problem = checks.attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        dropout_seed=rng_state,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    delta = _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), problem)
    row = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(problem.cu_seqlens_q, row.to(problem.cu_seqlens_q.dtype), right=True) - 1
    softmax_d = delta.new_zeros(q.shape[1], q.shape[0] + 128 * (problem.cu_seqlens_q.shape[0] - 1))
    return softmax_d.index_copy_(1, row + 128 * sequence.clamp(min=0), delta)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


# ---- 1.x: packed sequences, causal aligned to the upper left corner -------------------------------------------------


def flash_attn_unpadded_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_varlen_func` as flash-attn 1.x had it: with `causal`, query i sees key j iff j <= i.

    Returns out (total_q, heads, dim_v); with `return_attn_probs` (out, softmax_lse, S_dmask): softmax_lse
        (batch, heads, max_seqlen_q rounded up to 16), -inf behind each sequence; S_dmask, also without dropout, in the
        convention of 2.x (`softmax_dmask`), N x N.
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return unpadded_attention(q, k, v, lengths, dropout_p, softmax_scale, causal, return_attn_probs, deterministic)


def unpadded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor, Tensor, int, int],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    return_attn_probs: bool,
    deterministic: bool,
    block_mask: BlockMask | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_unpadded_func` with a block mask; lengths: its arguments from cu_seqlens_q to max_seqlen_k."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    if return_attn_probs:
        _, _, problem = checks.attention(
            q,
            k,
            v,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            upper_left=True,
            blocks=lists_of(block_mask),
        )
        problem = checks.draw_seed(problem, q)
    out, lse = dispatch.attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=deterministic,
        return_attn_probs=False,
        bias=None,
        mask=None,
        block_mask=block_mask,
        learnable_sink=None,
        seqused_q=None,
        seqused_k=None,
        leftpad_q=None,
        leftpad_k=None,
        dropout_seed=problem.dropout_seed if return_attn_probs else None,
        return_lse=True,
        backend="auto",
        upper_left=True,
    )
    if not return_attn_probs:
        return out
    column = torch.arange(round_multiple(problem.max_seqlen_q, 16), device=q.device)
    start, stop = problem.cu_seqlens_q[:-1, None], problem.cu_seqlens_q[1:, None]
    inside = start + column < stop
    padded = (
        lse[:, torch.where(inside, start + column, 0)] if q.shape[0] > 0 else lse.new_zeros(lse.shape[0], *inside.shape)
    )
    padded = torch.where(inside, padded, -math.inf).transpose(0, 1)
    return out, padded, softmax_dmask(q, k, None, problem)


def flash_attn_unpadded_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_unpadded_func(q, kv[:, 0], kv[:, 1], ...)`; kv (total_k, 2, heads_k, dim)."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, return_attn_probs, deterministic)
    return flash_attn_unpadded_func(q, *checks.packed("kv", kv, 2, is_varlen=True), *lengths, *options)


def flash_attn_unpadded_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_unpadded_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], ...)`; qkv (total, 3, heads, dim)."""
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (dropout_p, softmax_scale, causal, return_attn_probs, deterministic)
    return flash_attn_unpadded_func(*checks.packed("qkv", qkv, 3, is_varlen=True), *lengths, *options)


def flash_attn_unpadded_qkvpacked_split_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen0: int,
    max_seqlen1: int,
    batch_size0: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """`flash_attn_unpadded_qkvpacked_func` for sequences sorted into two groups: the first `batch_size0`, of at most
    `max_seqlen0` rows, and the others, of at most `max_seqlen1`. One call serves both.

    Returns out; with `return_attn_probs` (out, softmax_lse, S_dmask of the first group, S_dmask of the others).
    """
    lengths = [checks.length(f"max_seqlen{i}", x) for i, x in enumerate((max_seqlen0, max_seqlen1))]
    options = (dropout_p, softmax_scale, causal, return_attn_probs, deterministic)
    result = flash_attn_unpadded_qkvpacked_func(qkv, cu_seqlens, max(lengths), *options)
    if not return_attn_probs:
        return result
    out, lse, s_dmask = result
    size0, size1 = (round_multiple(length, 128) for length in lengths)
    return out, lse, s_dmask[:batch_size0, :, :size0, :size0], s_dmask[batch_size0:, :, :size1, :size1]
