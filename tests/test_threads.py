"""Threads: their number does not matter, fork works after use, calls may come from many, the GIL is released."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import cases
import pytest
import torch
from cases import Case

import flash_attn
from flash_attn import flash_attn_func

PACKAGE_PARENT = Path(flash_attn.__file__).resolve().parent.parent


def run_script(script: str, timeout: float = 120) -> str:
    """The output of `script` in a fresh Python that finds this package; a hang or a crash fails the test.

    GPUs are hidden from it: torch's autograd refuses to work in a forked child of a process that sees one.
    """
    prelude = f"import sys; sys.path.insert(0, {str(PACKAGE_PARENT)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


CASES = [
    Case(batch=1, heads=1, heads_k=1, seqlen_q=300, seqlen_k=400, dim=64, dim_v=64, causal=True, deterministic=True),
    Case(batch=1, heads=1, heads_k=1, seqlen_q=3, seqlen_k=2000, dim=64, dim_v=64, deterministic=True),
    Case(batch=3, heads=6, heads_k=2, seqlen_q=129, seqlen_k=97, bias="1h1k", sink=True, dropout_p=0.1,
    deterministic=True),
    Case(batch=3, heads=4, heads_k=4, seqlen_q=129, seqlen_k=97, bias="1111", dtype=torch.bfloat16, deterministic=True),
    Case(batch=5, heads=2, heads_k=1, seqlen_q=200, seqlen_k=150, varlen=True, bias="11qk", deterministic=True, seed=5),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bitwise_the_same_with_any_number_of_threads(case):
    """Output, LSE and all gradients (dq, dk, dv, dbias, dsink), bit for bit, with 1, 2, 3 and 7 threads."""
    results = []
    for threads in (1, 2, 3, 7, 1):
        torch.set_num_threads(threads)
        results.append(cases.run(case.differentiable))
    for other in results[1:]:
        assert torch.equal(results[0].out, other.out) and torch.equal(results[0].lse, other.lse)
        for name, grad in results[0].grads.items():
            assert torch.equal(grad, other.grads[name]), f"d{name}"


def test_dk_dv_are_bitwise_the_same_without_deterministic():
    """Always, also where dq may differ."""
    case = Case(batch=2, heads=6, heads_k=2, seqlen_q=300, seqlen_k=257, bias="11qk").differentiable
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(cases.run(case))
    for other in results[1:]:
        for name in "kvb":
            assert torch.equal(results[0].grads[name], other.grads[name]), f"d{name}"


def test_use_deterministic_algorithms_turns_it_on():
    case = Case(batch=1, heads=1, heads_k=1, seqlen_q=300, seqlen_k=400, dim=64, dim_v=64).differentiable
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(cases.run(case))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(g, results[1].grads[n]) for n, g in results[0].grads.items())


# torch's own parallel loops (a large sum, a copy) hang in a child that was forked after their threads had started: all
# torch operations here are on one thread or small, only the library runs on several.
WORK = """
    import torch, flash_attn
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 300, 4, 32) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    def work(threads=2):
        torch.set_num_threads(threads)
        out = flash_attn.flash_attn_func(q, k, v, causal=True, deterministic=True)
        grads = torch.autograd.grad(out, leaves, dout)
        torch.set_num_threads(1)
        return [out.detach(), *grads]
"""


def test_fork_after_use():
    """A child forked after forward and backward on two threads does both again and gets the same bits."""
    run_script(
        WORK
        + """
    import os, signal, sys, time
    want = work()
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            same = all(torch.equal(a, b) for a, b in zip(work(), want))
            os._exit(0 if same else 3)
        deadline = time.time() + 30
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.time() > deadline:
                os.kill(pid, signal.SIGKILL)
                sys.exit("the child hangs")
            time.sleep(0.01)
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, status
    assert all(torch.equal(a, b) for a, b in zip(work(), want))
    """
    )


def test_data_loader_workers():
    """Attention in two DataLoader workers, forked after the parent used it."""
    run_script(
        WORK
        + """
    want = work()
    class Attention(torch.utils.data.Dataset):
        def __len__(self): return 6
        def __getitem__(self, i): return work(1 + i % 2)[0]
    for out in torch.utils.data.DataLoader(Attention(), batch_size=None, num_workers=2, timeout=30):
        assert torch.equal(out, want[0])
    """
    )


def test_fork_before_use():
    """A child that is the first to call, while the parent never did."""
    run_script(
        WORK
        + """
    import os
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    work()
    """
    )


def test_calls_from_many_threads():
    """Eight Python threads at once, each with its own inputs and number of threads: everyone's own result."""
    inputs = [[torch.randn(1, 129, 2, 16, requires_grad=True) for _ in range(3)] for _ in range(8)]

    def work(n: int) -> list[torch.Tensor]:
        out = flash_attn_func(*inputs[n], causal=True, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out.sum(), inputs[n])]

    want = [work(n) for n in range(8)]
    wrong: list[object] = []

    def repeat(n: int) -> None:
        try:
            torch.set_num_threads(1 + n % 3)
            for _ in range(10):
                if not all(torch.equal(a, b) for a, b in zip(work(n), want[n], strict=True)):
                    wrong.append(n)
        except Exception as error:  # noqa: BLE001  shown by the assertion below
            wrong.append(error)

    workers = [threading.Thread(target=repeat, args=(n,)) for n in range(8)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    assert not any(w.is_alive() for w in workers) and not wrong, wrong


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_the_gil_is_released(direction):
    """Another Python thread advances during one long call."""
    torch.set_num_threads(1)
    n = 3000
    q = torch.randn(1, n, 2, 64, requires_grad=direction == "backward")
    out = flash_attn_func(q, q, q)
    stamps: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            stamps.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    start = time.perf_counter()
    if direction == "forward":
        flash_attn_func(q, q, q)
    else:
        out.backward(torch.ones_like(out))
    end = time.perf_counter()
    stop.set()
    ticker.join()
    inside = [t for t in stamps if start < t < end]
    assert len(inside) > 5, f"{len(inside)} ticks in {end - start:.3f} s"
