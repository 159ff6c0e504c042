"""Speed of attention on the CPU beside torch's scaled_dot_product_attention and standard attention, in one process, in
turns.

    python benchmarks/bench_attention.py [--quick] [--only "bf16 64 causal"] [--out benchmarks/results/cpu_attention.md]

FLOPs are counted as 4 · batch · heads · seqlen² · dim forward and 2.5 times that backward, half for causal, for
everyone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from harness import (
    CONTENDERS,
    DTYPES,
    RESULTS,
    backward_of,
    header,
    kernels,
    lengths_on_x_axis,
    table,
    time_in_turns,
    write_result,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (512, 1024, 2048, 4096, 8192)
STANDARD_UP_TO = 2048  # longer, it would take most of the time
DIRECTIONS = {"fwd": 1.0, "bwd": 2.5}  # FLOPs, as multiples of the forward's


class Cell(NamedTuple):
    """One shape."""

    dtype: str
    dim: int
    causal: bool
    seqlen: int

    @property
    def heads(self) -> int:
        return max(1, 4096 // self.seqlen)

    @property
    def words(self) -> set[str]:
        """What --only may ask for."""
        return {self.dtype, str(self.dim), "causal" if self.causal else "dense", str(self.seqlen)}

    def __str__(self) -> str:
        return f"{self.dtype}, dim {self.dim}, {'causal' if self.causal else 'not causal'}, seqlen {self.seqlen}"


Rates = dict[str, dict[str, float]]  # direction → contender → GFLOP/s


def measure(cell: Cell, seconds: float) -> Rates:
    shape = (1, cell.seqlen, cell.heads, cell.dim)
    q, k, v = (torch.randn(shape, dtype=DTYPES[cell.dtype], requires_grad=True) for _ in range(3))
    names = [name for name in CONTENDERS if name != "standard" or cell.seqlen <= STANDARD_UP_TO]
    flops = 4 * cell.heads * cell.seqlen**2 * cell.dim / (2 if cell.causal else 1)

    def forward(name: str) -> Callable[[], object]:
        return lambda: CONTENDERS[name](q, k, v, causal=cell.causal)

    with torch.no_grad():
        times = {"fwd": time_in_turns({name: forward(name) for name in names}, seconds)}
    backward = {name: backward_of(CONTENDERS[name](q, k, v, causal=cell.causal), q, k, v) for name in names}
    times["bwd"] = time_in_turns(backward, seconds)
    return {
        direction: {name: factor * flops / times[direction][name] / 1e9 for name in names}
        for direction, factor in DIRECTIONS.items()
    }


def ratio(rates: dict[str, float]) -> float:
    return rates["ours"] / rates["torch SDPA"]


def row(cell: Cell, rates: Rates) -> list[object]:
    cells = [cell.dtype, cell.dim, "yes" if cell.causal else "no", cell.seqlen, cell.heads]
    for direction in DIRECTIONS:
        cells += [f"{rates[direction][name]:.0f}" if name in rates[direction] else "" for name in CONTENDERS]
        cells.append(f"{ratio(rates[direction]):.2f}")
    return cells


def summary(results: dict[Cell, Rates]) -> str:
    """Ours over torch, for each dtype and direction."""
    rows = []
    for dtype in dict.fromkeys(cell.dtype for cell in results):
        for direction in DIRECTIONS:
            ratios = {cell: ratio(rates[direction]) for cell, rates in results.items() if cell.dtype == dtype}
            lowest = min(ratios, key=ratios.__getitem__)
            mean = statistics.geometric_mean(ratios.values())
            rows.append([dtype, direction, len(ratios), f"{mean:.2f}", f"{ratios[lowest]:.2f}", lowest])
    columns = ["dtype", "direction", "cells", "geometric mean of ours / torch", "lowest", "where"]
    return table(columns, rows)


def plot(results: dict[Cell, Rates], title: str) -> Figure:
    """Above, ours / torch; below, GFLOP/s of both; one column for each dtype and direction."""
    import matplotlib.pyplot as plt

    dtypes = list(dict.fromkeys(cell.dtype for cell in results))
    columns = [(dtype, direction) for dtype in dtypes for direction in DIRECTIONS]
    figure, axes = plt.subplots(
        2, len(columns), figsize=(1 + 4 * len(columns), 7), sharex=True, squeeze=False, layout="constrained"
    )
    figure.suptitle(title)
    series = list(dict.fromkeys((cell.dim, cell.causal) for cell in results))
    for (dtype, direction), above, below in zip(columns, *axes, strict=True):
        for i, (dim, causal) in enumerate(series):
            chosen = {
                cell.seqlen: rates[direction]
                for cell, rates in results.items()
                if (cell.dtype, cell.dim, cell.causal) == (dtype, dim, causal)
            }
            lengths, label = list(chosen), f"dim {dim}{', causal' if causal else ''}"
            above.plot(lengths, [ratio(rates) for rates in chosen.values()], f"C{i}o-", label=label)
            for name, style in (("ours", "o-"), ("torch SDPA", "x--")):
                speeds = [rates[name] for rates in chosen.values()]
                below.plot(lengths, speeds, f"C{i}{style}", label=f"{name}, {label}")
        above.axhline(1, color="black", linewidth=1)
        above.set(title=f"{dtype} {direction}", ylim=(0, None))
        below.set(xlabel="sequence length", ylim=(0, None))
        for each in (above, below):
            lengths_on_x_axis(each, sorted({cell.seqlen for cell in results}))
    axes[0][0].set_ylabel("ours / torch SDPA")
    axes[1][0].set_ylabel("GFLOP/s")
    for each in axes[:, -1]:
        each.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def cells(lengths: Sequence[int], only: str) -> list[Cell]:
    everything = [
        Cell(dtype, dim, causal, seqlen)
        for dtype in DTYPES
        for dim in (64, 128)
        for causal in (False, True)
        for seqlen in lengths
    ]
    return [cell for cell in everything if set(only.split()) <= cell.words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lengths instead of five")
    parser.add_argument("--only", default="", help="words that a cell must have: fp32 bf16 64 128 causal dense 2048")
    parser.add_argument("--out", type=Path, help="results/cpu_attention.md, of --only nothing")
    parser.add_argument("--portable", action="store_true", help="the portable micro-kernels, whatever the CPU has")
    parser.add_argument("--threads", type=int, default=0, help="of torch and ours; as many as torch takes by default")
    parser.add_argument("--seconds", type=float, default=1.0, help="per cell and direction")
    arguments = parser.parse_args()
    wanted = cells((512, 2048) if arguments.quick else LENGTHS, arguments.only)
    if not wanted:
        parser.error(f"no cell has all the words of --only {arguments.only!r}")
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.portable:
        torch.ops.flash_attn.cpu_limit_instruction_set(0)

    results: dict[Cell, Rates] = {}
    for cell in wanted:
        results[cell] = measure(cell, arguments.seconds)
        print(*row(cell, results[cell]), flush=True)
    columns = ["dtype", "dim", "causal", "seqlen", "heads"]
    for direction in DIRECTIONS:
        columns += [*(f"{direction} {name}" for name in CONTENDERS), f"{direction} ours / torch"]
    title = f"Attention on the CPU, {kernels()}"
    parts = [header(f"{title}: GFLOP/s"), table(columns, [row(*item) for item in results.items()]), summary(results)]
    text = "\n".join(parts)
    print("\n" + parts[-1])
    out = arguments.out or (None if arguments.only else RESULTS / "cpu_attention.md")
    if out is not None:
        write_result(out, text, plot(results, title))


if __name__ == "__main__":
    main()
