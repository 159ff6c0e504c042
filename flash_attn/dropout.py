"""Which attention probabilities dropout keeps: a pure function of (seed, sequence, head, query position, key position).

Every backend draws the same bits (csrc/common/dropout.h states the same rule in C++), so a mask does not depend on the
backend, the tile size or the layout, and backward needs nothing but the seed.

Source of the generator, Philox4x32 with 7 rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011
(7 is the least number of rounds that passes all of BigCrush).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.problem import draw_threshold

MASK_32 = 0xFFFFFFFF
ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Steps of the thresholds' lattice in query and key blocks: 2**32 / x and 2**32 / x**2, x = 1.3247... (plastic number).
PHASE_STEPS = (0xC13FA9A9, 0x91E10DA5)

Words = tuple[Tensor, Tensor, Tensor, Tensor]

# (k & 16, k & 8, k & 1) of a group's eight keys, in their order.
_KEY_SLOTS = [(far, near, parity) for far in (0, 1) for near in (0, 1) for parity in (0, 1)]


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


def philox4x32(counter: Words, key: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> Words:
    """The Philox4x32 block cipher on 32-bit words held in int64 tensors (any device, any broadcastable shapes).

    counter: four, key: two int64 tensors with values in [0, 2**32). Returns four of the same kind.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for step in range(rounds):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        if step + 1 < rounds:
            k0, k1 = (k0 + KEY_STEPS[0]) & MASK_32, (k1 + KEY_STEPS[1]) & MASK_32
    return c0, c1, c2, c3


def keep_mask(seed: Tensor | None, dropout_p: float, batch: slice, heads: slice, q: slice, k: slice) -> Tensor | None:
    """The keep decisions of one tile, bool (batch, heads, q, k) on the seed's device; True = kept.

    Args:
        seed: int64 (2,), read as two unsigned 64-bit numbers; None: nothing is dropped, and None is returned.
        batch, heads, q, k: `slice(start, stop)` of sequence numbers, query heads, query and key positions (positions
            count from the left pads; any 64-bit number).

    One Philox call gives the sixteen 8-bit draws of a group, {q, q + 8} x ({k, k + 1} + {0, 8, 16, 24}). The threshold
    of a block of 16 x 32 positions is T >> 8, or one more with probability (T % 256) / 256, T = draw_threshold(p):

        stream = philox(counter=(head, sequence, low(seed[1]), high(seed[1])), key=(low(seed[0]), high(seed[0])))
        g = (q >> 4) * 8 + (q & 7),  c = (k >> 5) * 4 + ((k >> 1) & 3)
        w = philox(counter=(low(g), low(c), stream[2] ^ high(g), stream[3] ^ high(c)), key=(stream[0], stream[1]))
        draw(q, k) = byte ((k >> 3) & 1) * 2 + ((q >> 3) & 1) of w[(k & 1) * 2 + ((k >> 4) & 1)]
        phase = low(stream[1] + (q >> 4) * PHASE_STEPS[0] + (k >> 5) * PHASE_STEPS[1])
        kept iff draw >= (T >> 8) + (phase >> 24 < T % 256)
    """
    if seed is None:
        return None
    device = seed.device

    def numbers(span: slice) -> Tensor:
        return torch.arange(span.start, span.stop, device=device)

    sequence, head = numbers(batch).view(-1, 1, 1, 1), numbers(heads).view(-1, 1, 1)
    stream = philox4x32(
        (low_word(head), low_word(sequence), low_word(seed[1]), high_word(seed[1])),
        (low_word(seed[0]), high_word(seed[0])),
    )

    q_block, k_block = q.start >> 4, k.start >> 5  # the first ones
    q_blocks = numbers(slice(q_block, ((q.stop - 1) >> 4) + 1)).view(-1, 1)
    k_blocks = numbers(slice(k_block, ((k.stop - 1) >> 5) + 1))
    g = (q_blocks * 8 + numbers(slice(0, 8))).view(-1, 1)
    c = (k_blocks[:, None] * 4 + numbers(slice(0, 4))).view(-1)
    words = philox4x32(
        (low_word(g), low_word(c), stream[2] ^ high_word(g), stream[3] ^ high_word(c)), (stream[0], stream[1])
    )

    threshold = draw_threshold(dropout_p)
    phase = (
        stream[1] + _multiply(low_word(q_blocks), PHASE_STEPS[0])[1] + _multiply(low_word(k_blocks), PHASE_STEPS[1])[1]
    )
    raised = (low_word(phase) >> 24) < threshold % 256  # (batch, heads, query block, key block)
    least = (threshold >> 8) + raised.repeat_interleave(8, 2).repeat_interleave(4, 3)

    def kept(half: int) -> Tensor:
        """Of the upper or the lower 8 queries of each 16: (batch, heads, g, c, 8), as lie the keys of a group."""
        draws = [words[parity * 2 + far] >> (near * 16 + half * 8) & 0xFF for far, near, parity in _KEY_SLOTS]
        return torch.stack([draw >= least for draw in draws], dim=-1)

    keep = torch.stack([kept(0), kept(1)], dim=3).flatten(4, 5).flatten(2, 3)  # (batch, heads, 2 g + half, 8 c + slot)
    row, column = numbers(q), numbers(k)
    row = ((row >> 4) - q_block) * 16 + (row & 7) * 2 + ((row >> 3) & 1)
    column = ((column >> 5) - k_block) * 32 + ((column >> 1) & 3) * 8 + ((column >> 3) & 3) * 2 + (column & 1)
    return keep.index_select(2, row).index_select(3, column)


def dropout_mask(seed: Tensor, dropout_p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The dropout mask that every attention function of this package applies for this seed; N x N, for inspection.

    Args:
        seed: int64 (2,), what `dropout_seed=` takes.
        dropout_p: probability of dropping, in [0, 1]; rounded to a multiple of 2**-16. Weights of a block of 16 x 32
            are correlated by 4e-5 at 0.1, by at most 2**-8 (below 1 / 256 and above 255 / 256).
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
