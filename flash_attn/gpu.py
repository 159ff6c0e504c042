"""The GPU kernels as a backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_attn import _ops, reference
from flash_attn._ops import forward as forward


def backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """`_ops.backward`, but where its kernels refuse: they sum the gradient of a bias that broadcasts, and dq under a
    block mask, in any order, and `deterministic` asks for one that is always the same."""
    *_, bias, _sink, problem, needs = arguments
    in_any_order = bias is not None and needs[3] and 1 in bias.shape
    in_any_order = in_any_order or (problem.block_kinds is not None and needs[0])
    return (reference if in_any_order and problem.deterministic else _ops).backward(*arguments)
