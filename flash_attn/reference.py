"""Attention in plain PyTorch, to be read rather than to be fast: Algorithm 0 and the tiled Algorithms 1 and 4 of

    Dao, Fu, Ermon, Rudra, Re, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022.

`standard_forward` materialises N x N; `forward` and `backward` keep O(N) extra memory and are `backend="reference"`.
Both run on any device with every option, and share one definition of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.block_patterns import visible_elements
from flash_attn.dropout import keep_mask, keep_scale
from flash_attn.problem import Problem, compute_dtype

BLOCK_ROWS = 256  # B_r of the paper
BLOCK_COLUMNS = 256  # B_c
TILE_ELEMENTS = 1 << 22  # dense sequences are computed together while their tiles have no more elements than this
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


# ---- The logits: one definition for every path ----
class Region(NamedTuple):
    """A rectangle of the (query, key) plane: which entries of the option tensors it meets, and the positions in it."""

    batch: slice  # sequence numbers: axis 0 of bias, mask and ALiBi slopes
    rows: slice | Tensor  # axis 2 of bias and mask
    columns: slice  # axis 3
    q_position: Tensor  # int64 (..., rows, 1), counted from the left pad
    k_position: Tensor  # int64 (..., 1, columns)
    seqlen_q: int | Tensor  # real rows; tensors broadcast like the positions
    seqlen_k: int | Tensor


def select(x: Tensor, region: Region) -> Tensor:
    """The part of a bias or mask (batch | 1, heads | 1, rows | 1, columns | 1) that belongs to the region."""
    if x.shape[0] != 1:
        x = x[region.batch]
    if x.shape[2] != 1:
        x = x[:, :, region.rows]
    return x if x.shape[3] == 1 else x[..., region.columns]


def diagonal(problem: Problem, seqlen_q: int | Tensor, seqlen_k: int | Tensor) -> int | Tensor:
    """The key position on the diagonal of query position 0."""
    return 0 if problem.upper_left else seqlen_k - seqlen_q


def distance(problem: Problem, region: Region) -> Tensor:
    """How far a key lies to the left of its query's diagonal; negative: to the right."""
    return region.q_position + diagonal(problem, region.seqlen_q, region.seqlen_k) - region.k_position


def visibility(problem: Problem, region: Region) -> Tensor:
    """Which keys each query may attend to: bool, broadcastable to (batch, heads, rows, columns)."""
    q, k = region.q_position, region.k_position
    visible = ((q >= 0) & (q < region.seqlen_q)) & ((k >= 0) & (k < region.seqlen_k))
    if problem.window_left >= 0:
        visible = visible & (distance(problem, region) <= problem.window_left)
    if problem.causal or problem.window_right >= 0:
        visible = visible & (distance(problem, region) >= (0 if problem.causal else -problem.window_right))
    if problem.mask is not None:
        visible = visible & select(problem.mask, region)
    return visible if problem.block_kinds is None else visible & block_visibility(problem, region)


def seen(bias: Tensor | None, problem: Problem, region: Region) -> Tensor:
    """The same, and a bias of -inf hides its key, too."""
    visible = visibility(problem, region)
    return visible if bias is None else visible & (select(bias, region) != -math.inf)


def may_hide_lines(problem: Problem, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether some query may see nothing, or some key be seen by none."""
    if problem.has_lengths or problem.mask is not None or problem.block_kinds is not None:
        return True
    triangle = problem.causal and problem.window_left < 0 and seqlen_q == seqlen_k
    return not triangle and (problem.causal or problem.window_left >= 0 or problem.window_right >= 0)


def block_visibility(problem: Problem, region: Region) -> Tensor:
    """What the block mask lets each query of a region see: bool (batch | 1, heads | 1, rows, columns)."""

    def places(of: slice | Tensor, count: int) -> Tensor:
        return (
            of if isinstance(of, Tensor) else torch.arange(count, device=problem.block_kinds.device) + (of.start or 0)
        )

    rows = places(region.rows, region.q_position.shape[-2])[:, None]
    columns = places(region.columns, region.k_position.shape[-1])
    _, block_rows, block_keys = problem.block_patterns.shape
    kinds = problem.block_kinds if problem.block_kinds.shape[0] == 1 else problem.block_kinds[region.batch]
    return visible_elements(
        kinds[:, :, rows // block_rows, columns // block_keys], problem.block_patterns, rows, columns
    )


def softcap_of(problem: Problem, dtype: torch.dtype) -> float:
    """What is below the dtype's smallest normal number caps like it: all logits are 0 beside 1."""
    return max(problem.softcap, torch.finfo(dtype).tiny)


def logits(products: Tensor, bias: Tensor | None, problem: Problem, region: Region) -> Tensor:
    """Q K^T of a region -> the final logits S, -inf where a key is hidden: what softmax sees."""
    scores = products * problem.softmax_scale
    if problem.softcap > 0:
        softcap = softcap_of(problem, scores.dtype)
        scores = softcap * torch.tanh(scores / softcap)
    if problem.alibi_slopes is not None:
        slopes = problem.alibi_slopes if problem.alibi_slopes.shape[0] == 1 else problem.alibi_slopes[region.batch]
        scores = scores - slopes.to(scores.dtype)[:, :, None, None] * distance(problem, region).abs()
    if bias is not None:
        part = select(bias, region).to(scores.dtype)
        scores = torch.where(part == -math.inf, -math.inf, scores + part)
    return torch.where(visibility(problem, region), scores, -math.inf)


def logits_derivative(products: Tensor, problem: Problem) -> Tensor | float:
    """d logits / d products where the key is visible."""
    if problem.softcap <= 0:
        return problem.softmax_scale
    scores = products * problem.softmax_scale
    return problem.softmax_scale * (1.0 - torch.tanh(scores / softcap_of(problem, scores.dtype)).square())


def finite_reference(m: Tensor) -> Tensor:
    """A row maximum that may be subtracted: 0 for a row that has seen nothing, where -inf - -inf would be NaN."""
    return torch.where(m == -math.inf, 0.0, m)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """K or V (batch, heads_k, rows, dim) -> (batch, heads, ...): query head h reads KV head h // (heads / heads_k)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def sum_head_groups(x: Tensor, heads_k: int) -> Tensor:
    """The transpose of `repeat_heads`."""
    return x if x.shape[1] == heads_k else x.unflatten(1, (heads_k, -1)).sum(2)


def fill(x: Tensor, real: Tensor | None) -> Tensor:
    """Zeros in the rows that do not count, padding or what sees nothing: they may hold NaN, and 0 * NaN is NaN."""
    return x if real is None else torch.where(real, x, 0.0)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in their own dtype: autocast would multiply fp32 tiles in half precision."""
    if not torch.amp.is_autocast_available(x.device.type):  # the meta device
        return x @ y
    with torch.autocast(x.device.type, enabled=False):
        return x @ y


def drop(x: Tensor, keep: Tensor | None, dropout_p: float) -> Tensor:
    """Dropout with torch's scaling, and its own derivative. Selects: 0 * inf at p = 1 would be NaN."""
    return x if keep is None else torch.where(keep, x * keep_scale(dropout_p), 0.0)


# ---- Algorithm 0 ----
def standard_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, problem: Problem, *, upcast: bool = False
) -> tuple[Tensor, Tensor]:
    """Standard attention (the paper's Algorithm 0): materialises the N x N matrices; plain autograd, to any order.

    Args: tensors and problem as for `forward`, dense only. upcast: False multiplies matrices in q's dtype and takes the
        softmax in fp32, as plain PyTorch code does; True does everything in fp32. fp64 stays fp64 either way.

    Returns: out, lse as `forward`. Rows that see nothing: out 0, lse -inf (the sink if there is one), zero gradients.
    """
    heads, dtype, accurate = q.shape[2], q.dtype, compute_dtype(q.dtype)
    region, real_q, _ = whole_region(q.shape[1], k.shape[1], problem, q.device)
    q, k, v = (x.transpose(1, 2).to(accurate if upcast else dtype) for x in (q, k, v))
    k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    if bias is not None or may_hide_lines(problem, q.shape[2], k.shape[2]):
        pairs = seen(bias, problem, region)
        q = fill(q, pairs.any(-1, keepdim=True))
        k, v = (fill(x, pairs.any(-2).unsqueeze(-1)) for x in (k, v))
    s = logits(matmul(q, k.transpose(2, 3)).to(accurate), bias, problem, region)
    keep = whole_keep(problem, region, s.shape)
    out, lse = softmax_times_values(s, v, sink, keep, problem.dropout_p, real_q)
    return out.transpose(1, 2).to(dtype).contiguous(), lse


def softmax_times_values(
    s: Tensor, v: Tensor, sink: Tensor | None, keep: Tensor | None, dropout_p: float, real_q: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out = drop(softmax(s)) v and lse, from logits (batch, heads, rows, columns); plain autograd without NaN.

    real_q (batch, 1, rows, 1): rows that are no padding, None for all.
    """
    # m is a constant to autograd (the result does not depend on it); no -inf - -inf, 0 / 0, log 0.
    m = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    sees_key = m != -math.inf
    if sink is not None:
        sink = sink.to(s.dtype).view(1, -1, 1, 1)
        m = torch.maximum(m, sink.detach())
    m = torch.where(sees_key, m, 0.0)
    weights = torch.exp(s - m)
    total = weights.sum(-1, keepdim=True)
    lse_without_keys: Tensor | float = -math.inf
    if sink is not None:
        total = total + torch.exp(torch.where(sees_key, sink - m, -math.inf))
        lse_without_keys = sink if real_q is None else torch.where(real_q, sink, -math.inf)
    total = torch.where(sees_key, total, 1.0)
    lse = torch.where(sees_key, m + torch.log(total), lse_without_keys).squeeze(-1)
    p = drop(weights / total, keep, dropout_p)
    return torch.where(sees_key, matmul(p.to(v.dtype), v), 0.0), lse


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, problem: Problem, span: Span, i: slice
) -> tuple[Tensor, Tensor]:
    """Attention of the query rows i of a span to all its keys, in plain differentiable PyTorch: out and lse.

    q (batch, heads, rows, dim), k and v (batch, heads_k, seqlen_k, ...) are the span's, in the compute dtype; bias is
    whole.
    """
    heads, j = q.shape[1], slice(0, span.seqlen_k)
    region = tile_region(span, i, j, q.device)
    q = fill(q, seen(bias, problem, region).any(-1, keepdim=True))
    products = matmul(q, repeat_heads(k, heads).transpose(2, 3))
    s = logits(products, bias, problem, region)
    keep = keep_mask(problem.dropout_seed, problem.dropout_p, span.batch, slice(0, heads), i, j)
    return softmax_times_values(s, repeat_heads(v, heads), sink, keep, problem.dropout_p)


def whole_region(
    rows: int, columns: int, problem: Problem, device: torch.device
) -> tuple[Region, Tensor | None, Tensor | None]:
    """The region of whole dense tensors; which rows of q (batch, 1, rows, 1) and of k are real: None for all."""

    def axis(length: int, stop: Tensor | None, pad: Tensor | None) -> tuple[Tensor, int | Tensor, Tensor | None]:
        first: int | Tensor = 0 if pad is None else pad.long().view(-1, 1, 1, 1)
        seqlen = (length if stop is None else stop.long().view(-1, 1, 1, 1)) - first
        position = torch.arange(length, device=device).view(1, 1, length, 1) - first
        return position, seqlen, None if stop is None and pad is None else (position >= 0) & (position < seqlen)

    q, seqlen_q, real_q = axis(rows, problem.seqused_q, problem.leftpad_q)
    k, seqlen_k, real_k = axis(columns, problem.seqused_k, problem.leftpad_k)
    return Region(slice(None), slice(None), slice(None), q, k.transpose(2, 3), seqlen_q, seqlen_k), real_q, real_k


def whole_keep(problem: Problem, region: Region, shape: Sequence[int]) -> Tensor | None:
    keep = keep_mask(problem.dropout_seed, problem.dropout_p, *(slice(0, size) for size in shape))
    if keep is None or (problem.leftpad_q is None and problem.leftpad_k is None):
        return keep
    sequence, head = (torch.arange(size, device=keep.device) for size in shape[:2])  # from positions to rows
    q, k = region.q_position.clamp(min=0), region.k_position.clamp(min=0)
    return keep[sequence.view(-1, 1, 1, 1), head.view(-1, 1, 1), q, k]


# ---- Where sequences live, and their tiles ----
class Span(NamedTuple):
    """One sequence, or several dense ones of equal lengths, within tensors laid out (batch, heads, rows, dim)."""

    storage: slice  # batch entries of q, k, v, out (varlen: the one that all sequences share)
    batch: slice  # sequence numbers
    rows: slice  # the real rows of q and out
    columns: slice  # the real rows of k and v
    seqlen_q: int
    seqlen_k: int
    first_row: int = 0  # where bias and mask hold the first real row: the left pad
    first_column: int = 0


def spans(q: Tensor, k: Tensor, problem: Problem) -> Iterator[Span]:
    """All sequences of a call. q, k: (batch, heads, rows, dim). Lengths are read on the host."""
    (batch, heads, rows, _), columns = q.shape, k.shape[2]
    uneven = (problem.cu_seqlens_q, problem.seqused_q, problem.seqused_k, problem.leftpad_q, problem.leftpad_k)
    if all(x is None for x in uneven):
        tile = heads * min(rows, BLOCK_ROWS) * min(columns, BLOCK_COLUMNS)
        step = max(1, TILE_ELEMENTS // max(1, tile))
        for first in range(0, batch, step):
            some = slice(first, min(first + step, batch))
            yield Span(some, some, slice(0, rows), slice(0, columns), rows, columns)
        return

    def bounds(cu_seqlens: Tensor | None, seqused: Tensor | None, leftpad: Tensor | None, length: int):
        """For each sequence its real rows, their number and its left pad."""
        edges = None if cu_seqlens is None else cu_seqlens.tolist()
        starts = [0] * batch if edges is None else edges[:-1]
        sizes = [length] * batch if edges is None else [stop - start for start, stop in pairwise(edges)]
        stops = sizes if seqused is None else seqused.tolist()
        pads = [0] * len(starts) if leftpad is None else leftpad.tolist()
        for start, pad, stop in zip(starts, pads, stops, strict=True):
            yield slice(start + pad, start + max(pad, stop)), max(pad, stop) - pad, pad

    q_bounds = bounds(problem.cu_seqlens_q, problem.seqused_q, problem.leftpad_q, rows)
    k_bounds = bounds(problem.cu_seqlens_k, problem.seqused_k, problem.leftpad_k, columns)
    for b, ((q_rows, seqlen_q, q_pad), (k_rows, seqlen_k, k_pad)) in enumerate(zip(q_bounds, k_bounds, strict=True)):
        storage = slice(0, 1) if problem.is_varlen else slice(b, b + 1)
        yield Span(storage, slice(b, b + 1), q_rows, k_rows, seqlen_q, seqlen_k, q_pad, k_pad)


def blocks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def tile_region(span: Span, i: slice, j: slice, device: torch.device) -> Region:
    """The region of query positions i and key positions j."""
    rows = slice(span.first_row + i.start, span.first_row + i.stop)
    columns = slice(span.first_column + j.start, span.first_column + j.stop)
    q, k = (torch.arange(x.start, x.stop, device=device) for x in (i, j))
    return Region(span.batch, rows, columns, q[:, None], k, span.seqlen_q, span.seqlen_k)


def query_blocks(problem: Problem, span: Span, j: slice) -> Iterator[slice]:
    """The query blocks that meet key block j: those for which causal and window do not hide the whole tile."""
    offset = diagonal(problem, span.seqlen_q, span.seqlen_k)
    left, right = problem.window_left, 0 if problem.causal else problem.window_right
    for i in blocks(span.seqlen_q, BLOCK_ROWS):
        beyond_right = right >= 0 and j.start > i.stop - 1 + offset + right
        beyond_left = left >= 0 and j.stop - 1 < i.start + offset - left
        if not (beyond_left or beyond_right):
            yield i


def heads_first(x: Tensor) -> Tensor:
    """A view (batch, heads, rows, dim) of (batch, rows, heads, dim) or of varlen (total, heads, dim)."""
    return (x if x.dim() == 4 else x.unsqueeze(0)).transpose(1, 2)


# ---- Algorithm 1 ----
@torch.no_grad()
def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention forward (the paper's Algorithm 1): online softmax over tiles, O(N) memory, no autograd.

    Args: q, k, v dense or varlen as in `Problem`; sink None or (heads,);
        bias None or 4-D (batch | 1, heads | 1, max_seqlen_q | 1, max_seqlen_k | 1).

    Returns: out (..., heads, dim_v) contiguous, in q's dtype; lse (batch, heads, seqlen_q), varlen (heads, total_q), in
        fp32 (fp64 for fp64); statistics (2, *lse.shape) for `backward`: R, a logit, and log2 of sum_j exp(S_j - R),
        which is +inf for a row that sees nothing but the sink.
    Unlike line 12 of the paper, O_i is divided by l_i once, after the last key block. Line numbers are the paper's.
    """
    heads, device, dtype = q.shape[-2], q.device, compute_dtype(q.dtype)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])  # rows of no sequence keep 0 and lse = -inf
    out_4d, q_4d, k_4d, v_4d = (heads_first(x) for x in (out, q, k, v))
    statistics = torch.zeros(2, *out_4d.shape[:-1], dtype=dtype, device=device)
    statistics[1] = -math.inf
    lse = statistics[1].clone()

    for span in spans(q_4d, k_4d, problem):
        q_rows = q_4d[span.storage, :, span.rows]
        k_rows, v_rows = k_4d[span.storage, :, span.columns], v_4d[span.storage, :, span.columns]
        o = torch.zeros(*q_rows.shape[:-1], v.shape[-1], dtype=dtype, device=device)  # line 2
        ell = torch.zeros(*q_rows.shape[:-1], 1, dtype=dtype, device=device)
        m = torch.full_like(ell, -math.inf)
        for j in blocks(span.seqlen_k, BLOCK_COLUMNS):  # line 5
            k_j, v_j = (repeat_heads(x[:, :, j].to(dtype), heads) for x in (k_rows, v_rows))  # line 6
            for i in query_blocks(problem, span, j):  # line 7
                q_i, o_i, l_i, m_i = q_rows[:, :, i].to(dtype), o[:, :, i], ell[:, :, i], m[:, :, i]  # line 8
                region = tile_region(span, i, j, device)
                s_ij = logits(matmul(q_i, k_j.transpose(2, 3)), bias, problem, region)  # line 9
                m_new = torch.maximum(m_i, s_ij.amax(-1, keepdim=True))  # lines 10, 11
                reference = finite_reference(m_new)
                p_ij = torch.exp(s_ij - reference)
                rescale = torch.exp(m_i - reference)
                keep = keep_mask(problem.dropout_seed, problem.dropout_p, span.batch, slice(0, heads), i, j)
                o_i.mul_(rescale).add_(matmul(drop(p_ij, keep, problem.dropout_p), v_j))  # line 12
                l_i.mul_(rescale).add_(p_ij.sum(-1, keepdim=True))  # line 13
                m_i.copy_(m_new)

        sees_key = ell != 0
        if sink is not None:  # acts like one more key, without a value
            key, sink_logit = m, sink.to(dtype).view(-1, 1, 1)
            m = torch.maximum(key, sink_logit)
            rescale = torch.exp(key - finite_reference(m))
            o, ell = o * rescale, ell * rescale + torch.exp(sink_logit - finite_reference(m))
        reference, log2_l = finite_reference(m), torch.log2(ell)
        out_4d[span.storage, :, span.rows] = torch.where(sees_key, o / ell, 0.0).to(out.dtype)
        lse[span.storage, :, span.rows] = torch.where(sees_key, reference + LN_2 * log2_l, m).squeeze(-1)
        statistics[0, span.storage, :, span.rows] = reference.squeeze(-1)
        statistics[1, span.storage, :, span.rows] = torch.where(sees_key | (ell == 0), log2_l, math.inf).squeeze(-1)
    return (out, lse.squeeze(0), statistics.squeeze(1)) if problem.is_varlen else (out, lse, statistics)


# ---- Algorithm 4 ----
@torch.no_grad()
def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor,
    bias: Tensor | None, sink: Tensor | None, problem: Problem, needs: tuple[bool, bool, bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """FlashAttention backward (the paper's Algorithm 4): recomputes S and P tile by tile; O(N) memory, deterministic.

    Args: dout like out; dlse None or like lse; out and statistics from `forward`; the rest as given to it;
        needs: which of dq, dk, dv, dbias, dsink to compute.

    Returns: (dq, dk, dv, dbias, dsink), each in the dtype and shape of its tensor, or None where it is not needed.

        P = exp(S - LSE)   dV = drop(P)^T dO   dP = drop(dO V^T)   dS = P * (dP - delta + dLSE), delta = rowsum(dO * O)
        dQ = scale dS K    dK = scale dS^T Q   dbias = dS summed over broadcast axes
        dsink = sum over rows of exp(sink - LSE) * (dLSE - delta)
    A row that sees nothing contributes nothing, whatever its dout and dlse.
    """
    heads, heads_k, device, dtype = q.shape[-2], k.shape[-2], q.device, compute_dtype(q.dtype)
    need_dq, need_dk, need_dv, need_dbias, need_dsink = needs
    need_ds = need_dq or need_dk or need_dbias
    dq, dk, dv = (x.new_zeros(x.shape) if need else None for x, need in zip((q, k, v), needs, strict=False))
    dbias = torch.zeros(bias.shape, dtype=dtype, device=device) if need_dbias else None
    dsink = torch.zeros(heads, dtype=dtype, device=device) if need_dsink else None
    q_4d, k_4d, v_4d, out_4d, dout_4d = (heads_first(x) for x in (q, k, v, out, dout))
    if problem.is_varlen:
        statistics, dlse = statistics.unsqueeze(1), None if dlse is None else dlse.unsqueeze(0)

    for span in spans(q_4d, k_4d, problem):
        q_rows, o, do = (x[span.storage, :, span.rows] for x in (q_4d, out_4d, dout_4d))
        k_rows, v_rows = k_4d[span.storage, :, span.columns], v_4d[span.storage, :, span.columns]
        reference, log2_l = statistics[:, span.storage, :, span.rows].unsqueeze(-1)
        sink_alone = log2_l == math.inf
        empty = (reference == -math.inf) | torch.isinf(log2_l)
        reference, log2_l = (torch.where(empty, 0.0, x) for x in (reference, log2_l))  # then exp2(-inf - 0) = 0 below
        q_rows = torch.where(empty, 0.0, q_rows)
        do = torch.where(empty, 0.0, do.to(dtype))
        delta = (do * o.to(dtype)).sum(-1, keepdim=True)  # line 19 for all rows at once
        if dlse is not None:
            delta -= torch.where(empty & ~sink_alone, 0.0, dlse[span.storage, :, span.rows].unsqueeze(-1))
        if need_dsink:
            p_sink = torch.exp2((sink.to(dtype).view(-1, 1, 1) - reference) * LOG2_E - log2_l)
            p_sink = torch.where(sink_alone, 1.0, torch.where(empty, 0.0, p_sink))
            dsink -= (p_sink * delta).sum((0, 2, 3))
            delta = torch.where(empty, 0.0, delta)
        dq_rows = torch.zeros(q_rows.shape, dtype=dtype, device=device) if need_dq else None  # line 5

        for j in blocks(span.seqlen_k, BLOCK_COLUMNS) if need_ds or need_dv else ():  # line 6
            k_j, v_j = (repeat_heads(x[:, :, j].to(dtype), heads) for x in (k_rows, v_rows))  # line 7
            dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)  # line 8
            for i in query_blocks(problem, span, j):  # line 9
                q_i, do_i = q_rows[:, :, i].to(dtype), do[:, :, i]  # line 10
                region = tile_region(span, i, j, device)
                products = matmul(q_i, k_j.transpose(2, 3))
                s_ij = logits(products, bias, problem, region)  # lines 11, 12
                p_ij = torch.exp2((s_ij - reference[:, :, i]) * LOG2_E - log2_l[:, :, i])  # line 13
                keep = keep_mask(problem.dropout_seed, problem.dropout_p, span.batch, slice(0, heads), i, j)  # line 14
                if need_dv:
                    dv_j += matmul(drop(p_ij, keep, problem.dropout_p).transpose(2, 3), do_i)  # lines 15, 16
                if not need_ds:
                    continue
                dp_ij = drop(matmul(do_i, v_j.transpose(2, 3)), keep, problem.dropout_p)  # lines 17, 18
                ds_ij = torch.where(p_ij == 0, 0.0, p_ij * (dp_ij - delta[:, :, i]))  # line 20; a hidden V may be NaN
                if need_dbias:
                    dbias_ij = select(dbias, region)
                    dbias_ij += ds_ij.sum_to_size(dbias_ij.shape)
                ds_ij = torch.where(ds_ij == 0, 0.0, ds_ij * logits_derivative(products, problem))  # now d products
                if need_dq:
                    dq_rows[:, :, i] += matmul(ds_ij, k_j)  # line 21
                if need_dk:
                    dk_j += matmul(ds_ij.transpose(2, 3), q_i)  # line 22
            for grad, grad_j in ((dk, dk_j), (dv, dv_j)):  # line 24
                if grad is not None:
                    heads_first(grad)[span.storage, :, span.columns][:, :, j] = sum_head_groups(grad_j, heads_k)
        if need_dq:
            heads_first(dq)[span.storage, :, span.rows] = torch.where(empty, 0.0, dq_rows)
    return dq, dk, dv, None if dbias is None else dbias.to(bias.dtype), None if dsink is None else dsink.to(sink.dtype)


# ---- Rows of P ----
def probabilities(
    q_rows: Tensor, k: Tensor, lse: Tensor, rows: Tensor | None, seqlen_q: int, bias: Tensor | None, problem: Problem
) -> Tensor:
    """P (batch, heads, n_rows, seqlen_k) of the rows `rows` (None: all) of q, rebuilt from their LSE: exp(S - LSE)."""
    region, real_q, real_k = whole_region(seqlen_q, k.shape[1], problem, q_rows.device)
    if rows is not None:
        region = region._replace(rows=rows, q_position=region.q_position[:, :, rows])
        real_q = None if real_q is None else real_q[:, :, rows]
    q, k, lse = (
        x.to(compute_dtype(q_rows.dtype)) for x in (q_rows.transpose(1, 2), k.transpose(1, 2), lse.unsqueeze(-1))
    )
    q, k = fill(q, real_q), fill(k, real_k)
    s = logits(matmul(q, repeat_heads(k, q.shape[1]).transpose(2, 3)), bias, problem, region)
    empty = lse == -math.inf
    return torch.where(empty, 0.0, torch.exp(s - torch.where(empty, 0.0, lse)))
