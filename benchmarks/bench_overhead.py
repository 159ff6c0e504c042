"""What a call costs beyond its arithmetic: attention over 16 tokens beside torch's scaled_dot_product_attention, on one
thread.

    python benchmarks/bench_overhead.py [--out benchmarks/results/call_overhead.md]

torch is measured twice: on tensors in its own layout (batch, heads, seqlen, dim), and on ours, (batch, seqlen, heads,
dim), with the transposes that a caller with such tensors needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from harness import RESULTS, header, table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flash_attn import flash_attn_func

SHAPE = (1, 16, 4, 64)  # batch, seqlen, heads, dim
CALLS = 100


def torch_on_our_layout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def best_of_turns(calls: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Least microseconds per call: of what takes so little, any more is the machine's other work."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(turns):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
    return best


def forward_and_backward(attention: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> Callable[[], None]:
    inputs = [x.clone().requires_grad_() for x in inputs]

    def call() -> None:
        for x in inputs:
            x.grad = None
        attention(*inputs).backward(dout)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "call_overhead.md")
    parser.add_argument("--turns", type=int, default=400)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    *ours, dout = [torch.randn(SHAPE) for _ in range(4)]
    *native, native_dout = [x.transpose(1, 2).contiguous() for x in (*ours, dout)]
    contenders = {
        "flash_attn_func": (flash_attn_func, ours, dout),
        "torch, its layout": (scaled_dot_product_attention, native, native_dout),
        "torch, our layout": (torch_on_our_layout, ours, dout),
    }
    forward = {name: (lambda f=f, x=x: f(*x)) for name, (f, x, _) in contenders.items()}
    both = {name: forward_and_backward(f, x, d) for name, (f, x, d) in contenders.items()}
    rows = []
    for direction, calls in (("forward", forward), ("forward and backward", both)):
        best = best_of_turns(calls, arguments.turns)
        flash, *peers = best.values()
        rows.append([direction, *(f"{x:.1f}" for x in best.values()), *(f"{flash - x:+.1f}" for x in peers)])
        print(*rows[-1], flush=True)
    text = header(f"A call at (batch, seqlen, heads, dim) = {SHAPE}, fp32: µs, best of {arguments.turns} turns")
    names = list(contenders)
    arguments.out.write_text(text + "\n" + table(["", *names, *(f"over {name}" for name in names[1:])], rows))


if __name__ == "__main__":
    main()
