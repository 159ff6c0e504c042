"""What one attention call computes, apart from the tensors that carry gradients.

A `Problem` is made by `flash_attn.checks` and read by every backend: after it exists nothing is checked,
defaulted or re-interpreted again, so all backends answer the same question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of softmax, statistics, LSE, slopes and sinks: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw_threshold(dropout_p: float) -> int:
    """round(p * 65536): a weight is dropped with this probability / 65536. 0 means no dropout at all."""
    return int(dropout_p * 65536 + 0.5)


class BlockLists(NamedTuple):
    """What a call takes of a `BlockMask`, which says what the tensors hold, and the lengths that the mask is for."""

    kinds: Tensor
    patterns: Tensor
    key_lists: Tensor
    query_lists: Tensor
    seqlen_q: int
    seqlen_k: int


class Problem(NamedTuple):
    """The checked, normalised options of one call, in the order of the op schemas (csrc/binding/schema.cpp).

    Layouts: q (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_k, dim), v (batch, seqlen_k, heads_k, dim_v);
    with `cu_seqlens_q` (varlen) q (total_q, heads, dim), k (total_k, heads_k, dim), v (total_k, heads_k, dim_v).
    """

    softmax_scale: float
    causal: bool = False
    window_left: int = -1  # keys to the left of the diagonal that stay visible; -1 = all
    window_right: int = -1  # the same to the right; causal makes it 0
    upper_left: bool = False  # diagonal through (0, 0) instead of through (seqlen_q - 1, seqlen_k - 1)
    softcap: float = 0.0  # 0 = off
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None  # int64 (2,), on q's device; None iff nothing is dropped (after `draw_seed`)
    alibi_slopes: Tensor | None = None  # (batch | 1, heads), fp32 (fp64 for fp64 q), q's device
    mask: Tensor | None = None  # bool (batch | 1, heads | 1, rows | 1, columns | 1): True = may attend
    cu_seqlens_q: Tensor | None = None  # int32 or int64 (batch + 1,): both or none
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0  # varlen: rows of bias and mask; dense: seqlen_q
    max_seqlen_k: int = 0
    seqused_q: Tensor | None = None  # int32 or int64 (batch,): real rows are [leftpad, seqused)
    seqused_k: Tensor | None = None
    leftpad_q: Tensor | None = None
    leftpad_k: Tensor | None = None
    deterministic: bool = False
    block_kinds: Tensor | None = None  # the four of a BlockMask, contiguous, on q's device: all or none
    block_patterns: Tensor | None = None
    key_lists: Tensor | None = None
    query_lists: Tensor | None = None
    family: int = 0  # of the GPU kernels that may serve the forward: see `_ops.FAMILIES`; 0 = any

    @property
    def is_varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def has_lengths(self) -> bool:
        """Whether tensors say where the sequences are: their contents can be wrong."""
        return (
            self.cu_seqlens_q is not None
            or self.seqused_q is not None
            or self.seqused_k is not None
            or self.leftpad_q is not None
            or self.leftpad_k is not None
        )

    @property
    def block_size(self) -> tuple[int, int]:
        """(rows, keys) of the block mask's blocks; (0, 0) without one."""
        return (0, 0) if self.block_patterns is None else (self.block_patterns.shape[1], self.block_patterns.shape[2])

    @property
    def has_window(self) -> bool:
        """Whether there is a diagonal: what a row sees depends on where it is."""
        return self.causal or self.window_left >= 0 or self.window_right >= 0

    @property
    def drops(self) -> bool:
        """Whether dropout drops anything: probabilities are multiples of 2^-16, less than half of it is none."""
        return draw_threshold(self.dropout_p) > 0

    @property
    def has_tensors(self) -> bool:
        return not (
            self.dropout_seed is None
            and self.alibi_slopes is None
            and self.mask is None
            and self.cu_seqlens_q is None
            and self.seqused_q is None
            and self.seqused_k is None
            and self.leftpad_q is None
            and self.leftpad_k is None
            and self.block_kinds is None
        )

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (
            self.dropout_seed,
            self.alibi_slopes,
            self.mask,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.seqused_q,
            self.seqused_k,
            self.leftpad_q,
            self.leftpad_k,
            self.block_kinds,
            self.block_patterns,
            self.key_lists,
            self.query_lists,
        )

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Problem:
        """The problem with other tensors, in the order of `tensors`."""
        seed, slopes, mask, cu_q, cu_k, used_q, used_k, pad_q, pad_k, kinds, patterns, key_lists, query_lists = tensors
        return self._replace(
            dropout_seed=seed,
            alibi_slopes=slopes,
            mask=mask,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            seqused_q=used_q,
            seqused_k=used_k,
            leftpad_q=pad_q,
            leftpad_k=pad_k,
            block_kinds=kinds,
            block_patterns=patterns,
            key_lists=key_lists,
            query_lists=query_lists,
        )
