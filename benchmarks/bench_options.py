"""What each option costs on the CPU: the time of a call with it over the time of the plain call of the same shape, all
in one process, in turns.

    python benchmarks/bench_options.py [--quick] [--out benchmarks/results/cpu_options.md]

Every call has 4 heads of 64 and, unless it says otherwise, batch 1 and seqlen 2048. Calls whose lengths differ are
compared by the FLOP. Options count as no work and causal saves none, so that causal would be perfect at 0.5. Packed
sequences of mixed lengths stand beside the plain call, by the FLOP that their own lengths need, and beside dense calls
of the same sequences, one after the other; packed sequences of one length beside the same as a batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from harness import DTYPES, RESULTS, backward_of, header, kernels, table, time_in_turns, write_result
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func

HEADS, DIM = 4, 64


class Call(NamedTuple):
    """A forward, the inputs that want gradients, and its FLOPs over those of the plain call."""

    forward: Callable[[], Sequence[Tensor]]
    inputs: Sequence[Tensor]
    work: float = 1.0


def mixed_lengths(seqlen: int) -> list[int]:
    """From `seqlen` down to a twentieth of it, none a multiple of a tile but the first."""
    return [seqlen, *(int(seqlen * part) for part in (0.7137, 0.5391, 0.3333, 0.2111, 0.1234, 0.0567))]


def options(dtype: torch.dtype, seqlen: int) -> dict[str, Call]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    def qkv(batch: int, n: int, heads_k: int = HEADS) -> list[Tensor]:
        return [random(batch, n, heads, DIM) for heads in (HEADS, heads_k, heads_k)]

    def with_options(inputs: Sequence[Tensor] = (), extra: Sequence[Tensor] = (), **named: object) -> Call:
        q, k, v = inputs or plain
        return Call(lambda: [flash_attn_func(q, k, v, **named)], (q, k, v, *extra))

    def work(lengths: Sequence[int]) -> float:
        return sum(n * n for n in lengths) / seqlen**2

    def packed(lengths: Sequence[int]) -> Call:
        q, k, v = (random(sum(lengths), HEADS, DIM) for _ in range(3))
        cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        longest = max(lengths)
        return Call(lambda: [flash_attn_varlen_func(q, k, v, cu, cu, longest, longest)], (q, k, v), work(lengths))

    def one_by_one(lengths: Sequence[int]) -> Call:
        each = [qkv(1, n) for n in lengths]
        inputs = [x for triple in each for x in triple]
        return Call(lambda: [flash_attn_func(*triple) for triple in each], inputs, work(lengths))

    plain = qkv(1, seqlen)
    bias = torch.randn(1, HEADS, seqlen, seqlen, dtype=dtype)
    learned = torch.randn(1, HEADS, seqlen, seqlen, dtype=dtype, requires_grad=True)
    mask = torch.rand(1, 1, seqlen, seqlen) < 0.9
    mixed = mixed_lengths(seqlen)
    return {
        "plain": with_options(),
        "causal": with_options(causal=True),
        "bias (1, heads, seqlen, seqlen)": with_options(bias=bias),
        "the same bias, with its gradient": with_options(extra=[learned], bias=learned),
        "bool mask (1, 1, seqlen, seqlen)": with_options(mask=mask),
        "dropout 0.1": with_options(dropout_p=0.1),
        "softcap": with_options(softcap=15.0),
        "ALiBi": with_options(alibi_slopes=torch.tensor([2.0**-n for n in range(1, HEADS + 1)])),
        "GQA, 1 KV head": with_options(qkv(1, seqlen, heads_k=1)),
        "batch 4": with_options(qkv(4, seqlen))._replace(work=4.0),
        "varlen, 4 equal lengths": packed([seqlen] * 4),
        "mixed lengths, one by one": one_by_one(mixed),
        "varlen, mixed lengths": packed(mixed),
    }


# What is compared with another call than the plain one.
OTHERS = [("varlen, 4 equal lengths", "batch 4"), ("varlen, mixed lengths", "mixed lengths, one by one")]


def costs(dtype: torch.dtype, seqlen: int, seconds: float) -> dict[tuple[str, str], list[float]]:
    """(Call, what it is compared with) → its forward and its backward time per FLOP, relative to the other's."""
    calls = options(dtype, seqlen)
    with torch.no_grad():
        forward = time_in_turns({name: call.forward for name, call in calls.items()}, seconds)
    graphs = {name: call.forward() for name, call in calls.items()}
    backward = time_in_turns({name: gradients(graphs[name], call.inputs) for name, call in calls.items()}, seconds)

    def relative(times: dict[str, float], name: str, other: str) -> float:
        return times[name] / calls[name].work / (times[other] / calls[other].work)

    pairs = [(name, "plain") for name in calls if name != "plain"] + OTHERS
    return {pair: [relative(times, *pair) for times in (forward, backward)] for pair in pairs}


def gradients(outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """Backward of one output with all inputs, or of several with three each."""
    if len(outs) == 1:
        return backward_of(outs[0], *inputs)
    each = [backward_of(out, *inputs[3 * i : 3 * i + 3]) for i, out in enumerate(outs)]
    return lambda: [backward() for backward in each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seqlen 512")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_options.md")
    parser.add_argument("--threads", type=int, default=0, help="as many as torch takes by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="per dtype and direction")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    seqlen = 512 if arguments.quick else 2048
    seconds = 0.1 if arguments.quick else arguments.seconds
    found = [costs(dtype, seqlen, seconds) for dtype in DTYPES.values()]
    rows = [[*pair, *(f"{time:.2f}" for each in found for time in each[pair])] for pair in found[0]]
    columns = ["call", "compared with", *(f"{name} {direction}" for name in DTYPES for direction in ("fwd", "bwd"))]
    title = f"Cost of options on the CPU, {kernels()}: time per FLOP over another call's, seqlen {seqlen}"
    text = header(title) + "\n" + table(columns, rows)
    print(text)
    write_result(arguments.out, text)


if __name__ == "__main__":
    main()
