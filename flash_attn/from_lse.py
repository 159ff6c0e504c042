"""What the log-sum-exp of attention is good for: merging partial results, and rebuilding the weights of a few rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn import checks, reference
from flash_attn.block_mask import BlockMask, lists_of
from flash_attn.problem import compute_dtype


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets, from the results over each of them.

    Args:
        outs: one (batch, seqlen, heads, dim) tensor per key set, or varlen (total, heads, dim).
        lses: their log-sum-exps (natural log), (batch, heads, seqlen) or varlen (heads, total), fp32 or fp64.

    Returns (out, lse) like one part: lse = log sum_i exp(lse_i), out = sum_i exp(lse_i - lse) out_i.
    A part with lse_i = -inf (the row saw nothing there) does not count; where all are -inf, out = 0 and lse = -inf.
    Differentiable to any order in outs and lses. A learnable sink belongs to one part only.

    Raises: RuntimeError for no parts, unequal numbers of outs and lses, or shapes, dtypes or devices that disagree.
    Source: lines 11 to 13 of Algorithm 1, with m = lse and l = 1.
    Equivalent to: attention over the concatenated keys and values, `torch.cat(keys, 1)`.
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise RuntimeError(f"outs and lses must be equally many, at least one each; got {len(outs)} and {len(lses)}")
    for name, parts in (("outs", outs), ("lses", lses)):
        for i, x in enumerate(parts):
            checks.require_tensor(f"{name}[{i}]", x)
    first, first_lse = outs[0], lses[0]
    is_attention = first.dim() in (3, 4) and first.is_floating_point()
    checks.require(is_attention, "outs[0]", first, "must be floating point, 4-D or (varlen) 3-D")
    is_lse = first_lse.dtype in (torch.float32, torch.float64)
    checks.require(is_lse, "lses[0]", first_lse, "must be float32 or float64")
    lse_shape = first.transpose(-3, -2).shape[:-1]
    expected = {"outs": (outs, first.shape, first.dtype), "lses": (lses, lse_shape, first_lse.dtype)}
    for name, (parts, shape, dtype) in expected.items():
        for i, x in enumerate(parts):
            alike = (x.shape, x.dtype, x.device) == (shape, dtype, first.device)
            rule = f"must be {dtype} {tuple(shape)} on {first.device}, to fit outs[0] and lses[0]"
            checks.require(alike, f"{name}[{i}]", x, rule)
    dtype = torch.promote_types(compute_dtype(first.dtype), first_lse.dtype)
    logs = torch.stack(list(lses)).to(dtype)  # (part, ..., heads, rows)
    m = reference.finite_reference(logs.detach().amax(0))
    weights = torch.exp(logs - m)
    total = weights.sum(0)
    counts = total != 0
    total = torch.where(counts, total, 1.0)
    merged = torch.zeros((), dtype=dtype, device=first.device)
    for out, log, weight in zip(outs, logs, weights / total, strict=True):
        present, weight = (x.transpose(-1, -2).unsqueeze(-1) for x in (log != -math.inf, weight))
        merged = merged + weight * reference.fill(out.to(dtype), present)
    return merged.to(first.dtype), torch.where(counts, m + torch.log(total), -math.inf).to(first_lse.dtype)


def attention_probs(
    q_rows: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    rows: Tensor | Sequence[int] | None = None,
    seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> Tensor:
    """The attention probabilities of a few query rows, from the lse that attention returned (`return_lse=True`).

    Args:
        q_rows: (batch, n_rows, heads, dim), rows of q, e.g. `q[:, rows]`.
        k: (batch, seqlen_k, heads_k, dim) in q_rows' dtype; query head h uses KV head h // (heads / heads_k).
        lse: (batch, heads, n_rows) of these rows, e.g. `lse[:, :, rows]`; fp32 or fp64.
        rows: (n_rows,) integers, where q_rows stood in q; None: q_rows is all of q. seqlen_q: q's length then.
        The rest as given to the attention call, bias and masks whole. lse holds a sink; dropout is not applied.

    Returns P (batch, heads, n_rows, seqlen_k), fp32 (fp64 for fp64): 0 for hidden keys and in rows that see nothing.
        Rows sum to 1 (less with a sink) up to the rounding of lse. Differentiable in q_rows, k, lse and bias.

    Raises: RuntimeError for tensors whose shape, dtype or device do not fit; ValueError for other options.
    Equivalent to: `torch.softmax(S, -1)[:, :, rows]`, S the masked logits, without computing the other rows.
    """
    checks.require_tensor("q_rows", q_rows)
    checks.require(q_rows.dim() == 4, "q_rows", q_rows, "must be (batch, n_rows, heads, dim)")
    n_rows = q_rows.shape[1]
    if rows is None:
        checks.require_option(
            seqlen_q in (None, n_rows), "seqlen_q", seqlen_q, f"must be {n_rows}, q's rows, without `rows`"
        )
    checks.require_option(
        rows is None or seqlen_q is not None, "seqlen_q", seqlen_q, "must be q's length where `rows` is given"
    )
    seqlen_q = n_rows if seqlen_q is None else checks.length("seqlen_q", seqlen_q)
    bias, _, problem = checks.attention(
        q_rows,
        k,
        k,
        seqlen_q=seqlen_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        mask=mask,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        blocks=lists_of(block_mask),
    )
    checks.require_tensor("lse", lse)
    shape = (q_rows.shape[0], q_rows.shape[2], n_rows)
    checks.require(tuple(lse.shape) == shape, "lse", lse, f"must have shape {shape}: the LSE of these rows")
    checks.require(lse.dtype in (torch.float32, torch.float64), "lse", lse, "must be float32 or float64")
    checks.on_device_of_q("lse", lse, q_rows)
    if rows is not None:
        is_readable = q_rows.device.type == "cpu" and n_rows > 0 and not torch.compiler.is_compiling()
        rows = checks.indices("rows", torch.as_tensor(rows, device=q_rows.device), n_rows, q_rows)
        if is_readable:
            inside = 0 <= int(rows.min()) and int(rows.max()) < seqlen_q
            checks.require(inside, "rows", rows.tolist(), f"must lie in [0, seqlen_q) = [0, {seqlen_q})")
    return reference.probabilities(q_rows, k, lse, rows, seqlen_q, bias, problem)
