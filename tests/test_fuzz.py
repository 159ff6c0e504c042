"""Random calls, sensible and senseless: the process survives and only honest exceptions come out.

The calls run in a process of their own, which prints the seed of each call before making it: a crash or a hang is a
test failure that names the seed, and `python tests/test_fuzz.py SEED` repeats that call alone.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import flash_attn

DTYPES = (torch.float32,) * 6 + (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool, torch.complex64)
NONSENSE = (None, "x", 3, -1, 2.5, [1, 2], math.nan, object())
ALLOWED = (RuntimeError, ValueError, NotImplementedError, TypeError)


class Dice:
    """Random arguments: mostly right, at times a little wrong, now and then absurd."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.wrong = self.random.choice((0.0, 0.0, 0.01, 0.05, 0.3))
        self.nonsense = self.random.choice((0.0, 0.0, 0.0, 0.05))

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance

    def size(self) -> int:
        return self.random.choice((0, 1, 1, 2, 3, 5, 8, 16, 17, 33, 65, 130))

    def bent(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes, at times with one changed, missing or added."""
        sizes = list(sizes)
        if self.maybe(self.wrong):
            what, at = self.random.randrange(3), self.random.randrange(len(sizes) or 1)
            if what == 0 and sizes:
                sizes[at] = max(0, sizes[at] + self.random.choice((-1, 1, 2, 7)))
            elif what == 1 and sizes:
                del sizes[at]
            else:
                sizes.insert(at, self.random.choice((0, 1, 2)))
        return tuple(sizes)

    def tensor(self, sizes: tuple[int, ...], dtype: torch.dtype) -> object:
        if self.maybe(self.nonsense):
            return self.random.choice(NONSENSE)
        if self.maybe(self.wrong):
            dtype = self.random.choice(DTYPES)
        x = torch.randn(self.bent(sizes)).mul(self.random.choice((1.0, 1.0, 100.0, 1e30))).to(dtype)
        if self.maybe(0.05) and x.is_floating_point() and x.numel():
            x.flatten()[self.random.randrange(x.numel())] = self.random.choice((math.nan, math.inf, -math.inf))
        kind = self.random.randrange(10)
        if kind == 0 and x.ndim > 1:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif kind == 1 and x.ndim:
            x = torch.stack([x, x], -1)[..., 0]
        elif kind == 2 and x.ndim > 1 and x.shape[0]:
            x = x[:1].expand(x.shape)
        elif kind == 3 and self.maybe(self.wrong):
            x = x.to("meta")
        if (x.is_floating_point() or x.is_complex()) and self.maybe(0.7):
            x = x.detach().requires_grad_()
        return x

    def broadcast(self, sizes: tuple[int, ...], dtype: torch.dtype) -> object:
        sizes = tuple(n if self.maybe(0.6) else 1 for n in sizes)[self.random.choice((0, 0, 0, 1, 2, 3)) :]
        if dtype == torch.bool:
            return torch.rand(self.bent(sizes)) < self.random.choice((0.0, 0.3, 0.9, 1.0))
        return self.tensor(sizes, dtype)

    def integers(self, values: list[int]) -> object:
        if self.maybe(self.nonsense):
            return self.random.choice(NONSENSE)
        values = list(values)
        if self.maybe(self.wrong * 2) and values:
            at = self.random.randrange(len(values))
            values[at] = self.random.choice((values[at] + 1, values[at] - 1, -1, -(2**31), 2**31 - 1, 10**6, 0))
        if self.maybe(self.wrong) and values:
            values = values[:-1] if self.maybe(0.5) else [*values, 1]
        dtype = self.random.choice((torch.int32, torch.int32, torch.int64))
        return torch.tensor(values, dtype=torch.float32 if self.maybe(self.wrong) else dtype)

    def number(self, good: tuple, bad: tuple) -> object:
        if self.maybe(self.nonsense):
            return self.random.choice(NONSENSE)
        return self.random.choice(bad) if self.maybe(self.wrong) else self.random.choice(good)


def arguments(d: Dice) -> tuple[bool, dict]:
    """(varlen, keyword arguments) of one call."""
    batch, heads_k = d.random.choice((0, 1, 1, 2, 3)), d.random.choice((1, 1, 2, 3))
    heads = heads_k * d.random.choice((1, 1, 2, 3)) + (1 if d.maybe(d.wrong) else 0)
    seqlen_q, seqlen_k, dim, dim_v = d.size(), d.size(), d.size() or 4, d.size() or 4
    dtype, varlen = d.random.choice(DTYPES[:9]), d.maybe(0.5)
    a: dict = {}
    lens_q, lens_k = ([d.random.randint(0, n) if varlen else n for _ in range(batch)] for n in (seqlen_q, seqlen_k))
    if varlen:
        extra = d.random.choice((0, 0, 3))
        rows_q, rows_k = (sum(lens_q) + extra,), (sum(lens_k) + extra,)
        for side, lens in (("q", lens_q), ("k", lens_k)):
            a[f"cu_seqlens_{side}"] = d.integers([sum(lens[:n]) for n in range(batch + 1)])
            longest = max(lens, default=0)
            a[f"max_seqlen_{side}"] = d.number(
                (longest, longest + 5), (longest - 1, 0, -1, 10**9, 2**40, torch.tensor(3))
            )
        seqlen_q, seqlen_k = max(lens_q, default=0), max(lens_k, default=0)
    else:
        rows_q, rows_k = (batch, seqlen_q), (batch, seqlen_k)
    a["q"] = d.tensor((*rows_q, heads, dim), dtype)
    a["k"], a["v"] = d.tensor((*rows_k, heads_k, dim), dtype), d.tensor((*rows_k, heads_k, dim_v), dtype)
    if d.maybe(0.3):
        a["bias"] = d.broadcast((batch, heads, seqlen_q, seqlen_k), dtype if d.maybe(0.7) else torch.float32)
    if d.maybe(0.3):
        a["mask"] = d.broadcast((batch, heads, seqlen_q, seqlen_k), torch.bool)
    if d.maybe(0.2):
        a["learnable_sink"] = d.tensor((heads,), dtype)
    if d.maybe(0.2):
        slopes = d.tensor((heads,) if d.maybe(0.5) else (batch, heads), torch.float32)
        a["alibi_slopes"] = slopes.detach() if isinstance(slopes, torch.Tensor) else slopes
    for name, lens in (("q", lens_q), ("k", lens_k)):
        pads = [d.random.randint(0, n // 2) for n in lens]
        if d.maybe(0.2):
            a[f"leftpad_{name}"] = d.integers(pads)
        if d.maybe(0.2):
            a[f"seqused_{name}"] = d.integers([d.random.randint(p, n) for p, n in zip(pads, lens, strict=True)])
    if d.maybe(0.3):
        a["dropout_p"] = d.number((0.0, 0.1, 0.5, 1.0, 1e-16), (-0.1, 1.1, math.nan, math.inf))
    if d.maybe(0.1):
        a["dropout_seed"] = torch.tensor([1, 2]) if not d.maybe(d.wrong) else torch.tensor([1.0])
    if d.maybe(0.2):
        a["softmax_scale"] = d.number((0.5, 1.0, 0.0, -1.0, 1e30), (math.nan, math.inf))
    if d.maybe(0.2):
        a["softcap"] = d.number((0.0, 1.0, 30.0, 1e-30, 1e30), (-1.0, math.nan, math.inf))
    if d.maybe(0.3):
        a["window_size"] = (
            d.number((-1, 0, 1, 7, 2**31 - 1, 2**40), (-2, -(2**40), 2**70, 1.5)),
            d.number((-1, 0, 1, 7, 2**31 - 1, 2**63 - 1), (-2, -(2**63), 2**64)),
        )
    a["causal"], a["deterministic"] = d.maybe(0.4), d.maybe(0.3)
    a["return_lse"] = d.maybe(0.5)
    if d.maybe(0.1):
        a["backend"] = d.random.choice(("auto", "cpu", "reference", "wgmma", "mma_sync", "none", 3, None))
    if d.maybe(0.03):
        a["return_attn_probs"] = True
    return varlen, a


def one_call(seed: int) -> str:
    """Makes the call of `seed` forward and backward; says how it ended."""
    torch.manual_seed(seed)
    varlen, a = arguments(Dice(seed))
    try:
        result = (flash_attn.flash_attn_varlen_func if varlen else flash_attn.flash_attn_func)(**a)
    except ALLOWED as error:
        return type(error).__name__
    outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t.requires_grad]
    leaves = [t for t in a.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    if outputs and leaves:
        torch.autograd.grad(outputs, leaves, [torch.randn_like(t) for t in outputs])
    return "ok"


def main(first: int, seconds: float) -> None:
    """Calls with seeds first, first + 1, … for a while; each seed is on the last line before its call starts."""
    counts: dict[str, int] = {}
    start, seed = time.monotonic(), first
    while time.monotonic() < start + seconds:
        print(seed, flush=True)
        ended = one_call(seed)
        counts[ended] = counts.get(ended, 0) + 1
        seed += 1
    print("done", seed - first, counts, flush=True)


def fuzz(first: int, seconds: float) -> None:
    root = Path(flash_attn.__file__).resolve().parent.parent
    script = f"import sys; sys.path[:0] = [{str(root)!r}, {str(Path(__file__).parent)!r}]; import test_fuzz; "
    command = [sys.executable, "-c", script + f"test_fuzz.main({first}, {seconds})"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)
        status, out, err = f"exit status {done.returncode}", done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        status, out, err = "a hang", (expired.stdout or b"").decode(), (expired.stderr or b"").decode()
    lines = out.splitlines()
    last = lines[-1] if lines else "none"
    assert last.startswith("done"), f"{status} in the call of seed {last}\n{err[-4000:]}"
    assert "'ok'" in last, f"no call succeeded: {last}"
    print(last)


def test_five_seconds():
    fuzz(0, 5)


@pytest.mark.full
def test_sixty_seconds():
    fuzz(1_000_000, 60)


if __name__ == "__main__":
    print(one_call(int(sys.argv[1])))
