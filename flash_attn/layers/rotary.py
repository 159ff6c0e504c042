"""Rotary position embedding: queries and keys are rotated by angles that grow with their positions.

Plain PyTorch on any device: differentiable to any order, in place or not, and without graph breaks. Element pairs
(x1, x2) of the first rotary_dim = 2 · cos.shape[-1] elements of the head dim become

    x1 cos - x2 sin,  x1 sin + x2 cos        the gradient is the opposite rotation; the elements behind stay as they are

Pairs are (x[i], x[i + rotary_dim / 2]), or neighbours (x[2 i], x[2 i + 1]) if `interleaved`. Products are taken in fp32
(fp64 for fp64) and rounded once, to x's dtype.

Sources: Su et al., "RoFormer" (2021), eq. 34; `scale_base`: Sun et al., "A length-extrapolatable transformer" (2022).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flash_attn import checks
from flash_attn.problem import compute_dtype


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Every pair (x1, x2) of the last axis of x as (-x2, x1): a quarter turn."""
    x1, x2 = _pairs(x, interleaved)
    return _from_pairs(-x2, x1, interleaved)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)


def _from_pairs(x1: Tensor, x2: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((x1, x2), dim=-1).flatten(-2) if interleaved else torch.cat((x1, x2), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool) -> Tensor:
    """x with its pairs rotated; cos and sin (..., rotary_dim / 2) broadcast to the pairs."""
    dtype, rotary_dim = compute_dtype(x.dtype), 2 * cos.shape[-1]
    cos, sin, turning = cos.to(dtype), sin.to(dtype), x[..., :rotary_dim]
    if inplace and (cos.requires_grad or sin.requires_grad):
        turning = turning.clone()  # their gradients need what is overwritten below
    x1, x2 = _pairs(turning.to(dtype), interleaved)
    turned = _from_pairs(x1 * cos - x2 * sin, x1 * sin + x2 * cos, interleaved).to(x.dtype)
    if inplace:
        x[..., :rotary_dim].copy_(turned)
        return x
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor, names: tuple[str, str] = ("cos", "sin")) -> None:
    for name, table in zip(names, (cos, sin), strict=True):
        checks.require_tensor(name, table)
        fits = table.dim() == 2 and table.is_floating_point()
        checks.require(fits, name, table, "must be floating point (seqlen_rotary, rotary_dim / 2)")
        checks.require(table.device == x.device, name, table, f"must be on x's device, {x.device}")
    checks.require(sin.shape == cos.shape, names[1], sin, f"must have {names[0]}'s shape, {cos.shape}")
    rule = f"must have at most head dim / 2 = {x.shape[-1] // 2} columns"
    checks.require(2 * cos.shape[-1] <= x.shape[-1], names[0], cos, rule)


def _positions(
    x: Tensor, rows: int, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[slice | Tensor, Tensor | None]:
    """Which row of the tables each row of x takes: a slice, (batch, seqlen) or varlen (total,); and, varlen, which rows
    of x belong to a sequence. `rows`: how many the tables have."""
    is_varlen = cu_seqlens is not None
    batch = x.shape[0]
    if is_varlen:
        cu_seqlens = checks.indices("cu_seqlens", cu_seqlens, None, x)
        batch = cu_seqlens.shape[0] - 1
        checks.require(batch >= 0, "cu_seqlens", cu_seqlens, "must have shape (batch + 1,)")
        checks.require_option(max_seqlen is not None, "max_seqlen", None, "must be given with cu_seqlens")
    longest = checks.length("max_seqlen", max_seqlen) if is_varlen else x.shape[1]
    if isinstance(seqlen_offsets, Tensor):
        seqlen_offsets = checks.indices("seqlen_offsets", seqlen_offsets, batch, x)
        checks.require(longest <= rows, "cos", f"{rows} rows", f"must have at least {longest} rows, one a position")
    else:
        offset = checks.length("seqlen_offsets", seqlen_offsets)
        needed = offset + longest
        checks.require(needed <= rows, "cos", f"{rows} rows", f"must have at least {needed} rows, one a position")
        if not is_varlen:
            return slice(offset, needed), None

    if is_varlen:
        row = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens, row.to(cu_seqlens.dtype), right=True) - 1
        inside = (sequence >= 0) & (sequence < batch)
        sequence = torch.where(inside, sequence, 0)
        offset = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) and batch > 0 else seqlen_offsets
        positions = torch.where(inside, row - cu_seqlens[sequence] + offset, 0)
    else:
        inside = None
        positions = seqlen_offsets.long()[:, None] + torch.arange(x.shape[1], device=x.device)
    if positions.device.type == "cpu" and positions.numel() > 0 and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in positions.aminmax())
        fits = low >= 0 and high < rows
        checks.require(fits, "seqlen_offsets", f"positions {low} to {high}", f"must lead to positions in [0, {rows})")
    return positions, inside


def _apply(
    parts: list[tuple[Tensor, Tensor, Tensor]],
    interleaved: bool,
    inplace: bool,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> list[Tensor]:
    """Rotates each x of (x, cos, sin), checked; x is (batch, seqlen, ..., dim) or varlen (total, ..., dim)."""
    x, cos, _ = parts[0]
    positions, inside = _positions(x, cos.shape[0], seqlen_offsets, cu_seqlens, max_seqlen)

    def chosen(table: Tensor, x: Tensor, outside: float) -> Tensor:
        if isinstance(positions, slice):
            table = table[positions]
        else:
            table = table.index_select(0, positions.flatten()).unflatten(0, positions.shape)
        if inside is not None:
            table = torch.where(inside[:, None], table, outside)
        between = x.dim() - (2 if cu_seqlens is not None else 3)  # axes between seqlen and dim
        return table[(..., *(None,) * between, slice(None))]

    return [_rotate(x, chosen(cos, x, 1.0), chosen(sin, x, 0.0), interleaved, inplace) for x, cos, sin in parts]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first rotary_dim elements of every head.

    Args:
        x: (batch, seqlen, heads, dim), or with `cu_seqlens` (total, heads, dim); floating point.
        cos, sin: (seqlen_rotary, rotary_dim / 2), any float dtype, rotary_dim <= dim: row p serves position p.
        interleaved: pairs are neighbours; False: they are half of rotary_dim apart.
        inplace: write the result into x and return x (autograd knows; a leaf that requires grad is an error).
        seqlen_offsets: position of the first row of each sequence: an int, or int32 or int64 (batch,).
        cu_seqlens: int32 or int64 (batch + 1,); positions count from the start of each sequence. Rows of x that belong
            to no sequence stay as they are. max_seqlen: at least the longest sequence; needed with cu_seqlens.

    Returns: x's shape and dtype. Differentiable to any order in x, cos and sin.

    Raises: RuntimeError for tensors that do not fit, or positions that the tables do not reach (on the CPU; a GPU
        asserts); ValueError for other options.

    Equivalent to, for `interleaved` and rotary_dim == dim, with complex tables c = cos + i sin::

        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        torch.view_as_real(z * c[offset : offset + seqlen, None]).flatten(-2)
    """
    checks.require_tensor("x", x)
    layout = "(batch, seqlen, heads, dim)" if cu_seqlens is None else "(total, heads, dim)"
    fits = x.dim() == (4 if cu_seqlens is None else 3) and x.is_floating_point()
    checks.require(fits, "x", x, f"must be floating point {layout}")
    _check_tables(x, cos, sin)
    return _apply([(x, cos, sin)], interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)[0]


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`apply_rotary_emb` with one table row for each row of x: cos, sin (seqlen, rotary_dim / 2) or
    (batch, seqlen, rotary_dim / 2); x (batch, seqlen, heads, dim)."""
    checks.require(2 * cos.shape[-1] <= x.shape[-1], "cos", cos, f"must fit head dim {x.shape[-1]}")
    return _rotate(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved, inplace=False)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates q and k within qkv, in place; v stays. Returns qkv.

    Args:
        qkv: (batch, seqlen, 3, heads, dim); or, with `num_heads_q`, (batch, seqlen, num_heads_q + 2 heads_k, dim): the
            heads of q, then those of k, then those of v. With `cu_seqlens`, (total, ...) for (batch, seqlen, ...).
        cos_k, sin_k: tables for k; None: those of q.
        The others: as in `apply_rotary_emb`.
    """
    checks.require_tensor("qkv", qkv)
    head_axes = 3 if num_heads_q is None else 2
    first = "(batch, seqlen" if cu_seqlens is None else "(total"
    layout = f"{first}, 3, heads, dim)" if num_heads_q is None else f"{first}, num_heads_q + 2 heads_k, dim)"
    fits = qkv.dim() == head_axes + (2 if cu_seqlens is None else 1) and qkv.is_floating_point()
    checks.require(fits, "qkv", qkv, f"must be floating point {layout}")
    if num_heads_q is None:
        checks.require(qkv.shape[-3] == 3, "qkv", qkv, f"must be {layout}")
        q, k, both = qkv.select(-3, 0), qkv.select(-3, 1), qkv.narrow(-3, 0, 2)
    else:
        rest = qkv.shape[-2] - num_heads_q
        checks.require(rest >= 0 and rest % 2 == 0, "qkv", qkv, f"must be {layout}, heads_k an integer")
        heads_k = rest // 2
        q, k = qkv.narrow(-2, 0, num_heads_q), qkv.narrow(-2, num_heads_q, heads_k)
        both = qkv.narrow(-2, 0, num_heads_q + heads_k)
    _check_tables(qkv, cos, sin)
    parts = [(both, cos, sin)]
    if cos_k is not None or sin_k is not None:
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        _check_tables(qkv, cos_k, sin_k, ("cos_k", "sin_k"))
        checks.require(cos_k.shape == cos.shape, "cos_k", cos_k, f"must have cos's shape, {cos.shape}")
        parts = [(q, cos, sin), (k, cos_k, sin_k)]
    _apply(parts, interleaved, True, seqlen_offsets, cu_seqlens, max_seqlen)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates k within kv (batch, seqlen, 2, heads_k, dim), varlen (total, 2, heads_k, dim), in place. Returns kv.

    The arguments are those of `apply_rotary_emb`.
    """
    checks.require_tensor("kv", kv)
    layout = "(batch, seqlen, 2, heads_k, dim)" if cu_seqlens is None else "(total, 2, heads_k, dim)"
    fits = kv.dim() == (5 if cu_seqlens is None else 4) and kv.shape[-3] == 2 and kv.is_floating_point()
    checks.require(fits, "kv", kv, f"must be floating point {layout}")
    _check_tables(kv, cos, sin)
    _apply([(kv.select(-3, 0), cos, sin)], interleaved, True, seqlen_offsets, cu_seqlens, max_seqlen)
    return kv


class RotaryEmbedding(nn.Module):
    """Rotates q and k in place; keeps the tables, which grow with the sequences that it meets.

    Args:
        dim: rotary_dim, even, at most the head dim.
        base: frequency i is base^(-2 i / dim) per position.
        interleaved: pairs are neighbours.
        scale_base: XPos: q is also multiplied by zeta^(p / scale_base) and k by zeta^(-p / scale_base), with
            zeta_i = (2 i + 0.4 dim) / (1.4 dim) and p counted from the middle of the table. p cancels in q·k as long as
            both come from tables of one length: give `max_seqlen` where keys are kept from call to call.

    Buffers, not in the state dict, fp32 whatever the module is cast to: `inv_freq` (dim / 2,), which may be overwritten
    before the first call, and `scale` (dim / 2,) or None. Tables are computed and kept in fp32 (fp64 for fp64 inputs).
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        checks.require_option(dim >= 0 and dim % 2 == 0, "dim", dim, "must be an even number >= 0")
        fits = scale_base is None or scale_base > 0
        checks.require_option(fits, "scale_base", scale_base, "must be > 0, or None for no scaling")
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", torch.empty(dim // 2, device=device, dtype=torch.float32), persistent=False)
        scale = None if scale_base is None else torch.empty_like(self.inv_freq)
        self.register_buffer("scale", scale, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills the buffers from dim and base, and drops the tables."""
        even = torch.arange(0, self.dim, 2, device=self.inv_freq.device, dtype=torch.float32)
        self.inv_freq = 1.0 / self.base ** (even / max(self.dim, 1))
        if self.scale is not None:
            self.scale = (even + 0.4 * self.dim) / (1.4 * max(self.dim, 1))
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Moves the buffers but does not cast them: in bf16 position 257 would be turned like 256."""
        before = self.inv_freq, self.scale
        super()._apply(fn, recurse)
        device = self.inv_freq.device
        if before[0].is_meta and device.type != "meta":  # to_empty: there is nothing to copy
            self.reset_parameters()
        else:
            self.inv_freq, self.scale = (None if x is None else x.to(device) for x in before)
        return self

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Makes tables (seqlen, dim / 2) of `dtype` on `device` unless those at hand serve."""
        device = self.inv_freq.device if device is None else torch.device(device)
        dtype = torch.float32 if dtype is None else dtype
        cached = self._cos_cached
        if cached is not None and seqlen <= self._seq_len_cached and cached.device == device and cached.dtype == dtype:
            # Tables made in inference mode are of no use to autograd. (torch.compile cannot ask.)
            if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not cached.is_inference():
                return
        self._seq_len_cached = seqlen
        accurate = compute_dtype(dtype)
        position = torch.arange(seqlen, device=device, dtype=accurate)
        angle = torch.outer(position, self.inv_freq.to(device=device, dtype=accurate))
        cos, sin = torch.cos(angle), torch.sin(angle)
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (position - seqlen // 2) / self.scale_base
        scale = self.scale.to(device=device, dtype=accurate) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place.

        Args:
            qkv: as in `apply_rotary_emb_qkv_`; with `kv` given, q alone: (batch, seqlen, heads, dim) or (total, ...).
            kv: (batch, seqlen, 2, heads_k, dim) or (total, 2, heads_k, dim).
            seqlen_offset: position of the first row: an int, or int32 or int64 (batch,).
            max_seqlen: dense: the length that the tables need at least, offsets included; None: from qkv and the
                offsets, which are then read on the host. With `cu_seqlens`: the longest sequence, without offsets.
            num_heads_q: as in `apply_rotary_emb_qkv_`.

        Returns: qkv, or (q, kv): the tensors given.
        """
        if cu_seqlens is not None:
            checks.require_option(max_seqlen is not None, "max_seqlen", None, "must be given with cu_seqlens")
        seqlen = qkv.shape[1] if cu_seqlens is None else checks.length("max_seqlen", max_seqlen)
        if not isinstance(seqlen_offset, Tensor):
            seqlen = seqlen + checks.length("seqlen_offset", seqlen_offset)
        elif cu_seqlens is not None or max_seqlen is None:
            seqlen = seqlen + (int(seqlen_offset.max()) if seqlen_offset.numel() > 0 else 0)
        if cu_seqlens is None and max_seqlen is not None:
            seqlen = max(seqlen, checks.length("max_seqlen", max_seqlen))
        self._update_cos_sin_cache(seqlen, device=qkv.device, dtype=compute_dtype(qkv.dtype))
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        longest = None if cu_seqlens is None else max_seqlen
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv,
                cos,
                sin,
                cos_k,
                sin_k,
                interleaved=self.interleaved,
                seqlen_offsets=seqlen_offset,
                num_heads_q=num_heads_q,
                cu_seqlens=cu_seqlens,
                max_seqlen=longest,
            )
        checks.require_option(num_heads_q is None, "num_heads_q", num_heads_q, "must be None where kv is given")
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset, cu_seqlens, longest)
        k_tables = (cos, sin) if cos_k is None else (cos_k, sin_k)
        kv = apply_rotary_emb_kv_(
            kv, *k_tables, self.interleaved, seqlen_offset, cu_seqlens=cu_seqlens, max_seqlen=longest
        )
        return q, kv
