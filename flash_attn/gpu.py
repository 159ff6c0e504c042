"""The GPU kernels as a backend. They have a forward alone so far: gradients come from the reference backend's backward,
which rebuilds P from the statistics that the kernels wrote. Right, with linear memory, and slow.
"""

from __future__ import annotations

from torch import Tensor

from flash_attn import reference
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
    """dq, dk, dv, dbias, dsink: None where `needs` says so."""
    return reference.backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, needs)
