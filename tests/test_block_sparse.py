"""Attention with block masks: the values and gradients of the same mask given element by element."""

from __future__ import annotations

from dataclasses import replace

import cases
import pytest
import torch
from cases import Case

from flash_attn import BlockMask, flash_attn_func, flash_attn_varlen_func

SMALL = Case(heads=4, heads_k=2, seqlen_q=100, seqlen_k=135, grads="qkv")
LONG = Case(batch=1, heads=2, heads_k=1, seqlen_q=700, seqlen_k=1100, dim=32, dim_v=32, grads="qkv")
MASKS = ("bh 16x16 0.5", "1h 16x64 0.03", "b1 64x16 1.0", "11 32x48 0.0", "bh 48x32 rows", "bh 32x32 columns",
         "bh 16x32 one", "bh 128x128 0.5", "1h 256x64 0.6", "bh 32x64 0.6 e", "11 16x16 0.4 e")  # fmt: skip
OPTIONS = (
    dict(causal=True),
    dict(window=(20, 7)),
    dict(causal=True, window=(37, -1), softcap=3.0),
    dict(alibi="batch_heads", bias="bhqk", bias_fp32=True, grads="qkvb"),
    dict(bias="1hq1", bias_inf=True, mask="b1qk", grads="qkvb"),
    dict(sink=True, grads="qkvs", lse_grad=True),
    dict(dropout_p=0.3),
    dict(seqused_q=True, seqused_k=True, leftpad_q=True, leftpad_k=True),
    dict(leftpad_k=True, leftpad_q=True, causal=True, dropout_p=0.3, lse_grad=True),
    dict(varlen=True, trailing=3, slack=30, causal=True),
    dict(varlen=True, seqused_k=True, leftpad_q=True, leftpad_k=True, cu_dtype=torch.int64, sink=True, grads="qkvs"),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def chosen() -> list[Case]:
    """Every mask; every option with masks in turn; long sequences, where there are many tiles."""
    made = [replace(SMALL, blocks=mask, dtype=DTYPES[n % 2], seed=n) for n, mask in enumerate(MASKS)]
    for n, option in enumerate(OPTIONS):
        for m in range(2):
            mask = MASKS[(n + 5 * m) % len(MASKS)]
            made.append(replace(SMALL, **option, blocks=mask, dtype=DTYPES[(n + m) % 4], seed=n + 20 * m))
    for n, mask in enumerate(("1h 16x16 0.05", "1h 64x64 0.2 e", "11 128x128 0.3", "1h 128x256 rows")):
        made += [replace(LONG, blocks=mask, dtype=dtype, causal=n % 2 == 0, seed=n) for dtype in DTYPES[:2]]
    return made


@cases.with_targets(chosen())
def test_equals_the_mask_by_elements(case: Case, target: cases.Target):
    cases.check(case, target.device, target.backend)


# ---- What is refused ------------------------------------------------------------------------------------------------

Q = torch.zeros(2, 40, 4, 8)
BLOCKS = torch.ones(2, 4, 3, 2, dtype=torch.bool)  # of 16 × 32 for 40 queries and 40 keys


def made(blocks: object = BLOCKS, seqlen_q: object = 40, seqlen_k: object = 40, size: object = (16, 32), **options):
    return BlockMask(blocks, seqlen_q, seqlen_k, size, **options)


REFUSED = {
    "a tensor": (lambda: flash_attn_func(Q, Q, Q, block_mask=BLOCKS), TypeError, "block_mask", "Tensor"),
    "other lengths": (lambda: flash_attn_func(Q[:, :39], Q, Q, block_mask=made()), RuntimeError, "block_mask", "39"),
    "other keys": (lambda: flash_attn_func(Q, Q[:, :8], Q[:, :8], block_mask=made()), RuntimeError, "block_mask", "8"),
    "other batch": (lambda: flash_attn_func(Q[:1], Q[:1], Q[:1], block_mask=made()), RuntimeError, "block_mask", "2"),
    "heads of k": (lambda: flash_attn_func(Q, Q[:, :, :2], Q[:, :, :2], block_mask=made(BLOCKS[:, :2])), RuntimeError,
                   "block_mask", "2"),
    "other device": (lambda: flash_attn_func(Q, Q, Q, block_mask=made().to("meta")), RuntimeError, "block_mask",
                     "meta"),
    "max_seqlen": (lambda: flash_attn_varlen_func(Q[0], Q[0], Q[0], *[torch.tensor([0, 40])] * 2, 41, 40,
                                                  block_mask=made(BLOCKS[:1])), RuntimeError, "block_mask", "41"),
    "too few blocks": (lambda: made(BLOCKS[..., :1]), RuntimeError, "blocks", "(2, 4, 3, 1)"),
    "too many blocks": (lambda: made(seqlen_q=32), RuntimeError, "blocks", "2, 2"),
    "blocks of ints": (lambda: made(BLOCKS.int()), RuntimeError, "blocks", "int32"),
    "blocks of one axis": (lambda: made(BLOCKS[0, 0, 0]), RuntimeError, "blocks", "(2,)"),
    "blocks a list": (lambda: made([[True]]), TypeError, "blocks", "list"),
    "block size 8": (lambda: made(size=(8, 32)), ValueError, "block_size", "(8, 32)"),
    "block size 0": (lambda: made(size=(16, 0)), ValueError, "block_size", "0"),
    "block size 24": (lambda: made(size=24), ValueError, "block_size", "24"),
    "block size 3-d": (lambda: made(size=(16, 16, 16)), ValueError, "block_size", "16, 16, 16"),
    "block size text": (lambda: made(size="16"), ValueError, "block_size", "16"),
    "negative length": (lambda: made(seqlen_q=-1), ValueError, "seqlen_q", "-1"),
    "length 1.5": (lambda: made(seqlen_k=1.5), ValueError, "seqlen_k", "1.5"),
    "element mask of floats": (lambda: made(element_mask=torch.zeros(40, 40)), RuntimeError, "element_mask", "float32"),
    "element mask too short": (lambda: made(element_mask=torch.ones(39, 40, dtype=torch.bool)), RuntimeError,
                               "element_mask", "39"),
    "element mask of 3 heads": (lambda: made(element_mask=torch.ones(3, 40, 40, dtype=torch.bool)), RuntimeError,
                                "element_mask", "3"),
    "union of lengths": (lambda: made() | BlockMask.causal(40, 41, (16, 32)), ValueError, "seqlen_k", "41"),
    "union of block sizes": (lambda: made() | BlockMask.causal(40, 40, 16), ValueError, "block_size", "16"),
    "union of heads": (lambda: made() | made(BLOCKS[:, :3]), RuntimeError, "second mask", "3"),
    "dense of floats": (lambda: BlockMask.from_dense(torch.zeros(4, 4)), RuntimeError, "element_mask", "float32"),
    "stride 0": (lambda: BlockMask.strided(40, 40, (1, 1), 0), ValueError, "stride", "0"),
    "max_stride 3": (lambda: BlockMask.butterfly(40, 40, max_stride=3), ValueError, "max_stride", "3"),
    "window": (lambda: BlockMask.local(40, 40, (-2, 0)), ValueError, "window_size", "-2"),
    "global tokens": (lambda: BlockMask.longformer(40, 40, (1, 1), -1), ValueError, "global_tokens", "-1"),
    "even window": (lambda: BlockMask.bigbird(40, 40, window_blocks=2), ValueError, "window_blocks", "2"),
    "no heads": (lambda: BlockMask.bigbird(40, 40, heads=0), ValueError, "heads", "0"),
    "no flex": (lambda: BlockMask.from_flex(BLOCKS), TypeError, "flex", "Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    call, error, argument, value = REFUSED[name]
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error and argument in str(caught.value) and value in str(caught.value), str(caught.value)


def test_refused_on_meta_with_the_same_words():
    words = []
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError) as caught:
            q = Q.to(device)
            flash_attn_func(q[:, :39], q, q, block_mask=made().to(device))
        words.append(str(caught.value).replace("on meta", "on cpu"))
    assert words[0] == words[1]
    q = Q.to("meta")
    assert flash_attn_func(q, q, q, block_mask=made().to("meta")).shape == q.shape


def test_the_op_reads_nothing_outside_its_lists():
    """Called raw, with tensors that BlockMask would never build."""
    forward = torch.ops.flash_attn.attention_forward
    mask = made(element_mask=torch.arange(1600).view(40, 40) % 7 > 0)

    def call(**changes: torch.Tensor | None):
        lists = dict(block_kinds=mask.kinds, block_patterns=mask.patterns, key_lists=mask.key_lists,
                     query_lists=mask.query_lists)  # fmt: skip
        return forward(Q, Q, Q, None, None, 1.0, **{**lists, **changes})

    call()
    bad_count, bad_index, descending = mask.key_lists.clone(), mask.key_lists.clone(), mask.query_lists.clone()
    bad_count[0, 0, 0, 0], bad_index[0, 1, 2, 1], descending[1, 1, 1, 1] = 3, 2, 2
    for name, value in {
        "block_kinds": mask.kinds + 24 * 6, "key_lists": bad_count, "query_lists": descending,
        "block_patterns": mask.patterns[:0],
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match="block_kinds" if name == "block_patterns" else name):
            call(**{name: value})
    for name, value in {
        "key_lists": bad_index, "block_kinds": mask.kinds.long(), "block_patterns": None, "query_lists": mask.key_lists,
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError):
            call(**{name: value})


# ---- Derivatives and memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ("cpu", "reference"))
def test_gradcheck(backend: str):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 3, dtype=torch.float64, requires_grad=True) for n in (34, 37, 37))
    blocks = torch.tensor([[[1, 0, 1], [0, 0, 0], [1, 1, 0]], [[1, 1, 0], [0, 1, 0], [1, 0, 0]]]).bool()
    mask = BlockMask(blocks, 34, 37, 16, element_mask=torch.arange(34 * 37).view(34, 37) % 3 > 0)

    def attend(*x: torch.Tensor):
        return flash_attn_func(*x, block_mask=mask, backend=backend)

    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, (q, k, v), fast_mode=True)


def test_a_full_mask_is_no_mask_bit_for_bit():
    """One iterator. (Blocks of 192: other sizes may have other tiles, which sum in another order.)"""
    q = torch.randn(1, 600, 2, 64)
    want = flash_attn_func(q, q, q, causal=True)
    mask = BlockMask(torch.ones(4, 4, dtype=torch.bool), 600, 600, 192)
    assert torch.equal(flash_attn_func(q, q, q, causal=True, block_mask=mask), want)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_threads_change_nothing(dtype: torch.dtype):
    """Long rows first, whoever takes them."""
    q, k, v = (torch.randn(2, n, h, 32, dtype=dtype, requires_grad=True) for n, h in ((500, 4), (900, 2), (900, 2)))
    mask = BlockMask(torch.rand(2, 4, 16, 8) < torch.linspace(0, 1, 16)[:, None], 500, 900, (32, 128))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = flash_attn_func(q, k, v, block_mask=mask, causal=True)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_hidden_blocks_are_not_read():
    """NaN in keys that no query visits reaches nothing, but for those next to visited ones: a tile may hold both."""
    q, k, v = (torch.randn(1, 256, 1, 32, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        k[:, 64:96] = torch.nan
        v[:, 64:96] = torch.nan
    blocks = torch.ones(4, 4, dtype=torch.bool)
    blocks[:, 1] = False
    out = flash_attn_func(q, k, v, block_mask=BlockMask(blocks, 256, 256, 64))
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.isfinite().all() and all(g.isfinite().all() for g in gradients)
    assert (gradients[1][:, 64:128] == 0).all() and (gradients[2][:, 64:128] == 0).all()
