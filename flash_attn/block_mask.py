"""`BlockMask`: which blocks of the (query, key) plane attention visits. All others cost nothing.

A mask holds a byte-sized story per block, hidden, full or partial with a pattern, and from it two compressed lists: the
key blocks that each query block visits, for the forward, and the query blocks that each key block is visited by, for
the backward. Everything is built on the mask's device and from shapes alone: nothing waits for the device, and a mask
can be built inside torch.compile, torch.export and torch.func.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import gcd

import torch
from torch import Tensor
from torch.utils import _pytree

from flash_attn import block_patterns, checks
from flash_attn.block_patterns import FIRST_PATTERN, FULL, HIDDEN, visible_elements, visit_lists
from flash_attn.png import write_png
from flash_attn.problem import BlockLists

DEFAULT_BLOCK_SIZE = (128, 128)


class BlockMask:
    """A block-sparse mask: a query sees a key only where the block that holds both is visited.

    Args:
        blocks: bool (batch | 1, heads | 1, q_blocks, k_blocks), leading axes may be missing; True = visited.
            q_blocks = ceil(seqlen_q / rows), k_blocks = ceil(seqlen_k / keys).
        seqlen_q, seqlen_k: of the attention call: its q and k have that many rows; packed sequences: max_seqlen_q and
            max_seqlen_k. Blocks count from the first row and column of each sequence's tensor (left pads included).
        block_size: (rows, keys) of a block, multiples of 16, or one number for both.
        element_mask: bool, broadcastable to (batch, heads, seqlen_q, seqlen_k): hides elements of visited blocks. It is
            copied block by block, whole blocks of rows × keys bytes for all of seqlen_q × seqlen_k; blocks in which it
            hides everything are not visited.

    Attributes:
        kinds: int32 (batch | 1, heads | 1, q_blocks, k_blocks): 0 hidden, 1 full, 2 + n partial with pattern n.
        patterns: bool (n, rows, keys): what is visible inside partial blocks.
        key_lists: int32 (batch | 1, heads | 1, q_blocks, 1 + k_blocks): how many key blocks a query block visits, then
            their numbers, ascending; the rest is padding.
        query_lists: int32 (batch | 1, heads | 1, k_blocks, 1 + q_blocks): the same the other way around.
        seqlen_q, seqlen_k, block_size.

    A mask is a constant: it has no gradient. It combines with every other option of a call by logical AND. `a | b` is
    the union of two masks. Kinds and lists take 12 bytes a block, visited or not, so that no size depends on contents.

    Errors, of the builders too: RuntimeError for tensors, TypeError for what is none, ValueError for numbers.

    Source: Dao, Fu, Ermon, Rudra, Ré, "FlashAttention" (2022), section 3.3, Algorithm 5.

    Equivalent to::

        mask = blocks.repeat_interleave(rows, -2).repeat_interleave(keys, -1)[..., :seqlen_q, :seqlen_k] & element_mask
        flash_attn_func(q, k, v, mask=mask)
    """

    def __init__(
        self,
        blocks: Tensor,
        seqlen_q: int,
        seqlen_k: int,
        block_size: Sequence[int] = DEFAULT_BLOCK_SIZE,
        *,
        element_mask: Tensor | None = None,
    ) -> None:
        seqlen_q, seqlen_k = checks.length("seqlen_q", seqlen_q), checks.length("seqlen_k", seqlen_k)
        rows, keys = _block_size(block_size)
        checks.require_tensor("blocks", blocks)
        rule = "must be bool (batch | 1, heads | 1, {}, {}): a block has {} rows and {} keys"
        sizes = (-(-seqlen_q // rows), -(-seqlen_k // keys))
        fits = blocks.dtype == torch.bool and 2 <= blocks.dim() <= 4
        checks.require(fits, "blocks", blocks, rule, *sizes, rows, keys)
        for given, size in zip(blocks.shape[-2:], sizes, strict=True):
            checks.require(given == size, "blocks", blocks, rule, *sizes, rows, keys)
        blocks = _four_dimensional(blocks)
        if element_mask is None:
            kinds, patterns = blocks.to(torch.int32), blocks.new_zeros(0, rows, keys)
        else:
            kinds, patterns = _kinds_of_elements(element_mask, blocks, seqlen_q, seqlen_k, rows, keys)
        self._set(kinds, patterns, seqlen_q, seqlen_k)

    def _set(self, kinds: Tensor, patterns: Tensor, seqlen_q: int, seqlen_k: int) -> None:
        visited = kinds != HIDDEN
        self._keep(kinds.contiguous(), patterns, visit_lists(visited), visit_lists(visited.mT), seqlen_q, seqlen_k)

    def _keep(
        self, kinds: Tensor, patterns: Tensor, key_lists: Tensor, query_lists: Tensor, seqlen_q: int, seqlen_k: int
    ) -> None:
        self.kinds, self.patterns, self.key_lists, self.query_lists = kinds, patterns, key_lists, query_lists
        self.seqlen_q, self.seqlen_k = seqlen_q, seqlen_k

    @classmethod
    def _from_kinds(cls, kinds: Tensor, patterns: Tensor, seqlen_q: int, seqlen_k: int) -> BlockMask:
        mask = cls.__new__(cls)
        mask._set(kinds, patterns, seqlen_q, seqlen_k)
        return mask

    @property
    def block_size(self) -> tuple[int, int]:
        return self.patterns.shape[1], self.patterns.shape[2]

    @property
    def blocks(self) -> Tensor:
        """bool (batch | 1, heads | 1, q_blocks, k_blocks): which blocks are visited."""
        return self.kinds != HIDDEN

    @property
    def full_blocks(self) -> Tensor:
        """The same: which of them need no look at elements."""
        return self.kinds == FULL

    @property
    def partial_blocks(self) -> Tensor:
        """The same: which of them have a pattern."""
        return self.kinds >= FIRST_PATTERN

    @property
    def lists(self) -> BlockLists:
        """What a call takes of the mask."""
        return BlockLists(self.kinds, self.patterns, self.key_lists, self.query_lists, self.seqlen_q, self.seqlen_k)

    def __repr__(self) -> str:
        return (
            f"BlockMask(blocks {tuple(self.kinds.shape)} of {self.block_size} for {self.seqlen_q} queries × "
            f"{self.seqlen_k} keys, on {self.kinds.device})"
        )

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask on another device. TypeError for what names none, as a dtype does."""
        device, mask = torch.device(device), BlockMask.__new__(BlockMask)
        tensors = (self.kinds, self.patterns, self.key_lists, self.query_lists)
        mask._keep(*(x.to(device) for x in tensors), self.seqlen_q, self.seqlen_k)
        return mask

    def __or__(self, other: BlockMask) -> BlockMask:
        """What either of two masks for the same lengths, block sizes and device lets a query see."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        for name in ("seqlen_q", "seqlen_k", "block_size"):
            a, b = getattr(self, name), getattr(other, name)
            checks.require_option(a == b, f"{name} of the second mask", b, f"must be that of the first, {a}")
        checks.require(
            self.kinds.device == other.kinds.device, "the second mask", other.kinds, "must be on the first's device"
        )
        _check_leading("the second mask", other.kinds, self.kinds)
        kinds, patterns = block_patterns.union(self.kinds, self.patterns, other.kinds, other.patterns)
        return BlockMask._from_kinds(kinds, patterns, self.seqlen_q, self.seqlen_k)

    # ---- Reading it: these wait for the device ----------------------------------------------------------------------

    def density(self) -> float:
        """Visited blocks / all blocks (the paper's s), over all batches and heads of the mask."""
        return float(self.blocks.sum()) / max(1, self.kinds.numel())

    def io_ratio(self) -> float:
        """HBM accesses of the forward with this mask / without one: `io_model.proposition4_block_sparse`, where on-chip
        memory is as large as a block's queries. Their number of dimensions drops out."""
        from flash_attn import io_model  # which nothing else here needs

        seqlen = max(1, self.seqlen_k)
        memory = min(self.block_size[0], seqlen)
        masked, dense = (io_model.proposition4_block_sparse(seqlen, 1, memory, s) for s in (self.density(), 1.0))
        return masked / dense

    def to_dense(self) -> Tensor:
        """bool (batch | 1, heads | 1, seqlen_q, seqlen_k), True = may attend: `mask=` of the attention functions."""
        rows, keys = self.block_size
        kinds = self.kinds.repeat_interleave(rows, -2)[:, :, : self.seqlen_q]
        kinds = kinds.repeat_interleave(keys, -1)[..., : self.seqlen_k]
        i, j = (torch.arange(n, device=kinds.device) for n in (self.seqlen_q, self.seqlen_k))
        return block_patterns.visible_elements(kinds, self.patterns, i[:, None], j)

    def plot(self, path: str | None = None, batch: int = 0, head: int = 0) -> str:
        """A picture of one head's mask: lines of █ (full), ▒ (partial) and · (hidden), a character a block.

        path: also writes a grayscale PNG there, a pixel a block (black full, gray partial, white hidden).
        batch, head: any where the mask is the same for all, else one of its own (ValueError).
        """
        planes = self.kinds.shape[:2]
        for name, given, n in zip(("batch", "head"), (batch, head), planes, strict=True):
            checks.require_option(given >= 0 and (given < n or n == 1), name, given, f"must be one of the mask's {n}")
        kinds = self.kinds[min(batch, planes[0] - 1), min(head, planes[1] - 1)].clamp(max=2)
        table = kinds.tolist()
        if path is not None:
            write_png(path, [bytes((255, 0, 128)[kind] for kind in line) for line in table], kinds.shape[1])
        return "\n".join("".join("·█▒"[kind] for kind in line) for line in table)

    # ---- Builders ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_dense(cls, element_mask: Tensor, block_size: Sequence[int] = DEFAULT_BLOCK_SIZE) -> BlockMask:
        """The mask of a bool tensor (batch | 1, heads | 1, seqlen_q, seqlen_k), leading axes may be missing.

        Blocks without a True are hidden, blocks of nothing else full.
        """
        rows, keys = _block_size(block_size)
        checks.require_tensor("element_mask", element_mask)
        fits = element_mask.dtype == torch.bool and 2 <= element_mask.dim() <= 4
        checks.require(fits, "element_mask", element_mask, "must be bool (batch | 1, heads | 1, seqlen_q, seqlen_k)")
        seqlen_q, seqlen_k = element_mask.shape[-2:]
        blocks = element_mask.new_ones(-(-seqlen_q // rows), -(-seqlen_k // keys))
        return cls(blocks, seqlen_q, seqlen_k, (rows, keys), element_mask=element_mask)

    @classmethod
    def causal(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        block_size: Sequence[int] = DEFAULT_BLOCK_SIZE,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Exactly what `causal=True` lets a query see: query i key j iff j <= i + seqlen_k - seqlen_q.

        Blocks on the diagonal are partial; they share (rows + keys) / gcd(rows, keys) patterns. In a call `causal=True`
        itself is faster, and it alone knows the diagonal of each packed or padded sequence: here it is the tensor's."""
        seqlen_q, seqlen_k = checks.length("seqlen_q", seqlen_q), checks.length("seqlen_k", seqlen_k)
        rows, keys = _block_size(block_size)
        diagonal, step = seqlen_k - seqlen_q, gcd(rows, keys)
        # A block's offset says where its first row stands: it sees the keys c of the block with c <= row + offset.
        offsets = range(-rows + 1 + (diagonal + rows - 1) % step, keys - 1, step)
        m = torch.arange(-(-seqlen_q // rows), device=device)[:, None]
        n = torch.arange(-(-seqlen_k // keys), device=device)
        offset = m * rows + diagonal - n * keys
        pattern = torch.div(offset - offsets.start, step, rounding_mode="floor") + FIRST_PATTERN
        kinds = torch.where(offset >= keys - 1, FULL, torch.where(offset <= -rows, HIDDEN, pattern))
        row, key = torch.arange(rows, device=device)[:, None], torch.arange(keys, device=device)
        starts = torch.arange(offsets.start, offsets.start + step * len(offsets), step, device=device)
        patterns = key <= row + starts[:, None, None]
        return cls._from_kinds(kinds[None, None].to(torch.int32), patterns, seqlen_q, seqlen_k)

    @classmethod
    def _of_pattern(
        cls,
        pattern: Callable[..., Tensor],
        seqlen_q: int,
        seqlen_k: int,
        block_size: Sequence[int],
        device: torch.device | str | None,
        *arguments: object,
    ) -> BlockMask:
        seqlen_q, seqlen_k = checks.length("seqlen_q", seqlen_q), checks.length("seqlen_k", seqlen_k)
        rows, keys = _block_size(block_size)
        grid = block_patterns.Grid(seqlen_q, seqlen_k, rows, keys, device)
        return cls(pattern(grid, *arguments), seqlen_q, seqlen_k, (rows, keys))

    @classmethod
    def butterfly(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        block_size: Sequence[int] = DEFAULT_BLOCK_SIZE,
        max_stride: int | None = None,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """The fixed pattern of the paper: block i sees block j iff i = j or i and j differ in one bit.

        That is the union of the supports of all block butterfly factors, which is what a flat block butterfly matrix
        selects; max_stride (a power of two, in blocks) keeps the factors up to that stride alone. n blocks squared
        visit n (1 + log2 n) of n² blocks, so time and traffic grow like N log N. Where n is no power of two, the
        pattern of the next one is cut off; where query and key blocks differ in number, the smaller axis is stretched.

        Source: Chen, Dao, Liang, Yang, Song, Rudra, Ré, "Pixelated Butterfly" (2022), definitions 3.4 and 3.5.
        """
        if max_stride is not None:
            max_stride = checks.integer("max_stride", max_stride, 1, "must be a power of two, in blocks, or None")
            is_power = max_stride & (max_stride - 1) == 0
            checks.require_option(is_power, "max_stride", max_stride, "must be a power of two, in blocks, or None")
        return cls._of_pattern(block_patterns.butterfly, seqlen_q, seqlen_k, block_size, device, max_stride)

    @classmethod
    def local(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window_size: Sequence[int],
        block_size: Sequence[int] = DEFAULT_BLOCK_SIZE,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Every block that the window (left, right) touches, as a whole; the window counts keys, as in `window_size=`
        of the functions, which also hides the elements outside of it. The diagonal is the whole tensor's, as above."""
        window = checks.window(window_size)
        return cls._of_pattern(block_patterns.local, seqlen_q, seqlen_k, block_size, device, window)

    @classmethod
    def strided(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window_size: Sequence[int],
        stride: int,
        block_size: Sequence[int] = DEFAULT_BLOCK_SIZE,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """`local`, and the last of every `stride` key blocks, which all queries see.

        Source: Child, Gray, Radford, Sutskever, "Generating long sequences with sparse transformers" (2019), the fixed
        pattern.
        """
        window = checks.window(window_size)
        stride = checks.integer("stride", stride, 1, "must be a number of blocks of at least 1")
        return cls._of_pattern(block_patterns.strided, seqlen_q, seqlen_k, block_size, device, window, stride)

    @classmethod
    def longformer(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window_size: Sequence[int],
        global_tokens: int,
        block_size: Sequence[int] = DEFAULT_BLOCK_SIZE,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """`local`, and the blocks of the first `global_tokens` keys and queries, which see and are seen by all.

        Source: Beltagy, Peters, Cohan, "Longformer" (2020), without dilation.
        """
        window = checks.window(window_size)
        tokens = checks.length("global_tokens", global_tokens)
        return cls._of_pattern(block_patterns.longformer, seqlen_q, seqlen_k, block_size, device, window, tokens)

    @classmethod
    def bigbird(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window_blocks: int = 3,
        global_blocks: int = 1,
        random_blocks: int = 3,
        heads: int = 1,
        seed: int = 0,
        block_size: Sequence[int] = DEFAULT_BLOCK_SIZE,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Blocks near the diagonal (window_blocks of them a row, an odd number), the first global_blocks rows and
        columns, and random_blocks others in each row, drawn from `seed` for each head on its own. Where query and key
        blocks differ in number, the diagonal is stretched from corner to corner.

        Source: Zaheer et al., "Big Bird" (2020).
        """
        names = ("window_blocks", "global_blocks", "random_blocks")
        numbers = [
            checks.length(n, x) for n, x in zip(names, (window_blocks, global_blocks, random_blocks), strict=True)
        ]
        heads = checks.integer("heads", heads, 1, "must be at least 1")
        odd_or_none = window_blocks == 0 or window_blocks % 2 == 1
        checks.require_option(odd_or_none, "window_blocks", window_blocks, "must be an odd number, or 0")
        seed = checks.length("seed", seed)
        return cls._of_pattern(block_patterns.bigbird, seqlen_q, seqlen_k, block_size, device, *numbers, heads, seed)

    # ---- torch's FlexAttention --------------------------------------------------------------------------------------

    @classmethod
    def from_flex(cls, flex: object) -> BlockMask:
        """The mask of a `torch.nn.attention.flex_attention.BlockMask`, its partial blocks by its mask_mod.

        mask_mod is evaluated for the batches and heads of that mask, seqlen_q × seqlen_k times each.
        """
        from torch.nn.attention import flex_attention

        if not isinstance(flex, flex_attention.BlockMask):
            raise TypeError(f"flex must be a torch.nn.attention.flex_attention.BlockMask; got {type(flex).__name__}")
        seqlen_q, seqlen_k = flex.seq_lengths
        # One block for all, as in FlexAttention's mask of nothing, need not be larger than all.
        rows, keys = _block_size(
            [min(size, max(16, -(-n // 16) * 16)) for size, n in zip(flex.BLOCK_SIZE, flex.seq_lengths, strict=True)]
        )
        columns = -(-seqlen_k // keys)

        def listed(count: Tensor | None, indices: Tensor | None) -> Tensor:
            if count is None:
                return torch.zeros_like(partial)
            given = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
            slots = torch.where(given, indices, columns).long()
            blocks = torch.zeros(*count.shape, columns + 1, dtype=torch.bool, device=indices.device)
            return blocks.scatter(-1, slots, True)[..., :columns]

        partial = listed(flex.kv_num_blocks, flex.kv_indices)
        full = listed(flex.full_kv_num_blocks, flex.full_kv_indices)
        blocks = partial | full
        if flex.mask_mod is flex_attention.noop_mask:
            return cls(blocks, seqlen_q, seqlen_k, (rows, keys))
        elements = flex_attention.create_mask(flex.mask_mod, *blocks.shape[:2], seqlen_q, seqlen_k, blocks.device)
        mask = cls(blocks, seqlen_q, seqlen_k, (rows, keys), element_mask=elements)
        kinds = torch.where(full, FULL, mask.kinds)  # there mask_mod is not asked
        return cls._from_kinds(kinds, mask.patterns, seqlen_q, seqlen_k)

    def to_flex(self) -> object:
        """A `torch.nn.attention.flex_attention.BlockMask` that says the same, for comparison with FlexAttention."""
        from torch.nn.attention import flex_attention

        kinds, patterns, (rows, keys) = self.kinds, self.patterns, self.block_size

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            b = b if kinds.shape[0] > 1 else b * 0
            kind = kinds[b, h if kinds.shape[1] > 1 else h * 0, i // rows, j // keys]
            return visible_elements(kind, patterns, i, j)

        partial, full = (visit_lists(blocks) for blocks in (self.partial_blocks, self.full_blocks))
        lists = [x for y in (partial, full) for x in (y[..., 0], y[..., 1:] % kinds.shape[-1])]
        return flex_attention.BlockMask.from_kv_blocks(
            *(x.contiguous() for x in lists),
            BLOCK_SIZE=self.block_size,
            mask_mod=mask_mod,
            seq_lengths=(self.seqlen_q, self.seqlen_k),
        )


def lists_of(block_mask: object | None) -> BlockLists | None:
    """What a call takes of its block mask."""
    if block_mask is None:
        return None
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask must be a flash_attn.BlockMask; got {type(block_mask).__name__}: BlockMask(blocks, seqlen_q, "
            "seqlen_k) and BlockMask.from_dense make one of a bool tensor, BlockMask.from_flex one of FlexAttention's"
        )
    return block_mask.lists


def _block_size(block_size: Sequence[int] | int) -> tuple[int, int]:
    rule = "must be (rows, keys), each a multiple of 16 from 16 to 2^20"
    try:
        rows, keys = block_size if isinstance(block_size, Sequence) else (block_size, block_size)
        rows, keys = operator.index(rows), operator.index(keys)
    except (TypeError, ValueError) as error:
        raise ValueError(f"block_size {rule}; got {block_size!r}") from error
    fits = 0 < rows <= 1 << 20 and 0 < keys <= 1 << 20 and rows % 16 == 0 and keys % 16 == 0
    checks.require_option(fits, "block_size", (rows, keys), rule)
    return rows, keys


def _four_dimensional(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x[(None,) * (4 - x.dim())]


def _check_leading(name: str, x: Tensor, like: Tensor) -> None:
    for given, full in zip(x.shape[:2], like.shape[:2], strict=True):
        rule = "must have 1 or as many batches and heads as the other, {}"
        checks.require(given == full or given == 1 or full == 1, name, x, rule, tuple(like.shape[:2]))


def _kinds_of_elements(
    element_mask: Tensor, blocks: Tensor, seqlen_q: int, seqlen_k: int, rows: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Kinds and patterns of an element mask inside visited blocks; every block has a pattern of its own."""
    checks.require_tensor("element_mask", element_mask)
    rule = "must be bool, broadcastable to (batch, heads, {}, {})"
    fits = element_mask.dtype == torch.bool and element_mask.dim() <= 4
    checks.require(fits, "element_mask", element_mask, rule, seqlen_q, seqlen_k)
    elements = _four_dimensional(element_mask)
    for given, full in zip(elements.shape[-2:], (seqlen_q, seqlen_k), strict=True):
        checks.require(given == 1 or given == full, "element_mask", element_mask, rule, seqlen_q, seqlen_k)
    _check_leading("element_mask", elements, blocks)
    checks.require(
        elements.device == blocks.device, "element_mask", element_mask, "must be on the device of blocks, {}",
        blocks.device,
    )  # fmt: skip
    elements = elements.expand(*elements.shape[:2], seqlen_q, seqlen_k)
    m, n = blocks.shape[-2:]

    def in_blocks(x: Tensor) -> Tensor:  # (..., m, n, rows, keys); False beyond the lengths
        padded = torch.nn.functional.pad(x, (0, n * keys - seqlen_k, 0, m * rows - seqlen_q))
        return padded.unflatten(-1, (n, keys)).unflatten(-3, (m, rows)).transpose(-3, -2)

    patterns = in_blocks(elements)
    some, all_ = patterns.flatten(-2).any(-1), ~in_blocks(~elements).flatten(-2).any(-1)
    number = torch.arange(some.numel(), dtype=torch.int32, device=blocks.device).view(some.shape) + FIRST_PATTERN
    kinds = torch.where(blocks & some, torch.where(all_, FULL, number), HIDDEN)
    return kinds.to(torch.int32), patterns.reshape(-1, rows, keys).contiguous()


def _flatten(mask: BlockMask) -> tuple[list[Tensor], list[int]]:  # a list comes back from JSON as itself
    return [mask.kinds, mask.patterns, mask.key_lists, mask.query_lists], [mask.seqlen_q, mask.seqlen_k]


def _flatten_with_keys(mask: BlockMask) -> tuple[list[tuple], list[int]]:
    names, (tensors, lengths) = ("kinds", "patterns", "key_lists", "query_lists"), _flatten(mask)
    return [(_pytree.GetAttrKey(n), x) for n, x in zip(names, tensors, strict=True)], lengths


def _unflatten(tensors: Sequence[Tensor], lengths: Sequence[int]) -> BlockMask:
    mask = BlockMask.__new__(BlockMask)
    mask._keep(*tensors, *lengths)
    return mask


# So that a mask can be an argument of exported and transformed functions, and be loaded with them.
torch.serialization.add_safe_globals([BlockMask])
_pytree.register_pytree_node(
    BlockMask,
    _flatten,
    _unflatten,
    serialized_type_name="flash_attn.BlockMask",
    flatten_with_keys_fn=_flatten_with_keys,
)
