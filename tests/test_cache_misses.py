"""benchmarks/bench_cache_misses.py: its program computes attention, and cachegrind's misses are what io_model says."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from programs import start_program

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location("bench_cache_misses", BENCHMARKS / "bench_cache_misses.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    if lacking := module.missing_tools():
        pytest.skip(lacking)
    return module


@pytest.fixture(scope="module")
def program(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.build(tmp_path_factory.mktemp("cache_misses"))


@pytest.mark.parametrize("blocks", [(16, 3), (48, 100), (64, 320), (320, 1)], ids=str)
def test_the_program_computes_attention(bench: ModuleType, program: Path, blocks: tuple[int, int]) -> None:
    """Against softmax(QKᵀ)V in fp64; values are below 3."""
    assert float(bench.run(program, 320, bench.Blocks(*blocks), "check")) < 1e-5


@pytest.mark.parametrize(
    ("seqlen", "kilobytes"),
    [
        (512, 32),
        (512, 128),
        *(pytest.param(1024, kb, marks=pytest.mark.full) for kb in (16, 64, 256)),
        *(pytest.param(2048, kb, marks=pytest.mark.full) for kb in (32, 512)),
    ],
)
def test_misses_are_what_the_model_says(bench: ModuleType, program: Path, seqlen: int, kilobytes: int) -> None:
    point = bench.measure(program, seqlen, kilobytes)
    assert point.misses == pytest.approx(point.model, rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("17 64 16 8 run", "SEQLEN 17: must be a multiple of 16"),
        ("32 64 8 8 run", "ROWS 8: must be a multiple of 16"),
        ("32 -1 16 8 run", r"DIM -1: must be a whole number in"),
        ("32 64 16 8x run", r"COLUMNS 8x: must be a whole number in"),
        ("32 64 16 8 walk", "MODE walk: must be run, idle or check"),
        ("32 64 16 8", "usage"),
    ],
)
def test_the_program_refuses_wrong_arguments(program: Path, arguments: str, message: str) -> None:
    done = subprocess.run([program, *arguments.split()], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lengths 100", "--lengths 100: must be multiples of 16"),
        ("--kilobytes 48", "--kilobytes 48: must be powers of two"),
        ("--lengths 64 --kilobytes 1024", "--kilobytes: none lies in d ≤ M ≤ Nd, at most 16 KB here"),
        ("--jobs 0", "--jobs 0: must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(
    bench: ModuleType, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        bench.main(arguments.split())
    assert refusal.value.code == 2 and message in capsys.readouterr().err


def test_cachegrinds_report_is_read(bench: ModuleType) -> None:
    report = "==1== D   refs:  9,000\n==1== LLd misses:  1,305,422  ( 1,286,381 rd   +     19,041 wr)\n"
    assert bench.misses_in(report) == 1305422
    with pytest.raises(RuntimeError, match="no line of LLd misses"):
        bench.misses_in("==1== D refs: 9,000")


@pytest.mark.full
def test_an_interrupted_run_keeps_its_points(bench: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "points.md"
    command = [sys.executable, str(BENCHMARKS / "bench_cache_misses.py"), "--lengths", "512", "4096", "--jobs", "1"]
    run = start_program([*command, "--out", str(out)], stderr=subprocess.PIPE)
    assert run.stderr is not None
    seen = ""
    while "| 1/" not in seen and (character := run.stderr.read(1)):  # the progress bar: a point is there
        seen += character
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 130 and "points are kept" in errors
    assert "| 512 | 16 |" in out.read_text()
