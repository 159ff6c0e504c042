"""Speed of the GPU backward beside torch's flash back end (FlashAttention-2, the same mma.sync instructions), in one
process: bursts of some milliseconds in random order with idle gaps, CUDA events, medians.

    python benchmarks/bench_gpu_backward.py [--quick] [--rounds 5] [--out benchmarks/results/gpu_backward.md]
    python benchmarks/bench_gpu_backward.py --tiles [--rounds 3]

bf16, 16k tokens in all, heads · dim = 2048. FLOPs are counted as 10 · batch · heads · seqlen² · dim, half for causal,
for everyone. Also: what dropout and determinism cost, and the peak of memory beside standard attention.

--tiles, within three minutes: every tile of csrc/gpu/mma_sync/tiles.h at 512 and 4k, plain, deterministic and with
dropout; first, whether its gradients are right. Nothing is written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from bench_gpu_forward import DIMS, SEQLENS, TOKENS, WIDTH, clock_mhz, compare, inputs, plot, torch_flash
from harness import RESULTS, begin_on_gpu, gpu_parser, header, table
from torch import Tensor

from flash_attn import flash_attn_func, standard_attention


def backward_of(out: Tensor, operands: list[Tensor], dout: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(out, operands, dout, retain_graph=True)


def measure(dim: int, causal: bool, seqlen: int, rounds: int) -> dict[str, float]:
    """TFLOP/s of ours, also deterministic and with dropout, and of torch's."""
    batch, heads = TOKENS // seqlen, WIDTH // dim
    operands = [x.requires_grad_() for x in inputs(batch, seqlen, heads, dim)]
    q, k, v = operands
    dout = torch.randn_like(v)
    flops = 10 * batch * heads * seqlen**2 * dim / (2 if causal else 1)
    seed = torch.tensor([1, 2], device="cuda")

    def ours(**options: object) -> Tensor:
        return flash_attn_func(q, k, v, causal=causal, backend="mma_sync", **options)

    calls = {
        "torch": backward_of(torch_flash(q, k, v, causal)(), operands, dout.transpose(1, 2)),
        "ours": backward_of(ours(), operands, dout),
        "deterministic": backward_of(ours(deterministic=True), operands, dout),
        "dropout": backward_of(ours(dropout_p=0.1, dropout_seed=seed), operands, dout),
    }
    return {name: flops / t / 1e12 for name, t in compare(calls, flops / 300e12, rounds).items()}


MODES: dict[str, dict[str, object]] = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "dropout": {"dropout_p": 0.1},
}
MOST_TILES = 5


def with_tile(tile: int, call: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """The call with this tile of the backward's; a RuntimeError if its kernel has none."""

    def chosen() -> tuple[Tensor, ...]:
        torch.ops.flash_attn.gpu_choose_bwd_tile(tile)
        return call()

    return chosen


def gradients(operands: list[Tensor], dout: Tensor, **options: object) -> Callable[[], tuple[Tensor, ...]]:
    seed = torch.tensor([1, 2], device=dout.device)
    out = flash_attn_func(*operands, dropout_seed=seed, **options)
    return lambda: torch.autograd.grad(out, operands, dout, retain_graph=True)


def wrong_values(dim: int, tile: int, device: str = "cuda", backend: str = "mma_sync") -> list[str]:
    """What is wrong with this tile's gradients: beside the reference in fp32, and from one call to the next."""
    wrong = []
    for causal in (False, True):
        shapes = [(2, 700, 4, dim), (2, 900, 2, dim), (2, 900, 2, dim), (2, 700, 4, dim)]
        *operands, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
        operands = [x.requires_grad_() for x in operands]
        wide = [x.detach().float().requires_grad_() for x in operands]
        for mode, options in MODES.items():
            choose = partial(with_tile, tile) if device == "cuda" else lambda call: call
            call = choose(gradients(operands, dout, causal=causal, backend=backend, **options))
            try:
                found = call()
            except RuntimeError as error:
                if mode == "dropout" and "no tile" in str(error):  # its kernel has fewer
                    continue
                raise
            want = gradients(wide, dout.float(), causal=causal, backend="reference", **options)()
            for name, x, y in zip(("dq", "dk", "dv"), found, want, strict=True):
                error = float((x.float() - y).norm() / y.norm())
                if not error < 0.01:
                    wrong.append(f"{mode}, causal {causal}: {name} off by {error:.3g}")
            again = call()
            repeats = 3 if mode == "deterministic" else 2  # the last ones: dk and dv
            if any(not torch.equal(x, y) for x, y in list(zip(found, again, strict=True))[-repeats:]):
                wrong.append(f"{mode}, causal {causal}: does not repeat")
    return wrong


def tiles_of(dim: int) -> list[int]:
    """Those that kernels for plain calls have on this card, and whose values are right."""
    tiles = []
    for tile in range(MOST_TILES):
        try:
            wrong = wrong_values(dim, tile)
        except RuntimeError as error:
            print(f"dim {dim}, tile {tile}: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"dim {dim}, tile {tile}: {'; '.join(wrong) or 'values are right'}", flush=True)
        if not wrong:
            tiles.append(tile)
    return tiles


def tile_rows(rounds: int) -> list[list[object]]:
    """TFLOP/s of torch's, always plain, and the speed of each tile in each mode relative to it."""
    rows = []
    for dim in DIMS:
        tiles = tiles_of(dim)
        for causal in (False, True):
            for seqlen in (512, 4096):
                batch, heads = TOKENS // seqlen, WIDTH // dim
                operands = [x.requires_grad_() for x in inputs(batch, seqlen, heads, dim)]
                dout = torch.randn_like(operands[2])
                flops = 10 * batch * heads * seqlen**2 * dim / (2 if causal else 1)
                calls: dict[str, Callable[[], object]] = {
                    "torch": backward_of(torch_flash(*operands, causal)(), operands, dout.transpose(1, 2))
                }
                for mode, options in MODES.items():
                    call = gradients(operands, dout, causal=causal, backend="mma_sync", **options)
                    for tile in tiles:
                        try:
                            with_tile(tile, call)()
                        except RuntimeError:  # the kernel for dropout has fewer
                            continue
                        calls[f"{mode} {tile}"] = with_tile(tile, call)
                seconds = compare(calls, flops / 300e12, rounds)
                for tile in tiles:
                    row: list[object] = [dim, "yes" if causal else "no", seqlen, tile]
                    row.append(f"{flops / seconds['torch'] / 1e12:.0f}")
                    row += [
                        f"{seconds['torch'] / seconds[name]:.2f}" if name in seconds else ""
                        for name in (f"{mode} {tile}" for mode in MODES)
                    ]
                    rows.append(row)
                    print(*row, flush=True)
    torch.ops.flash_attn.gpu_choose_bwd_tile(-1)
    return rows


def peak_mib(call: Callable[[], Tensor], operands: list[Tensor]) -> float:
    """Memory that forward and backward take beside their inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.autograd.grad(out, operands, torch.ones_like(out))
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def memory_rows() -> list[list[object]]:
    rows = []
    for seqlen in (1024, 2048, 4096, 8192, 16384, 32768):
        operands = [
            torch.randn(1, seqlen, 16, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)
        ]
        row: list[object] = [seqlen, round(peak_mib(partial(flash_attn_func, *operands, dropout_p=0.1), operands), 1)]
        if seqlen <= 8192:
            row.append(round(peak_mib(partial(standard_attention, *operands, dropout_p=0.1), operands), 1))
        else:
            row.append("")
        rows.append(row)
    return rows


def main() -> None:
    parser = gpu_parser(__doc__, 5, RESULTS / "gpu_backward.md")
    parser.add_argument("--tiles", action="store_true", help="every tile, at two lengths")
    arguments = begin_on_gpu(parser)
    if arguments.tiles:
        columns = ["dim", "causal", "seqlen", "tile", "torch TFLOP/s", *(f"{mode} / torch" for mode in MODES)]
        print(header("GPU backward, bf16: tiles") + "\n" + table(columns, tile_rows(arguments.rounds)))
        return
    rows, results, ratios = [], {}, []
    for dim in DIMS:
        for causal in (False, True):
            cells = results[dim, causal] = {}
            for seqlen in SEQLENS[::3] if arguments.quick else SEQLENS:
                cell = cells[seqlen] = measure(dim, causal, seqlen, arguments.rounds)
                ratios.append(cell["ours"] / cell["torch"])
                numbers = [f"{cell['torch']:.0f}", f"{cell['ours']:.0f}", f"{ratios[-1]:.2f}"]
                numbers += [f"{cell[name] / cell['ours']:.2f}" for name in ("deterministic", "dropout")]
                rows.append([dim, "yes" if causal else "no", seqlen, *numbers, clock_mhz()])
                print(*rows[-1], flush=True)
    columns = ["dim", "causal", "seqlen", "torch flash", "ours", "ours / torch", "deterministic / not"]
    columns += ["with dropout / without", "MHz after"]
    text = header("GPU backward, bf16: TFLOP/s") + "\n" + table(columns, rows)
    text += f"\nGeometric mean of ours / torch: {statistics.geometric_mean(ratios):.3f}; least: {min(ratios):.2f}.\n"
    text += "\nPeak memory of forward and backward, MiB (batch 1, 16 heads, dim 64, fp16, dropout 0.1):\n\n"
    text += table(["seqlen", "ours", "standard attention"], memory_rows())
    text += "\n![TFLOP/s over sequence length](gpu_backward.png)\n"
    print(text)
    arguments.out.write_text(text)
    plot(results, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
