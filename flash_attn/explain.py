"""Which backend would serve a call, with what, and why the others would not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn import _ops, checks, dispatch, reference
from flash_attn.block_mask import BlockMask, lists_of


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. `str()` of it is a report to read."""

    backend: str | None  # that serves the call; None: none does
    kernel: str  # its instruction set or kernel
    tile: tuple[int, int]  # query rows × keys
    threads: int  # on the CPU
    forward_workspace_bytes: int  # beside inputs and outputs
    backward_workspace_bytes: int  # the same, without the gradient of a bias
    refusals: dict[str, str]  # the other backends, each with the reason why it does not serve the call

    def __str__(self) -> str:
        lines = ["no backend serves this call"]
        if self.backend is not None:
            lines = [
                f"backend {self.backend}: {self.kernel}, tiles of {self.tile[0]} query rows × {self.tile[1]} keys, "
                f"{self.threads} thread(s)",
                f"workspace: {self.forward_workspace_bytes / 2**20:.2f} MiB forward, "
                f"{self.backward_workspace_bytes / 2**20:.2f} MiB backward",
            ]
        return "\n".join([*lines, *(f"not {name}: {reason}" for name, reason in self.refusals.items())])


def explain(
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
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    learnable_sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    backend: str = "auto",
) -> Explanation:
    """Which backend, instruction set or kernel, tile and workspace would serve a call, and why the others would not.

    Arguments as in `flash_attn_func`, or, with cu_seqlens and max_seqlen, as in `flash_attn_varlen_func`. Computes
    nothing and draws no seed; meta tensors will do, and count as CPU tensors. Varlen sequences are taken to be
    max_seqlen long.

    Raises:
        What the call itself would raise for wrong arguments (not for a missing kernel: that is the answer).

        >>> print(flash_attn.explain(q, k, v, causal=True))
    """
    checks.backend_name(backend)
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.require_tensor(name, x)
    q, k, v, bias = dispatch.autocast(q, k, v, bias)
    bias, _, problem = checks.attention(
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
        bias=bias,
        mask=mask,
        learnable_sink=learnable_sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_q=leftpad_q,
        leftpad_k=leftpad_k,
        blocks=lists_of(block_mask),
    )
    chosen, refusals = None, {}
    for name in ("cpu", "wgmma", "mma_sync", "reference"):  # in the order in which "auto" takes them
        if name == "reference" and backend == "auto":
            refusals[name] = 'plain PyTorch, slow: only backend="reference" asks for it'
            continue
        try:
            dispatch.choose_backend(name, q, k, v, problem, bias)
        except NotImplementedError as error:
            refusals[name] = str(error)
        else:
            if backend in ("auto", name) and chosen is None:
                chosen = name
            elif backend == "auto":
                refusals[name] = f"{chosen} kernels serve this call too, and are faster"
            else:
                refusals[name] = f'backend="{backend}" asks for another'
    batch = q.shape[0] if problem.cu_seqlens_q is None else problem.cu_seqlens_q.shape[0] - 1
    heads, heads_k, dim, dim_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    if chosen == "cpu":
        numbers, name = _ops.plan(
            torch.ops.flash_attn.cpu_plan,
            (torch.float64, torch.float32, torch.float16, torch.bfloat16).index(q.dtype),
            batch,
            heads,
            heads_k,
            problem.max_seqlen_q,
            problem.max_seqlen_k,
            dim,
            dim_v,
            problem.drops,
            problem.softcap > 0,
        )
        rows, keys, threads, forward, backward = numbers
        return Explanation(chosen, f"{name} micro-kernels", (rows, keys), threads, forward, backward, refusals)
    if chosen in _ops.FAMILIES:
        plan = dispatch.gpu_plan(chosen, q, k, v, problem, bias)
        name = f"{chosen} kernel for sm_{plan.arch}, head dims up to {plan.head_dim}, {plan.variant}"
        if plan.queries < plan.tile[0]:
            name += ", heads that share keys in one tile"
        # Of backward, always mma_sync's: dq in fp32, and delta; both in whole blocks of rows.
        backward = q.numel() // max(1, dim) * 4 * (plan.head_dim + 1)
        return Explanation(chosen, name, plan.tile, 1, 0, backward, refusals)
    if chosen == "reference":
        tile = (min(reference.BLOCK_ROWS, problem.max_seqlen_q), min(reference.BLOCK_COLUMNS, problem.max_seqlen_k))
        together = 1 if problem.has_lengths else max(1, reference.TILE_ELEMENTS // max(1, heads * tile[0] * tile[1]))
        item, together = (8 if q.dtype == torch.float64 else 4), min(batch, together)
        tile_bytes = together * heads * tile[0] * tile[1] * item
        row_bytes = together * heads * problem.max_seqlen_q * max(dim, dim_v) * item
        # Tiles (S, P, temporaries; dP, dS) and the accumulators of whole sequences, as PyTorch holds them at once.
        forward, backward = 4 * tile_bytes + 2 * row_bytes, 6 * tile_bytes + 3 * row_bytes
        return Explanation(chosen, "PyTorch", tile, torch.get_num_threads(), forward, backward, refusals)
    return Explanation(None, "", (0, 0), 0, 0, 0, refusals)
