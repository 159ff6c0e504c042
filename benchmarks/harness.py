"""What every benchmark shares: timing contenders in turns, describing the machine, writing a result file."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def time_in_turns(contenders: Mapping[str, Callable[[], object]], seconds: float, rounds: int = 5) -> dict[str, float]:
    """Median seconds per call of each contender, on the CPU.

    One call each per round, so that a slow moment of the machine meets all of them; as many rounds as fit in `seconds`,
    but at least `rounds`.
    """
    for call in contenders.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    while len(next(iter(times.values()))) < rounds or time.perf_counter() < end:
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str:
    command = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _portable(arguments: Sequence[str]) -> list[str]:
    """Arguments without the folders of this machine."""
    return [Path(x).name if Path(x).is_absolute() else x for x in arguments]


def header(title: str) -> str:
    """What a result file opens with: machine, torch, commit, command."""
    lines = [f"# {title}", ""]
    if torch.cuda.is_available():
        lines.append(f"- GPU: {torch.cuda.get_device_name()}")
    lines += [
        f"- CPU: {processor()}, {torch.get_num_threads()} threads",
        f"- torch {torch.__version__}, Python {platform.python_version()}, commit {commit()}",
        f"- Command: `python benchmarks/{Path(sys.argv[0]).name} {' '.join(_portable(sys.argv[1:]))}`",
        "",
    ]
    return "\n".join(lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
