"""DRAM bytes of each kernel of a forward and backward, from a GPU's counters, beside the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqdm import tqdm

from flash_attn.paper import fig2, ncu
from flash_attn.paper.options import Options
from flash_attn.paper.report import Report, row_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "DRAM traffic of attention, from counters"


def run(o: Options, report: Report) -> None:
    gpu, s = fig2.gpu_of(o), o.setting(o.lengths[0])
    for name in tqdm(o.attentions, "traffic"):
        add_kernels(report, name, ncu.measure(o.ncu, name, s))
        row = report.rows("attention")[-1]
        cost = fig2.predicted(name, fig2.workload(o, o.dropout_p), gpu)
        if cost is not None:
            row |= {"model_GB": cost.bytes / 1e9, "ratio": row["GB"] * 1e9 / cost.bytes}
            report.note(f"{name}: counted / model = {row['ratio']:.3f}.")


def add_kernels(report: Report, name: str, kernels: list[ncu.KernelTraffic]) -> None:
    """The rows of one attention: each kernel, then the sum."""
    for row in ncu.rows(kernels):
        report.add("kernels", {"attention": name} | row)
    report.add("attention", {"attention": name, "GB": ncu.total(kernels)})


def sections(o: Options, report: Report) -> list[str]:
    return [
        f"Forward and backward, batch {o.batch}, {o.heads} heads, seqlen {o.lengths[0]}, d {o.dim}, {o.dtype}, dropout "
        f"{o.dropout_p}.\n",
        row_table(
            report.rows("attention"),
            {"attention": "attention", "GB": "GB, ncu", "model_GB": "GB, model", "ratio": "ncu / model"},
        ),
        row_table(report.rows("kernels"), {"attention": "attention"} | ncu.COLUMNS),
    ]


def plot(o: Options, report: Report) -> Figure | None:
    return None
