"""Run time and peak memory of one call, on a CPU or a GPU."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

Call = Callable[[], object]

# What a process needs in its environment so that `peak_rss` means something: blocks from 64 KiB on come from the kernel
# and go back to it when freed. The C library would raise that limit by itself.
MALLOC_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def seconds(call: Call, device: torch.device, budget: float, most: int = 100) -> float:
    """Median seconds of a call: as many as fit in `budget` seconds, one at least, after one that warms up. Where that
    one takes longer than both `budget` and a second, it is what is returned; on a GPU the one after, because the first
    of a process loads the kernels."""
    warm_up = _one(call, device)
    if device.type == "cuda" and warm_up > max(budget, 1.0):
        warm_up = _one(call, device)
    if warm_up > max(budget, 1.0):
        return warm_up
    times: list[float] = []
    end = time.perf_counter() + budget
    while not times or (len(times) < most and time.perf_counter() < end):
        times.append(_one(call, device))
    return statistics.median(times)


def _one(call: Call, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def field(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def use_no_huge_pages() -> None:
    """The resident size is what is held, from here on."""
    PR_SET_THP_DISABLE = 41
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def peak_rss(call: Call) -> int:
    """Bytes by which the resident size rises while a call runs, to within some 100 KiB. The process should have been
    started with MALLOC_ENVIRONMENT and have made a small call of the same kind."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = field("VmRSS")
    call()
    return field("VmHWM") - before


def peak_allocated(call: Call, device: torch.device) -> int:
    """The same of a GPU: bytes that torch's allocator hands out at the peak, above what was held before."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
