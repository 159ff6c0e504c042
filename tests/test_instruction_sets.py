"""The CPU backend with every instruction set of this machine, by the hidden switch: the same bounds for all."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import cases
import pytest
import torch

from flash_attn import explain

NAMES = ("portable", "avx2", "avx512", "amx")


@pytest.fixture(params=range(len(NAMES)), ids=NAMES)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    limit = torch.ops.flash_attn.cpu_limit_instruction_set
    if limit(request.param) != request.param:
        limit(len(NAMES) - 1)
        pytest.skip(f"this machine has no {NAMES[request.param]}")
    yield NAMES[request.param]
    limit(len(NAMES) - 1)


def test_explain_names_it(instruction_set: str) -> None:
    x = torch.empty(1, 4, 1, 8, dtype=torch.bfloat16)
    assert explain(x, x, x).kernel == f"{instruction_set} micro-kernels"


@pytest.mark.parametrize("seed", range(40))
def test_sample_of_options(instruction_set: str, seed: int) -> None:
    case = cases.random_case(random.Random(1000 + seed))
    cases.check(case, "cpu", "auto")


@pytest.mark.parametrize("seed", range(40))
def test_sample_in_bf16(instruction_set: str, seed: int) -> None:
    """Bf16 has instructions of its own."""
    case = cases.random_case(random.Random(2000 + seed))
    cases.check(dataclasses.replace(case, dtype=torch.bfloat16), "cpu", "auto")
