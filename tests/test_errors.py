"""Bad input: one test per rule. The kind of exception, and a message that names the argument and what it was.

RuntimeError for tensors, ValueError for options that are no tensors, NotImplementedError for what a backend lacks.
Meta tensors get the same exception wherever no contents are needed.
"""

from __future__ import annotations

import math

import pytest
import torch

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func

INT, LONG, BOOL, HALF, BF16, FP64 = torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float64


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: int, dtype: torch.dtype = INT) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def dense(**changes) -> dict:
    """q (2, 5, 4, 8), k and v (2, 7, 2, 8), and `changes`."""
    return {"q": zeros(2, 5, 4, 8), "k": zeros(2, 7, 2, 8), "v": zeros(2, 7, 2, 8), **changes}


def varlen(**changes) -> dict:
    """Two sequences: q (9, 4, 8) as 4 + 5 rows, k and v (12, 2, 8) as 7 + 5, and `changes`."""
    base = {
        "q": zeros(9, 4, 8), "k": zeros(12, 2, 8), "v": zeros(12, 2, 8), "cu_seqlens_q": ints(0, 4, 9),
        "cu_seqlens_k": ints(0, 7, 12), "max_seqlen_q": 5, "max_seqlen_k": 7,
    }  # fmt: skip
    return {**base, **changes}


# (arguments, exception, the argument that the message names, a piece of its value that the message shows)
SHAPES = {
    "q 3-D": (dense(q=zeros(5, 4, 8)), RuntimeError, "q", "5, 4, 8"),
    "q 5-D": (dense(q=zeros(1, 2, 5, 4, 8)), RuntimeError, "q", "1, 2, 5, 4, 8"),
    "k 3-D": (dense(k=zeros(7, 2, 8)), RuntimeError, "k", "7, 2, 8"),
    "v 5-D": (dense(v=zeros(1, 2, 7, 2, 8)), RuntimeError, "v", "1, 2, 7, 2, 8"),
    "batch of k": (dense(k=zeros(3, 7, 2, 8)), RuntimeError, "k", "3"),
    "batch of v": (dense(v=zeros(3, 7, 2, 8)), RuntimeError, "v", "3"),
    "seqlen of v": (dense(v=zeros(2, 6, 2, 8)), RuntimeError, "v", "6"),
    "heads of v": (dense(v=zeros(2, 7, 1, 8)), RuntimeError, "v", "1"),
    "head dim of k": (dense(k=zeros(2, 7, 2, 9)), RuntimeError, "k", "9"),
    "heads do not divide": (dense(k=zeros(2, 7, 3, 8), v=zeros(2, 7, 3, 8)), RuntimeError, "heads", "3"),
    "no kv heads": (dense(k=zeros(2, 7, 0, 8), v=zeros(2, 7, 0, 8)), RuntimeError, "heads", "0"),
    "head dim 0": (dense(q=zeros(2, 5, 4, 0), k=zeros(2, 7, 2, 0)), RuntimeError, "dim", "0"),
    "head dim 0 of v": (dense(v=zeros(2, 7, 2, 0)), RuntimeError, "v", "0"),
    "integer q": (dense(q=zeros(2, 5, 4, 8, dtype=INT)), RuntimeError, "q", "int32"),
    "integer q, k, v": (dense(**{n: zeros(2, 7, 2, 8, dtype=INT) for n in "qkv"}), RuntimeError, "q", "int32"),
    "complex q, k, v": (dense(**{n: zeros(2, 7, 2, 8, dtype=torch.complex64) for n in "qkv"}), RuntimeError, "q",
    "complex64"),
    "float8 q, k, v": (dense(**{n: zeros(2, 7, 2, 8).to(torch.float8_e4m3fn) for n in "qkv"}), RuntimeError, "q",
    "float8"),
    "dtype of k": (dense(k=zeros(2, 7, 2, 8, dtype=HALF)), RuntimeError, "k", "float16"),
    "dtype of v": (dense(v=zeros(2, 7, 2, 8, dtype=BF16)), RuntimeError, "v", "bfloat16"),
    "mask not bool": (dense(mask=zeros(5, 7)), RuntimeError, "mask", "float32"),
    "mask of integers": (dense(mask=zeros(5, 7, dtype=INT)), RuntimeError, "mask", "int32"),
    "mask not broadcastable": (dense(mask=zeros(6, 7, dtype=BOOL)), RuntimeError, "mask", "6, 7"),
    "mask with kv heads": (dense(mask=zeros(2, 2, 5, 7, dtype=BOOL)), RuntimeError, "mask", "2, 2, 5, 7"),
    "mask 5-D": (dense(mask=zeros(1, 2, 4, 5, 7, dtype=BOOL)), RuntimeError, "mask", "1, 2, 4, 5, 7"),
    "mask of other batch": (dense(mask=zeros(3, 1, 5, 7, dtype=BOOL)), RuntimeError, "mask", "3, 1, 5, 7"),
    "bias of integers": (dense(bias=zeros(5, 7, dtype=INT)), RuntimeError, "bias", "int32"),
    "bias bool": (dense(bias=zeros(5, 7, dtype=BOOL)), RuntimeError, "bias", "bool"),
    "bias fp64 with fp32": (dense(bias=zeros(5, 7, dtype=FP64)), RuntimeError, "bias", "float64"),
    "bias fp16 with fp32": (dense(bias=zeros(5, 7, dtype=HALF)), RuntimeError, "bias", "float16"),
    "bias not broadcastable": (dense(bias=zeros(5, 6)), RuntimeError, "bias", "5, 6"),
    "bias 5-D": (dense(bias=zeros(1, 1, 1, 5, 7)), RuntimeError, "bias", "1, 1, 1, 5, 7"),
    "bias of other heads": (dense(bias=zeros(2, 3, 5, 7)), RuntimeError, "bias", "2, 3, 5, 7"),
    "sink shape": (dense(learnable_sink=zeros(2)), RuntimeError, "learnable_sink", "2"),
    "sink 2-D": (dense(learnable_sink=zeros(2, 4)), RuntimeError, "learnable_sink", "2, 4"),
    "sink of integers": (dense(learnable_sink=zeros(4, dtype=INT)), RuntimeError, "learnable_sink", "int32"),
    "slopes shape": (dense(alibi_slopes=zeros(3)), RuntimeError, "alibi_slopes", "3"),
    "slopes per kv head": (dense(alibi_slopes=zeros(2, 2)), RuntimeError, "alibi_slopes", "2, 2"),
    "slopes 3-D": (dense(alibi_slopes=zeros(1, 2, 4)), RuntimeError, "alibi_slopes", "1, 2, 4"),
    "slopes dtype": (dense(alibi_slopes=zeros(4, dtype=HALF)), RuntimeError, "alibi_slopes", "float16"),
    "slopes fp64 with fp32": (dense(alibi_slopes=zeros(4, dtype=FP64)), RuntimeError, "alibi_slopes", "float64"),
    **{
        f"{n} {what}": (dense(**{n: t}), RuntimeError, n, show)
        for n in ("seqused_q", "seqused_k", "leftpad_q", "leftpad_k")
        for what, t, show in (("shape", ints(1, 1, 1), "3"), ("2-D", zeros(2, 1, dtype=INT), "2, 1"),
                              ("dtype", zeros(2), "float32"), ("0-D", ints(1)[0], ""))
    },
    "seed dtype": (dense(dropout_p=0.1, dropout_seed=ints(1, 2)), RuntimeError, "dropout_seed", "int32"),
    "seed shape": (dense(dropout_p=0.1, dropout_seed=ints(1, 2, 3, dtype=LONG)), RuntimeError, "dropout_seed", "3"),
    "varlen q 4-D": (varlen(q=zeros(1, 9, 4, 8)), RuntimeError, "q", "1, 9, 4, 8"),
    "varlen k 4-D": (varlen(k=zeros(1, 12, 2, 8)), RuntimeError, "k", "1, 12, 2, 8"),
    "varlen rows of v": (varlen(v=zeros(11, 2, 8)), RuntimeError, "v", "11"),
    "cu_seqlens_q dtype": (varlen(cu_seqlens_q=zeros(3)), RuntimeError, "cu_seqlens_q", "float32"),
    "cu_seqlens_k int16": (varlen(cu_seqlens_k=zeros(3, dtype=torch.int16)), RuntimeError, "cu_seqlens_k", "int16"),
    "cu_seqlens_q 2-D": (varlen(cu_seqlens_q=zeros(3, 1, dtype=INT)), RuntimeError, "cu_seqlens_q", "3, 1"),
    "cu_seqlens_q empty": (varlen(cu_seqlens_q=zeros(0, dtype=INT)), RuntimeError, "cu_seqlens_q", "0"),
    "batch of cu_seqlens": (varlen(cu_seqlens_k=ints(0, 5, 6, 7)), RuntimeError, "cu_seqlens_k", "4"),
    "varlen bias": (varlen(bias=zeros(2, 4, 4, 7)), RuntimeError, "bias", "2, 4, 4, 7"),
    "varlen mask": (varlen(mask=zeros(2, 4, 5, 8, dtype=BOOL)), RuntimeError, "mask", "2, 4, 5, 8"),
}  # fmt: skip

CONTENTS = {
    "cu_seqlens_q decreasing": (varlen(cu_seqlens_q=ints(0, 9, 4)), RuntimeError, "cu_seqlens_q", "4"),
    "cu_seqlens_k decreasing": (varlen(cu_seqlens_k=ints(0, 13, 12)), RuntimeError, "cu_seqlens_k", "13"),
    "cu_seqlens_q beyond the rows": (
        varlen(cu_seqlens_q=ints(0, 4, 10), max_seqlen_q=6),
        RuntimeError,
        "cu_seqlens_q",
        "10",
    ),
    "cu_seqlens_k beyond the rows": (varlen(cu_seqlens_k=ints(0, 7, 13)), RuntimeError, "cu_seqlens_k", "13"),
    "cu_seqlens_q negative": (varlen(cu_seqlens_q=ints(-1, 4, 9)), RuntimeError, "cu_seqlens_q", "-1"),
    "cu_seqlens_q int64 overflow": (
        varlen(cu_seqlens_q=ints(0, 2**32 + 4, 9, dtype=LONG)),
        RuntimeError,
        "cu_seqlens_q",
        "",
    ),
    "seqused_k too long": (dense(seqused_k=ints(7, 8)), RuntimeError, "seqused_k", "8"),
    "seqused_k negative": (dense(seqused_k=ints(-1, 7)), RuntimeError, "seqused_k", "-1"),
    "seqused_q too long": (dense(seqused_q=ints(6, 5)), RuntimeError, "seqused_q", "6"),
    "seqused_k beyond its segment": (varlen(seqused_k=ints(7, 6)), RuntimeError, "seqused_k", "6"),
    "seqused_q beyond its segment": (varlen(seqused_q=ints(5, 5)), RuntimeError, "seqused_q", "5"),
    "leftpad_k beyond seqused_k": (dense(leftpad_k=ints(3, 5), seqused_k=ints(7, 4)), RuntimeError, "leftpad_k", "5"),
    "leftpad_k beyond the columns": (dense(leftpad_k=ints(3, 8)), RuntimeError, "leftpad_k", "8"),
    "leftpad_q beyond seqused_q": (dense(leftpad_q=ints(3, 5), seqused_q=ints(5, 4)), RuntimeError, "leftpad_q", "5"),
    "leftpad_k negative": (dense(leftpad_k=ints(0, -2)), RuntimeError, "leftpad_k", "-2"),
    "max_seqlen_q too small": (varlen(max_seqlen_q=4), (RuntimeError, ValueError), "max_seqlen_q", "4"),
    "max_seqlen_k too small": (varlen(max_seqlen_k=6), (RuntimeError, ValueError), "max_seqlen_k", "6"),
}

OPTIONS = {
    **{
        f"window {w}": (dense(window_size=w), ValueError, "window_size", str(bad))
        for w, bad in (((-2, 0), -2), ((0, -128), -128), ((-128, 0), -128), ((-1, -2), -2))
    },
    "window of one": (dense(window_size=(3,)), (ValueError, TypeError), "window_size", "3"),
    "window of three": (dense(window_size=(1, 2, 3)), (ValueError, TypeError), "window_size", "3"),
    **{f"dropout_p {p}": (dense(dropout_p=p), ValueError, "dropout_p", str(p)) for p in (-0.1, 1.1, 2.0, -1e-9)},
    "dropout_p NaN": (dense(dropout_p=math.nan), ValueError, "dropout_p", "nan"),
    "scale NaN": (dense(softmax_scale=math.nan), ValueError, "softmax_scale", "nan"),
    "scale inf": (dense(softmax_scale=math.inf), ValueError, "softmax_scale", "inf"),
    "softcap negative": (dense(softcap=-1.0), ValueError, "softcap", "-1"),
    "softcap NaN": (dense(softcap=math.nan), ValueError, "softcap", "nan"),
    "softcap inf": (dense(softcap=math.inf), ValueError, "softcap", "inf"),
    "unknown backend": (dense(backend="cudnn"), ValueError, "backend", "cudnn"),
    "varlen window": (varlen(window_size=(-3, 0)), ValueError, "window_size", "-3"),
    "max_seqlen negative": (varlen(max_seqlen_q=-1), ValueError, "max_seqlen_q", "-1"),
}

MISSING = {
    "block table": (varlen(block_table=zeros(2, 1, dtype=INT)), NotImplementedError, "block_table", ""),
    "gradient of slopes": (dense(alibi_slopes=zeros(4).requires_grad_()), NotImplementedError, "alibi_slopes", "bias"),
    "wgmma on the CPU": (dense(backend="wgmma"), NotImplementedError, "wgmma", ""),
    "mma_sync on the CPU": (dense(backend="mma_sync"), NotImplementedError, "mma_sync", ""),
}


def call(arguments: dict):
    arguments = {n: t.clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
                 for n, t in arguments.items()}  # fmt: skip
    return (flash_attn_varlen_func if "cu_seqlens_q" in arguments else flash_attn_func)(**arguments)


def assert_refused(arguments: dict, exception, name: str, value: str) -> None:
    with pytest.raises(exception) as caught:
        call(arguments)
    message = str(caught.value)
    # NotImplementedError is a RuntimeError: exactly the kind that was asked for
    wanted = exception if isinstance(exception, tuple) else (exception,)
    assert caught.type in wanted, f"{caught.type.__name__}: {message}"
    words = message.replace("`", " ").replace("'", " ").replace(",", " ").replace(":", " ").replace("(", " ").split()
    assert any(w == name or w.startswith(name) for w in words) or name in message, message
    assert value in message, f"{value!r} is not in: {message}"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", ("auto", "cpu", "reference"))
def test_shapes_and_dtypes(name, backend):
    arguments, *expected = SHAPES[name]
    assert_refused({**arguments, "backend": backend}, *expected)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_dtypes_on_meta(name):
    """The same exception, with the same words, from tensors that hold nothing."""
    arguments, *expected = SHAPES[name]
    arguments = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    assert_refused(arguments, *expected)


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_contents_of_lengths(name, backend):
    arguments, *expected = CONTENTS[name]
    assert_refused({**arguments, "backend": backend}, *expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    assert_refused(*OPTIONS[name])


@pytest.mark.parametrize("name", MISSING)
def test_what_does_not_exist_yet(name):
    assert_refused(*MISSING[name])


@pytest.mark.parametrize(
    "name", ("k", "v", "mask", "bias", "alibi_slopes", "learnable_sink", "seqused_k", "leftpad_k", "seqused_q",
             "leftpad_q", "dropout_seed"),
)  # fmt: skip
def test_devices(name):
    """One tensor on another device than q."""
    extra = {
        "mask": zeros(5, 7, dtype=BOOL), "bias": zeros(5, 7), "alibi_slopes": zeros(4), "learnable_sink": zeros(4),
        "seqused_k": ints(7, 7), "leftpad_k": ints(0, 0), "seqused_q": ints(5, 5), "leftpad_q": ints(0, 0),
        "dropout_seed": ints(1, 2, dtype=LONG),
    }  # fmt: skip
    arguments = dense(dropout_p=0.1)
    arguments[name] = {**arguments, **extra}[name].to("meta")
    assert_refused(arguments, RuntimeError, name, "meta")


@pytest.mark.parametrize("name", ("cu_seqlens_q", "cu_seqlens_k"))
def test_devices_of_varlen(name):
    arguments = varlen()
    arguments[name] = arguments[name].to("meta")
    assert_refused(arguments, RuntimeError, name, "meta")


def test_packed_shapes():
    for function, arguments in (
        (flash_attn.flash_attn_qkvpacked_func, (zeros(2, 5, 4, 4, 8),)),
        (flash_attn.flash_attn_qkvpacked_func, (zeros(2, 5, 4, 8),)),
        (flash_attn.flash_attn_kvpacked_func, (zeros(2, 5, 4, 8), zeros(2, 5, 3, 4, 8))),
        (flash_attn.flash_attn_kvpacked_func, (zeros(2, 5, 4, 8), zeros(2, 5, 4, 8))),
        (flash_attn.flash_attn_varlen_qkvpacked_func, (zeros(5, 2, 4, 8), ints(0, 5), 5)),
        (flash_attn.flash_attn_varlen_kvpacked_func, (zeros(5, 4, 8), zeros(5, 3, 4, 8), ints(0, 5), ints(0, 5), 5, 5)),
    ):
        with pytest.raises(RuntimeError, match="kv"):
            function(*arguments)


def test_kv_cache_is_not_there_yet():
    with pytest.raises(NotImplementedError):
        flash_attn.flash_attn_with_kvcache(zeros(1, 1, 2, 8), zeros(1, 4, 2, 8), zeros(1, 4, 2, 8))


def test_valid_meta_call_gives_shapes():
    """What is accepted on the CPU is accepted on meta: shapes and dtypes, no values."""
    q, k, v = (
        zeros(2, 5, 4, 8, dtype=HALF).to("meta"),
        zeros(2, 7, 2, 8, dtype=HALF).to("meta"),
        zeros(2, 7, 2, 6, dtype=HALF),
    )
    out, lse = flash_attn_func(q, k, v.to("meta"), causal=True, return_lse=True)
    assert out.shape == (2, 5, 4, 6) and out.dtype == HALF and out.is_meta
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32 and lse.is_meta


@pytest.mark.parametrize("wrong", (
    {"mask": zeros(5, 7)}, {"alibi_slopes": zeros(3)}, {"seqused_k": ints(1)}, {"leftpad_q": zeros(2)},
    {"seqused_k": ints(9, 9)}, {"learnable_sink": zeros(1)}, {"backend": "wgmma"}, {"window_size": (-2, 0)},
), ids=lambda w: next(iter(w)))  # fmt: skip
def test_the_generator_is_untouched_by_an_error(wrong):
    """Errors come before anything is written, the state of the random generator included."""
    state = torch.get_rng_state()
    with pytest.raises((RuntimeError, ValueError)):
        call(dense(dropout_p=0.5, **wrong))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("wrong", ("a string", None, 3, [1, 2]))
def test_what_is_no_tensor(wrong):
    for name in ("q", "k", "v"):
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            flash_attn_func(**dense(**{name: wrong}))


@pytest.mark.parametrize("shapes", (
    ((0, 5, 4, 8), (0, 7, 2, 8)), ((2, 0, 4, 8), (2, 7, 2, 8)), ((2, 5, 4, 8), (2, 0, 2, 8)), ((2, 0, 4, 8), (2, 0,
        2, 8)),
    ((2, 5, 0, 8), (2, 7, 0, 8)), ((0, 0, 2, 0), (0, 0, 2, 0)), ((0, 5, 4, 0), (0, 7, 2, 0)),
), ids=str)  # fmt: skip
def test_zero_sizes_are_legal(shapes):
    """Empty or zero results of the right shape, forward and backward; head dim 0 only where all is empty anyway."""
    q, k, v = zeros(*shapes[0]).requires_grad_(), zeros(*shapes[1]).requires_grad_(), zeros(*shapes[1]).requires_grad_()
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert (out == 0).all() and (shapes[1][1] > 0 or (lse == -math.inf).all())
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(g.shape == t.shape and (g == 0).all() for g, t in zip(grads, (q, k, v), strict=True))


def test_fp64_extras():
    """With fp64 q: fp64 slopes, bias in fp64 or fp32."""
    tensors = {n: t.double() for n, t in dense().items()}
    call({**tensors, "alibi_slopes": zeros(4, dtype=FP64), "bias": zeros(5, 7, dtype=FP64)})
    call({**tensors, "alibi_slopes": zeros(4), "bias": zeros(5, 7)})


@pytest.mark.parametrize(("name", "values"), (
    ("softmax_scale", (math.nan, math.inf, -math.inf)), ("softcap", (-1.0, math.nan, math.inf, 1e31)),
    ("window_left", (-2, -(2**62))), ("window_right", (-2, -(2**62))), ("family", (-1, 3, 2**40)),
    ("dropout_p", (-0.1, 1.1, math.nan)), ("max_seqlen_q", (-1,)), ("max_seqlen_k", (-(2**62),)),
), ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_raw_ops_refuse_what_python_would(name, values):
    """Forward and backward, called past the Python functions."""
    q = torch.randn(1, 4, 2, 8)
    ops, options = torch.ops.flash_attn, {"softmax_scale": 1.0}
    out, _, statistics = ops.attention_forward(q, q, q, None, None, 1.0)
    tensors = (q, q, q)
    if name.startswith("max_seqlen"):
        cu = torch.zeros(2, dtype=torch.int32)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        tensors, out, statistics = (q[0],) * 3, out[0], statistics[:, 0]
    plain = {"causal": False, "window_left": -1, "window_right": -1, "upper_left": False, "softcap": 0.0}
    for value in values:
        bad = {**options, name: value}
        with pytest.raises(RuntimeError, match=f"{name}.* must be"):
            ops.attention_forward(*tensors, None, None, **bad)
        with pytest.raises(RuntimeError, match=f"{name}.* must be"):
            ops.attention_backward(out, None, *tensors, out, statistics, None, None, *(True,) * 3, False, False, **bad)
        if name in plain or name == "softmax_scale":
            with pytest.raises(RuntimeError, match=f"{name}.* must be"):
                ops.attention_forward_plain(*tensors, **{**plain, **bad})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_names_the_way_out():
    with pytest.raises(NotImplementedError, match="reference"):
        call({n: t.cuda() for n, t in dense().items()})


def test_a_served_call_excuses_no_other():
    """Plain calls are remembered (dispatch.plain_call): what looks alike must still be checked."""
    q = torch.randn(1, 4, 2, 8)

    def call(k=q, **options):
        return flash_attn_func(q, k, q, **options)

    plain, capped = call(), call(softcap=1.0)
    for options, error in (
        ({"softcap": True}, ValueError),  # equal to 1.0
        ({"window_size": (-1.0, -1)}, ValueError),  # equal to the default
        ({"window_size": [-2, -1]}, ValueError),
        ({"dropout_p": torch.tensor([0.0, 0.0])}, ValueError),
        ({"dropout_p": False}, ValueError),
        ({"backend": "cuda"}, ValueError),
        ({"k": q.to_sparse()}, RuntimeError),
        ({"k": q.double()}, RuntimeError),
        ({"k": torch.nested.nested_tensor([q[0]])}, RuntimeError),
        ({"k": [1.0]}, TypeError),
    ):
        with pytest.raises(error):
            call(**options)
    assert torch.equal(call(), plain) and torch.equal(call(softcap=1), capped)
    scale = torch.tensor(8**-0.5)
    torch.testing.assert_close(call(softmax_scale=scale), plain)
    scale.zero_()  # the same object, another number
    torch.testing.assert_close(call(softmax_scale=scale), q.mean(1, keepdim=True).expand_as(q))
    with torch.autocast("cpu", torch.bfloat16):
        assert call().dtype == torch.bfloat16
    assert call().dtype == torch.float32
    assert torch.equal(call(backend="cpu"), plain) and call(backend="reference").shape == plain.shape
