"""Second derivatives and forward mode: against finite differences and the oracle, in every option, in O(N) memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import cases
import oracle
import pytest
import torch
from oracle import Options
from test_memory import measure
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from flash_attn import flash_attn_func, flash_attn_varlen_func, higher_order, standard_attention
from flash_attn.flash_attn_interface import flash_attn_unpadded_func

FP64 = torch.float64
SEED = torch.tensor([3, 4])

# Beside the options of the call: sizes, "bias" (a shape) and "sink", which get gradients.
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "causal, fewer keys": {"causal": True, "seqlen_q": 5, "seqlen_k": 3},
    "window, softcap": {"window_size": (1, 1), "softcap": 1.5, "softmax_scale": 0.9},
    "grouped heads": {"heads": 4, "causal": True},
    "one key head, wide values": {"heads": 3, "heads_k": 1, "dim_v": 5},
    "full bias": {"bias": (2, 2, 3, 4)},
    "bias per head": {"bias": (1, 2, 3, 4), "causal": True},
    "bias of keys": {"bias": (2, 1, 1, 4), "softcap": 2.0},
    "bias of rank 2": {"bias": (3, 4)},
    "bias of one number": {"bias": (1,)},
    "mask": {"mask": torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]]).bool()},
    "alibi": {"alibi_slopes": torch.tensor([0.3, 0.05])},
    "sink": {"sink": True},
    "sink, fewer keys": {"sink": True, "causal": True, "seqlen_q": 5, "seqlen_k": 3},
    "lengths": {"seqused_k": torch.tensor([4, 2]), "seqused_q": torch.tensor([3, 2]), "causal": True},
    "left pads": {"leftpad_k": torch.tensor([1, 0]), "leftpad_q": torch.tensor([0, 1]), "bias": (1, 1, 3, 4)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": SEED},
    "everything": {"sink": True, "bias": (2, 1, 3, 4), "softcap": 3.0, "window_size": (3, 2), "dropout_p": 0.2,
                   "dropout_seed": SEED, "alibi_slopes": torch.tensor([0.3, 0.05, 0.2, 0.1]), "heads": 4,
                   "seqused_k": torch.tensor([4, 2])},
}  # fmt: skip
PACKED = ("varlen", "varlen, causal", "varlen, dropout", "upper left")
FULLY = ("plain",)  # by all columns of the Jacobian; the others by random projections of it
TARGETS = [pytest.param(t, marks=cases.marks(t), id=str(t)) for t in cases.TARGETS]
Function = Callable[..., tuple[Tensor, Tensor]]


def finite(lse: Tensor) -> Tensor:
    """The LSE without that of rows that see nothing, whose differences are −inf − −inf."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def dense(name: str, target: cases.Target = cases.CPU, **more: object) -> tuple[Function, list[Tensor]]:
    """A function (q, k, v, bias?, sink?) -> (out, finite LSE) with the options of `name`, and fp64 inputs for it."""
    o = {"heads": 2, "heads_k": 2, "seqlen_q": 3, "seqlen_k": 4, "dim": 2, "dim_v": 3, **OPTIONS[name], **more}
    heads, heads_k, seqlen_q, seqlen_k, dim, dim_v = (
        o.pop(n) for n in ("heads", "heads_k", "seqlen_q", "seqlen_k", "dim", "dim_v")
    )
    bias, sink = o.pop("bias", None), o.pop("sink", False)
    shapes = [(2, seqlen_q, heads, dim), (2, seqlen_k, heads_k, dim), (2, seqlen_k, heads_k, dim_v)]
    shapes += [bias] * (bias is not None) + [(heads,)] * sink
    inputs = [torch.randn(s, dtype=FP64).to(target.device).requires_grad_() for s in shapes]
    o = {n: t.to(target.device) if isinstance(t, Tensor) else t for n, t in o.items()}

    def function(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        extra = {"bias": rest[0]} if bias is not None else {}
        extra |= {"learnable_sink": rest[-1]} if sink else {}
        out, lse = flash_attn_func(q, k, v, **extra, **o, return_lse=True, backend=target.backend)
        return out, finite(lse)

    return function, inputs


def packed(name: str, target: cases.Target = cases.CPU) -> tuple[Function, list[Tensor]]:
    """The same for packed sequences, one of them empty, with gaps before and behind them."""
    inputs = [torch.randn(9, 2, 2, dtype=FP64).to(target.device).requires_grad_() for _ in range(3)]
    cu_q = torch.tensor([1, 3, 3, 7], dtype=torch.int32, device=target.device)
    cu_k = torch.tensor([0, 3, 5, 8], dtype=torch.int32, device=target.device)
    if name == "upper left":  # what version 1 meant by causal
        function = flash_attn_unpadded_func

        def upper_left(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse, _ = function(q, k, v, cu_q, cu_k, 4, 3, 0.0, causal=True, return_attn_probs=True)
            return out, finite(lse)

        return upper_left, inputs
    o: dict = {"varlen, causal": {"causal": True}, "varlen, dropout": {"dropout_p": 0.4, "dropout_seed": SEED}}.get(
        name, {}
    )
    o = {n: t.to(target.device) if isinstance(t, Tensor) else t for n, t in o.items()}

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 3, **o, return_lse=True, backend=target.backend)
        return out, finite(lse)

    return varlen, inputs


def build(name: str, target: cases.Target = cases.CPU) -> tuple[Function, list[Tensor]]:
    return packed(name, target) if name in PACKED else dense(name, target)


def sample() -> pytest.MarkDecorator:
    """All options by the CPU library, a few by the others."""
    rows = []
    for name in (*OPTIONS, *PACKED):
        for t in cases.TARGETS:
            few = ("plain", "everything", "varlen, causal")
            if t == cases.CPU or (name in few and name != "upper left"):
                rows.append(pytest.param(name, t, id=f"{t}-{name}", marks=cases.marks(t)))
    return pytest.mark.parametrize(("name", "target"), rows)


@sample()
def test_gradgradcheck(name: str, target: cases.Target):
    """Second derivatives of (out, LSE) in all inputs and in the upstream gradients, against finite differences."""
    function, inputs = build(name, target)
    assert gradgradcheck(function, inputs, fast_mode=name not in FULLY or target != cases.CPU)


@sample()
def test_gradcheck_forward_mode(name: str, target: cases.Target):
    """Jacobians of (out, LSE) by reverse and by forward mode against finite differences."""
    function, inputs = build(name, target)
    assert gradcheck(function, inputs, check_forward_ad=True, fast_mode=name not in FULLY)


@pytest.mark.parametrize("name", ("plain", "everything", "left pads"))
def test_gradcheck_batched_gradients(name: str):
    """First-order gradients for several upstream gradients at once (`is_grads_batched`)."""
    function, inputs = dense(name)
    assert gradcheck(function, inputs, check_batched_grad=True, fast_mode=True)


def derivatives(function: Function, inputs: list[Tensor], weights: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Gradients of a gradient penalty in the inputs and in the upstream gradients."""
    upstream = [w.detach().requires_grad_() for w in weights]
    outputs = function(*inputs)
    grads = torch.autograd.grad(outputs, inputs, upstream, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in grads), [*inputs, *upstream]))


def random_like(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn_like(x) for x in outputs)


@pytest.mark.parametrize("name", (*OPTIONS, *PACKED))
def test_chunks_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch):
    """Second derivatives and tangents are the same whatever the number of rows that are recomputed together."""
    function, inputs = build(name)
    weights = random_like(function(*inputs))
    results = []
    for elements in (1 << 20, 1):
        monkeypatch.setattr(higher_order, "CHUNK_ELEMENTS", elements)
        tangents = tuple(x.detach().cos() for x in inputs)
        forward = torch.func.jvp(function, tuple(x.detach() for x in inputs), tangents)[1]
        results.append([*derivatives(function, inputs, weights), *forward])
    for whole, rows in zip(*results, strict=True):
        torch.testing.assert_close(rows, whole, rtol=1e-10, atol=1e-10)
        assert whole.isfinite().all()


@pytest.mark.parametrize("hide", ("mask", "bias", "window", "lengths", "no keys"))
@pytest.mark.parametrize("target", TARGETS)
def test_rows_that_see_nothing(hide: str, target: cases.Target):
    """Their second derivatives and tangents are zero, not NaN, whatever padding holds; NaN in padding stays there."""
    seqlen_k = 0 if hide == "no keys" else 5
    shapes = ((2, 3, 2, 4), (2, seqlen_k, 2, 4), (2, seqlen_k, 2, 4))
    q, k, v = (torch.randn(s, dtype=FP64).to(target.device) for s in shapes)
    o: dict = {}
    unseen = torch.ones(2, 3, dtype=torch.bool)
    if hide == "mask":
        o["mask"] = torch.tensor([1, 0, 1]).bool()[:, None].to(target.device)
        unseen[:, ::2] = False
    elif hide == "bias":
        o["bias"] = torch.tensor([0.5, -math.inf, 1.0], dtype=FP64)[:, None].to(target.device)
        unseen[:, ::2] = False
    elif hide == "window":
        k, v, o["causal"] = k[:, :2], v[:, :2], True
        unseen[:, 1:] = False
    elif hide == "lengths":
        o["seqused_k"], o["leftpad_q"] = torch.tensor([0, 3]).to(target.device), torch.tensor([0, 1]).to(target.device)
        k[0], v[0], k[1, 3:], v[1, 3:], q[1, 0] = (math.nan,) * 5
        unseen[1, 1:] = False
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_func(q, k, v, **o, return_lse=True, backend=target.backend)

    out, lse = function(*leaves)
    empty = lse.detach().transpose(1, 2)[..., 0] == -math.inf
    assert torch.equal(empty.cpu(), unseen)
    upstream = [torch.randn_like(x).requires_grad_() for x in (out, lse)]
    grads = torch.autograd.grad((out, lse), leaves, upstream, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), [*leaves, *upstream])
    assert all(x.isfinite().all() for x in second)
    assert (second[0][empty] == 0).all() and (second[3][empty] == 0).all()
    assert (second[4].transpose(1, 2)[empty] == 0).all()
    tangents = torch.func.jvp(function, tuple(leaves), tuple(torch.ones_like(x) for x in leaves))[1]
    assert all(x.isfinite().all() for x in tangents)
    assert (tangents[0][empty] == 0).all() and (tangents[1].transpose(1, 2)[empty] == 0).all()


LONG = {
    "plain": {},
    "causal": {"causal": True},
    "window, softcap": {"window_size": (20, 3), "softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.02, 0.1])},
    "lengths": {"seqused_k": torch.tensor([30]), "leftpad_k": torch.tensor([3]), "causal": True},
    "dropout": {"dropout_p": 0.2, "dropout_seed": SEED},
}


@pytest.mark.parametrize(
    ("seqlen", "name"), [*((37, n) for n in LONG), (1000, "causal"), (1000, "window, softcap"), (1000, "dropout")]
)
@pytest.mark.parametrize("target", TARGETS)
def test_t92_jvp_equals_central_differences(seqlen: int, name: str, target: cases.Target):
    """Directional derivatives of (out, LSE) in q, k, v, bias and sink at lengths that divide by no tile."""
    o = {n: t.to(target.device) if isinstance(t, Tensor) else t for n, t in LONG[name].items()}
    shapes = [(1, seqlen, 2, 8)] * 3 + [(1, 1, 1, seqlen), (2,)]
    points = [torch.randn(s, dtype=FP64).to(target.device) for s in shapes]
    directions = [torch.randn_like(x) for x in points]

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        o2 = {"bias": bias, "learnable_sink": sink, "return_lse": True, "backend": target.backend, **o}
        out, lse = flash_attn_func(q, k, v, **o2)
        return out, finite(lse)

    h = 1e-5
    ahead, behind = (function(*(x + s * t for x, t in zip(points, directions, strict=True))) for s in (h, -h))
    values, got = torch.func.jvp(function, tuple(points), tuple(directions))
    for value, tangent, a, b, here in zip(values, got, ahead, behind, function(*points), strict=True):
        assert torch.equal(value, here)
        torch.testing.assert_close(tangent, (a - b) / (2 * h), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ("plain", "everything", "sink, fewer keys"))
def test_third_and_fourth_order(name: str):
    """The gradient of the gradient of a gradient penalty, and once more: those of plain autograd."""
    function, inputs = dense(name)
    o = {n: t for n, t in OPTIONS[name].items() if n not in ("bias", "sink", "heads", "seqlen_q", "seqlen_k")}

    def plain(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        extra = {"bias": rest[0], "learnable_sink": rest[-1]} if len(rest) == 2 else {}
        extra |= {"learnable_sink": rest[0]} if len(rest) == 1 else {}
        out, lse = standard_attention(q, k, v, **extra, **o, return_lse=True)
        return out, finite(lse)

    answers = []
    for f in (function, plain):
        out, lse = f(*inputs)
        value, orders = (out.square().sum() + lse.sin().sum()), []
        for _ in range(4):
            grads = torch.autograd.grad(value, inputs, create_graph=True)
            orders.append(grads)
            value = sum(g.square().sum() for g in grads)
        answers.append(orders)
    for got, want in zip(*answers, strict=True):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9 * float(w.detach().abs().max() + 1))


def penalty_against_fp64(shape: tuple[int, int, int, int], dtype: torch.dtype, rtol: float, **o: object) -> None:
    """A gradient penalty in `dtype` against the oracle's in fp64 from the same inputs: error / largest element."""
    inputs = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    weight = torch.randn(shape, dtype=dtype)
    results = []
    for function in (lambda *x: flash_attn_func(*x, **o), lambda *x: oracle.attention(*x, options=Options(**o))[0]):
        exact = len(results) == 1
        leaves = [x.double().requires_grad_() if exact else x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, weight.to(out.dtype), create_graph=True)
        norm = sum(g.square().sum(dtype=FP64) for g in grads)
        results.append(torch.autograd.grad(norm, leaves))
    for got, want, leaf in zip(*results, inputs, strict=True):
        assert got.dtype == leaf.dtype
        assert (got.double() - want).abs().max() <= rtol * want.abs().max()


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    ("dtype", "rtol"), ((torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.003)), ids=str
)
def test_t91_gradient_penalty(dtype: torch.dtype, rtol: float, causal: bool):
    """The report's penalty, its batch shrunk."""
    penalty_against_fp64((2, 65, 2, 32), dtype, rtol, causal=causal)


@pytest.mark.full
def test_t91_gradient_penalty_of_the_report():
    penalty_against_fp64((32, 128, 8, 64), torch.float16, 0.003)


def test_only_the_needed_second_derivatives():
    """Any choice of inputs that need gradients: exactly those get them, with the values of the full set."""
    function, inputs = dense("everything")
    weights = random_like(function(*inputs))
    want = derivatives(function, inputs, weights)
    for needs in itertools.product((False, True), repeat=len(inputs)):
        if not any(needs):
            continue
        leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        chosen = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad(function(*leaves), chosen, weights, create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        assert [x.grad is not None for x in leaves] == list(needs)
        if all(needs):
            for x, w in zip(leaves, want, strict=False):
                torch.testing.assert_close(x.grad, w)


@pytest.mark.parametrize("one", range(5))
def test_one_gradient_differentiated_by_everything(one: int):
    """The penalty of a single first-order gradient (the others are not even computed), in all inputs."""
    function, inputs = dense("everything", dropout_p=0.0)
    o = {n: OPTIONS["everything"][n] for n in ("softcap", "window_size", "alibi_slopes", "seqused_k")}

    def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = standard_attention(q, k, v, bias=bias, learnable_sink=sink, return_lse=True, **o)
        return out, finite(lse)

    results = []
    for f in (function, plain):
        (g,) = torch.autograd.grad(sum(x.cos().sum() for x in f(*inputs)), inputs[one], create_graph=True)
        results.append(torch.autograd.grad(g.square().sum(), inputs))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_autograd_functional():
    """Jacobians, Hessian-vector and vector-Hessian products by torch.autograd.functional: those of the oracle."""
    q, k, v = (torch.randn(1, 3, 2, 2, dtype=FP64) for _ in range(3))
    t = torch.randn_like(q)
    module, results = torch.autograd.functional, []
    for f in (
        lambda q: flash_attn_func(q, k, v, causal=True),
        lambda q: oracle.attention(q, k, v, options=Options(causal=True))[0],
    ):

        def loss(q: Tensor, f=f) -> Tensor:
            return f(q).square().sum()

        products = [module.hvp(loss, q, t)[1], module.vhp(loss, q, t)[1], module.jvp(f, q, t)[1]]
        results.append([module.jacobian(f, q), module.hessian(loss, q), *products])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    vectorized = module.jacobian(lambda q: flash_attn_func(q, k, v, causal=True), q, vectorize=True)
    torch.testing.assert_close(vectorized, results[0][0])


@pytest.mark.parametrize("name", ("plain", "everything"))
def test_hessians_by_mixtures_of_modes(name: str):
    """Reverse over reverse and reverse over forward are right; what has forward mode outside is right or refused."""
    function, inputs = dense(name)
    q, *rest = (x.detach() for x in inputs)
    rev, fwd = torch.func.jacrev, torch.func.jacfwd

    def loss(q: Tensor) -> Tensor:
        out, lse = function(q, *rest)
        return out.square().sum() + lse.sin().sum()

    want = torch.autograd.functional.hessian(loss, q)
    torch.testing.assert_close(rev(rev(loss))(q), want)
    torch.testing.assert_close(rev(fwd(loss))(q), want)
    for outer, inner in ((fwd, fwd), (fwd, rev), (torch.func.hessian, None)):
        try:
            got = outer(inner(loss) if inner else loss)(q)
        except NotImplementedError:
            continue
        torch.testing.assert_close(got, want)


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch):
    """Peak of a double backward at 1k, 2k, 4k: no N × N matrix, of which some twenty would live at once."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed counts as free
    measure("""
    def penalty(n):
        q, k, v = (torch.randn(1, n, 1, 32, requires_grad=True) for _ in range(3))
        def run():
            out = flash_attn.flash_attn_func(q, k, v, causal=True)
            grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), create_graph=True)
            torch.autograd.grad(sum(g.square().sum() for g in grads), (q, k, v))
        return run
    flash_attn.higher_order.CHUNK_ELEMENTS = 1 << 18
    penalty(256)()
    sizes = [peak_above(penalty(n)) for n in (1024, 2048, 4096)]
    print([s / MB for s in sizes])
    assert sizes[2] < 60 * MB, sizes  # one fp32 matrix at 4096: 67 MB
    assert sizes[2] - sizes[1] < 2.5 * (sizes[1] - sizes[0]) + 5 * MB, sizes
    """)
