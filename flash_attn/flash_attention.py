"""`FlashAttention` and `FlashMHA`: the modules of flash-attn 1.x, for code and checkpoints written for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.interface import flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func


def refuse_weights(need_weights: bool) -> None:
    if need_weights:
        raise NotImplementedError(
            "need_weights=True: the attention weights are never formed; flash_attn.attention_probs rebuilds those of a "
            "few query rows from the LSE"
        )


class FlashAttention(nn.Module):
    """Self-attention on packed qkv.

    Args:
        softmax_scale: None = 1 / sqrt(dim).
        attention_dropout: dropout probability of the weights, in training mode.
    """

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.dropout_p = attention_dropout

    def forward(
        self,
        qkv: Tensor,
        key_padding_mask: Tensor | None = None,
        causal: bool = False,
        cu_seqlens: Tensor | None = None,
        max_s: int | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """Returns (out, None).

        Args:
            qkv: (batch, seqlen, 3, heads, dim), or with `cu_seqlens` (total, 3, heads, dim).
            key_padding_mask: bool (batch, seqlen), True = a real token; dense qkv only. Padding gets out 0 and is never
                read. Packing the real tokens waits for the device.
            cu_seqlens: (batch + 1,), with max_s, the longest sequence.
            need_weights: True: NotImplementedError.

        out: (batch, seqlen, heads, dim) or (total, heads, dim).
        """
        refuse_weights(need_weights)
        options = (self.dropout_p if self.training else 0.0, self.softmax_scale, causal)
        if (cu_seqlens is None) != (max_s is None):
            raise ValueError(f"max_s must be given with cu_seqlens and only then; got {max_s}")
        if cu_seqlens is not None:
            if key_padding_mask is not None:
                raise ValueError("key_padding_mask must be None where cu_seqlens says which tokens are real")
            return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_s, *options), None
        if key_padding_mask is None:
            return flash_attn_qkvpacked_func(qkv, *options), None
        rows, indices, cu_seqlens, max_s, _ = unpad_input(qkv, key_padding_mask)
        out = flash_attn_varlen_qkvpacked_func(rows, cu_seqlens, max_s, *options)
        return pad_input(out, indices, *qkv.shape[:2]), None


class FlashMHA(nn.Module):
    """Multi-head self-attention: `Wqkv`, `inner_attn` (FlashAttention), `out_proj`.

    Args:
        embed_dim: width of input and output, a multiple of num_heads.
        bias: of Wqkv and out_proj.
        batch_first: must be True: inputs are (batch, seqlen, embed_dim).
        attention_dropout: as in FlashAttention. causal: every token sees itself and those before it.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        batch_first: bool = True,
        attention_dropout: float = 0.0,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not batch_first:
            raise NotImplementedError("batch_first=False: transpose the input to (batch, seqlen, embed_dim)")
        if embed_dim % num_heads != 0:
            raise ValueError(f"embed_dim must be a multiple of num_heads, {num_heads}; got {embed_dim}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.causal = causal
        self.Wqkv = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, device=device, dtype=dtype)
        self.inner_attn = FlashAttention(attention_dropout=attention_dropout)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, None]:
        """x (batch, seqlen, embed_dim), key_padding_mask bool (batch, seqlen), True = a real token → (y, None)."""
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        context, weights = self.inner_attn(qkv, key_padding_mask, causal=self.causal, need_weights=need_weights)
        return self.out_proj(context.flatten(-2)), weights
