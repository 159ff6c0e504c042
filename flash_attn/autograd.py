"""Ties forward and backward of a backend together for autograd and torch.func: any order, forward mode, vmap."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.compiler import is_compiling

from flash_attn import _ops, gpu, higher_order, reference
from flash_attn.problem import Problem

BACKENDS: dict[str, ModuleType] = {"cpu": _ops, "mma_sync": gpu, "wgmma": gpu, "reference": reference}

Needs = tuple[bool, bool, bool, bool, bool]

_transforms_are_active = torch._C._are_functorch_transforms_active


def _by_example(function: type[Function], info: Any, in_dims: tuple, args: tuple) -> tuple[tuple, tuple]:
    """vmap by calling `function` once for each example and stacking what comes out."""

    if info.batch_size == 0:
        raise RuntimeError("vmap over a batch of size 0 has no example to learn the results' shapes from")

    def example(b: int) -> tuple:
        return tuple(_select(x, dim, b) for x, dim in zip(args, in_dims, strict=True))

    results = [function.apply(*example(b)) for b in range(info.batch_size)]
    outputs = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
    return outputs, tuple(None if x is None else 0 for x in outputs)


def _select(x: Any, dim: Any, b: int) -> Any:
    """Example b of an argument; a Problem has a dim for each of its fields."""
    if isinstance(x, Problem):
        return Problem(*(_select(field, d, b) for field, d in zip(x, dim, strict=True)))
    return x if dim is None or not isinstance(x, Tensor) else x.select(dim, b)


def _saved(problem: Problem) -> tuple[Tensor | None, ...]:
    """The tensors of a problem, for save_for_backward, which sees changes in place; nothing where there are none."""
    return problem.tensors() if problem.has_tensors else ()


def _restored(problem: Problem, tensors: list[Tensor | None]) -> Problem:
    return problem.with_tensors(tensors) if tensors else problem


def _without_tensors(problem: Problem) -> Problem:
    """What a context itself may keep of a problem."""
    return problem.with_tensors((None,) * len(problem.tensors())) if problem.has_tensors else problem


def _forward_mode_is_possible() -> bool:
    return forward_ad._current_level >= 0 or _transforms_are_active()


def _needs_plain_chunks(inputs: tuple[Tensor | None, ...]) -> bool:
    """Forward mode over another derivative. torch runs a Function's jvp with forward mode off, so an outer level would
    see zeros: these calls go through differentiable PyTorch, exact in any nesting, but with the memory of what they
    record."""
    if _transforms_are_active():
        levels = [level.key() for level in torch._C._functorch.get_interpreter_stack()]  # outermost first
        derivatives = [key for key in levels if key in (TransformType.Grad, TransformType.Jvp)]
        if forward_ad._current_level >= 0 and TransformType.Jvp not in derivatives:
            derivatives.insert(0, TransformType.Jvp)  # a plain dual level outside
        return TransformType.Jvp in derivatives[:-1]
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return forward_ad._current_level >= 0 and needs_grad


class TraceableAttention(Function):
    """(q, k, v, bias, sink, problem, backend) -> (out, lse, statistics), differentiable in the first five."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, problem: Problem, backend: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        return BACKENDS[backend].forward(q, k, v, bias, sink, problem)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, bias, sink, problem, backend = inputs
        out, lse, statistics = output
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, sink, out, statistics, *_saved(problem))
        if _forward_mode_is_possible():
            ctx.save_for_forward(q, k, v, bias, sink, out, lse, *_saved(problem))
        ctx.problem, ctx.backend = _without_tensors(problem), backend

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 7
        q, k, v, bias, sink, out, statistics, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        problem, needs = _restored(ctx.problem, tensors), tuple(ctx.needs_input_grad[:5])
        if is_compiling() or not (torch.is_grad_enabled() or _forward_mode_is_possible()):
            gradients = BACKENDS[ctx.backend].backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, needs)
        else:
            gradients = AttentionBackward.apply(
                dout, dlse, q, k, v, bias, sink, out, statistics, problem, ctx.backend, needs
            )
        return *gradients, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple, tuple]:
        return _by_example(Attention, info, in_dims, args)


class Attention(TraceableAttention):
    """The same with forward mode. torch.compile cannot trace a Function that defines jvp: hence two classes."""

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Any) -> tuple[Tensor, Tensor, None]:
        q, k, v, bias, sink, out, lse, *tensors = ctx.saved_tensors
        problem = _restored(ctx.problem, tensors)
        return *higher_order.tangents(input_tangents[:5], q, k, v, bias, sink, problem, out, lse), None


class EagerAttention(Attention):
    """The same for a plain call, without the statistics as an output: a Function with setup_context binds its
    arguments by name first, which takes 50 µs."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        problem: Problem,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        out, lse, statistics = BACKENDS[backend].forward(q, k, v, bias, sink, problem)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, sink, out, statistics, *_saved(problem))
        ctx.problem, ctx.backend = _without_tensors(problem), backend
        return out, lse

    setup_context = Function.setup_context


class AttentionBackward(Function):
    """Attention's backward as a function of its own, so that it has derivatives too. `out` and `statistics` are not
    arguments of it but what the forward has already computed from the others: no derivative goes through them."""

    @staticmethod
    def forward(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        statistics: Tensor,
        problem: Problem,
        backend: str,
        needs: Needs,
    ) -> tuple[Tensor | None, ...]:
        return BACKENDS[backend].backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor | None, ...]) -> None:
        dout, dlse, q, k, v, bias, sink, out, statistics, problem, backend, needs = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dout, dlse, q, k, v, bias, sink, *_saved(problem))
        if _forward_mode_is_possible():
            ctx.save_for_forward(q, k, v, bias, sink, out, statistics, *_saved(problem))
        ctx.problem, ctx.backend, ctx.needs = _without_tensors(problem), backend, needs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, dlse, q, k, v, bias, sink, *tensors = ctx.saved_tensors
        if all(cotangent is None for cotangent in cotangents):
            return (None,) * 12
        problem = _restored(ctx.problem, tensors)
        gradients = higher_order.backward_derivative(cotangents, dout, dlse, q, k, v, bias, sink, problem)
        return *gradients, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
        """Backward is linear in (dout, dlse). Tangents of its other inputs do not come here: attention() sends calls
        with those through plain differentiable PyTorch."""
        if any(isinstance(x, Tensor) for x in others):
            raise NotImplementedError(
                "forward mode over the backward of attention, where the forward ran outside of it: compute the forward "
                "inside the dual level, or use `standard_attention`"
            )
        q, k, v, bias, sink, out, statistics, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        problem = _restored(ctx.problem, tensors)
        return BACKENDS[ctx.backend].backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, ctx.needs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple, tuple]:
        return _by_example(AttentionBackward, info, in_dims, args)


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, problem: Problem, backend: str
) -> tuple[Tensor, Tensor]:
    """out and lse of a checked call. Where no gradient is wanted nothing is saved: no-grad mode keeps no context."""
    if is_compiling():
        if _forward_mode_is_possible():
            # The compiler would trace through the forward and take its derivative for zero.
            raise NotImplementedError(
                "torch.compile around a torch.func transform or forward mode of attention: compile the function inside "
                "it, or neither; `standard_attention` can be compiled so"
            )
        if backend != "reference":
            return _ops.forward(q, k, v, bias, sink, problem)[:2]  # the graph holds the op, which has its derivative
        # A Function takes no tensor twice there.
        k = k.view_as(k) if k is q else k
        v = v.view_as(v) if v is q or v is k else v
        function = TraceableAttention
    elif _forward_mode_is_possible():
        if _needs_plain_chunks((q, k, v, bias, sink)):
            return higher_order.plain_forward(q, k, v, bias, sink, problem)
        function = Attention
    elif torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    ):
        function = EagerAttention
    else:
        return BACKENDS[backend].forward(q, k, v, bias, sink, problem)[:2]
    return function.apply(q, k, v, bias, sink, problem, backend)[:2]


# ---- The ops themselves, in graphs that hold them: differentiable like a call ------------------------------------


def _has_derivative(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether this level of torch.func, or plain autograd, wants a derivative of the op."""
    given = [x for x in tensors if x is not None]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in given):
        if _transforms_are_active():
            raise NotImplementedError(
                "torch.func's forward mode of a graph that holds attention as an op: apply it to the function itself"
            )
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def _backend_of(q: Tensor) -> str:
    return "mma_sync" if q.device.type == "cuda" else "cpu"


@cache
def _single_level(function: type[Function]) -> type:
    """The same function for autograd alone: what torch.func itself makes of a Function for each of its levels."""
    names = ("forward", "setup_context", "backward", "jvp")
    return type(
        function.__name__, (_SingleLevelFunction,), {name: staticmethod(getattr(function, name)) for name in names}
    )


def _apply_here(function: type[Function], *args: Any) -> tuple:
    """apply for one level of torch.func, which has taken its levels apart before it comes to an op's kernel."""
    with enable_single_level_autograd_function():
        return _single_level(function).apply(*args)


def _op_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_derivative((q, k, v, bias, sink)):
        return _apply_here(Attention, q, k, v, bias, sink, Problem(*options), _backend_of(q))
    with _ops.below_autograd():
        return _ops.attention_forward(q, k, v, bias, sink, *options)


def _op_forward_plain(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _op_forward(q, k, v, None, None, *options)


def _op_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    if _has_derivative((dout, dlse, q, k, v, bias, sink)):
        needs, problem = rest[:5], Problem(*rest[5:])
        results = _apply_here(
            AttentionBackward, dout, dlse, q, k, v, bias, sink, out, statistics, problem, _backend_of(q), needs
        )
        return tuple(q.new_empty(0) if x is None else x for x in results)
    with _ops.below_autograd():
        return _ops.attention_backward(dout, dlse, q, k, v, out, statistics, bias, sink, *rest)


if _ops.AVAILABILITY["cpu"]:
    _autograd_kernels = torch.library.Library(_ops.NAMESPACE, "IMPL")
    _autograd_kernels.impl("attention_forward", _op_forward, "Autograd")
    _autograd_kernels.impl("attention_forward_plain", _op_forward_plain, "Autograd")
    _autograd_kernels.impl("attention_backward", _op_backward, "Autograd")
