"""The built library on CPUs that lack instructions of this machine: emulated ones, which such an instruction kills.

Python, torch and the library run under QEMU's user-mode emulation (Debian's package qemu-user), as they are installed.
QEMU plays every CPU up to AVX2; none of its versions knows AVX-512 or AMX, not even for a CPU model that has them.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import flash_attn

ROOT = Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CXX", "g++")
QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static") or ""

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the micro-kernels of other machines are portable"),
    pytest.mark.skipif(not QEMU, reason="needs qemu-x86_64 (package qemu-user)"),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler"),
    pytest.mark.skipif("FLASH_ATTN_SANITIZED" in os.environ, reason="the sanitizers do not run under QEMU"),
]

AVX512 = ("avx512", "avx512_bf16", "amx")
# What each CPU is known not to have. What it has beyond that depends on QEMU: the probes find out.
LACKS = {
    "Nehalem": ("avx2", *AVX512),  # of 2008: SSE 4.2
    "Haswell": AVX512,  # of 2013: the first with AVX2 and FMA
    "SandyBridge": ("avx2", *AVX512),  # AVX without AVX2 and FMA
    "Haswell,-fma": ("avx2", *AVX512),  # AVX2 without FMA, as some VIA CPUs
    "Skylake-Server": ("avx512_bf16", "amx"),  # with AVX-512, if QEMU had it
    "max": (),  # all that QEMU has
}
CPUS = [pytest.param(cpu, marks=pytest.mark.full) for cpu in LACKS]  # 40 s each

# Every dtype, with tails in all dimensions, plain and with all options that change a tile: held against fp64. Then the
# usual head dims, which may have kernels of their own: that they end is what matters here.
SCRIPT = """
    import torch
    x = torch.randn(65, 65, requires_grad=True)
    (x @ x.bfloat16().float()).exp().sum().backward()
    print("torch runs", flush=True)

    import cases
    from dataclasses import replace
    x = torch.empty(1, 1, 1, 1)
    print(cases.flash_attn.explain(x, x, x).kernel.split()[0], flush=True)
    plain = cases.Case(batch=1, heads=1, heads_k=1, seqlen_q=67, seqlen_k=135, dim=24, dim_v=17)
    modified = replace(plain, heads=2, seqlen_q=40, seqlen_k=40, causal=True, softcap=3.0, alibi="heads", bias="hqk",
                       mask="qk", sink=True, dropout_p=0.1, lse_grad=True)
    for case in (plain, modified):
        for dtype in cases.NAMES:
            cases.check(replace(case, dtype=dtype).differentiable)
    for dim in (64, 128):
        for dtype in cases.NAMES:
            q, k, v = (torch.randn(1, 130, 1, dim, dtype=dtype, requires_grad=True) for _ in range(3))
            cases.flash_attn.flash_attn_func(q, k, v).sum().backward()
            assert all(x.grad.isfinite().all() for x in (q, k, v))
    print("done")
"""


def emulate(folder: Path, cpu: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs in `folder`, where QEMU leaves the core file of what it kills."""
    path = os.pathsep.join([str(Path(flash_attn.__file__).resolve().parent.parent), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = (QEMU, "-cpu", cpu, *command)
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=folder)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that executes instructions of the set that it is given."""
    binary = str(tmp_path_factory.mktemp("probe") / "probe")
    subprocess.run([COMPILER, "-std=c++20", str(ROOT / "tests/cpp/probe_instructions.cpp"), "-o", binary], check=True)
    if emulate(Path(binary).parent, "max", binary, "portable").returncode != 0:
        pytest.skip("QEMU runs no program here")
    return binary


def has(cpu: str, instruction_set: str, probe: str) -> bool:
    """Whether the emulated CPU executes the instructions of the set."""
    done = emulate(Path(probe).parent, cpu, probe, instruction_set)
    assert done.returncode in (0, -signal.SIGILL), done.stdout + done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("cpu", CPUS)
def test_no_instruction_that_the_cpu_lacks(cpu: str, probe: str) -> None:
    if not has(cpu, "portable", probe):
        pytest.skip(f"the C library of this system needs more than {cpu}")
    present = functools.partial(has, cpu, probe=probe)
    assert not any(map(present, LACKS[cpu])), "the emulator lets pass what this test must notice"
    expected = "avx512" if present("avx512") else "avx2" if present("avx2") else "portable"

    done = emulate(Path(probe).parent, cpu, sys.executable, "-c", textwrap.dedent(SCRIPT))
    lines = done.stdout.splitlines()
    if "torch runs" not in lines:
        pytest.skip(f"torch does not run on {cpu}: exit status {done.returncode}")
    assert done.returncode == 0 and lines[-1] == "done", f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert lines[1] == expected
