"""Gradients of every option against the fp64 oracle, gradcheck, and the rules of autograd."""

from __future__ import annotations

import math

import cases
import oracle
import pytest
import torch
import torch.utils.checkpoint
from cases import Case, Target, with_targets
from oracle import Options

from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

HALF, BF16, FP64 = torch.float16, torch.bfloat16, torch.float64

CASES = [
    c.differentiable
    for c in (
        *(Case(dtype=d, seqlen_q=65, seqlen_k=97, dim=40, dim_v=40) for d in cases.NAMES),
        *(Case(seqlen_q=n, seqlen_k=m) for n, m in ((1, 1), (2, 3), (1, 257), (257, 1), (129, 196), (0, 5), (5, 0),
        (0, 0))),
        Case(batch=0), *(Case(heads=0, heads_k=0, dtype=d) for d in cases.NAMES),
        Case(batch=1, heads=1, heads_k=1, seqlen_q=129, seqlen_k=257),
        *(Case(dim=d, dim_v=d, seqlen_q=17, dtype=BF16) for d in (1, 3, 8, 31, 72, 127, 256, 257)),
        *(Case(dim=d, dim_v=e, seqlen_q=19) for d, e in ((8, 16), (32, 24), (1, 33), (128, 40), (16, 1), (3, 130))),
        *(Case(heads=h, heads_k=k, seqlen_q=9, dtype=t) for h, k in ((6, 3), (8, 2), (5, 1), (9, 3)) for t in (BF16,
        FP64)),
        *(Case(causal=True, seqlen_q=n, seqlen_k=m) for n, m in ((33, 33), (5, 97), (97, 5), (65, 64), (1, 33), (129,
        129))),
        *(
            Case(window=w, seqlen_q=n, seqlen_k=m, causal=c)
            for w, n, m, c in (((0, 0), 33, 33, False), ((3, 5), 97, 65, False), ((-1, 4), 65, 97, False),
                               ((7, -1), 97, 65, False), ((7, -1), 65, 65, True), ((64, 0), 257, 129, False))
        ),
        *(Case(softcap=c, scale=s) for c, s in ((15.0, None), (0.5, 1.0), (50.0, 4.0), (1e-3, None))),
        *(Case(scale=s) for s in (0.0, -0.5, 1e-6)),
        Case(softcap=3.0, bias="bhqk", alibi="heads", lse_grad=True, dtype=BF16),
        *(Case(alibi=a, seqlen_q=33, seqlen_k=65, causal=True) for a in ("heads", "batch_heads")),
        *(Case(bias=p, seqlen_k=37, batch=3) for p in ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "bhq1", "1111", "qk",
        "1k",
                                                        "k", "hq1", "b11k", "1h11")),
        *(Case(bias=p, bias_fp32=f, bias_inf=True, dtype=d, heads=4) for p, f, d in (("bhqk", True, BF16), ("1hqk",
        False, HALF),
                                                                                      ("11qk", True, HALF), ("k",
                                                                                          False, BF16))),
        Case(bias="1111", dtype=HALF, bias_fp32=True, batch=3, seqlen_q=129, seqlen_k=129), Case(bias="bhqk",
        dtype=FP64),
        *(Case(mask=p, seqlen_k=37) for p in ("bhqk", "b11k", "11q1", "1111", "k")),
        Case(mask="bhqk", bias="1hqk", alibi="heads", softcap=5.0, causal=True, window=(20, -1), sink=True, dtype=BF16),
        *(Case(seqlen_q=65, seqlen_k=97, batch=3, causal=c, **{n: True for n in names})
          for c in (False, True)
          for names in (("seqused_k",), ("leftpad_k",), ("seqused_q",), ("leftpad_q",),
                        ("seqused_q", "leftpad_q", "seqused_k", "leftpad_k"))),
        Case(seqused_k=True, leftpad_k=True, seqused_q=True, bias="bhqk", mask="b11k", alibi="heads", window=(9, 3)),
        Case(sink=True, lse_grad=True), Case(sink=True, dtype=BF16, heads=10, heads_k=2),
        Case(sink=True, causal=True, seqlen_q=65, seqlen_k=7, lse_grad=True, leftpad_q=True),
        Case(sink=True, seqlen_k=0, lse_grad=True), Case(sink=True, dropout_p=0.3, lse_grad=True),
        *(Case(lse_grad=True, dtype=d, causal=True, seqlen_k=17) for d in cases.NAMES),
        *(Case(data=d, dtype=t, seqlen_q=65, seqlen_k=129, dim=64, dim_v=64) for d in cases.DATA[1:]
          for t in (torch.float32, BF16, HALF)),
        *(Case(layout=x, dtype=t, bias="bhqk", seqlen_k=65) for x in cases.LAYOUTS[1:] for t in (torch.float32, BF16)),
        *(Case(deterministic=True, seqlen_q=n, seqlen_k=129, heads=4) for n in (17, 129)),
    )
]  # fmt: skip


@with_targets(CASES)
def test_gradients(case: Case, target: Target):
    cases.check(case, target.device, target.backend)


NEEDED = ("q", "k", "v", "b", "s", "qk", "qv", "kv", "bs", "vb", "qkv")


@with_targets([Case(bias="1hqk", sink=True, heads=4, causal=True, lse_grad=True, grads=n) for n in NEEDED])
def test_only_the_needed_gradients(case: Case, target: Target):
    """Each subset of inputs gets the gradients that it gets when all are wanted, and nobody else gets one."""
    cases.check(case, target.device, target.backend)


GRADCHECK = {
    "plain": {},
    "causal, GQA": {"causal": True, "heads": 4},
    "window": {"window_size": (2, 1)},
    "empty rows": {"causal": True, "seqlen_q": 7, "seqlen_k": 3},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.9},
    "alibi": {"alibi_slopes": torch.tensor([0.3, 0.05], dtype=torch.float64)},
    "bias": {"bias": (1, 2, 5, 7)},
    "broadcast bias": {"bias": (2, 1, 1, 7), "softcap": 2.0},
    "sink": {"sink": True},
    "sink, empty rows": {"sink": True, "causal": True, "seqlen_q": 7, "seqlen_k": 3},
    "mask": {"mask": torch.tensor([[1, 0, 1, 1, 0, 0, 1]] * 4 + [[0] * 7]).bool()},
    "dropout": {"dropout_p": 0.4, "dropout_seed": torch.tensor([3, 4])},
    "lengths": {"seqused_k": torch.tensor([7, 4]), "leftpad_k": torch.tensor([2, 0]), "causal": True,
                "seqused_q": torch.tensor([5, 3]), "leftpad_q": torch.tensor([0, 1])},
    "everything": {"sink": True, "bias": (2, 2, 5, 7), "softcap": 3.0, "window_size": (3, 2), "dropout_p": 0.2,
                   "dropout_seed": torch.tensor([-1, 9]), "alibi_slopes": torch.tensor([0.3, 0.05]), "heads": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", GRADCHECK)
def test_gradcheck(name, target):
    """Analytic gradients of (out, LSE) against finite differences in fp64."""
    o = dict(GRADCHECK[name])
    heads, seqlen_q, seqlen_k = o.pop("heads", 2), o.pop("seqlen_q", 5), o.pop("seqlen_k", 7)
    shapes = [(2, seqlen_q, heads, 3), (2, seqlen_k, 2, 3), (2, seqlen_k, 2, 4)]
    inputs = [torch.randn(s, dtype=FP64, device=target.device, requires_grad=True) for s in shapes]
    bias, sink = o.pop("bias", None), o.pop("sink", False)
    if bias:
        inputs.append(torch.randn(bias, dtype=FP64, device=target.device, requires_grad=True))
    if sink:
        inputs.append(torch.randn(heads, dtype=FP64, device=target.device, requires_grad=True))
    o = {n: t.to(target.device) if isinstance(t, torch.Tensor) else t for n, t in o.items()}

    def function(q, k, v, *rest):
        rest = list(rest)
        out, lse = flash_attn_func(
            q, k, v, bias=rest.pop(0) if bias else None, learnable_sink=rest.pop(0) if sink else None, return_lse=True,
            backend=target.backend, **o,
        )  # fmt: skip
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    torch.autograd.gradcheck(function, inputs, nondet_tol=0.0)


def test_gradcheck_varlen(target):
    inputs = [torch.randn(9, 2, 3, dtype=FP64, device=target.device, requires_grad=True) for _ in range(3)]
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32, device=target.device) for t in ([0, 2, 2, 8], [0, 4, 5, 9]))

    def function(q, k, v):
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 6, 4, causal=True, return_lse=True, backend=target.backend
        )
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    torch.autograd.gradcheck(function, inputs)


def qkv(target: Target, *, batch=2, seqlen_q=33, seqlen_k=65, heads=4, heads_k=2, dim=16, dtype=torch.float32):
    """Random q, k, v that require gradients."""
    shapes = ((seqlen_q, heads, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim))
    return [torch.randn(batch, *s, dtype=dtype).to(target.device).requires_grad_() for s in shapes]


def test_packed_gradient_is_one_tensor(target):
    packed = torch.randn(2, 17, 3, 2, 8, device=target.device, requires_grad=True)
    dout = torch.randn(2, 17, 2, 8, device=target.device)
    (got,) = torch.autograd.grad(flash_attn_qkvpacked_func(packed, causal=True, backend=target.backend), packed, dout)
    parts = [t.detach().requires_grad_() for t in packed.unbind(2)]
    want = torch.autograd.grad(flash_attn_func(*parts, causal=True, backend=target.backend), parts, dout)
    assert torch.equal(got, torch.stack(want, 2))


def test_same_tensor_as_q_k_and_v(target):
    """Self attention of one tensor: the three gradients add up."""
    x = torch.randn(1, 33, 2, 8, device=target.device, requires_grad=True)
    dout = torch.randn_like(x)
    (got,) = torch.autograd.grad(flash_attn_func(x, x, x, backend=target.backend), x, dout)
    y = x.detach().cpu().requires_grad_()
    (want,) = torch.autograd.grad(oracle.attention(y, y, y)[0], y, dout.cpu().double())
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, BF16))
def test_strides_of_the_upstream_gradient(dtype, target):
    """dout expanded from a scalar, transposed, with a step: the gradients of its contiguous copy."""
    tensors = qkv(target, dtype=dtype)
    out = flash_attn_func(*tensors, backend=target.backend)
    dense = torch.randn(2, 33, 4, 16, device=target.device, dtype=dtype)
    stepped = torch.full((2, 33, 4, 32), math.nan, device=target.device, dtype=dtype)
    stepped[..., ::2] = dense
    for dout in (
        torch.ones((), device=target.device, dtype=dtype).expand(out.shape),
        dense.transpose(1, 2).contiguous().transpose(1, 2),
        dense.transpose(1, 3).contiguous().transpose(1, 3),
        stepped[..., ::2],
        dense[:, :1].expand(out.shape),
    ):
        got = torch.autograd.grad(out, tensors, dout, retain_graph=True)
        want = torch.autograd.grad(out, tensors, dout.contiguous(), retain_graph=True)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def test_gradient_through_sum(target):
    tensors = qkv(target)
    flash_attn_func(*tensors, backend=target.backend).sum().backward()
    copies = [t.detach().cpu().requires_grad_() for t in tensors]
    oracle.attention(*copies)[0].sum().backward()
    for t, c in zip(tensors, copies, strict=True):
        torch.testing.assert_close(t.grad.cpu(), c.grad, rtol=1e-4, atol=1e-5)


def test_gradient_of_lse_alone(target):
    """Only LSE is used: dv = 0, dq and dk are those of logsumexp."""
    tensors = qkv(target)
    lse = flash_attn_func(*tensors, causal=True, return_lse=True, backend=target.backend)[1]
    dlse = torch.randn_like(lse)
    dq, dk, dv = torch.autograd.grad(lse, tensors, dlse)
    copies = [t.detach().cpu().double().requires_grad_() for t in tensors]
    want = torch.autograd.grad(
        oracle.attention(*copies, options=Options(causal=True))[1], copies[:2], dlse.cpu().double()
    )
    torch.testing.assert_close(dq.cpu().double(), want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dk.cpu().double(), want[1], rtol=1e-4, atol=1e-5)
    assert (dv == 0).all()


def test_two_backwards_of_one_graph(target):
    tensors = qkv(target)
    out = flash_attn_func(*tensors, dropout_p=0.2, backend=target.backend)
    first = torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
    second = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))
    torch.testing.assert_close(first[0], second[0])


def test_backward_after_the_graph_is_freed(target):
    q, k, v = qkv(target)
    out = flash_attn_func(q, k, v, backend=target.backend).sum()
    out.backward()
    with pytest.raises(RuntimeError):
        out.backward()


@pytest.mark.parametrize("name", ("q", "k", "v", "out", "bias"))
def test_changes_in_place_are_noticed(name, target):
    """An input or the output written between forward and backward is an error, not a wrong gradient."""
    leaves = qkv(target)
    q, k, v = (t * 1 for t in leaves)
    bias = torch.zeros(33, 65, device=target.device, requires_grad=True) * 1
    out = flash_attn_func(q, k, v, bias=bias, backend=target.backend)
    with torch.no_grad():
        {"q": q, "k": k, "v": v, "out": out, "bias": bias}[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_nothing_is_saved_without_grad(target):
    q, k, v = qkv(target)
    saved: list = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            assert flash_attn_func(q, k, v, backend=target.backend).grad_fn is None
        with torch.inference_mode():
            assert not flash_attn_func(q, k, v, backend=target.backend).requires_grad
        flash_attn_func(*(t.detach() for t in (q, k, v)), backend=target.backend)
        assert not saved
        flash_attn_func(q, k, v, backend=target.backend)
        assert saved


def test_saved_memory_is_linear(target):
    """What the graph holds is inputs, output, statistics: nothing of seqlen_q × seqlen_k."""
    tensors = qkv(target, batch=1, seqlen_q=300, seqlen_k=300, heads=2)
    saved: list = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        flash_attn_func(*tensors, dropout_p=0.1, causal=True, backend=target.backend)
    assert max(t.numel() for t in saved) <= 300 * 2 * 16


def test_second_order_is_right_or_refused(target):
    """Gradients of gradients: an error until they exist, never zeros in silence."""
    tensors = [torch.randn(1, 5, 2, 4, dtype=FP64, device=target.device, requires_grad=True) for _ in range(3)]
    w = torch.randn(1, 5, 2, 4, dtype=FP64, device=target.device)

    def penalty(function, inputs, upstream):
        grads = torch.autograd.grad(function(*inputs), inputs, upstream, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    try:
        got = penalty(lambda *x: flash_attn_func(*x, backend=target.backend), tensors, w)
    except (RuntimeError, NotImplementedError):
        return
    copies = [t.detach().cpu().requires_grad_() for t in tensors]
    for g, want in zip(got, penalty(lambda *x: oracle.attention(*x)[0], copies, w.cpu()), strict=True):
        torch.testing.assert_close(g.cpu(), want)


def test_large_logits_have_right_gradients(target):
    """At logits of 1e4 a gradient rebuilt from one fp32 LSE would be off by 50×."""
    case = Case(batch=1, seqlen_q=17, seqlen_k=65, dim=8, dim_v=8, scale=30.0, data="offset_k", seed=4).differentiable
    cases.check(case, target.device, target.backend)


def test_infinite_logits_differences(target):
    """Rows whose logits differ by more than exp can hold: one-hot P, gradients zero and not NaN."""
    k = torch.randn(1, 33, 1, 8)
    tensors = [t.to(target.device).requires_grad_() for t in (1e4 * k, 1e4 * k, torch.randn(1, 33, 1, 8))]
    out = flash_attn_func(*tensors, backend=target.backend)
    grads = torch.autograd.grad(out, tensors, torch.randn_like(out))
    copies = [t.detach().cpu().double().requires_grad_() for t in tensors]
    assert all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(out.cpu().double(), oracle.attention(*copies)[0], rtol=1e-6, atol=1e-6)


def test_zero_upstream_gradient_gives_exact_zeros(target):
    tensors = qkv(target, dtype=HALF)
    bias = torch.randn(33, 65, device=target.device, requires_grad=True)
    out = flash_attn_func(*tensors, bias=bias, causal=True, backend=target.backend)
    for grad in torch.autograd.grad(out, [*tensors, bias], torch.zeros_like(out)):
        assert (grad == 0).all()


def test_dk_dv_are_repeatable_and_dq_when_deterministic(target):
    tensors = qkv(target, seqlen_q=257, seqlen_k=300)
    bias = torch.randn(1, 1, 1, 300, device=target.device, requires_grad=True)
    leaves = [*tensors, bias]
    out = flash_attn_func(*tensors, bias=bias, deterministic=True, backend=target.backend)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(5):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_activation_checkpointing_with_dropout(target):
    """Recomputation under checkpoint draws the same seed: the same loss and gradients as without."""
    tensors = qkv(target)

    def block(q, k, v):
        return flash_attn_func(q, k, v, dropout_p=0.3, backend=target.backend) * 2

    results = []
    for checkpoint in (False, True):
        torch.manual_seed(5)
        run = (lambda *x: torch.utils.checkpoint.checkpoint(block, *x, use_reentrant=False)) if checkpoint else block
        out = run(*tensors)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize("hide", ("mask", "bias"))
@pytest.mark.parametrize("span", ((0, 200), (100, 300), (64, 128), (1, 300)), ids=str)
def test_whole_tiles_hidden_for_some_rows(hide, span, target):
    """Every third row sees nothing of a span of tiles, the first ones too: the running maximum starts at −inf there."""
    hidden = torch.zeros(65, 300, dtype=torch.bool)
    hidden[::3, span[0] : span[1]] = True
    hidden[7] = True
    option = ~hidden if hide == "mask" else torch.randn(65, 300).masked_fill(hidden, -math.inf)
    leaves = qkv(target, seqlen_q=65, seqlen_k=300)
    out, lse = flash_attn_func(*leaves, return_lse=True, backend=target.backend, **{hide: option.to(target.device)})
    twins = [t.detach().cpu().requires_grad_() for t in leaves]
    bias, options = (None, Options(mask=option)) if hide == "mask" else (option, Options())
    want, want_lse = oracle.attention(*twins, bias, None, options)
    torch.testing.assert_close(out.cpu(), want.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.cpu(), want_lse.float(), rtol=1e-5, atol=1e-6)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, dout)
    for g, w in zip(got, torch.autograd.grad(want, twins, dout.cpu().double()), strict=True):
        torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-5)
    assert (got[0][:, 7] == 0).all()


@pytest.mark.parametrize("order", ("rising", "falling"))
def test_running_maximum_over_many_tiles(order, target):
    """Logits that rise (or fall) by 30 a tile: every tile rescales what came before by e⁻³⁰, or is negligible."""
    k = torch.zeros(1, 700, 1, 8)
    k[0, :, 0, 0] = torch.arange(700) * (0.47 if order == "rising" else -0.47)
    tensors = [torch.ones(1, 70, 1, 8), k, torch.randn(1, 700, 1, 8)]
    leaves = [t.to(target.device).requires_grad_() for t in tensors]
    out, lse = flash_attn_func(*leaves, softmax_scale=1.0, return_lse=True, backend=target.backend)
    twins = [t.requires_grad_() for t in tensors]
    want, want_lse = oracle.attention(*twins, options=Options(scale=1.0))
    torch.testing.assert_close(out.cpu(), want.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), want_lse.float())
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, dout)
    for g, w in zip(got, torch.autograd.grad(want, twins, dout.cpu().double()), strict=True):
        torch.testing.assert_close(g.cpu(), w, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sizes", ((1, 1, 1, 1), (1, 4, 1, 1), (1, 1, 1, 300), (1, 1, 300, 1), (4, 4, 1, 300)), ids=str)
def test_bias_gradient_of_many_terms(sizes, target):
    """dbias of a broadcast bias sums up to 1.4 million dS: no worse than naive's pairwise sums."""
    q, k, v, dout = (torch.randn(4, 300, 4, 8) for _ in range(4))
    dlse = torch.rand(4, 4, 300)

    def ours(bias):
        bias = bias.to(target.device)
        tensors = (t.to(target.device) for t in (q, k, v))
        out, lse = flash_attn_func(*tensors, bias=bias, return_lse=True, backend=target.backend)
        return out.cpu(), lse.cpu()

    grads = []
    for function in (ours, lambda b: oracle.attention(q, k, v, b), lambda b: oracle.naive_attention(q, k, v, b)):
        bias = torch.zeros(sizes, requires_grad=True)
        out, lse = function(bias)
        grads.append(torch.autograd.grad((out, lse), bias, (dout.to(out.dtype), dlse.to(lse.dtype)))[0])
    oracle.assert_no_worse_than_naive(*grads, name="dbias")


@with_targets([Case(dtype=d, seqlen_q=n) for d in cases.NAMES for n in (4, 200)])
def test_nan_of_rows_that_see_nothing_reaches_nothing(case: Case, target: Target):
    """Their weights are zeros, which times NaN would be NaN: their dout, and on the CPU their q, count for nothing."""
    if target.backend == "wgmma":
        pytest.skip("bias and mask are mma_sync's")
    shape = (1, case.seqlen_q, 1, 8)
    q, k, v, dout = (torch.randn(shape).to(case.dtype).to(target.device) for _ in range(4))
    bias = torch.zeros(1, 1, case.seqlen_q, case.seqlen_q, dtype=case.dtype, device=target.device)
    mask = torch.ones(case.seqlen_q, case.seqlen_q, dtype=torch.bool, device=target.device)
    mask[0] = False

    def gradients(q: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out = flash_attn_func(*leaves[:3], bias=leaves[3], mask=mask, backend=target.backend)
        return torch.autograd.grad(out, leaves, dout)

    want = gradients(q, dout)
    dout[:, 0] = math.nan
    if target.backend == "auto":
        q[:, 0] = math.nan
    for found, expected in zip(gradients(q, dout), want, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", cases.NAMES)
def test_keys_without_queries_get_zeros(dtype: torch.dtype):
    """No query head, but key heads: nothing writes dk and dv, and memory that was used before is no zero."""
    used = torch.full((2, 7, 1, 8), math.nan, dtype=dtype)
    q = torch.randn(2, 5, 0, 8).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 7, 1, 8).to(dtype).requires_grad_() for _ in range(2))
    out = flash_attn_func(q, k, v)
    del used
    assert all((x == 0).all() for x in torch.autograd.grad(out, (k, v), torch.ones_like(out)))
