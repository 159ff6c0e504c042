"""Which attention probabilities dropout keeps: a pure function of (seed, sequence, head, query position, key position).

Every backend draws the same bits (csrc/common/dropout.h states the same rule in C++), so a mask does not depend on the
backend, the tile size or the layout, and backward needs nothing but the seed.

Source of the generator, Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.problem import draw_threshold

MASK_32 = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
DRAW_VALUES = 1 << 16  # a draw is a uniform 16-bit number

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def keep_scale(dropout_p: float) -> float:
    """1 / (1 - p), what kept probabilities are multiplied by; 0 where nothing is ever kept (p = 1)."""
    return 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0


def low_word(x: Tensor) -> Tensor:
    return x & MASK_32


def high_word(x: Tensor) -> Tensor:
    """The upper 32 bits as an unsigned number: the shift drags the sign along, the mask removes it."""
    return (x >> 32) & MASK_32


def _multiply(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """(high, low) words of the 64-bit product of two 32-bit numbers; no step exceeds 2**49: int64 never overflows."""
    upper, lower = (x >> 16) * multiplier, (x & 0xFFFF) * multiplier
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def philox4x32_10(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """The Philox4x32-10 block cipher on 32-bit words held in int64 tensors (any device, any broadcastable shapes).

    counter: four, key: two int64 tensors with values in [0, 2**32). Returns four of the same kind.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for step in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        if step + 1 < ROUNDS:
            k0, k1 = (k0 + KEY_STEPS[0]) & MASK_32, (k1 + KEY_STEPS[1]) & MASK_32
    return c0, c1, c2, c3


def keep_mask(seed: Tensor | None, dropout_p: float, batch: slice, heads: slice, q: slice, k: slice) -> Tensor | None:
    """The keep decisions of one tile, bool (batch, heads, q, k) on the seed's device; True = kept.

    Args:
        seed: int64 (2,), read as two unsigned 64-bit numbers; None: nothing is dropped, and None is returned.
        batch, heads, q, k: `slice(start, stop)` of sequence numbers, query heads, query and key positions (positions
            count from the left pads; any 64-bit number).

    One Philox call per group gives the eight 16-bit draws of {q, q + 8} x {k, k + 8, k + 16, k + 24}:

        stream = philox(counter=(head, sequence, low(seed[1]), high(seed[1])), key=(low(seed[0]), high(seed[0])))
        g = (q >> 4) * 8 + (q & 7),  c = (k >> 5) * 8 + (k & 7)
        w = philox(counter=(low(g), low(c), stream[2] ^ high(g), stream[3] ^ high(c)), key=(stream[0], stream[1]))
        draw(q, k) = (w[(k >> 3) & 3] >> (16 * ((q >> 3) & 1))) & 0xFFFF;   kept iff draw >= draw_threshold(dropout_p)
    """
    if seed is None:
        return None
    device = seed.device

    def numbers(span: slice) -> Tensor:
        return torch.arange(span.start, span.stop, device=device)

    sequence, head = numbers(batch).view(-1, 1, 1, 1), numbers(heads).view(-1, 1, 1)
    stream = philox4x32_10(
        (low_word(head), low_word(sequence), low_word(seed[1]), high_word(seed[1])),
        (low_word(seed[0]), high_word(seed[0])),
    )

    first_g, first_c = (q.start >> 4) * 8, (k.start >> 5) * 8
    g = numbers(slice(first_g, ((q.stop - 1) >> 4) * 8 + 8)).view(-1, 1)
    c = numbers(slice(first_c, ((k.stop - 1) >> 5) * 8 + 8))
    words = philox4x32_10(
        (low_word(g), low_word(c), stream[2] ^ high_word(g), stream[3] ^ high_word(c)), (stream[0], stream[1])
    )

    threshold = draw_threshold(dropout_p)
    word = torch.stack(words, dim=-1)  # (batch, heads, g, c, word)
    kept = torch.stack([(word & 0xFFFF) >= threshold, (word >> 16) >= threshold], dim=3)  # (..., g, half, c, word)
    kept = kept.flatten(4, 5).flatten(2, 3)  # (batch, heads, 2 g + half, 4 c + word)
    row, column = numbers(q), numbers(k)
    row = ((row >> 4) * 8 + (row & 7) - first_g) * 2 + ((row >> 3) & 1)
    column = ((column >> 5) * 8 + (column & 7) - first_c) * 4 + ((column >> 3) & 3)
    return kept.index_select(2, row).index_select(3, column)


def dropout_mask(seed: Tensor, dropout_p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The dropout mask that every attention function of this package applies for this seed; N x N, for inspection.

    Args:
        seed: int64 (2,), what `dropout_seed=` takes.
        dropout_p: probability of dropping, in [0, 1]; rounded to a multiple of 2**-16.
        batch, heads, seqlen_q, seqlen_k: number of sequences, of query heads, of query and of key positions. Positions
            count from the left pads; a longer mask contains a shorter one.

    Returns: bool (batch, heads, seqlen_q, seqlen_k) on seed's device, True = kept. p < 2**-17 keeps all, p = 1 none.

    Raises: RuntimeError for a seed of another type, dtype or shape; ValueError for p outside [0, 1] or a negative size.

    Equivalent to: M in `(softmax(S) * M / (1 - dropout_p)) @ v`, which is `flash_attn_func(..., dropout_seed=seed)`.
    """
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.shape != (2,):
        shown = f"{seed.dtype} {tuple(seed.shape)}" if isinstance(seed, Tensor) else repr(seed)
        raise RuntimeError(f"seed must be an int64 tensor of shape (2,), got {shown}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    if draw_threshold(dropout_p) == 0:
        return torch.ones(tuple(sizes.values()), dtype=torch.bool, device=seed.device)
    return keep_mask(seed, dropout_p, *(slice(0, size) for size in sizes.values()))
