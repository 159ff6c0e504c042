"""Second derivatives and forward mode, by recomputing attention a few query rows at a time: O(seqlen) memory, any
backend.

Rows of attention are independent given K and V, so every derivative is a sum over chunks of rows. A chunk is plain
differentiable PyTorch (`reference.attend_rows`), which torch.func differentiates to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flash_attn import reference
from flash_attn.problem import Problem, compute_dtype

CHUNK_ELEMENTS = 1 << 20  # of the matrices (batch, heads, rows, columns) of one chunk; some twenty of them live at once

Gradients = tuple[Tensor | None, ...]


def backward_derivative(
    cotangents: Gradients,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    problem: Problem,
) -> Gradients:
    """The derivative of attention's backward, (dout, dlse, q, k, v, bias, sink) -> (dq, dk, dv, dbias, dsink),
    transposed.

    Args:
        cotangents: of dq, dk, dv, dbias, dsink; None counts as zero.

    Returns the gradients of dout, dlse, q, k, v, bias and sink (None for an argument that is None), in the dtypes of
    the arguments. Differentiable itself.

    The first two are also the forward-mode derivative of attention: backward is linear in (dout, dlse), and its
    transpose maps tangents of the inputs to tangents of (out, lse).
    """
    dtype = compute_dtype(q.dtype)
    heads_last = tuple(None if x is None else x.to(dtype) for x in (dout, q, k, v, *cotangents[:3]))
    dout_4d, q_4d, k_4d, v_4d, *tangents_qkv = (None if x is None else reference.heads_first(x) for x in heads_last)
    lse_shape = q_4d.shape[:3]
    dlse_3d = q_4d.new_zeros(lse_shape) if dlse is None else dlse.reshape(lse_shape)
    whole = [x for x in (bias, sink) if x is not None]
    whole_tangents = [
        torch.zeros_like(x) if t is None else t
        for x, t in zip((bias, sink), cotangents[3:], strict=True)
        if x is not None
    ]
    tangent_q, tangent_k, tangent_v = (
        torch.zeros_like(x) if t is None else t for x, t in zip((q_4d, k_4d, v_4d), tangents_qkv, strict=True)
    )

    by_rows: list[tuple[reference.Span, slice, tuple[Tensor, Tensor, Tensor]]] = []
    by_keys: list[tuple[reference.Span, tuple[Tensor, Tensor]]] = []
    totals = [torch.zeros_like(x) for x in whole]
    for span in reference.spans(q_4d, k_4d, problem):
        keys = [x[span.storage, :, span.columns] for x in (k_4d, v_4d, tangent_k, tangent_v)]
        sums = [torch.zeros_like(x) for x in keys[:2]]
        for i in _chunks(span, q_4d.shape[1]):
            rows = slice(span.rows.start + i.start, span.rows.start + i.stop)
            primals = [x[span.storage, :, rows] for x in (dout_4d, dlse_3d, q_4d)] + keys[:2] + whole
            first = _first_backward(problem, span, i, bias is not None, sink is not None)
            _, transpose = torch.func.vjp(first, *primals)
            parts = transpose((tangent_q[span.storage, :, rows], *keys[2:], *whole_tangents))
            by_rows.append((span, rows, parts[:3]))
            sums = [x + part for x, part in zip(sums, parts[3:5], strict=True)]
            totals = [x + part for x, part in zip(totals, parts[5:], strict=True)]
        by_keys.append((span, tuple(sums)))

    row_results = [
        _gather(like, [(span.storage, rows, parts[n]) for span, rows, parts in by_rows])
        for n, like in enumerate((dout_4d, dlse_3d, q_4d))
    ]
    key_results = [
        _gather(like, [(span.storage, span.columns, parts[n]) for span, parts in by_keys])
        for n, like in enumerate((k_4d, v_4d))
    ]
    d_dout, d_dlse, dq, dk, dv = *row_results, *key_results

    def as_given(x: Tensor, like: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return (x if like.dim() == 4 else x.squeeze(0)).to(like.dtype)

    rest = iter(totals)
    return (
        as_given(d_dout, dout),
        None if dlse is None else d_dlse.reshape(dlse.shape).to(dlse.dtype),
        as_given(dq, q),
        as_given(dk, k),
        as_given(dv, v),
        None if bias is None else next(rest),
        None if sink is None else next(rest),
    )


def _gather(like: Tensor, pieces: list[tuple[slice, slice, Tensor]]) -> Tensor:
    """A tensor like `like` (batch, heads, rows, ...) with the pieces in their places and zeros elsewhere."""
    result = torch.zeros_like(like)
    for storage, rows, piece in pieces:
        part = result[storage].slice_scatter(piece, 2, rows.start, rows.stop)
        result = result.slice_scatter(part, 0, storage.start, storage.stop)
    return result


def _chunks(span: reference.Span, heads: int) -> Iterator[slice]:
    """The query rows of a span, cut so that their matrices have CHUNK_ELEMENTS elements."""
    area = max(1, (span.storage.stop - span.storage.start) * heads * span.seqlen_k)
    return reference.blocks(span.seqlen_q, max(1, CHUNK_ELEMENTS // area))


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    """out and lse in plain differentiable PyTorch, chunk by chunk: right under any nesting of derivatives.

    What it records for reverse mode has N × N elements.
    """
    dtype = compute_dtype(q.dtype)
    q_4d, k_4d, v_4d = (reference.heads_first(x.to(dtype)) for x in (q, k, v))
    outs, lses = [], []
    for span in reference.spans(q_4d, k_4d, problem):
        k_rows, v_rows = (x[span.storage, :, span.columns] for x in (k_4d, v_4d))
        for i in _chunks(span, q_4d.shape[1]):
            rows = slice(span.rows.start + i.start, span.rows.start + i.stop)
            q_rows = q_4d[span.storage, :, rows]
            out, lse = reference.attend_rows(q_rows, k_rows, v_rows, bias, sink, problem, span, i)
            outs.append((span.storage, rows, out))
            lses.append((span.storage, rows, lse))
    out = _gather(q_4d.new_zeros(*q_4d.shape[:3], v.shape[-1]), outs).transpose(1, 2).to(q.dtype)
    lse = _gather(q_4d.new_zeros(q_4d.shape[:3]), lses)
    covered = _gather(q_4d.new_zeros(q_4d.shape[:3]), [(s, r, torch.ones_like(x)) for s, r, x in lses])
    lse = torch.where(covered != 0, lse, -torch.inf)  # padding
    return (out, lse) if q.dim() == 4 else (out.squeeze(0), lse.squeeze(0))


def _first_backward(
    problem: Problem, span: reference.Span, i: slice, has_bias: bool, has_sink: bool
) -> Callable[..., tuple[Tensor, ...]]:
    """Backward of query rows i of a span, as a differentiable function of (dout, dlse, q, k, v, bias?, sink?)."""

    def first(dout: Tensor, dlse: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
            bias = rest[0] if has_bias else None
            sink = rest[-1] if has_sink else None
            return reference.attend_rows(q, k, v, bias, sink, problem, span, i)

        _, transpose = torch.func.vjp(attend, *inputs)
        return transpose((dout, dlse))

    return first


def tangents(
    input_tangents: Gradients,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    problem: Problem,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Forward mode: the tangents of (out, lse) for tangents of q, k, v, bias, sink (None = zero)."""
    zeros = torch.zeros_like(out), torch.zeros_like(lse)
    return backward_derivative(input_tangents, *zeros, q, k, v, bias, sink, problem)[:2]
