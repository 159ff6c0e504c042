"""`FlashBlocksparseAttention` and `FlashBlocksparseMHA`: the modules of flash-attn 1.x, made to work."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn import checks
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attention import FlashMHA, refuse_weights
from flash_attn.flash_blocksparse_attn_interface import convert_blockmask, flash_blocksparse_attn_func


def _instantiate(config: object) -> Any:
    """The object that a mapping with `_target_`, a dotted name, describes by its other items; any other as it is."""
    if not isinstance(config, Mapping) or "_target_" not in config:
        return config
    module, _, name = str(config["_target_"]).rpartition(".")
    return getattr(importlib.import_module(module), name)(**{n: x for n, x in config.items() if n != "_target_"})


class FlashBlocksparseAttention(nn.Module):
    """Self-attention on packed qkv with one mask of blocks of 16 queries × 256 keys.

    Args:
        sparsity_config: an object whose make_layout(max_seq_length) gives the mask, 0/1 (max_seq_length / 16,
            max_seq_length / 256), or one for each head, with a leading axis; max_seq_length rounded up to 256. Or a
            mapping that describes the object: `_target_`, its class, and its arguments.
        softmax_temp: multiplies q·k; None = 1 / sqrt(dim).
        attention_dropout: dropout probability of the weights, in training mode.
        max_seq_length: the longest sequence.

    Buffers: `layout`, and of a 2-D one `blockmask_converted`, which state dicts of 1.x hold too.
    """

    def __init__(
        self,
        sparsity_config: object,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.0,
        max_seq_length: int = 2048,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sparsity_config = _instantiate(sparsity_config)
        if not callable(getattr(self.sparsity_config, "make_layout", None)):
            raise TypeError(
                "sparsity_config must have a method make_layout, or be a mapping whose `_target_` names a class that "
                f"has; got {sparsity_config!r}"
            )
        self.softmax_temp, self.dropout_p = softmax_temp, attention_dropout
        self.max_seq_length = -(-max_seq_length // 256) * 256
        layout = torch.as_tensor(self.sparsity_config.make_layout(self.max_seq_length), device=device)
        self.register_buffer("layout", layout)
        self.register_buffer("blockmask_converted", convert_blockmask(layout, False) if layout.dim() == 2 else None)

    def forward(
        self,
        qkv: Tensor,
        attn_mask: None = None,
        key_padding_mask: Any = None,
        causal: bool = False,
        cu_seqlens: Tensor | None = None,
        max_s: int | None = None,
        need_weights: bool = False,
        convert_mask: bool = True,
    ) -> tuple[Tensor, None]:
        """Returns (out, None).

        Args:
            qkv: (batch, seqlen, 3, heads, dim), or with `cu_seqlens` (total, 3, heads, dim).
            attn_mask: must be None.
            key_padding_mask: bool (batch, seqlen), True = a real token, or integers, of which 0 alone is none, or an
                object that has it as `bool_matrix`; dense qkv only. Padding gets out 0; real tokens are counted from
                each sequence's first one.
            cu_seqlens: (batch + 1,), with max_s, the longest sequence.
            need_weights: True: NotImplementedError.
            convert_mask: either way the module's mask is taken.

        out: (batch, seqlen, heads, dim) or (total, heads, dim).
        """
        refuse_weights(need_weights)
        if attn_mask is not None:
            raise NotImplementedError("attn_mask must be None: `mask` of flash_attn_func takes element masks")
        if (cu_seqlens is None) != (max_s is None):
            raise ValueError(f"max_s must be given with cu_seqlens and only then; got {max_s}")

        def attend(rows: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
            if longest > self.max_seq_length:
                raise ValueError(f"max_s must be at most max_seq_length, {self.max_seq_length}; got {longest}")
            dropout_p = self.dropout_p if self.training else 0.0
            return flash_blocksparse_attn_func(
                rows, cu_seqlens, self.layout, dropout_p, longest, self.softmax_temp, causal
            )

        if cu_seqlens is not None:
            if key_padding_mask is not None:
                raise ValueError("key_padding_mask must be None where cu_seqlens says which tokens are real")
            return attend(qkv, cu_seqlens, max_s), None
        batch, seqlen = qkv.shape[:2]
        if key_padding_mask is None:
            edges = torch.arange(batch + 1, dtype=torch.int32, device=qkv.device) * seqlen
            return attend(qkv.flatten(0, 1), edges, seqlen).unflatten(0, (batch, seqlen)), None
        real = getattr(key_padding_mask, "bool_matrix", key_padding_mask)
        fits = not real.dtype.is_floating_point and real.shape == (batch, seqlen)
        checks.require(
            fits, "key_padding_mask", real, "must be bool or integer (batch, seqlen), {} × {}", batch, seqlen
        )
        rows, indices, cu_seqlens, longest, _ = unpad_input(qkv, real)
        return pad_input(attend(rows, cu_seqlens, longest), indices, batch, seqlen), None


class FlashBlocksparseMHA(FlashMHA):
    """Multi-head block-sparse self-attention: `Wqkv`, `inner_attn` (FlashBlocksparseAttention), `out_proj`.

    Args: as in FlashMHA and FlashBlocksparseAttention. Any head dim.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        sparsity_config: object,
        bias: bool = True,
        batch_first: bool = True,
        attention_dropout: float = 0.0,
        causal: bool = False,
        max_seq_length: int = 2048,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, bias, batch_first, attention_dropout, causal, device, dtype)
        self.inner_attn = FlashBlocksparseAttention(
            sparsity_config, None, attention_dropout, max_seq_length, device, dtype
        )

    def forward(
        self,
        x: Tensor,
        x_ignored_: object = None,
        x_ignored_1_: object = None,
        attn_mask: None = None,
        key_padding_mask: Any = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """x (batch, seqlen, embed_dim) → (y, None); the others as in FlashBlocksparseAttention.forward."""
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        context, weights = self.inner_attn(qkv, attn_mask, key_padding_mask, self.causal, need_weights=need_weights)
        return self.out_proj(context.flatten(-2)), weights
