"""Block-sparse names of flash-attn 1.x, and what users of block-sparse attention reported elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_attn import BlockMask, attention_probs, explain, flash_attn_func, standard_attention, tiled_attention
from flash_attn.flash_attn_interface import flash_attn_unpadded_qkvpacked_func
from flash_attn.flash_blocksparse_attention import FlashBlocksparseAttention, FlashBlocksparseMHA
from flash_attn.flash_blocksparse_attn_interface import (
    convert_blockmask,
    flash_blocksparse_attn_func,
    revert_blockmask,
)
from flash_attn.modules.mha import MHA, FlashCrossAttention, FlashSelfAttention

LENGTHS = (300, 17, 0, 513)
CU = torch.tensor([0, 300, 317, 317, 830], dtype=torch.int32)


def elements(blocks: Tensor, n: int, size: tuple[int, int] = (16, 256)) -> Tensor:
    return blocks.bool().repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)[..., :n, :n]


def by_sequence(qkv: Tensor, blocks: Tensor, causal: bool, scale: float | None = None) -> Tensor:
    """Plain attention of each sequence with the mask by elements, rows that see nothing 0."""
    parts = []
    for start, length in zip(CU.tolist(), LENGTHS, strict=False):
        q, k, v = (x.transpose(0, 1) for x in qkv[start : start + length].unbind(1))
        visible = elements(blocks, length)
        visible = visible.tril() if causal else visible
        s = (q @ k.mT) * (qkv.shape[-1] ** -0.5 if scale is None else scale)
        p = s.masked_fill(~visible, -math.inf).softmax(-1)
        parts.append((torch.where(visible, p, 0.0) @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dim", (32, 128))
def test_function(causal, dim):
    qkv = torch.randn(830, 3, 2, dim, dtype=torch.float64, requires_grad=True)
    blocks = (torch.rand(40, 4) < 0.5).int()  # larger than needed
    blocks[3] = 0
    out = flash_blocksparse_attn_func(qkv, CU, blocks, 0.0, 513, causal=causal)
    want = by_sequence(qkv, blocks, causal)
    torch.testing.assert_close(out, want)
    gradients = [torch.autograd.grad(x.sin().sum(), qkv)[0] for x in (out, want)]
    torch.testing.assert_close(*gradients)
    half = flash_blocksparse_attn_func(qkv.half(), CU, blocks.bool(), 0.0, 513, causal=causal)
    assert half.dtype == torch.float16 and (half - want).abs().max() < 0.01
    converted = convert_blockmask(blocks, causal)
    again = flash_blocksparse_attn_func(qkv, CU, converted, 0.0, 513, causal=causal, convert_mask=False)
    assert torch.equal(again, out)


def test_all_three_results():
    """out, S_dmask, lse: in this order."""
    qkv, ones = torch.randn(830, 3, 2, 16), torch.ones(33, 3)
    out, s_dmask, lse = flash_blocksparse_attn_func(qkv, CU, ones, 0.1, 513, 0.5, True, True)
    assert out.shape == (830, 2, 16) and lse.shape == (4, 2, 528) and s_dmask.shape[:2] == (4, 2)
    torch.manual_seed(0)
    plain = flash_attn_unpadded_qkvpacked_func(qkv, CU, 513, 0.1, 0.5, True, True)
    torch.manual_seed(0)
    sparse = flash_blocksparse_attn_func(qkv, CU, ones, 0.1, 513, 0.5, True, True)
    for got, want in zip(sparse, (plain[0], plain[2], plain[1]), strict=True):
        torch.testing.assert_close(got, want)


def test_convert():
    """The lists of 1.x: 4 · block, + 1 for the first of its row, + 2 for the last."""
    blocks = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
    want = torch.tensor([[1, 13, -1, -1], [8 + 3, 12, -1, -1], [2, 12 + 2, -1, -1]], dtype=torch.int32)
    assert torch.equal(convert_blockmask(blocks, False), want)
    assert torch.equal(revert_blockmask(want), blocks.bool())


class Layout:
    """A sparsity config: what 1.x instantiated by hydra."""

    def __init__(self, density: float = 0.5, heads: int | None = None) -> None:
        self.density, self.heads = density, heads

    def make_layout(self, max_seq_length: int) -> Tensor:
        shape = (max_seq_length // 16, max_seq_length // 256)
        g = torch.Generator().manual_seed(3)
        layout = torch.rand(shape if self.heads is None else (self.heads, *shape), generator=g) < self.density
        return layout.to(torch.int32)


class Padding:
    def __init__(self, real: Tensor) -> None:
        self.bool_matrix = real


@pytest.mark.parametrize("heads", (None, 2))
def test_attention_module(heads):
    module = FlashBlocksparseAttention(Layout(0.5, heads), max_seq_length=500)
    assert module.layout.shape[-2:] == (32, 2) and module.max_seq_length == 512
    qkv = torch.randn(2, 300, 3, 2, 16)
    out, weights = module(qkv, causal=True)
    visible = elements(module.layout, 300).tril()
    assert weights is None
    torch.testing.assert_close(out, flash_attn_func(*qkv.unbind(2), mask=visible))
    real = torch.arange(300) < torch.tensor([[300], [210]])
    for mask in (real, Padding(real)):
        out, _ = module(qkv, key_padding_mask=mask)
        want = flash_attn_func(*qkv.unbind(2), mask=elements(module.layout, 300), seqused_k=real.sum(1))
        torch.testing.assert_close(out, want * real[..., None, None])
    packed, _ = module(qkv.flatten(0, 1), cu_seqlens=torch.tensor([0, 300, 600]), max_s=300)
    torch.testing.assert_close(packed.unflatten(0, (2, 300)), module(qkv)[0])
    assert module(qkv[:, :0])[0].shape == (2, 0, 2, 16) and module(qkv[:0])[0].shape == (0, 300, 2, 16)


def test_mha_module():
    config = {"_target_": f"{Layout.__module__}.Layout", "density": 0.6}
    module = FlashBlocksparseMHA(64, 2, config, causal=True, max_seq_length=512)
    assert {n for n in module.state_dict() if "attn" in n} == {"inner_attn.layout", "inner_attn.blockmask_converted"}
    x = torch.randn(2, 270, 64, requires_grad=True)
    y, _ = module(x, None, None)
    y.sum().backward()
    qkv = module.Wqkv(x).unflatten(-1, (3, 2, 32))
    visible = elements(module.inner_attn.layout, 270).tril()
    torch.testing.assert_close(y, module.out_proj(flash_attn_func(*qkv.unbind(2), mask=visible).flatten(-2)))
    assert x.grad.isfinite().all()


QKV = torch.zeros(20, 3, 2, 8)
EDGES = torch.tensor([0, 20])
ONES = torch.ones(2, 1)
REFUSED = {
    "too few rows": (lambda: flash_blocksparse_attn_func(QKV, EDGES, ONES[:1], 0.0, 20), RuntimeError, "2 × 1"),
    "no tensor": (lambda: flash_blocksparse_attn_func(QKV, EDGES, [[1]], 0.0, 20), TypeError, "got list"),
    "nothing": (lambda: flash_blocksparse_attn_func(QKV, EDGES, None, 0.0, 20), TypeError, "got NoneType"),
    "dense qkv": (lambda: flash_blocksparse_attn_func(QKV[None], EDGES, ONES, 0.0, 20), RuntimeError, "qkv"),
    "dropout": (lambda: flash_blocksparse_attn_func(QKV, EDGES, ONES, 2.0, 20), ValueError, "dropout_p"),
    "weights": (lambda: FlashBlocksparseAttention(Layout())(QKV[None], need_weights=True), NotImplementedError, ""),
    "attn_mask": (lambda: FlashBlocksparseAttention(Layout())(QKV[None], ONES), NotImplementedError, "attn_mask"),
    "too long": (lambda: FlashBlocksparseAttention(Layout(), max_seq_length=9)(torch.zeros(1, 257, 3, 2, 8)),
                 ValueError, "257"),
    "only cu_seqlens": (lambda: FlashBlocksparseAttention(Layout())(QKV, cu_seqlens=EDGES), ValueError, "max_s"),
    "float lists": (lambda: flash_blocksparse_attn_func(QKV, EDGES, ONES.t(), 0.0, 20, convert_mask=False),
                    RuntimeError, "convert_blockmask makes them"),
    "padding of floats": (lambda: FlashBlocksparseAttention(Layout())(QKV[None], key_padding_mask=torch.zeros(1, 20)),
                          RuntimeError, "key_padding_mask must be bool or integer"),
    "no layout": (lambda: FlashBlocksparseAttention(None), TypeError, "make_layout"),
    "no target": (lambda: FlashBlocksparseAttention({"density": 1}), TypeError, "_target_"),
    "convert 3-d": (lambda: convert_blockmask(ONES[None], False), RuntimeError, "blockmask"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, words = REFUSED[name]
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error and words in str(caught.value)


# ---- Where else a block mask can be given ---------------------------------------------------------------------------


def test_other_functions_and_modules():
    qkv = torch.randn(2, 70, 3, 4, 8)
    q, k, v = qkv.unbind(2)
    mask = BlockMask(torch.rand(1, 4, 5, 3) < 0.6, 70, 70, (16, 32), element_mask=torch.rand(70, 70) < 0.8)
    dense = mask.to_dense()
    want, lse = flash_attn_func(q, k, v, mask=dense, causal=True, return_lse=True)
    for function in (flash_attn_func, standard_attention, tiled_attention):
        torch.testing.assert_close(function(q, k, v, block_mask=mask, causal=True), want)
    torch.testing.assert_close(FlashSelfAttention(causal=True)(qkv, block_mask=mask), want)
    torch.testing.assert_close(FlashCrossAttention(causal=True)(q, qkv[:, :, 1:], block_mask=mask), want)
    rows = torch.tensor([69, 0, 20])
    options = dict(rows=rows, seqlen_q=70, causal=True)
    got = attention_probs(q[:, rows], k, lse[:, :, rows], block_mask=mask, **options)
    torch.testing.assert_close(got, attention_probs(q[:, rows], k, lse[:, :, rows], mask=dense, **options))
    module = MHA(32, 4, causal=True)
    x = torch.randn(2, 70, 32)
    q, k, v = module.Wqkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
    want = module.out_proj(flash_attn_func(q, k, v, mask=dense, causal=True).flatten(-2))
    torch.testing.assert_close(module(x, block_mask=mask), want)
    assert explain(q, k, v, block_mask=mask).backend == "cpu"
    with pytest.raises(NotImplementedError, match="block_mask"):
        MHA(32, 4, use_flash_attn=False)(x, block_mask=mask)
    with pytest.raises(NotImplementedError, match="block_mask"):
        FlashCrossAttention(causal=True)(q, qkv[:, :, 1:], key_padding_mask=torch.ones(2, 70) > 0, block_mask=mask)


# ---- Reports --------------------------------------------------------------------------------------------------------


def test_t115_a_mask_of_ones_at_dim_128():
    q, k, v = (torch.randn(1, 1024, 1, 128, dtype=torch.float16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    mask = BlockMask(torch.ones(64, 4, dtype=torch.bool), 1024, 1024, (16, 256))
    outs = [flash_attn_func(q, k, v, block_mask=m) for m in (mask, None)]
    for got, want in zip(*(torch.autograd.grad(o, (q, k, v), dout) for o in outs), strict=True):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("valid", (16, 31, 48, 63, 64))
def test_t116_partly_filled_blocks(valid):
    """64-blocks of which `valid` rows and keys are real: finite, and the values of the mask by elements."""
    n = 256
    q, k, v = (torch.randn(1, n, 2, 128, requires_grad=True) for _ in range(3))
    inside = torch.arange(n) % 64 < valid
    mask = BlockMask(torch.rand(1, 2, 4, 4) < 0.5, n, n, 64, element_mask=inside[:, None] & inside)
    grads = []
    for options in (dict(block_mask=mask), dict(mask=mask.to_dense())):
        out = flash_attn_func(q, k, v, **options)
        grads.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, want in zip(*grads, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want)


def test_t118_a_mask_for_each_batch_and_head_with_elements():
    q, k, v = (torch.randn(3, 100, 4, 16, dtype=torch.float64) for _ in range(3))
    blocks, some = torch.rand(3, 4, 7, 4) < 0.5, torch.rand(3, 4, 100, 100) < 0.7
    mask = BlockMask(blocks, 100, 100, (16, 32), element_mask=some)
    want = standard_attention(q, k, v, mask=elements(blocks, 100, (16, 32)) & some)
    torch.testing.assert_close(flash_attn_func(q, k, v, block_mask=mask), want)


def test_t119_a_mask_larger_than_the_input_is_refused():
    q = torch.randn(2, 2, 1, 16)
    with pytest.raises(RuntimeError, match="block_mask.*128 × 256"):
        flash_attn_func(q, q, q, block_mask=BlockMask(torch.ones(1, 2, dtype=torch.bool), 128, 256))
