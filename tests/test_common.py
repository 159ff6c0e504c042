"""csrc/common and parts of csrc/cpu and csrc/gpu, by brute force in C++ programs of their own, under UBSan."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from test_build import build

ROOT = Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
FLAGS += ["-fsanitize=undefined", "-fno-sanitize-recover=all"]

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler")


def isa_objects(folder: Path) -> list[str]:
    """The micro-kernels of this machine's instruction sets, each with the flags that setup.py gives it."""
    objects = []
    for name, (machines, flags) in build.ISA_UNITS.items():
        if not machines or platform.machine() in machines:
            objects.append(str(folder / f"{name}.o"))
            source = str(ROOT / "csrc" / "cpu" / "isa" / f"{name}.cpp")
            subprocess.run([COMPILER, *FLAGS, *flags.split(), "-c", source, "-o", objects[-1]], check=True)
    return objects


def run(program: str, others: list[str], folder: Path, flags: list[str] = FLAGS) -> None:
    binary = str(folder / "program")
    subprocess.run([COMPILER, *flags, str(ROOT / "tests" / "cpp" / program), *others, "-o", binary], check=True)
    result = subprocess.run([binary], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split()[0]) > 1000


def test_common(tmp_path: Path) -> None:
    run("test_common.cpp", [], tmp_path)


def test_cpu_parts(tmp_path: Path) -> None:
    run("test_cpu_parts.cpp", [str(ROOT / "csrc/cpu/micro_kernels.cpp"), *isa_objects(tmp_path)], tmp_path)


@pytest.mark.parametrize("program", ("test_gpu_plan.cpp", "test_gpu_plan_hopper.cpp"))
def test_gpu_plan(program: str, tmp_path: Path) -> None:
    """Kernel, tile and order for cards with 48, 64, 99, 163 and 227 KB of shared memory: no GPU is needed."""
    run(program, [], tmp_path)


# Kernels as threads of the CPU; the folder's headers come before those of the same name in csrc.
ON_CPU = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-missing-field-initializers"]
ON_CPU += [f"-I{ROOT / 'tests' / 'cpp' / 'cuda_on_cpu'}", f"-I{ROOT / 'csrc'}", "-pthread"]


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_gpu_kernels_on_the_cpu(direction: str, tmp_path: Path) -> None:
    """The GPU kernels' own code, every thread of a CTA a thread: no GPU is needed."""
    run(f"test_gpu_{direction}.cpp", [], tmp_path, [*ON_CPU, "-DFLASH_ATTN_FEW_CASES"])


@pytest.mark.full
@pytest.mark.parametrize("flags", ([], ["-g", "-fsanitize=thread"]), ids=("values", "barriers"))
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_gpu_kernels_on_the_cpu_in_full(direction: str, flags: list[str], tmp_path: Path) -> None:
    """All tiles; and whether a barrier is missing, which ThreadSanitizer sees."""
    run(f"test_gpu_{direction}.cpp", [], tmp_path, [*ON_CPU, *flags])


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
def test_isa_objects_export_their_tables_alone(tmp_path: Path) -> None:
    """Whatever else they defined, the linker could give it to code that must run on older CPUs."""
    for path in isa_objects(tmp_path):
        command = ["nm", "--demangle", "--extern-only", "--defined-only", path]
        symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        name = Path(path).stem
        tables = {"avx512_bf16": ["avx512_bf16"], "amx": ["amx_bf16"]}.get(name, [f"{name}_fp32", f"{name}_fp64"])
        expected = [f"flash::cpu::isa::{table}" for table in tables]
        assert sorted(line.split()[-1] for line in symbols) == expected
