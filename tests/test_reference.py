"""The PyTorch reference checks the rest of the library; here torch's own attention and autograd check the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from flash_attn import from_lse, reference
from flash_attn.dropout import dropout_mask, keep_mask, philox4x32
from flash_attn.problem import Problem

NAN = float("nan")
SEED = torch.tensor([0x123456789ABCDEF, -7])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Many tiles, and ragged ones, at small sizes."""
    monkeypatch.setattr(reference, "BLOCK_ROWS", 16)
    monkeypatch.setattr(reference, "BLOCK_COLUMNS", 24)
    torch.manual_seed(0)


def randn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def make_inputs(batch=2, rows=37, columns=50, heads=4, heads_k=2, dim=8, dim_v=5):
    return randn(batch, rows, heads, dim), randn(batch, columns, heads_k, dim), randn(batch, columns, heads_k, dim_v)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-10)


def gradients(function, inputs, dout, dlse):
    """out, lse and the gradients of the given inputs through both."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    wanted = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad((out, lse), wanted, (dout, dlse), allow_unused=True))
    return out.detach(), lse.detach(), [None if x is None else next(found) for x in leaves]  # None stays None


# ---- dropout draws ----


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "expected"),
    [
        (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
        (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ],
)
def test_philox_gives_published_vectors(rounds, counter, key, expected):
    """The known answers that Random123 publishes for philox4x32."""
    words = philox4x32(*(tuple(torch.tensor(int(word, 16)) for word in x.split()) for x in (counter, key)), rounds)
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_a_tile_is_a_part_of_the_mask():
    whole = dropout_mask(SEED, 0.3, 3, 4, 70, 90)
    part = keep_mask(SEED, 0.3, slice(1, 3), slice(2, 4), slice(21, 67), slice(45, 86))
    assert torch.equal(part, whole[1:3, 2:4, 21:67, 45:86])
    assert keep_mask(SEED, 0.3, slice(0, 2), slice(0, 2), slice(5, 5), slice(0, 9)).shape == (2, 2, 0, 9)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate(p):
    kept = dropout_mask(SEED, p, 2, 4, 256, 256).double()
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * deviation
    assert abs(kept.mean((2, 3)) - (1 - p)).max() < 5 * deviation * 8**0.5  # of each sequence and head


def test_dropout_mask_extremes_and_errors():
    assert dropout_mask(SEED, 0.0, 1, 2, 3, 4).all() and dropout_mask(SEED, 2.0**-18, 1, 2, 3, 4).all()
    assert not dropout_mask(SEED, 1.0, 1, 2, 3, 4).any()
    with pytest.raises(RuntimeError, match="seed must be an int64"):
        dropout_mask(SEED.int(), 0.5, 1, 1, 1, 1)
    for p in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match="dropout_p"):
            dropout_mask(SEED, p, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="seqlen_k must not be negative, got -1"):
        dropout_mask(SEED, 0.5, 1, 1, 1, -1)


# ---- Algorithm 0 against torch ----


@pytest.mark.parametrize("kind", ["plain", "causal", "causal_upper_left", "mask", "bias"])
def test_standard_forward_matches_torch(kind):
    q, k, v = make_inputs()
    rows, columns = q.shape[1], k.shape[1]
    bias = randn(2, 1, rows, columns) if kind == "bias" else None
    mask = torch.rand(2, 4, rows, columns) > 0.5 if kind == "mask" else None
    shift = columns - rows if kind == "causal" else 0
    causal = torch.ones(rows, columns, dtype=torch.bool).tril(shift)
    torch_mask = {"plain": None, "mask": mask, "bias": bias}.get(kind, causal)
    problem = Problem(8**-0.5, causal="causal" in kind, upper_left="upper_left" in kind, mask=mask)

    def peer(q, k, v, bias):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        attn_mask = torch_mask if bias is None else bias
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=attn_mask, enable_gqa=True).transpose(1, 2)
        return out, out.sum()

    def ours(q, k, v, bias):
        out, _ = reference.standard_forward(q, k, v, bias, None, problem)
        return out, out.sum()

    dout, dsum = randn(2, rows, 4, 5), randn(1)[0]
    expected, _, expected_gradients = gradients(peer, (q, k, v, bias), dout, dsum)
    found, _, found_gradients = gradients(ours, (q, k, v, bias), dout, dsum)
    close([found, *found_gradients], [expected, *expected_gradients])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_upcast_is_the_fp32_computation(dtype):
    q, k, v = (x.to(dtype) for x in make_inputs())
    out, lse = reference.standard_forward(q, k, v, None, None, Problem(0.3), upcast=True)
    exact, exact_lse = reference.standard_forward(q.double(), k.double(), v.double(), None, None, Problem(0.3))
    naive, _ = reference.standard_forward(q, k, v, None, None, Problem(0.3))
    assert out.dtype == naive.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out, exact.to(dtype), rtol=2e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(naive.double(), exact, rtol=0.0, atol=8 * torch.finfo(dtype).eps)


def test_second_derivatives_are_finite_and_right_with_empty_rows():
    q, k, v = (x[:, :, :1].requires_grad_() for x in make_inputs(rows=4, columns=3, heads=1, heads_k=1, dim=2, dim_v=2))
    problem = Problem(0.7, causal=True, softcap=3.0)  # row 0 sees nothing

    def function(q, k, v):
        out, lse = reference.standard_forward(q, k, v, None, None, problem)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(function, (q, k, v))
    assert torch.autograd.gradgradcheck(function, (q, k, v))


# ---- tiled against Algorithm 0 and autograd ----

COMBINATIONS = {
    "plain": {},
    "causal": {"causal": True},
    "causal, more rows than columns": {"causal": True, "rows": 61, "columns": 30},
    "upper left": {"causal": True, "upper_left": True},
    "window": {"window": (9, 4)},
    "window left": {"window": (5, -1), "rows": 70},
    "window right": {"window": (-1, 3), "rows": 70},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": 1},
    "alibi by batch, causal": {"alibi": 2, "causal": True},
    "bias": {"bias": (2, 4, 37, 50)},
    "bias by head, softcap": {"bias": (1, 4, 1, 50), "softcap": 2.0},
    "bias by row": {"bias": (2, 1, 37, 1)},
    "bias with -inf": {"bias": (1, 1, 37, 50), "bias_inf": True},
    "mask": {"mask": (2, 4, 37, 50)},
    "mask of keys, causal": {"mask": (2, 1, 1, 50), "causal": True},
    "sink": {"sink": True},
    "sink, empty rows": {"sink": True, "causal": True, "rows": 61, "columns": 30},
    "dropout": {"p": 0.3},
    "dropout, causal, gqa 4": {"p": 0.17, "causal": True, "heads": 8},
    "drop all": {"p": 1.0},
    "lengths": {"used_q": (37, 20), "used_k": (33, 50)},
    "left pads": {"pad_q": (0, 11), "pad_k": (20, 3), "p": 0.25, "causal": True},
    "pads and lengths": {"pad_q": (3, 5), "pad_k": (20, 3), "used_q": (30, 5), "used_k": (21, 48), "sink": True},
    "no keys": {"columns": 0},
    "no keys, sink": {"columns": 0, "sink": True},
    "no rows": {"rows": 0},
    "no batch": {"batch": 0},
    "mha, dim 1": {"heads_k": 4, "dim": 1, "dim_v": 1},
    "everything": {
        "window": (30, 6), "softcap": 2.5, "alibi": 2, "bias": (1, 4, 37, 50), "mask": (2, 1, 37, 50), "sink": True,
        "p": 0.4, "pad_q": (2, 0), "pad_k": (0, 4), "used_q": (37, 29), "used_k": (44, 47),
    },
}  # fmt: skip


def build(
    batch=2, rows=37, columns=50, heads=4, heads_k=2, dim=8, dim_v=5, causal=False, upper_left=False, window=(-1, -1),
    softcap=0.0, alibi=0, bias=None, bias_inf=False, mask=None, sink=False, p=0.0, used_q=None, used_k=None,
    pad_q=None, pad_k=None,
):  # fmt: skip
    """Inputs and problem of one combination; everything outside the sequences is NaN, upstream gradients included."""
    q, k, v = make_inputs(batch, rows, columns, heads, heads_k, dim, dim_v)
    sides = {"seqused_q": used_q, "seqused_k": used_k, "leftpad_q": pad_q, "leftpad_k": pad_k}
    problem = Problem(
        dim**-0.5, causal, window[0], 0 if causal else window[1], upper_left, softcap, p, SEED if p else None,
        alibi_slopes=torch.rand(alibi, heads).double() if alibi else None,
        mask=torch.rand(mask) > 0.4 if mask else None, max_seqlen_q=rows, max_seqlen_k=columns,
        **{name: None if x is None else torch.tensor(x, dtype=torch.int32) for name, x in sides.items()},
    )  # fmt: skip
    bias = randn(*bias) if bias else None
    if bias_inf:
        bias[torch.rand(bias.shape) < 0.3] = -torch.inf
        bias[:, :, 5] = -torch.inf
    dout, dlse = randn(batch, rows, heads, dim_v), randn(batch, heads, rows)
    for used, pad, tensors in ((used_q, pad_q, (q, dout, dlse.transpose(1, 2))), (used_k, pad_k, (k, v))):
        for x, b in itertools.product(tensors, range(batch)):
            x[b, : pad[b] if pad else 0] = NAN
            x[b, used[b] if used else x.shape[1] :] = NAN
    return (q, k, v, bias, randn(heads) if sink else None), problem, dout, dlse


@pytest.mark.parametrize("name", COMBINATIONS)
def test_tiled_matches_standard(name):
    inputs, problem, dout, dlse = build(**COMBINATIONS[name])
    out, lse, expected = gradients(lambda *x: reference.standard_forward(*x, problem), inputs, dout, dlse)
    dlse = torch.where(lse == -torch.inf, NAN, dlse)  # is to be ignored where nothing is seen

    tiled_out, tiled_lse, statistics = reference.forward(*inputs, problem)
    assert statistics.shape == (2, *lse.shape) and tiled_out.is_contiguous()
    close(tiled_out, out)
    close(tiled_lse, lse)
    assert tiled_out.isfinite().all() and not tiled_lse.isnan().any()

    needs = tuple(x is not None for x in inputs)
    q, k, v, bias, sink = inputs
    found = reference.backward(dout, dlse, q, k, v, tiled_out, statistics, bias, sink, problem, needs)
    assert tuple(x is not None for x in found) == needs
    assert all(x.isfinite().all() for x in found if x is not None)
    close(found, tuple(expected))


def to_varlen(x, used, gaps):
    """Dense (batch, seqlen, ...) -> the sequences' rows with a NaN gap behind each, and cu_seqlens over both."""
    parts = [F.pad(x[b, :n], (0, 0) * (x.dim() - 2) + (0, gaps[b]), value=NAN) for b, n in enumerate(used)]
    cu_seqlens = [0, *itertools.accumulate(len(part) for part in parts)]
    return torch.cat([*parts, x.new_full((3, *x.shape[2:]), NAN)]), cu_seqlens


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gaps", [(0, 0, 0), (4, 0, 2)])
def test_varlen_matches_dense_with_lengths(gaps, cu_dtype):
    """One sequence without queries, gaps, rows behind the last; all options that tell positions apart."""
    used_q, used_k = (37, 0, 20), (50, 7, 31)
    inputs, dense, dout, dlse = build(
        batch=3, used_q=used_q, used_k=used_k, pad_q=(2, 0, 0), pad_k=(0, 3, 1), window=(30, 6), softcap=2.5, alibi=3,
        bias=(3, 4, 37, 50), mask=(1, 4, 37, 50), sink=True, p=0.3,
    )  # fmt: skip
    q, k, v, bias, sink = inputs
    out, lse, statistics = reference.forward(*inputs, dense)
    expected = reference.backward(dout, dlse, q, k, v, out, statistics, bias, sink, dense, (True,) * 5)

    of_q = (q, dout, dlse.transpose(1, 2))
    (q_rows, cu_q), (dout_rows, _), (dlse_rows, _) = (to_varlen(x, used_q, gaps) for x in of_q)
    (k_rows, cu_k), (v_rows, _) = (to_varlen(x, used_k, gaps) for x in (k, v))
    packed = dense._replace(
        cu_seqlens_q=torch.tensor(cu_q, dtype=cu_dtype),
        cu_seqlens_k=torch.tensor(cu_k, dtype=cu_dtype),
        seqused_q=torch.tensor(used_q) if any(gaps) else None,
        seqused_k=torch.tensor(used_k) if any(gaps) else None,
    )
    out_rows, lse_rows, statistics = reference.forward(q_rows, k_rows, v_rows, bias, sink, packed)
    assert statistics.shape == (2, 4, len(q_rows)) and lse_rows.shape == (4, len(q_rows))
    found = reference.backward(
        dout_rows, dlse_rows.T, q_rows, k_rows, v_rows, out_rows, statistics, bias, sink, packed, (True,) * 5
    )

    def check(packed_rows, dense_rows, used, cu, outside):
        for b, n in enumerate(used):
            close(packed_rows[cu[b] : cu[b] + n], dense_rows[b, :n])
            assert (packed_rows[cu[b] + n : cu[b + 1]] == outside).all()
        assert (packed_rows[cu[-1] :] == outside).all()

    check(out_rows, out, used_q, cu_q, 0)
    check(lse_rows.T, lse.transpose(1, 2), used_q, cu_q, -torch.inf)
    check(found[0], expected[0], used_q, cu_q, 0)
    check(found[1], expected[1], used_k, cu_k, 0)
    check(found[2], expected[2], used_k, cu_k, 0)
    close(found[3:], expected[3:])


def test_backward_computes_only_what_is_needed():
    inputs, problem, dout, dlse = build(bias=(1, 4, 37, 50), sink=True, causal=True)
    q, k, v, bias, sink = inputs
    out, _, statistics = reference.forward(*inputs, problem)
    everything = reference.backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, (True,) * 5)
    for only in range(5):
        needs = tuple(index == only for index in range(5))
        found = reference.backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, needs)
        assert [x is not None for x in found] == list(needs)
        assert torch.equal(found[only], everything[only])


def test_backward_from_an_lse_alone():
    inputs, problem, dout, dlse = build(causal=True, rows=61, columns=30)
    q, k, v, bias, sink = inputs
    out, lse, statistics = reference.forward(*inputs, problem)
    needs = (True, True, True, False, False)
    expected = reference.backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, needs)
    statistics = torch.stack([lse, torch.zeros_like(lse)])
    found = reference.backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, needs)
    close(found[:3], expected[:3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiled_low_precision(dtype):
    """Dtypes of the results, and errors of a few roundings."""
    inputs, problem, dout, dlse = build(causal=True, bias=(1, 4, 37, 50), sink=True)
    q, k, v, bias, sink = inputs
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    bias, sink, dlse = bias.to(dtype), sink.float(), dlse.float()
    out, lse, statistics = reference.forward(q, k, v, bias, sink, problem)
    found = reference.backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, (True,) * 5)
    with torch.autocast("cpu", torch.bfloat16):  # the fp32 tiles stay fp32
        assert torch.equal(reference.forward(q, k, v, bias, sink, problem)[0], out)
        again = reference.backward(dout, dlse, q, k, v, out, statistics, bias, sink, problem, (True,) * 5)
        assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    assert out.dtype == dtype and lse.dtype == statistics.dtype == torch.float32
    assert [x.dtype for x in found] == [dtype] * 4 + [torch.float32]
    exact_inputs = tuple(x.double() for x in (q, k, v, bias, sink))
    exact_out, _, expected = gradients(
        lambda *x: reference.standard_forward(*x, problem), exact_inputs, dout.double(), dlse.double()
    )
    for x, exact in zip((out, *found), (exact_out, *expected), strict=True):
        eps = torch.finfo(dtype).eps
        assert (x.double() - exact).abs().max() <= 8 * eps * exact.abs().max()


def test_huge_equal_inputs_come_out_exact():
    for rows in (1, 3):
        q = torch.full((1, rows, 1, 64), 133120.0, dtype=torch.bfloat16)
        out, _, statistics = reference.forward(q, q, q, None, None, Problem(0.125))
        assert (out == 133120).all()
        needs = (True, True, True, False, False)
        found = reference.backward(q, None, q, q, q, out, statistics, None, None, Problem(0.125), needs)
        assert all(x.isfinite().all() for x in found[:3])


def test_nan_query_stays_in_its_row():
    inputs, problem, *_ = build(causal=True)
    inputs[0][1, 7, 2] = NAN
    for out, lse in (reference.forward(*inputs, problem)[:2], reference.standard_forward(*inputs, problem)):
        expected = torch.zeros(2, 37, 4, dtype=torch.bool)
        expected[1, 7, 2] = True
        assert torch.equal(out.isnan().any(-1), expected) and torch.equal(lse.isnan().transpose(1, 2), expected)


def test_rows_that_see_nothing():
    """Exact zeros, LSE -inf, and no influence of whatever gradient arrives there; a sink alone makes LSE = sink."""
    mask = torch.zeros(1, 1, 37, 50, dtype=torch.bool)
    mask[..., :20, :30] = True
    (q, k, v, _, _), problem, dout, dlse = build()
    problem = problem._replace(mask=mask)
    out, lse, statistics = reference.forward(q, k, v, None, None, problem)
    assert (out[:, 20:] == 0).all() and (lse[:, :, 20:] == -torch.inf).all() and lse[:, :, :20].isfinite().all()
    assert (statistics[0, :, :, 20:] == 0).all() and (statistics[1, :, :, 20:] == -torch.inf).all()
    dout[:, 20:], dlse[:, :, 20:] = NAN, NAN
    needs = (True, True, True, False, False)
    dq, dk, dv, *_ = reference.backward(dout, dlse, q, k, v, out, statistics, None, None, problem, needs)
    assert (dq[:, 20:] == 0).all() and (dk[:, 30:] == 0).all() and (dv[:, 30:] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))

    sink = randn(4)
    for out, lse in (f(q, k, v, None, sink, problem)[:2] for f in (reference.forward, reference.standard_forward)):
        assert (out[:, 20:] == 0).all()
        close(lse[:, :, 20:], sink.view(1, 4, 1).expand(2, 4, 17))


def test_memory_is_linear(monkeypatch):
    """No intermediate of the tiled passes has more elements than a few copies of q."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
            return result

    monkeypatch.setattr(reference, "BLOCK_ROWS", 64)
    monkeypatch.setattr(reference, "BLOCK_COLUMNS", 64)
    (q, k, v, bias, _), problem, dout, dlse = build(
        batch=1, rows=300, columns=300, heads=1, heads_k=1, dim=16, dim_v=16, p=0.1, causal=True, bias=(1, 1, 1, 300)
    )
    with Largest() as largest:
        out, _, statistics = reference.forward(q, k, v, bias, None, problem)
        reference.backward(dout, dlse, q, k, v, out, statistics, bias, None, problem, (True,) * 4 + (False,))
    assert largest.elements <= 2 * q.numel()


# ---- merge_attention, attention_probs ----


@pytest.mark.parametrize("splits", [(50,), (20, 30), (1, 0, 17, 32)])
def test_merging_parts_gives_the_whole(splits):
    q, k, v = make_inputs()
    dout, dlse = randn(2, 37, 4, 5), randn(2, 4, 37)
    problem = Problem(0.4)

    def merged(q, k, v):
        pieces = zip(k.split(splits, 1), v.split(splits, 1), strict=True)
        parts = [reference.standard_forward(q, k, v, None, None, problem) for k, v in pieces]
        return from_lse.merge_attention(*zip(*parts, strict=True))

    expected = gradients(lambda *x: reference.standard_forward(*x, None, None, problem), (q, k, v), dout, dlse)
    close(gradients(merged, (q, k, v), dout, dlse), expected)


def test_merging_rows_that_saw_nothing():
    out, lse = randn(2, 1, 3, 2, 4), randn(2, 1, 2, 3).float()
    lse[:, :, :, 0], lse[1, :, :, 1] = -torch.inf, -torch.inf
    out[1, :, 1] = NAN  # does not count
    outs, lses = ([x.clone().requires_grad_() for x in y] for y in (out, lse))
    merged, merged_lse = from_lse.merge_attention(outs, lses)
    assert merged.dtype == torch.float64 and merged_lse.dtype == torch.float32
    assert (merged[:, 0] == 0).all() and (merged_lse[:, :, 0] == -torch.inf).all()
    close(merged[:, 1], out[0, :, 1])
    (merged.sum() + merged_lse[:, :, 1:].sum()).backward()
    assert all(x.grad.isfinite().all() for x in (*outs, *lses))


def test_merging_varlen_in_bf16():
    outs, lses = [randn(7, 2, 4).bfloat16() for _ in range(3)], [randn(2, 7).float() for _ in range(3)]
    out, lse = from_lse.merge_attention(outs, lses)
    weights = torch.stack(lses).softmax(0).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(out, (weights * torch.stack(outs).float()).sum(0).bfloat16())
    torch.testing.assert_close(lse, torch.stack(lses).logsumexp(0))


def test_merge_errors():
    out, lse = randn(2, 3, 4, 5), randn(2, 4, 3)
    for outs, lses, message in (
        ([], [], "at least one"),
        ([out], [lse, lse], "equally many"),
        ([out[0, 0]], [lse], r"outs\[0\]"),
        ([out], [lse.transpose(1, 2)], r"lses\[0\] must be torch.float64 \(2, 4, 3\)"),
        ([out], [lse.half()], r"lses\[0\]"),
        ([out, out.float()], [lse, lse], r"outs\[1\]"),
        ([out, out], [lse, lse[:1]], r"lses\[1\]"),
    ):
        with pytest.raises(RuntimeError, match=message):
            from_lse.merge_attention(outs, lses)


PROBS = {
    "plain": {},
    "causal": {"causal": True, "rows": 61, "columns": 30},
    "window, softcap, alibi": {"window": (9, 4), "softcap": 2.0, "alibi": 2},
    "bias, mask": {"bias": (2, 1, 37, 50), "mask": (1, 4, 37, 50)},
    "pads and lengths": {"pad_q": (3, 5), "pad_k": (20, 3), "used_q": (30, 9), "used_k": (41, 48), "causal": True},
    "sink": {"sink": True},
}


@pytest.mark.parametrize("name", PROBS)
def test_attention_probs(name):
    """P from LSE: rows of the probabilities that multiply V = identity in the attention itself."""
    (q, k, _, bias, sink), problem, *_ = build(**PROBS[name])
    columns = k.shape[1]
    v = torch.eye(columns).double().view(1, columns, 1, columns).expand(2, columns, 2, columns)
    expected, lse, _ = reference.forward(q, k, v, bias, sink, problem)
    rows = torch.tensor([36, 0, 5, 8, 8])
    same = "softmax_scale causal softcap alibi_slopes mask seqused_q seqused_k leftpad_q leftpad_k"
    options = {name: getattr(problem, name) for name in same.split()}
    options |= {"window_size": (problem.window_left, problem.window_right), "bias": bias}
    found = from_lse.attention_probs(q[:, rows], k, lse[:, :, rows], rows=rows, seqlen_q=q.shape[1], **options)
    close(found, expected.transpose(1, 2)[:, :, rows])
    q, k, lse = (x.requires_grad_() for x in (q, k, lse))
    whole = from_lse.attention_probs(q, k, lse, **options)
    close(whole[:, :, rows], found)
    assert all(x.isfinite().all() for x in torch.autograd.grad(whole.square().sum(), (q, k, lse)))


def test_attention_probs_checks_its_arguments():
    q, k, lse = randn(2, 5, 4, 8), randn(2, 9, 2, 8), randn(2, 4, 5)
    call = from_lse.attention_probs
    assert call(q, k, lse, rows=[4, 3, 2, 1, 0], seqlen_q=8).shape == (2, 4, 5, 9)
    for arguments, options, message in (
        ((q[0], k, lse), {}, "q_rows"),
        ((q, k.float(), lse), {}, "k must"),
        ((q, k[:, :, :1].expand(2, 9, 3, 8), lse), {}, "k must"),
        ((q, k, lse[:, :, :3]), {}, "lse must"),
        ((q, k, lse), {"rows": torch.arange(4), "seqlen_q": 8}, "rows must"),
        ((q, k, lse), {"rows": [0, 1, 2, 3, 8], "seqlen_q": 8}, r"rows must lie in \[0, seqlen_q\)"),
        ((q, k, lse), {"mask": torch.ones(7, 9).bool()}, "mask must"),
        ((q, k, lse), {"mask": torch.ones(5, 9)}, "mask must"),
        ((q, k, lse), {"bias": torch.ones(3, 1, 1, 9)}, "bias must"),
        ((q, k, lse), {"alibi_slopes": torch.ones(3)}, "alibi_slopes must"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(*arguments, **options)
    for options, message in (
        ({"rows": [0, 1, 2, 3, 4]}, "seqlen_q"),
        ({"seqlen_q": 6}, "seqlen_q"),
        ({"window_size": (-2, 0)}, "window_size"),
        ({"softcap": -1.0}, "softcap"),
    ):
        with pytest.raises(ValueError, match=message):
            call(q, k, lse, **options)
