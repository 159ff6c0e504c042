"""Peak memory of attention on the CPU against the sequence length: ours, torch's scaled_dot_product_attention and
standard attention.

    python benchmarks/bench_memory.py [--quick] [--out benchmarks/results/cpu_memory.md]

Measured is how far the resident size of a process rises above what it was just before the call, inputs included: its
high-water mark, VmHWM, minus VmRSS. The kernel keeps the mark whatever happens between, so no short peak is missed, and
counts whatever anybody allocates: torch, its libraries, our workspace. What makes the difference mean the call alone:

* Every measurement has a process of its own, started anew and not forked. Memory that an earlier call gave back stays
  with the allocator, and a later call would be seen to need none of it; a fork has no thread pool, and inherits pages.
  (VmHWM and not getrusage's ru_maxrss, which exec does not reset: a child starts with the peak of its parent.)
* A small call of the same kind comes first: libraries are loaded, threads started, torch's lazy imports done.
* The mark is set back (/proc/self/clear_refs) after the inputs were made, whose making takes memory too.
* Blocks from 64 KiB on come from the kernel and go back to it when freed (MALLOC_MMAP_THRESHOLD_; the C library would
  raise that limit by itself), and no huge pages are used: the resident size is what is held. The kernel counts pages
  in batches, a few dozen for each CPU or thread, so every number is exact to some 100 KiB.

"Forward" is without gradients; "both" is forward and backward; "backward" is that of a graph that was built before, so
that output and statistics are not counted. The lines through the points are least-squares fits: the slope is the memory
that one more token takes. A quadratic method fits a line badly, and its slope grows with the range.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from harness import (
    CONTENDERS,
    DTYPES,
    RESULTS,
    backward_of,
    header,
    lengths_on_x_axis,
    table,
    write_result,
)

from flash_attn import explain
from flash_attn.paper.measure import MALLOC_ENVIRONMENT, peak_rss, use_no_huge_pages
from flash_attn.paper.report import line_through

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK = (512, 2048, 4096)
PASSES = ("forward", "both", "backward")
HEADS, DIM = 4, 64  # with one head, the numbers of short sequences would be as small as their error
STANDARD_MATRICES = 8  # of (heads, seqlen, seqlen), more than standard attention holds at a time

Peaks = dict[int, float]  # seqlen → bytes


def peak(contender: str, dtype: str, which: str, seqlen: int) -> int:
    """Bytes that one call of batch 1 needs above its inputs. To be called once in a process."""
    use_no_huge_pages()
    attention = CONTENDERS[contender]

    def inputs(n: int) -> list[torch.Tensor]:
        shape = (1, n, HEADS, DIM)
        return [torch.randn(shape, dtype=DTYPES[dtype], requires_grad=which != "forward") for _ in "qkv"]

    def prepare(n: int) -> Callable[[], object]:
        q, k, v = inputs(n)
        if which == "forward":
            return lambda: attention(q, k, v)
        if which == "backward":
            return backward_of(attention(q, k, v), q, k, v)
        dout = torch.randn_like(q)
        return lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), dout)

    prepare(96)()
    return peak_rss(prepare(seqlen))


def measure(contender: str, dtype: str, which: str, seqlen: int) -> int:
    """`peak` in a fresh process."""
    command = [sys.executable, __file__, "--one", contender, dtype, which, str(seqlen)]
    done = subprocess.run(command, env=os.environ | MALLOC_ENVIRONMENT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
    return int(done.stdout)


def fits_into_memory(contender: str, dtype: str, seqlen: int) -> bool:
    """Whether half of the memory that is free holds all that standard attention writes out."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return contender != "standard" or STANDARD_MATRICES * HEADS * seqlen**2 * DTYPES[dtype].itemsize <= available / 2


def plot(results: dict[tuple[str, str, str], Peaks], title: str) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PASSES), figsize=(15, 5), sharey=True, layout="constrained")
    figure.suptitle(title)
    for which, each in zip(PASSES, axes, strict=True):
        for (dtype, kind, contender), peaks in results.items():
            if kind == which:
                color, style = f"C{list(CONTENDERS).index(contender)}", "o-" if dtype == "fp32" else "x--"
                mebibytes = [max(x, 4096) / 2**20 for x in peaks.values()]  # a page: 0 has no place on the axis
                each.plot(list(peaks), mebibytes, color + style, label=f"{contender}, {dtype}")
        lengths_on_x_axis(each, sorted({n for peaks in results.values() for n in peaks}))
        each.set(title=which, xlabel="sequence length", yscale="log")
        each.yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("peak memory above the inputs (MiB)")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fp32 alone, three lengths")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_memory.md")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # contender, dtype, pass, seqlen: prints the bytes
    arguments = parser.parse_args()
    if arguments.one:
        contender, dtype, which, seqlen = arguments.one
        print(peak(contender, dtype, which, int(seqlen)))
        return

    results: dict[tuple[str, str, str], Peaks] = {}
    for dtype in ("fp32",) if arguments.quick else DTYPES:
        for which in PASSES:
            for contender in CONTENDERS:
                lengths = [n for n in (QUICK if arguments.quick else LENGTHS) if fits_into_memory(contender, dtype, n)]
                peaks = {n: float(measure(contender, dtype, which, n)) for n in lengths}
                results[dtype, which, contender] = peaks
                print(dtype, which, contender, *(f"{n}:{x / 2**20:.2f}" for n, x in peaks.items()), "MiB", flush=True)

    lengths = sorted({n for peaks in results.values() for n in peaks})
    rows, fits = [], []
    for key, peaks in results.items():
        rows.append([*key, *(f"{peaks[n] / 2**20:.2f}" if n in peaks else "" for n in lengths)])
        slope, start, r2 = line_through(peaks)
        row_bytes = HEADS * DIM * DTYPES[key[0]].itemsize
        fits.append([*key, f"{slope:,.0f}", f"{slope / row_bytes:.2f}", f"{start / 2**20:.2f}", f"{r2:.5f}"])
    x = torch.empty(1, 1, 1, 1)
    title = f"Peak memory of one attention call on the CPU, {explain(x, x, x).kernel}, {HEADS} heads of {DIM}"
    first = ["dtype", "pass", "of"]
    columns = [*first, "bytes per token", "in rows of Q", "MiB at 0 tokens", "R²"]
    text = "\n".join(
        [
            header(f"{title}: MiB above the inputs"),
            table([*first, *map(str, lengths)], rows),
            "Lines fitted to these numbers; a row of Q is what one token has in Q, K, V or the output:\n",
            table(columns, fits),
        ]
    )
    print("\n" + table(columns, fits))
    write_result(arguments.out, text, plot(results, title))


if __name__ == "__main__":
    main()
