"""What a measurement leaves behind: JSON that grows with every row, and at the end Markdown and a plot of it."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cell = str | int | float | bool | None
Row = dict[str, Cell]


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str:
    """The commit of the checkout that this file belongs to."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        told = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told.stdout.strip()


def _portable(arguments: Sequence[str]) -> list[str]:
    """Arguments without the folders of this machine."""
    return [Path(x).name if Path(x).is_absolute() else x for x in arguments]


def header(title: str, command: str, arguments: Sequence[str]) -> str:
    """What a result file opens with: machine, torch, commit, command."""
    lines = [f"# {title}", ""]
    if torch.cuda.is_available():
        lines.append(f"- GPU: {torch.cuda.get_device_name()}")
    lines += [
        f"- CPU: {processor()}, {torch.get_num_threads()} threads",
        f"- torch {torch.__version__}, Python {platform.python_version()}, commit {commit()}",
        f"- Command: `{' '.join([command, *_portable(arguments)]).strip()}`",
        "",
    ]
    return "\n".join(lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def number(x: Cell) -> str:
    """Three digits; nothing for what was not measured."""
    if x is None or (isinstance(x, float) and math.isnan(x)):
        return ""
    if isinstance(x, float):
        return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"
    return str(x)


def row_table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A Markdown table of rows: {key: heading}. A key that a row lacks leaves its cell empty."""
    return table(list(columns.values()), [[number(row.get(key)) for key in columns] for row in rows])


def lengths_on_x_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """A logarithmic axis that shows the measured sequence lengths: 512, 1k, 2k."""
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)


def line_through(points: Mapping[float, float]) -> tuple[float, float, float]:
    """Slope, value at 0 and R² of the least-squares line through x → y."""
    n, y = (torch.tensor(list(x), dtype=torch.float64) for x in (points.keys(), points.values()))
    slope = ((n - n.mean()) * (y - y.mean())).sum() / ((n - n.mean()) ** 2).sum()
    start = y.mean() - slope * n.mean()
    r2 = 1 - ((y - start - slope * n) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    return float(slope), float(start), float(r2)


class Report:
    """Rows and notes of one command in `folder`/`name`.json, written anew after each of them.

    So what was measured is there whatever ends the process. `finish` adds `name`.md and `name`.png.
    """

    def __init__(self, folder: Path, name: str, title: str, settings: Mapping[str, object]) -> None:
        self.folder, self.name, self.title = folder, name, title
        self.settings = {key: value if isinstance(value, Cell) else str(value) for key, value in settings.items()}
        self.tables: dict[str, list[Row]] = {}
        self.notes: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._save()
        for suffix in ("md", "png"):  # of an earlier run: not to stand beside this one's numbers
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)

    def add(self, table: str, row: Row) -> None:
        self.tables.setdefault(table, []).append(row)
        self._save()

    def note(self, line: str) -> None:
        """A sentence for the reader: what was left out, and why."""
        if line not in self.notes:
            self.notes.append(line)
            self._save()

    def rows(self, table: str) -> list[Row]:
        return self.tables.get(table, [])

    def _save(self) -> None:
        content = {"title": self.title, "settings": self.settings, "tables": self.tables, "notes": self.notes}
        path = self.folder / f"{self.name}.json"
        whole = path.with_suffix(".json.new")
        whole.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        os.replace(whole, path)

    def finish(self, arguments: Sequence[str], sections: Sequence[str], figure: Figure | None) -> str:
        """Writes the Markdown file and the plot, and returns the text."""
        text = header(self.title, f"python -m flash_attn.paper {self.name}", arguments)
        text = "\n".join([text, *sections, *(f"- {note}" for note in self.notes)])
        if figure is not None:
            figure.savefig(self.folder / f"{self.name}.png", dpi=120)
            text += f"\n\n![the same as a plot]({self.name}.png)"
        (self.folder / f"{self.name}.md").write_text(text + "\n")
        return text
