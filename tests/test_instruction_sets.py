"""The CPU backend with every instruction set of this machine, by the hidden switch: the same bounds for all."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import cases
import pytest
import torch

from flash_attn import explain, flash_attn_func

NAMES = ("portable", "avx2", "avx512", "avx512_bf16", "amx")


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


@pytest.mark.parametrize(
    "options", ({}, {"softmax_scale": 1e9}, {"softmax_scale": 1e-39}, {"softmax_scale": 0.0}), ids=str
)
def test_huge_and_tiny_logits(instruction_set: str, options: dict[str, float]) -> None:
    """Logits up to 1e10, whose products with log2 e cannot be told apart; scales that are no normal numbers."""
    factor = 1.0 if options else 1e5
    q, k, v = (x.bfloat16() for x in torch.randn(3, 1, 100, 2, 32, generator=torch.Generator().manual_seed(0)))
    q, k = q * factor, k * factor
    out, lse = flash_attn_func(q, k, v, return_lse=True, **options)
    want, want_lse = flash_attn_func(*(x.double() for x in (q, k, v)), return_lse=True, backend="reference", **options)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", (1e4, 1e5))
def test_gradient_of_a_bias_beside_huge_logits(instruction_set: str, size: float) -> None:
    """Each row sees one key alone, so dS is 0: the statistics must be those of the scores that backward rebuilds."""
    generator = torch.Generator().manual_seed(1)
    q, k = (x.bfloat16() for x in torch.randn(2, 1, 9, 1, 33, generator=generator) * size)
    v, dout = (x.bfloat16() for x in torch.randn(2, 1, 9, 1, 33, generator=generator))
    bias = torch.randn(1, 1, 9, 9, generator=generator).bfloat16().requires_grad_()
    (found,) = torch.autograd.grad(flash_attn_func(q, k, v, bias=bias), bias, dout)
    assert found.abs().max() < 1e-5


@pytest.mark.parametrize("scale, softcap", ((1e9, 1e-30), (1.0, 1e-39), (1.0, 1e-46), (0.0, 1e-46)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_tiny_softcap(instruction_set: str, dtype: torch.dtype, scale: float, softcap: float) -> None:
    """scale / softcap is beyond fp32, and 0 times that is no number; all logits are 0."""
    x = torch.zeros(1, 3, 1, 8, dtype=dtype)
    assert (flash_attn_func(x, x, x + 1, softmax_scale=scale, softcap=softcap) == 1).all()
