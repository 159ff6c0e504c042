"""Block-sparse attention beside our own dense kernel and torch's compiled FlexAttention with the same mask, in turns.

    python benchmarks/bench_block_sparse.py [--quick] [--device cuda] [--seqlens 16384] [--dims 64 128] [--out ...]

Random masks of 128 × 128 blocks, as many in each row: time over visited fraction × dense time, 1 being perfect, forward
and backward. (FlexAttention has no backward on the CPU.) Then the butterfly pattern at growing lengths: density, time,
bytes by the model of `BlockMask.io_ratio`, and time over that of N log N growth from the first length.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch._functorch.config
from bench_gpu_forward import burst, compare
from harness import RESULTS, backward_of, header, lengths_on_x_axis, table, time_in_turns, write_result
from matplotlib import pyplot
from torch import Tensor
from torch.nn.attention import flex_attention

from flash_attn import BlockMask, flash_attn_func

BLOCK = 128
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def random_mask(seqlen: int, density: float, device: str) -> BlockMask:
    """round(density · blocks) blocks in each row."""
    n = seqlen // BLOCK
    chosen = torch.rand(n, n).argsort(1) < max(1, round(density * n))
    return BlockMask(chosen.to(device), seqlen, seqlen, BLOCK)


def timed(calls: dict[str, Callable[[], object]], given: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each call."""
    if given.device == "cpu":
        return time_in_turns(calls, given.seconds, given.rounds)
    longest = next(iter(calls.values()))
    burst(longest, 1)
    return compare(calls, burst(longest, 1), given.rounds)


def flex_call(heads_first: list[Tensor], mask: BlockMask) -> Callable[[], Tensor]:
    """torch's compiled FlexAttention, with its own choice of stages or, where that takes more shared memory than there
    is, with two in forward, and else in both."""
    torch._functorch.config.donated_buffer = False  # or its backward could run but once
    compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
    of_torch = mask.to_flex()
    for options in ({}, {"fwd_num_stages": 2}, {"num_stages": 2}):
        call = functools.partial(compiled, *heads_first, block_mask=of_torch, kernel_options=options)
        try:
            out = call()
            if out.requires_grad:
                torch.autograd.grad(out, heads_first, torch.ones_like(out))
            return call
        except Exception as error:  # the compiler's own, of which there are several
            print(f"FlexAttention with {options or 'its own options'}: {str(error).splitlines()[0][:200]}", flush=True)
    return call


def contenders(
    inputs: list[Tensor], masks: dict[str, BlockMask | None], flex: bool
) -> tuple[dict[str, Callable], dict[str, Callable]]:
    """Forward and backward calls by name: ours without and with each mask, FlexAttention with each."""
    device = inputs[0].device.type
    forward: dict[str, Callable[[], Tensor]] = {}
    for name, mask in masks.items():
        forward[f"ours {name}"] = lambda mask=mask: flash_attn_func(*inputs, block_mask=mask)
        if flex and mask is not None:
            # On the CPU it takes no inputs that require gradients.
            heads_first = [(x.detach() if device == "cpu" else x).transpose(1, 2) for x in inputs]
            forward[f"flex {name}"] = flex_call(heads_first, mask)
    backward = {
        name: backward_of(call(), *inputs) for name, call in forward.items() if device != "cpu" or "ours" in name
    }

    def without_graph(call: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                call()

        return run

    return {name: without_graph(call) for name, call in forward.items()}, backward


def qkv(seqlen: int, dim: int, given: argparse.Namespace) -> list[Tensor]:
    shape = (1, seqlen, given.heads, dim)
    return [torch.randn(shape, dtype=NAMES[given.dtype], device=given.device, requires_grad=True) for _ in range(3)]


def densities(given: argparse.Namespace) -> tuple[list[tuple], list[tuple[float, float, str]]]:
    """Rows of the table, and points (density, efficiency, label) of the plot."""
    rows, points = [], []
    for dim in given.dims:
        for seqlen in given.seqlens:
            torch.compiler.reset()
            masks = {str(s): random_mask(seqlen, s, given.device) for s in given.densities}
            inputs = qkv(seqlen, dim, given)
            forward, backward = contenders(inputs, {"dense": None, **masks}, not given.no_flex)
            times = [timed(calls, given) for calls in (forward, backward)]
            for name, mask in masks.items():
                s, cells = mask.density(), []
                for direction, of in zip(("forward", "backward"), times, strict=True):
                    ours, dense, flex = of[f"ours {name}"], of["ours dense"], of.get(f"flex {name}")
                    efficiency = ours / (s * dense)
                    cells += [f"{1e3 * ours:.1f}", f"{efficiency:.2f}", "-" if flex is None else f"{1e3 * flex:.1f}"]
                    points.append((s, efficiency, f"{direction}, d {dim}, {seqlen // 1024}k"))
                rows.append((dim, seqlen, f"{s:.3f}", round(s * seqlen / BLOCK), *cells))
                print(rows[-1], flush=True)
    return rows, points


def butterflies(given: argparse.Namespace) -> list[tuple[int, float, float, float, float]]:
    """(seqlen, density, seconds forward, seconds backward, bytes) of each length."""
    rows = []
    for seqlen in given.butterfly:
        mask = BlockMask.butterfly(seqlen, seqlen, BLOCK, device=given.device)
        inputs = qkv(seqlen, given.dims[0], given)
        calls = contenders(inputs, {"butterfly": mask}, flex=False)
        seconds = [timed(of, given)["ours butterfly"] for of in calls]
        dense_bytes = 2 * inputs[0].numel() * inputs[0].element_size() * (1 + seqlen / BLOCK)
        rows.append((seqlen, mask.density(), *seconds, mask.io_ratio() * dense_bytes))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=NAMES)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[16384])
    parser.add_argument("--densities", type=float, nargs="+", default=[1.0, 0.5, 0.25])
    parser.add_argument("--butterfly", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each group of contenders")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one small shape")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.dtype = given.dtype or ("bfloat16" if given.device == "cuda" else "float32")
    given.heads = given.heads or (16 if given.device == "cuda" else 1)
    if given.quick:
        given.dims, given.seqlens, given.butterfly, given.seconds = [64], [2048], [1024, 2048], 0.1
    torch.manual_seed(0)

    rows, points = densities(given)
    columns = ["dim", "seqlen", "visited", "blocks a row"]
    for direction in ("forward", "backward"):
        columns += [f"{direction}, ms", "/ (visited × dense)", "FlexAttention, ms"]
    text = header(f"Block-sparse attention, {given.dtype}, {given.heads} head(s), blocks of {BLOCK}")
    text += "\n" + __doc__.split("\n\n")[2].replace("\n", " ") + "\n\n" + table(columns, rows)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for label in dict.fromkeys(label for *_, label in points):
        ours = [(s, y) for s, y, of in points if of == label]
        left.plot(*zip(*ours, strict=True), "o-", label=label)
    left.axhline(1, color="gray", lw=0.8)
    left.set(
        xscale="log", xlabel="visited fraction of the blocks", ylabel="time / (visited × dense time)", ylim=(0, 1.6)
    )
    left.legend(fontsize=8)

    measured = butterflies(given)
    first = measured[0]
    growth = [n * math.log2(2 * n / BLOCK) / (first[0] * math.log2(2 * first[0] / BLOCK)) for n, *_ in measured]
    cells = [
        (n, f"{s:.4f}", f"{1e3 * f:.1f}", f"{f / first[2] / g:.2f}", f"{1e3 * b:.1f}", f"{b / first[3] / g:.2f}",
         f"{2.0**-20 * bytes_:.1f}")
        for (n, s, f, b, bytes_), g in zip(measured, growth, strict=True)
    ]  # fmt: skip
    text += f"\nButterfly, dim {given.dims[0]}:\n\n" + table(
        ["seqlen", "visited", "forward, ms", "/ N log N", "backward, ms", "/ N log N", "forward by the model, MiB"],
        cells,
    )
    lengths = [n for n, *_ in measured]
    for column, name in ((2, "forward"), (3, "backward")):
        right.plot(lengths, [row[column] for row in measured], "o-", label=f"butterfly, {name}")
    right.plot(lengths, [first[2] * g for g in growth], "k:", label="N log N")
    right.plot(lengths, [first[2] * (n / first[0]) ** 2 for n in lengths], "k--", lw=0.8, label="N²")
    right.set(yscale="log", xlabel="tokens", ylabel="seconds")
    lengths_on_x_axis(right, lengths)
    right.legend(fontsize=8)
    figure.tight_layout()
    name = "gpu" if given.device == "cuda" else "cpu"
    write_result(given.out or RESULTS / f"{name}_block_sparse.md", text, figure)


if __name__ == "__main__":
    main()
