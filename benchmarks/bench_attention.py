"""Speed of attention on the CPU beside torch's scaled_dot_product_attention and standard attention, in one process, in
turns.

    python benchmarks/bench_attention.py [--quick] [--out benchmarks/results/cpu_attention.md]

FLOPs are counted as 4 · batch · heads · seqlen² · dim forward and 2.5 times that backward, half for causal, for
everyone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from harness import RESULTS, header, table, time_in_turns
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flash_attn import explain, flash_attn_func, standard_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's fused attention on the same memory layout, (batch, seqlen, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def backward_of(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> Callable[[], object]:
    out = attention(q, k, v, causal=causal)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def measure(dtype: torch.dtype, dim: int, causal: bool, seqlen: int, seconds: float) -> list[str]:
    heads = max(1, 4096 // seqlen)
    q, k, v = (torch.randn(1, seqlen, heads, dim, dtype=dtype, requires_grad=True) for _ in range(3))
    contenders = {"ours": flash_attn_func, "torch": torch_sdpa}
    if seqlen <= 2048:
        contenders["standard"] = standard_attention
    flops = 4 * heads * seqlen**2 * dim / (2 if causal else 1)
    cells = []
    for factor, is_backward in ((1.0, False), (2.5, True)):
        if is_backward:
            calls = {name: backward_of(attention, q, k, v, causal) for name, attention in contenders.items()}
            times = time_in_turns(calls, seconds)
        else:
            with torch.no_grad():
                calls = {name: (lambda f=f: f(q, k, v, causal=causal)) for name, f in contenders.items()}
                times = time_in_turns(calls, seconds)
        rates = {name: factor * flops / t / 1e9 for name, t in times.items()}
        cells += [f"{rates[name]:.0f}" if name in rates else "" for name in ("ours", "torch", "standard")]
        cells.append(f"{times['torch'] / times['ours']:.2f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lengths instead of five")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_attention.md")
    parser.add_argument("--portable", action="store_true", help="the portable micro-kernels, whatever the CPU has")
    parser.add_argument("--seconds", type=float, default=1.0, help="per cell and direction")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.portable:
        torch.ops.flash_attn.cpu_limit_instruction_set(0)
    x = torch.empty(1, 1, 1, 1)
    kernel = explain(x, x, x).kernel

    rows = []
    for name, dtype in DTYPES.items():
        for dim in (64, 128):
            for causal in (False, True):
                for seqlen in (512, 2048) if arguments.quick else (512, 1024, 2048, 4096, 8192):
                    cells = measure(dtype, dim, causal, seqlen, arguments.seconds)
                    rows.append([name, dim, "yes" if causal else "no", seqlen, max(1, 4096 // seqlen), *cells])
                    print(*rows[-1], flush=True)
    columns = ["dtype", "dim", "causal", "seqlen", "heads"]
    for direction in ("fwd", "bwd"):
        columns += [
            f"{direction} ours",
            f"{direction} torch SDPA",
            f"{direction} standard",
            f"{direction} ours / torch",
        ]
    text = header(f"Attention on the CPU, {kernel}: GFLOP/s") + "\n" + table(columns, rows)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
