"""`flash_blocksparse_attn_func` of flash-attn 1.x: packed sequences, masks of 16 queries × 256 keys.

There it took fp16 and head dims up to 64, not causal, and stopped working in 2022; here it is `BlockMask` by another
name, with everything that the library can do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn import checks
from flash_attn.block_mask import BlockMask
from flash_attn.flash_attn_interface import unpadded_attention

BLOCK_SIZE = (16, 256)


def convert_blockmask(blockmask: Tensor, causal: bool) -> Tensor:
    """The lists that 1.x kernels read, int32 (k_blocks, q_blocks), of a 0/1 mask (q_blocks, k_blocks).

    Row n lists the query blocks m that visit key block n, ascending, as 4 m, + 1 where n is the first block that m
    visits, + 2 where it is the last; padded with -1. `causal` changes nothing: causal hides elements, not blocks.
    """
    checks.require_tensor("blockmask", blockmask)
    checks.require(blockmask.dim() == 2, "blockmask", blockmask, "must be (q_blocks, k_blocks)")
    visited = blockmask != 0
    q_blocks = visited.shape[0]
    before = visited.cumsum(1)
    first, last = before == 1, before == before[:, -1:]
    number = 4 * torch.arange(q_blocks, device=visited.device)[:, None] + first.int() + 2 * last.int()
    lists = torch.where(visited, number, 4 * q_blocks).t().sort(1).values
    return torch.where(lists < 4 * q_blocks, lists, -1).to(torch.int32)


def revert_blockmask(converted: Tensor) -> Tensor:
    """The bool mask (q_blocks, k_blocks) of `convert_blockmask`'s lists."""
    checks.require_tensor("blockmask", converted)
    checks.require(converted.dim() == 2, "blockmask", converted, "must be (k_blocks, q_blocks), converted")
    k_blocks, q_blocks = converted.shape
    fits = converted.dtype in (torch.int32, torch.int64)
    checks.require(fits, "blockmask", converted, "must be int32 or int64 lists, as convert_blockmask makes them")
    slots = torch.where(converted >= 0, converted // 4, q_blocks).long()
    visited = torch.zeros(k_blocks, q_blocks + 1, dtype=torch.bool, device=converted.device)
    return visited.scatter(1, slots, True)[:, :q_blocks].t()


def flash_blocksparse_attn_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    blockmask: Tensor,
    dropout_p: float,
    max_s: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    convert_mask: bool = True,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Block-sparse self-attention of packed sequences.

    Args:
        qkv: (total, 3, heads, dim), any dtype and head dim. cu_seqlens: (batch + 1,); max_s: at least the longest
            sequence.
        blockmask: 0/1 or bool (q_blocks, k_blocks), or with leading axes (heads | 1) or (batch | 1, heads | 1): which
            blocks of 16 queries × 256 keys are visited, counted from the start of each sequence. At least
            ceil(max_s / 16) × ceil(max_s / 256) blocks; the rest is not looked at.
        dropout_p, softmax_scale, causal: as in `flash_attn_unpadded_func`.
        convert_mask: False: blockmask is what `convert_blockmask` made, int32 or int64; its numbers are not looked at.

    Returns out (total, heads, dim); with return_attn_probs (out, S_dmask, softmax_lse), in this order, as 1.x did.

    Equivalent to::

        mask = BlockMask(blockmask, max_s, max_s, (16, 256))
        flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_s, dropout_p, block_mask=mask)
    """
    q, k, v = checks.packed("qkv", qkv, 3, is_varlen=True)
    max_s = checks.length("max_s", max_s)
    checks.require_tensor("blockmask", blockmask)
    visited = blockmask != 0 if convert_mask else revert_blockmask(blockmask)
    m, n = (-(-max_s // size) for size in BLOCK_SIZE)
    fits = 2 <= visited.dim() <= 4 and visited.shape[-2] >= m and visited.shape[-1] >= n
    checks.require(
        fits, "blockmask", visited, "must have at least {} × {} blocks of 16 × 256 for max_s = {}", m, n, max_s
    )
    mask = BlockMask(visited[..., :m, :n], max_s, max_s, BLOCK_SIZE)
    lengths = (cu_seqlens, cu_seqlens, max_s, max_s)
    result = unpadded_attention(q, k, v, lengths, dropout_p, softmax_scale, causal, return_attn_probs, False, mask)
    if not return_attn_probs:
        return result
    out, lse, s_dmask = result
    return out, s_dmask, lse
