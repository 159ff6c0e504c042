"""`Case`: one attention call as data. It builds its inputs, runs the library and the oracle, and prints as its id.

All inputs come from `seed` alone. Everything that must not be read (padding rows, gaps, rows behind the last sequence,
the upstream gradient and dLSE there, dLSE of rows that see nothing, bias outside every sequence) is NaN.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, field, fields, replace

import case_data
import oracle
import pytest
import torch
from case_data import on_device, strided, values
from torch import Tensor

import flash_attn

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
LENGTH_FIELDS = ("seqused_q", "seqused_k", "leftpad_q", "leftpad_k")
DATA = ("gaussian", "offset_k", "outliers", "equal_rows", "one_hot")
LAYOUTS = ("contiguous", "heads_first", "expanded", "last_stride_2", "slice")
ORDERS = 7  # naive evaluations whose worst error is the yardstick


@dataclass(frozen=True)
class Case:
    """Defaults mean "off". Broadcast patterns of bias and mask: up to four characters, "bhqk" in full, "1" where the
    size is 1, shorter for lower ranks ("qk", "1k")."""

    batch: int = 2
    heads: int = 2
    heads_k: int = 2
    seqlen_q: int = 33
    seqlen_k: int = 33
    dim: int = 16
    dim_v: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""  # "heads" or "batch_heads"
    bias: str = ""
    bias_fp32: bool = False
    bias_inf: bool = False  # a fifth of the entries −inf
    mask: str = ""
    blocks: str = ""  # of a block mask: see case_data.block_mask
    seqused_q: bool = False
    seqused_k: bool = False
    leftpad_q: bool = False
    leftpad_k: bool = False
    length_dtype: torch.dtype = torch.int32
    varlen: bool = False
    cu_dtype: torch.dtype = torch.int32
    trailing: int = 0  # rows behind the last sequence
    slack: int = 0  # max_seqlen beyond the longest sequence
    sink: bool = False
    dropout_p: float = 0.0
    data: str = "gaussian"
    layout: str = "contiguous"
    lse_grad: bool = False
    deterministic: bool = False
    grads: str = ""  # of "qkvbs": which inputs need a gradient (b bias, s sink)
    seed: int = 0

    def __str__(self) -> str:
        text = f"b{self.batch}-h{self.heads}x{self.heads_k}-q{self.seqlen_q}-k{self.seqlen_k}-d{self.dim}x{self.dim_v}"
        text += f"-{NAMES[self.dtype]}"
        for f in fields(self)[8:]:
            value = getattr(self, f.name)
            if value != f.default:
                if isinstance(value, tuple):
                    value = ",".join(map(str, value))
                text += f"-{f.name}" if value is True else f"-{f.name}={str(value).removeprefix('torch.')}"
        return text

    @property
    def coherent(self) -> bool:
        """Equal rows make equal rounding errors, which add up instead of averaging out."""
        return self.data in ("equal_rows", "one_hot")

    @property
    def differentiable(self) -> Case:
        """The same case with every gradient."""
        return replace(self, grads="qkv" + "b" * bool(self.bias) + "s" * self.sink)


@dataclass
class Inputs:
    """What a case passes. Lengths as tensors or None; `real_q`, `real_k`: rows that belong to a sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None
    mask: Tensor | None = None
    block_mask: flash_attn.BlockMask | None = None
    visible_blocks: Tensor | None = None  # the same, dense
    alibi: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    lengths: dict[str, Tensor | None] = field(default_factory=dict)
    dropout_seed: Tensor | None = None
    real_q: Tensor | None = None
    real_k: Tensor | None = None

    def leaves(self, grads: str) -> dict[str, Tensor]:
        """The tensors of `grads`, by letter."""
        named = {"q": self.q, "k": self.k, "v": self.v, "b": self.bias, "s": self.sink}
        return {c: named[c] for c in grads}


def _pattern_shape(pattern: str, sizes: tuple[int, int, int, int]) -> list[int]:
    full = dict(zip("bhqk", sizes, strict=True))
    return [1 if c == "1" else full[c] for c in pattern]


def build(case: Case) -> Inputs:
    """The inputs of `case` on the CPU, without gradients required."""
    g = torch.Generator().manual_seed(case.seed)
    batch = case.batch

    def random_lengths(limits: list[int], at_least: list[int] | None = None) -> list[int]:
        low = at_least or [0] * len(limits)
        return [lo + int(torch.randint(0, hi - lo + 1, (), generator=g)) for lo, hi in zip(low, limits, strict=True)]

    lens_q, lens_k = [case.seqlen_q] * batch, [case.seqlen_k] * batch
    if case.varlen:
        lens_q, lens_k = random_lengths(lens_q), random_lengths(lens_k)
    lengths: dict[str, list[int] | None] = dict.fromkeys(LENGTH_FIELDS)
    for side, limits in (("q", lens_q), ("k", lens_k)):
        pads = random_lengths([n // 2 for n in limits]) if getattr(case, f"leftpad_{side}") else None
        lengths[f"leftpad_{side}"] = pads
        lengths[f"seqused_{side}"] = random_lengths(limits, pads) if getattr(case, f"seqused_{side}") else None

    def cumulative(lens: list[int]) -> Tensor:
        return torch.tensor([sum(lens[:n]) for n in range(len(lens) + 1)], dtype=case.cu_dtype)

    def real_rows(side: str, lens: list[int], rows: int) -> Tensor:
        real = torch.zeros((sum(lens) + case.trailing,) if case.varlen else (batch, rows), dtype=torch.bool)
        for b, n in enumerate(lens):
            used, pad = lengths[f"seqused_{side}"], lengths[f"leftpad_{side}"]
            span = slice(pad[b] if pad else 0, used[b] if used else n)
            if case.varlen:
                start = sum(lens[:b])
                real[start + span.start : start + span.stop] = True
            else:
                real[b, span] = True
        return real

    real_q, real_k = real_rows("q", lens_q, case.seqlen_q), real_rows("k", lens_k, case.seqlen_k)
    tensors = {}
    for role, real, heads, dim in (
        ("q", real_q, case.heads, case.dim),
        ("k", real_k, case.heads_k, case.dim),
        ("v", real_k, case.heads_k, case.dim_v),
        ("dout", real_q, case.heads, case.dim_v),
    ):
        x = values(case, (*real.shape, heads, dim), role, g).to(case.dtype)
        x[~real] = math.nan
        tensors[role] = strided(x, case.layout, role)
    statistics_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    real_lse = real_q[None].expand(case.heads, -1) if case.varlen else real_q[:, None].expand(-1, case.heads, -1)
    dlse = torch.randn(real_lse.shape, generator=g).to(statistics_dtype).masked_fill(~real_lse, math.nan)
    made = Inputs(**tensors, dlse=dlse, real_q=real_q, real_k=real_k)
    if case.varlen:
        made.cu_seqlens_q, made.cu_seqlens_k = cumulative(lens_q), cumulative(lens_k)
        made.max_seqlen_q = max(lens_q, default=0) + case.slack
        made.max_seqlen_k = max(lens_k, default=0) + case.slack
    else:
        made.max_seqlen_q, made.max_seqlen_k = case.seqlen_q, case.seqlen_k
    made.lengths = {n: None if t is None else torch.tensor(t, dtype=case.length_dtype) for n, t in lengths.items()}
    sizes = (batch, case.heads, made.max_seqlen_q, made.max_seqlen_k)
    if case.dropout_p:
        made.dropout_seed = torch.randint(-(2**63), 2**63 - 1, (2,), generator=g)
    if case.alibi:
        shape = (case.heads,) if case.alibi == "heads" else (batch, case.heads)
        made.alibi = torch.rand(shape, generator=g) * 0.3
    if case.mask:
        made.mask = torch.rand(_pattern_shape(case.mask, sizes), generator=g) < 0.7
    if case.blocks:
        made.block_mask, made.visible_blocks = case_data.block_mask(case.blocks, sizes, g)
    if case.bias:
        made.bias = _bias(case, sizes, made, g)
    if case.sink:
        made.sink = torch.randn(case.heads, generator=g).to(case.dtype)
    return made


def _bias(case: Case, sizes: tuple[int, int, int, int], made: Inputs, g: torch.Generator) -> Tensor:
    shape = _pattern_shape(case.bias, sizes)
    bias = torch.randn(shape, generator=g).to(torch.float32 if case.bias_fp32 else case.dtype)
    if case.bias_inf:
        bias[torch.rand(shape, generator=g) < 0.2] = -math.inf
    # NaN where no sequence has a row and a column
    used = torch.zeros(sizes, dtype=torch.bool)
    for s in oracle.sequences(made.q, made.k, options(case, made)):
        used[s.index, :, s.rows, s.columns] = True
    for dimension, c in zip(range(4 - len(shape), 4), case.bias, strict=True):
        if c == "1":
            used = used.any(dimension, keepdim=True)
    while used.ndim > len(shape):
        used = used.any(0)
    bias[~used] = math.nan
    return strided(bias, case.layout, "bias") if case.layout in ("last_stride_2", "slice") else bias


def options(case: Case, made: Inputs) -> oracle.Options:
    """What the oracle needs to know of `case`."""
    keep = None
    if case.dropout_p >= 2.0**-17:  # less drops nothing and scales nothing
        seed = tuple(int(s) for s in made.dropout_seed)
        keep = oracle.keep_mask(seed, case.dropout_p, case.batch, case.heads, made.max_seqlen_q, made.max_seqlen_k)
    mask = made.mask if made.block_mask is None else made.visible_blocks
    if mask is not made.mask and made.mask is not None:
        mask = mask & made.mask
    return oracle.Options(
        scale=case.scale, causal=case.causal, window=case.window, softcap=case.softcap, alibi=made.alibi,
        mask=mask, cu_seqlens_q=made.cu_seqlens_q, cu_seqlens_k=made.cu_seqlens_k, **made.lengths,
        dropout_p=case.dropout_p if keep is not None else 0.0, keep=keep,
    )  # fmt: skip


@dataclass
class Result:
    """Output, LSE and gradients by letter of "qkvbs"."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


def keywords(case: Case, made: Inputs) -> dict:
    """What attention functions and `explain` take alike."""
    return dict(
        dropout_p=case.dropout_p, softmax_scale=case.scale, causal=case.causal, window_size=case.window,
        softcap=case.softcap, alibi_slopes=made.alibi, deterministic=case.deterministic, bias=made.bias,
        mask=made.mask, block_mask=made.block_mask, learnable_sink=made.sink, **made.lengths,
    )  # fmt: skip


def refusal_of(case: Case, made: Inputs, backend: str) -> str | None:
    """Why a backend does not serve a case whose inputs are on its device; None: it does."""
    packed = {}
    if case.varlen:
        packed = {n: getattr(made, n) for n in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}
    found = flash_attn.explain(made.q, made.k, made.v, **keywords(case, made), **packed, backend=backend)
    return found.refusals.get(backend)


def call(case: Case, made: Inputs, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """(out, lse) of the public function that `case` is about; `made` on any device."""
    common = dict(keywords(case, made), dropout_seed=made.dropout_seed, return_lse=True, backend=backend)
    if case.varlen:
        return flash_attn.flash_attn_varlen_func(
            made.q, made.k, made.v, made.cu_seqlens_q, made.cu_seqlens_k, made.max_seqlen_q, made.max_seqlen_k,
            **common,
        )  # fmt: skip
    return flash_attn.flash_attn_func(made.q, made.k, made.v, **common)


def move(made: Inputs, device: str) -> None:
    """All inputs to the device."""
    made.lengths = {n: on_device(t, device) for n, t in made.lengths.items()}
    for f in fields(made):
        if isinstance(getattr(made, f.name), Tensor):
            setattr(made, f.name, on_device(getattr(made, f.name), device))
    made.block_mask = None if made.block_mask is None else made.block_mask.to(device)


def run(case: Case, device: str = "cpu", backend: str = "auto") -> Result:
    """What the library computes, moved to the CPU."""
    made = build(case)
    reference = expected(case)
    # dLSE of a row that sees nothing is ignored
    made.dlse = made.dlse.masked_fill(reference.lse == -math.inf, math.nan)
    move(made, device)
    if backend == "wgmma" and (refusal := refusal_of(case, made, backend)):
        pytest.skip(refusal)
    leaves = made.leaves(case.grads)
    for t in leaves.values():
        t.requires_grad_()
    out, lse = call(case, made, backend)
    assert out.dtype == case.dtype and lse.dtype == made.dlse.dtype, f"out {out.dtype}, lse {lse.dtype}"
    assert out.requires_grad == bool(leaves)
    result = Result(out.detach().cpu(), lse.detach().cpu())
    if leaves:
        outputs, upstream = [out], [made.dout]
        if case.lse_grad:
            outputs, upstream = [out, lse], [made.dout, made.dlse]
        grads = torch.autograd.grad(outputs, list(leaves.values()), upstream)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            assert grad.dtype == leaf.dtype and grad.shape == leaf.shape, f"d{name}: {grad.dtype} {tuple(grad.shape)}"
            result.grads[name] = grad.cpu()
    return result


@dataclass
class Expected(Result):
    """fp64 values, naive ones in several orders, and the rounding that cancellation leaves."""

    naive: list[Result] = field(default_factory=list)
    lse_naive: list[Tensor] = field(default_factory=list)
    unavoidable: dict[str, float] = field(default_factory=dict)


@functools.lru_cache(maxsize=4)
def expected(case: Case) -> Expected:
    """The oracle's and naive PyTorch's answers to `case`."""
    made = build(case)
    o = options(case, made)
    if not case.lse_grad:
        made.dlse = torch.zeros_like(made.dlse)
    dout = made.dout.nan_to_num(nan=0.0)

    def evaluate(function, dtype, *extra) -> tuple[Result, Tensor]:
        names = "qkv" + "b" * (made.bias is not None) + "s" * (made.sink is not None)
        leaves = {n: t.detach().clone() for n, t in made.leaves(names).items()}
        for real, n in ((made.real_q, "q"), (made.real_k, "k"), (made.real_k, "v")):
            leaves[n][~real] = 0.0
        leaves = {n: (t.to(dtype) if dtype else t).requires_grad_(n in case.grads) for n, t in leaves.items()}
        out, lse = function(*(leaves.get(n) for n in "qkvbs"), o, *extra)
        result = Result(out.detach(), lse.detach())
        if case.grads:
            dlse = made.dlse.masked_fill(lse.detach() == -math.inf, 0.0).nan_to_num(nan=0.0)
            pairs = [(y, u) for y, u in ((out, dout.to(out.dtype)), (lse, dlse.to(lse.dtype))) if y.requires_grad]
            grads = [None] * len(case.grads)
            if pairs:
                grads = torch.autograd.grad(
                    [y for y, _ in pairs], [leaves[n] for n in case.grads], [u for _, u in pairs], allow_unused=True
                )
            for n, grad in zip(case.grads, grads, strict=True):
                result.grads[n] = torch.zeros_like(leaves[n]) if grad is None else grad
        return result, dlse if case.grads else None

    records: list = []
    exact, dlse = evaluate(oracle.attention, torch.float64, records)
    answer = Expected(exact.out, exact.lse, exact.grads)
    g = torch.Generator().manual_seed(1)
    orders = [None, *[g] * (ORDERS - 2), oracle.ONE_BY_ONE]
    for order in orders if case.dtype in (torch.float32, torch.float64) else orders[:1]:
        answer.naive.append(evaluate(oracle.naive_attention, None, order)[0])
    answer.lse_naive = [r.lse for r in answer.naive]
    if case.dtype not in (torch.float32, torch.float64):  # LSE is fp32 whatever q is
        with torch.no_grad():
            wide = [t.nan_to_num(nan=0.0).float() for t in (made.q, made.k, made.v)]
            wide += [None if t is None else t.float() for t in (made.bias, made.sink)]
            for order in orders:
                answer.lse_naive.append(oracle.naive_attention(*wide, o, order)[1])
            answer.lse_naive = answer.lse_naive[1:]
    if case.grads or case.coherent:
        clean = [t.nan_to_num(nan=0.0) for t in (made.q, made.k, made.v)]
        answer.unavoidable = oracle.rounding(
            *clean, exact.out, dout, dlse, made.bias, made.sink, o, records, coherent=case.coherent
        )
    eps = torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps
    answer.unavoidable["lse"] = eps * oracle.lse_rounding(exact.lse, made.sink, o, records)
    return answer


def check(case: Case, device: str = "cpu", backend: str = "auto") -> Result:
    """Run `case` and hold every output against fp64 and naive; what must be exactly zero is compared exactly."""
    got, want, made = run(case, device, backend), expected(case), build(case)
    oracle.assert_no_worse_than_naive(
        got.lse, want.lse, want.lse_naive, name="lse", unavoidable=want.unavoidable["lse"]
    )
    oracle.assert_no_worse_than_naive(
        got.out, want.out, [n.out for n in want.naive], unavoidable=want.unavoidable.get("o", 0.0)
    )
    for n, grad in got.grads.items():
        oracle.assert_no_worse_than_naive(
            grad, want.grads[n], [r.grads[n] for r in want.naive], name=f"d{n}", dtype=case.dtype,
            unavoidable=want.unavoidable.get(n, 0.0),
        )  # fmt: skip
    empty = want.lse == -math.inf
    empty = empty.transpose(0, 1) if case.varlen else empty.transpose(1, 2)
    unseen_q = empty | ~made.real_q[..., None]  # with a sink a row may see nothing though its LSE is finite
    for name, rows in (("out", got.out), ("dq", got.grads.get("q"))):
        if rows is not None:
            assert (rows[unseen_q] == 0).all(), f"{name} is not 0 where a row sees nothing or is padding"
    for name in "kv":
        if name in got.grads:
            assert (got.grads[name][~made.real_k] == 0).all(), f"d{name} of padding is not 0"
    if "v" in got.grads:
        assert (got.grads["v"][(want.grads["v"] == 0).all(-1)] == 0).all(), "dv of unseen keys is not 0"
    return got


@dataclass(frozen=True)
class Target:
    """Where a case runs."""

    device: str
    backend: str

    def __str__(self) -> str:
        return self.backend if self.device == "cpu" else f"{self.device}-{self.backend}"


CPU = Target("cpu", "auto")
REFERENCE = Target("cpu", "reference")
CUDA = [Target("cuda", "reference")] if torch.cuda.is_available() else []
TARGETS = [CPU, REFERENCE, *CUDA]
# Backends with kernels for half precision alone: the cases of `in_half_precision` are theirs.
KERNELS = [Target("cuda", "mma_sync")] if torch.cuda.is_available() and flash_attn.is_available("mma_sync") else []
# Of the same cases, those that it serves: which ones is tested in test_gpu.py.
HOPPER = bool(KERNELS) and torch.cuda.get_device_capability() == (9, 0) and bool(flash_attn.is_available("wgmma"))
KERNELS += [Target("cuda", "wgmma")] * HOPPER


def in_half_precision(case: Case, number: int) -> Case | None:
    """The case for a GPU kernel: fp32 and fp64 become fp16 and bf16 in turn. None: it has no kernel."""
    half = case.dtype if case.dtype in (torch.float16, torch.bfloat16) else (torch.bfloat16, torch.float16)[number % 2]
    return None if max(case.dim, case.dim_v) > 256 else replace(case, dtype=half)


def with_targets(cases: list[Case], reference_every: int = 4):
    """Parametrise over (case, target): the CPU library and CUDA take all cases, the slow reference a part."""
    rows = [(c, t) for n, c in enumerate(cases) for t in TARGETS if t != REFERENCE or n % reference_every == 0]
    halves = dict.fromkeys(half for n, c in enumerate(cases) if (half := in_half_precision(c, n)) is not None)
    rows += [(c, t) for c in halves for t in KERNELS]
    return pytest.mark.parametrize(
        ("case", "target"), [pytest.param(c, t, id=f"{t}-{c}", marks=marks(t)) for c, t in rows]
    )


def marks(target: Target) -> list:
    """`make test-gpu` runs what needs a GPU."""
    return [pytest.mark.gpu] if target.device == "cuda" else []


def random_case(rng: random.Random) -> Case:
    """A point of the whole option space, small and odd."""

    def maybe(chance: float) -> bool:
        return rng.random() < chance

    def pattern() -> str:
        full = "".join(c if maybe(0.6) else "1" for c in "bhqk")
        return full[rng.choice((0, 0, 0, 1, 2, 3)) :]

    heads_k = rng.choice((1, 1, 2, 3))
    lengths = (0, 1, 2, 3, 5, 7, 9, 16, 17, 31, 33, 33, 48, 63, 64, 65, 65, 97, 129)
    seqlen_q = rng.choice(lengths)
    dim = rng.choice((1, 2, 3, 4, 5, 8, 8, 11, 16, 16, 17, 24, 32, 33, 40, 64, 64, 72, 80, 96, 128))
    bias, sink = pattern() if maybe(0.3) else "", maybe(0.25)
    size = [rng.choice((16, 16, 32, 48, 128)) for _ in "qk"]
    density = rng.choice((0.0, 0.1, 0.5, 0.5, 1.0, "rows", "columns", "one"))
    blocks = f"{rng.choice(('bh', 'b1', '1h', '11'))} {size[0]}x{size[1]} {density}{rng.choice(('', ' e'))}"
    grads = "qkv" + "b" * bool(bias) + "s" * sink
    if maybe(0.2):
        grads = "".join(c for c in grads if maybe(0.5))
    return Case(
        batch=rng.choice((1, 1, 2, 3) if maybe(0.98) else (0,)),
        heads_k=heads_k,
        heads=heads_k * rng.choice((1, 1, 2, 3)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q if maybe(0.3) else rng.choice(lengths),
        dim=dim,
        dim_v=dim if maybe(0.6) else rng.choice((1, 2, 3, 7, 8, 16, 24, 40, 64, 128)),
        dtype=rng.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)),
        causal=maybe(0.4),
        window=(rng.choice((-1, 0, 1, 3, 7, 20, 64)), rng.choice((-1, 0, 1, 3, 7, 20, 64))) if maybe(0.3) else (-1, -1),
        scale=rng.choice((0.05, 0.5, 1.0, 0.0, -0.3)) if maybe(0.2) else None,
        softcap=rng.choice((0.5, 3.0, 15.0, 50.0)) if maybe(0.2) else 0.0,
        alibi=rng.choice(("heads", "batch_heads")) if maybe(0.2) else "",
        bias=bias,
        bias_fp32=bool(bias) and maybe(0.4),
        bias_inf=bool(bias) and maybe(0.3),
        mask=pattern() if maybe(0.25) else "",
        blocks=blocks if maybe(0.15) else "",
        seqused_q=maybe(0.15),
        seqused_k=maybe(0.25),
        leftpad_q=maybe(0.15),
        leftpad_k=maybe(0.2),
        length_dtype=rng.choice((torch.int32, torch.int64)),
        varlen=(varlen := maybe(0.4)),
        cu_dtype=rng.choice((torch.int32, torch.int64)) if varlen else torch.int32,
        trailing=rng.choice((0, 0, 1, 17)) if varlen else 0,
        slack=rng.choice((0, 0, 1, 30)) if varlen else 0,
        sink=sink,
        dropout_p=rng.choice((0.1, 0.17, 0.5, 0.9, 1e-16, 1.0)) if maybe(0.25) else 0.0,
        data=rng.choice(DATA) if maybe(0.4) else "gaussian",
        layout=rng.choice(LAYOUTS) if maybe(0.4) else "contiguous",
        lse_grad=maybe(0.4),
        deterministic=maybe(0.2),
        grads=grads,
        seed=rng.randrange(2**31),
    )
