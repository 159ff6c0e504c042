"""Packing and unpacking of padded batches: plain indexing says what must come out."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from flash_attn import bert_padding
from flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

NAN = float("nan")
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]])
PLACES = [0, 1, 2, 10, 11, 12, 13, 14, 16, 18]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("tail", [(), (6,), (2, 3)])
def test_unpad_and_pad(tail, dtype):
    x = torch.randn(4, 5, *tail)
    x[MASK == 0] = NAN
    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, MASK.to(dtype))
    assert torch.equal(rows, x.flatten(0, 1)[PLACES]) and indices.tolist() == PLACES
    assert cu_seqlens.tolist() == [0, 3, 3, 8, 10] and seqused.tolist() == [3, 0, 5, 2]
    assert type(max_seqlen) is int and max_seqlen == 5
    assert indices.dtype == torch.int64 and cu_seqlens.dtype == seqused.dtype == torch.int32
    assert torch.equal(pad_input(rows, indices, 4, 5), x.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unused_tokens_get_rows_but_are_not_counted(dtype):
    x = torch.randn(2, 4, 3)
    used = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], dtype=dtype)
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 1]], dtype=dtype)
    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, used, unused)
    assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7] and torch.equal(rows, x.flatten(0, 1)[indices])
    assert (cu_seqlens.tolist(), max_seqlen, seqused.tolist()) == ([0, 3, 7], 4, [2, 1])


@pytest.mark.parametrize("shape", [(3, 4, 2), (0, 4, 2), (3, 0, 2)])
def test_nothing_to_keep(shape):
    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(torch.randn(shape), torch.zeros(shape[:2]))
    assert rows.shape == (0, 2) and cu_seqlens.tolist() == [0] * (shape[0] + 1) and max_seqlen == 0
    assert seqused.tolist() == [0] * shape[0]
    padded = pad_input(rows, indices, *shape[:2])
    assert padded.shape == shape and (padded == 0).all()


def test_concatenated_sequences():
    x = torch.randn(3, 6, 2)
    in_length = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 0, 2, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, in_length)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert torch.equal(rows, x.flatten(0, 1)[indices]) and type(max_seqlen) is int
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32 and max_seqlen == 6
    nothing = unpad_input_for_concatenated_sequences(x, torch.zeros(3, 6).int())
    assert nothing[0].shape == (0, 2) and nothing[2].tolist() == [0] and nothing[3] == 0
    for wrong in ([[7, 0, 0, 0, 0, 0]] * 3, [[-1, 0, 0, 0, 0, 0]] * 3):
        with pytest.raises(RuntimeError, match="row sums <= seqlen 6"):
            unpad_input_for_concatenated_sequences(x, torch.tensor(wrong))


def test_gradients():
    x = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor(PLACES)
    rows = torch.randn(len(PLACES), 2, 3, dtype=torch.float64, requires_grad=True)
    table = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    repeated = torch.tensor([5, 0, 5, 2])  # rows taken twice add up
    for function, inputs in (
        (lambda x: unpad_input(x, MASK)[0], (x,)),
        (lambda rows: pad_input(rows, indices, 4, 5), (rows,)),
        (lambda table: index_first_axis(table, repeated), (table,)),
        (lambda rows: index_put_first_axis(rows, indices, 20), (rows,)),
        (lambda table: index_first_axis_residual(table, repeated), (table,)),
    ):
        assert gradcheck(function, inputs) and gradgradcheck(function, inputs)


def test_padding_gets_no_gradient():
    x = torch.randn(4, 5, 3, requires_grad=True)
    unpad_input(x, MASK)[0].square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach() * MASK.unsqueeze(-1))


def test_residual_returns_rows_and_input():
    x = torch.randn(6, 2, requires_grad=True)
    rows, residual = index_first_axis_residual(x, torch.tensor([4, 1]))
    assert torch.equal(rows, x[[4, 1]]) and torch.equal(residual, x)


def test_transforms_and_compile():
    x, indices = torch.randn(3, 10, 2), torch.tensor([1, 5, 7])
    taken = torch.func.vmap(lambda x: index_first_axis(x, indices))(x)
    assert torch.equal(taken, x[:, indices])
    gradient = torch.func.grad(lambda x: index_first_axis(x, indices).square().sum())(x[0])
    assert torch.equal(gradient.nonzero()[:, 0].unique(), indices)

    def round_trip(rows):
        return index_first_axis(pad_input(rows, indices, 2, 5).flatten(0, 1), indices) * 2

    rows = torch.randn(3, 2, requires_grad=True)
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")(rows)
    assert torch.equal(compiled, 2 * rows)
    compiled.sum().backward()
    assert (rows.grad == 2).all()


def test_names_and_parameters():
    """What code written for flash-attn imports and passes by name."""
    assert list(inspect.signature(unpad_input).parameters) == ["hidden_states", "attention_mask", "unused_mask"]
    assert list(inspect.signature(pad_input).parameters) == ["hidden_states", "indices", "batch", "seqlen"]
    for name in ("IndexFirstAxis", "IndexPutFirstAxis", "IndexFirstAxisResidual"):
        assert issubclass(getattr(bert_padding, name), torch.autograd.Function)


def test_errors():
    x = torch.randn(4, 5, 3)
    with pytest.raises(RuntimeError, match=r"attention_mask must be \(batch, seqlen\) = \(4, 5\).*got \(4, 6\)"):
        unpad_input(x, torch.ones(4, 6))
    with pytest.raises(RuntimeError, match="unused_mask must be"):
        unpad_input(x, MASK, MASK[:2])
    with pytest.raises(RuntimeError, match="hidden_states must be"):
        unpad_input(torch.randn(4), torch.ones(4))
    with pytest.raises(RuntimeError, match="indices must hold 4 entries.*got 2"):
        pad_input(x, torch.tensor([0, 1]), 2, 5)
    with pytest.raises(RuntimeError, match="indices must be int32 or int64"):
        index_first_axis(x, torch.tensor([0.0, 1.0]))
    with pytest.raises((RuntimeError, IndexError)):
        index_first_axis(x, torch.tensor([4]))
