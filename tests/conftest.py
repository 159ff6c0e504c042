"""Fixtures shared by all tests. The devices are in `cases.TARGETS`: whatever is present."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: spinning starves others on busy machines

import cases  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(params=[pytest.param(t, marks=cases.marks(t), id=str(t)) for t in cases.TARGETS])
def target(request: pytest.FixtureRequest) -> cases.Target:
    """Device and backend, for tests that call the library themselves."""
    return request.param


@pytest.fixture(autouse=True)
def _fixed_state():
    """Every test starts from the same generator state and leaves the number of threads as it was."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    # An error inside a checkpoint keeps its hooks, with torch up to 2.11, until its traceback is collected.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        gc.collect()
