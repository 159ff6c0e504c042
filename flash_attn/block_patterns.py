"""The patterns behind `BlockMask`'s builders, as bool tensors of blocks; their lists; what a kind makes visible."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.dropout import high_word, low_word, philox4x32

HIDDEN, FULL, FIRST_PATTERN = 0, 1, 2  # kinds, as in csrc/common/block_mask.h


class Grid(NamedTuple):
    """The blocks of a mask; its last rows and columns may be cut off by the lengths."""

    seqlen_q: int
    seqlen_k: int
    rows: int  # of a block
    keys: int
    device: torch.device | str | None

    @property
    def size(self) -> tuple[int, int]:
        return -(-self.seqlen_q // self.rows), -(-self.seqlen_k // self.keys)

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Of the query blocks, (m, 1), and of the key blocks, (n,)."""
        m, n = (torch.arange(count, device=self.device) for count in self.size)
        return m[:, None], n


def visible_elements(kinds: Tensor, patterns: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Which elements are visible: bool like `kinds`, which holds the kind of each element's block.

    rows, columns: the elements' places, (rows, 1) and (columns,): whole rows and columns of the mask.
    """
    visible = kinds == FULL
    if patterns.shape[0] == 0:
        return visible
    _, block_rows, block_keys = patterns.shape
    number = (kinds - FIRST_PATTERN).clamp(min=0).long()
    return visible | ((kinds >= FIRST_PATTERN) & patterns[number, rows % block_rows, columns % block_keys])


def union(kinds_a: Tensor, patterns_a: Tensor, kinds_b: Tensor, patterns_b: Tensor) -> tuple[Tensor, Tensor]:
    """Kinds and patterns of what either of two masks makes visible. Where both have a pattern, the result has one of
    its own: for each pair of patterns, or for each block, whichever are fewer."""
    a, b = torch.broadcast_tensors(kinds_a, kinds_b)
    count_a, count_b = patterns_a.shape[0], patterns_b.shape[0]
    number_a, number_b = ((kinds - FIRST_PATTERN).clamp(min=0).long() for kinds in (a, b))
    if count_a * count_b <= a.numel():
        both = (patterns_a[:, None] | patterns_b[None]).flatten(0, 1)
        pair = number_a * count_b + number_b
    else:
        both = (patterns_a[number_a] | patterns_b[number_b]).flatten(0, -3)
        pair = torch.arange(a.numel(), device=a.device).view(a.shape)
    moved_b = torch.where(b >= FIRST_PATTERN, b + count_a, b)
    either = torch.where((a == FULL) | (b == FULL), FULL, torch.where(b == HIDDEN, a, moved_b))
    in_both = (a >= FIRST_PATTERN) & (b >= FIRST_PATTERN)
    kinds = torch.where(in_both, pair + (count_a + count_b + FIRST_PATTERN), either)
    return kinds.to(torch.int32), torch.cat([patterns_a, patterns_b, both])


def visit_lists(visited: Tensor) -> Tensor:
    """int32 (..., rows, 1 + columns) of a bool (..., rows, columns): the count and the columns of each row's Trues."""
    columns = visited.shape[-1]
    index = torch.arange(columns, dtype=torch.int32, device=visited.device)
    ascending = torch.where(visited, index, columns).sort(-1).values
    return torch.cat([visited.sum(-1, keepdim=True), ascending], -1).to(torch.int32)


def local(grid: Grid, window: tuple[int, int]) -> Tensor:
    m, n = grid.numbers()
    diagonal = grid.seqlen_k - grid.seqlen_q
    first_row, first_key = m * grid.rows + diagonal, n * grid.keys
    last_row = (first_row + grid.rows - 1).clamp(max=grid.seqlen_q - 1 + diagonal)
    last_key = (first_key + grid.keys - 1).clamp(max=grid.seqlen_k - 1)
    left, right = window
    blocks = torch.ones(grid.size, dtype=torch.bool, device=grid.device)
    if left >= 0:
        blocks = blocks & (last_key >= first_row - left)
    return blocks & (first_key <= last_row + right) if right >= 0 else blocks


def strided(grid: Grid, window: tuple[int, int], stride: int) -> Tensor:
    return local(grid, window) | (grid.numbers()[1] % stride == stride - 1)


def longformer(grid: Grid, window: tuple[int, int], global_tokens: int) -> Tensor:
    m, n = grid.numbers()
    return local(grid, window) | (m * grid.rows < global_tokens) | (n * grid.keys < global_tokens)


def bigbird(grid: Grid, window_blocks: int, global_blocks: int, random_blocks: int, heads: int, seed: int) -> Tensor:
    """(heads, m, n). Drawn by Philox, so that a seed means the same mask on every device, and under torch.compile."""
    rows, columns = grid.size
    m, n = grid.numbers()
    centre = m * columns // max(1, rows)
    fixed = ((n - centre).abs() <= (window_blocks - 1) // 2) & (window_blocks > 0)
    fixed = fixed | (m < global_blocks) | (n < global_blocks)
    head = torch.arange(heads, device=grid.device).view(-1, 1, 1)
    zero = torch.zeros_like(head + m + n)
    scores = philox4x32((head + zero, m + zero, n + zero, zero), (low_word(zero + seed), high_word(zero + seed)))[0]
    chosen = scores.masked_fill(fixed, -1).argsort(stable=True, dim=-1, descending=True)[..., :random_blocks]
    return fixed.expand(heads, rows, columns).scatter(-1, chosen, True)


def butterfly(grid: Grid, max_stride: int | None) -> Tensor:
    """i XOR j has at most one bit, and that is below max_stride; a shorter axis gathers the blocks it stands for."""
    rows, columns = grid.size
    n = max(rows, columns)
    i = torch.arange(n, device=grid.device)
    differ = i[:, None] ^ i
    blocks = (differ & (differ - 1)) == 0
    if max_stride is not None:
        blocks = blocks & (differ <= max_stride // 2)
    for axis, size in enumerate((rows, columns)):
        if size < n:
            gathered = torch.zeros(size, n, dtype=torch.int32, device=grid.device)
            along = gathered.index_add(0, i * size // n, (blocks if axis == 0 else blocks.mT).int()) > 0
            blocks = along if axis == 0 else along.mT
    return blocks
