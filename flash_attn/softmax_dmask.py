"""S_dmask, the dropout record that `return_attn_probs=True` returns: a debugging aid, N x N, in plain PyTorch.

Attention itself never holds these numbers: they are computed here once more, from the definition. The convention is the
one that code written for flash-attn decodes, with `_get_block_size_n`:

    S_dmask[i, j] = sign · exp(S[i, j] - m[i, J]),  J = j // block_n the key block of j,
    m[i, J] = max of S[i, j'] over the visible keys j' of block J and of all blocks to its right;
    the sign bit is set iff dropout drops (i, j).

S are the final logits (scale, softcap, ALiBi, bias), so P[i, j] = |S_dmask[i, j]| · exp(m[i, J] - LSE[i]). A sink is in
the LSE alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn import reference
from flash_attn.dropout import keep_mask
from flash_attn.problem import Problem, compute_dtype

ROUNDING = 128  # of rows and columns; every block_n divides it


def _get_block_size_n(device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The key block width of the S_dmask convention on `device`."""
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if is_dropout else 128
    if head_dim <= 96:
        return 64
    if head_dim <= 128:
        device = torch.device(device)
        major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
        if major == 8 and minor > 0:
            return 64 if is_causal and not is_dropout else 32
        return 32 if is_dropout else 64
    return 64


def round_multiple(x: int, m: int) -> int:
    """x rounded up to a multiple of m."""
    return (x + m - 1) // m * m


@torch.no_grad()
def softmax_dmask(q: Tensor, k: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
    """S_dmask of a checked call whose seed is drawn.

    Args: q, k, bias and problem as every backend takes them, dense or varlen.

    Returns (batch, heads, seqlen_q, seqlen_k), varlen (batch, heads, max_seqlen_q, max_seqlen_k), both lengths rounded
        up to 128, in q's dtype. Rows and columns are those of the tensors, varlen: of the sequence's segment. Hidden
        keys, padding and what the rounding adds hold +0 or -0. A weight too small for q's dtype is 0 too, and only its
        sign bit (`torch.signbit`) says whether it was dropped.

    Memory: several such matrices in fp32. Lengths are read on the host.
    """
    batch = problem.cu_seqlens_q.shape[0] - 1 if problem.is_varlen else q.shape[0]
    heads = q.shape[-2]
    rows, columns = (problem.max_seqlen_q, problem.max_seqlen_k) if problem.is_varlen else (q.shape[1], k.shape[1])
    rows, columns = round_multiple(rows, ROUNDING), round_multiple(columns, ROUNDING)
    result = q.new_zeros(batch, heads, rows, columns)
    if q.device.type == "meta" or result.numel() == 0:
        return result
    block = _get_block_size_n(q.device, q.shape[-1], problem.drops, problem.causal)
    q, k = reference.heads_first(q), reference.heads_first(k)
    for span in reference.spans(q, k, problem):
        i, j = slice(0, span.seqlen_q), slice(0, span.seqlen_k)
        region = reference.tile_region(span, i, j, q.device)
        q_rows, k_rows = (
            x.to(compute_dtype(x.dtype)) for x in (q[span.storage, :, span.rows], k[span.storage, :, span.columns])
        )
        products = reference.matmul(q_rows, reference.repeat_heads(k_rows, heads).transpose(2, 3))
        logits = reference.logits(products, bias, problem, region)
        keep = keep_mask(problem.dropout_seed, problem.dropout_p, span.batch, slice(0, heads), i, j)
        result[span.batch, :, region.rows, region.columns] = _encode(logits, keep, block, span.first_column)
    return result


def _encode(logits: Tensor, keep: Tensor | None, block: int, first_column: int) -> Tensor:
    """Logits (..., columns), -inf where hidden, as S_dmask entries; column 0 stands in column `first_column`."""
    if logits.shape[-1] == 0:
        return logits
    blocks = (torch.arange(logits.shape[-1], device=logits.device) + first_column) // block
    # The running maximum from the right changes from block to block only: what column j gets is that of the first
    # column of its block.
    from_right = logits.flip(-1).cummax(-1).values.flip(-1)
    first_of_block = (blocks * block - first_column).clamp(min=0)
    m = reference.finite_reference(from_right[..., first_of_block])
    weights = torch.exp(logits - m)
    return weights if keep is None else torch.where(keep, weights, -weights)
