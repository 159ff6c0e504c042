"""Faults that users reported against attention libraries: size limits, overflow, framework integration, invariance.

The identifiers (T70 …) name the project's collection of such reports; each test states what is right.
"""

from __future__ import annotations

import cases
import oracle
import pytest
import torch
from oracle import Options
from test_reports import BF16, HALF, agree, cumulative, packed, qkv, randn

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func

# ---- Size limits ----------------------------------------------------------------------------------------------------


def plain(q, k, v):
    """fp64 attention of many short sequences at once, (batch, seqlen, heads, dim)."""
    q, k, v = (t.detach().double().transpose(1, 2).requires_grad_() for t in (q, k, v))
    out = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    return [t.detach().transpose(1, 2).float() for t in (out, *grads)]


@pytest.mark.parametrize("shape", ((65537, 1, 1, 16), (1, 10, 65536, 16), (3, 2, 70000, 1)), ids=str)
def test_t70_axes_beyond_65535(shape):
    """B65537; H65536: forward and backward."""
    leaves = [randn(*shape).requires_grad_() for _ in range(3)]
    out = flash_attn_func(*leaves)
    got = [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
    for g, w in zip(got, plain(*leaves), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_t70_eighty_thousand_sequences():
    n, rows = 80_000, 16
    leaves = [randn(n * rows, 1, 4).requires_grad_() for _ in range(3)]
    cu = torch.arange(0, n * rows + 1, rows, dtype=torch.int32)
    out = flash_attn_varlen_func(*leaves, cu, cu, rows, rows)
    got = [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
    for g, w in zip(got, plain(*(t.view(n, rows, 1, 4) for t in leaves)), strict=True):
        torch.testing.assert_close(g, w.reshape(g.shape), rtol=1e-4, atol=1e-5)


def untouched(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Addresses without memory behind them, where the system gives that many."""
    try:
        return torch.empty(elements, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"no address space for {elements} elements: {error}")


@pytest.mark.parametrize(("kind", "rows"), (("mask", 4100), ("bias", 2100)))
def test_t71_offsets_beyond_32_bits(kind, rows):
    """A mask (2^32 elements), then a bias (2^31), whose rows lie 2^20 elements apart over untouched memory."""
    columns, stride = 64, 1 << 20
    q, k, v = qkv(1, rows, columns, 1, 1, 16)
    memory = untouched(rows * stride, torch.bool if kind == "mask" else torch.float32)
    view = torch.as_strided(memory, (rows, columns), (stride, 1))
    view.copy_((torch.rand(rows, columns) < 0.6) if kind == "mask" else torch.randn(rows, columns))
    out = flash_attn_func(q, k, v, **{kind: view})
    dense = view.contiguous()
    assert torch.equal(out, flash_attn_func(q, k, v, **{kind: dense}))
    want = oracle.attention(q, k, v, dense if kind == "bias" else None, None,
                            Options(mask=dense if kind == "mask" else None))[0]  # fmt: skip
    torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)


def test_t73_row_strides_beyond_32_bits():
    """Batch stride of 2^30 elements (batch 4 starts at 2^32), giant row and head strides of q, k and v."""
    memory = untouched(5 * (1 << 30), BF16)
    q, k, v = qkv(5, 3, 9, 2, 2, 16, dtype=BF16)
    views = []
    for n, t in enumerate((q, k, v)):
        view = torch.as_strided(memory, t.shape, (1 << 30, 1 << 14, 1 << 12, 1), n << 20)
        view.copy_(t)
        views.append(view)
    assert torch.equal(flash_attn_func(*views, causal=True), flash_attn_func(q, k, v, causal=True))
    leaves = [t.detach().requires_grad_() for t in views]
    out = flash_attn_func(*leaves, causal=True)
    twins = [t.requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(flash_attn_func(*twins, causal=True), twins, torch.ones_like(out))
    got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_t76_positions_beyond_16_bits(target):
    out = flash_attn_func(
        *(torch.zeros(1, n, 1, 64, device=target.device) for n in (9, 33728, 33728)), backend=target.backend
    )
    assert (out == 0).all()
    q, k, v = qkv(1, 5, 66048, 1, 1, 16)
    mask = torch.arange(66048) < 512
    out = flash_attn_func(
        *(t.to(target.device) for t in (q, k, v)), mask=mask.to(target.device), backend=target.backend
    )
    torch.testing.assert_close(out.cpu(), oracle.attention(q, k[:, :512], v[:, :512])[0].float(), rtol=1e-5, atol=1e-6)
    out = flash_attn_func(*(t.to(target.device) for t in (q, k, v)), window_size=(3, 0), backend=target.backend)
    want = oracle.attention(q, k[:, -8:], v[:, -8:], options=Options(window=(3, 0)))[0]
    torch.testing.assert_close(out.cpu(), want.float(), rtol=1e-5, atol=1e-6)


# ---- Framework ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", (False, True))
def test_t86_compiles_without_graph_breaks(dynamic):
    """fullgraph capture of the dense and the packed call, forward and backward: the eager values."""
    q, k, v = (t.requires_grad_() for t in qkv(2, 128, 128, 4, 2, 32))

    def dense(q, k, v):
        return flash_attn_func(q * 1.0, k, v, causal=True, softcap=5.0).sin()

    def varlen(q, k, v, cu):
        return flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu, cu, 128, 128, causal=True)

    for function, extra in ((dense, ()), (varlen, (cumulative(128, 128),))):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        results = []
        for run in (function, compiled):
            out = run(q, k, v, *extra)
            results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
        for eager, captured in zip(*results, strict=True):
            torch.testing.assert_close(captured, eager)


def test_t86_compiled_dropout_draws_anew():
    torch._dynamo.reset()
    q = randn(1, 33, 2, 16)
    function = torch.compile(lambda q: flash_attn_func(q, q, q, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    assert not torch.equal(function(q), function(q))


def test_t89_export_with_dynamic_sizes():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    batch, seqlen = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("seqlen", min=2, max=4096)
    sizes = {0: batch, 1: seqlen}
    program = torch.export.export(Attention(), qkv(2, 155, 155, 4, 2, 16), dynamic_shapes={n: sizes for n in "qkv"})
    for other in (qkv(2, 155, 155, 4, 2, 16), qkv(5, 33, 33, 4, 2, 16)):
        torch.testing.assert_close(program.module()(*other), flash_attn_func(*other, causal=True))


def test_fake_tensors_have_the_real_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = torch.randn(2, 5, 4, 8).half(), torch.randn(2, 7, 2, 8).half(), torch.randn(2, 7, 2, 6).half()
        out, lse = flash_attn_func(q, k, v, return_lse=True)
        assert out.shape == (2, 5, 4, 6) and out.dtype == HALF and lse.shape == (2, 4, 5) and lse.dtype == torch.float32
        with pytest.raises(RuntimeError, match="k"):
            flash_attn_func(q, k[:1], v)


@pytest.mark.parametrize("name", ("attention_forward", "attention_forward_plain"))
def test_operators_pass_opcheck(name):
    """Schema, fake kernel and registrations of the forward ops, as torch checks them."""
    op = getattr(torch.ops.flash_attn, name).default
    options = {} if name.endswith("plain") else {"alibi_slopes": torch.rand(4)}
    recorded: list = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is op:
                recorded.append((args, kwargs or {}))
            return function(*args, **(kwargs or {}))

    with Recorder():
        flash_attn_func(*qkv(2, 5, 7, 4, 2, 8), causal=True, **options)
    assert recorded
    args, kwargs = recorded[0]
    torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))


def test_t94_gradients_are_exactly_those_that_are_needed(target):
    q, k, v = (t.to(target.device) for t in qkv(1, 9, 9, 2, 2, 8))
    for needed in ("q", "k", "v"):
        leaves = {n: t.detach().requires_grad_(n == needed) for n, t in zip("qkv", (q, k, v), strict=True)}
        flash_attn_func(*leaves.values(), backend=target.backend).sum().backward()
        assert [n for n, t in leaves.items() if t.grad is not None] == [needed]
    with torch.no_grad():
        assert not flash_attn_func(*(t.requires_grad_() for t in (q, k, v)), backend=target.backend).requires_grad


def test_t95_fp32_is_computed_in_fp32(target):
    """The error of fp32 inputs is that of fp32, far below half precision; q alone in fp32 is an error."""
    q, k, v = qkv(1, 65, 65, 2, 2, 64)
    out = agree(q, k, v, target)[0]
    assert (out - oracle.attention(q, k, v)[0]).abs().max() < 1e-5
    with pytest.raises(RuntimeError, match="float32|bfloat16"):
        flash_attn_func(q, k.bfloat16(), v.bfloat16())


# ---- Invariance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", (1, 2, 3, 7, 32, 40))
def test_t106_merged_pieces_equal_the_whole(pieces):
    """Keys cut into up to more pieces than there are keys, merged by their LSE."""
    q, k, v = qkv(1, 5, 33, 2, 2, 16)
    edges = [33 * n // pieces for n in range(pieces + 1)]
    parts = [flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in zip(edges, edges[1:], strict=False)]
    out, lse = flash_attn.merge_attention([o for o, _ in parts], [x for _, x in parts])
    want, want_lse = oracle.attention(q, k, v)
    torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-5, atol=1e-6)


def test_t113_rows_do_not_depend_on_batch_mates():
    """One request alone and among long and short ones: bitwise the same, dense and packed."""
    lens = [33, 1, 200, 5, 65, 0, 129, 40]
    (q, k, v), o, longest = packed(lens, lens, 4, 2, 64, dtype=BF16)
    whole = flash_attn_varlen_func(q, k, v, **o, max_seqlen_q=longest[0], max_seqlen_k=longest[1], causal=True)
    for n, rows in enumerate(zip(q.split(lens), k.split(lens), v.split(lens), strict=True)):
        alone = flash_attn_func(*(t[None] for t in rows), causal=True)[0]
        assert torch.equal(whole.split(lens)[n], alone), lens[n]


def test_t128_backward_is_repeatable():
    """20 deterministic runs with 1, 2 and 3 threads: the same bits of dq, dk, dv, dbias."""
    case = cases.Case(batch=2, heads=4, heads_k=2, seqlen_q=129, seqlen_k=200, bias="1h1k", deterministic=True)
    first = None
    for n in range(20):
        torch.set_num_threads(1 + n % 3)
        got = cases.run(case.differentiable).grads
        first = first or got
        assert all(torch.equal(got[x], first[x]) for x in got)


def test_t103_more_queries_over_a_longer_cache(target):
    """Two new queries after five cached keys (capacity 33, the rest NaN), causal: the last rows of the full result."""
    q, k, v = qkv(2, 7, 7, 4, 4, 16)
    want = agree(q, k, v, target, causal=True)[0][:, 5:]
    cache = [torch.cat([t, torch.full((2, 26, 4, 16), float("nan"))], 1) for t in (k, v)]
    used = torch.tensor([7, 7], dtype=torch.int32)
    out = agree(q[:, 5:], *cache, target, causal=True, seqused_k=used)[0]
    torch.testing.assert_close(out, want)
