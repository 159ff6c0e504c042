"""Re-run the argument of the FlashAttention paper (arXiv 2205.14135): python -m flash_attn.paper --help"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch

NEEDED = ("matplotlib", "tqdm")


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def _terminate(signal_number: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where a measurement failed or there is none; 2 for wrong arguments; 130 after Ctrl-C, 143 after
    SIGTERM."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"flash_attn.paper needs {' and '.join(missing)}: pip install 'flash-attn[paper]'", file=sys.stderr)
        return 2
    import matplotlib

    from flash_attn.paper import ncu, options
    from flash_attn.paper.report import Report

    matplotlib.use("Agg")
    given = sys.argv[1:] if arguments is None else list(arguments)
    for o in options.parse(given):
        if o.command == "traffic" and (reason := ncu.unavailable(o.ncu, o.device)):
            print(f"traffic: {reason}", file=sys.stderr)
            return 2
        command = importlib.import_module(f"flash_attn.paper.{o.command}")
        torch.manual_seed(o.seed)
        try:
            report = Report(o.out, o.command, command.TITLE, o.described())
        except OSError as error:
            options.parser().error(f"--out {o.out}: cannot be written to: {error.strerror}")
        status = 0
        try:
            with sigterm_interrupts():
                command.run(o, report)
        except KeyboardInterrupt as interruption:
            status = 143 if isinstance(interruption, Terminated) else 130
            report.note("Interrupted: what was measured until then is here.")
        except (RuntimeError, NotImplementedError) as error:
            status = 1
            report.note(f"Failed: {error}")
        if not report.tables and not status:
            status = 1
            print(f"{o.command}: nothing could be measured: {' '.join(report.notes)}", file=sys.stderr)
        figure = command.plot(o, report) if report.tables else None
        print(report.finish(given[1:], command.sections(o, report) if report.tables else [], figure))
        print(f"\nwritten to {o.out}", flush=True)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
