"""What every benchmark shares: contenders, timing them in turns, describing the machine, writing tables and plots."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flash_attn import explain, flash_attn_func, standard_attention
from flash_attn.paper import report
from flash_attn.paper.report import lengths_on_x_axis as lengths_on_x_axis
from flash_attn.paper.report import table as table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def gpu_parser(description: str, rounds: int, out: Path) -> argparse.ArgumentParser:
    """The arguments that every benchmark on a GPU has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lengths instead of six")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, default=out)
    return parser


def begin_on_gpu(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments as given, and the same random numbers in every process."""
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU and a CUDA build of torch")
    torch.manual_seed(0)
    random.seed(0)
    return arguments


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """torch's fused attention on the same memory layout, (batch, seqlen, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


CONTENDERS: dict[str, Callable[..., Tensor]] = {
    "ours": flash_attn_func,
    "torch SDPA": torch_sdpa,
    "standard": standard_attention,
}


def backward_of(out: Tensor, *inputs: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A call that computes the gradients of `inputs`, as often as one likes."""
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


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


def kernels() -> str:
    """Which micro-kernels serve the dtypes on this CPU."""
    sets = [explain(x, x, x).kernel.split()[0] for x in (torch.empty(1, 1, 1, 1, dtype=d) for d in DTYPES.values())]
    return f"{' and '.join(dict.fromkeys(sets))} micro-kernels"


def header(title: str) -> str:
    """What a result file opens with: machine, torch, commit, command."""
    return report.header(title, f"python benchmarks/{Path(sys.argv[0]).name}", sys.argv[1:])


def write_result(path: Path, text: str, figure: Figure | None = None) -> None:
    """The Markdown file; a figure goes beside it under the same name, and is shown at its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if figure is not None:
        image = path.with_suffix(".png")
        figure.savefig(image, dpi=120)
        text += f"\n![the same as a plot]({image.name})\n"
    path.write_text(text)
    print(f"written to {path}")
