"""DRAM bytes of one forward and backward on a GPU, from its counters, through NVIDIA Nsight Compute (`ncu`).

The case runs in a process of its own under ncu, which counts between cudaProfilerStart and cudaProfilerStop. Caches are
left as they are between kernels (`--cache-control none`), because what one kernel leaves in the L2 cache for the next
is part of the truth; clocks too. The two metrics fit into one pass, so no kernel is run twice.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from flash_attn.paper.contenders import CONTENDERS, Setting

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
# A report's columns for `rows`.
COLUMNS = {"kernel": "kernel", "launches": "launches", "read_GB": "GB read", "written_GB": "GB written"}
# ncu scales by 1000, not by 1024.
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "Tbyte": 10**12}


class KernelTraffic(NamedTuple):
    """One kernel launch: bytes from and to DRAM."""

    kernel: str
    read: int
    written: int


def unavailable(ncu: str, device: torch.device) -> str:
    """Why nothing can be counted here; empty: it can."""
    if device.type != "cuda":
        return "DRAM bytes are counted on a GPU alone"
    if not ncu:
        return "counting DRAM bytes was switched off (--ncu '')"
    return (
        "" if shutil.which(ncu) else f"{ncu} is not there: Nsight Compute counts DRAM bytes (--ncu names its command)"
    )


def command(ncu: str, attention: str, s: Setting) -> list[str]:
    """What runs one case under ncu."""
    options = ["--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    options += ["--cache-control", "none", "--clock-control", "none", "--metrics", f"{READ},{WRITTEN}"]
    sizes = [s.batch, s.heads, s.seqlen, s.dim, str(s.dtype).removeprefix("torch."), s.dropout_p]
    return [ncu, *options, sys.executable, "-m", "flash_attn.paper.ncu", attention, *map(str, sizes)]


def measure(ncu: str, attention: str, s: Setting, timeout: float = 600) -> list[KernelTraffic]:
    """The kernels of a forward and backward, in the order of their launches.

    Raises:
        RuntimeError: ncu failed (often: the driver allows its counters to administrators alone), took longer than
            `timeout` seconds or counted nothing.
    """
    line = command(ncu, attention, s)
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"ncu did not end well: {error}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise RuntimeError(f"{shlex.join(line)} ended with {done.returncode}:\n{tail}")
    return parse(done.stdout)


def parse(text: str) -> list[KernelTraffic]:
    """Kernels in the CSV of `--page raw`, a column for each metric and units in the first row, or of `--page details`,
    a row for each metric. Lines before the table, and after it, are passed over.

    Raises:
        RuntimeError: no table, a kernel without one of the metrics, a unit that is no number of bytes.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError("ncu wrote no table; it said:\n" + "\n".join(lines[-8:]))
    rows = list(csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))))
    kernels = list(_details(rows) if "Metric Name" in rows[0] else _raw(rows)) if rows else []
    if not kernels:
        raise RuntimeError("ncu counted no kernel")
    return kernels


def _bytes(value: str | None, unit: str, metric: str, kernel: str) -> int:
    if not value or unit not in UNITS:
        raise RuntimeError(f"{metric} of kernel {kernel} is {value!r} {unit}: expected a number of bytes")
    return round(float(value.replace(",", "")) * UNITS[unit])


def _raw(rows: list[dict[str, str]]) -> Iterator[KernelTraffic]:
    units, *kernels = rows
    for row in kernels:
        name = row["Kernel Name"]
        yield KernelTraffic(name, *(_bytes(row.get(m), units.get(m, ""), m, name) for m in (READ, WRITTEN)))


def _details(rows: list[dict[str, str]]) -> Iterator[KernelTraffic]:
    by_launch: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        by_launch.setdefault(row["ID"], {})[row["Metric Name"]] = row
    for metrics in by_launch.values():
        name = next(iter(metrics.values()))["Kernel Name"]
        found = {m: metrics.get(m, {"Metric Value": "", "Metric Unit": ""}) for m in (READ, WRITTEN)}
        yield KernelTraffic(name, *(_bytes(r["Metric Value"], r["Metric Unit"], m, name) for m, r in found.items()))


# What stands before a name of C++: namespaces, those without a name too, as different versions of ncu write them.
NAMESPACES = re.compile(r"(?:\w+|\(anonymous namespace\)|<unnamed>)::")


def by_name(kernels: list[KernelTraffic], width: int = 84) -> dict[str, tuple[int, int, int]]:
    """Launches, bytes read and bytes written of each kernel, in the order of their first launches; the name without
    namespaces and arguments, cut at `width`: enough for the operation of an elementwise kernel of torch."""
    sums: dict[str, tuple[int, int, int]] = {}
    for kernel, read, written in kernels:
        name = NAMESPACES.sub("", kernel).split("(")[0].removeprefix("void ")[:width].rstrip()
        launches, r, w = sums.get(name, (0, 0, 0))
        sums[name] = launches + 1, r + read, w + written
    return sums


def rows(kernels: list[KernelTraffic]) -> list[dict[str, str | int | float]]:
    """The same for a report."""
    return [
        {"kernel": name, "launches": launches, "read_GB": read / 1e9, "written_GB": written / 1e9}
        for name, (launches, read, written) in by_name(kernels).items()
    ]


def total(kernels: list[KernelTraffic]) -> float:
    """GB of all of them."""
    return sum(k.read + k.written for k in kernels) / 1e9


def run_case(attention: str, s: Setting) -> None:
    """What is counted: a forward and backward, after one that is not."""
    call = CONTENDERS[attention](s).both()
    call()
    if s.device.type != "cuda":
        call()
        return
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    name, batch, heads, seqlen, dim, dtype, dropout_p = sys.argv[1:]
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run_case(
        name, Setting(int(batch), int(heads), int(seqlen), int(dim), getattr(torch, dtype), here, float(dropout_p))
    )
