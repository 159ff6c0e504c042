"""flash_attn.layers.rotary against complex arithmetic in fp64, and its gradients in place and not."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from flash_attn.layers import rotary
from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def tables(rows: int, half: int) -> tuple[Tensor, Tensor]:
    """cos and sin (rows, half) in fp64, of angles that are no powers of a base."""
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * (0.1 + 0.37 * torch.arange(half))
    return angle.cos(), angle.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor) -> Tensor:
    """x (rows, heads, dim) with row n turned by table row positions[n], by complex multiplication in fp64."""
    half = cos.shape[1]
    x = x.double().clone()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    z = torch.complex(x[..., first], x[..., second]) * torch.complex(cos, sin).to(torch.complex128)[positions][:, None]
    x[..., first], x[..., second] = z.real, z.imag
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("half", [0, 3, 8])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dense(interleaved: bool, inplace: bool, half: int, dtype: torch.dtype) -> None:
    cos, sin = tables(20, half)
    for offsets in (0, 4, torch.tensor([0, 13], dtype=torch.int32), torch.tensor([7, 2])):
        x = torch.randn(2, 7, 3, 16).to(dtype)
        starts = offsets.tolist() if isinstance(offsets, Tensor) else [offsets] * 2
        rows = zip(x, starts, strict=True)
        expected = torch.stack([turned(row, cos, sin, interleaved, torch.arange(7) + start) for row, start in rows])
        before = x.clone()
        result = apply_rotary_emb(x, cos, sin, interleaved, inplace, offsets)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=8 * TOLERANCE[dtype])
        if inplace:
            assert result is x
        else:
            assert torch.equal(x, before)
        assert torch.equal(result[..., 2 * half :], before[..., 2 * half :])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 5, torch.tensor([3, 0, 9])], ids=["none", "int", "tensor"])
def test_varlen_is_each_sequence_alone(inplace: bool, offsets: int | Tensor) -> None:
    cos, sin = tables(16, 4)
    cu_seqlens = torch.tensor([1, 5, 5, 12], dtype=torch.int32)
    x = torch.randn(14, 2, 10, dtype=torch.float64)
    expected = x.clone()
    for b, (start, stop) in enumerate(zip([1, 5, 5], [5, 5, 12], strict=True)):
        offset = int(offsets[b]) if isinstance(offsets, Tensor) else offsets
        expected[start:stop] = apply_rotary_emb(x[None, start:stop], cos, sin, seqlen_offsets=offset)[0]
    where = dict(cu_seqlens=cu_seqlens, max_seqlen=7)
    result = apply_rotary_emb(x, cos, sin, inplace=inplace, seqlen_offsets=offsets, **where)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-14)
    assert torch.equal(result[[0, 12, 13]], expected[[0, 12, 13]])  # rows of no sequence


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_half_and_the_plain_formula(interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    cos, sin = tables(5, 4)
    wide = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)]
    expected = x * wide[0][:, None] + rotate_half(x, interleaved) * wide[1][:, None]
    torch.testing.assert_close(apply_rotary_emb_torch(x, cos, sin, interleaved), expected)
    torch.testing.assert_close(apply_rotary_emb(x, cos, sin, interleaved), expected)
    by_batch = [torch.stack((t, t)) for t in (cos, sin)]
    torch.testing.assert_close(apply_rotary_emb_torch(x, *by_batch, interleaved), expected)
    assert rotary.apply_rotary_emb_func is apply_rotary_emb


def test_inverse_is_the_opposite_angle() -> None:
    cos, sin = tables(6, 4)
    x = torch.randn(1, 6, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(apply_rotary_emb(apply_rotary_emb(x, cos, sin), cos, -sin), x)


@pytest.mark.parametrize("layout", ["qkv", "heads", "kv"])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("k_tables", [False, True])
def test_packed_layouts(layout: str, varlen: bool, k_tables: bool) -> None:
    cos, sin = tables(9, 3)
    cos_k, sin_k = (2 * cos, 3 * sin) if k_tables else (cos, sin)
    shape = {"qkv": (3, 4), "heads": (4 + 2 * 2,), "kv": (2, 2)}[layout]
    x = torch.randn(*((11,) if varlen else (2, 6)), *shape, 8, dtype=torch.float64)
    where = dict(cu_seqlens=torch.tensor([0, 4, 11]), max_seqlen=7) if varlen else {}
    expected = x.clone()
    if layout == "qkv":
        q, k = expected.unbind(-3)[:2]
        result = apply_rotary_emb_qkv_(x, cos, sin, *((cos_k, sin_k) if k_tables else ()), seqlen_offsets=2, **where)
    elif layout == "heads":
        q, k = expected[..., :4, :], expected[..., 4:6, :]
        extra = dict(cos_k=cos_k, sin_k=sin_k) if k_tables else {}
        result = apply_rotary_emb_qkv_(x, cos, sin, seqlen_offsets=2, num_heads_q=4, **extra, **where)
    else:
        q, k = None, expected.select(-3, 0)
        result = apply_rotary_emb_kv_(x, cos_k, sin_k, seqlen_offsets=2, **where)
    for part, c, s in ((q, cos, sin), (k, cos_k, sin_k)):
        if part is not None:
            part.copy_(apply_rotary_emb(part.clone(), c, s, seqlen_offsets=2, **where))
    assert result is x
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients(interleaved: bool, inplace: bool) -> None:
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.requires_grad_() for t in tables(7, 2))

    def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rotary_emb(x.clone() if inplace else x, cos, sin, interleaved, inplace, torch.tensor([1, 3]))

    assert gradcheck(apply, (x, cos, sin))
    assert gradgradcheck(apply, (x, cos, sin))
    assert gradcheck(lambda x: apply(x, cos.detach(), sin.detach()), (x,), check_forward_ad=True)


def test_gradients_of_packed_in_place() -> None:
    cos, sin = tables(5, 2)
    qkv = torch.randn(1, 3, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    heads = torch.randn(1, 3, 2 + 2, 4, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(4, 2, 1, 4, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 1, 3])
    assert gradcheck(lambda x: apply_rotary_emb_qkv_(x.clone(), cos, sin, 2 * cos, sin), (qkv,))
    assert gradcheck(lambda x: apply_rotary_emb_qkv_(x.clone(), cos, sin, num_heads_q=2), (heads,))
    assert gradcheck(lambda x: apply_rotary_emb_kv_(x.clone(), cos, sin, cu_seqlens=cu_seqlens, max_seqlen=2), (kv,))
    with pytest.raises(RuntimeError, match="leaf"):
        apply_rotary_emb_qkv_(qkv, cos, sin)


def test_embedding_rotates_by_the_definition() -> None:
    for interleaved in (False, True):
        embedding = RotaryEmbedding(6, base=100.0, interleaved=interleaved)
        frequency = 100.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
        torch.testing.assert_close(embedding.inv_freq.double(), frequency, rtol=1e-6, atol=0)
        angle = torch.arange(12, dtype=torch.float64)[:, None] * embedding.inv_freq.double()
        qkv = torch.randn(2, 5, 3, 2, 8, dtype=torch.float64)
        expected = apply_rotary_emb_qkv_(qkv.clone(), angle.cos(), angle.sin(), None, None, interleaved, 3)
        assert embedding(qkv.clone(), seqlen_offset=3).sub(expected).abs().max() < 1e-13
        assert embedding(qkv.clone(), seqlen_offset=torch.tensor([3, 3])).sub(expected).abs().max() < 1e-13
        q, kv = qkv[:, :, 0].clone(), qkv[:, :, 1:].clone()
        result = embedding(q, kv, seqlen_offset=3)
        assert result[0] is q and result[1] is kv
        torch.testing.assert_close(torch.cat((q[:, :, None], kv), 2), expected)
        flat = qkv.flatten(2, 3)
        torch.testing.assert_close(embedding(flat, seqlen_offset=3, num_heads_q=2).view_as(expected), expected)


def test_embedding_varlen() -> None:
    embedding = RotaryEmbedding(4, scale_base=8.0)
    qkv = torch.randn(9, 3, 2, 4, dtype=torch.float64)
    expected = torch.cat([embedding(part.clone()[None], max_seqlen=9)[0] for part in qkv.split((2, 7))])
    result = embedding(qkv.clone(), cu_seqlens=torch.tensor([0, 2, 9]), max_seqlen=7)
    torch.testing.assert_close(result, expected)
    offsets = torch.tensor([5, 1])
    expected = torch.cat(
        [embedding(part.clone()[None], None, off, 12)[0] for part, off in zip(qkv.split((2, 7)), [5, 1], strict=True)]
    )
    result = embedding(qkv.clone(), seqlen_offset=offsets, cu_seqlens=torch.tensor([0, 2, 9]), max_seqlen=7)
    torch.testing.assert_close(result, expected)


def test_xpos_products_depend_on_distance_alone() -> None:
    embedding = RotaryEmbedding(8, scale_base=16.0)
    qkv = torch.randn(1, 1, 3, 1, 8, dtype=torch.float64).expand(1, 20, 3, 1, 8).clone()
    q, k, v = embedding(qkv.clone())[0, :, :, 0].unbind(1)
    assert torch.equal(v, qkv[0, :, 2, 0])
    scores = q @ k.T
    for distance in range(-19, 20):
        line = scores.diagonal(distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))
    zeta = (torch.arange(0, 8, 2, dtype=torch.float64) + 3.2) / 11.2
    z = torch.complex(qkv[0, 0, :, 0, :4], qkv[0, 0, :, 0, 4:])
    freq = embedding.inv_freq.double()
    turn = torch.polar(zeta ** (5 / 16.0), 5 * freq)
    expected = (z[0] * z[1].conj() * turn).real.sum()  # query 5 to the right of the key
    torch.testing.assert_close(scores[12, 7], expected, rtol=1e-6, atol=1e-6)  # buffers are fp32


def test_tables_stay_accurate_and_move_with_the_module() -> None:
    embedding = RotaryEmbedding(16)
    exact = embedding.inv_freq.clone()
    embedding.to(torch.bfloat16)
    assert embedding.inv_freq.dtype == torch.float32 and torch.equal(embedding.inv_freq, exact)
    assert not embedding.state_dict()
    x = torch.randn(1, 1000, 3, 1, 16)
    result = embedding(x.bfloat16())
    angle = torch.arange(1000, dtype=torch.float64)[:, None] * exact.double()
    expected = apply_rotary_emb_qkv_(x.bfloat16().double(), angle.cos(), angle.sin())
    assert (result.double() - expected).abs().max() < 0.04
    assert embedding._cos_cached.dtype == torch.float32
    embedding._update_cos_sin_cache(5, device="cpu", dtype=torch.bfloat16)
    assert embedding._cos_cached.shape == (5, 8) and embedding._cos_cached.dtype == torch.bfloat16
    from_meta = RotaryEmbedding(16, scale_base=512.0, device="meta").to_empty(device="cpu")
    assert torch.equal(from_meta.inv_freq, exact) and torch.equal(
        from_meta.scale, RotaryEmbedding(16, scale_base=1).scale
    )


def test_tables_made_in_inference_mode_do_not_reach_training() -> None:
    embedding = RotaryEmbedding(4)
    with torch.inference_mode():
        embedding(torch.randn(1, 6, 3, 1, 4))
    x = torch.randn(1, 6, 3, 1, 4, requires_grad=True)
    embedding(x * 1).sum().backward()
    assert x.grad is not None


def test_compiles_without_graph_break() -> None:
    embedding = RotaryEmbedding(6)

    def loss(x: Tensor) -> Tensor:
        return embedding(x * 1).square().mul(torch.arange(8)).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (5, 9, 4):
        x = torch.randn(2, seqlen, 3, 2, 8, requires_grad=True)
        (expected,) = torch.autograd.grad(loss(x), x)
        (result,) = torch.autograd.grad(compiled(x), x)
        torch.testing.assert_close(result, expected)


def test_vmap_and_grad() -> None:
    cos, sin = tables(5, 2)
    x = torch.randn(3, 2, 5, 1, 6, dtype=torch.float64)
    result = torch.func.vmap(lambda x: apply_rotary_emb(x, cos, sin))(x)
    torch.testing.assert_close(result, apply_rotary_emb(x.flatten(0, 1), cos, sin).view_as(x))
    gradient = torch.func.grad(lambda x: apply_rotary_emb(x, cos, sin, inplace=False)[..., 0].sum())(x[0])
    assert gradient.shape == x[0].shape


X = torch.zeros(2, 3, 1, 8)
COS, SIN = (t.float() for t in tables(5, 2))
WRONG = {
    "x": (RuntimeError, lambda: apply_rotary_emb(X[0], COS, SIN)),
    "x must be floating": (RuntimeError, lambda: apply_rotary_emb(X.int(), COS, SIN)),
    "cos must be floating": (RuntimeError, lambda: apply_rotary_emb(X, COS[None], SIN[None])),
    "sin must have": (RuntimeError, lambda: apply_rotary_emb(X, COS, SIN[:4])),
    "cos must have at most": (RuntimeError, lambda: apply_rotary_emb(X, *tables(5, 5))),
    "cos must have at least 6": (RuntimeError, lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=3)),
    "seqlen_offsets must be an integer": (ValueError, lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=-1)),
    "seqlen_offsets must lead": (
        RuntimeError,
        lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.tensor([0, 3])),
    ),
    "seqlen_offsets must have": (RuntimeError, lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.tensor([0]))),
    "max_seqlen": (ValueError, lambda: apply_rotary_emb(X[0], COS, SIN, cu_seqlens=torch.tensor([0, 3]))),
    "qkv must be": (RuntimeError, lambda: apply_rotary_emb_qkv_(X, COS, SIN)),
    "qkv must be .*integer": (RuntimeError, lambda: apply_rotary_emb_qkv_(X, COS, SIN, num_heads_q=2)),
    "kv must be": (RuntimeError, lambda: apply_rotary_emb_kv_(X, COS, SIN)),
    "cos_k must have": (
        RuntimeError,
        lambda: apply_rotary_emb_qkv_(X[:, :, None].expand(2, 3, 3, 1, 8), COS, SIN, COS[:, :1], SIN[:, :1]),
    ),
    "dim must be": (ValueError, lambda: RotaryEmbedding(5)),
    "scale_base": (ValueError, lambda: RotaryEmbedding(4, scale_base=0)),
    "num_heads_q": (ValueError, lambda: RotaryEmbedding(4)(X, X[:, :, None].expand(2, 3, 2, 1, 8), num_heads_q=1)),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message: str) -> None:
    error, call = WRONG[message]
    with pytest.raises(error, match=message):
        call()


SIGNATURES = {
    "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
    "max_seqlen=None",
    "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
    "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
    "num_heads_q=None, *, cu_seqlens=None, max_seqlen=None",
    "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0, *, cu_seqlens=None, max_seqlen=None",
    "rotate_half": "x, interleaved=False",
    "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
    "RotaryEmbedding.forward": "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None, *, "
    "cu_seqlens=None",
    "RotaryEmbedding._update_cos_sin_cache": "self, seqlen, device=None, dtype=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    owner, _, method = name.partition(".")
    function = getattr(rotary, owner)
    signature = inspect.signature(getattr(function, method) if method else function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    assert shown == f"({SIGNATURES[name]})"
