"""Multi-head attention as modules: the inner attention on q, k, v, and `MHA` with its projections around it.

`FlashSelfAttention` and `FlashCrossAttention` call the fused functions; `SelfAttention` and `CrossAttention` compute
the same in plain PyTorch with the N × N matrices. All four take any dtype and device that their function takes, drop
weights in training mode only, and give zeros, never NaN, where a query sees no key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn.baselines import standard_attention
from flash_attn.block_mask import BlockMask
from flash_attn.interface import flash_attn_func, flash_attn_varlen_func
from flash_attn.layers.rotary import RotaryEmbedding


def get_alibi_slopes(nheads: int) -> list[float]:
    """The slopes of `nheads` heads: 2^(-8 h / n), h = 1 ... n, for n a power of two.

    Otherwise those of the next smaller power of two n, then every other one of 2 n.
    Source: Press, Smith, Lewis, "Train short, test long" (2022), and the authors' code for other numbers of heads.
    """
    if nheads <= 0:
        return []
    n = 1 << int(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]
    between = [2.0 ** (-4.0 * h / n) for h in range(1, 2 * n + 1, 2)]
    return slopes + between[: nheads - n]


def _split_heads(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of (..., 3, heads, dim), or with `num_heads_q` of (..., num_heads_q + 2 heads_k, dim)."""
    if num_heads_q is None:
        if qkv.dim() < 4 or qkv.shape[-3] != 3:
            raise RuntimeError(f"qkv must be (..., 3, heads, dim); got {tuple(qkv.shape)}")
        return qkv.unbind(-3)
    rest = qkv.shape[-2] - num_heads_q
    if rest < 0 or rest % 2 != 0:
        raise RuntimeError(f"qkv must have {num_heads_q} + 2 heads_k heads; got {tuple(qkv.shape)}")
    return qkv.split((num_heads_q, rest // 2, rest // 2), dim=-2)


def _hide_keys(
    k: Tensor, v: Tensor, key_padding_mask: Tensor | None, positions_matter: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """k, v, mask, seqused_k such that keys whose key_padding_mask (batch, seqlen_k) is False do not exist.

    They do not count as positions either. Where positions matter the real keys move to the front for that.
    """
    if key_padding_mask is None:
        return k, v, None, None
    real = key_padding_mask.bool()
    if not positions_matter:
        return k, v, real[:, None, None, :], None
    order = torch.argsort(real.logical_not().to(torch.uint8), dim=1, stable=True)[:, :, None, None]
    k, v = (x.gather(1, order.expand(x.shape)) for x in (k, v))
    return k, v, None, real.sum(1, dtype=torch.int32)


class _InnerAttention(nn.Module):
    """What the four inner modules have in common: the options."""

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool,
        softmax_scale: float | None,
        attention_dropout: float,
        window_size: Sequence[int],
        alibi_slopes: Tensor | None,
        deterministic: bool,
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale, self.deterministic = causal, softmax_scale, deterministic
        self.window_size = tuple(window_size)
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _InnerAttention:
        """Moves the slopes but does not cast them: attention takes them in fp32."""
        slopes = self.alibi_slopes
        super()._apply(fn, recurse)
        if slopes is not None and not slopes.is_meta:
            self.alibi_slopes = slopes.to(self.alibi_slopes.device)
        return self

    def _positions_matter(self, causal: bool) -> bool:
        return causal or self.alibi_slopes is not None or any(side != -1 for side in self.window_size)

    def _flash(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool | None,
        lengths: tuple[Tensor, Tensor, int, int] | None,
        mask: Tensor | None,
        seqused_k: Tensor | None,
        block_mask: BlockMask | None,
    ) -> Tensor:
        options = (
            self.drop.p if self.training else 0.0,
            self.softmax_scale,
            self.causal if causal is None else causal,
            self.window_size,
            0.0,
            self.alibi_slopes,
            self.deterministic,
        )
        if lengths is not None:
            return flash_attn_varlen_func(q, k, v, *lengths, *options, block_mask=block_mask)
        return flash_attn_func(q, k, v, *options, mask=mask, seqused_k=seqused_k, block_mask=block_mask)

    def _standard(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool | None,
        mask: Tensor | None,
        seqused_k: Tensor | None,
    ) -> Tensor:
        return standard_attention(
            q,
            k,
            v,
            self.drop.p if self.training else 0.0,
            self.softmax_scale,
            self.causal if causal is None else causal,
            self.window_size,
            0.0,
            self.alibi_slopes,
            mask=mask,
            seqused_k=seqused_k,
        )


class FlashSelfAttention(_InnerAttention):
    """Self-attention by the fused functions.

    Args: as in `flash_attn_func`; `attention_dropout` is its dropout_p, in training mode.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        num_heads_q: int | None = None,
        block_mask: BlockMask | None = None,
    ) -> Tensor:
        """out (batch, seqlen, heads, dim), or with `cu_seqlens` (total, heads, dim).

        Args:
            qkv: (batch, seqlen, 3, heads, dim) or (total, 3, heads, dim); with `num_heads_q` the heads of q, k and v
                one after the other instead, (..., num_heads_q + 2 heads_k, dim).
            causal: overrides the module's.
            cu_seqlens: (batch + 1,), with max_seqlen.
            key_padding_mask: bool (batch, seqlen), True = a real token; dense qkv only. Hides keys; queries that are
                padding get some output.
            block_mask: a `BlockMask`, as in `flash_attn_func`.
        """
        if (cu_seqlens is None) != (max_seqlen is None):
            raise ValueError(f"max_seqlen must be given with cu_seqlens and only then; got {max_seqlen}")
        q, k, v = _split_heads(qkv, num_heads_q)
        if cu_seqlens is not None:
            if key_padding_mask is not None:
                raise ValueError("key_padding_mask must be None where cu_seqlens says which tokens are real")
            return self._flash(
                q, k, v, causal, (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), None, None, block_mask
            )
        mask = None if key_padding_mask is None else key_padding_mask.bool()[:, None, None, :]
        return self._flash(q, k, v, causal, None, mask, None, block_mask)


class FlashCrossAttention(_InnerAttention):
    """Cross-attention by the fused functions. Arguments as in FlashSelfAttention (mind their order)."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: Sequence[int] = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        block_mask: BlockMask | None = None,
    ) -> Tensor:
        """out (batch, seqlen_q, heads, dim), or with `cu_seqlens` (total_q, heads, dim).

        Args:
            q: (batch, seqlen_q, heads, dim) or (total_q, heads, dim).
            kv: (batch, seqlen_k, 2, heads_k, dim) or (total_k, 2, heads_k, dim).
            causal: overrides the module's; aligned to the last key, as everywhere.
            cu_seqlens, max_seqlen: of the queries; cu_seqlens_k, max_seqlen_k: of the keys; all or none.
            key_padding_mask: bool (batch, seqlen_k), True = a real key; dense only. Other keys do not exist: causal,
                window and ALiBi count the real ones alone.
            block_mask: a `BlockMask`, as in `flash_attn_func`; not where such counting moves the keys.
        """
        given = [x is not None for x in (cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k)]
        if any(given) != all(given):
            raise ValueError("cu_seqlens, max_seqlen, cu_seqlens_k and max_seqlen_k must be given all or none")
        k, v = kv.unbind(-3)
        if cu_seqlens is not None:
            if key_padding_mask is not None:
                raise ValueError("key_padding_mask must be None where cu_seqlens_k says which keys are real")
            return self._flash(
                q, k, v, causal, (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k), None, None, block_mask
            )
        matter = self._positions_matter(self.causal if causal is None else causal)
        k, v, mask, seqused_k = _hide_keys(k, v, key_padding_mask, matter)
        if seqused_k is not None and block_mask is not None:
            raise NotImplementedError("block_mask with key_padding_mask and causal, window or ALiBi: keys would move")
        return self._flash(q, k, v, causal, None, mask, seqused_k, block_mask)


class SelfAttention(_InnerAttention):
    """`FlashSelfAttention` in plain PyTorch, dense only."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic=False)

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        num_heads_q: int | None = None,
    ) -> Tensor:
        """As `FlashSelfAttention.forward`."""
        q, k, v = _split_heads(qkv, num_heads_q)
        mask = None if key_padding_mask is None else key_padding_mask.bool()[:, None, None, :]
        return self._standard(q, k, v, causal, mask, None)


class CrossAttention(_InnerAttention):
    """`FlashCrossAttention` in plain PyTorch, dense only."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: Sequence[int] = (-1, -1),
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic=False)

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """As `FlashCrossAttention.forward`."""
        matter = self._positions_matter(self.causal if causal is None else causal)
        k, v, mask, seqused_k = _hide_keys(*kv.unbind(-3), key_padding_mask, matter)
        return self._standard(q, k, v, causal, mask, seqused_k)


class MHA(nn.Module):
    """Multi-head self- or cross-attention with its projections.

    Args:
        embed_dim: width of input and output, a multiple of num_heads.
        num_heads_kv: heads of k and v, a divisor of num_heads; None = num_heads.
        cross_attn: queries from x (`Wq`), keys and values from x_kv (`Wkv`); False: all from x (`Wqkv`).
        dropout: of the weights, in training mode.
        softmax_scale, causal, window_size: as in `flash_attn_func`. use_alibi: slopes by `get_alibi_slopes`.
        layer_idx: kept as an attribute.
        rotary_emb_dim: > 0: that many elements of each head are rotated (`RotaryEmbedding`, with the other rotary
            arguments); self-attention only.
        use_flash_attn: False: plain PyTorch attention, N × N, with the same results up to rounding.
        return_residual: forward returns (out, x).
        checkpointing: backward computes the inner attention again instead of keeping its results.
        dwconv, fused_bias_fc: must be False: depthwise convolutions and fused linear layers are not built.

    State dict: `Wqkv` or `Wq` and `Wkv`, and `out_proj`: weights, and biases if asked for. Heads of Wqkv: all of q, of
    k, of v.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Sequence[int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = True,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dwconv:
            raise NotImplementedError("dwconv=True: depthwise convolutions of q, k and v are not built")
        if fused_bias_fc:
            raise NotImplementedError("fused_bias_fc=True is not built; False computes the same with nn.Linear")
        if cross_attn and rotary_emb_dim > 0:
            raise NotImplementedError(
                f"rotary_emb_dim={rotary_emb_dim} with cross_attn=True: queries and keys share no positions"
            )
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if num_heads_kv <= 0 or num_heads % num_heads_kv != 0:
            raise ValueError(f"num_heads_kv must divide num_heads, {num_heads}; got {num_heads_kv}")
        if embed_dim % num_heads != 0:
            raise ValueError(f"embed_dim must be a multiple of num_heads, {num_heads}; got {embed_dim}")
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, num_heads_kv
        self.head_dim, self.cross_attn, self.causal, self.layer_idx = (
            embed_dim // num_heads,
            cross_attn,
            causal,
            layer_idx,
        )
        self.rotary_emb_dim, self.use_flash_attn = rotary_emb_dim, use_flash_attn
        self.return_residual, self.checkpointing = return_residual, checkpointing

        slopes = None
        if use_alibi:
            where = torch.empty(0, device=device).device  # slopes on the meta device could never be filled in
            slopes = torch.tensor(
                get_alibi_slopes(num_heads), dtype=torch.float32, device="cpu" if where.type == "meta" else where
            )
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        kv_dim = 2 * self.head_dim * num_heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, device=device, dtype=dtype)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, device=device, dtype=dtype)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, device=device, dtype=dtype)
        self_attention = FlashSelfAttention if use_flash_attn else SelfAttention
        cross_attention = FlashCrossAttention if use_flash_attn else CrossAttention
        options = dict(window_size=window_size, alibi_slopes=slopes)
        self.inner_attn = self_attention(causal, softmax_scale, dropout, **options)
        self.inner_cross_attn = cross_attention(causal, softmax_scale, dropout, **options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, device=device, dtype=dtype)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Not built: NotImplementedError."""
        raise NotImplementedError("MHA has no key/value cache yet")

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Tensor | slice | Sequence[int] | None = None,
        inference_params: object | None = None,
        *,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
        block_mask: BlockMask | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out like x, or (out, x) with return_residual.

        Args:
            x: (batch, seqlen, embed_dim), or with `cu_seqlens` (total, embed_dim).
            x_kv: (batch, seqlen_k, embed_dim) or (total_k, embed_dim), cross-attention only; None = x.
            key_padding_mask: bool, True = a real token: (batch, seqlen), of the keys; as in the inner modules.
            cu_seqlens, max_seqlen: sequences packed without padding; needs use_flash_attn. Cross-attention has
                cu_seqlens_k, max_seqlen_k for the keys besides.
            mixer_subset: cross-attention only: an index into the seqlen axis, the tokens of x that become queries.
            block_mask: as in the inner modules; needs use_flash_attn.
            inference_params: must be None: decoding with a key/value cache is not built.

        Equivalent to, with Wqkv, `num_heads_kv=None` and no rotary embedding::

            q, k, v = self.Wqkv(x).unflatten(-1, (3, heads, -1)).unbind(2)
            self.out_proj(flash_attn_func(q, k, v, ...).flatten(2))
        """
        if inference_params is not None:
            raise NotImplementedError("inference_params: MHA has no key/value cache yet")
        packed = any(length is not None for length in (cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k))
        if packed and not self.use_flash_attn:
            raise NotImplementedError("cu_seqlens and max_seqlen need use_flash_attn=True")
        if block_mask is not None and not self.use_flash_attn:
            raise NotImplementedError("block_mask needs use_flash_attn=True")
        options = {"key_padding_mask": key_padding_mask}
        if block_mask is not None:
            options["block_mask"] = block_mask
        if not self.cross_attn:
            for name, value in (
                ("x_kv", x_kv),
                ("mixer_subset", mixer_subset),
                ("cu_seqlens_k", cu_seqlens_k),
                ("max_seqlen_k", max_seqlen_k),
            ):
                if value is not None:
                    raise ValueError(f"{name} must be None: this is self-attention (cross_attn=False)")
            context = self._self_attention(x, options, cu_seqlens, max_seqlen)
        else:
            if mixer_subset is not None and cu_seqlens is not None:
                raise ValueError("mixer_subset must be None where cu_seqlens is given")
            queries = x if mixer_subset is None else x[:, mixer_subset]
            lengths = (cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k)
            context = self._cross_attention(queries, x if x_kv is None else x_kv, options, lengths)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _self_attention(
        self, x: Tensor, options: dict[str, object], cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> Tensor:
        qkv = self.Wqkv(x).unflatten(-1, (self.num_heads + 2 * self.num_heads_kv, self.head_dim))
        if self.rotary_emb_dim > 0:
            qkv = self.rotary_emb(qkv, max_seqlen=max_seqlen, num_heads_q=self.num_heads, cu_seqlens=cu_seqlens)
        num_heads_q = None if self.num_heads == self.num_heads_kv else self.num_heads
        if num_heads_q is None:
            qkv = qkv.unflatten(-2, (3, self.num_heads))

        def attend(qkv: Tensor) -> Tensor:
            lengths = (cu_seqlens, max_seqlen) if self.use_flash_attn else ()
            return self.inner_attn(qkv, None, *lengths, num_heads_q=num_heads_q, **options)

        return checkpoint(attend, qkv, use_reentrant=False) if self.checkpointing else attend(qkv)

    def _cross_attention(
        self,
        queries: Tensor,
        x_kv: Tensor,
        options: dict[str, object],
        lengths: tuple[Tensor | None, int | None, Tensor | None, int | None],
    ) -> Tensor:
        q = self.Wq(queries).unflatten(-1, (self.num_heads, self.head_dim))
        kv = self.Wkv(x_kv).unflatten(-1, (2, self.num_heads_kv, self.head_dim))

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            return self.inner_cross_attn(q, kv, None, *(lengths if self.use_flash_attn else ()), **options)

        return checkpoint(attend, q, kv, use_reentrant=False) if self.checkpointing else attend(q, kv)
