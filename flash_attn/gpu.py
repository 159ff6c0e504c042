"""The GPU kernels as a backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_attn import _ops, reference
from flash_attn._ops import forward as forward
from flash_attn.problem import Problem


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    problem: Problem,
    needs: tuple[bool, bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dbias, dsink: None where `needs` says so, and not computed."""
    # The kernels sum the gradient of a bias that broadcasts in any order.
    sums_bias = bias is not None and needs[3] and 1 in bias.shape
    backend: Any = reference if problem.deterministic and sums_bias else _ops
    return backend.backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, needs)
