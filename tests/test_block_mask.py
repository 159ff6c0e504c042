"""`BlockMask` itself: what its tensors, builders and conversions say, against masks made element by element."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import flex_attention

from flash_attn import BlockMask, flash_attn_func

SHAPES = ((100, 75, (16, 32)), (64, 64, (16, 16)), (33, 129, (48, 16)), (128, 300, (32, 64)), (300, 20, (128, 128)))


def by_blocks(blocks: torch.Tensor, seqlen_q: int, seqlen_k: int, size: tuple[int, int]) -> torch.Tensor:
    wide = blocks.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)
    return wide[..., :seqlen_q, :seqlen_k]


def random_blocks(seqlen_q: int, seqlen_k: int, size: tuple[int, int]) -> torch.Tensor:
    return torch.rand(2, 3, math.ceil(seqlen_q / size[0]), math.ceil(seqlen_k / size[1])) < 0.4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_and_elements(shape):
    seqlen_q, seqlen_k, size = shape
    blocks = random_blocks(*shape)
    mask = BlockMask(blocks, *shape)
    visible = by_blocks(blocks, *shape)
    assert torch.equal(mask.to_dense(), visible) and torch.equal(mask.blocks, blocks)
    assert mask.block_size == size and mask.density() == pytest.approx(blocks.float().mean().item())
    elements = torch.rand(3, seqlen_q, seqlen_k) < 0.9
    elements[:, :40, :40] = True
    some = BlockMask(blocks, *shape, element_mask=elements)
    assert torch.equal(some.to_dense(), visible & elements)
    for m in range(blocks.shape[2]):  # what is full, hidden and partial is so
        for n in range(blocks.shape[3]):
            inside = (visible & elements)[..., m * size[0] : (m + 1) * size[0], n * size[1] : (n + 1) * size[1]]
            assert torch.equal(some.full_blocks[:, :, m, n], inside.flatten(-2).all(-1))
            assert torch.equal(some.blocks[:, :, m, n], inside.flatten(-2).any(-1))
    assert torch.equal(some.partial_blocks, some.blocks & ~some.full_blocks)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists(shape):
    """Both ways: a count, then the numbers of the visited blocks, ascending."""
    blocks = random_blocks(*shape)
    mask = BlockMask(blocks, *shape)
    for lists, visited in ((mask.key_lists, blocks), (mask.query_lists, blocks.mT)):
        assert lists.dtype == torch.int32 and lists.is_contiguous()
        for b, h, m in torch.cartesian_prod(*(torch.arange(n) for n in visited.shape[:3])).tolist():
            count = int(lists[b, h, m, 0])
            assert lists[b, h, m, 1 : 1 + count].tolist() == visited[b, h, m].nonzero().flatten().tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_union(shape):
    seqlen_q, seqlen_k, size = shape
    elements = [torch.rand(seqlen_q, seqlen_k) < p for p in (0.02, 0.05)]
    masks = [BlockMask.from_dense(e, size) for e in elements]
    assert torch.equal((masks[0] | masks[1]).to_dense()[0, 0], elements[0] | elements[1])
    blocks = BlockMask(random_blocks(*shape), *shape)
    assert torch.equal((blocks | masks[0] | masks[1]).to_dense(), blocks.to_dense() | elements[0] | elements[1])
    assert torch.equal((masks[0] | blocks).to_dense(), blocks.to_dense() | elements[0])


@pytest.mark.parametrize("shape", (*SHAPES, (0, 16, (16, 16)), (16, 0, (16, 16))), ids=str)
def test_causal(shape):
    seqlen_q, seqlen_k, size = shape
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    mask = BlockMask.causal(*shape)
    assert torch.equal(mask.to_dense()[0, 0], j <= i + seqlen_k - seqlen_q)
    assert mask.patterns.shape[0] <= (size[0] + size[1]) // math.gcd(*size)  # whatever the lengths


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", ((0, 0), (40, 3), (-1, 20), (5, -1), (0, 200)), ids=str)
def test_windows(shape, window):
    """Every block that holds an element of the window, and no other; the strided and longformer patterns add theirs."""
    seqlen_q, seqlen_k, size = shape
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    far = j - i - (seqlen_k - seqlen_q)
    inside = (window[0] < 0) | (far >= -window[0])
    inside = inside & ((window[1] < 0) | (far <= window[1]))
    touched = BlockMask.from_dense(inside & torch.ones(seqlen_q, seqlen_k, dtype=torch.bool), size).blocks
    assert torch.equal(BlockMask.local(seqlen_q, seqlen_k, window, size).blocks, touched)
    n = torch.arange(touched.shape[-1])
    assert torch.equal(BlockMask.strided(seqlen_q, seqlen_k, window, 3, size).blocks, touched | (n % 3 == 2))
    tokens = BlockMask.from_dense((i < 20) | (j < 20), size).blocks
    assert torch.equal(BlockMask.longformer(seqlen_q, seqlen_k, window, 20, size).blocks, touched | tokens)


@pytest.mark.parametrize("n", (1, 2, 7, 16, 64))
def test_butterfly(n):
    """The support of the product of the factors I + their off-diagonals, one by one: i and j differ in one bit."""
    blocks = BlockMask.butterfly(16 * n, 16 * n, 16).blocks[0, 0]
    assert torch.equal(blocks, torch.tensor([[bin(i ^ j).count("1") <= 1 for j in range(n)] for i in range(n)]))
    if n & (n - 1) == 0:
        assert BlockMask.butterfly(16 * n, 16 * n, 16).density() == (1 + math.log2(n)) / n
    near = BlockMask.butterfly(16 * n, 16 * n, 16, max_stride=4).blocks[0, 0]
    assert torch.equal(near, blocks & ((torch.arange(n)[:, None] ^ torch.arange(n)) <= 2))


def test_butterfly_of_other_shapes():
    """A block of the shorter axis gathers what the blocks that it stands for would visit."""
    square = BlockMask.butterfly(256, 256, 16).blocks
    assert torch.equal(BlockMask.butterfly(128, 256, 16).blocks, square.view(1, 1, 8, 2, 16).any(3))
    assert torch.equal(BlockMask.butterfly(256, 64, 16).blocks, square.view(1, 1, 16, 4, 4).any(4))


def test_bigbird():
    mask = BlockMask.bigbird(640, 640, heads=3, seed=5, block_size=32)
    blocks, i = mask.blocks[0], torch.arange(20)
    near = (i[:, None] - i).abs() <= 1
    fixed = near | (i[:, None] < 1) | (i < 1)
    assert blocks.shape == (3, 20, 20) and blocks[:, fixed].all()
    assert ((blocks & ~fixed).sum(-1)[:, 1:] == 3).all() and not torch.equal(blocks[0], blocks[1])
    assert torch.equal(mask.kinds, BlockMask.bigbird(640, 640, heads=3, seed=5, block_size=32).kinds)
    assert not torch.equal(mask.kinds, BlockMask.bigbird(640, 640, heads=3, seed=6, block_size=32).kinds)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: BlockMask.bigbird(640, 640, heads=3, seed=5, block_size=32).kinds, backend="eager")
    assert torch.equal(compiled(), mask.kinds)


def test_flex():
    """There and back; and what FlexAttention computes with it."""
    for shape in SHAPES:
        seqlen_q, seqlen_k, size = shape
        for mask in (
            BlockMask(random_blocks(*shape), *shape),
            BlockMask(random_blocks(*shape), *shape, element_mask=torch.rand(seqlen_q, seqlen_k) < 0.5),
            BlockMask.causal(*shape),
        ):
            flex = mask.to_flex()
            back = BlockMask.from_flex(flex)
            assert torch.equal(back.to_dense(), mask.to_dense()) and torch.equal(back.full_blocks, mask.full_blocks)
            elements = flex_attention.create_mask(flex.mask_mod, *mask.kinds.shape[:2], seqlen_q, seqlen_k, "cpu")
            assert torch.equal(elements, mask.to_dense())
    made = flex_attention.create_block_mask(lambda b, h, i, j: (i - j).abs() < 100, 2, 3, 500, 500, "cpu")
    i = torch.arange(500)
    assert torch.equal(BlockMask.from_flex(made).to_dense(), ((i[:, None] - i).abs() < 100).expand(2, 3, 500, 500))


def test_model_of_traffic():
    full, causal = BlockMask.from_dense(torch.ones(512, 512) > 0), BlockMask.causal(512, 512)
    assert full.io_ratio() == 1 and causal.density() == 10 / 16
    assert causal.io_ratio() == (128 + 512 * 10 / 16) / (128 + 512)
    nothing, short = BlockMask(torch.zeros(4, 4) > 0, 512, 512), BlockMask.causal(48, 48)
    assert nothing.io_ratio() == 128 / (128 + 512) and short.io_ratio() == 1


def test_pictures(tmp_path):
    mask = BlockMask.causal(48, 64, 16) | BlockMask.local(48, 64, (0, 0), 16)
    assert mask.plot() == "██··\n███·\n████" and BlockMask.causal(32, 48, 16).plot() == "█▒·\n██▒"
    path = tmp_path / "mask.png"
    BlockMask.causal(32, 48, 16).plot(str(path))
    pyplot = pytest.importorskip("matplotlib.pyplot")
    assert (pyplot.imread(path) * 255).round().astype(int).tolist() == [[0, 128, 255], [0, 0, 128]]


def test_a_union_of_elements_is_no_larger_than_they_are():
    """Two masks with a pattern for each of 32² blocks: not 32⁴ patterns of their union."""
    a, b = (BlockMask.from_dense(torch.rand(512, 512) < share, (16, 16)) for share in (0.3, 0.6))
    union = a | b
    assert torch.equal(union.to_dense(), a.to_dense() | b.to_dense())
    assert union.patterns.shape[0] == 3 * 32**2


def test_memory_does_not_grow_with_elements():
    """64k × 64k: 16 bytes a block at most, 4 MiB, instead of 4 GiB."""
    mask = BlockMask.causal(1 << 16, 1 << 16)
    assert sum(x.numel() * x.element_size() for x in mask.lists[:4]) < 16 * (1 << 18)


def test_a_mask_is_a_pytree_and_moves():
    mask = BlockMask.causal(40, 40, 16)
    leaves, spec = torch.utils._pytree.tree_flatten(mask)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert len(leaves) == 4 and torch.equal(again.to_dense(), mask.to_dense())
    assert mask.to("meta").kinds.is_meta and "(16, 16)" in repr(mask)


class _Attend(torch.nn.Module):
    """With the mask that it has, or that it is given."""

    def __init__(self, mask: BlockMask | None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: torch.Tensor, mask: BlockMask | None = None) -> torch.Tensor:
        return flash_attn_func(q, q, q, block_mask=self.mask if mask is None else mask)


def test_a_mask_from_outside_in_compiled_and_exported_functions(tmp_path):
    """As an argument, in a closure, as an attribute. (Built inside: tests/test_pytorch.py.)"""
    q = torch.randn(2, 40, 2, 8)
    mask = BlockMask(torch.rand(2, 2, 3, 2) < 0.6, 40, 40, (16, 32), element_mask=torch.rand(40, 40) < 0.8)
    want = flash_attn_func(q, q, q, block_mask=mask)
    for module, inputs in ((_Attend(None), (q, mask)), (_Attend(mask), (q,))):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(*inputs), want)
        program = torch.export.export(module, inputs)
        assert torch.equal(program.module()(*inputs), want)
        torch.export.save(program, tmp_path / "program.pt2")
        assert torch.equal(torch.export.load(tmp_path / "program.pt2").module()(*inputs), want)
    torch._dynamo.reset()
    closure = torch.compile(lambda q: _Attend(mask)(q), fullgraph=True, backend="aot_eager")
    assert torch.equal(closure(q), want)
    examples = torch.vmap(lambda q: flash_attn_func(q, q, q, block_mask=mask))(torch.stack([q, q.cos()]))
    torch.testing.assert_close(examples[0], want)


def test_pictures_of_heads_and_batches_that_are_there():
    mask = BlockMask.from_dense(torch.rand(1, 2, 64, 64) < 0.5, 16)
    assert mask.plot(batch=9) == mask.plot()  # one for all
    for where in ({"head": 2}, {"head": -1}, {"batch": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(where))} must be one of the mask's"):
            mask.plot(**where)


def test_moves_to_devices_alone():
    mask = BlockMask.from_dense(torch.rand(64, 64) < 0.5, 16)
    with pytest.raises(TypeError):
        mask.to(torch.int8)
    assert torch.equal(mask.to(torch.device("cpu")).to_dense(), mask.to_dense())


def test_sizes_of_blocks():
    with pytest.raises(ValueError, match="from 16 to 2\\^20; got"):
        BlockMask(torch.ones(1, 1, dtype=torch.bool), 32, 32, 1 << 30)
    flex = flex_attention._create_empty_block_mask(*[torch.zeros(1, 1, 40, 8)] * 2)  # a block of 2^30 for one key
    mask = BlockMask.from_flex(flex)
    assert mask.block_size == (16, 16) and mask.to_dense().all()
