"""The GPU kernels as a backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_attn import _ops, reference
from flash_attn._ops import forward as forward


def backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """`_ops.backward`, but where its kernels refuse: they take no block mask yet, and they sum the gradient of a
    bias that broadcasts in any order, where `deterministic` asks for one that is always the same."""
    *_, bias, _sink, problem, needs = arguments
    in_any_order = problem.deterministic and bias is not None and needs[3] and 1 in bias.shape
    return (reference if in_any_order or problem.block_kinds is not None else _ops).backward(*arguments)
