"""Figure 3 of the paper: run time and memory against sequence length, with dropout and a padding mask."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from flash_attn.paper import contenders, measure
from flash_attn.paper.contenders import CONTENDERS, Setting
from flash_attn.paper.options import Options
from flash_attn.paper.report import Report, lengths_on_x_axis, line_through, number, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Figure 3: time and memory of attention against sequence length"
LONG = 1024  # from here on a line is fitted; on a CPU the workspace grows with shorter lengths, up to some MiB
SMALL = 128  # the length that warms up a process


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _start_worker(threads: int) -> None:
    """Ctrl-C and SIGTERM are the parent's business. A parent that is killed takes this process along: it would wait
    for work for ever, since it holds both ends of the pipe that work comes through."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    measure.use_no_huge_pages()
    torch.set_num_threads(threads)


def _peak(name: str, s: Setting) -> int:
    CONTENDERS[name](replace(s, seqlen=min(SMALL, s.seqlen))).both()()
    return measure.peak_rss(CONTENDERS[name](s).both())


class Memory:
    """Peak bytes of forward and backward above the inputs. On a CPU a process of its own makes the calls, one for each
    attention: what the allocator of this one has kept would hide what a call needs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Memory:
        return self

    def _start(self) -> ProcessPoolExecutor:
        before = dict(os.environ)
        os.environ.update(measure.MALLOC_ENVIRONMENT)
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # its threads shall not spin while this process measures time
        try:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(1, context, _start_worker, (torch.get_num_threads(),))
            pool.submit(os.getpid).result()  # started with that environment
        finally:
            os.environ.clear()
            os.environ.update(before)
        return pool

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in list((self._pool._processes or {}).values()):
                process.kill()  # it may be in the middle of a call, whose result nobody wants any more

    def peak(self, name: str, s: Setting) -> int:
        if self._device.type == "cuda":
            return measure.peak_allocated(CONTENDERS[name](s).both(), self._device)
        self._pool = self._pool or self._start()
        return self._pool.submit(_peak, name, s).result()


def run(o: Options, report: Report) -> None:
    with tqdm(total=len(o.attentions) * len(o.lengths), desc="fig3") as bar:
        for name in o.attentions:
            reason = contenders.unavailable(name)
            if reason:
                report.note(f"No {name}: {reason}.")
                bar.update(len(o.lengths))
                continue
            measure_one(o, report, name, bar)
    for name in o.attentions:
        if report.rows("points") and (o.dropout_p > 0) and name in contenders.NO_DROPOUT:
            report.note(f"{name} runs without dropout: it has none.")
        if report.rows("points") and o.padding and name in contenders.NO_PADDING:
            report.note(f"{name} runs without a padding mask: it takes none.")


def measure_one(o: Options, report: Report, name: str, bar: tqdm) -> None:
    """All lengths of one attention, up to the first that fails or takes longer than `patience`."""
    done = 0
    with Memory(o.device) as memory:
        for seqlen in o.lengths:
            s = o.setting(seqlen)
            if contenders.does_not_fit(name, s):
                report.note(f"{name} stops before {seqlen}: its matrices would not fit into memory.")
                break
            try:
                seconds = measure.seconds(CONTENDERS[name](s).both(), o.device, o.seconds)
                peak = memory.peak(name, s)
            except (torch.cuda.OutOfMemoryError, BrokenExecutor, MemoryError):
                report.note(f"{name} stops before {seqlen}: out of memory.")
                if o.device.type == "cuda":
                    torch.cuda.empty_cache()
                break
            except Exception as error:  # of a peer at a length or on a device that it does not like
                report.note(f"{name} stops before {seqlen}: {type(error).__name__}: {error}")
                break
            report.add("points", {"attention": name, "seqlen": seqlen, "ms": 1e3 * seconds, "MiB": peak / 2**20})
            done += 1
            bar.update()
            if seconds > o.patience and seqlen != o.lengths[-1]:
                report.note(f"{name} stops after {seqlen}: a call takes {seconds:.1f} s.")
                break
    bar.update(len(o.lengths) - done)


def points(report: Report, key: str) -> dict[str, dict[int, float]]:
    """attention → seqlen → number."""
    found: dict[str, dict[int, float]] = {}
    for row in report.rows("points"):
        found.setdefault(str(row["attention"]), {})[int(row["seqlen"])] = float(row[key])
    return found


def sections(o: Options, report: Report) -> list[str]:
    how = [f"dropout {o.dropout_p}" if o.dropout_p else "no dropout", "padding mask" if o.padding else "no mask"]
    text = [
        f"Forward and backward, batch {o.batch}, {o.heads} heads, d {o.dim}, {o.dtype}, {', '.join(how)}. "
        "Memory: the peak above the inputs, gradients included.\n"
    ]
    for key, unit in (("ms", "Milliseconds"), ("MiB", "MiB")):
        rows = [[name, *(number(of.get(n)) for n in o.lengths)] for name, of in points(report, key).items()]
        text += [f"{unit}:\n", table(["attention", *map(str, o.lengths)], rows)]
    return text + findings(report)


def findings(report: Report) -> list[str]:
    """The paper's claims about memory, in numbers: linear, far below standard attention, below Linformer."""
    memory, lines = points(report, "MiB"), []
    ours = memory.get("flash", {})
    long = {n: x for n, x in ours.items() if n >= LONG}
    if len(long) >= 3:
        slope, _, r2 = line_through(long)
        lines.append(f"- Memory of flash from {min(long)} on: {1024 * slope:.2f} KiB for each token, R² = {r2:.6f}.")
    for other in ("standard", "linformer"):
        both = sorted(set(ours) & set(memory.get(other, {})))
        if both and ours[both[-1]] > 0:
            ratio = memory[other][both[-1]] / ours[both[-1]]
            lines.append(f"- At {both[-1]}, {other} takes {ratio:.2f}× the memory of flash.")
    return [*lines, ""] if lines else lines


def plot(o: Options, report: Report) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    figure.suptitle(f"forward and backward, batch {o.batch}, {o.heads} heads, d {o.dim}, {o.dtype}, {o.device.type}")
    for each, key in zip(axes, ("ms", "MiB"), strict=True):
        for name, of in points(report, key).items():
            color = f"C{list(CONTENDERS).index(name)}"
            each.plot(list(of), [max(x, 4 / 1024) for x in of.values()], f"o-{color}", label=name)
        lengths_on_x_axis(each, o.lengths)
        each.set(xlabel="sequence length", ylabel={"ms": "ms", "MiB": "MiB above the inputs"}[key], yscale="log")
    axes[0].legend()
    return figure
