"""modules.mha and flash_attention: against formulas, and the fused modules against the plain ones."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
from torch import Tensor, nn

from flash_attn import flash_attention
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attention import FlashAttention, FlashMHA
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.modules import mha
from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)

DOUBLE = dict(dtype=torch.float64)
SLOPES = torch.tensor([0.5, 0.125, 0.25, 1.0])


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, slopes: Tensor | None = None) -> Tensor:
    """Plain attention, (batch, rows, heads, dim); visible broadcasts to (batch, heads, rows, columns)."""
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) / math.sqrt(q.shape[-1])
    rows, columns = scores.shape[-2:]
    if slopes is not None:
        distance = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(group, 2))


def padding(*real: int, seqlen: int) -> Tensor:
    return torch.arange(seqlen) < torch.tensor(real)[:, None]


def causal(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)


def test_alibi_slopes() -> None:
    assert get_alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert get_alibi_slopes(1) == [2.0**-8] and get_alibi_slopes(0) == []
    twelve = get_alibi_slopes(12)
    assert twelve[:8] == get_alibi_slopes(8) and twelve[8:] == get_alibi_slopes(16)[:8:2]
    assert all(len(get_alibi_slopes(n)) == n for n in range(1, 70))


SELF_OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(2, 1)),
    "alibi": dict(causal=True, alibi_slopes=SLOPES),
    "scale": dict(softmax_scale=0.2),
}


@pytest.mark.parametrize("name", SELF_OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads_k", [4, 2, 1])
def test_fused_self_attention_equals_the_plain_one(name: str, masked: bool, heads_k: int) -> None:
    fused, plain = FlashSelfAttention(**SELF_OPTIONS[name]), SelfAttention(**SELF_OPTIONS[name])
    mask = padding(6, 4, seqlen=6) if masked else None
    if heads_k == 4:
        qkv, heads = torch.randn(2, 6, 3, 4, 8, **DOUBLE, requires_grad=True), None
    else:
        qkv, heads = torch.randn(2, 6, 4 + 2 * heads_k, 8, **DOUBLE, requires_grad=True), 4
    outs = [module(qkv, key_padding_mask=mask, num_heads_q=heads) for module in (fused, plain)]
    torch.testing.assert_close(*outs)
    gradients = [torch.autograd.grad(out, qkv, torch.ones_like(out).cumsum(1)) for out in outs]
    torch.testing.assert_close(*gradients)


def test_self_attention_by_formula() -> None:
    qkv = torch.randn(2, 6, 3, 4, 8, **DOUBLE)
    q, k, v = qkv.unbind(2)
    mask = padding(6, 3, seqlen=6)
    for module in (FlashSelfAttention(True, alibi_slopes=SLOPES), SelfAttention(True, alibi_slopes=SLOPES)):
        expected = attend(q, k, v, causal(6, 6) & mask[:, None, None], SLOPES)
        torch.testing.assert_close(module(qkv, key_padding_mask=mask), expected)
        expected = attend(q, k, v, None, SLOPES)
        torch.testing.assert_close(module(qkv, causal=False), expected)
    window = causal(6, 6) & ~causal(6, 6).tril(-3)
    torch.testing.assert_close(FlashSelfAttention(window_size=(2, 0))(qkv), attend(q, k, v, window))


@pytest.mark.parametrize("kind", [FlashCrossAttention, CrossAttention])
@pytest.mark.parametrize("rows", [3, 8])
def test_cross_attention_by_formula(kind: type[nn.Module], rows: int) -> None:
    q, kv = torch.randn(2, rows, 4, 8, **DOUBLE), torch.randn(2, 5, 2, 2, 8, **DOUBLE)
    k, v = kv.unbind(2)
    torch.testing.assert_close(kind()(q, kv), attend(q, k, v))
    torch.testing.assert_close(kind(causal=True)(q, kv), attend(q, k, v, causal(rows, 5)))
    torch.testing.assert_close(kind(causal=True)(q, kv, causal=False), attend(q, k, v))
    mask = torch.tensor([[True, True, False, True, False], [False] * 5])  # nothing to see: zeros
    torch.testing.assert_close(kind()(q, kv, key_padding_mask=mask), attend(q, k, v, mask[:, None, None]))
    # With positions, keys that are padding do not exist.
    expected = torch.zeros_like(q)
    real = mask[0]
    expected[:1] = attend(q[:1], k[:1, real], v[:1, real], causal(rows, 3), SLOPES)
    module = kind(causal=True, alibi_slopes=SLOPES)
    torch.testing.assert_close(module(q, kv, key_padding_mask=mask), expected)


def test_varlen_equals_padded() -> None:
    mask = padding(6, 2, 5, seqlen=6)
    qkv = torch.randn(3, 6, 3, 4, 8, **DOUBLE)
    rows, indices, cu_seqlens, max_seqlen, _ = unpad_input(qkv, mask)
    module = FlashSelfAttention(causal=True, window_size=(3, -1), alibi_slopes=SLOPES)
    packed = pad_input(module(rows, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen), indices, 3, 6)
    real = mask[:, :, None, None]
    torch.testing.assert_close(packed, module(qkv, key_padding_mask=mask) * real)
    cross = FlashCrossAttention(causal=True, window_size=(3, -1), alibi_slopes=SLOPES)
    out = cross(rows[:, 0], rows[:, 1:], None, cu_seqlens, max_seqlen, cu_seqlens, max_seqlen)
    torch.testing.assert_close(pad_input(out, indices, 3, 6), packed)


@pytest.mark.parametrize("kind", [FlashSelfAttention, SelfAttention])
def test_dropout_is_for_training(kind: type[nn.Module]) -> None:
    module = kind(attention_dropout=0.5)
    qkv = torch.randn(1, 8, 3, 2, 8, **DOUBLE)
    torch.manual_seed(1)
    first = module(qkv)
    torch.manual_seed(1)
    assert torch.equal(first, module(qkv)) and not torch.equal(first, module(qkv))
    module.eval()
    torch.testing.assert_close(module(qkv), attend(*qkv.unbind(2)))
    module.train().drop.p = 1.0
    assert (module(qkv) == 0).all()


def test_slopes_are_not_cast() -> None:
    module = FlashSelfAttention(causal=True, alibi_slopes=torch.tensor(get_alibi_slopes(6))).to(torch.bfloat16)
    assert module.alibi_slopes.dtype == torch.float32 and module.alibi_slopes.tolist() == pytest.approx(
        get_alibi_slopes(6)
    )
    assert module(torch.randn(1, 4, 3, 6, 8, dtype=torch.bfloat16)).isfinite().all()
    assert not module.state_dict()
    from_meta = MHA(16, 4, use_alibi=True, device="meta").to_empty(device="cpu")
    assert from_meta.inner_attn.alibi_slopes.tolist() == pytest.approx(get_alibi_slopes(4))


# ---- MHA ------------------------------------------------------------------------------------------------------------

MHA_OPTIONS = {
    "plain": {},
    "no biases": dict(qkv_proj_bias=False, out_proj_bias=False),
    "causal GQA": dict(num_heads_kv=2, causal=True),
    "MQA, scale": dict(num_heads_kv=1, softmax_scale=0.3),
    "rotary": dict(rotary_emb_dim=4, causal=True),
    "rotary GQA interleaved": dict(rotary_emb_dim=8, rotary_emb_interleaved=True, rotary_emb_base=50.0, num_heads_kv=2),
    "xpos": dict(rotary_emb_dim=8, rotary_emb_scale_base=16.0, causal=True),
    "alibi": dict(use_alibi=True, causal=True),
    "window GQA": dict(window_size=(2, 2), num_heads_kv=2),
    "cross": dict(cross_attn=True),
    "cross GQA alibi": dict(cross_attn=True, num_heads_kv=2, use_alibi=True, causal=True),
}


@pytest.mark.parametrize("name", MHA_OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_mha_fused_plain_and_checkpointed_agree(name: str, masked: bool) -> None:
    options = MHA_OPTIONS[name]
    fused = MHA(32, 4, **options, **DOUBLE)
    plain = MHA(32, 4, **options, use_flash_attn=False, **DOUBLE)
    saving = MHA(32, 4, **options, checkpointing=True, return_residual=True, **DOUBLE)
    for other in (plain, saving):
        other.load_state_dict(fused.state_dict())
    x = torch.randn(2, 7, 32, **DOUBLE, requires_grad=True)
    x_kv = torch.randn(2, 9, 32, **DOUBLE) if "cross" in name else None
    mask = padding(5, 7 if x_kv is None else 9, seqlen=7 if x_kv is None else 9) if masked else None
    expected = fused(x, x_kv, mask)
    residual = saving(x, x_kv, mask)
    assert residual[1] is x
    wanted = torch.autograd.grad(expected.square().sum(), [x, *fused.parameters()])
    for module, out in ((plain, plain(x, x_kv, mask)), (saving, residual[0])):
        torch.testing.assert_close(out, expected)
        gradients = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize("name", [name for name in MHA_OPTIONS if name != "xpos"])
def test_mha_by_formula(name: str) -> None:
    options = MHA_OPTIONS[name]
    module = MHA(32, 4, **options, **DOUBLE)
    x, heads_k = torch.randn(2, 7, 32, **DOUBLE), options.get("num_heads_kv", 4)
    if options.get("cross_attn"):
        x_kv = torch.randn(2, 9, 32, **DOUBLE)
        q = module.Wq(x).view(2, 7, 4, 8)
        k, v = module.Wkv(x_kv).view(2, 9, 2, heads_k, 8).unbind(2)
        out = module(x, x_kv)
    else:
        q, k, v = module.Wqkv(x).view(2, 7, 4 + 2 * heads_k, 8).split((4, heads_k, heads_k), 2)
        out = module(x)
    if rotary := options.get("rotary_emb_dim", 0):
        base = options.get("rotary_emb_base", 10000.0)
        frequency = (base ** (-torch.arange(0, rotary, 2) / rotary)).double()
        angle = torch.arange(7, **DOUBLE)[:, None] * frequency
        q, k = (apply_rotary_emb(t, angle.cos(), angle.sin(), "interleaved" in name) for t in (q, k))
    columns = k.shape[1]
    visible = causal(7, columns) if options.get("causal") else torch.ones(7, columns, dtype=torch.bool)
    if "window_size" in options:
        visible = (torch.arange(7)[:, None] - torch.arange(7)).abs() <= 2
    slopes = torch.tensor(get_alibi_slopes(4)) if options.get("use_alibi") else None
    if "softmax_scale" in options:
        q = q * options["softmax_scale"] * math.sqrt(8)
    expected = module.out_proj(attend(q, k, v, visible, slopes).flatten(2))
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)  # frequencies are fp32


@pytest.mark.parametrize("name", ["plain", "causal GQA", "rotary", "rotary GQA interleaved", "alibi", "window GQA"])
def test_mha_varlen_equals_padded(name: str) -> None:
    module = MHA(32, 4, **MHA_OPTIONS[name], **DOUBLE)
    mask = padding(6, 2, 5, seqlen=6)
    x = torch.randn(3, 6, 32, **DOUBLE)
    rows, indices, cu_seqlens, max_seqlen, _ = unpad_input(x, mask)
    packed = module(rows, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    torch.testing.assert_close(packed, module(x, key_padding_mask=mask).flatten(0, 1)[indices])


def test_mha_cross_varlen_subset_and_default_keys() -> None:
    module = MHA(32, 4, cross_attn=True, num_heads_kv=2, **DOUBLE)
    x, x_kv = torch.randn(2, 6, 32, **DOUBLE), torch.randn(2, 9, 32, **DOUBLE)
    expected = module(x, x_kv)
    cu_q, cu_k = torch.tensor([0, 6, 12]), torch.tensor([0, 9, 18])
    packed = module(
        x.flatten(0, 1), x_kv.flatten(0, 1), cu_seqlens=cu_q, max_seqlen=6, cu_seqlens_k=cu_k, max_seqlen_k=9
    )
    torch.testing.assert_close(packed, expected.flatten(0, 1))
    torch.testing.assert_close(module(x, x_kv, mixer_subset=slice(0, 1)), expected[:, :1])
    torch.testing.assert_close(module(x, x_kv, mixer_subset=[3, 0]), expected[:, [3, 0]])
    torch.testing.assert_close(module(x), module(x, x))


def test_mha_checkpointing_with_dropout() -> None:
    module = MHA(32, 4, dropout=0.4, **DOUBLE)
    saving = copy.deepcopy(module)
    saving.checkpointing = True
    x = torch.randn(2, 9, 32, **DOUBLE, requires_grad=True)
    gradients = []
    for each in (module, saving):
        torch.manual_seed(3)
        gradients.append(torch.autograd.grad(each(x).square().sum(), [x, *each.parameters()]))
    torch.testing.assert_close(*gradients)


def test_mha_state_dict_names() -> None:
    names = {"Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias"}
    module = MHA(32, 4, rotary_emb_dim=8, use_alibi=True, layer_idx=3)
    assert set(module.state_dict()) == names and module.layer_idx == 3
    assert {name for name, _ in module.named_children()} == {
        "Wqkv", "rotary_emb", "inner_attn", "inner_cross_attn", "out_proj"
    }  # fmt: skip
    assert set(MHA(32, 4, cross_attn=True, qkv_proj_bias=False, out_proj_bias=False).state_dict()) == {
        "Wq.weight", "Wkv.weight", "out_proj.weight"
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_mha_in_other_dtypes_and_autocast(dtype: torch.dtype) -> None:
    module = MHA(32, 4, num_heads_kv=2, rotary_emb_dim=8, causal=True, dtype=dtype)
    x = torch.randn(2, 5, 32, dtype=dtype, requires_grad=True)
    out = module(x)
    out.sum().backward()
    assert out.dtype == dtype and x.grad.isfinite().all()
    expected = copy.deepcopy(module).double()(x.double())
    torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)
    if dtype == torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            low = module(x)
        assert low.dtype == torch.bfloat16
        torch.testing.assert_close(low.double(), expected, rtol=0.03, atol=0.03)


def test_mha_compiles_without_graph_break() -> None:
    module = MHA(16, 2, num_heads_kv=1, rotary_emb_dim=4, causal=True)
    compiled = torch.compile(lambda x: module(x), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 16, requires_grad=True)
    gradients = [torch.autograd.grad(function(x).square().sum(), x) for function in (module, compiled)]
    torch.testing.assert_close(*gradients)


WRONG = {
    "dwconv": (NotImplementedError, lambda: MHA(8, 2, dwconv=True)),
    "fused_bias_fc": (NotImplementedError, lambda: MHA(8, 2, fused_bias_fc=True)),
    "rotary_emb_dim": (NotImplementedError, lambda: MHA(8, 2, cross_attn=True, rotary_emb_dim=2)),
    "num_heads_kv": (ValueError, lambda: MHA(8, 2, num_heads_kv=3)),
    "embed_dim": (ValueError, lambda: MHA(9, 2)),
    "inference_params": (NotImplementedError, lambda: MHA(8, 2)(torch.zeros(1, 3, 8), inference_params=object())),
    "cache": (NotImplementedError, lambda: MHA(8, 2).allocate_inference_cache(1, 4)),
    "x_kv": (ValueError, lambda: MHA(8, 2)(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))),
    "mixer_subset": (ValueError, lambda: MHA(8, 2)(torch.zeros(1, 3, 8), mixer_subset=[0])),
    "cu_seqlens.*use_flash": (
        NotImplementedError,
        lambda: MHA(8, 2, use_flash_attn=False)(torch.zeros(3, 8), cu_seqlens=torch.tensor([0, 3]), max_seqlen=3),
    ),
    "max_seqlen must": (ValueError, lambda: FlashSelfAttention()(torch.zeros(3, 3, 1, 8), None, torch.tensor([0, 3]))),
    "all or none": (
        ValueError,
        lambda: FlashCrossAttention()(torch.zeros(3, 1, 8), torch.zeros(3, 2, 1, 8), None, torch.tensor([0, 3]), 3),
    ),
    "key_padding_mask": (
        ValueError,
        lambda: FlashSelfAttention()(
            torch.zeros(3, 3, 1, 8), None, torch.tensor([0, 3]), 3, key_padding_mask=torch.ones(1, 3)
        ),
    ),
    "qkv must be": (RuntimeError, lambda: SelfAttention()(torch.zeros(1, 3, 2, 1, 8))),
    "qkv must have": (RuntimeError, lambda: SelfAttention()(torch.zeros(1, 3, 5, 8), num_heads_q=2)),
    "batch_first": (NotImplementedError, lambda: FlashMHA(8, 2, batch_first=False)),
    "embed_dim must be": (ValueError, lambda: FlashMHA(9, 2)),
    "need_weights": (NotImplementedError, lambda: FlashMHA(8, 2)(torch.zeros(1, 3, 8), need_weights=True)),
    "max_s": (ValueError, lambda: FlashAttention()(torch.zeros(3, 3, 1, 8), cu_seqlens=torch.tensor([0, 3]))),
    "key_padding_mask must": (
        ValueError,
        lambda: FlashAttention()(torch.zeros(3, 3, 1, 8), torch.ones(1, 3), False, torch.tensor([0, 3]), 3),
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message: str) -> None:
    error, call = WRONG[message]
    with pytest.raises(error, match=message):
        call()


# ---- 1.x ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_attention(is_causal: bool) -> None:
    module = FlashAttention(softmax_scale=None, attention_dropout=0.3).eval()
    qkv = torch.randn(2, 6, 3, 4, 8, **DOUBLE)
    visible = causal(6, 6) if is_causal else torch.ones(6, 6, dtype=torch.bool)
    out, weights = module(qkv, causal=is_causal)
    assert weights is None
    torch.testing.assert_close(out, attend(*qkv.unbind(2), visible))
    packed, _ = module(qkv.flatten(0, 1), causal=is_causal, cu_seqlens=torch.tensor([0, 6, 12]), max_s=6)
    torch.testing.assert_close(packed.view_as(out), out)
    mask = padding(4, 6, seqlen=6)
    qkv[~mask] = math.nan
    qkv.requires_grad_()
    padded, _ = module(qkv, mask, is_causal)
    for b, real in enumerate((4, 6)):
        q, k, v = qkv[b : b + 1, :real].unbind(2)
        torch.testing.assert_close(padded[b : b + 1, :real], attend(q, k, v, visible[:real, :real]))
    assert (padded[0, 4:] == 0).all()
    (gradient,) = torch.autograd.grad(padded.sum(), qkv)
    assert (gradient[0, 4:] == 0).all() and gradient.isfinite().all()
    assert not torch.equal(module.train()(qkv, mask)[0], module(qkv, mask)[0])


def test_flash_mha() -> None:
    module = FlashMHA(32, 4, causal=True, **DOUBLE)
    assert set(module.state_dict()) == {"Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias"}
    assert isinstance(module.inner_attn, FlashAttention)
    modern = MHA(32, 4, causal=True, **DOUBLE)
    modern.load_state_dict(module.state_dict())
    x = torch.randn(2, 6, 32, **DOUBLE)
    y, weights = module(x)
    assert weights is None
    torch.testing.assert_close(y, modern(x))
    mask = padding(6, 3, seqlen=6)
    torch.testing.assert_close(module(x, mask)[0][mask], modern(x, key_padding_mask=mask)[mask])


ATTENTION = "causal=False, softmax_scale=None, attention_dropout=0.0"
SIGNATURES = {
    "get_alibi_slopes": "nheads",
    "FlashSelfAttention": f"{ATTENTION}, window_size=(-1, -1), alibi_slopes=None, deterministic=False",
    "FlashSelfAttention.forward": "self, qkv, causal=None, cu_seqlens=None, max_seqlen=None, *, key_padding_mask=None, "
    "num_heads_q=None, block_mask=None",
    "FlashCrossAttention": f"{ATTENTION}, alibi_slopes=None, window_size=(-1, -1), deterministic=False",
    "FlashCrossAttention.forward": "self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None, "
    "max_seqlen_k=None, *, key_padding_mask=None, block_mask=None",
    "SelfAttention": f"{ATTENTION}, window_size=(-1, -1), alibi_slopes=None",
    "SelfAttention.forward": "self, qkv, causal=None, key_padding_mask=None, *, num_heads_q=None",
    "CrossAttention": f"{ATTENTION}, alibi_slopes=None, window_size=(-1, -1)",
    "CrossAttention.forward": "self, q, kv, causal=None, key_padding_mask=None",
    "MHA": "embed_dim, num_heads, num_heads_kv=None, cross_attn=False, qkv_proj_bias=True, out_proj_bias=True, "
    "dropout=0.0, softmax_scale=None, causal=False, layer_idx=None, dwconv=False, rotary_emb_dim=0, "
    "rotary_emb_base=10000.0, rotary_emb_scale_base=None, rotary_emb_interleaved=False, use_alibi=False, "
    "window_size=(-1, -1), fused_bias_fc=False, use_flash_attn=True, return_residual=False, checkpointing=False, "
    "device=None, dtype=None",
    "MHA.forward": "self, x, x_kv=None, key_padding_mask=None, cu_seqlens=None, max_seqlen=None, mixer_subset=None, "
    "inference_params=None, *, cu_seqlens_k=None, max_seqlen_k=None, block_mask=None",
    "FlashAttention": "softmax_scale=None, attention_dropout=0.0",
    "FlashAttention.forward": "self, qkv, key_padding_mask=None, causal=False, cu_seqlens=None, max_s=None, "
    "need_weights=False",
    "FlashMHA": "embed_dim, num_heads, bias=True, batch_first=True, attention_dropout=0.0, causal=False, device=None, "
    "dtype=None",
    "FlashMHA.forward": "self, x, key_padding_mask=None, need_weights=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    owner, _, method = name.partition(".")
    function = getattr(mha if hasattr(mha, owner) else flash_attention, owner)
    signature = inspect.signature(getattr(function, method) if method else function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    assert shown == f"({SIGNATURES[name]})"
