"""csrc/common and parts of csrc/cpu, by brute force in C++ programs of their own, under UBSan."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CXX", "g++")

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler")


@pytest.mark.parametrize(
    ("program", "sources"),
    [
        ("test_common.cpp", []),
        ("test_cpu_parts.cpp", ["csrc/cpu/micro_kernels.cpp", "csrc/cpu/isa/portable.cpp"]),
    ],
)
def test_cpp_program(program: str, sources: list[str], tmp_path: Path) -> None:
    binary = tmp_path / "program"
    subprocess.run(
        [
            COMPILER,
            "-std=c++20",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsanitize=undefined",
            "-fno-sanitize-recover=all",
        ]
        + [f"-I{ROOT / 'csrc'}", str(ROOT / "tests" / "cpp" / program), *(str(ROOT / source) for source in sources)]
        + ["-o", str(binary)],
        check=True,
    )
    result = subprocess.run([str(binary)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split()[0]) > 1000
