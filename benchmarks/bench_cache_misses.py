"""The paper's count of memory traffic against a simulated cache: FlashAttention's forward with key blocks outside
(Algorithm 1) over the portable micro-kernels, under valgrind's cachegrind with a last-level cache of M bytes.

    python benchmarks/bench_cache_misses.py [--quick] [--out benchmarks/results/cache_misses.md]

cache_misses.cpp is compiled and run for every M and sequence length N with d ≤ M ≤ Nd in elements; the block sizes
follow from M (`io_model.resident_blocks`, 16 rows at least: a panel of the micro-kernels). Data misses of the last
level, lines of 64 bytes, stand beside `io_model.forward_misses`. Misses alone: what is written back counts on neither
side. Those of the same program without the attention are subtracted.

The first-level cache is small, 1 KB, because the last level does not see what hits the first and so takes it for old.
Ctrl-C ends the run and keeps the points that are there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from harness import RESULTS, header, table, write_result
from tqdm import tqdm

from flash_attn import io_model
from flash_attn.io_model import Blocks, Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
DIM, LINE_BYTES, LEAST_ROWS = 64, 64, 16
WAYS = 32  # of the last level: with 16, uneven sets cost up to 12 % more misses
KILOBYTES = (16, 32, 64, 128, 256, 512, 1024)
LENGTHS = (1024, 2048, 4096, 8192)


class Point(NamedTuple):
    """One run: misses and the model's, both in cache lines."""

    seqlen: int
    kilobytes: int
    blocks: Blocks
    misses: int
    model: float

    @property
    def of_law(self) -> float:
        """Elements missed, as a multiple of N²d² / M."""
        law = io_model.theorem2_flash(self.seqlen, DIM, elements(self.kilobytes))
        return self.misses * LINE_BYTES / 4 / law


def elements(kilobytes: int) -> int:
    """fp32 numbers in a cache of that size."""
    return kilobytes * 256


def missing_tools() -> str:
    """What this machine lacks, in a sentence; empty: nothing."""
    if shutil.which("valgrind") is None:
        return "valgrind is not there (Debian's package valgrind)"
    compiler = shlex.split(os.environ.get("CXX", "g++"))[0]
    return "" if shutil.which(compiler) else f"{compiler} is not there: a C++20 compiler is needed, CXX names it"


def build(folder: Path) -> Path:
    """The program, compiled."""
    program = folder / "cache_misses"
    sources = [ROOT / "benchmarks" / "cache_misses.cpp", ROOT / "csrc" / "cpu" / "isa" / "portable.cpp"]
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    command = [*compiler, "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run(program: Path, seqlen: int, blocks: Blocks, mode: str, kilobytes: int | None = None) -> str:
    """What the program, or cachegrind around it, says."""
    command = [str(program), str(seqlen), str(DIM), str(blocks.rows), str(blocks.columns), mode]
    if kilobytes is not None:
        caches = ["--I1=65536,8,64", f"--D1=1024,2,{LINE_BYTES}", f"--LL={kilobytes << 10},{WAYS},{LINE_BYTES}"]
        command = ["valgrind", "--tool=cachegrind", *caches, "--cachegrind-out-file=/dev/null", *command]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout if kilobytes is None else done.stderr


def misses_in(report: str) -> int:
    """The last level's data misses in what cachegrind writes."""
    found = re.search(r"LLd misses:\s+([\d,]+)", report)
    if found is None:
        raise RuntimeError(f"cachegrind wrote no line of LLd misses:\n{report}")
    return int(found[1].replace(",", ""))


def measure(program: Path, seqlen: int, kilobytes: int) -> Point:
    blocks = io_model.resident_blocks(elements(kilobytes), DIM, LEAST_ROWS)
    misses = [misses_in(run(program, seqlen, blocks, mode, kilobytes)) for mode in ("run", "idle")]
    w = Workload(seqlen=seqlen, dim=DIM, dtype=torch.float32)
    return Point(seqlen, kilobytes, blocks, misses[0] - misses[1], io_model.forward_misses(w, blocks) / LINE_BYTES)


def cases(lengths: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """All (N, kilobytes) with d ≤ M ≤ Nd."""
    return [(n, kilobytes) for n in lengths for kilobytes in sizes if DIM <= elements(kilobytes) <= n * DIM]


def plot(points: Sequence[Point]) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 6), layout="constrained")
    for color, seqlen in enumerate(sorted({p.seqlen for p in points})):
        mine = sorted(p for p in points if p.seqlen == seqlen)
        sizes = [p.kilobytes for p in mine]
        axes.plot(sizes, [p.misses * LINE_BYTES / 1e6 for p in mine], f"oC{color}", label=f"measured, N = {seqlen}")
        axes.plot(sizes, [p.model * LINE_BYTES / 1e6 for p in mine], f"-C{color}", label="model")
        law = [8 * io_model.theorem2_flash(seqlen, DIM, elements(size)) * 4 / 1e6 for size in sizes]
        axes.plot(sizes, law, f":C{color}", label="8 N²d² / M")
    axes.set(xscale="log", yscale="log", xlabel="cache M (KB)", ylabel="misses (MB)")
    axes.set_xticks(KILOBYTES, list(map(str, KILOBYTES)))
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3, which="both")
    axes.legend(ncols=2, fontsize="small")
    return figure


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="lengths up to 2048: half a minute instead of ten")
    parser.add_argument("--lengths", type=int, nargs="+", help="sequence lengths, multiples of 16")
    parser.add_argument("--kilobytes", type=int, nargs="+", default=KILOBYTES, help="cache sizes, powers of two")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=RESULTS / "cache_misses.md")
    arguments = parser.parse_args(given)
    lengths = arguments.lengths or (LENGTHS[:2] if arguments.quick else LENGTHS)
    for n in lengths:
        if n < 16 or n % 16:
            parser.error(f"--lengths {n}: must be multiples of 16")
    for size in arguments.kilobytes:
        if size < 16 or size & (size - 1):
            parser.error(f"--kilobytes {size}: must be powers of two, 16 at least")
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: must be at least 1")
    wanted = cases(lengths, arguments.kilobytes)
    if not wanted:
        parser.error(f"--kilobytes: none lies in d ≤ M ≤ Nd, at most {max(lengths) * DIM // 256} KB here")
    if lacking := missing_tools():
        parser.error(lacking)

    points: list[Point] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        program = build(Path(folder))
        runs = [pool.submit(measure, program, *case) for case in wanted]
        try:
            for each in tqdm(runs, "cachegrind"):
                points.append(each.result())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print(f"interrupted: {len(points)} of {len(wanted)} points are kept", file=sys.stderr)
    if not points:
        return 130
    rows = [
        [p.seqlen, p.kilobytes, *p.blocks, f"{p.misses:,}", f"{p.model:,.0f}", f"{p.misses / p.model:.3f}"]
        + [f"{p.of_law:.1f}"]
        for p in points
    ]
    worst = max(abs(p.misses / p.model - 1) for p in points)
    text = header(f"Cache misses of FlashAttention's forward under cachegrind, one head, d = {DIM}, fp32") + "\n"
    text += table(["N", "M (KB)", "B_r", "B_c", "misses", "model", "misses / model", "of N²d² / M"], rows)
    text += f"\nLines of {LINE_BYTES} bytes. The largest distance from the model is {100 * worst:.1f} %.\n"
    text += (
        "The last column is constant where the law holds to the constant. At 16 KB a tile of 16 rows, the least that "
        "the micro-kernels take, fills three quarters of the cache and leaves little for keys.\n"
    )
    print(text)
    write_result(arguments.out, text, plot(points))
    return 0 if len(points) == len(wanted) else 130


if __name__ == "__main__":
    sys.exit(main())
