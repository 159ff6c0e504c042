"""The counts of io_model.py against loops that are walked: equal, to the byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flash_attn import gpus, io_model
from flash_attn.io_model import Blocks, Workload


class Hbm:
    """Large memory: all that an algorithm does not hold on chip passes through `load` and `store`, which count."""

    def __init__(self, item_bytes: int, number_bytes: int, **tensors: Tensor) -> None:
        self.tensors, self.read, self.written, self.flops = dict(tensors), 0, 0, 0
        self._bytes = {"numbers": number_bytes, "keep": 1}
        self._item_bytes = item_bytes

    def bytes_of(self, name: str, x: Tensor) -> int:
        return x.numel() * self._bytes.get("numbers" if name in ("l", "m") else name, self._item_bytes)

    def load(self, *names: str, rows: slice = slice(None)) -> list[Tensor]:
        parts = [self.tensors[name][rows] for name in names]
        self.read += sum(map(self.bytes_of, names, parts))
        return [x.clone() for x in parts]

    def store(self, name: str, x: Tensor, rows: slice = slice(None)) -> None:
        if rows == slice(None):
            self.tensors[name] = x.clone()
        else:
            self.tensors[name][rows] = x
        self.written += self.bytes_of(name, x)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.read, self.written, self.flops


def counts(cost: io_model.Cost) -> tuple[int, int, int]:
    return cost.read, cost.written, cost.flops


def fill_memory(w: Workload, **more: Tensor) -> Hbm:
    """Q, K, V and dO of one head; computed in fp64, counted in the workload's dtype."""
    tensors = {name: torch.randn(w.seqlen, w.dim, dtype=torch.float64) for name in ("q", "k", "v", "do")}
    tensors["mask"] = torch.randn(w.seqlen, dtype=torch.float64)
    return Hbm(w.dtype.itemsize, w.number_bytes, **tensors, **more)


def exact(w: Workload, hbm: Hbm, keep: Tensor | float = 1.0, visible: Tensor | None = None) -> list[Tensor]:
    """O, dQ, dK, dV by autograd."""
    q, k, v, do = (hbm.tensors[name].clone().requires_grad_(name != "do") for name in ("q", "k", "v", "do"))
    s = q @ k.mT + (hbm.tensors["mask"] if w.mask else 0.0)
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    out = (s.softmax(-1) * keep) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]


def assert_results(hbm: Hbm, expected: Sequence[Tensor], names: str = "o dq dk dv") -> None:
    for name, x in zip(names.split(), expected, strict=False):
        torch.testing.assert_close(hbm.tensors[name], x)


def walk_standard_forward(w: Workload, hbm: Hbm) -> None:
    q, k = hbm.load("q", "k")
    hbm.store("s", hbm.product(q, k.mT))
    if w.mask:
        s, mask = hbm.load("s", "mask")
        hbm.store("s", s + mask)
    (s,) = hbm.load("s")
    hbm.store("p", s.softmax(-1))
    if w.dropout:
        (p,) = hbm.load("p")
        keep = (torch.rand(p.shape) > 0.25).double() / 0.75
        hbm.store("keep", keep)
        hbm.store("dropped", p * keep)
    p, v = hbm.load("dropped" if w.dropout else "p", "v")
    hbm.store("o", hbm.product(p, v))


def walk_standard_backward(w: Workload, hbm: Hbm) -> None:
    p, do = hbm.load("dropped" if w.dropout else "p", "do")
    hbm.store("dv", hbm.product(p.mT, do))
    do, v = hbm.load("do", "v")
    hbm.store("dp", hbm.product(do, v.mT))
    if w.dropout:
        dp, keep = hbm.load("dp", "keep")
        hbm.store("dp", dp * keep)
    p, dp = hbm.load("p", "dp")
    hbm.store("ds", p * (dp - (p * dp).sum(-1, keepdim=True)))
    ds, k = hbm.load("ds", "k")
    hbm.store("dq", hbm.product(ds, k))
    ds, q = hbm.load("ds", "q")
    hbm.store("dk", hbm.product(ds.mT, q))


def slices(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def walk_flash_forward(w: Workload, blocks: Blocks, hbm: Hbm, visit: Tensor) -> None:
    """Algorithms 1 and 5. visit: (query blocks, key blocks)."""
    n = w.seqlen
    hbm.store("o", torch.zeros(n, w.dim, dtype=torch.float64))
    hbm.store("l", torch.zeros(n, dtype=torch.float64))
    hbm.store("m", torch.full((n,), -math.inf, dtype=torch.float64))
    for j, columns in enumerate(slices(n, blocks.columns)):
        k, v, *mask = hbm.load("k", "v", *(["mask"] if w.mask else []), rows=columns)
        for i, rows in enumerate(slices(n, blocks.rows)):
            if not visit[i, j]:
                continue
            q, o, ell, m = hbm.load("q", "o", "l", "m", rows=rows)
            s = hbm.product(q, k.mT) + (mask[0] if mask else 0.0)
            m_new = torch.maximum(m, s.amax(-1))
            p = torch.exp(s - m_new[:, None])
            rescaled = ell * torch.exp(m - m_new)
            l_new = rescaled + p.sum(-1)
            hbm.store("o", (rescaled[:, None] * o + hbm.product(p, v)) / l_new[:, None], rows)
            hbm.store("l", l_new, rows)
            hbm.store("m", m_new, rows)


def walk_flash_backward(w: Workload, blocks: Blocks, hbm: Hbm, visit: Tensor) -> None:
    """Algorithm 4."""
    n = w.seqlen
    hbm.store("dq", torch.zeros(n, w.dim, dtype=torch.float64))
    hbm.tensors |= {name: torch.zeros(n, w.dim, dtype=torch.float64) for name in ("dk", "dv")}  # allocated only
    for j, columns in enumerate(slices(n, blocks.columns)):
        k, v, *mask = hbm.load("k", "v", *(["mask"] if w.mask else []), rows=columns)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for i, rows in enumerate(slices(n, blocks.rows)):
            if not visit[i, j]:
                continue
            q, o, do, dq, ell, m = hbm.load("q", "o", "do", "dq", "l", "m", rows=rows)
            s = hbm.product(q, k.mT) + (mask[0] if mask else 0.0)
            p = torch.exp(s - m[:, None]) / ell[:, None]
            dv += hbm.product(p.mT, do)
            ds = p * (hbm.product(do, v.mT) - (do * o).sum(-1, keepdim=True))
            hbm.store("dq", dq + hbm.product(ds, k), rows)
            dk += hbm.product(ds.mT, q)
        hbm.store("dk", dk, columns)
        hbm.store("dv", dv, columns)


OPTIONS = [
    Workload(seqlen=24, dim=4),
    Workload(seqlen=17, dim=5, dtype=torch.float32, mask=True),
    Workload(seqlen=9, dim=3, dtype=torch.float64, dropout=True),
    Workload(seqlen=24, dim=8, dtype=torch.bfloat16, mask=True, dropout=True),
]


@pytest.mark.parametrize("w", OPTIONS, ids=str)
def test_standard_attention_is_counted_exactly(w: Workload) -> None:
    hbm = fill_memory(w)
    walk_standard_forward(w, hbm)
    assert hbm.counts == counts(io_model.standard_forward(w))
    walk_standard_backward(w, hbm)
    assert hbm.counts == counts(io_model.standard(w))
    assert_results(hbm, exact(w, hbm, hbm.tensors.get("keep", 1.0)))


@pytest.mark.parametrize("blocks", [(8, 8), (4, 12), (1, 1), (24, 24), (5, 7), (7, 5), (100, 100)], ids=str)
@pytest.mark.parametrize("w", OPTIONS, ids=str)
def test_flash_attention_is_counted_exactly(w: Workload, blocks: tuple[int, int]) -> None:
    """Also where the last blocks are short."""
    hbm, blocks = fill_memory(w), Blocks(*blocks)
    everywhere = torch.ones(len(slices(w.seqlen, blocks.rows)), len(slices(w.seqlen, blocks.columns)), dtype=torch.bool)
    walk_flash_forward(w, blocks, hbm, everywhere)
    assert hbm.counts == counts(io_model.flash_forward(w, blocks))
    walk_flash_backward(w, blocks, hbm, everywhere)
    assert hbm.counts == counts(io_model.flash(w, blocks))
    assert_results(hbm, exact(w, hbm))


@pytest.mark.parametrize("mask", (False, True))
@pytest.mark.parametrize("blocks", [(4, 8), (8, 4), (6, 6)], ids=str)
def test_block_sparse_attention_is_counted_exactly(blocks: tuple[int, int], mask: bool) -> None:
    n, blocks = 24, Blocks(*blocks)
    visit = torch.rand(n // blocks.rows, n // blocks.columns) < 0.4
    visit.fill_diagonal_(True)
    visit[:, 0] = True  # every row sees something
    w = Workload(seqlen=n, dim=4, mask=mask, density=visit.double().mean().item())
    hbm = fill_memory(w)
    walk_flash_forward(w, blocks, hbm, visit)
    assert hbm.counts == counts(io_model.flash_forward(w, blocks))
    walk_flash_backward(w, blocks, hbm, visit)
    assert hbm.counts == counts(io_model.flash(w, blocks))
    visible = visit.repeat_interleave(blocks.rows, 0).repeat_interleave(blocks.columns, 1)
    assert_results(hbm, exact(w, hbm, visible=visible))


def test_heads_and_batches_multiply() -> None:
    w, blocks = Workload(seqlen=30, dim=8, mask=True, dropout=True), Blocks(4, 8)
    many = replace(w, heads=3, batch=5)
    for count in (io_model.standard, io_model.kernels, lambda w: io_model.flash(w, blocks)):
        assert counts(count(many)) == tuple(15 * x for x in counts(count(w)))


def test_figure_2_of_the_paper() -> None:
    """40.3 GB for standard attention with an additive mask and dropout; 9 times less for FlashAttention, 4.4 GB. Its
    B_c of that size is 256, and its code kept dropout's state and the rescaling out of memory: within a quarter."""
    w = replace(io_model.GPT2_MEDIUM, mask=True, dropout=True)
    assert io_model.standard(w).bytes == pytest.approx(40.3e9, rel=0.01)
    assert io_model.flash(w, Blocks(64, 256)).bytes == pytest.approx(4.4e9, rel=0.25)
    assert io_model.flash(w, Blocks(64, 256)).flops / io_model.standard(w).flops == pytest.approx(7 / 6)


def test_block_sizes() -> None:
    assert io_model.paper_blocks(memory=4 * 64 * 100, dim=64) == (64, 100)
    assert io_model.paper_blocks(memory=4 * 64 * 100 + 1, dim=64) == (64, 101)
    assert io_model.paper_blocks(memory=64, dim=64) == (1, 1)
    for kilobytes in (16, 32, 64, 128, 256, 512, 1024):
        memory = kilobytes * 256  # fp32
        rows, columns = io_model.resident_blocks(memory, 64, least_rows=16)
        needs = [2 * n * 64 + n * rows + 3 * rows * 64 for n in (columns, columns + 1)]
        assert needs[0] <= memory * 7 / 8 < needs[1]
        assert memory < 8192 or columns == pytest.approx(io_model.paper_blocks(memory, 64).columns, rel=0.35)


def test_theorem_2_bounds_the_exact_count() -> None:
    """The counts lie within constants of the laws over the whole range of M; the loops say which."""
    dim = 64
    for seqlen in (1024, 4096, 16384):
        w = Workload(seqlen=seqlen, dim=dim, dtype=torch.float32)
        standard = io_model.standard_forward(w).bytes / 4
        assert standard == 4 * io_model.theorem2_standard(seqlen, dim)  # Q, K, V, O; S and P, each out and in
        for memory in (dim, 16 * dim, dim**2, seqlen * dim // 8, seqlen * dim):
            flash = io_model.flash_forward(w, io_model.paper_blocks(memory, dim)).bytes / 4
            # T_c = 4Nd / M blocks (below M = 4d: N), each 3Nd and 4N numbers, beside 3Nd for K, V and zeros
            assert (12 if memory >= 4 * dim else 3) <= flash / io_model.theorem2_flash(seqlen, dim, memory) <= 17
            assert flash >= io_model.proposition3_lower_bound(seqlen, dim, memory) >= seqlen * dim
            sparse = io_model.proposition4_block_sparse(seqlen, dim, memory, 0.25)
            assert sparse == seqlen * dim + io_model.theorem2_flash(seqlen, dim, memory) / 4


def test_kernels_read_again_what_the_l2_cache_does_not_hold() -> None:
    w = Workload(seqlen=65536, dim=128, heads=16, batch=4)
    large, small = io_model.GPUS["H200"], replace(io_model.GPUS["H200"], l2_bytes=1 << 20)
    assert counts(io_model.kernels(w, large)) == counts(io_model.kernels(w))
    assert io_model.kernels(w, small).bytes > 100 * io_model.kernels(w).bytes
    assert io_model.kernels(w, small).flops == io_model.kernels(w).flops
    one = replace(w, heads=1, batch=1)
    assert counts(io_model.kernels(w)) == tuple(64 * x for x in counts(io_model.kernels(one)))


def test_fused_kernels_move_what_they_must() -> None:
    """Q, K, V, then Q, K, V, O, dO in; O, then dQ, dK, dV out: no implementation moves less than 12 matrices."""
    w = Workload(seqlen=512, dim=64)
    cost = io_model.kernels(w)
    assert cost.bytes > 12 * w.matrix
    assert cost.flops == 14 * 512**2 * 64
    names = [p.name for p in cost.passes]
    assert names == ["forward", "delta", "zeros for dQ", "backward", "dQ"]
    # Forward, counted by hand: Q, K, V in, O out, LSE and two statistics of fp32.
    assert cost.passes[0].bytes == 4 * 512 * 64 * 2 + 3 * 512 * 4


def test_roofline() -> None:
    w = replace(io_model.GPT2_MEDIUM, dropout=True)
    for gpu in io_model.GPUS.values():
        standard, flash = (io_model.roofline(f(w), gpu) for f in (io_model.standard, io_model.kernels))
        assert standard.bound == "memory" and flash.bound == "compute"
        assert flash.seconds < standard.seconds
    gpu = io_model.GPUS["A100"]
    one = io_model.Cost((io_model.Pass("both", read=1555, written=0, flops=624000),))
    assert io_model.roofline(one, gpu).seconds == pytest.approx(2e-9)  # 1 ns of memory, 2 ns of products
    assert io_model.roofline(one + one, gpu).seconds == pytest.approx(4e-9)
    two = io_model.Cost((io_model.Pass("memory", 1555, 0), io_model.Pass("products", 0, 0, 624000)))
    assert io_model.roofline(two, gpu).seconds == pytest.approx(3e-9)
    assert one.intensity == 624000 / 1555
    assert gpus.find_gpu("NVIDIA H200").name == "H200-SXM"
    assert gpus.find_gpu("Tesla T4").name == "T4"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Workload(seqlen=0, dim=64), "seqlen must be an int >= 1, is 0"),
        (lambda: Workload(seqlen=8, dim=64.0), "dim must be an int >= 1, is 64.0"),
        (lambda: Workload(seqlen=8, dim=64, batch=True), "batch must be an int >= 1, is True"),
        (lambda: io_model.roofline(io_model.kernels(OPTIONS[0]), "H200"), "gpu must be a Gpu, .*, is 'H200'"),
        (lambda: Workload(seqlen=8, dim=64, density=0), r"density must be in \(0, 1\], is 0"),
        (lambda: Workload(seqlen=8, dim=64, dtype=torch.int8), "dtype must be a floating-point dtype, is torch.int8"),
        (lambda: io_model.paper_blocks(63, 64), "memory must hold a row of dim = 64 elements, is 63"),
        (lambda: io_model.resident_blocks(4096, 64, 32), "memory must hold tiles of 32 rows of dim = 64, is 4096"),
        (lambda: io_model.flash_forward(OPTIONS[0], (0, 8)), "rows must be an int >= 1, is 0"),
        (lambda: io_model.kernels_backward(OPTIONS[0], (8, -1)), "columns must be an int >= 1, is -1"),
        (lambda: io_model.theorem2_flash(8, 64, 513), r"memory must be in \[dim, seqlen · dim\] = \[64, 512\]"),
        (lambda: io_model.proposition4_block_sparse(8, 64, 64, 1.5), r"density must be in \[0, 1\], is 1.5"),
        (lambda: io_model.proposition4_block_sparse(8, 64, 64, "x"), r"density must be in \[0, 1\], is x"),
        (lambda: replace(OPTIONS[0], density=None), r"density must be in \(0, 1\], is None"),
        (lambda: gpus.find_gpu("NVIDIA T400"), "gpu 'NVIDIA T400' is not in the table"),
        (lambda: gpus.find_gpu("TPU"), "gpu 'TPU' is not in the table: T4, A100, RTX 3090, H200"),
        (
            lambda: io_model.roofline(io_model.kernels(OPTIONS[0]), io_model.GPUS["T4"], torch.bfloat16),
            "dtype torch.bfloat16: no figure for T4",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
