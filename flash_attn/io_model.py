"""How many bytes attention moves and how many FLOPs it takes, as exact counts, and what a GPU makes of them.

After Dao, Fu, Ermon, Rudra, Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022
(arXiv 2205.14135), "the paper" below. Nothing here runs attention; every function is arithmetic on the sizes of a
`Workload` and returns a `Cost`: a list of passes over memory with the bytes that each reads and writes.

    >>> from flash_attn import io_model
    >>> w = io_model.GPT2_MEDIUM
    >>> io_model.standard(w).bytes / io_model.kernels(w).bytes
    >>> io_model.roofline(io_model.kernels(w), io_model.GPUS["H200"])

"HBM" is the paper's word for the large, slow memory: a GPU's DRAM, or what lies behind a CPU's last cache. FLOPs are
those of matrix products, 2 for a multiply-add, as everybody counts them; exponentials and sums are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch

from flash_attn.gpus import GPUS as GPUS
from flash_attn.gpus import Gpu, peak_flops

KEEP_BYTES = 1  # of an element of a dropout mask that standard attention writes out


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_size(name: str, value: int) -> None:
    _require(type(value) is int and value >= 1, f"{name} must be an int >= 1, is {value!r}")


@dataclass(frozen=True)
class Workload:
    """batch · heads attentions of `seqlen` queries to as many keys, all of width `dim`.

    dtype: of Q, K, V, O and the N × N matrices. Statistics, one or two numbers a row, are fp32 (fp64 for fp64).
    dropout, mask: whether there is dropout, and an additive mask of one number for each key of a sequence (padding).
        A tiled algorithm makes the dropout mask anew and adds the mask in its tiles; standard attention makes a pass
        over the N × N matrix of each.
    density: the share of blocks that a block-sparse mask keeps, the paper's s; 1: all. Standard attention does not
        profit.

    Raises:
        ValueError: a size that is no positive whole number, a density outside (0, 1], a dtype that is not a float.
    """

    seqlen: int
    dim: int
    heads: int = 1
    batch: int = 1
    dtype: torch.dtype = torch.float16
    dropout: bool = False
    mask: bool = False
    density: float = 1.0

    def __post_init__(self) -> None:
        for name in ("seqlen", "dim", "heads", "batch"):
            _require_size(name, getattr(self, name))
        some = isinstance(self.density, Real) and 0 < self.density <= 1
        _require(some, f"density must be in (0, 1], is {self.density}")
        _require(
            isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point,
            f"dtype must be a floating-point dtype, is {self.dtype}",
        )

    @property
    def row_bytes(self) -> int:
        """A row of Q, K, V or O."""
        return self.dim * self.dtype.itemsize

    @property
    def number_bytes(self) -> int:
        """A statistic of a row."""
        return max(4, self.dtype.itemsize)

    @property
    def matrix(self) -> int:
        """Bytes of Q, K, V or O, of one head."""
        return self.seqlen * self.row_bytes

    @property
    def scores(self) -> int:
        """Bytes of S or P, of one head."""
        return self.seqlen**2 * self.dtype.itemsize

    @property
    def product_flops(self) -> int:
        """Of one N × N × d product of one head, where nothing is left out."""
        return 2 * self.seqlen**2 * self.dim


# Figure 2 of the paper: GPT-2 medium's attention.
GPT2_MEDIUM = Workload(seqlen=1024, dim=64, heads=16, batch=64)


class Pass(NamedTuple):
    """One walk over memory; on a GPU, one kernel. Bytes and FLOPs of all heads and batches."""

    name: str
    read: int
    written: int
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Cost:
    """Passes, one after another, and their sums."""

    passes: tuple[Pass, ...]

    @property
    def read(self) -> int:
        return sum(p.read for p in self.passes)

    @property
    def written(self) -> int:
        return sum(p.written for p in self.passes)

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def flops(self) -> int:
        return sum(p.flops for p in self.passes)

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.passes + other.passes)


def _all_heads(w: Workload, passes: Iterable[Pass]) -> Cost:
    """From passes over one head to those over all."""
    n = w.batch * w.heads
    return Cost(tuple(Pass(p.name, n * p.read, n * p.written, n * p.flops) for p in passes))


# ---- Standard attention ---------------------------------------------------------------------------------------------


def standard_forward(w: Workload) -> Cost:
    """Algorithm 0 of the paper: S = QKᵀ and P = softmax(S) are written out. Scale: folded into the product.

    Each product reads its operands once. A mask and dropout are a pass over the matrix each; dropout writes a byte
    for each element, so that backward can repeat it.

    Equivalent to: the sum of the sizes of all inputs and outputs of

        s = q @ k.mT;  s = s + mask;  p = s.softmax(-1);  p, keep = torch.native_dropout(p, p_drop, True);  o = p @ v
    """
    keep = w.seqlen**2 * KEEP_BYTES
    passes = [Pass("S = QKᵀ", 2 * w.matrix, w.scores, w.product_flops)]
    if w.mask:
        passes.append(Pass("S + mask", w.scores + w.seqlen * w.dtype.itemsize, w.scores))
    passes.append(Pass("P = softmax(S)", w.scores, w.scores))
    if w.dropout:
        passes.append(Pass("dropout(P)", w.scores, w.scores + keep))
    passes.append(Pass("O = PV", w.scores + w.matrix, w.matrix, w.product_flops))
    return _all_heads(w, passes)


def standard_backward(w: Workload) -> Cost:
    """Algorithm 3 of the paper: the gradients, from the P (and with dropout also the dropped P) that forward kept.

    An additive mask passes its gradient on as it is: no pass.
    """
    keep = w.seqlen**2 * KEEP_BYTES
    passes = [
        Pass("dV = PᵀdO", w.scores + w.matrix, w.matrix, w.product_flops),
        Pass("dP = dOVᵀ", 2 * w.matrix, w.scores, w.product_flops),
    ]
    if w.dropout:
        passes.append(Pass("dP of dropout", w.scores + keep, w.scores))
    passes += [
        Pass("dS of softmax", 2 * w.scores, w.scores),
        Pass("dQ = dSK", w.scores + w.matrix, w.matrix, w.product_flops),
        Pass("dK = dSᵀQ", w.scores + w.matrix, w.matrix, w.product_flops),
    ]
    return _all_heads(w, passes)


def standard(w: Workload) -> Cost:
    """Forward and backward of standard attention, Algorithms 0 and 3."""
    return standard_forward(w) + standard_backward(w)


def standard_in_pytorch(w: Workload) -> Cost:
    """The same as PyTorch's kernels for CUDA run it: 4 Nd + 3 N² elements more. Q, and dQ in backward, are scaled by a
    kernel each; the backward of softmax is two: dP ∘ P is written out, and dS = dP ∘ P − P · rowsum(dP ∘ P) reads it.

    Equivalent to: the sum of the sizes of all inputs and outputs of those kernels in a forward and backward of

        p = ((q * scale) @ k.mT + mask).softmax(-1);  o = torch.nn.functional.dropout(p, p_drop) @ v
    """
    more = [Pass("scaling", w.matrix, w.matrix), Pass("dP ∘ P", 2 * w.scores, w.scores)]
    scaling, product = _all_heads(w, more).passes
    *before, ds, dq, dk = standard(w).passes
    return Cost((scaling, *before, product, ds, dq, dk, scaling))


# ---- FlashAttention as in the paper ---------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """Sizes of a tile: query rows (B_r) and keys (B_c)."""

    rows: int
    columns: int


def _require_blocks(blocks: tuple[int, int]) -> None:
    _require_size("rows", blocks[0])
    _require_size("columns", blocks[1])


def paper_blocks(memory: int, dim: int) -> Blocks:
    """Line 1 of Algorithm 1: B_c = ⌈M / 4d⌉ and B_r = min(⌈M / 4d⌉, d), for M elements of on-chip memory.

    The paper's constants are for the proof: with them K_j, V_j, Q_i and O_i fill M alone, and S_ij comes on top.
    `resident_blocks` leaves room.

    Raises:
        ValueError: memory or dim that is no positive whole number; M < d (Theorem 2 asks for d ≤ M).
    """
    _require_size("memory", memory)
    _require_size("dim", dim)
    _require(memory >= dim, f"memory must hold a row of dim = {dim} elements, is {memory}")
    columns = math.ceil(memory / (4 * dim))
    return Blocks(min(columns, dim), columns)


def resident_blocks(memory: int, dim: int, least_rows: int = 1) -> Blocks:
    """The largest B_c whose tiles stay in a cache of M elements that throws out what was not used for longest.

    Between two uses of V_j, as the loops of Algorithm 1 have it, lie all of K_j and V_j, S_ij, Q_i and two of O's
    blocks, which is what must fit into 7/8 of M: 2 B_c d + B_c B_r + 3 B_r d. The rest is for
    the statistics, the stack and sets that are fuller than others. B_r is min(⌊M / 8d⌋, d), but at least
    `least_rows`. For d = 64, B_c is the paper's within 35 % from M = 8,192 elements on.

    Raises:
        ValueError: memory or dim that is no positive whole number, as least_rows; memory that holds no such tile.
    """
    for name, value in (("memory", memory), ("dim", dim), ("least_rows", least_rows)):
        _require_size(name, value)
    rows = max(least_rows, min(memory // (8 * dim), dim))
    columns = (memory * 7 // 8 - 3 * rows * dim) // (2 * dim + rows)
    _require(columns >= 1, f"memory must hold tiles of {rows} rows of dim = {dim}, is {memory} elements")
    return Blocks(rows, columns)


def _visits(w: Workload, blocks: Blocks) -> tuple[int, int]:
    """Key blocks of a head, and how many rows all visited tiles of a head have together."""
    _require_blocks(blocks)
    key_blocks = math.ceil(w.seqlen / blocks[1])
    return key_blocks, round(w.density * key_blocks * w.seqlen)


def _visited_flops(w: Workload, products: int) -> int:
    return round(products * w.product_flops * w.density)


def flash_forward(w: Workload, blocks: Blocks) -> Cost:
    """Algorithm 1 of the paper (with dropout and a mask Algorithm 2, with density < 1 Algorithm 5), line by line.

    Line 2 writes zeros to O and ℓ, −∞ to m. Then K_j and V_j are read once; for each visited tile Q_i, O_i, ℓ_i and
    m_i are read, O_i, ℓ_i and m_i written. A mask is read with K_j. Exact also where the blocks do not divide N,
    except that `density` then counts the rows of tiles, not the tiles.

    blocks: (B_r, B_c); B_r does not change the count.

    Raises:
        ValueError: block sizes that are no positive whole numbers.
    """
    _, rows = _visits(w, blocks)
    row_numbers = 2 * w.number_bytes
    mask = w.seqlen * w.dtype.itemsize if w.mask else 0
    return _all_heads(
        w,
        [
            Pass("O, ℓ, m", 0, w.matrix + w.seqlen * row_numbers),
            Pass(
                "tiles",
                2 * w.matrix + mask + rows * (2 * w.row_bytes + row_numbers),
                rows * (w.row_bytes + row_numbers),
                _visited_flops(w, 2),
            ),
        ],
    )


def flash_backward(w: Workload, blocks: Blocks) -> Cost:
    """Algorithm 4 of the paper, line by line: five products, since S is computed again.

    Line 5 writes zeros to dQ. K_j and V_j are read once; for each visited tile Q_i, O_i, dO_i, dQ_i, ℓ_i and m_i are
    read and dQ_i written; dK_j and dV_j are written once. dQ has the dtype of Q. Arguments and errors as for
    `flash_forward`.
    """
    _, rows = _visits(w, blocks)
    mask = w.seqlen * w.dtype.itemsize if w.mask else 0
    return _all_heads(
        w,
        [
            Pass("dQ", 0, w.matrix),
            Pass(
                "tiles",
                2 * w.matrix + mask + rows * (4 * w.row_bytes + 2 * w.number_bytes),
                rows * w.row_bytes + 2 * w.matrix,
                _visited_flops(w, 5),
            ),
        ],
    )


def flash(w: Workload, blocks: Blocks) -> Cost:
    """Forward and backward of Algorithms 1 and 4."""
    return flash_forward(w, blocks) + flash_backward(w, blocks)


def forward_misses(w: Workload, blocks: Blocks) -> int:
    """Bytes that `flash_forward` brings into a cache which allocates on writes: all that it reads, and the first
    writes of line 2. O_i, ℓ_i and m_i are written where they have just been read: no miss. Write-backs do not count.
    """
    first, tiles = flash_forward(w, blocks).passes
    return first.written + tiles.read


# ---- The kernels of this library on a GPU ---------------------------------------------------------------------------


FORWARD_TILE, BACKWARD_TILE = Blocks(128, 64), Blocks(128, 128)  # of head dims up to 64 (csrc/gpu/mma_sync/tiles.h)


def _reads_of_others(w: Workload, tile_rows: int, gpu: Gpu | None) -> int:
    """How often DRAM is read for what each of a head's CTAs reads from its L2 cache: once if the heads in flight fit.

    Two matrices of each head in flight: K and V in forward, Q and dO in backward. Two CTAs an SM.
    """
    blocks = math.ceil(w.seqlen / tile_rows)
    if gpu is None:
        return 1
    heads = min(w.batch * w.heads, math.ceil(2 * gpu.sms / blocks))
    return 1 if 2 * heads * w.matrix <= gpu.l2_bytes else math.ceil(w.density * blocks)


def kernels_forward(w: Workload, tile: Blocks = FORWARD_TILE, gpu: Gpu | None = None) -> Cost:
    """DRAM traffic of this library's forward kernel on a GPU: query blocks outside, O stays in registers.

    Q is read once, O, the LSE and the two statistics of each row are written once. K and V are read once where the
    heads in flight fit into the L2 cache, else once for each query block. With a density below 1 still all of Q and
    O; of K and V what some query block sees is not known here: all.

    tile: query rows and keys of a CTA. gpu: whose L2 cache; None: one that is large enough.
    """
    _require_blocks(tile)
    again = _reads_of_others(w, tile[0], gpu)
    mask = w.seqlen * w.dtype.itemsize if w.mask else 0
    numbers = 3 * w.seqlen * w.number_bytes
    return _all_heads(
        w,
        [Pass("forward", w.matrix + 2 * again * w.matrix + mask, w.matrix + numbers, _visited_flops(w, 2))],
    )


def kernels_backward(w: Workload, tile: Blocks = BACKWARD_TILE, gpu: Gpu | None = None) -> Cost:
    """DRAM traffic of this library's backward kernels on a GPU: delta, zeros for dQ, key blocks outside, dQ rounded.

    dQ is summed in fp32 with atomics in the L2 cache: read and written once there, in a matrix of its own. Q, dO and
    three numbers of each row are read once where the heads in flight fit into the L2 cache, else once for each key
    block.

    tile: query rows and keys of a CTA. gpu: whose L2 cache; None: one that is large enough.
    """
    _require_blocks(tile)
    again = _reads_of_others(w, tile[1], gpu)
    mask = w.seqlen * w.dtype.itemsize if w.mask else 0
    number = w.seqlen * w.number_bytes
    dq_sum = w.seqlen * w.dim * w.number_bytes
    return _all_heads(
        w,
        [
            Pass("delta", 2 * w.matrix + number, number),
            Pass("zeros for dQ", 0, dq_sum),
            Pass(
                "backward",
                2 * w.matrix + again * (2 * w.matrix + 3 * number) + mask + again * dq_sum,
                2 * w.matrix + again * dq_sum,
                _visited_flops(w, 5),
            ),
            Pass("dQ", dq_sum, w.matrix),
        ],
    )


def kernels(w: Workload, gpu: Gpu | None = None) -> Cost:
    """DRAM traffic of this library's kernels on a GPU, forward and backward."""
    return kernels_forward(w, gpu=gpu) + kernels_backward(w, gpu=gpu)


# ---- Theorems -------------------------------------------------------------------------------------------------------


def _require_range(seqlen: int, dim: int, memory: int) -> None:
    for name, value in (("seqlen", seqlen), ("dim", dim), ("memory", memory)):
        _require_size(name, value)
    _require(
        dim <= memory <= seqlen * dim,
        f"memory must be in [dim, seqlen · dim] = [{dim}, {seqlen * dim}] elements, is {memory}",
    )


def theorem2_standard(seqlen: int, dim: int) -> int:
    """Theorem 2 of the paper: standard attention takes Θ(Nd + N²) HBM accesses. Returns Nd + N², in elements; of
    backward (Theorem 5), too."""
    _require_size("seqlen", seqlen)
    _require_size("dim", dim)
    return seqlen * dim + seqlen**2


def theorem2_flash(seqlen: int, dim: int, memory: int) -> float:
    """Theorem 2 of the paper: FlashAttention takes Θ(N²d² / M) HBM accesses for d ≤ M ≤ Nd, M elements of on-chip
    memory. Returns N²d² / M, in elements; of backward (Theorem 5), too.

    Raises:
        ValueError: memory outside [d, Nd].
    """
    _require_range(seqlen, dim, memory)
    return seqlen**2 * dim**2 / memory


def proposition3_lower_bound(seqlen: int, dim: int, memory: int) -> float:
    """Proposition 3 of the paper: no algorithm computes exact attention with o(N²d² / M) HBM accesses for *all* M in
    [d, Nd]. Returns N²d² / M, in elements.

    The proof looks at M = Θ(Nd), where that is the Nd of reading the inputs: an order of magnitude over a range of
    M, no bound at a single M. What always holds is Nd.

    Raises:
        ValueError: memory outside [d, Nd].
    """
    return theorem2_flash(seqlen, dim, memory)


def proposition4_block_sparse(seqlen: int, dim: int, memory: int, density: float) -> float:
    """Proposition 4 of the paper: block-sparse FlashAttention takes Θ(Nd + N²d² / M · s) HBM accesses, s the share of
    nonzero blocks. Returns Nd + N²d²s / M, in elements.

    Raises:
        ValueError: memory outside [d, Nd], density outside [0, 1].
    """
    _require(isinstance(density, Real) and 0 <= density <= 1, f"density must be in [0, 1], is {density}")
    return seqlen * dim + theorem2_flash(seqlen, dim, memory) * density


# ---- Roofline -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The least time that a GPU needs for a cost."""

    seconds: float
    memory_seconds: float  # that DRAM alone would take
    compute_seconds: float  # that the products alone would take

    @property
    def bound(self) -> str:
        """What takes longer: "memory" or "compute"."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"


def roofline(cost: Cost, gpu: Gpu, dtype: torch.dtype = torch.float16) -> Prediction:
    """Each pass takes as long as its bytes or its FLOPs, whichever takes longer; passes follow one another.

    Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009, for each pass. What a
    real kernel needs beside that (exponentials, latencies, a clock below its peak) is not in it: a floor.

    Raises:
        ValueError: a dtype that the card has no figure for; `gpu` is not one of flash_attn.gpus.
    """
    peak = peak_flops(gpu, dtype)
    memory = [p.bytes / gpu.bytes_per_second for p in cost.passes]
    compute = [p.flops / peak for p in cost.passes]
    return Prediction(sum(map(max, memory, compute)), sum(memory), sum(compute))
