"""One call from end to end: check it, choose a backend, run it under autograd. Every public function ends here."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from flash_attn import _ops, autograd, checks
from flash_attn.block_mask import BlockMask, lists_of
from flash_attn.problem import Problem
from flash_attn.softmax_dmask import softmax_dmask

# How calls without optional tensors were served that passed the checks before: over a few tokens, checking them again
# would take longer than the attention.
_SERVED: dict[tuple | None, tuple[Problem, str]] = {}
_MOST_SERVED = 1024
_NUMBERS = frozenset((float, int, bool, str, type(None)))


def refuse(name: str, value: object | None, why: str) -> None:
    if value is not None:
        raise NotImplementedError(f"{name}: {why}")


def contents_can_be_read(q: Tensor) -> bool:
    """Not while torch traces or transforms the call: then the op checks, when it runs."""
    return not (q.device.type == "meta" or is_compiling() or torch._C._are_functorch_transforms_active())


def has_contents(q: Tensor, problem: Problem) -> bool:
    """Not meta and fake tensors."""
    from torch._subclasses.fake_tensor import is_fake  # which warns where there is no numpy

    return not any(x is not None and (x.device.type == "meta" or is_fake(x)) for x in (q, *problem.tensors()))


_READS_LENGTHS = 'backend="reference" reads cu_seqlens, seqused and leftpad on the host, and there is nothing to read'


def require_contents(q: Tensor, problem: Problem) -> None:
    """What the reference backend needs of lengths. Without fullgraph, torch.compile leaves its graph here."""
    if is_dynamo_compiling():
        torch._dynamo.graph_break(
            msg=f"{_READS_LENGTHS} while torch.compile traces: the other backends can be compiled"
        )
    elif not has_contents(q, problem):
        raise NotImplementedError(f"{_READS_LENGTHS} in meta and fake tensors: the other backends take them")


def is_reachable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether wgmma kernels can read tensors that lie so, or only the op can say."""
    return not contents_can_be_read(q) or _ops.is_reachable(q, k, v)


def gpu_plan(
    backend: str, q: Tensor, k: Tensor, v: Tensor, problem: Problem, bias: Tensor | None, in_full: bool = True
) -> _ops.GpuPlan:
    """The kernel that would serve a call with this backend, "auto", "mma_sync" or "wgmma".

    in_full: with its lengths, heads and strides; else, whether there is a kernel for what changes less often.
    """
    index = q.device.index if q.device.index is not None else torch.cuda.current_device()
    variant, family = _ops.variant_of(problem, bias), _ops.FAMILIES.get(backend, 0)
    of_call = (index, q.dtype, q.shape[-1], v.shape[-1], variant, problem.block_size)
    if not in_full:
        return _ops.gpu_plan(*of_call, family=family)
    group = q.shape[-2] // max(1, k.shape[-2])
    in_detail = (problem.max_seqlen_k, problem.has_window, is_reachable(q, k, v), family, problem.max_seqlen_q, group)
    return _ops.gpu_plan(*of_call, *in_detail)


@torch.compiler.assume_constant_result
def refusals_while_tracing(
    index: int | None, dtype: torch.dtype, dims: tuple[int, int], variant: str, block_size: tuple[int, int],
    has_window: bool, backend: str,
) -> tuple[str, str]:  # fmt: skip
    """Why the backend, and mma_sync, have no kernel; empty: there is one. Run by the compiler, which keeps the answer:
    the plan itself, an op without tensors, would become part of the graph. What addresses, strides and the number of
    keys decide, the op says when the graph runs."""
    index = torch.cuda.current_device() if index is None else index
    families = (_ops.FAMILIES.get(backend, 0), _ops.FAMILIES["mma_sync"])
    plans = (_ops.gpu_plan(index, dtype, *dims, variant, block_size, 0, has_window, True, f) for f in families)
    return tuple(plan.reason for plan in plans)  # type: ignore[return-value]


def choose_backend(backend: str, q: Tensor, k: Tensor, v: Tensor, problem: Problem, bias: Tensor | None) -> str:
    """The backend that serves a call, or an error that says what would. Of "auto" on a GPU it is "mma_sync", which has
    a kernel for all that the library serves; the library itself takes one of wgmma where it can."""
    checks.backend_name(backend)
    if backend == "reference":
        return backend
    asked, device = backend, q.device.type
    if backend == "auto":
        backend = "mma_sync" if device == "cuda" else "cpu"
    otherwise = 'backend="reference" computes the same in plain PyTorch on any device'
    if not (available := _ops.is_available(backend)):
        raise NotImplementedError(f'backend="{backend}" cannot be used: {available.reason}; {otherwise}')
    serves = ("cpu", "meta") if backend == "cpu" else ("cuda",)
    if device not in serves:
        raise NotImplementedError(f'backend="{backend}" has no kernel for {device} tensors; {otherwise}')
    if device == "cuda":
        if is_compiling():
            dims = operator.index(q.shape[-1]), operator.index(v.shape[-1])  # numbers, on which the graph then depends
            rows, keys = problem.block_size
            call = _ops.variant_of(problem, bias), (operator.index(rows), operator.index(keys)), problem.has_window
            reason, of_mma_sync = refusals_while_tracing(q.device.index, q.dtype, dims, *call, asked)
        else:
            reason = of_mma_sync = gpu_plan(asked, q, k, v, problem, bias, in_full=backend == "wgmma").reason
            if reason and backend == "wgmma":
                of_mma_sync = gpu_plan("mma_sync", q, k, v, problem, bias, in_full=False).reason
        if reason:
            if backend == "wgmma" and not of_mma_sync:
                otherwise = 'backend="mma_sync" serves this call'
            raise NotImplementedError(f'backend="{backend}": {reason}; {otherwise}')
    return backend


def autocast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Under autocast all of q, k and v in autocast's dtype, as torch's own matrix products do, and a half-precision
    bias with them; a bias in fp32 stays as it is, fp64 too, and a sink is fp32 in any case."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    if bias is not None and bias.dtype in (torch.float16, torch.bfloat16):
        bias = bias.to(dtype)
    return q, k, v, bias


def plain_call(q: Tensor, k: Tensor, v: Tensor, options: tuple, window_size: Sequence[int]) -> tuple | None:
    """All that decides about a call without optional tensors; None where that can't be said, or must not be kept.

    The types of the options belong to it: 1 and True are equal, but not equally good.
    """
    if type(window_size) is not tuple or torch._C._get_tracing_state() is not None:
        return None
    options += window_size
    types = tuple(map(type, options))
    device = q.device
    if not _NUMBERS.issuperset(types) or device.type == "meta" or torch.is_autocast_enabled(device.type):
        return None
    shapes = (q.shape, k.shape, v.shape)
    kinds = (q.dtype, k.dtype, v.dtype, device, k.device, v.device, q.layout, k.layout, v.layout)
    return shapes, kinds, options, types, torch.are_deterministic_algorithms_enabled()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    bias: Tensor | None,
    mask: Tensor | None,
    block_mask: BlockMask | None,
    learnable_sink: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    leftpad_q: Tensor | None,
    leftpad_k: Tensor | None,
    dropout_seed: Tensor | None,
    return_lse: bool,
    backend: str,
    upper_left: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    call = None
    if (
        not is_compiling()  # which would keep a guard on what has been served
        and bias is None
        and mask is None
        and cu_seqlens_q is None
        and cu_seqlens_k is None
        and seqused_k is None
        and seqused_q is None
        and leftpad_k is None
        and leftpad_q is None
        and alibi_slopes is None
        and learnable_sink is None
        and dropout_seed is None
        and block_mask is None
        and type(dropout_p) is float
        and dropout_p == 0.0
        and not return_attn_probs
        and isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
    ):
        options = (dropout_p, softmax_scale, causal, softcap, deterministic, upper_left, backend)
        try:
            call = plain_call(q, k, v, options, window_size)
            served = _SERVED.get(call)
        except (RuntimeError, TypeError):  # a nested tensor has no shape, symbolic sizes have no hash
            call = served = None
        # Strides are not part of what is remembered, and decide for wgmma.
        if served is not None and (backend != "wgmma" or is_reachable(q, k, v)):
            out, lse = autograd.attention(q, k, v, None, None, *served)
            return (out, lse) if return_lse else out

    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.require_tensor(name, x)
    if bias is not None:
        checks.require_tensor("bias", bias)
    q, k, v, bias = autocast(q, k, v, bias)
    bias, sink, problem = checks.attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        bias=bias,
        mask=mask,
        learnable_sink=learnable_sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        dropout_seed=dropout_seed,
        upper_left=upper_left,
        blocks=lists_of(block_mask),
    )
    asked, backend = backend, choose_backend(backend, q, k, v, problem, bias)
    if asked in _ops.FAMILIES:
        problem = problem._replace(family=_ops.FAMILIES[asked])
    if problem.has_lengths and (backend == "reference" or (backend == "cpu" and problem.drops)):
        # The reference backend reads the lengths on the host anyway. The CPU library checks them itself, in the op,
        # which is too late to leave the generator untouched where a seed is drawn.
        if backend == "reference":
            require_contents(q, problem)
        if contents_can_be_read(q) and has_contents(q, problem):
            checks.validate_problem(q, k, problem)
    problem = checks.draw_seed(problem, q)
    if call is not None:
        if len(_SERVED) >= _MOST_SERVED:
            _SERVED.clear()
        _SERVED[call] = problem, backend
    out, lse = autograd.attention(q, k, v, bias, sink, problem, backend)
    if return_attn_probs:
        return out, lse, softmax_dmask(q, k, bias, problem) if problem.drops else out.new_empty(0)
    return (out, lse) if return_lse else out
