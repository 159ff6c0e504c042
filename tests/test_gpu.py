"""What GPU kernels alone can get wrong: cards, tiles, far strides, lengths that nobody checks.

Values of every option are in the other files, whose cases run here too (`cases.KERNELS`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import cases
import pytest
import torch
from cases import Case
from gpu_calls import BF16, FAMILIES, HALF, close, qkv
from test_forward import CASES as FORWARD_CASES

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cases.KERNELS, reason="needs a GPU and its kernels"),
]


@pytest.fixture
def limited_card():
    """A function that makes the library believe in a smaller card; undone afterwards."""

    def limit(capability: int = 0, shared_kb: int = 0) -> None:
        torch.ops.flash_attn.gpu_limit_card(capability, shared_kb * 1024)
        flash_attn._ops.gpu_plan.cache_clear()
        flash_attn.dispatch._SERVED.clear()

    yield limit
    limit()


def check_segments(lengths_q: list[int], lengths_k: list[int], *, heads, heads_k, dim, **options) -> None:
    """Packed sequences, surrounded by NaN, give what each gives alone."""
    offsets = [
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device="cuda") for x in (lengths_q, lengths_k)
    ]
    shapes = ((sum(lengths_q) + 9, heads, dim), *[(sum(lengths_k) + 9, heads_k, dim)] * 2)
    q, k, v = (torch.randn(shape, dtype=BF16, device="cuda") for shape in shapes)
    for x in (q, k, v):
        x[-9:] = math.nan
    longest = max(lengths_q), max(lengths_k)
    out = flash_attn_varlen_func(q, k, v, *offsets, *longest, **options)
    assert out.isfinite().all() and (out[-9:] == 0).all()
    (begin_q, begin_k), n = (x.tolist() for x in offsets), len(lengths_q)
    for b in range(n):
        one = [x[o[b] : o[b + 1]][None] for x, o in ((q, begin_q), (k, begin_k), (v, begin_k))]
        if lengths_q[b] > 0:
            alone = flash_attn_func(*one, **options)
            torch.testing.assert_close(out[begin_q[b] : begin_q[b + 1]], alone[0], rtol=0, atol=0)


# ---- Cards ----------------------------------------------------------------------------------------------------------

TURING = [c for n, c in enumerate(FORWARD_CASES) if (c.dtype == HALF or n % 3 == 0) and max(c.dim, c.dim_v) <= 256]
TURING = list(dict.fromkeys(replace(c, dtype=HALF) for c in TURING))
TURING += [
    Case(dim=d, dim_v=d, seqlen_q=200, seqlen_k=333, causal=True, dtype=HALF, grads="qkv")
    for d in (32, 64, 96, 128, 192, 256)
]


@pytest.mark.parametrize("case", TURING, ids=str)
def test_turing_kernels(case: Case, limited_card):
    """The kernels for sm_75, through their PTX on whatever card this is."""
    limited_card(capability=75)
    if flash_attn._ops.gpu_plan(0, HALF, case.dim, case.dim_v, "biased", (0, 0)).reason:
        pytest.skip("built without kernels for sm_75")
    cases.check(case, "cuda", "mma_sync")


def least_shared_kb(tile: tuple[int, int], dim: int) -> float:
    """Q and one buffer each for K and V in half precision: no kernel of mma_sync gets by with less."""
    rows, keys = tile
    return (rows + 2 * keys) * dim * 2 / 1024


@pytest.mark.parametrize("shared_kb", (227, 163, 99, 64, 48))
@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("causal", (False, True))
def test_less_shared_memory(shared_kb, dim, causal, limited_card):
    """A smaller tile with the same values, or an error that names the way out. That the limit counts is seen by the
    plan, which fits, and by bits: with other keys in a tile P is rounded below another maximum."""
    q, k, v = qkv(seqlen_q=256, seqlen_k=256, dim=dim)

    def call():
        tile = flash_attn.explain(q, k, v, causal=causal, backend="mma_sync").tile
        return tile, flash_attn_func(q, k, v, causal=causal, backend="mma_sync")

    preferred, want = call()
    limited_card(shared_kb=shared_kb)
    try:
        tile, out = call()
    except NotImplementedError as error:
        assert shared_kb < 99 and 'backend="reference"' in str(error)
        assert f"{shared_kb} KB of shared memory" in str(error)
        return
    assert least_shared_kb(tile, dim) <= shared_kb
    assert tile[1] == preferred[1] or not torch.equal(out, want), f"{tile} as {preferred} on the whole card"
    close(out, q, k, v, causal=causal)


def test_less_shared_memory_takes_other_tiles(limited_card):
    """Of a limit that nobody heeds the tests above would see nothing where all tiles are small."""
    tensors = qkv(seqlen_q=256, seqlen_k=256, dim=256)
    tiles = []
    for shared_kb in (0, 99, 48):
        limited_card(shared_kb=shared_kb)
        tiles.append(flash_attn.explain(*tensors, backend="mma_sync").tile)
    if torch.cuda.get_device_properties(0).shared_memory_per_block_optin >= 160 * 1024:
        assert len(set(tiles)) == 3, tiles
    assert tiles[2] == (0, 0)  # no kernel


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
def test_every_tile_of_backward(dim, causal, deterministic):
    """Those that no card of this size would choose, too; and turns of many key blocks."""
    q, k, v = (x.requires_grad_() for x in qkv(batch=1, seqlen_q=700, seqlen_k=4300, heads=4, dim=dim))
    out = flash_attn_func(q, k, v, causal=causal, deterministic=deterministic, backend="mma_sync")
    dout = torch.randn_like(out)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(flash_attn_func(*wide, causal=causal, backend="reference"), wide, dout.float())
    tested, sums = 0, []  # dq, of which tiles of other keys make another sum
    try:
        for tile in range(6):
            torch.ops.flash_attn.gpu_choose_bwd_tile(tile)
            try:
                found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            except RuntimeError as error:
                assert f"no tile {tile} of" in str(error)
                continue
            tested += 1
            sums += [found[0]] * all(not torch.equal(found[0], x) for x in sums)
            for x, y in zip(found, want, strict=True):
                assert (x.float() - y).norm() < 0.01 * y.norm()
            if deterministic:
                again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
                assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    finally:
        torch.ops.flash_attn.gpu_choose_bwd_tile(-1)
    assert 0 < tested < 6, "no kernel has six tiles"
    if deterministic and torch.cuda.get_device_properties(0).shared_memory_per_block_optin >= 160 * 1024:
        assert tested > 1 and len(sums) > 1, f"{tested} tiles, {len(sums)} different sums"


@pytest.mark.parametrize("shared_kb", (227, 99, 64))
def test_value_dim_below_a_wide_head_dim(shared_kb, limited_card):
    """T125: 192 and 128 on cards with less shared memory, Turing's 64 KB in fp16 among them."""
    limited_card(shared_kb=shared_kb)
    q, k = (torch.randn(1, 256, 2, 192, dtype=HALF, device="cuda") for _ in range(2))
    v = torch.randn(1, 256, 2, 128, dtype=HALF, device="cuda")
    close(flash_attn_func(q, k, v, causal=True, backend="mma_sync"), q, k, v, causal=True)


def test_many_segments_on_a_small_card(limited_card):
    """T133: more than four segments, with 99 KB of shared memory."""
    limited_card(capability=89, shared_kb=99)
    check_segments(
        [504, 1, 700, 33, 129, 630, 64, 200], [1758, 3, 40, 900, 129, 17, 64, 511], heads=8, heads_k=8, dim=128
    )


def test_what_has_no_kernel_names_the_way_out(limited_card):
    for q in (torch.zeros(1, 4, 2, 64, device="cuda"), torch.zeros(1, 4, 2, 320, device="cuda", dtype=BF16)):
        for backend in ("auto", "mma_sync"):
            with pytest.raises(NotImplementedError, match='backend="reference"') as error:
                flash_attn_func(q, q, q, backend=backend)
            assert torch.cuda.get_device_name() in str(error.value)
    limited_card(capability=75)
    q = torch.zeros(1, 4, 2, 64, device="cuda", dtype=BF16)
    with pytest.raises(NotImplementedError, match="bf16"):
        flash_attn_func(q, q, q)
    limited_card(capability=70)
    with pytest.raises(NotImplementedError, match="compute capability 7.0"):
        flash_attn_func(q.half(), q.half(), q.half())


def test_explain():
    found = flash_attn.explain(*qkv(), causal=True, backend="mma_sync")
    assert found.backend == "mma_sync" and "sm_80" in found.kernel and found.tile[0] >= 32
    found = flash_attn.explain(*qkv(), causal=True)
    assert found.backend == ("wgmma" if cases.HOPPER else "mma_sync") and found.kernel.startswith(found.backend)
    assert set(found.refusals) | {found.backend} == {"cpu", "mma_sync", "wgmma", "reference"}
    found = flash_attn.explain(*qkv(), mask=torch.ones(129, 129, dtype=torch.bool, device="cuda"))
    assert found.backend == "mma_sync" and "biased" in found.kernel


# ---- Hopper's own kernels: which calls they serve -------------------------------------------------------------------

ONLY_HOPPER = pytest.mark.skipif(not cases.HOPPER, reason="needs a Hopper card and its kernels")
ON_HOPPER = [c for n, case in enumerate(FORWARD_CASES) if (c := cases.in_half_precision(case, n)) is not None]


def wgmma_serves(case: Case, made: cases.Inputs) -> bool:
    """What README and docstrings promise."""
    if case.bias or case.mask or case.dim % 8 or case.dim_v % 8:
        return False
    if case.blocks:
        rows, keys = made.block_mask.block_size
        if made.block_mask.patterns.shape[0] or case.leftpad_q or case.leftpad_k or rows % 128 or keys % 128:
            return False
    for x in (made.q, made.k, made.v):
        x = x.contiguous() if x.shape[-1] > 1 and x.stride(-1) != 1 else x
        strides = x.stride()[:-1]
        if x.numel() == 0 or x.data_ptr() % 16 or any(s % 8 for s in strides):
            return False
        if any(s == 0 for s, size in zip(strides, x.shape, strict=False) if size > 1):
            return False
    return True


@ONLY_HOPPER
@pytest.mark.parametrize("case", ON_HOPPER, ids=str)
def test_what_wgmma_serves(case: Case):
    """Neither more nor less; what it refuses names mma_sync, and "auto" goes there."""
    made = cases.build(case)
    cases.move(made, "cuda")
    refusal = cases.refusal_of(case, made, "wgmma")
    assert (refusal is None) == wgmma_serves(case, made), refusal
    if refusal is None:
        return
    with pytest.raises(NotImplementedError, match='backend="mma_sync"') as error:
        cases.call(case, made, "wgmma")
    assert refusal == str(error.value)
    out, lse = cases.call(case, made, "auto")
    same = cases.call(case, made, "mma_sync")
    assert torch.equal(out, same[0]) and torch.equal(lse, same[1])


@ONLY_HOPPER
def test_why_wgmma_refuses(limited_card):
    """A sentence for each reason, and a call that was served before excuses no other strides."""
    q, k, v = qkv()
    flash_attn_func(q, k, v, backend="wgmma")
    wide = torch.zeros(*k.shape[:-1], k.shape[-1] + 4, dtype=k.dtype, device="cuda")[..., : k.shape[-1]]
    blocks = flash_attn.BlockMask(torch.ones(1, 1, 3, 3, dtype=torch.bool, device="cuda"), 129, 129, (48, 48))
    for arguments, options, reason in (
        ((q, wide, v), {}, "TMA"),
        ((q, k[:, :1].expand_as(k), v), {}, "TMA"),
        ((q, k, v), {"bias": torch.zeros(129, 129, dtype=BF16, device="cuda")}, "bias"),
        ((q, k, v), {"block_mask": blocks}, "48 × 48"),
    ):
        with pytest.raises(NotImplementedError, match=reason) as error:
            flash_attn_func(*arguments, **options, backend="wgmma")
        assert 'backend="mma_sync"' in str(error.value)
        found = flash_attn.explain(*arguments, **options)
        assert found.backend == "mma_sync" and reason in found.refusals["wgmma"]
        flash_attn_func(*arguments, **options)
    with pytest.raises(NotImplementedError, match='fp32.*backend="reference"'):
        flash_attn_func(q.float(), k.float(), v.float(), backend="wgmma")
    limited_card(capability=89)
    with pytest.raises(NotImplementedError, match="9.0"):
        flash_attn_func(q, k, v, backend="wgmma")
    assert flash_attn.explain(q, k, v).backend == "mma_sync"


@pytest.mark.skipif("wgmma" not in FAMILIES, reason="needs a Hopper card")
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
def test_every_tile_of_wgmma(dim, causal):
    """Those that are for other lengths, or for benchmarks alone, too."""
    q, k, v = qkv(batch=1, seqlen_q=700, seqlen_k=1300, dim=dim)
    want = flash_attn_func(q, k, v, causal=causal, backend="mma_sync").float()
    tested, results = 0, []  # those of other keys in a tile differ
    try:
        for tile in range(5):
            torch.ops.flash_attn.gpu_choose_fwd_tile(tile)
            try:
                found = flash_attn_func(q, k, v, causal=causal, backend="wgmma")
            except RuntimeError as error:
                assert f"no tile {tile} of" in str(error)
                continue
            tested += 1
            results += [found] * all(not torch.equal(found, x) for x in results)
            assert (found.float() - want).norm() < 0.005 * want.norm()
    finally:
        torch.ops.flash_attn.gpu_choose_fwd_tile(-1)
    assert 0 < tested < 5, "no kernel has five tiles"
    assert dim == 256 or len(results) > 1, f"{tested} tiles give the same bits"


# ---- Shapes and strides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FAMILIES)
def test_more_heads_than_a_grid_axis_has(backend):
    """70,000 sequences × 2 heads."""
    q, k, v = qkv(batch=70_000, seqlen_q=3, seqlen_k=5, heads=2, heads_k=1, dim=8)
    out = flash_attn_func(q, k, v, backend=backend)
    for part in (slice(0, 2), slice(32_766, 32_770), slice(69_998, 70_000)):
        close(out[part], q[part], k[part], v[part])


@pytest.mark.parametrize("backend", FAMILIES)
@pytest.mark.parametrize(("batch", "seqlen", "heads", "dim"), ((768, 2048, 8, 256), (1600, 729, 16, 72)))
def test_huge_batch(backend, batch, seqlen, heads, dim):
    """T77: q has more than 2^31 elements, or almost."""
    if torch.cuda.mem_get_info()[0] < 10 * batch * seqlen * heads * dim:
        pytest.skip("needs more memory")
    q = torch.randn(batch, seqlen, heads, dim, dtype=BF16, device="cuda")
    k, v = q[:, :, : heads // 4], q[:, :, heads // 4 : heads // 2]
    out = flash_attn_func(q, k, v, causal=True, backend=backend)
    for b in (0, batch // 2, batch - 1):
        part = [x[b : b + 1] for x in (q, k, v)]
        assert torch.equal(out[b : b + 1], flash_attn_func(*part, causal=True, backend=backend))
    close(out[-1:, :, :4], q[-1:, :, :4], k[-1:, :, :1], v[-1:, :, :1], causal=True)


@pytest.mark.parametrize("backend", FAMILIES)
def test_short_segments(backend):
    """T32 and T34: 200 sequences of 1 to 7 rows; lengths around a tile, and none at all."""
    lengths = [1 + n % 7 for n in range(200)]
    check_segments(lengths, lengths[::-1], heads=4, heads_k=2, dim=64, backend=backend)
    check_segments(
        [0, 1, 65, 0, 33, 33], [0, 129, 65, 7, 33, 1], heads=2, heads_k=1, dim=64, causal=True, backend=backend
    )


@pytest.mark.parametrize("backend", FAMILIES)
def test_packed_window_again_and_again(backend):
    """T130: windows narrower than the sequences, in other places each time."""
    for n in range(30):
        lengths = [(97 * (n + 1) * (b + 3)) % 500 + 1 for b in range(4)]
        check_segments(
            lengths,
            lengths,
            heads=4,
            heads_k=4,
            dim=128,
            window_size=(16 + 5 * n, n % 3),
            causal=n % 2 == 0,
            backend=backend,
        )


@pytest.mark.parametrize("backend", FAMILIES)
def test_strides_beyond_32_bits(backend):
    """Rows of K and V lie 2^27 elements apart: 33 of them need 64-bit offsets."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB")
    q = torch.randn(1, 9, 1, 64, dtype=BF16, device="cuda")
    wide = torch.empty(33 << 27, dtype=BF16, device="cuda")
    k = wide.as_strided((1, 33, 1, 64), (0, 1 << 27, 0, 1))
    v = wide.as_strided((1, 33, 1, 64), (0, 1 << 27, 0, 1), 1 << 20)
    k.normal_(), v.normal_()
    close(flash_attn_func(q, k, v, backend=backend), q, k, v)


@pytest.mark.parametrize("backend", FAMILIES)
def test_long_sequences_with_a_window(backend):
    """70,000 keys; only the rows that see the end are compared."""
    q, k, v = qkv(batch=1, seqlen_q=130, seqlen_k=70_000, heads=2, heads_k=1)
    out = flash_attn_func(q, k, v, window_size=(100, 0), backend=backend)
    close(out, q, k[:, -300:], v[:, -300:], window=(100, 0))


# ---- Lengths that nobody has checked --------------------------------------------------------------------------------


def gradients(out: torch.Tensor, tensors: list[torch.Tensor], dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of q, k and v, where memory that a kernel should have written holds 7."""
    for _ in range(4):
        stale = [torch.full_like(x, 7) for x in tensors]
        del stale  # what is allocated next has its memory
    return torch.autograd.grad(out, tensors, dout)


def is_unwritten(x: torch.Tensor) -> bool:
    """Whether something other than 0 and NaN stands where no kernel has anything to say."""
    return bool((x.isfinite() & (x != 0)).any())


@pytest.mark.parametrize("backend", FAMILIES)
@pytest.mark.parametrize(
    ("wrong", "possible"),
    (([0, 50, 40, 90], ()), ([0, 20, 200, 90], (0,)), ([-5, 20, 40, 90], (1, 2)), ([0, 20, 40, 1 << 40], (0, 1))),
    ids=str,
)
@pytest.mark.parametrize("heads", (2, 8))
def test_impossible_offsets_give_nan(backend, wrong, possible, heads):
    """Seen, not plausible, forward and backward; other sequences are as ever; and nothing outside is read or written
    (compute-sanitizer says so). possible: the sequences that `wrong` leaves whole."""
    tensors = [torch.randn(90, n, 64, dtype=BF16, device="cuda").requires_grad_() for n in (heads, 2, 2)]
    edges = [0, 20, 40, 90]
    good, bad = (torch.tensor(x, device="cuda") for x in (edges, wrong))
    dout = torch.randn_like(tensors[0])

    def call(offsets_q: torch.Tensor, offsets_k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = flash_attn_varlen_func(
            *tensors, offsets_q, offsets_k, 90, 90, deterministic=True, causal=True, backend=backend
        )
        return out, *gradients(out, tensors, dout)

    want = call(good, good)
    spared = torch.zeros(90, dtype=torch.bool, device="cuda")
    for b in possible:
        spared[edges[b] : edges[b + 1]] = True
    for offsets in ((bad, good), (good, bad)):
        found = call(*offsets)
        assert found[0].isnan().any()
        for name, x, y in zip(("out", "dq", "dk", "dv"), found, want, strict=True):
            assert torch.equal(x[spared], y[spared]), name
            assert not possible or not is_unwritten(x[~spared]), name


@pytest.mark.parametrize("backend", FAMILIES)
@pytest.mark.parametrize("heads", (2, 8))
def test_impossible_lengths_give_nan(backend, heads):
    tensors = [torch.randn(3, 9, n, 64, dtype=BF16, device="cuda").requires_grad_() for n in (heads, 2, 2)]
    dout = torch.randn_like(tensors[0])
    out = flash_attn_func(*tensors, deterministic=True, backend=backend)
    want = out, *gradients(out, tensors, dout)
    for name, wrong in (
        ("seqused_k", [9, 10, 9]), ("leftpad_k", [0, -1, 0]), ("seqused_q", [9, 1 << 20, 9]), ("leftpad_q", [0, 10, 0]),
    ):  # fmt: skip
        lengths = {name: torch.tensor(wrong, dtype=torch.int32, device="cuda")}
        out, lse = flash_attn_func(*tensors, return_lse=True, deterministic=True, backend=backend, **lengths)
        assert out[1].isnan().all() and lse[1].isnan().all()
        found = out, *gradients(out, tensors, dout)
        for what, x, y in zip(("out", "dq", "dk", "dv"), found, want, strict=True):
            assert torch.equal(x[0], y[0]) and torch.equal(x[2], y[2]), (name, what)
            assert not is_unwritten(x[1]), (name, what)


# ---- Dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FAMILIES)
@pytest.mark.parametrize("dim", (32, 128, 256))
@pytest.mark.parametrize("causal", (False, True))
def test_mask_is_the_same_as_on_the_cpu(backend, dim, causal):
    """Bit by bit: q = 0 makes P uniform, and V = identity shows which elements were kept."""
    seed = torch.tensor([77, -5])
    n, m = 150, min(dim, 104)
    q = torch.zeros(2, n, 4, dim, dtype=BF16, device="cuda")
    k = torch.zeros(2, m, 2, dim, dtype=BF16, device="cuda")
    v = torch.eye(m, dtype=BF16, device="cuda")[None, :, None].expand(2, m, 2, m)
    if backend == "wgmma":
        v = v.contiguous()
    out = flash_attn_func(q, k, v, dropout_p=0.3, dropout_seed=seed.cuda(), causal=causal, backend=backend)
    keep = flash_attn.dropout_mask(seed, 0.3, 2, 4, n, m)
    i, j = torch.arange(n)[:, None], torch.arange(m)
    seen = keep & (j <= i + m - n) if causal else keep
    assert torch.equal((out != 0).transpose(1, 2).cpu(), seen)


def test_gradients_use_the_statistics_of_the_kernel():
    """Logits of 1e4: an fp32 LSE alone could not carry them."""
    q, k, v = (x.requires_grad_() for x in qkv(batch=1, seqlen_q=70, seqlen_k=90, heads=2))
    with torch.no_grad():
        q.mul_(30), k.mul_(30)
    out = flash_attn_func(q, k, v, backend="mma_sync")
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    want = torch.autograd.grad(flash_attn_func(q, k, v, backend="reference"), (q, k, v), dout)
    for g, w in zip(got, want, strict=True):
        assert g.isfinite().all()
        assert (g - w).float().norm() <= 0.05 * w.float().norm() + 1e-3 * math.sqrt(w.numel())
