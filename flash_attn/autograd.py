"""Ties forward and backward of a backend together for autograd."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from flash_attn import _ops, reference
from flash_attn.problem import Problem

BACKENDS: dict[str, ModuleType] = {"cpu": _ops, "reference": reference}


class Attention(torch.autograd.Function):
    """(q, k, v, bias, sink, problem, backend) -> (out, lse), differentiable in the first five, through out and lse."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        problem: Problem,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        out, lse, statistics = BACKENDS[backend].forward(q, k, v, bias, sink, problem)
        ctx.save_for_backward(q, k, v, bias, sink, out, statistics, *problem.tensors())
        ctx.problem = problem.without_tensors()
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = tuple(ctx.needs_input_grad[:5])
        if dout is None and dlse is None:
            return (None,) * 7
        q, k, v, bias, sink, out, statistics, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        problem = ctx.problem.with_tensors(tensors)
        gradients = BACKENDS[ctx.backend].backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, needs)
        return *gradients, None, None


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, problem: Problem, backend: str
) -> tuple[Tensor, Tensor]:
    """out and lse of a checked call. Where no gradient is wanted nothing is saved."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, bias, sink)):
        return Attention.apply(q, k, v, bias, sink, problem, backend)
    out, lse, _ = BACKENDS[backend].forward(q, k, v, bias, sink, problem)
    return out, lse
