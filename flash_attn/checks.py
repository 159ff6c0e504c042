"""Every rule about arguments, written once. What passes here is a `Problem` that all backends understand alike.

Tensors raise RuntimeError (shape, dtype, device), options that are no tensors ValueError, combinations that nothing
serves NotImplementedError; each message names the argument, its value and the rule. Real, meta and fake tensors get the
same answers. Nothing here reads the contents of a tensor, except `validate`, which says so.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn.problem import BlockLists, Problem, compute_dtype

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
LARGEST = sys.float_info.max
LONGEST = 2**62  # safe to add to
BACKENDS = ("auto", "cpu", "mma_sync", "wgmma", "reference")


def require(condition: Any, name: str, value: object, rule: str, *details: object) -> None:
    """RuntimeError naming argument, value and rule. A symbolic condition (torch.compile, export) becomes a guard.

    The rule is a format of `details`: nothing is put into words while all is well, for that would take longer than
    attention over a few tokens.
    """
    if condition is True:
        return
    if isinstance(condition, Tensor):  # torch.jit.trace makes tensors of sizes
        condition = bool(condition)

    def message() -> str:
        return f"{name} {rule.format(*details)}; got {show(value) if isinstance(value, Tensor) else value}"

    if isinstance(condition, bool):
        if not condition:
            raise RuntimeError(message())
    elif torch.compiler.is_dynamo_compiling():
        torch._check(condition)  # no message: dynamo cannot trace one that names a symbolic value
    else:
        torch._check(condition, message)


def require_option(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{name} {rule}; got {value}")


def show(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"


def require_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        raise RuntimeError(f"{name} must be a dense (strided) tensor; got layout {x.layout}, nested: {x.is_nested}")


# ---- Options that are no tensors ------------------------------------------------------------------------------------


def constant(name: str, x: Tensor) -> None:
    """A tensor that has no derivative here, whatever mode would ask for one."""
    has_tangent = (
        x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None if _in_forward_mode() else False
    )
    if has_tangent or (x.requires_grad and torch.is_grad_enabled()):
        raise NotImplementedError(
            f"{name} is a constant here and has no gradient: detach it, or put it into q or `bias`"
        )


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def number(name: str, value: object, low: float, high: float, rule: str) -> float:
    """A float in [low, high], which are finite; 0-dim tensors count as numbers."""
    if isinstance(value, Tensor):
        constant(name, value)
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError(value)
        x = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{name} {rule}; got {value!r}") from error
    require_option(low <= x <= high, name, value, rule)  # false for NaN
    return x


def integer(name: str, value: object, low: int, rule: str) -> int:
    """An integer in [low, 2^62]; 0-dim integer tensors count."""
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    try:
        x = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} {rule}; got {value!r}") from error
    require_option(low <= x <= LONGEST, name, value, rule)
    return x


def length(name: str, value: object) -> int:
    return integer(name, value, 0, "must be an integer in [0, 2^62]")


def window(window_size: Sequence[int]) -> tuple[int, int]:
    rule = "must be (left, right), each a whole number of keys >= 0, or -1 for unlimited"
    try:
        left, right = window_size
        left, right = operator.index(left), operator.index(right)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"window_size {rule}; got {window_size!r}") from error
    require_option(left >= -1 and right >= -1, "window_size", (left, right), rule)
    return min(left, LONGEST), min(right, LONGEST)  # wider than any sequence is unlimited


def flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, (str, bytes)) or (isinstance(value, Tensor) and value.numel() != 1):
        raise ValueError(f"{name} must be True or False; got {value!r}")
    return bool(value)


def backend_name(backend: object) -> str:
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    return backend  # type: ignore[return-value]


# ---- Tensors --------------------------------------------------------------------------------------------------------


def on_device_of_q(name: str, x: Tensor, q: Tensor) -> None:
    require(x.device == q.device, name, x, "must be on q's device, {}", q.device)


def operands(q: Tensor, k: Tensor, v: Tensor, is_varlen: bool) -> None:
    dtype, device = q.dtype, q.device
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    for name, x, shape in (("q", q, shape_q), ("k", k, shape_k), ("v", v, shape_v)):
        if len(shape) != (3 if is_varlen else 4):
            rows, side = "total" if is_varlen else "batch, seqlen", "q" if name == "q" else "k"
            require(False, name, x, "must be ({}_{}, {}, dim)", rows, side, "heads" if side == "q" else "heads_k")
        if x.dtype not in FLOATS:
            require(False, name, x, "must be float16, bfloat16, float32 or float64")
        if x.dtype != dtype:
            require(False, name, x, "must have q's dtype, {}", dtype)
        if x.device != device:
            on_device_of_q(name, x, q)
    *rows_k, heads_k, dim = shape_k
    *rows_v, heads_v, dim_v = shape_v
    heads = shape_q[-2]
    if not is_varlen:
        require(rows_k[0] == shape_q[0], "k", k, "must have q's batch size, {}", shape_q[0])
        require(rows_v[0] == rows_k[0], "v", v, "must have k's batch size, {}", rows_k[0])
    require(dim == shape_q[-1], "k", k, "must have q's head dim, {}", shape_q[-1])
    require(rows_v[-1] == rows_k[-1], "v", v, "must have as many rows as k, {}", rows_k[-1])
    require(heads_v == heads_k, "v", v, "must have k's number of heads, {}", heads_k)
    divides = heads_k == heads or (heads_k > 0 and heads % heads_k == 0)
    require(divides, "k", k, "must have a number of heads that divides q's, {}", heads)
    if dim == 0:
        require(0 in shape_q[:-1], "q", q, "must have a head dim of at least 1")
    if dim_v == 0:
        require(0 in shape_v[:-1], "v", v, "must have a head dim of at least 1")


def indices(name: str, x: Tensor | None, size: int | None, q: Tensor) -> Tensor | None:
    """A vector of lengths or offsets: int32 or int64, on q's device; made contiguous."""
    if x is None:
        return None
    require_tensor(name, x)
    fits = x.dim() == 1 and (size is None or x.shape[0] == size)
    require(fits, name, x, "must have shape ({},)", "batch + 1" if size is None else size)
    require(x.dtype in INTEGERS, name, x, "must be int32 or int64")
    on_device_of_q(name, x, q)
    return x.contiguous()


def broadcastable(name: str, x: Tensor, q: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """x as a 4-D view that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
    rule = "must be broadcastable to (batch, heads, seqlen_q, seqlen_k) = {}"
    require(x.dim() <= 4, name, x, rule, sizes)
    for given, full in zip(reversed(x.shape), reversed(sizes), strict=False):
        require(given == 1 or given == full, name, x, rule, sizes)
    on_device_of_q(name, x, q)
    return x if x.dim() == 4 else x[(None,) * (4 - x.dim())]


def block_lists(blocks: BlockLists | None, q: Tensor, sizes: tuple[int, int, int, int]) -> tuple[Tensor | None, ...]:
    """The four tensors of a block mask that fits a call on (batch, heads, seqlen_q, seqlen_k)."""
    if blocks is None:
        return None, None, None, None
    kinds = blocks.kinds
    rule = "must be made for the call's batch, heads, seqlen_q, seqlen_k = {} (max_seqlen of packed sequences), its "
    rule += "batch and heads or 1; it is made for {} × {}"
    lengths = (blocks.seqlen_q, blocks.seqlen_k)
    for given, full in zip(kinds.shape[:2], sizes[:2], strict=True):
        require(given == 1 or given == full, "block_mask", kinds, rule, sizes, *lengths)
    for given, full in zip(lengths, sizes[2:], strict=True):
        require(given == full, "block_mask", kinds, rule, sizes, *lengths)
    on_device_of_q("block_mask", kinds, q)
    return blocks[:4]


def slopes(alibi_slopes: Tensor | None, q: Tensor, batch: int, heads: int) -> Tensor | None:
    if alibi_slopes is None:
        return None
    require_tensor("alibi_slopes", alibi_slopes)
    dtype = compute_dtype(q.dtype)
    require(alibi_slopes.dtype in (torch.float32, dtype), "alibi_slopes", alibi_slopes, "must be float32")
    shape = tuple(alibi_slopes.shape)
    fits = shape == (heads,) or shape == (batch, heads)
    require(fits, "alibi_slopes", alibi_slopes, "must have shape ({},) or ({}, {})", heads, batch, heads)
    on_device_of_q("alibi_slopes", alibi_slopes, q)
    constant("alibi_slopes", alibi_slopes)
    return alibi_slopes.detach().to(dtype).reshape(-1, heads) if heads else alibi_slopes.detach().to(dtype).view(1, 0)


def seed(dropout_seed: Tensor | None, q: Tensor) -> Tensor | None:
    if dropout_seed is None:
        return None
    require_tensor("dropout_seed", dropout_seed)
    fits = dropout_seed.dtype == torch.int64 and tuple(dropout_seed.shape) == (2,)
    require(fits, "dropout_seed", dropout_seed, "must be int64 of shape (2,)")
    on_device_of_q("dropout_seed", dropout_seed, q)
    return dropout_seed.contiguous()


def draw_seed(problem: Problem, q: Tensor) -> Problem:
    """The last step before a call that drops: a seed from torch's generator on q's device, if none was given."""
    if not problem.drops:
        return problem if problem.dropout_seed is None else problem._replace(dropout_seed=None)
    if problem.dropout_seed is not None:
        return problem
    return problem._replace(dropout_seed=torch.randint(0, 2**62, (2,), dtype=torch.int64, device=q.device))


# ---- The whole call -------------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    upper_left: bool = False,
    seqlen_q: int | None = None,
    blocks: BlockLists | None = None,
) -> tuple[Tensor | None, Tensor | None, Problem]:
    """Checks one call. Returns bias (4-D) and sink (compute dtype), still attached to autograd, and the Problem.

    No seed is drawn yet (`draw_seed`): an error leaves torch's generator as it was.
    `seqlen_q`: the length of the query side where q holds only some of its rows. `blocks`: of a block mask.
    """
    is_varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    operands(q, k, v, is_varlen)
    if bias is not None:
        require_tensor("bias", bias)
    if is_varlen:
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            require_tensor(name, x)
        cu_seqlens_q = indices("cu_seqlens_q", cu_seqlens_q, None, q)
        require(cu_seqlens_q.shape[0] >= 1, "cu_seqlens_q", cu_seqlens_q, "must have shape (batch + 1,)")
        batch = cu_seqlens_q.shape[0] - 1
        cu_seqlens_k = indices("cu_seqlens_k", cu_seqlens_k, batch + 1, q)
        seqlen_q, seqlen_k = length("max_seqlen_q", max_seqlen_q), length("max_seqlen_k", max_seqlen_k)
    else:
        batch, seqlen_k = q.shape[0], k.shape[1]
        seqlen_q = q.shape[1] if seqlen_q is None else seqlen_q
    heads = q.shape[-2]
    sizes = (batch, heads, seqlen_q, seqlen_k)

    if softmax_scale is None:
        scale = float(max(q.shape[-1], 1)) ** -0.5
    else:
        scale = number("softmax_scale", softmax_scale, -LARGEST, LARGEST, "must be a finite number")
    left, right = window(window_size)
    dropout_p = number("dropout_p", dropout_p, 0.0, 1.0, "must be a probability in [0, 1]")
    softcap = number("softcap", softcap, 0.0, 1e30, "must be in [0, 1e30] (0 = off)")

    if bias is not None:
        bias = broadcastable("bias", bias, q, sizes)
        require(bias.dtype in (q.dtype, torch.float32), "bias", bias, f"must have q's dtype, {q.dtype}, or float32")
    if mask is not None:
        require_tensor("mask", mask)
        require(mask.dtype == torch.bool, "mask", mask, "must be bool (True = may attend)")
        mask = broadcastable("mask", mask, q, sizes)
    sink = learnable_sink
    if sink is not None:
        require_tensor("learnable_sink", sink)
        require(tuple(sink.shape) == (heads,), "learnable_sink", sink, f"must have shape ({heads},), one per head")
        require(sink.dtype in FLOATS, "learnable_sink", sink, "must be a floating-point tensor")
        on_device_of_q("learnable_sink", sink, q)
        sink = sink.to(compute_dtype(q.dtype)).contiguous()

    kinds, patterns, key_lists, query_lists = block_lists(blocks, q, sizes)
    problem = Problem(
        softmax_scale=scale,
        causal=flag("causal", causal),
        window_left=left,
        window_right=right,
        upper_left=upper_left,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=seed(dropout_seed, q),
        alibi_slopes=slopes(alibi_slopes, q, batch, heads),
        mask=mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        seqused_q=indices("seqused_q", seqused_q, batch, q),
        seqused_k=indices("seqused_k", seqused_k, batch, q),
        leftpad_q=indices("leftpad_q", leftpad_q, batch, q),
        leftpad_k=indices("leftpad_k", leftpad_k, batch, q),
        deterministic=flag("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled(),
        block_kinds=kinds,
        block_patterns=patterns,
        key_lists=key_lists,
        query_lists=query_lists,
    )
    return bias, sink, problem


def packed(name: str, x: Tensor, parts: int, is_varlen: bool) -> tuple[Tensor, ...]:
    """The `parts` tensors of qkv or kv, as views."""
    require_tensor(name, x)
    axis = 1 if is_varlen else 2
    layout = f"(total, {parts}, heads, dim)" if is_varlen else f"(batch, seqlen, {parts}, heads, dim)"
    require(x.dim() == axis + 3, name, x, "must be {}", layout)
    require(x.shape[axis] == parts, name, x, "must be {}", layout)
    return x.unbind(axis)


# ---- Contents -------------------------------------------------------------------------------------------------------


def validate(
    q: Tensor,
    k: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> None:
    """Checks what cu_seqlens, lengths and left pads *contain*. It waits for the device, as kernels never do: to debug.

    On the CPU every attention call does it anyway. Arguments are those of the attention functions.

    Raises:
        RuntimeError: cu_seqlens decrease or leave the tensor, a segment is longer than max_seqlen, or
            0 <= leftpad <= seqused <= rows of the segment does not hold; the message names the sequence.
    """
    sides = (
        ("q", q, cu_seqlens_q, max_seqlen_q, seqused_q, leftpad_q),
        ("k", k, cu_seqlens_k, max_seqlen_k, seqused_k, leftpad_k),
    )
    for side, x, cu_seqlens, max_seqlen, seqused, leftpad in sides:
        if cu_seqlens is not None:
            cu = cu_seqlens.tolist()
            inside = cu[0] >= 0 and cu[-1] <= x.shape[0]
            require(inside, f"cu_seqlens_{side}", cu, f"must lie in [0, {x.shape[0]}], the rows of {side}")
            rows = [after - before for before, after in zip(cu, cu[1:], strict=False)]
            require(min(rows, default=0) >= 0, f"cu_seqlens_{side}", cu, "must not decrease")
            if max_seqlen is not None:
                rule = f"must be at least the longest sequence, {max(rows, default=0)} rows"
                require(max(rows, default=0) <= int(max_seqlen), f"max_seqlen_{side}", max_seqlen, rule)
        else:
            rows = [x.shape[1]] * x.shape[0]
        used = rows if seqused is None else seqused.tolist()
        pads = [0] * len(rows) if leftpad is None else leftpad.tolist()
        for b, (capacity, end, pad) in enumerate(zip(rows, used, pads, strict=True)):
            require(0 <= end <= capacity, f"seqused_{side}[{b}]", end, f"must be in [0, {capacity}], the rows it has")
            require(0 <= pad <= end, f"leftpad_{side}[{b}]", pad, f"must be in [0, {end}], the rows that are used")


def validate_problem(q: Tensor, k: Tensor, problem: Problem) -> None:
    """`validate` for a call that has been checked."""
    validate(
        q,
        k,
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=problem.cu_seqlens_k,
        max_seqlen_q=problem.max_seqlen_q,
        max_seqlen_k=problem.max_seqlen_k,
        seqused_q=problem.seqused_q,
        seqused_k=problem.seqused_k,
        leftpad_q=problem.leftpad_q,
        leftpad_k=problem.leftpad_k,
    )
