"""Graphs that hold attention as an op have its derivatives; derivatives that are asked for late are not lost."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import grad
from torch.func import jacfwd, jvp, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from flash_attn import flash_attn_func, flash_attn_varlen_func, standard_attention

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.flash_attn, "attention_forward"), reason="needs the library")


class Net(torch.nn.Module):
    def __init__(self, attention) -> None:
        super().__init__()
        self.qkv, self.out, self.attention = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8), attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        return x + self.out(self.attention(q, k, v, causal=True).flatten(2))


def inputs(requires_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=requires_grad) for _ in range(3)]


def gradients(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(grad(module(x).sin().sum(), list(module.parameters())))


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_gradients(strict):
    torch.manual_seed(0)
    ours, plain, x = Net(flash_attn_func), Net(standard_attention), torch.randn(2, 6, 8)
    plain.load_state_dict(ours.state_dict())
    program = torch.export.export(ours, (x,), strict=strict).module()
    program.load_state_dict(ours.state_dict())
    named = dict(program.named_parameters())
    got = dict(zip(named, grad(program(x).sin().sum(), list(named.values())), strict=True))
    for name, want in zip(dict(plain.named_parameters()), gradients(plain, x), strict=True):
        torch.testing.assert_close(got[name], want)


def test_traced_graph_keeps_gradients():
    q, k, v = inputs(requires_grad=False)
    traced = torch.jit.trace(flash_attn_func, (q, k, v))
    a, b = inputs()[0], inputs()[0]
    torch.testing.assert_close(grad(traced(a, k, v).sin().sum(), a), grad(standard_attention(b, k, v).sin().sum(), b))


@pytest.mark.parametrize("plain", (False, True))
def test_the_op_itself(plain):
    q, k, v = inputs()

    def op(q, k, v):
        if plain:
            return torch.ops.flash_attn.attention_forward_plain(q, k, v, 0.5, False, -1, -1, False, 0.0)[0]
        return torch.ops.flash_attn.attention_forward(q, k, v, None, None, 0.5)[0]

    torch.testing.assert_close(
        grad(op(q, k, v).sin().sum(), (q, k, v)), grad(standard_attention(q, k, v).sin().sum(), (q, k, v))
    )
    torch.testing.assert_close(
        torch.func.grad(lambda x: op(x, k, v).sin().sum())(q),
        torch.func.grad(lambda x: standard_attention(x, k, v).sin().sum())(q),
    )
    assert torch.autograd.gradgradcheck(op, (q, k, v))
    with fwAD.dual_level():
        dual = fwAD.make_dual(q.detach(), torch.ones_like(q))
        got = fwAD.unpack_dual(op(dual, k.detach(), v.detach())).tangent
        want = fwAD.unpack_dual(standard_attention(dual, k.detach(), v.detach())).tangent
        torch.testing.assert_close(got, want)
    with pytest.raises(NotImplementedError, match="function itself"):
        jvp(lambda x: op(x, k, v), (q,), (q,))


def test_compiled_double_backward_is_true_or_an_error():
    q, k, v = inputs()

    def second(f):
        (g,) = grad(f(q, k, v).sin().sum(), q, create_graph=True)
        return grad(g.pow(2).sum(), q)[0]

    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
    torch.testing.assert_close(second(compiled), second(standard_attention))
    with pytest.raises(RuntimeError, match="double backward"):
        second(torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager"))


OLD = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch before 2.13 cannot compile `reference`"
)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=OLD)])
@pytest.mark.parametrize("which", [(0, 1, 1), (0, 0, 0), (0, 0, 1), (0, 1, 0)])
def test_compiled_call_takes_a_tensor_twice(which, backend):
    tensors = inputs()

    def f(function, *given):
        return function(*(given[i] for i in which))

    used = sorted(set(which))
    compiled = torch.compile(
        lambda *x: f(lambda *y: flash_attn_func(*y, backend=backend), *x), fullgraph=True, backend="aot_eager"
    )
    got = grad(compiled(*tensors).sin().sum(), [tensors[i] for i in used])
    want = grad(f(standard_attention, *tensors).sin().sum(), [tensors[i] for i in used])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("create_graph", [False, True])
def test_dout_becomes_dual_after_the_forward(create_graph):
    q, k, v = inputs()

    def tangents(f):
        out = f(q, k, v)
        with fwAD.dual_level():
            dual = fwAD.make_dual(torch.ones_like(out), out.detach())
            results = grad(out, (q, k, v), dual, create_graph=create_graph)
            return [fwAD.unpack_dual(x).tangent for x in results]

    torch.testing.assert_close(tangents(flash_attn_func), tangents(standard_attention))


def test_jvp_of_a_finished_forward():
    q, k, v = inputs()
    one = torch.ones_like(q).detach()

    def through(f):
        out = f(q, k, v)
        late = jvp(lambda w: grad(out, q, w, retain_graph=True)[0], (one,), (one,))[1]
        jacobian = jacfwd(lambda w: grad(out, q, w, retain_graph=True)[0])(one)
        pulled = jvp(vjp(f, *(x.detach() for x in (q, k, v)))[1], (one,), (one,))[1]
        return late, jacobian, pulled

    torch.testing.assert_close(through(flash_attn_func), through(standard_attention))


def with_lengths(varlen: bool, backend: str, **options: float):
    """A call with lengths, and what it takes."""
    q, lengths = torch.randn(2, 5, 2, 8), torch.tensor([3, 5], dtype=torch.int32)
    if not varlen:
        return lambda q, n: flash_attn_func(q, q * 1, q * 2, seqused_k=n, backend=backend, **options), (q, lengths)
    return (
        lambda q, cu: flash_attn_varlen_func(q, q * 1, q * 2, cu, cu, 5, 5, backend=backend, **options),
        (q.flatten(0, 1), torch.tensor([0, 3, 8], dtype=torch.int32)),
    )


@pytest.mark.parametrize("varlen", (False, True))
def test_the_reference_says_why_it_does_not_trace_lengths(varlen):
    call, inputs = with_lengths(varlen, "reference")
    want = call(*inputs)
    refused = pytest.raises(NotImplementedError, match="reads cu_seqlens, seqused and leftpad on the host")
    with refused:
        call(*(x.to("meta") for x in inputs))
    fake = FakeTensorMode()
    with refused:
        call(*(fake.from_tensor(x) for x in inputs))
    for mode in ("fake", "symbolic"):
        with refused:
            make_fx(call, tracing_mode=mode)(*inputs)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="reads cu_seqlens, seqused and leftpad on the host"):
        torch.compile(call, fullgraph=True, backend="eager")(*inputs)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="eager")(*inputs), want)


@pytest.mark.parametrize("varlen", (False, True))
def test_fake_tensors_with_lengths_and_dropout(varlen):
    """The CPU backend checks lengths before it draws a seed, where there is something to check."""
    call, inputs = with_lengths(varlen, "cpu", dropout_p=0.5)
    with FakeTensorMode() as fake:
        assert call(*(fake.from_tensor(x) for x in inputs)).shape == inputs[0].shape
    assert make_fx(call, tracing_mode="fake")(*inputs)(*inputs).shape == inputs[0].shape
