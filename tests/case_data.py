"""The values, memory layouts and block masks that a `Case` builds its inputs from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import flash_attn

if TYPE_CHECKING:
    import cases


def values(case: cases.Case, shape: tuple[int, ...], role: str, g: torch.Generator) -> Tensor:
    """Values of q, k or v; fp64 ones fill their mantissas: sums of products of fp32 values would be exact."""
    full = torch.float64 if case.dtype == torch.float64 else torch.float32
    x = torch.randn(shape, generator=g, dtype=full)
    if case.data == "offset_k" and role == "k":
        x = x + 8 * torch.randn(shape[-1], generator=g)
    if case.data == "outliers" and role in "qk":
        x[..., 0] *= 100 if role == "k" else 10
        x[..., -1] *= 100
    if case.data == "equal_rows" and x.numel():
        x = x.flatten(0, -3)[:1].expand(x.flatten(0, -3).shape).reshape(shape).clone()
    if case.data == "one_hot" and x.numel():
        x = 4.0 * torch.nn.functional.one_hot(torch.randint(0, shape[-1], shape[:-1], generator=g), shape[-1]).to(full)
    return x


def strided(x: Tensor, layout: str, role: str) -> Tensor:
    """The same values in other memory, surrounded by NaN where there are gaps."""
    if layout == "heads_first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "expanded" and role in "kv" and x.shape[-2] > 1:  # one head for all
        return x[..., :1, :].expand(x.shape)
    if layout == "last_stride_2":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "slice":
        wide = torch.full([n + 3 for n in x.shape], math.nan, dtype=x.dtype)
        part = wide[tuple(slice(1, n + 1) for n in x.shape)]
        part.copy_(x)
        return part
    return x


def on_device(t: Tensor | None, device: str) -> Tensor | None:
    """To the device, strides kept (also those of expanded and stepped views)."""
    if t is None or device == "cpu":
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) if 0 not in t.stride() else (
        t[tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())].to(device).expand(t.shape)
    )  # fmt: skip


def block_mask(
    pattern: str, sizes: tuple[int, int, int, int], g: torch.Generator
) -> tuple[flash_attn.BlockMask, Tensor]:
    """A random block mask for (batch, heads, seqlen_q, seqlen_k) and, from the definition, what it lets queries see.

    pattern: leading axes ("bh", "b1", ...), block size, density, "e" for an element mask, as in "1h 16x64 0.5 e". The
    density may also be "rows", "columns" (every other query or key block visits, or is visited by, nothing) or "one".
    """
    axes, size, density, *element = pattern.split()
    rows, keys = (int(n) for n in size.split("x"))
    batch, heads, seqlen_q, seqlen_k = sizes
    shape = [batch if axes[0] == "b" else 1, heads if axes[1] == "h" else 1, -(-seqlen_q // rows), -(-seqlen_k // keys)]
    if density == "one":
        blocks = torch.zeros(shape, dtype=torch.bool)
        if blocks[0, 0].numel():
            blocks[..., torch.randint(shape[2], (), generator=g), torch.randint(shape[3], (), generator=g)] = True
    else:
        p = {"rows": 0.6, "columns": 0.6}.get(density)
        blocks = torch.rand(shape, generator=g) < (float(density) if p is None else p)
        if density == "rows":
            blocks[:, :, ::2] = False
        if density == "columns":
            blocks[..., ::2] = False
    visible = torch.zeros(*shape[:2], seqlen_q, seqlen_k, dtype=torch.bool)
    for m in range(shape[2]):
        for n in range(shape[3]):
            visible[:, :, m * rows : (m + 1) * rows, n * keys : (n + 1) * keys] = blocks[:, :, m : m + 1, n : n + 1]
    elements = None
    if element:
        elements = torch.rand(shape[0], 1, seqlen_q, seqlen_k, generator=g) < 0.8
        elements[..., : rows + 1, : keys + 1] = True  # a full block among partial ones
        visible = visible & elements
    return flash_attn.BlockMask(blocks, seqlen_q, seqlen_k, (rows, keys), element_mask=elements), visible
