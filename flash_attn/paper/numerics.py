"""Error of attention and of its gradients against fp64, on usual and on adversarial inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from flash_attn.interface import flash_attn_func
from flash_attn.paper.contenders import plain_attention
from flash_attn.paper.options import Options
from flash_attn.paper.report import Report, Row, lengths_on_x_axis, row_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Error against fp64"
RESULTS = ("out", "dq", "dk", "dv")
CHUNK = 256  # query rows that the fp64 reference takes at a time


def _gaussian(q: Tensor, k: Tensor, v: Tensor) -> None:
    pass


def _outlier_channels(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Two channels of q and k are 20 times as large, as in trained models."""
    q[..., :2] *= 20
    k[..., :2] *= 20


def _peaked(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Logits up to 100: nearly all weight on a few keys."""
    q *= 8
    k *= 4


def _rising(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Later keys score higher: the running maximum moves in every block, and the output is rescaled each time."""
    q.abs_()
    ramp = torch.linspace(-2, 2, k.shape[1], dtype=k.dtype, device=k.device)
    k.mul_(0.1).add_(ramp[:, None, None])


def _offset(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Values of mean 100: a common part that the weights, which sum to 1, must keep."""
    v += 100


INPUTS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "gaussian": _gaussian,
    "outlier channels": _outlier_channels,
    "peaked": _peaked,
    "rising": _rising,
    "offset values": _offset,
}


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, dq, dk, dv in fp64: softmax(scale · QKᵀ)V by autograd, some rows at a time.

    All tensors: (batch, seqlen, heads, dim).
    """
    q, k, v, dout = (x.detach().double().transpose(1, 2) for x in (q, k, v, dout))
    k, v = k.requires_grad_(), v.requires_grad_()
    outs, dqs = [], []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows, drows in zip(q.split(CHUNK, 2), dout.split(CHUNK, 2), strict=True):
        rows = rows.clone().requires_grad_()
        out = plain_attention(rows, k, v)
        dq, *more = torch.autograd.grad(out, (rows, k, v), drows)
        outs.append(out.detach())
        dqs.append(dq)
        dk += more[0]
        dv += more[1]
    return [x.transpose(1, 2) for x in (torch.cat(outs, 2), torch.cat(dqs, 2), dk, dv)]


def heads_first(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An attention of (batch, heads, seqlen, dim) as one of (batch, seqlen, heads, dim)."""
    return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


ATTENTIONS = {
    "flash": flash_attn_func,
    "standard": heads_first(plain_attention),
    "torch": heads_first(scaled_dot_product_attention),
}


def errors(attend: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor, right: list[Tensor]) -> list[float]:
    """The largest error of each result, relative to the largest value of that result."""
    out = attend(*inputs)
    found = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    return [
        float((x.double() - y).abs().max() / y.abs().max().clamp(min=torch.finfo(torch.float64).tiny))
        for x, y in zip(found, right, strict=True)
    ]


def run(o: Options, report: Report) -> None:
    cases = [(dtype, kind, n) for dtype in o.dtypes for kind in INPUTS for n in o.lengths]
    for dtype, kind, seqlen in tqdm(cases, "numerics"):
        torch.manual_seed(o.seed)
        # Made in fp64 on the CPU, so that all devices get the same.
        shape = (o.batch, seqlen, o.heads, o.dim)
        values = [torch.randn(shape, dtype=torch.float64) for _ in range(4)]
        INPUTS[kind](*values[:3])
        *inputs, dout = (x.to(o.device, dtype) for x in values)
        inputs = [x.requires_grad_() for x in inputs]
        right = exact(*inputs, dout)
        for name in o.attentions:
            row: Row = {"dtype": str(dtype).removeprefix("torch."), "inputs": kind, "seqlen": seqlen, "attention": name}
            row |= dict(zip(RESULTS, errors(ATTENTIONS[name], inputs, dout, right), strict=True))
            report.add("errors", row)


def sections(o: Options, report: Report) -> list[str]:
    columns = {"dtype": "dtype", "inputs": "inputs", "seqlen": "seqlen", "attention": "attention"}
    text = [
        f"Largest error, relative to the largest value of that result. Batch {o.batch}, {o.heads} heads, d {o.dim}.\n",
        row_table(report.rows("errors"), columns | {name: name for name in RESULTS}),
    ]
    paired: dict[tuple, dict[str, Row]] = {}
    for row in report.rows("errors"):
        paired.setdefault((row["dtype"], row["inputs"], row["seqlen"]), {})[str(row["attention"])] = row
    ratios = [
        float(pair["flash"][name]) / float(pair["standard"][name])
        for pair in paired.values()
        if {"flash", "standard"} <= set(pair)
        for name in RESULTS
        if pair["standard"][name]
    ]
    if ratios:
        ratios.sort()
        text.append(
            f"- Error of flash over that of standard attention: median {ratios[len(ratios) // 2]:.2f}, "
            f"largest {ratios[-1]:.2f}, smallest {ratios[0]:.3f}."
        )
    return text


def plot(o: Options, report: Report) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(o.dtypes), figsize=(6.5 * len(o.dtypes), 5), squeeze=False, layout="constrained")
    for each, dtype in zip(axes[0], o.dtypes, strict=True):
        name = str(dtype).removeprefix("torch.")
        for color, kind in enumerate(INPUTS):
            for attention, style in zip(o.attentions, ("o-", "x--", "+:"), strict=False):
                rows = [
                    r
                    for r in report.rows("errors")
                    if (r["dtype"], r["inputs"], r["attention"]) == (name, kind, attention)
                ]
                if rows:
                    label = f"{kind}, {attention}"
                    each.plot([r["seqlen"] for r in rows], [r["out"] for r in rows], f"{style}C{color}", label=label)
        each.set(title=f"{name}: error of the output", xlabel="sequence length", yscale="log")
        lengths_on_x_axis(each, o.lengths)
    handles, labels = axes[0][0].get_legend_handles_labels()  # after an interruption the others may be empty
    axes[0][-1].legend(handles, labels, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure
