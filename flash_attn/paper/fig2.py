"""Figure 2 of the paper: FLOPs, memory traffic and time of GPT-2 medium's attention; block sizes; sparsity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from flash_attn import gpus, io_model, reference
from flash_attn.baselines import tiled_attention
from flash_attn.io_model import Blocks, Cost, Workload
from flash_attn.paper import contenders, measure, ncu
from flash_attn.paper.options import Options
from flash_attn.paper.report import Report, Row, line_through, row_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Figure 2: FLOPs, memory traffic and time of attention"
DROPOUT = 0.1
BLOCK_COLUMNS = (64, 128, 256, 512)  # the paper's middle panel
DENSITIES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
SPARSE_LENGTHS = 4  # the panel at the right: 4k where the others are 1k
# An A100, forward and backward, batch 64, 16 heads, seqlen 1024, d 64: the table at the left of Figure 2.
PAPER = {"standard": ("66.6", "40.3", "41.7"), "flash": ("75.2", "4.4", "7.3")}


def workload(o: Options, dropout_p: float = 0.0) -> Workload:
    return Workload(o.lengths[0], o.dim, o.heads, o.batch, o.dtype, dropout=dropout_p > 0)


def gpu_of(o: Options) -> io_model.Gpu | None:
    """The card's figures, if it is one that we have figures of."""
    if o.device.type != "cuda":
        return None
    try:
        return gpus.find_gpu(torch.cuda.get_device_name(o.device))
    except ValueError:
        return None


def predicted(name: str, w: Workload, gpu: io_model.Gpu | None) -> Cost | None:
    """What the model says of an attention that it knows."""
    if name == "standard":
        return io_model.standard_in_pytorch(w)
    return io_model.kernels(w, gpu) if name == "flash" else None


def run(o: Options, report: Report) -> None:
    gpu = gpu_of(o)
    reason = ncu.unavailable(o.ncu, o.device)
    if reason:
        report.note(f"No measured GB: {reason}.")
    steps = 2 * len(o.attentions) + len(BLOCK_COLUMNS) + len(DENSITIES)
    with tqdm(total=steps, desc="fig2") as bar:
        for name in o.attentions:
            for dropout_p in (0.0, DROPOUT):
                report.add("attention", attention_row(o, name, dropout_p, gpu, report, reason))
                bar.update()
        for columns in BLOCK_COLUMNS:
            report.add("blocks", block_row(o, columns))
            bar.update()
        for density in DENSITIES:
            s = o.setting(SPARSE_LENGTHS * o.lengths[0])
            seconds = measure.seconds(contenders.random_blocks(s, density).both(), o.device, o.seconds)
            report.add("sparsity", {"density": contenders.kept_blocks(s, density)[1], "ms": 1e3 * seconds})
            bar.update()


def attention_row(
    o: Options, name: str, dropout_p: float, gpu: io_model.Gpu | None, report: Report, no_counters: str
) -> Row:
    s = replace(o.setting(o.lengths[0]), dropout_p=dropout_p)
    row: Row = {"attention": name, "dropout": dropout_p}
    cost = predicted(name, workload(o, dropout_p), gpu)
    if cost is not None:
        row |= {"GFLOP": cost.flops / 1e9, "model_GB": cost.bytes / 1e9}
        if gpu is not None:
            floor = io_model.roofline(cost, gpu, o.dtype)
            row |= {"floor_ms": 1e3 * floor.seconds, "bound": floor.bound}
    if contenders.does_not_fit(name, s):
        report.note(f"No time of {name}: its matrices would not fit into memory.")
        return row
    row["ms"] = 1e3 * measure.seconds(contenders.CONTENDERS[name](s).both(), o.device, o.seconds)
    if not no_counters:
        torch.cuda.empty_cache()  # the other process needs the memory
        try:
            kernels = ncu.measure(o.ncu, name, s)
            row["GB"] = ncu.total(kernels)
            for kernel in ncu.rows(kernels):
                report.add("kernels", {"attention": name, "dropout": dropout_p} | kernel)
        except RuntimeError as error:
            report.note(f"No measured GB of {name}: {error}")
    if dropout_p > 0 and is_papers(o):
        row |= dict(zip(("paper_GFLOP", "paper_GB", "paper_ms"), PAPER.get(name, ()), strict=False))
    return row


def is_papers(o: Options) -> bool:
    """Whether it is the paper's problem, so that its figures can stand beside ours."""
    return workload(o) == io_model.GPT2_MEDIUM


@contextmanager
def tiles(blocks: Blocks) -> Iterator[None]:
    """Other block sizes for backend="reference", which takes them from its module."""
    before = reference.BLOCK_ROWS, reference.BLOCK_COLUMNS
    reference.BLOCK_ROWS, reference.BLOCK_COLUMNS = blocks
    try:
        yield
    finally:
        reference.BLOCK_ROWS, reference.BLOCK_COLUMNS = before


def block_row(o: Options, columns: int) -> Row:
    """Algorithm 1 with B_r = d and a B_c: the model's bytes, and the time of the algorithm in plain PyTorch."""
    blocks = Blocks(o.dim, columns)
    q, k, v = (x.detach() for x in o.setting(o.lengths[0]).rows_first())
    with tiles(blocks), torch.no_grad():
        seconds = measure.seconds(lambda: tiled_attention(q, k, v), o.device, o.seconds)
    cost = io_model.flash_forward(workload(o), blocks)
    return {"B_r": blocks.rows, "B_c": columns, "model_GB": cost.bytes / 1e9, "ms": 1e3 * seconds}


def sections(o: Options, report: Report) -> list[str]:
    """The Markdown below the header."""
    columns = {
        "attention": "attention", "dropout": "dropout", "GFLOP": "GFLOP", "model_GB": "GB, model", "GB": "GB, ncu",
        "ms": "ms", "floor_ms": "ms, roofline", "bound": "bound", "paper_GFLOP": "paper: GFLOP",
        "paper_GB": "paper: GB", "paper_ms": "paper: ms",
    }  # fmt: skip
    rows = report.rows("attention")
    papers = "The paper's figures are an A100's." if is_papers(o) else ""
    text = [
        f"Forward and backward, batch {o.batch}, {o.heads} heads, seqlen {o.lengths[0]}, d {o.dim}, {o.dtype}. The "
        "model counts the bytes that pass between a GPU's kernels and its DRAM (io_model.standard_in_pytorch, "
        f"io_model.kernels). {papers}\n",
        row_table(rows, {key: text for key, text in columns.items() if any(row.get(key) is not None for row in rows)}),
    ]
    times = {(row["attention"], row["dropout"]): row.get("ms") for row in rows}
    for dropout_p in (0.0, DROPOUT):
        slow, fast = (times.get((name, dropout_p)) for name in ("standard", "flash"))
        if slow and fast:
            text.append(f"- Speed-up over standard attention, dropout {dropout_p}: {slow / fast:.2f}×.")
    if report.rows("kernels"):
        counted = {"attention": "attention", "dropout": "dropout"} | ncu.COLUMNS
        text += ["\nKernel by kernel, from ncu:\n", row_table(report.rows("kernels"), counted)]
    if report.rows("blocks"):
        text += [
            "\nAlgorithm 1 over B_c, forward (time: the algorithm in plain PyTorch, `tiled_attention`):\n",
            row_table(report.rows("blocks"), {"B_r": "B_r", "B_c": "B_c", "model_GB": "GB, model", "ms": "ms"}),
        ]
    if report.rows("sparsity"):
        text += [
            f"Block-sparse, seqlen {SPARSE_LENGTHS * o.lengths[0]}, blocks of {contenders.BLOCK} kept at random, "
            "forward and backward:\n",
            row_table(report.rows("sparsity"), {"density": "density", "ms": "ms"}),
        ]
    return text + sparsity_findings(report)


def sparsity_findings(report: Report) -> list[str]:
    """Whether time falls in proportion to density: a line, and what it leaves at density 0."""
    times = {float(row["density"]): float(row["ms"]) for row in report.rows("sparsity")}
    if len(times) < 3:
        return []
    slope, start, r2 = line_through(times)
    rest = f"{100 * start / (start + slope):.1f} % of the dense time is left at 0"
    return [f"- Block-sparse time over density: a line fits with R² = {r2:.4f}; {rest}."]


def plot(o: Options, report: Report) -> Figure:
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    figure.suptitle(f"batch {o.batch}, {o.heads} heads, seqlen {o.lengths[0]}, d {o.dim}, {o.dtype}, {o.device.type}")
    rows = [row for row in report.rows("attention") if "ms" in row]
    left.bar([f"{row['attention']}\ndropout {row['dropout']}" for row in rows], [row["ms"] for row in rows])
    left.set(title="forward and backward", ylabel="ms")
    left.tick_params("x", rotation=60)
    blocks = report.rows("blocks")
    middle.plot([row["B_c"] for row in blocks], [row["model_GB"] for row in blocks], "o-C0")
    middle.set(title="Algorithm 1, forward", xlabel="B_c", ylabel="GB, model (blue)")
    twin = middle.twinx()
    twin.plot([row["B_c"] for row in blocks], [row["ms"] for row in blocks], "x--C1")
    twin.set(ylabel="ms, plain PyTorch (orange)", ylim=(0, None))
    middle.set_ylim(0)
    sparsity = report.rows("sparsity")
    right.set(title="block-sparse, forward and backward", xlabel="density", ylabel="ms")
    right.plot([row["density"] for row in sparsity], [row["ms"] for row in sparsity], "o-")
    right.set(xlim=(0, 1.05), ylim=(0, None))
    return figure
