"""What works where in PyTorch: a table of features and ways to run them. Every entry is a test, and docs/pytorch.md
shows the table.

An entry is "yes", or "no" with a reason; what does not work must raise an error, never give other values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_attn import (
    BlockMask,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.modules.mha import MHA, FlashSelfAttention

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "pytorch.md"
B, Q, K = (torch.export.Dim(n, min=2, max=512) for n in ("batch", "seqlen_q", "seqlen_k"))
DENSE = ({0: B, 1: Q}, {0: B, 1: K}, {0: B, 1: K})
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DENSE_SHAPES = ((2, 5, 4, 4), (2, 7, 2, 4), (2, 7, 2, 6))


@dataclass(frozen=True)
class Feature:
    """A call: `function(*differentiable, *constants, backend=...)` of tensors alone."""

    function: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]  # of the differentiable inputs
    sizes: tuple[dict | None, ...]  # dynamic sizes of all inputs, for export
    constants: Callable[[], list[Tensor]] = field(default=list)
    random: bool = False

    def inputs(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
        g = torch.Generator().manual_seed(1)
        made = [torch.randn(s, generator=g, dtype=torch.float64).to(device, dtype) for s in self.shapes]
        return made, [x.to(device) for x in self.constants()]


def _cu() -> list[Tensor]:
    return [torch.tensor(t, dtype=torch.int32) for t in ([0, 2, 5, 8], [0, 3, 7, 9])]


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, backend: str = "auto") -> Tensor:
    return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 4, causal=True, backend=backend)


def _packed(qkv: Tensor, kv: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    out = flash_attn_qkvpacked_func(qkv, causal=True, backend=backend)
    return out, flash_attn_kvpacked_func(qkv[:, :, 0], kv, window_size=(3, 1), backend=backend)


def _packed_varlen(qkv: Tensor, kv: Tensor, cu_q: Tensor, cu_k: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    out = flash_attn_varlen_qkvpacked_func(qkv, cu_q, 3, causal=True, backend=backend)
    return out, flash_attn_varlen_kvpacked_func(qkv[:, 0], kv, cu_q, cu_k, 3, 4, backend=backend)


def _scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, slopes: Tensor, backend: str = "auto"):
    options = {"mask": mask, "alibi_slopes": slopes, "softcap": 3.0, "window_size": (4, 3), "backend": backend}
    return flash_attn_func(q, k, v, bias=bias, **options)


def _blocks(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, elements: Tensor, backend: str = "auto") -> Tensor:
    """The mask is made inside: of tensors that are inputs."""
    mask = BlockMask(blocks, q.shape[1], k.shape[1], (16, 32), element_mask=elements)
    return flash_attn_func(q, k, v, block_mask=mask, causal=True, backend=backend)


def _dropout(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
    return flash_attn_func(q, k, v, dropout_p=0.4, backend=backend)


def _sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, backend: str = "auto") -> Tensor:
    return flash_attn_func(q, k, v, learnable_sink=sink, backend=backend)


def _lengths(q: Tensor, k: Tensor, v: Tensor, used: Tensor, pad: Tensor, backend: str = "auto") -> Tensor:
    return flash_attn_func(q, k, v, seqused_k=used, leftpad_k=pad, causal=True, backend=backend)


def _lengths_dropout(q: Tensor, k: Tensor, v: Tensor, used: Tensor, backend: str = "auto") -> Tensor:
    return flash_attn_func(q, k, v, seqused_k=used, dropout_p=0.4, backend=backend)


def _lse(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    return flash_attn_func(q, k, v, return_lse=True, backend=backend)


def _penalty(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, backend=backend).square().sum()

    return sum(g.square().sum() for g in torch.func.grad(loss, (0, 1, 2))(q, k, v))


def _self_attention(qkv: Tensor, mask: Tensor) -> Tensor:
    return FlashSelfAttention(causal=True)(qkv, key_padding_mask=mask)


_MHA: dict[torch.dtype, MHA] = {}


def _mha(x: Tensor) -> Tensor:
    return mha(x.dtype)(x)


def mha(dtype: torch.dtype) -> MHA:
    """A module with rotary embedding, made once per dtype."""
    if dtype not in _MHA:
        state = torch.get_rng_state()
        torch.manual_seed(7)
        _MHA[dtype] = MHA(16, 4, num_heads_kv=2, rotary_emb_dim=2, causal=True, dtype=dtype)
        torch.set_rng_state(state)
    return _MHA[dtype]


mha(torch.float64)  # here, because inside a vmap its weights could not be drawn


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rotary_emb(x, cos, sin)


FEATURES = {
    "dense": Feature(lambda q, k, v, backend="auto": flash_attn_func(q, k, v, causal=True, backend=backend),
                     ((2, 5, 2, 4), (2, 7, 2, 4), (2, 7, 2, 4)), DENSE),
    "grouped heads, wide values": Feature(lambda q, k, v, backend="auto": flash_attn_func(q, k, v, backend=backend),
                                          DENSE_SHAPES, DENSE),
    "varlen": Feature(_varlen, ((9, 4, 4), (10, 2, 4), (10, 2, 4)), ({0: Q}, {0: K}, {0: K}, {0: B}, {0: B}), _cu),
    "packed": Feature(_packed, ((2, 5, 3, 2, 4), (2, 7, 2, 2, 4)), ({0: B, 1: Q}, {0: B, 1: K})),
    "packed varlen": Feature(_packed_varlen, ((9, 3, 2, 4), (10, 2, 2, 4)), ({0: Q}, {0: K}, {0: B}, {0: B}), _cu),
    "bias, mask, alibi, softcap, window": Feature(
        _scores, (*DENSE_SHAPES, (2, 1, 5, 7)), (*DENSE, {0: B, 2: Q, 3: K}, {0: Q, 1: K}, None),
        lambda: [torch.arange(35).view(5, 7) % 3 > 0, torch.tensor([0.1, 0.2, 0.3, 0.4])]),
    "block mask": Feature(
        _blocks, ((2, 20, 4, 4), (2, 35, 2, 4), (2, 35, 2, 6)), (*[{0: B}] * 3, None, None),
        lambda: [torch.tensor([[True, False], [True, True]]).expand(4, 2, 2), torch.arange(700).view(20, 35) % 5 > 0]),
    "sink": Feature(_sink, (*DENSE_SHAPES, (4,)), (*DENSE, None)),
    "lengths": Feature(_lengths, DENSE_SHAPES, (*DENSE, {0: B}, {0: B}),
                       lambda: [torch.tensor([7, 3]), torch.tensor([1, 0])]),
    "dropout": Feature(_dropout, DENSE_SHAPES, DENSE, random=True),
    "dropout and lengths": Feature(_lengths_dropout, DENSE_SHAPES, (*DENSE, {0: B}), lambda: [torch.tensor([7, 3])],
                                   random=True),
    "return_lse": Feature(_lse, DENSE_SHAPES, DENSE),
    "double backward": Feature(_penalty, ((2, 3, 2, 2), (2, 4, 2, 2), (2, 4, 2, 2)), DENSE),
    "FlashSelfAttention": Feature(_self_attention, ((2, 5, 3, 2, 4),), ({0: B, 1: Q}, {0: B, 1: Q}),
                                  lambda: [torch.arange(10).view(2, 5) % 4 > 0]),
    "MHA": Feature(_mha, ((2, 5, 16),), ({0: B, 1: Q},)),
    "apply_rotary_emb": Feature(_rotary, ((2, 5, 3, 8), (512, 2), (512, 2)), ({0: B, 1: Q}, None, None)),
}  # fmt: skip


def run(feature: Feature, inputs: list[Tensor], wrap: Callable | None = None) -> list[Tensor]:
    """Outputs and gradients from one state of the generator; `wrap` turns the function into another."""
    differentiable, constants = inputs
    leaves = [x.detach().requires_grad_() for x in differentiable]
    torch.manual_seed(3)
    outputs = as_tuple((wrap or (lambda f: f))(feature.function)(*leaves, *constants))
    grads = torch.autograd.grad(sum(x.double().square().sum() for x in outputs), leaves)
    return [*(x.detach() for x in outputs), *grads]


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def scalar(feature: Feature, constants: list[Tensor]) -> Callable[..., Tensor]:
    def loss(*x: Tensor) -> Tensor:
        return sum(y.square().sum() for y in as_tuple(feature.function(*x, *constants)))

    return loss


def same(got: list[Tensor], want: list[Tensor], strides: bool = False, **tolerance: float) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, check_stride=strides, **tolerance)


# ---- The columns ----------------------------------------------------------------------------------------------------


def eager(f: Feature) -> None:
    first, again = run(f, f.inputs()), run(f, f.inputs())
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, again, strict=True))


def _without_graph(f: Feature, mode: Callable) -> None:
    differentiable, constants = f.inputs()
    want = run(f, (differentiable, constants))
    leaves = [x.clone().requires_grad_() for x in differentiable]
    saved: list[Tensor] = []
    torch.manual_seed(3)
    with mode():
        if f.function is _penalty:  # it differentiates by itself, and torch.func takes no hooks
            outputs = as_tuple(f.function(*leaves, *constants))
        else:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                outputs = as_tuple(f.function(*leaves, *constants))
    assert not saved and not any(y.requires_grad for y in outputs)
    same(list(outputs), want[: len(outputs)])
    held = [weakref.ref(x) for x in leaves]
    del leaves
    assert f.function is _rotary or all(r() is None for r in held), "an input outlives the call"


def no_grad(f: Feature) -> None:
    _without_graph(f, torch.no_grad)


def inference_mode(f: Feature) -> None:
    if f.function is _penalty and torch.__version__ < (2, 13):
        # torch.func.grad of anything that saves a tensor is refused there: a limit of older torch.
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            _without_graph(f, torch.inference_mode)
        return
    _without_graph(f, torch.inference_mode)


def _compile(f: Feature, dynamic: bool, backend: str = "aot_eager", **tolerance: float) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(f.function, fullgraph=True, dynamic=dynamic, backend=backend)
    strides = f.function is not _mha  # those of matrix products are torch's affair
    want = run(f, f.inputs())  # before: it makes the module of `mha`
    same(run(f, f.inputs(), lambda _: compiled), want, strides, **tolerance)


class Called(torch.nn.Module):
    """What torch.export takes: a module."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function
        self.inner = mha(torch.float64) if function is _mha else None  # its weights must belong to the module

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(*inputs)


def _export(f: Feature, sizes: tuple | None) -> None:
    differentiable, constants = f.inputs()
    everything = (*differentiable, *constants)
    if f.function is _mha:  # tables that are there already limit the length
        mha(torch.float64).rotary_emb.reset_parameters()
    program = torch.export.export(Called(f.function), everything, dynamic_shapes=sizes)
    batches = [everything]
    if sizes is not None:  # other sizes: each dynamic axis three times as long
        grown = []
        for x, axes in zip(everything, sizes[0], strict=True):
            varlen_offsets = x.dtype == torch.int32
            for axis in axes or ():
                tail = (
                    [x[-1:] + x[1:] if n == 0 else x[-1:] * 2 + x[1:] for n in range(2)] if varlen_offsets else [x, x]
                )
                x = torch.cat([x, *tail], axis)
            grown.append(x)
        batches.append(tuple(grown))
    for batch in batches:
        torch.manual_seed(3)
        want = as_tuple(f.function(*batch))
        torch.manual_seed(3)
        same(list(as_tuple(program.module()(*batch))), list(want))


def func_grad(f: Feature) -> None:
    differentiable, constants = f.inputs()
    torch.manual_seed(3)
    got = torch.func.grad(scalar(f, constants), tuple(range(len(differentiable))))(*differentiable)
    same(list(got), run(f, (differentiable, constants))[-len(got) :])


def func_vmap(f: Feature) -> None:
    """Three examples at once, outputs and per-example gradients: those of a loop."""
    differentiable, constants = f.inputs()
    stacked = [torch.stack([x, x.cos(), x - 0.5]) for x in differentiable]
    dims = (*(0 for _ in stacked), *(None for _ in constants))
    randomness = "same" if f.random else "error"
    torch.manual_seed(3)
    outputs = torch.vmap(f.function, dims, randomness=randomness)(*stacked, *constants)
    torch.manual_seed(3)
    grads = torch.vmap(torch.func.grad(scalar(f, constants), tuple(range(len(stacked)))), randomness=randomness)(
        *stacked
    )
    for n in range(3):
        same([x[n] for x in (*as_tuple(outputs), *grads)], run(f, ([x[n] for x in stacked], constants)))


def func_jacrev(f: Feature) -> None:
    """Rows of the Jacobian, contracted with ones: the gradient of the sum; and a few elements by reverse mode."""
    differentiable, constants = f.inputs()

    def first(x: Tensor) -> Tensor:
        return as_tuple(f.function(x, *differentiable[1:], *constants))[0]

    torch.manual_seed(3)
    jacobian = torch.func.jacrev(first, **({} if not f.random else {"chunk_size": 1}))(differentiable[0])
    leaf = differentiable[0].clone().requires_grad_()
    torch.manual_seed(3)
    y = first(leaf)
    rows = jacobian.reshape(y.numel(), *leaf.shape)
    for n in (0, y.numel() // 2, y.numel() - 1):
        (want,) = torch.autograd.grad(y.reshape(-1)[n], leaf, retain_graph=True)
        torch.testing.assert_close(rows[n], want)
    (want,) = torch.autograd.grad(y.sum(), leaf)
    torch.testing.assert_close(rows.sum(0), want)


def func_jvp(f: Feature) -> None:
    """⟨w, J t⟩ = ⟨Jᵀ w, t⟩ in all inputs at once."""
    differentiable, constants = f.inputs()
    tangents = [x.cos() for x in differentiable]
    torch.manual_seed(3)
    values, got = torch.func.jvp(
        lambda *x: as_tuple(f.function(*x, *constants)), tuple(differentiable), tuple(tangents)
    )
    leaves = [x.clone().requires_grad_() for x in differentiable]
    torch.manual_seed(3)
    outputs = as_tuple(f.function(*leaves, *constants))
    same(list(values), [y.detach() for y in outputs])
    weights = [torch.randn_like(y) for y in outputs]
    grads = torch.autograd.grad(outputs, leaves, weights)
    forward = sum((w * t).sum() for w, t in zip(weights, got, strict=True))
    torch.testing.assert_close(forward, sum((g * t).sum() for g, t in zip(grads, tangents, strict=True)))


def _compiled(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> None:
    """The values of the eager call."""
    torch.manual_seed(3)
    want = function(*inputs)
    torch._dynamo.reset()
    torch.manual_seed(3)
    same(list(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)), list(want))


def compiled_grad(f: Feature) -> None:
    differentiable, constants = f.inputs()
    _compiled(torch.func.grad(scalar(f, constants), tuple(range(len(differentiable)))), differentiable)


def compiled_jvp(f: Feature) -> None:
    differentiable, constants = f.inputs()

    def tangents(*x: Tensor) -> tuple[Tensor, ...]:
        return torch.func.jvp(lambda *x: as_tuple(f.function(*x, *constants)), x, tuple(t.cos() for t in x))[1]

    _compiled(tangents, differentiable)


def _checkpoint(f: Feature, reentrant: bool) -> None:
    def wrap(function: Callable) -> Callable:
        return lambda *x: checkpoint(function, *x, use_reentrant=reentrant)

    if not reentrant:
        same(run(f, f.inputs(), wrap), run(f, f.inputs()))
        return
    differentiable, constants = f.inputs()  # reentrant checkpoints take .backward() only
    leaves = [x.clone().requires_grad_() for x in differentiable]
    torch.manual_seed(3)
    outputs = as_tuple(wrap(f.function)(*leaves, *constants))
    sum(x.square().sum() for x in outputs).backward()
    same([*(x.detach() for x in outputs), *(x.grad for x in leaves)], run(f, (differentiable, constants)))


def autocast(f: Feature) -> None:
    """fp32 inputs under autocast(bf16): near the fp32 values, in bf16 where attention is what gives the output."""
    inputs = f.inputs(torch.float32)
    want = run(f, inputs)

    def wrap(function: Callable) -> Callable:
        def casting(*x: Tensor) -> Tensor | tuple[Tensor, ...]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(*x)

        return casting

    got = run(f, inputs, wrap)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.float(), w, rtol=0.1, atol=0.05 * float(w.abs().max()))
    if f.function not in (_penalty, _rotary):
        assert got[0].dtype == torch.bfloat16
    count = len(f.shapes)
    assert all(g.dtype == torch.float32 for g in got[-count:]), "gradients have the dtypes of the inputs"


def cuda_graph(f: Feature) -> None:
    """Forward and backward captured, replayed on other values: the values of eager calls."""
    options = {} if f.function in (_self_attention, _mha, _rotary) else {"backend": "reference"}
    differentiable, constants = f.inputs(torch.float32, "cuda")
    leaves = [x.clone().requires_grad_() for x in differentiable]

    def step() -> list[Tensor]:
        outputs = as_tuple(f.function(*leaves, *constants, **options))
        return [*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves:
            x.copy_(x.cos())
    graph.replay()
    got = [x.detach().clone() for x in captured]
    if not f.random:
        same(got, [x.detach() for x in step()], rtol=1e-4, atol=1e-5)
        return
    graph.replay()
    assert not torch.equal(got[0], captured[0]), "replays must draw new masks"


COLUMNS = {
    "eager": eager,
    "no_grad": no_grad,
    "inference_mode": inference_mode,
    "compile": lambda f: _compile(f, False),
    "compile, dynamic": lambda f: _compile(f, True),
    "export": lambda f: _export(f, None),
    "export, dynamic": lambda f: _export(f, (f.sizes,)),
    "func.grad": func_grad,
    "func.vmap": func_vmap,
    "func.jacrev": func_jacrev,
    "func.jvp": func_jvp,
    "compiled func.grad": compiled_grad,
    "compiled func.jvp": compiled_jvp,
    "checkpoint": lambda f: _checkpoint(f, False),
    "checkpoint, reentrant": lambda f: _checkpoint(f, True),
    "autocast": autocast,
    "CUDA graph": cuda_graph,
}

ATTENTION = [n for n in FEATURES if n != "apply_rotary_emb"]
NO: dict[tuple[str, str], str] = {
    **{(n, c): "torch.compile refuses a torch.func transform inside a full graph: transform a compiled function"
       for n in ATTENTION for c in ("compiled func.grad", "compiled func.jvp")},
    **{("double backward", c): "torch.compile and torch.export do not trace double backward"
       for c in ("compile", "compile, dynamic", "export", "export, dynamic")},
    ("double backward", "checkpoint"):
        "torch.func refuses the hooks of checkpoints; torch.autograd.grad(create_graph=True) of a checkpoint works",
    **{(n, "CUDA graph"): "the reference backend reads lengths on the host"
       for n in ("varlen", "packed varlen", "lengths", "dropout and lengths")},
    **{(n, "CUDA graph"): "modules choose GPU kernels, which have no fp32" for n in ("FlashSelfAttention", "MHA")},
}  # fmt: skip


def marks(column: str, feature: str) -> list:
    """Compiling takes a second or more: a part of that is for `make test-full`."""
    slow = {"compile, dynamic": [f for f in FEATURES if f.split(",")[0] not in
                                  ("dense", "varlen", "bias", "lengths", "dropout")],
            "compiled func.grad": [f for f in ATTENTION if f not in ("dense", "varlen")],
            "compiled func.jvp": [f for f in ATTENTION if f not in ("dense", "varlen")]}  # fmt: skip
    if column == "CUDA graph":
        return [pytest.mark.gpu, NEEDS_CUDA]
    return [pytest.mark.full] if feature in slow.get(column, ()) else []


@pytest.mark.parametrize(
    ("column", "feature"), [pytest.param(c, f, marks=marks(c, f), id=f"{c}-{f}") for c in COLUMNS for f in FEATURES]
)
def test_table(column: str, feature: str):
    """ "yes": as eager. "no": an error of some kind, and not other values."""
    if (feature, column) not in NO:
        COLUMNS[column](FEATURES[feature])
        return
    with pytest.raises(Exception) as error:  # noqa: B017 (torch's own differ)
        COLUMNS[column](FEATURES[feature])
    assert not isinstance(error.value, AssertionError) or "mode" in str(error.value), f"other values: {error.value}"


def table() -> str:
    """The table and its reasons as docs/pytorch.md shows them."""
    reasons = list(dict.fromkeys(NO.values()))
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for feature in FEATURES:
        cells = [f"no ({reasons.index(NO[feature, c]) + 1})" if (feature, c) in NO else "yes" for c in COLUMNS]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{n}. {reason}." for n, reason in enumerate(reasons, 1))])


def test_document_shows_the_table():
    assert set(NO) <= {(f, c) for f in FEATURES for c in COLUMNS}
    assert table() in DOCUMENT.read_text(), f"docs/pytorch.md must contain:\n\n{table()}"
