"""Rows that see nothing, with and without a sink: O = 0, LSE = −inf or the sink, and neither NaN in what they do not
see nor NaN of their own reaches anything."""

from __future__ import annotations

import math

import pytest
import torch

import flash_attn
from flash_attn import flash_attn_func

ROWS, KEYS, EMPTY = 40, 8, slice(0, 32)  # the first 32 rows see nothing
HIDDEN = ("causal", "window", "mask", "bias", "block_mask")


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
    out, lse = flash_attn_func(
        q, k, v, learnable_sink=leaves.get("sink"), return_lse=True, backend=target.backend, **options
    )
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


def test_plain_forward_under_forward_mode(target):
    """The path of nested derivatives has the same output."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 16, device=target.device) for n in (ROWS, KEYS, KEYS))
    v[0, KEYS - 1] = math.nan
    sink = torch.zeros(2, device=target.device)

    def attention(q):
        return flash_attn_func(q, k, v, causal=True, learnable_sink=sink, backend=target.backend)

    nested, _ = torch.func.jvp(lambda q: torch.func.jvp(attention, (q,), (q,))[0], (q,), (q,))
    assert (nested[:, EMPTY] == 0).all() and nested[:, -1].isnan().all()
