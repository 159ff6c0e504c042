"""Starting the package's programs as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def start_program(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, stdout: int | None = None, stderr: int
) -> subprocess.Popen[str]:
    """A running program that Ctrl-C interrupts.

    A shell that runs the tests in the background makes them, and what they start, deaf to it.
    """
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        text=True,
        stdout=stdout,
        stderr=stderr,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
