"""The command line of `python -m flash_attn.paper`: options, their defaults on a CPU and on a GPU, their checks."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flash_attn.paper.contenders import CONTENDERS, Setting

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
COMMANDS = {
    "fig2": "FLOPs, memory traffic and time of GPT-2 medium's attention; block sizes; sparsity",
    "fig3": "time and memory against sequence length, beside standard and approximate attention",
    "numerics": "error against fp64",
    "traffic": "DRAM bytes from a GPU's counters (needs a GPU and ncu)",
    "all": "fig2, fig3 and numerics",
}
TRAFFIC = ("standard", "flash", "torch")
LARGEST = 2**31 - 1  # of a size: more overflows somewhere in torch


@dataclass(frozen=True)
class Options:
    """One command's options, with all defaults filled in."""

    command: str
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    batch: int
    heads: int
    dim: int
    lengths: tuple[int, ...]
    dropout_p: float
    padding: bool
    attentions: tuple[str, ...]
    seconds: float
    patience: float
    out: Path
    seed: int
    ncu: str

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    def setting(self, seqlen: int) -> Setting:
        return Setting(
            self.batch, self.heads, seqlen, self.dim, self.dtype, self.device, self.dropout_p, self.padding
        )  # fmt: skip

    def described(self) -> dict[str, object]:
        """For the report."""
        values = dataclasses.asdict(self)
        for name in ("out", "command"):
            del values[name]
        return {
            name: ", ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in values.items()
        }


# The paper's sizes on a GPU: Figure 2, and Appendix E for Figure 3. On a CPU what three minutes allow.
_CPU = dict(dtypes=("fp32",), seconds=0.3, patience=8.0)
_GPU = dict(dtypes=("fp16",), seconds=1.0, patience=60.0)
_POWERS = tuple(2**i for i in range(7, 17))  # 128 … 64k
_FIG3 = dict(dropout_p=0.1, padding=True, attentions=tuple(name for name in CONTENDERS if name != "torch"))
_FIG2 = dict(lengths=(1024,), heads=16, attentions=TRAFFIC)
_NUMERICS = dict(batch=1, dtypes=("fp16", "bf16"), attentions=("flash", "standard"))
DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("fig2", "cpu"): {**_CPU, **_FIG2, "batch": 1, "seconds": 1.0},
    ("fig2", "cuda"): {**_GPU, **_FIG2, "batch": 64},
    ("fig3", "cpu"): {**_CPU, **_FIG3, "batch": 1, "heads": 2, "lengths": _POWERS[:7]},
    ("fig3", "cuda"): {**_GPU, **_FIG3, "batch": 16, "heads": 8, "lengths": _POWERS},
    ("numerics", "cpu"): {**_CPU, **_NUMERICS, "heads": 1, "lengths": (128, 512, 2048)},
    ("numerics", "cuda"): {**_GPU, **_NUMERICS, "heads": 4, "lengths": (256, 1024, 4096, 16384)},
    ("traffic", "cuda"): {**_GPU, **_FIG2, "batch": 64},
}


def known(command: str) -> tuple[str, ...]:
    """The attentions that a command takes."""
    return tuple(CONTENDERS) if command == "fig3" else TRAFFIC


def _folder(name: str) -> Path:
    if not name:  # which Path takes for the current folder
        raise argparse.ArgumentTypeError("must name a folder")
    return Path(name)


def parser() -> argparse.ArgumentParser:
    text = """Re-run the argument of the FlashAttention paper (arXiv 2205.14135): prediction and measurement.

    Writes Markdown, PNG and JSON to --out. On a CPU the sizes are reduced, on a GPU they are the paper's. Ctrl-C or
    SIGTERM ends a command and keeps what was measured."""
    top = argparse.ArgumentParser("python -m flash_attn.paper", description=text)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, note in COMMANDS.items():
        sub = commands.add_parser(name, help=note, description=note)
        sub.add_argument(
            "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one"
        )
        sub.add_argument("--out", type=_folder, default=Path("runs/paper"), help="folder (default: runs/paper)")
        sub.add_argument("--seconds", type=float, help="of timing for each number")
        sub.add_argument("--seed", type=int, default=0, help="of random inputs")
        if name == "all":
            continue
        sub.add_argument("--batch", type=int, help="sequences")
        sub.add_argument("--heads", type=int, help="heads")
        sub.add_argument("--dim", type=int, default=64, help="head dim (default: 64)")
        sub.add_argument(
            "--lengths", type=int, nargs="+", metavar="N", help="sequence lengths; all but fig3, numerics: one"
        )
        sub.add_argument("--dtypes", nargs="+", metavar="DTYPE", help="of fp16, bf16, fp32; all but numerics: one")
        sub.add_argument("--attentions", nargs="+", metavar="NAME", help=f"of {', '.join(known(name))}")
        if name in ("fig2", "traffic"):
            sub.add_argument(
                "--ncu", default="ncu", help="Nsight Compute's command; fig2: an empty one measures no bytes"
            )
        if name in ("fig3", "traffic"):
            sub.add_argument("--dropout", type=float, help="probability (fig3: 0.1)")
        if name == "fig3":
            sub.add_argument("--padding", action=argparse.BooleanOptionalAction, default=None, help="hide padded keys")
            sub.add_argument("--patience", type=float, help="seconds of a call after which no longer one is made")
    return top


def _device(top: argparse.ArgumentParser, name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        top.error("--device cuda: torch sees no GPU")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def parse(arguments: Sequence[str] | None) -> list[Options]:
    """The options of each command that is to run. Wrong ones exit with status 2 and a sentence."""
    top = parser()
    given = vars(top.parse_args(arguments))
    command, device = given.pop("command"), _device(top, given.pop("device"))
    if command == "traffic" and device.type != "cuda":
        top.error("traffic: needs a GPU, and torch sees none or --device cpu was given; fig2 predicts the bytes")
    commands = ("fig2", "fig3", "numerics") if command == "all" else (command,)
    return [_checked(top, name, device, given) for name in commands]


def _checked(top: argparse.ArgumentParser, command: str, device: torch.device, given: dict[str, Any]) -> Options:
    values = {"dim": 64, "dropout_p": 0.0, "padding": False, "ncu": "ncu", **DEFAULTS[command, device.type]}
    renamed = {"dropout": "dropout_p"}
    values |= {renamed.get(name, name): value for name, value in given.items() if value is not None}

    def require(holds: bool, name: str, rule: str) -> None:
        value = values["dropout_p" if name == "dropout" else name]
        value = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
        if not holds:
            top.error(f"--{name} {value}: {rule}")

    for name in ("batch", "heads", "dim"):
        require(values[name] >= 1, name, "must be at least 1")
        require(values[name] <= LARGEST, name, f"must be at most {LARGEST}")
    for name in ("lengths", "dtypes", "attentions"):
        require(len(set(values[name])) == len(values[name]), name, "one is given twice")
    require(min(values["lengths"]) >= 1, "lengths", "must be at least 1")
    require(max(values["lengths"]) <= LARGEST, "lengths", f"must be at most {LARGEST}")
    require(command in ("fig3", "numerics") or len(values["lengths"]) == 1, "lengths", f"{command} takes one length")
    require(set(values["dtypes"]) <= set(DTYPES), "dtypes", f"must be of {', '.join(DTYPES)}")
    require(command == "numerics" or len(values["dtypes"]) == 1, "dtypes", f"{command} takes one dtype")
    names = known(command)
    require(set(values["attentions"]) <= set(names), "attentions", f"must be of {', '.join(names)}")
    require(0 <= values["dropout_p"] < 1, "dropout", "must be in [0, 1)")
    for name in ("seconds", "patience"):
        require(values[name] > 0, name, "must be more than 0")
    require(math.isfinite(values["seconds"]), "seconds", "must be finite")  # the patience may be without end
    require(-(2**63) <= values["seed"] < 2**64, "seed", "must fit into 64 bits")
    is_folder = not values["out"].exists() or values["out"].is_dir()
    require(is_folder, "out", "is a file, must be a folder")
    for name in ("lengths", "attentions"):
        values[name] = tuple(values[name])
    values["lengths"] = tuple(sorted(values["lengths"]))
    values["dtypes"] = tuple(DTYPES[name] for name in values["dtypes"])
    return Options(command=command, device=device, **values)
