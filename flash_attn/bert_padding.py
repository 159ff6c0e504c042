"""Between padded batches (batch, seqlen, ...) and packed rows (total, ...), as `flash_attn_varlen_func` takes them.

The names and results are those that code written for flash-attn imports. All functions are differentiable to any order
in reverse mode.
`pad_input` and the `index_*` functions compile without graph breaks; how many rows `unpad_input` returns depends on the
contents of the mask, so it waits for the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def _check_indices(name: str, x: Tensor, indices: Tensor) -> None:
    if x.dim() == 0:
        raise RuntimeError(f"{name} must have at least one dimension, got a scalar")
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"indices must be int32 or int64 (rows,), got {indices.dtype} {tuple(indices.shape)}")


class IndexFirstAxis(Function):
    """`index_first_axis(input, indices)`: rows of input, (rows, ...) -> (len(indices), ...).

    Equivalent to `input[indices]`. Backward adds the gradient of each row to the row that it came from.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, indices: Tensor) -> Tensor:
        _check_indices("input", input, indices)
        return input.index_select(0, indices)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        input, indices = inputs
        ctx.save_for_backward(indices)
        ctx.rows = input.shape[0]

    @staticmethod
    def backward(ctx, dout: Tensor):
        (indices,) = ctx.saved_tensors
        return dout.new_zeros(ctx.rows, *dout.shape[1:]).index_add(0, indices, dout), None


class IndexPutFirstAxis(Function):
    """`index_put_first_axis(values, indices, first_axis_dim)`: rows to their places, zeros elsewhere.

    (len(indices), ...) -> (first_axis_dim, ...); the indices must differ from each other.
    Equivalent to `out = zeros(first_axis_dim, ...); out[indices] = values`. Backward picks the rows' gradients.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
        _check_indices("values", values, indices)
        if indices.shape[0] != values.shape[0]:
            raise RuntimeError(f"indices must hold {values.shape[0]} entries, one a row of values, got {len(indices)}")
        return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, dout: Tensor):
        (indices,) = ctx.saved_tensors
        return dout.index_select(0, indices), None, None


class IndexFirstAxisResidual(Function):
    """`index_first_axis_residual(input, indices)` -> (input[indices], input): for a residual branch beside packed rows.

    Backward adds the rows' gradients into the residual's: one pass instead of a zero-filled tensor and a sum.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        _check_indices("input", input, indices)
        # An alias: a Function that returned input itself would have to treat it as a view or as changed in place.
        return input.index_select(0, indices), input.detach()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, dout: Tensor, dresidual: Tensor):
        (indices,) = ctx.saved_tensors
        return dresidual.index_add(0, indices, dout), None


index_first_axis = IndexFirstAxis.apply
index_put_first_axis = IndexPutFirstAxis.apply
index_first_axis_residual = IndexFirstAxisResidual.apply


def _check_padded(hidden_states: Tensor, mask: Tensor, name: str) -> None:
    if hidden_states.dim() < 2:
        raise RuntimeError(f"hidden_states must be (batch, seqlen, ...), got {tuple(hidden_states.shape)}")
    if mask.shape != hidden_states.shape[:2]:
        expected = tuple(hidden_states.shape[:2])
        raise RuntimeError(f"{name} must be (batch, seqlen) = {expected} like hidden_states, got {tuple(mask.shape)}")


def _packed_lengths(seqlens: Tensor) -> tuple[Tensor, int]:
    """int32 lengths (batch,) -> cu_seqlens int32 (batch + 1,) and the greatest length (0 for an empty batch)."""
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return cu_seqlens, int(seqlens.max().item()) if seqlens.shape[0] else 0


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop the padding of a batch.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or a number: non-zero = a real token.
        unused_mask: (batch, seqlen): non-zero = a token that gets a row although it is not used (room that the caller
            fills later); for `seqused` to describe them, used tokens must precede unused ones.

    Returns (rows, indices, cu_seqlens, max_seqlen, seqused):
        rows: (total, ...), the tokens of either mask in order; total = their number.
        indices: int64 (total,), their places in the flattened (batch * seqlen); what `pad_input` takes.
        cu_seqlens: int32 (batch + 1,), where each sequence begins in rows.
        max_seqlen: int, the longest sequence; 0 if there is none.
        seqused: int32 (batch,), tokens of attention_mask alone; what `seqused_q` / `seqused_k` take.

    Raises: RuntimeError if a mask's shape is not hidden_states' (batch, seqlen).

    Equivalent to: `hidden_states.flatten(0, 1)[(attention_mask + unused_mask).flatten() != 0]`.
    """
    _check_padded(hidden_states, attention_mask, "attention_mask")
    used = attention_mask.bool()
    kept = used
    if unused_mask is not None:
        _check_padded(hidden_states, unused_mask, "unused_mask")
        kept = used | unused_mask.bool()
    cu_seqlens, max_seqlen = _packed_lengths(kept.sum(-1, dtype=torch.int32))
    indices = kept.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, max_seqlen, used.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Drop the padding of a batch whose rows each hold several samples, one after the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: integers (batch, seqlen): the non-zero entries of row b are the lengths of its samples
            in order, in any columns. [[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]]: row 0 holds a sample of 2, one of 3 and
            one token of padding; row 1 holds one sample of 6.

    Returns (rows, indices, cu_seqlens, max_seqlen) as `unpad_input`, where each sample is a sequence of its own.

    Raises: RuntimeError if the mask is not (batch, seqlen), a length is negative, or a row's lengths exceed seqlen.
    """
    _check_padded(hidden_states, attention_mask_in_length, "attention_mask_in_length")
    seqlen = hidden_states.shape[1]
    lengths = attention_mask_in_length.long()
    row_lengths = lengths.sum(-1, keepdim=True)
    if ((lengths < 0).any() | (row_lengths > seqlen).any()).item():
        rule = f"lengths >= 0 with row sums <= seqlen {seqlen}"
        raise RuntimeError(f"attention_mask_in_length must hold {rule}, got {lengths.tolist()}")
    indices = (torch.arange(seqlen, device=lengths.device) < row_lengths).flatten().nonzero().flatten()
    cu_seqlens, max_seqlen = _packed_lengths(lengths[lengths != 0].int())
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed rows back: the inverse of `unpad_input`, with zeros where the padding was.

    Args: hidden_states: (total, ...); indices: int64 (total,) from `unpad_input`; batch, seqlen: the padded sizes.

    Returns: (batch, seqlen, ...).

    Raises: RuntimeError if indices does not have one entry per row.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
