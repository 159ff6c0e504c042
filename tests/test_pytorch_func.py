"""torch.func beyond the table: forms of vmap, randomness, what may be batched; autocast, opcheck, fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields

import cases
import pytest
import torch
from cases import Case
from test_pytorch import FEATURES, Called, as_tuple, run, same
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flash_attn import flash_attn_func, flash_attn_varlen_func, standard_attention

FP64 = torch.float64
BF16 = torch.bfloat16


def qkv(dtype: torch.dtype = FP64) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(s, dtype=dtype) for s in ((2, 5, 4, 4), (2, 7, 2, 4), (2, 7, 2, 6)))


# ---- vmap -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dim", range(-5, 5))
@pytest.mark.parametrize("out_dim", (0, 2, -1))
def test_vmap_dims(in_dim: int, out_dim: int):
    """The examples along any axis of q, the same k and v for all; the results along any axis."""
    q, k, v = qkv()
    examples = [q, q + 1, q.cos()]
    got = torch.vmap(lambda q: flash_attn_func(q, k, v), in_dim, out_dim)(torch.stack(examples, in_dim))
    torch.testing.assert_close(got, torch.stack([flash_attn_func(x, k, v) for x in examples], out_dim))


def test_vmap_of_different_dims_and_containers():
    q, k, v = qkv()
    stacked = {"q": torch.stack([q, q + 1], 1), "kv": (torch.stack([k, k.cos()], 3), v)}
    got = torch.vmap(
        lambda x: flash_attn_func(x["q"], *x["kv"], return_lse=True), ({"q": 1, "kv": (3, None)},), (0, 2)
    )(stacked)
    want = [flash_attn_func(a, b, v, return_lse=True) for a, b in ((q, k), (q + 1, k.cos()))]
    torch.testing.assert_close(got[0], torch.stack([x[0] for x in want]))
    torch.testing.assert_close(got[1], torch.stack([x[1] for x in want], 2))


def test_nested_vmap():
    """Every query batch against every key batch."""
    q, k, v = qkv()
    queries, keys = torch.stack([q, q + 1, q - 1]), torch.stack([k, k.cos()])
    pairs = torch.vmap(torch.vmap(lambda q, k: flash_attn_func(q, k, v), (None, 0)), (0, None))(queries, keys)
    for a, b in itertools.product(range(3), range(2)):
        torch.testing.assert_close(pairs[a, b], flash_attn_func(queries[a], keys[b], v))


@pytest.mark.parametrize("chunk_size", (None, 1, 2))
def test_per_sample_gradients(chunk_size: int | None):
    """vmap(grad) over the batch, weights shared: the loop's."""
    x, weight = torch.randn(4, 6, 8, dtype=FP64), torch.randn(8, 24, dtype=FP64)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        q, k, v = (x @ weight).view(1, 6, 3, 2, 4).unbind(2)
        return flash_attn_func(q, k, v, causal=True).square().sum()

    got = torch.vmap(torch.func.grad(loss), (None, 0), chunk_size=chunk_size)(weight, x)
    for n in range(4):
        torch.testing.assert_close(got[n], torch.func.grad(loss)(weight, x[n]))
    torch.testing.assert_close(torch.func.grad(lambda w: sum(loss(w, y) for y in x))(weight), got.sum(0))


BATCHED = {
    "bias": lambda q, k, v, x: flash_attn_func(q, k, v, bias=x),
    "mask": lambda q, k, v, x: flash_attn_func(q, k, v, mask=x > 0),
    "sink": lambda q, k, v, x: flash_attn_func(q, k, v, learnable_sink=x[:4, 0]),
    "alibi_slopes": lambda q, k, v, x: flash_attn_func(q, k, v, alibi_slopes=x.detach()[:4, 0].abs()),
    "seqused_k": lambda q, k, v, x: flash_attn_func(q, k, v, seqused_k=(x[:2, 0].abs() * 2).long()),
    "leftpad_k": lambda q, k, v, x: flash_attn_func(q, k, v, leftpad_k=(x[:2, 0].abs() * 2).long()),
    "dropout_seed": lambda q, k, v, x: flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=(x[0, :2] * 1e6).long()),
    "cu_seqlens": lambda q, k, v, x: flash_attn_varlen_func(
        q[0], k[0], v[0], torch.cat([torch.zeros(1), x[:1, 0].abs(), torch.full((1,), 5.0)]).int(),
        torch.tensor([0, 3, 7]), 5, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHED)
def test_vmap_over_one_option(name: str):
    """Only an option differs among the examples; with it the gradients of shared q."""
    q, k, v = qkv()
    x = torch.randn(3, 5, 7, dtype=FP64)
    function = BATCHED[name]
    got = torch.vmap(lambda x: function(q, k, v, x))(x)
    grads = torch.vmap(lambda x: torch.func.grad(lambda q: function(q, k, v, x).square().sum())(q))(x)
    for n in range(3):
        torch.testing.assert_close(got[n], function(q, k, v, x[n]))
        torch.testing.assert_close(grads[n], torch.func.grad(lambda q, n=n: function(q, k, v, x[n]).square().sum())(q))
    assert not torch.equal(got[0], got[1])


@pytest.mark.parametrize("options", ({"backend": "reference"}, {"dropout_p": 0.5}), ids=str)
def test_vmap_over_lengths_where_the_host_reads_them(options: dict):
    """Either right or refused in words that name lengths or vmap."""
    q, k, v = qkv()
    used = torch.tensor([[7, 3], [2, 5]])
    seed = {"dropout_seed": torch.tensor([1, 2])} if "dropout_p" in options else {}
    try:
        got = torch.vmap(lambda u: flash_attn_func(q, k, v, seqused_k=u, **options, **seed))(used)
    except (RuntimeError, NotImplementedError) as error:
        assert "seqused" in str(error) or "vmap" in str(error) or "length" in str(error), error
        return
    for n in range(2):
        torch.testing.assert_close(got[n], flash_attn_func(q, k, v, seqused_k=used[n], **options, **seed))


def test_vmap_of_no_examples_is_refused():
    _, k, v = qkv()
    with pytest.raises(RuntimeError, match="size 0"):
        torch.vmap(lambda q: flash_attn_func(q, k, v))(torch.zeros(0, 2, 5, 4, 4, dtype=FP64))


@pytest.mark.parametrize("batched", (True, False))
@pytest.mark.parametrize("gradient", (True, False))
def test_vmap_randomness(batched: bool, gradient: bool):
    """ "error" raises; "same": one mask for all examples, that of the call alone; "different": one for each."""
    q, k, v = qkv()
    x = torch.stack([q, q, q])

    def function(q: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, dropout_p=0.5)

    call = torch.func.grad(lambda q: function(q).square().sum()) if gradient else function

    def run(randomness: str) -> Tensor:
        if batched:
            return torch.vmap(call, randomness=randomness)(x)
        return torch.vmap(lambda n: call(q) * n, randomness=randomness)(torch.ones(3, dtype=FP64))

    with pytest.raises(RuntimeError, match="randomness"):
        run("error")
    torch.manual_seed(5)
    want = call(q)
    torch.manual_seed(5)
    same = run("same")
    for n in range(3):
        torch.testing.assert_close(same[n], want)
    different = run("different")
    assert all(not torch.equal(different[a], different[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    torch.vmap(lambda q: flash_attn_func(q, k, v, dropout_p=0.0))(x)  # nothing is drawn


def test_vmap_of_jvp_and_jacfwd():
    q, k, v = qkv()
    t = torch.randn(3, *q.shape, dtype=FP64)
    got = torch.vmap(lambda t: torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (t,))[1])(t)
    for n in range(3):
        torch.testing.assert_close(got[n], torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (t[n],))[1])
    forward = torch.func.jacfwd(lambda q: flash_attn_func(q, k, v))(q)
    torch.testing.assert_close(forward, torch.func.jacrev(lambda q: flash_attn_func(q, k, v))(q))


def test_linearize_and_vjp():
    q, k, v = qkv()
    out, pull = torch.func.vjp(lambda q: flash_attn_func(q, k, v), q)
    t, w = torch.randn_like(q), torch.randn_like(out)
    value, push = torch.func.linearize(lambda q: flash_attn_func(q, k, v), q)
    torch.testing.assert_close(value, out)
    torch.testing.assert_close((push(t) * w).sum(), (pull(w)[0] * t).sum())


def _tangent(q: Tensor, t: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(flash_attn_func(forward_ad.make_dual(q, t), q, q)).tangent


def test_forward_mode_by_dual_numbers():
    """torch.autograd.forward_ad directly."""
    q = qkv()[0]
    want = torch.func.jvp(lambda x: standard_attention(x, q, q), (q,), (q.cos(),))[1]
    torch.testing.assert_close(_tangent(q, q.cos()), want)


def test_compiled_dual_numbers_are_right_or_refused():
    """A tangent is never dropped in silence (None: zero)."""
    q = qkv()[0]
    torch._dynamo.reset()
    try:
        got = torch.compile(_tangent, fullgraph=True, backend="aot_eager")(q, q.cos())
    except (RuntimeError, NotImplementedError):
        return
    assert got is not None, "the tangent is lost"
    torch.testing.assert_close(got, _tangent(q, q.cos()))


def test_double_backward_through_a_checkpoint():
    q, k, v = qkv()
    leaf = q.clone().requires_grad_()
    results = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        (g,) = torch.autograd.grad(
            wrap(lambda q: flash_attn_func(q, k, v).square().sum(), leaf), leaf, create_graph=True
        )
        results.append(torch.autograd.grad(g.square().sum(), leaf)[0])
    torch.testing.assert_close(*results)


# ---- Autocast -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_t95_autocast(dtype: torch.dtype, backend: str):
    """q, k and v are cast, whichever of them is wide, and a bias in either half precision; LSE is fp32; a bias in fp32
    and the sink are taken as they are; fp64 stays."""
    q, k, v = qkv(torch.float32)
    bias, sink = torch.randn(5, 7), torch.randn(4)
    low = [x.to(dtype) for x in (q, k, v)]
    extra = {"learnable_sink": sink, "return_lse": True, "backend": backend}
    want = flash_attn_func(*low, bias=bias, **extra)
    with torch.autocast("cpu", dtype=dtype):
        for mixed in ((q, k, v), (q, *low[1:]), (low[0], k, v)):
            got = flash_attn_func(*mixed, bias=bias, **extra)
            assert got[0].dtype == dtype and got[1].dtype == torch.float32
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        want = flash_attn_func(*low, bias=bias.half().to(dtype), **extra)
        assert torch.equal(flash_attn_func(q, k, v, bias=bias.half(), **extra)[0], want[0])
        double = flash_attn_func(q.double(), k.double(), v.double(), bias=bias.double(), backend=backend)
        with torch.autocast("cpu", enabled=False):
            assert flash_attn_func(q, k, v, backend=backend).dtype == torch.float32
    assert double.dtype == FP64


def test_gradients_under_autocast_have_the_dtypes_of_the_inputs():
    q, k, v = qkv(torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(5, 7), torch.randn(4).bfloat16())]
    with torch.autocast("cpu", dtype=BF16):
        out = flash_attn_func(q, k, v, bias=leaves[3], learnable_sink=leaves[4])
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]


def test_autocast_of_shapes_alone():
    """Fake tensors get the dtypes of real ones under autocast."""
    with FakeTensorMode(), torch.autocast("cpu", dtype=BF16):
        assert flash_attn_func(*qkv(torch.float32)).dtype == BF16


# ---- Operators and fake tensors -------------------------------------------------------------------------------------

SAMPLE = [
    Case(),
    Case(dtype=torch.float16, causal=True, heads=4, dim_v=8),
    Case(dtype=BF16, bias="1h1k", bias_fp32=True, sink=True, lse_grad=True),
    Case(dtype=torch.float64, mask="qk", window=(3, 2), softcap=2.0, alibi="batch_heads", deterministic=True),
    Case(varlen=True, trailing=3, slack=2, bias="bhqk", sink=True),
    Case(dropout_p=0.3, seqused_k=True, leftpad_k=True, leftpad_q=True, seqused_q=True, length_dtype=torch.int64),
    Case(layout="slice", heads=4, lse_grad=True),
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_opcheck(case: Case):
    """torch.library.opcheck of the operators, on the arguments that a call of `case` gives them."""
    case = case.differentiable
    is_plain = case in [SAMPLE[n].differentiable for n in (0, 1, -1)]
    forward = "attention_forward_plain" if is_plain else "attention_forward"
    operators = [getattr(torch.ops.flash_attn, name).default for name in (forward, "attention_backward")]
    recorded: list = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in operators:
                recorded.append((function, [x.detach() if isinstance(x, Tensor) else x for x in args]))
            return function(*args, **(kwargs or {}))

    with Recorder():
        cases.run(case)
    assert [function for function, _ in recorded] == operators
    for function, args in recorded:
        clean = [x.nan_to_num() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
        tests += ["test_aot_dispatch_dynamic"] * (case == SAMPLE[0].differentiable)
        torch.library.opcheck(function, tuple(clean), test_utils=tests)


def _signature(case: Case, made: cases.Inputs, mode: FakeTensorMode | None, needs: str) -> list:
    if mode is not None:
        for f in fields(made):
            if isinstance(getattr(made, f.name), Tensor):
                setattr(made, f.name, mode.from_tensor(getattr(made, f.name)))
        made.lengths = {n: None if t is None else mode.from_tensor(t) for n, t in made.lengths.items()}
    leaves = list(made.leaves(needs).values())
    for x in leaves:
        x.requires_grad_()
    out, lse = cases.call(case, made)
    grads = torch.autograd.grad((out, lse), leaves, (torch.zeros_like(out), torch.zeros_like(lse)))
    return [(tuple(x.shape), x.stride(), x.dtype, x.device.type) for x in (out, lse, *grads)]


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("varlen", (False, True))
def test_fake_outputs_are_laid_out_as_real_ones(layout: str, varlen: bool):
    """Shapes, strides and dtypes of outputs and gradients, for all layouts of the inputs."""
    for dim_v, bias, dtype in (
        (16, "bhqk", torch.float32),
        (1, "1h1k", BF16),
        (8, "", torch.float64),
        (24, "qk", BF16),
    ):
        case = Case(layout=layout, varlen=varlen, dim_v=dim_v, heads=4, bias=bias, dtype=dtype, sink=True, causal=True)
        for needs in (case.differentiable.grads, "v", "qs"):
            made = cases.build(case)
            with FakeTensorMode(allow_non_fake_inputs=False) as mode:
                fake = _signature(case, made, mode, needs)
            assert fake == _signature(case, cases.build(case), None, needs)


def test_t88_fake_calls_refuse_what_real_ones_refuse():
    """The same exception with the same words from real, meta and fake tensors."""
    q, k, v = qkv(torch.float32)
    wrong = (
        (q[0], k, v), (q[None], k, v), (q.int(), k.int(), v.int()), (q, k[:, :, :1].expand(2, 7, 3, 4), v),
        (q, k, v[:, :3]), (q[..., :3], k, v), (q, k.double(), v),
    )  # fmt: skip
    for arguments in wrong:
        messages = []
        for kind in ("real", "meta", "fake"):
            mode = FakeTensorMode()
            made = (
                arguments
                if kind == "real"
                else [x.to("meta") if kind == "meta" else mode.from_tensor(x) for x in arguments]
            )
            with pytest.raises(RuntimeError) as error, mode if kind == "fake" else torch.no_grad():
                flash_attn_func(*made)
            messages.append((type(error.value), str(error.value).replace("meta", "cpu")))
        assert len(set(messages)) == 1, messages


@pytest.mark.parametrize("kind", ("meta", "fake", "compile"))
def test_fake_ops_refuse_what_real_ones_refuse(kind: str):
    """Called past the Python functions: with the words of the Python functions, for there is nothing else to check
    them, and no IndexError or results whose shapes cannot be."""
    ops, (q, k, v) = torch.ops.flash_attn, qkv(torch.float32)
    three_heads = q[:, :, :1].expand(-1, -1, 3, -1)
    wrong = (
        (q[0], k, v, "q must be"), (q[0, 0], k[0, 0], v[0, 0], "q must be"), (q, k, v[0, 0, 0], "v must be"),
        (q, three_heads, three_heads, "k must have"), (q, k, v[:, :3], "v must have"),
        (q, k.double(), v, "k must have"),
    )  # fmt: skip
    for *tensors, words in wrong:
        for name in ("attention_forward", "attention_forward_plain", "attention_backward"):

            def call(q: Tensor, k: Tensor, v: Tensor, name: str = name):
                if name == "attention_forward":
                    return ops.attention_forward(q, k, v, None, None, 1.0)
                if name == "attention_forward_plain":
                    return ops.attention_forward_plain(q, k, v, 1.0, False, -1, -1, False, 0.0)
                return ops.attention_backward(q, None, q, k, v, q, q, None, None, *(True,) * 3, False, False, 1.0)

            with pytest.raises(RuntimeError):
                call(*tensors)
            with pytest.raises(RuntimeError, match=words):
                if kind == "compile":
                    torch.compile(call, backend="eager")(*tensors)
                elif kind == "meta":
                    call(*(x.to("meta") for x in tensors))
                else:
                    with FakeTensorMode() as mode:
                        call(*map(mode.from_tensor, tensors))


def test_t89_export_serves_every_size():
    """One program for batches of 2 to 64 and several lengths, with bias and LSE; saved and loaded."""
    import io

    f = FEATURES["bias, mask, alibi, softcap, window"]
    differentiable, constants = f.inputs(torch.float32)
    program = torch.export.export(Called(f.function), (*differentiable, *constants), dynamic_shapes=(f.sizes,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for batch, rows, columns in ((2, 5, 7), (3, 155, 33), (64, 2, 9)):
        q, k, v = torch.randn(batch, rows, 4, 4), torch.randn(batch, columns, 2, 4), torch.randn(batch, columns, 2, 6)
        rest = (torch.randn(batch, 1, rows, columns), torch.rand(rows, columns) < 0.7, constants[1])
        torch.testing.assert_close(loaded(q, k, v, *rest), f.function(q, k, v, *rest))


def test_t86_one_compilation_serves_every_length():
    """With dynamic shapes a second length does not compile again."""
    torch._dynamo.reset()
    compiled: list = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        compiled.append(graph)
        return graph.forward

    function = torch.compile(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True), backend=backend, dynamic=True, fullgraph=True
    )
    for n in (5, 33, 64):
        q, k, v = (torch.randn(2, n, 2, 8) for _ in range(3))
        torch.testing.assert_close(as_tuple(function(q, k, v))[0], flash_attn_func(q, k, v, causal=True))
    assert len(compiled) == 1


def test_compile_without_grad():
    """The graph without gradients is another one."""
    torch._dynamo.reset()
    f = FEATURES["bias, mask, alibi, softcap, window"]
    inputs = [x for part in f.inputs() for x in part]
    compiled = torch.compile(f.function, fullgraph=True, backend="aot_eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(compiled(*inputs), f.function(*inputs))


@pytest.mark.full
@pytest.mark.parametrize("name", ("dense", "varlen", "dropout", "MHA"))
def test_inductor(name: str):
    """The default backend; dropout's seed comes from inductor's generator, so only its statistics are alike."""
    torch._dynamo.reset()
    f = FEATURES[name]
    compiled = torch.compile(f.function, fullgraph=True)
    want, got = run(f, f.inputs()), run(f, f.inputs(), lambda _: compiled)
    if f.random:
        assert all(g.shape == w.shape and g.stride() == w.stride() for g, w in zip(got, want, strict=True))
        return
    same(got, want, rtol=1e-6, atol=1e-6)
