"""A seeded random sample of the whole option space, forward and backward, against the fp64 oracle.

A failing point prints its `Case`; `cases.check(Case(...))` with its fields repeats it.
"""

from __future__ import annotations

import random

import cases
import pytest

QUICK, FULL = 200, 3000


def sample(count: int, seed: int) -> list[cases.Case]:
    """`count` points. The same seed gives the same points everywhere."""
    rng = random.Random(seed)
    return [cases.random_case(rng) for _ in range(count)]


@cases.with_targets(sample(QUICK, 20250))
def test_sample(case: cases.Case, target: cases.Target):
    cases.check(case, target.device, target.backend)


BLOCK = 100


@pytest.mark.full
@pytest.mark.parametrize("block", range(FULL // BLOCK))
@pytest.mark.parametrize("target", [t for t in cases.TARGETS if t != cases.REFERENCE], ids=str)
def test_large_sample(block: int, target: cases.Target):
    """100 points a test; all failing points of a block are reported together."""
    failures = []
    for case in sample(BLOCK, 1000 + block):
        try:
            cases.check(case, target.device, target.backend)
        except Exception as error:  # noqa: BLE001  every kind of failure belongs to its case
            failures.append(f"{case}\n    {case!r}\n    {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {BLOCK} points:\n" + "\n".join(failures)
