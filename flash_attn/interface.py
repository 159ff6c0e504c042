"""The public attention functions: signatures and their meaning. dispatch.py does the work."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_attn import checks, dispatch
from flash_attn.block_mask import BlockMask


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Exact softmax attention that never writes the seqlen_q × seqlen_k matrix to memory.

    Args:
        q: (batch, seqlen_q, heads, dim), fp16, bf16, fp32 or fp64.
        k: (batch, seqlen_k, heads_k, dim), q's dtype and device; heads_k divides heads, and query head h reads
            key/value head h // (heads / heads_k) (grouped and multi-query attention).
        v: (batch, seqlen_k, heads_k, dim_v); dim_v may differ from dim.
        dropout_p: probability in [0, 1] with which a weight is dropped; the others are multiplied by 1 / (1 -
            dropout_p).
        softmax_scale: multiplies q·k; None = 1 / sqrt(dim).
        causal: query i sees key j iff j <= i + seqlen_k - seqlen_q (aligned to the lower right corner).
        window_size: (left, right): query i sees keys i + seqlen_k - seqlen_q - left ... + right, both ends included;
            -1 = unlimited. With `causal` right is 0.
        softcap: in (0, 1e30]: logits become softcap · tanh(logits / softcap), after the scale, before ALiBi and bias;
            0 = off.
        alibi_slopes: (heads,) or (batch, heads), fp32: adds -slope · |i + seqlen_k - seqlen_q - j|. A constant.
        deterministic: bitwise repeatable dq (dk and dv always are; the CPU backend repeats everything).
        return_attn_probs: return (out, lse, S_dmask), a debugging aid: with dropout S_dmask (batch, heads, seqlen_q,
            seqlen_k, both rounded up to 128) holds unnormalised weights, negative where dropped, N × N memory;
            without dropout it is empty. `attention_probs` gives exact weights of chosen rows.
        bias: added to the logits: q's dtype or fp32, broadcastable to (batch, heads, seqlen_q, seqlen_k),
            differentiable. -inf hides a key like a mask does.
        mask: bool, broadcastable to (batch, heads, seqlen_q, seqlen_k), True = may attend.
        block_mask: a `BlockMask` made for (seqlen_q, seqlen_k): only its blocks are computed, so time falls with them.
            Which elements are visible is the logical AND with all other options.
        learnable_sink: (heads,), a logit per head that joins the softmax's denominator only; differentiable.
        seqused_q, seqused_k: int32 or int64 (batch,): rows of q (of k and v) from this one on are padding.
        leftpad_q, leftpad_k: int32 or int64 (batch,): rows before this one are padding. The sequence is what lies in
            [leftpad, seqused): positions and seqlen_q, seqlen_k above count within it; rows and columns of bias and
            mask are those of the tensors.
        dropout_seed: int64 (2,); None draws it from torch's generator, so that `torch.manual_seed` repeats it.
        return_lse: return (out, lse).
        backend: "auto" takes the fastest that serves the call; "cpu", "reference" (plain PyTorch, any device),
            "mma_sync" (GPU kernels for Turing and newer), "wgmma" (forward kernels for Hopper alone; backward is
            mma_sync's). `explain` says what serves a call.

    Returns:
        out (batch, seqlen_q, heads, dim_v) in q's dtype. lse, the log-sum-exp of the logits (natural log, sink
        included), (batch, heads, seqlen_q), fp32 (fp64 for fp64), differentiable. A query that sees nothing, or is
        padding: out 0, lse -inf (with a sink, the sink, unless it is padding), gradients 0.

    Raises:
        RuntimeError: shapes, dtypes or devices of tensors, or the contents of lengths. ValueError: other options.
        TypeError: something that is no tensor where a tensor belongs.
        NotImplementedError: nothing serves the combination; the message says what to use instead.

    Arithmetic: fp32 accumulation and softmax (fp64 for fp64); memory O(seqlen). Under autocast q, k and v are cast.

    Source: Dao, Fu, Ermon, Rudra, Ré, "FlashAttention: fast and memory-efficient exact attention with IO-awareness"
        (2022),
    Algorithms 1 and 4.

    Equivalent to::

        s = softmax_scale * torch.einsum("bihd,bjhd->bhij", q, k) + bias
        s = s.masked_fill(~visible, -torch.inf)
        out = torch.einsum("bhij,bjhd->bihd", F.dropout(s.softmax(-1), dropout_p), v)
    """
    return dispatch.attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        learnable_sink=learnable_sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        dropout_seed=dropout_seed,
        return_lse=return_lse,
        backend=backend,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` with k and v in one tensor: kv (batch, seqlen_k, 2, heads_k, dim), and so its gradient.

    Equivalent to: `flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], ...)`.
    """
    k, v = checks.packed("kv", kv, 2, is_varlen=False)
    return dispatch.attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        learnable_sink=learnable_sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        dropout_seed=dropout_seed,
        return_lse=return_lse,
        backend=backend,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` with q, k and v in one tensor: qkv (batch, seqlen, 3, heads, dim), and so its gradient.

    Equivalent to: `flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], ...)`.
    """
    q, k, v = checks.packed("qkv", qkv, 3, is_varlen=False)
    return dispatch.attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        learnable_sink=learnable_sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        dropout_seed=dropout_seed,
        return_lse=return_lse,
        backend=backend,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` for sequences of different lengths, packed one after the other without padding.

    Args:
        q: (total_q, heads, dim); k: (total_k, heads_k, dim); v: (total_k, heads_k, dim_v).
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (batch + 1,): sequence b has the rows [cu_seqlens[b], cu_seqlens[b +
            1]). Lengths may be 0; with `seqused_q`, `seqused_k` the sequences are shorter than their segments (gaps).
        max_seqlen_q, max_seqlen_k: at least the longest segment; rows and columns of bias and mask, which are
            broadcastable to (batch, heads, max_seqlen_q, max_seqlen_k) and count from the start of each segment, as
            the blocks of a block_mask do, which is made for these two.
        block_table: not built yet.
        The others: as in `flash_attn_func`.

    Returns:
        out (total_q, heads, dim_v); lse (heads, total_q). Rows that belong to no sequence: out 0, lse -inf, gradients
        0; they are never read.

    Equivalent to: `flash_attn_func` on each sequence alone.
    """
    dispatch.refuse(
        "block_table", block_table, "paged keys and values are not built yet; gather them into k and v first"
    )
    return dispatch.attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        learnable_sink=learnable_sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        dropout_seed=dropout_seed,
        return_lse=return_lse,
        backend=backend,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_varlen_func` with k and v in one tensor: kv (total_k, 2, heads_k, dim).

    Equivalent to: `flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], ...)`.
    """
    k, v = checks.packed("kv", kv, 2, is_varlen=True)
    return dispatch.attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        learnable_sink=learnable_sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        dropout_seed=dropout_seed,
        return_lse=return_lse,
        backend=backend,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_varlen_func` with q, k and v in one tensor: qkv (total, 3, heads, dim).

    Equivalent to: `flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, ...)`.
    """
    q, k, v = checks.packed("qkv", qkv, 3, is_varlen=True)
    return dispatch.attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        learnable_sink=learnable_sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        dropout_seed=dropout_seed,
        return_lse=return_lse,
        backend=backend,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a key/value cache that grows in place: not built yet.

    Raises:
        NotImplementedError: always. `flash_attn_func` with `seqused_k` and `leftpad_k` reads a dense cache.
    """
    raise NotImplementedError(
        "flash_attn_with_kvcache is not built yet; flash_attn_func with seqused_k and leftpad_k reads a dense cache"
    )
