"""What attention means, in fp64, written from the definition and from nothing in the package.

`attention` is a dense brute force: one loop over sequences, every (query, key) pair compared by position, gradients by
autograd. `naive_attention` is what a user would write in plain PyTorch in the inputs' own dtype: its error is the
yardstick. `keep_mask` draws dropout from its own Philox. Nothing here imports `flash_attn`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ONE_BY_ONE = "one by one"  # an order of summation: see naive_attention
MASK32 = np.uint64(0xFFFFFFFF)


@dataclass
class Options:
    """One attention call without its differentiable tensors. Names and meaning as in the public functions.

    `keep` is bool (batch, heads, >= rows, >= columns), indexed by position within the sequence: True = kept.
    """

    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_q: Tensor | None = None
    leftpad_k: Tensor | None = None
    dropout_p: float = 0.0
    keep: Tensor | None = None


@dataclass
class Sequence:
    """Where sequence `index` lives: q[where_q], k[where_k]; its rows and columns of bias and mask."""

    index: int
    where_q: tuple
    where_k: tuple
    rows: slice
    columns: slice

    @property
    def seqlen_q(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def seqlen_k(self) -> int:
        return self.columns.stop - self.columns.start


def sequences(q: Tensor, k: Tensor, o: Options) -> Iterator[Sequence]:
    """The sequences of a call, with the real rows [leftpad, seqused) of each."""
    varlen = o.cu_seqlens_q is not None
    batch = len(o.cu_seqlens_q) - 1 if varlen else q.shape[0]
    for b in range(batch):
        start_q, end_q = (int(o.cu_seqlens_q[b]), int(o.cu_seqlens_q[b + 1])) if varlen else (0, q.shape[1])
        start_k, end_k = (int(o.cu_seqlens_k[b]), int(o.cu_seqlens_k[b + 1])) if varlen else (0, k.shape[1])
        rows = slice(
            int(o.leftpad_q[b]) if o.leftpad_q is not None else 0,
            int(o.seqused_q[b]) if o.seqused_q is not None else end_q - start_q,
        )
        columns = slice(
            int(o.leftpad_k[b]) if o.leftpad_k is not None else 0,
            int(o.seqused_k[b]) if o.seqused_k is not None else end_k - start_k,
        )
        span_q = slice(start_q + rows.start, start_q + rows.stop)
        span_k = slice(start_k + columns.start, start_k + columns.stop)
        yield Sequence(b, (span_q,) if varlen else (b, span_q), (span_k,) if varlen else (b, span_k), rows, columns)


def _part(t: Tensor, s: Sequence, heads: int) -> Tensor:
    """The (heads, seqlen_q, seqlen_k) part of a broadcastable bias or mask that belongs to sequence `s`."""
    t = t[(None,) * (4 - t.ndim)]
    t = t[s.index if t.shape[0] > 1 else 0]
    t = t[:, s.rows if t.shape[1] > 1 else slice(0, 1)]
    t = t[:, :, s.columns if t.shape[2] > 1 else slice(0, 1)]
    return t.expand(heads, s.seqlen_q, s.seqlen_k)


def visibility(s: Sequence, o: Options, heads: int) -> Tensor:
    """Bool (heads, seqlen_q, seqlen_k): which keys each query sees, by explicit comparison of positions."""
    i = torch.arange(s.seqlen_q)[:, None]
    j = torch.arange(s.seqlen_k)[None, :]
    diagonal = i + s.seqlen_k - s.seqlen_q  # the key position that query i is aligned with: lower right
    left, right = o.window[0], 0 if o.causal else o.window[1]
    visible = torch.ones(s.seqlen_q, s.seqlen_k, dtype=torch.bool)
    if left >= 0:
        visible &= j >= diagonal - left
    if right >= 0:
        visible &= j <= diagonal + right
    visible = visible.expand(heads, -1, -1)
    return visible if o.mask is None else visible & _part(o.mask, s, heads)


def _alibi(s: Sequence, o: Options) -> Tensor:
    """−slope·|i + seqlen_k − seqlen_q − j|, (heads, seqlen_q, seqlen_k), fp64."""
    i = torch.arange(s.seqlen_q, dtype=torch.float64)[:, None]
    j = torch.arange(s.seqlen_k, dtype=torch.float64)[None, :]
    slopes = o.alibi[s.index] if o.alibi.ndim == 2 else o.alibi
    return -slopes.double()[:, None, None] * (i + s.seqlen_k - s.seqlen_q - j).abs()


def _rows_exact(q, k, v, extra, bias_part, visible, sink, scale, softcap, keep):
    """One sequence, q (heads, n, dim): O, LSE and P in fp64; zero and −inf where nothing is visible."""
    scores = scale * (q @ k.mT)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if extra is not None:
        scores = scores + extra
    if bias_part is not None:
        hidden = bias_part == -math.inf
        scores = scores + bias_part.masked_fill(hidden, 0.0)
        visible = visible & ~hidden
    scores = torch.where(visible, scores, 0.0)
    top = scores.detach().masked_fill(~visible, -math.inf)
    top = torch.cat([top, top.new_full((*top.shape[:-1], 1), -math.inf)], -1).amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink.detach()[:, None, None])
    empty = top == -math.inf
    top = top.masked_fill(empty, 0.0)
    weights = torch.where(visible, torch.exp(torch.where(visible, scores - top, 0.0)), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink[:, None, None] - top)
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, top + torch.log(total))[..., 0]
    probabilities = weights / total
    dropped = probabilities if keep is None else probabilities * keep
    # 0 · NaN: a row that does not see a key must not get that key's NaN (nor its gradient): leave unseen keys out
    seen = visible.any(1)[..., None]
    return dropped @ torch.where(seen, v, 0.0), lse, probabilities


def _one_by_one(q: Tensor, k: Tensor) -> Tensor:
    """q @ k.mT, of which each element is summed from the first feature to the last."""
    sums = q.new_zeros(*q.shape[:-1], k.shape[-2])
    for d in range(q.shape[-1]):
        sums = sums + q[..., d, None] * k[..., None, :, d]
    return sums


def _rows_naive(q, k, v, extra, bias_part, visible, sink, scale, softcap, keep, one_by_one=False):
    """One sequence as a user writes it, in q's dtype."""
    scores = (_one_by_one(q, k) if one_by_one else q @ k.mT) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if extra is not None:
        scores = scores + extra.to(scores.dtype)
    if bias_part is not None:
        scores = scores + bias_part.to(scores.dtype)
    scores = scores.masked_fill(~visible, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    empty = (scores.detach() == -math.inf).all(-1, keepdim=True)
    scores = torch.where(empty, 0.0, scores)
    wide = scores.double() if scores.dtype == torch.float64 else scores.float()
    lse = torch.where(empty, -math.inf, wide.logsumexp(-1, keepdim=True) if wide.shape[-1] else 0.0)[..., 0]
    probabilities = torch.where(empty, 0.0, torch.softmax(scores, -1))
    if sink is not None:
        probabilities = probabilities[..., :-1]
    dropped = probabilities if keep is None else probabilities * keep.to(probabilities.dtype)
    return dropped @ v, lse, probabilities


def _attend(q, k, v, bias, sink, o: Options, rows, shuffle: torch.Generator | str | None, records: list | None):
    heads, heads_k, varlen = q.shape[-2], k.shape[-2], o.cu_seqlens_q is not None
    scale = o.scale if o.scale is not None else 1.0 / math.sqrt(q.shape[-1])
    stats_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.full((heads, q.shape[0]) if varlen else (q.shape[0], heads, q.shape[1]), -math.inf, dtype=stats_dtype)
    for s in sequences(q, k, o):
        qs = q[s.where_q].transpose(0, 1)
        ks = k[s.where_k].transpose(0, 1).repeat_interleave(heads // max(heads_k, 1), 0)
        vs = v[s.where_k].transpose(0, 1).repeat_interleave(heads // max(heads_k, 1), 0)
        visible = visibility(s, o, heads)
        extra = None if o.alibi is None else _alibi(s, o)
        bias_part = None if bias is None else _part(bias, s, heads)
        keep = None
        if o.keep is not None:
            keep = o.keep[s.index, :, : s.seqlen_q, : s.seqlen_k].double()
            keep = keep / (1.0 - o.dropout_p) if o.dropout_p < 1 else keep * 0.0
        back = None
        if isinstance(shuffle, torch.Generator):  # the same sums in another order: rows, keys and features permuted
            pi, pj, pd = (torch.randperm(n, generator=shuffle) for n in (s.seqlen_q, s.seqlen_k, q.shape[-1]))
            back = torch.argsort(pi)
            qs, ks, vs = qs[:, pi][..., pd], ks[:, pj][..., pd], vs[:, pj]
            visible = visible[:, pi][:, :, pj]
            extra, bias_part, keep = (None if t is None else t[:, pi][:, :, pj] for t in (extra, bias_part, keep))
        o_rows, lse_rows, p = rows(qs, ks, vs, extra, bias_part, visible, sink, scale, o.softcap, keep)
        if back is not None:
            o_rows, lse_rows = o_rows[:, back], lse_rows[:, back]
        out[s.where_q] = o_rows.transpose(0, 1)
        where_lse = (slice(None), *s.where_q) if varlen else (s.where_q[0], slice(None), s.where_q[1])
        lse[where_lse] = lse_rows
        if records is not None:
            records.append((s, p.detach()))
    return out, lse


def attention(q, k, v, bias=None, sink=None, options: Options | None = None, records: list | None = None):
    """The definition in fp64: out (like q, last dim dim_v), lse ((batch, heads, seqlen_q) or (heads, total_q)).

    q, k, v dense (batch, seqlen, heads, dim) or varlen (total, heads, dim). Differentiable. `records` collects
    (sequence, P) pairs.
    """
    q, k, v = q.double(), k.double(), v.double()
    bias, sink = (None if t is None else t.double() for t in (bias, sink))
    return _attend(q, k, v, bias, sink, options or Options(), _rows_exact, None, records)


def naive_attention(q, k, v, bias=None, sink=None, options: Options | None = None, shuffle=None):
    """The same in q's dtype, as plain PyTorch would: matmul, softmax, matmul. `shuffle` reorders all sums.

    ONE_BY_ONE for `shuffle`: q·k is summed feature by feature. A matrix product of PyTorch adds up several sums of
    fewer terms each, and rounds less often between two large terms that cancel than the order in which anyone would
    write it: up to d − 2 times, by eps/2 of the first of them, though the result may be near 0.
    """
    rows = functools.partial(_rows_naive, one_by_one=shuffle == ONE_BY_ONE)
    return _attend(q, k, v, bias, sink, options or Options(), rows, shuffle, None)


def rounding(q, k, v, out, dout, dlse, bias, sink, options: Options, records: list, coherent=False) -> dict[str, float]:
    """Rounding errors that O and the gradients cannot escape, however small they are themselves, by letter.

    dS = P · (dP − delta) cancels: a row with one key has dS = 0, equal keys have dQ = 0, a bias along the keys gets
    Σ dS = 0. What stays is the rounding of dP and of delta = rowsum(dO · O): their sizes (as root mean squares) times
    eps of the accumulator times sqrt(dim_v) (a random walk; at least 4, coherent 8); for half precision eps of O, which
    delta is made from. The error of delta is common to a row, so it adds up over keys and not as a random walk; with
    `coherent` (equal rows) it does so over rows as well. There P = exp2(S·log2 e − R) errs alike in all rows, too: an
    argument of up to 20 costs 20/2·ln 2 ≈ 8 eps of O ("o") and dV.
    """
    dtype = q.dtype
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    eps_out = torch.finfo(dtype).eps if dtype in (torch.float16, torch.bfloat16) else 0.0
    q, k, v, out, dout = (t.detach().double() for t in (q, k, v, out, dout))
    heads, group, varlen = q.shape[-2], q.shape[-2] // max(k.shape[-2], 1), options.cu_seqlens_q is not None
    scale = abs(options.scale) if options.scale is not None else 1.0 / math.sqrt(q.shape[-1])
    kept = 1.0 / (1.0 - options.dropout_p) ** 2 if options.dropout_p < 1 else 0.0
    p_error, o_size, dv_sum = 8 * eps if coherent else 0.0, 0.0, torch.zeros_like(v)
    eps *= max(8.0 if coherent else 4.0, math.sqrt(v.shape[-1]))
    dq_size, dk_walk, dk_sum = 0.0, torch.zeros_like(k), torch.zeros_like(k)
    dbias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float64)
    dsink = torch.zeros(heads, dtype=torch.float64)
    for s, p in records:
        if not p.numel():
            continue
        qs, os, gs = (t[s.where_q].transpose(0, 1) for t in (q, out, dout))
        ks, vs = (t[s.where_k].transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))
        o_size = max(o_size, float((p @ vs.abs()).max()))
        dv_sum[s.where_k] += (p.mT @ gs.abs()).unflatten(0, (-1, group)).sum(1).transpose(0, 1)
        of_output = (gs.square() * os.square()).sum(-1)
        delta = of_output
        if dlse is not None:
            where_lse = (slice(None), *s.where_q) if varlen else (s.where_q[0], slice(None), s.where_q[1])
            delta = delta + dlse[where_lse].double().square()
        accumulated = eps**2 * (kept * (gs.square() @ vs.square().mT) + delta[..., None])
        terms = p * (accumulated + eps_out**2 * of_output[..., None]).sqrt()
        dq_size = max(dq_size, float((terms.square() @ ks.square()).max().sqrt()), float((terms @ ks).abs().max()))
        dk_walk[s.where_k] += (terms.square().mT @ qs.square()).unflatten(0, (-1, group)).sum(1).transpose(0, 1)
        dk_sum[s.where_k] += (terms.mT @ qs).unflatten(0, (-1, group)).sum(1).transpose(0, 1)
        if dbias is not None:
            view = dbias[(None,) * (4 - dbias.ndim)]
            rows = s.rows if view.shape[2] > 1 else slice(0, 1)
            columns = s.columns if view.shape[3] > 1 else slice(0, 1)
            part = view[s.index if view.shape[0] > 1 else 0, :, rows, columns]
            by_row = terms if view.shape[3] > 1 else terms.sum(-1, keepdim=True)
            part += (by_row if coherent else by_row.square()).sum_to_size(*part.shape)
        of_sink = eps**2 * delta + eps_out**2 * of_output
        dsink += (of_sink.sqrt() if coherent else of_sink).sum(-1)
    if not coherent:
        dsink = dsink.sqrt()
        dbias = None if dbias is None else dbias.sqrt()
    dk_size = max(float(dk_walk.max().sqrt()), float(dk_sum.abs().max())) if dk_walk.numel() else 0.0
    return {
        "q": scale * dq_size, "k": scale * dk_size, "s": float(dsink.max()) if heads else 0.0,
        "b": float(dbias.max()) if dbias is not None and dbias.numel() else 0.0,
        "o": p_error * o_size, "v": p_error * float(dv_sum.max()) if dv_sum.numel() else 0.0,
    }  # fmt: skip


def lse_rounding(lse: Tensor, sink: Tensor | None, options: Options, records: list) -> float:
    """The rounding error that LSE cannot escape where it is near 0: an ulp of each number that it is made from.

    LSE = R + ln ℓ with R near m, the largest logit, and ℓ = Σ exp(S − R). What is stored has relative errors of its
    own, up to an ulp: R(1 + δ1), ℓ(1 + δ2) (exp and the sum round, even if one term is all there is) and
    (ln ℓ)(1 + δ3), |δi| ≤ eps. As ln(ℓ(1 + δ2)) ≈ ln ℓ + δ2, together |R|·δ1 + δ2 + ln ℓ·δ3: an absolute error of up
    to eps·(|R| + 1 + ln ℓ), however small their sum is. (Only that of R + ln ℓ itself is relative to LSE.)
    """
    varlen, worst = options.cu_seqlens_q is not None, 0.0
    for s, p in records:
        where = (slice(None), *s.where_q) if varlen else (s.where_q[0], slice(None), s.where_q[1])
        rows = lse[where]
        largest = torch.cat([p, p.new_zeros(*p.shape[:-1], 1)], -1).amax(-1)  # of P: exp(m − LSE) = 1 / ℓ
        if sink is not None:
            largest = torch.maximum(largest, torch.exp(sink.detach().double()[:, None] - rows))
        log_sum = -torch.log(largest)
        sizes = ((rows - log_sum).abs() + 1 + log_sum)[torch.isfinite(rows)]
        worst = max(worst, float(sizes.max()) if sizes.numel() else 0.0)
    return worst


def _maximum_error(x: Tensor, y: Tensor) -> float:
    """max |x − y| over the places where y is finite (0 for none)."""
    finite = torch.isfinite(y)
    return float((x[finite] - y[finite]).abs().max()) if finite.any() else 0.0


def assert_no_worse_than_naive(
    out: Tensor, fp64: Tensor, naive: Tensor | list[Tensor], factor: float = 2, name: str = "out",
    dtype: torch.dtype | None = None, unavoidable: float = 0.0,
) -> None:  # fmt: skip
    """Assert |out − fp64| ≤ factor · |naive − fp64| + 4·eps·max|fp64|, everything as a maximum over the tensor.

    NaN and infinities must stand where the reference has them. Several naive results (the same sums in another order)
    count with the worst of them: one order of a short sum may be exact by luck. Where naive is not finite though the
    reference is, the bound is 16·eps·max|fp64| alone. For fp64 inputs the reference is no better than naive and makes
    the same errors: the floor is 32·eps. `dtype`: whose eps (out's own). `unavoidable`: added to the bound, see
    `rounding`.
    """
    dtype = dtype or out.dtype
    assert out.shape == fp64.shape, f"{name}: shape {tuple(out.shape)}, not {tuple(fp64.shape)}"
    naives = [n.detach().double().cpu() for n in (naive if isinstance(naive, list) else [naive])]
    got, fp64 = out.detach().double().cpu(), fp64.detach().double().cpu()
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(got) != test(fp64)
        if wrong.any():
            where = tuple(int(n) for n in wrong.nonzero()[0])
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} places differ in being {kind}; first at {where}: "
                f"got {float(got[where])}, fp64 {float(fp64[where])}"
            )
    finite = torch.isfinite(fp64)
    if not finite.any():
        return
    largest = float(fp64[finite].abs().max())
    eps = torch.finfo(dtype).eps
    if all(torch.isfinite(n[finite]).all() for n in naives):
        floor = 32 if dtype == torch.float64 else 4
        bound = factor * max(_maximum_error(n, fp64) for n in naives) + floor * eps * largest
    else:
        bound = 16 * eps * largest
    bound += unavoidable
    error = _maximum_error(got, fp64)
    if not error <= bound:
        difference = torch.where(finite, (got - fp64).abs(), 0.0)
        where = tuple(int(n) for n in (difference == difference.max()).nonzero()[0])
        raise AssertionError(
            f"{name}: error {error:.3e} > bound {bound:.3e} (largest value {largest:.3e}) at {where}: "
            f"got {float(got[where]):.8g}, fp64 {float(fp64[where]):.8g}, naive {float(naives[0][where]):.8g}"
        )


def philox(counter: tuple, key: tuple, rounds: int = 7) -> tuple:
    """Philox4x32 (Salmon et al. 2011) on numpy uint64 scalars or arrays that hold 32-bit words."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    k0, k1 = (np.asarray(k, dtype=np.uint64) for k in key)
    for turn in range(rounds):
        if turn:
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & MASK32, (k1 + np.uint64(0xBB67AE85)) & MASK32
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & MASK32, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & MASK32
    return c0, c1, c2, c3


def keep_mask(
    seed: tuple[int, int], p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int, q_start: int = 0,
    k_start: int = 0,
) -> Tensor:  # fmt: skip
    """Bool (batch, heads, seqlen_q, seqlen_k): which elements dropout keeps, positions from (q_start, k_start) on."""
    s0, s1 = (int(s) & 0xFFFFFFFFFFFFFFFF for s in seed)
    threshold = math.floor(p * 65536 + 0.5)
    b, h = (np.arange(n, dtype=np.uint64).reshape(shape) for n, shape in ((batch, (-1, 1)), (heads, (1, -1))))
    zero = np.zeros((batch, heads), dtype=np.uint64)
    stream = philox((h + zero, b + zero, zero + np.uint64(s1 & 0xFFFFFFFF), zero + np.uint64(s1 >> 32)),
                    (s0 & 0xFFFFFFFF, s0 >> 32))  # fmt: skip
    stream = [w[:, :, None, None] for w in stream]
    q = (np.arange(seqlen_q, dtype=np.uint64) + np.uint64(q_start))[None, None, :, None]
    k = (np.arange(seqlen_k, dtype=np.uint64) + np.uint64(k_start))[None, None, None, :]

    def bit(x: np.ndarray, place: int) -> np.ndarray:
        return x >> np.uint64(place) & np.uint64(1)

    q_block, k_block = q >> np.uint64(4), k >> np.uint64(5)
    g = q_block * np.uint64(8) + (q & np.uint64(7))
    c = k_block * np.uint64(4) + (k >> np.uint64(1) & np.uint64(3))
    zero = np.zeros(np.broadcast_shapes(stream[0].shape, g.shape, c.shape), dtype=np.uint64)
    words = philox(
        ((g & MASK32) + zero, (c & MASK32) + zero, (stream[2] ^ (g >> np.uint64(32))) + zero,
         (stream[3] ^ (c >> np.uint64(32))) + zero), (stream[0], stream[1])
    )  # fmt: skip
    word = np.choose((bit(k, 0) * np.uint64(2) + bit(k, 4) + zero).astype(np.int64), words)
    draw = word >> (np.uint64(8) * (bit(k, 3) * np.uint64(2) + bit(q, 3))) & np.uint64(0xFF)
    phase = stream[1] + (q_block & MASK32) * np.uint64(0xC13FA9A9) + (k_block & MASK32) * np.uint64(0x91E10DA5)
    raised = (phase & MASK32) >> np.uint64(24) < np.uint64(threshold % 256)
    return torch.from_numpy(draw >= np.uint64(threshold // 256) + raised)
