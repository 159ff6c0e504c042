"""Rows that see nothing, with and without a sink: O = 0, LSE = −inf or the sink, and neither NaN in what they do not
see nor NaN of their own reaches anything."""

from __future__ import annotations

import math

import cases
import pytest
import torch

import flash_attn
from flash_attn import flash_attn_func, standard_attention

ROWS, KEYS, EMPTY = 40, 8, slice(0, 32)  # the first 32 rows see nothing
HIDDEN = ("causal", "window", "mask", "bias", "block_mask")
STANDARD = cases.Target("cpu", "standard_attention")


@pytest.fixture(params=[pytest.param(t, marks=cases.marks(t), id=str(t)) for t in (*cases.TARGETS, STANDARD)])
def target(request: pytest.FixtureRequest) -> cases.Target:
    return request.param


def attention(target: cases.Target, *tensors: torch.Tensor, **options):
    if target == STANDARD:
        return standard_attention(*tensors, **options)
    return flash_attn_func(*tensors, backend=target.backend, **options)


def hide(how: str, dtype: torch.dtype, device: str) -> dict:
    """Options under which the rows of EMPTY see nothing and each other sees a key."""
    visible = torch.ones(ROWS, KEYS, dtype=torch.bool, device=device)
    visible[EMPTY] = False
    if how == "block_mask":
        blocks = torch.tensor([False, True], device=device).view(1, 1, 2, 1)
        return {how: flash_attn.BlockMask(blocks, ROWS, KEYS, (32, 16))}
    return {
        "causal": {"causal": True},
        "window": {"window_size": (0, 0)},
        "mask": {"mask": visible},
        "bias": {"bias": torch.zeros(ROWS, KEYS, dtype=dtype, device=device).masked_fill(~visible, -math.inf)},
    }[how]


def attend(target, options: dict, dtype: torch.dtype, sink: bool, poison: dict[str, tuple]) -> dict[str, torch.Tensor]:
    """out, lse and all gradients of one call; `poison`: indices that become NaN, by tensor."""
    torch.manual_seed(0)
    tensors = {
        "q": torch.randn(1, ROWS, 2, 16), "k": torch.randn(1, KEYS, 2, 16), "v": torch.randn(1, KEYS, 2, 16),
        "dout": torch.randn(1, ROWS, 2, 16),
    }  # fmt: skip
    for name, index in poison.items():
        tensors[name][index] = math.nan
    tensors = {name: x.to(target.device, dtype) for name, x in tensors.items()}
    dout = tensors.pop("dout")
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    if sink:
        leaves["sink"] = torch.tensor([0.5, -40.0], dtype=dtype, device=target.device).requires_grad_()
    if "bias" in options:
        leaves["bias"] = options["bias"] = options["bias"].detach().requires_grad_()
    q, k, v = (leaves[name] for name in "qkv")
    out, lse = attention(target, q, k, v, learnable_sink=leaves.get("sink"), return_lse=True, **options)
    dlse = torch.linspace(-1, 1, lse.numel(), device=lse.device, dtype=lse.dtype).view(lse.shape)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    return {"out": out, "lse": lse, **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def assert_empty(got: dict[str, torch.Tensor], sink: bool) -> None:
    want = [0.5, -40.0] if sink else [-math.inf] * 2
    for head in range(2):
        assert (got["lse"][:, head, EMPTY] == want[head]).all()
    assert (got["out"][:, EMPTY] == 0).all() and (got["dq"][:, EMPTY] == 0).all()
    assert "dbias" not in got or (got["dbias"][EMPTY] == 0).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=("fp32", "bf16", "fp64"))
@pytest.mark.parametrize("sink", (False, True), ids=("no_sink", "sink"))
@pytest.mark.parametrize("how", HIDDEN)
def test_nan_of_rows_that_see_nothing(target, how, sink, dtype):
    """NaN in such a row's q and dout changes no number of anything."""
    options = hide(how, dtype, target.device)
    clean = attend(target, options, dtype, sink, {})
    assert_empty(clean, sink)
    for name in ("q", "dout"):
        poisoned = attend(target, options, dtype, sink, {name: (0, EMPTY)})
        assert all(torch.equal(poisoned[x], clean[x]) for x in clean), name


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=("fp32", "bf16", "fp64"))
@pytest.mark.parametrize("sink", (False, True), ids=("no_sink", "sink"))
@pytest.mark.parametrize("how", HIDDEN)
def test_nan_in_keys_that_other_rows_see(target, how, sink, dtype):
    """NaN in k or v of a key in the same tile does not reach rows that see nothing."""
    options = hide(how, dtype, target.device)
    for name in "kv":
        assert_empty(attend(target, options, dtype, sink, {name: (0, KEYS - 1)}), sink)


@pytest.mark.parametrize("name", "kv")
def test_nan_where_no_row_sees_anything(target, name):
    """A mask that hides everything: the sink alone has a gradient, that of LSE."""
    mask = torch.zeros(ROWS, KEYS, dtype=torch.bool, device=target.device)
    got = attend(target, {"mask": mask}, torch.float32, True, {name: (0, 3)})
    for zero in ("out", "dq", "dk", "dv"):
        assert (got[zero] == 0).all(), zero
    dlse = torch.linspace(-1, 1, 2 * ROWS, device=target.device).view(2, ROWS)
    torch.testing.assert_close(got["dsink"], dlse.sum(1))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("rows", (1, 15, 33))
@pytest.mark.parametrize("how", ("bias", "mask", "block_mask"))
def test_nan_in_a_key_that_every_row_hides(target, how, rows, dtype):
    """It gets zero gradients, and the other keys those of a call without it, also where rows fill no whole panel."""
    torch.manual_seed(0)
    shapes = [(1, rows, 2, 16), (1, KEYS, 2, 16), (1, KEYS, 2, 16), (1, rows, 2, 16)]
    q, k, v, dout = (torch.randn(shape).to(target.device, dtype) for shape in shapes)
    visible = torch.ones(rows, KEYS, dtype=torch.bool, device=target.device)
    visible[:, 0] = False
    options = {
        "bias": {"bias": torch.zeros(rows, KEYS, dtype=dtype, device=target.device).masked_fill(~visible, -math.inf)},
        "mask": {"mask": visible},
        "block_mask": {"block_mask": flash_attn.BlockMask.from_dense(visible, (16, 16))},
    }[how]
    grads = []
    for hidden in (0.0, math.nan, math.inf):
        k[:, 0] = hidden
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(target, *leaves, **options)
        grads.append(torch.autograd.grad(out, leaves, dout)[1:])
    for other in grads[1:]:
        assert all((x[:, 0] == 0).all() for x in other)
        assert all(torch.equal(x, y) for x, y in zip(other, grads[0], strict=True))


@pytest.mark.parametrize("sink", (False, True), ids=("no_sink", "sink"))
@pytest.mark.parametrize("name", "qk")
def test_second_derivatives_of_rows_that_see_nothing(target, name, sink):
    """Zero, and NaN of such a row's q reaches nothing; nor does NaN of keys reach such a row."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, 1, 4, device=target.device) for n in (2, 1, 1, 2))  # causal: row 0 sees nothing
    {"q": q, "k": k}[name][:, 0] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v, dout)]
    options = {"learnable_sink": torch.zeros(1, device=target.device)} if sink else {}
    out = attention(target, q, k, v, causal=True, **options)
    first = torch.autograd.grad(out, leaves[:3], dout, create_graph=True)
    second = torch.autograd.grad(first[:2], leaves, [torch.ones_like(x) for x in first[:2]])
    assert (second[0][:, 0] == 0).all() and (second[3][:, 0] == 0).all()
    assert name == "k" or not any(x.isnan().any() for x in second)


def test_plain_forward_under_forward_mode(target):
    """The path of nested derivatives has the same output."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 16, device=target.device) for n in (ROWS, KEYS, KEYS))
    v[0, KEYS - 1] = math.nan
    sink = torch.zeros(2, device=target.device)

    def attend_to_keys(q):
        return attention(target, q, k, v, causal=True, learnable_sink=sink)

    nested, _ = torch.func.jvp(lambda q: torch.func.jvp(attend_to_keys, (q,), (q,))[0], (q,), (q,))
    assert (nested[:, EMPTY] == 0).all() and nested[:, -1].isnan().all()


SUBNORMAL = ((1e-46, torch.float32), (1e-40, torch.float32), (1e-310, torch.float64))


@pytest.mark.parametrize(("softcap", "dtype"), SUBNORMAL)
def test_softcap_below_the_smallest_normal_number(softcap, dtype):
    """All logits are 0 beside 1: the mean of the values, and nothing to learn for q where logits are equal."""
    q, k, v = (torch.full((1, 2, 1, 4), x, dtype=dtype, requires_grad=True) for x in (0.0, 0.0, 1.0))
    out = flash_attn_func(q, k, v, softcap=softcap, backend="reference")
    out.sum().backward()
    assert (out == 1).all() and (q.grad == 0).all() and (k.grad == 0).all() and (v.grad == 1).all()


@pytest.mark.parametrize("value", (math.inf, math.nan))
def test_a_sink_that_is_no_number(target, value):
    """Softmax with that logit as one more column: NaN in all rows that see a key. The others have O = 0, LSE = sink,
    zero gradients, and a head with another sink is not touched."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 16, dtype=torch.float64) for n in (ROWS, KEYS, KEYS))
    sink = torch.tensor([value, 0.5], dtype=torch.float64)
    visible = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(KEYS - ROWS)

    given = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    s = torch.einsum("bihd,bjhd->bhij", *given[:2]) / 4
    s = s.masked_fill(~visible, -math.inf)
    column = given[3].view(1, 2, 1, 1).expand(1, 2, ROWS, 1)
    want = torch.einsum("bhij,bjhd->bihd", torch.softmax(torch.cat((s, column), -1), -1)[..., :-1], given[2])
    assert want[:, EMPTY.stop :, 0].isnan().all()
    want = want[:, EMPTY.stop :, 1]  # the head that can be compared
    want_grads = torch.autograd.grad(want.sum(), given)

    leaves = [x.to(target.device, torch.float32).requires_grad_() for x in (q, k, v, sink)]
    out, lse = attention(target, *leaves[:3], causal=True, learnable_sink=leaves[3], return_lse=True)
    dq, dk, dv, dsink = torch.autograd.grad(out.sum(), leaves)
    assert (out[:, EMPTY] == 0).all() and (dq[:, EMPTY] == 0).all()
    torch.testing.assert_close(lse[0, :, EMPTY].cpu().double(), sink[:, None].expand(2, EMPTY.stop), equal_nan=True)
    assert out[:, EMPTY.stop :, 0].isnan().all() and lse[0, 0, EMPTY.stop :].isnan().all() and dsink[0].isnan()
    assert all(x[:, -KEYS:, 0].isnan().all() for x in (dq, dk, dv))
    torch.testing.assert_close(out[:, EMPTY.stop :, 1].cpu().double(), want, rtol=1e-5, atol=1e-5)
    for got, expected in zip((dq, dk, dv), want_grads[:3], strict=True):
        torch.testing.assert_close(got[:, :, 1].cpu().double(), expected[:, :, 1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dsink[1].cpu().double(), want_grads[3][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", (math.inf, math.nan))
def test_a_sink_that_is_no_number_where_no_row_sees_anything(target, value):
    """LSE is the sink, so its gradient is that of LSE; nothing else has one."""
    q, k, v = (torch.randn(1, n, 1, 16, device=target.device).requires_grad_() for n in (ROWS, KEYS, KEYS))
    sink = torch.tensor([value], device=target.device, requires_grad=True)
    mask = torch.zeros(ROWS, KEYS, dtype=torch.bool, device=target.device)
    out, lse = attention(target, q, k, v, mask=mask, learnable_sink=sink, return_lse=True)
    assert (out == 0).all() and (lse.isnan() if math.isnan(value) else lse == value).all()
    *others, dsink = torch.autograd.grad((out, lse), (q, k, v, sink), (torch.ones_like(out), torch.ones_like(lse)))
    assert all((x == 0).all() for x in others) and dsink.item() == ROWS
