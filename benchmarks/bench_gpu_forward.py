"""Speed of the GPU forward beside torch's flash back end (FlashAttention-2, the same mma.sync instructions), in one
process: bursts of some milliseconds in random order with idle gaps, CUDA events, medians.

    python benchmarks/bench_gpu_forward.py [--quick] [--rounds 5] [--out benchmarks/results/gpu_forward.md]

bf16, 16k tokens in all, heads · dim = 2048. FLOPs are counted as 4 · batch · heads · seqlen² · dim, half for causal,
for everyone. Also: what dropout costs, and how long a small call keeps the host busy.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import RESULTS, begin_on_gpu, gpu_parser, header, table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_attn import flash_attn_func

DIMS, SEQLENS, TOKENS, WIDTH = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), 16384, 2048
BURST_SECONDS, IDLE_SECONDS, WATCHDOG_SECONDS = 0.012, 0.03, 4


def clock_mhz() -> str:
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True)
    return answer.stdout.split("\n")[0].strip() or "?"


def wait(event: torch.cuda.Event) -> None:
    """Ends the process if a kernel hangs: a stuck benchmark would keep the GPU."""
    start = time.monotonic()
    while not event.query():
        if time.monotonic() - start > WATCHDOG_SECONDS:
            sys.exit(f"no answer from the GPU for {WATCHDOG_SECONDS} s")
        time.sleep(0.0002)


def burst(call: Callable[[], object], count: int) -> float:
    """Seconds a call, over `count` calls back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(count):
        call()
    end.record()
    wait(end)
    return start.elapsed_time(end) * 1e-3 / count


def compare(calls: dict[str, Callable[[], object]], seconds: float, rounds: int) -> dict[str, float]:
    """Median seconds of each call; `seconds` is about what one takes."""
    count = max(3, int(BURST_SECONDS / seconds))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in calls:
        burst(calls[name], 3)
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            time.sleep(IDLE_SECONDS)
            times[name].append(burst(calls[name], count))
    return {name: statistics.median(values) for name, values in times.items()}


def inputs(batch: int, seqlen: int, heads: int, dim: int) -> list[Tensor]:
    return [torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def torch_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout_p: float = 0.0) -> Callable[[], object]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=causal)

    return call


def measure(dim: int, causal: bool, seqlen: int, rounds: int) -> dict[str, float]:
    """TFLOP/s of ours, of ours with dropout, and of torch's."""
    batch, heads = TOKENS // seqlen, WIDTH // dim
    q, k, v = inputs(batch, seqlen, heads, dim)
    flops = 4 * batch * heads * seqlen**2 * dim / (2 if causal else 1)
    calls: dict[str, Callable[[], object]] = {"torch": torch_flash(q, k, v, causal)}
    seed = torch.tensor([1, 2], device="cuda")
    calls["ours"] = lambda: flash_attn_func(q, k, v, causal=causal, backend="mma_sync")
    calls["dropout"] = lambda: flash_attn_func(
        q, k, v, causal=causal, dropout_p=0.1, dropout_seed=seed, backend="mma_sync"
    )
    calls["torch dropout"] = torch_flash(q, k, v, causal, 0.1)
    return {name: flops / t / 1e12 for name, t in compare(calls, flops / 350e12, rounds).items()}


def host_microseconds(calls: int = 2000) -> dict[str, float]:
    """Host time of a call that leaves the GPU hardly anything to do."""
    q, k, v = inputs(1, 64, 2, 64)
    contenders = {"torch": torch_flash(q, k, v, False), "ours": lambda: flash_attn_func(q, k, v)}
    # What torch's own choice of a back end costs is not the point: no context manager in the loop.
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    contenders["torch"] = lambda: scaled_dot_product_attention(qt, kt, vt)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(7):
            for name, call in contenders.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(calls // 7):
                    call()
                times[name].append((time.perf_counter() - start) / (calls // 7) * 1e6)
                torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


def plot_lines(
    results: dict[tuple[int, bool], dict[int, dict[str, float]]], names: tuple[str, ...], path: Path
) -> None:
    """TFLOP/s of each name over sequence lengths, a picture for each head dim, without and with a causal mask."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dims = list(dict.fromkeys(dim for dim, _ in results))
    figure, axes = plt.subplots(2, len(dims), figsize=(4 * len(dims), 6), sharex=True, sharey=True, squeeze=False)
    for row, causal in enumerate((False, True)):
        for column, dim in enumerate(dims):
            axis = axes[row][column]
            points = results[dim, causal]
            for name, style in zip(names, ("o-", "s--", "^--", "v--"), strict=False):
                shown = {seqlen: p[name] for seqlen, p in points.items() if name in p}
                axis.plot(list(shown), list(shown.values()), style, label=name)
            axis.set_xscale("log", base=2)
            axis.set_title(f"head dim {dim}{', causal' if causal else ''}")
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.supxlabel("sequence length")
    figure.supylabel("TFLOP/s")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def plot(results: dict[tuple[int, bool], dict[int, dict[str, float]]], path: Path) -> None:
    plot_lines(results, ("ours", "torch"), path)


def main() -> None:
    parser = gpu_parser(__doc__, 5, RESULTS / "gpu_forward.md")
    arguments = begin_on_gpu(parser)
    rows, results, ratios = [], {}, []
    with torch.no_grad():
        for dim in DIMS:
            for causal in (False, True):
                cells = results[dim, causal] = {}
                for seqlen in SEQLENS[::3] if arguments.quick else SEQLENS:
                    cell = cells[seqlen] = measure(dim, causal, seqlen, arguments.rounds)
                    ratios.append(cell["ours"] / cell["torch"])
                    numbers = [f"{cell['torch']:.0f}", f"{cell['ours']:.0f}", f"{ratios[-1]:.2f}"]
                    numbers += [f"{cell['ours'] / cell['dropout']:.2f}"]
                    numbers += [f"{cell['dropout'] / cell['torch dropout']:.2f}", clock_mhz()]
                    rows.append([dim, "yes" if causal else "no", seqlen, *numbers])
                    print(*rows[-1], flush=True)
        host = host_microseconds()
    columns = ["dim", "causal", "seqlen", "torch flash", "ours", "ours / torch", "time with / without dropout"]
    columns += ["with dropout: ours / torch", "MHz after"]
    text = header("GPU forward, bf16: TFLOP/s") + "\n" + table(columns, rows)
    text += f"\nGeometric mean of ours / torch: {statistics.geometric_mean(ratios):.3f}; least: {min(ratios):.2f}.\n"
    text += f"\nHost time of a small call: ours {host['ours']:.1f} µs, torch {host['torch']:.1f} µs.\n"
    text += "\n![TFLOP/s over sequence length](gpu_forward.png)\n"
    print(text)
    arguments.out.write_text(text)
    plot(results, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
