"""Speed of the Hopper forward (wgmma) beside cuDNN and, where it can be imported, FlashAttention-3, in one process:
bursts of some milliseconds in random order with idle gaps, CUDA events, medians.

    python benchmarks/bench_hopper_forward.py [--quick] [--rounds 3] [--dims 64 128 256] [--out ...]

bf16, 16k tokens in all, heads · dim = 2048. FLOPs are counted as 4 · batch · heads · seqlen² · dim, half for causal,
for everyone. FlashAttention-3 is a module `fa3` with `fwd(q, k, v, causal=)` on the path. Then what options cost, ours
alone, and what is left without pauses, as a fraction of what a product of matrices reaches.

--tiles: every tile of csrc/gpu/wgmma/tiles.h for plain calls, after a look at its values. Nothing is written.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import statistics
from collections.abc import Callable

import torch
from bench_gpu_forward import SEQLENS, TOKENS, WIDTH, burst, clock_mhz, compare, inputs, plot_lines
from harness import RESULTS, begin_on_gpu, gpu_parser, header, table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_attn import flash_attn_func, flash_attn_varlen_func

Call = Callable[[], object]


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def peers() -> dict[str, Callable[[Tensor, Tensor, Tensor, bool], Call]]:
    found = {"cuDNN": cudnn}
    try:
        fa3 = importlib.import_module("fa3")
        found["FlashAttention-3"] = lambda q, k, v, causal: lambda: fa3.fwd(q, k, v, causal=causal)
    except ImportError:
        pass
    return found


def measure(
    dim: int, causal: bool, seqlen: int, rounds: int, others: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Call]]
) -> dict[str, float]:
    """TFLOP/s of ours and of each peer."""
    batch, heads = TOKENS // seqlen, max(1, WIDTH // dim)
    q, k, v = inputs(batch, seqlen, heads, dim)
    flops = 4 * batch * heads * seqlen**2 * dim / (2 if causal else 1)
    calls: dict[str, Call] = {"ours": lambda: flash_attn_func(q, k, v, causal=causal, backend="wgmma")}
    for name, make in others.items():
        call = make(q, k, v, causal)
        try:
            call()
        except RuntimeError:  # a head dim that it does not have
            continue
        calls[name] = call
    return {name: flops / t / 1e12 for name, t in compare(calls, flops / 600e12, rounds).items()}


LENGTHS = (512, 1024, 2048, 4096)
MOST_TILES = 4


def tile_rows(rounds: int) -> list[list[object]]:
    """TFLOP/s of each tile; those with wrong values are named instead."""
    rows: list[list[object]] = []
    choose = torch.ops.flash_attn.gpu_choose_fwd_tile

    def with_tile(tile: int, call: Call) -> Call:
        def chosen() -> object:
            choose(tile)
            return call()

        return chosen

    for dim in (64, 96, 128, 192):
        for causal in (False, True):
            for seqlen in (512, 1024, 4096, 16384):
                batch, heads = TOKENS // seqlen, WIDTH // dim
                q, k, v = inputs(batch, seqlen, heads, dim)
                flops = 4 * batch * heads * seqlen**2 * dim / (2 if causal else 1)
                ours = functools.partial(flash_attn_func, q, k, v, causal=causal, backend="wgmma")
                choose(-1)
                want = flash_attn_func(q, k, v, causal=causal, backend="mma_sync").float()
                row: list[object] = [dim, "yes" if causal else "no", seqlen]
                calls: dict[str, Call] = {}
                for tile in range(MOST_TILES):
                    try:
                        choose(tile)
                        error = float((ours().float() - want).norm() / want.norm())
                    except RuntimeError:
                        continue
                    if error < 0.01:
                        calls[str(tile)] = with_tile(tile, ours)
                    else:
                        row.append(f"tile {tile} is off by {error:.2g}")
                times = compare(calls, flops / 600e12, rounds)
                row += [f"{flops / t / 1e12:.0f} ({tile})" for tile, t in times.items()]
                rows.append(row)
                print(*row, flush=True)
    choose(-1)
    return rows


def option_rows(rounds: int) -> list[list[object]]:
    """(what, dim, causal, ratio, what is wanted of it), each of two calls measured side by side."""
    rows: list[list[object]] = []

    def seconds(calls: dict[str, Call], flops: float) -> dict[str, float]:
        return compare(calls, flops / 500e12, rounds)

    def ours(*operands: Tensor, **options: object) -> Call:
        return lambda: flash_attn_func(*operands, backend="wgmma", **options)

    for dim in (64, 128):
        heads = WIDTH // dim
        for causal in (False, True):
            q, k, v = inputs(4, 4096, heads, dim)
            flops = 4 * 4 * heads * 4096**2 * dim / (2 if causal else 1)
            seed = torch.tensor([1, 2], device="cuda")
            slopes = torch.rand(heads, device="cuda")
            times = seconds(
                {
                    "plain": ours(q, k, v, causal=causal),
                    "dropout": ours(q, k, v, causal=causal, dropout_p=0.1, dropout_seed=seed),
                    "softcap": ours(q, k, v, causal=causal, softcap=30.0),
                    "ALiBi": ours(q, k, v, causal=causal, alibi_slopes=slopes),
                },
                flops,
            )
            for name, wanted in (("dropout", "1.30" if dim == 64 else "1.15"), ("softcap", "1.12"), ("ALiBi", "1.12")):
                rows.append([f"{name}, time / without", dim, causal, f"{times[name] / times['plain']:.2f}", wanted])
            q, k, v = inputs(4, 4096, 64, dim)
            few = [x[:, :, :8] for x in (k, v)]
            times = seconds(
                {"MHA": ours(q, k, v, causal=causal), "GQA": ours(q, *few, causal=causal)}, 64 / heads * flops
            )
            rows.append(["64:8 heads, rate / 64:64", dim, causal, f"{times['MHA'] / times['GQA']:.2f}", "1.00"])

            lengths = [LENGTHS[i % 4] for i in range(32)]
            cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
            packed = [x.reshape(-1, heads, dim) for x in inputs(1, sum(lengths), heads, dim)]
            calls: dict[str, Call] = {
                "varlen": lambda packed=packed, cu=cu, causal=causal: flash_attn_varlen_func(
                    *packed, cu, cu, 4096, 4096, causal=causal, backend="wgmma"
                )
            }
            for length in LENGTHS:
                calls[str(length)] = ours(*inputs(8, length, heads, dim), causal=causal)
            times = seconds(calls, flops)
            dense = sum(times[str(length)] for length in LENGTHS)
            rows.append(["32 packed sequences, time / dense", dim, causal, f"{times['varlen'] / dense:.2f}", "1.05"])
    for dim, bucket in ((96, 128), (192, 256)):
        for causal in (False, True):
            flops = 4 * 4 * 16 * 4096**2 * bucket / (2 if causal else 1)
            calls = {str(d): ours(*inputs(4, 4096, 16, d), causal=causal) for d in (dim, bucket)}
            times = seconds(calls, flops)
            rate = times[str(bucket)] / bucket / (times[str(dim)] / dim)
            rows.append([f"dim {dim}, rate / dim {bucket}", dim, causal, f"{rate:.2f}", "0.90"])
    for row in rows:
        row[2] = "yes" if row[2] else "no"
        print(*row, flush=True)
    return rows


FEW_QUERIES = (
    (1, 1, 8192, 64, 8), (16, 1, 8192, 64, 8), (16, 16, 8192, 64, 8), (32, 16, 4096, 28, 4), (16, 64, 4096, 64, 8),
    (16, 100, 4096, 64, 8), (8, 192, 4096, 64, 8), (8, 256, 4096, 64, 8),
)  # fmt: skip
FEW_QUERY_CALLS = ("ours", "one head a tile", "FlashAttention-3")


def few_query_rows(rounds: int) -> list[list[object]]:
    """Microseconds of calls with few queries for heads that share keys: ours, its tiles of one head each, and
    FlashAttention-3's with packed heads."""
    choose = torch.ops.flash_attn.gpu_choose_fwd_tile
    others, rows = peers(), []
    for dim, of_one_head in ((64, 2), (128, 1)):
        for batch, queries, keys, heads, heads_k in FEW_QUERIES:
            q = torch.randn(batch, queries, heads, dim, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn(batch, keys, heads_k, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))

            def with_tile(tile: int, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Call:
                def call() -> object:
                    choose(tile)
                    return flash_attn_func(q, k, v, backend="wgmma")

                return call

            calls = {"ours": with_tile(-1), "one head a tile": with_tile(of_one_head)}
            if "FlashAttention-3" in others:
                fa3 = importlib.import_module("fa3")
                calls["FlashAttention-3"] = lambda q=q, k=k, v=v, fa3=fa3: fa3.fwd(q, k, v, pack_gqa=True)
            times = compare(calls, 4 * batch * queries * keys * heads * dim / 100e12 + 50e-6, rounds)
            shape = [dim, batch, queries, keys, f"{heads}:{heads_k}"]
            rows.append([*shape, *(f"{1e6 * times[n]:.0f}" if n in times else "" for n in FEW_QUERY_CALLS)])
            print(*rows[-1], flush=True)
    choose(-1)
    return rows


def sustained(call: Call, seconds: float) -> float:
    """Seconds a call, in the second half of so many seconds without a pause: what is left when the chip is warm."""
    count = max(4, int(seconds / burst(call, 3)))
    burst(call, count // 2)
    return burst(call, count // 2)


def matmul_rows(seconds: float) -> list[list[object]]:
    """(what, TFLOP/s in bursts, sustained, and as fractions of a product of 8192³) of bf16 calls."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    calls: dict[str, tuple[Call, float]] = {"product of 8192³": (lambda: a @ b, 2 * 8192.0**3)}
    for dim in (64, 128, 256):
        q, k, v = inputs(1, TOKENS, WIDTH // dim, dim)
        flops = 4.0 * TOKENS**2 * WIDTH
        calls[f"ours, dim {dim}, 16k"] = (
            lambda q=q, k=k, v=v: flash_attn_func(q, k, v, backend="wgmma"),
            flops,
        )
    in_bursts = compare({name: call for name, (call, _) in calls.items()}, 2e-3, 3)
    rows: list[list[object]] = []
    for name, (call, flops) in calls.items():
        rates = [flops / in_bursts[name] / 1e12, flops / sustained(call, seconds) / 1e12]
        rows.append([name, *rates, clock_mhz()])
    of_matmul = rows[0][1:3]
    return [
        [name, *(f"{x:.0f}" for x in rates), *(f"{x / y:.2f}" for x, y in zip(rates, of_matmul, strict=True)), clock]
        for name, *rates, clock in rows
    ]


def main() -> None:
    parser = gpu_parser(__doc__, 3, RESULTS / "hopper_forward.md")
    parser.add_argument("--tiles", action="store_true", help="every tile, at four lengths")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    given = begin_on_gpu(parser)
    if given.tiles:
        with torch.no_grad():
            tile_rows(given.rounds)
        return
    others = peers()
    rows, results, ratios = [], {}, []
    with torch.no_grad():
        for dim in given.dims:
            for causal in (False, True):
                cells = results[dim, causal] = {}
                for seqlen in SEQLENS[1::3] if given.quick else SEQLENS:
                    cell = cells[seqlen] = measure(dim, causal, seqlen, given.rounds, others)
                    best = max(value for name, value in cell.items() if name != "ours")
                    ratios.append(cell["ours"] / best)
                    numbers = [f"{cell[name]:.0f}" if name in cell else "" for name in (*others, "ours")]
                    rows.append([dim, "yes" if causal else "no", seqlen, *numbers, f"{ratios[-1]:.2f}", clock_mhz()])
                    print(*rows[-1], flush=True)
    columns = ["dim", "causal", "seqlen", *others, "ours", "ours / best peer", "MHz after"]
    text = header("Hopper forward, bf16: TFLOP/s") + "\n" + table(columns, rows)
    text += (
        f"\nGeometric mean of ours / best peer: {statistics.geometric_mean(ratios):.3f}; least: {min(ratios):.2f}.\n"
    )
    text += "\nOptions (4k; packed: 8 sequences each of 512, 1k, 2k and 4k):\n\n"
    with torch.no_grad():
        text += table(["what", "dim", "causal", "measured", "wanted"], option_rows(given.rounds))
        text += "\nFew queries, heads that share keys, in microseconds a call:\n\n"
        columns = ["dim", "batch", "queries", "keys", "heads", *FEW_QUERY_CALLS]
        text += table(columns, few_query_rows(given.rounds))
    columns = ["bf16", "bursts", "sustained", "/ product", "/ product, sustained", "MHz after"]
    text += "\nTFLOP/s without pauses, for 3 s each, beside a product of matrices:\n\n"
    with torch.no_grad():
        text += table(columns, matmul_rows(3.0))
    text += f"\n![TFLOP/s over sequence length]({given.out.stem}.png)\n"
    print(text)
    given.out.write_text(text)
    plot_lines(results, ("ours", *others), given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
