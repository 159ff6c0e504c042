"""`python -m flash_attn.paper` on a CPU, small: its measurements, its errors, and what an interruption leaves."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cases
import pytest
import torch
from programs import start_program
from test_threads import run_script
from torch import Tensor

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from flash_attn import io_model
from flash_attn.paper import __main__ as program
from flash_attn.paper import contenders, fig2, fig3, numerics, options, report
from flash_attn.paper.contenders import Setting

SMALL = ["--batch", "1", "--heads", "1", "--dim", "16", "--seconds", "0.01", "--device", "cpu"]


def run(tmp_path: Path, *arguments: str) -> tuple[str, dict]:
    """The Markdown and the JSON of a command that succeeds."""
    assert program.main([*arguments, *SMALL, "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"{arguments[0]}.png").read_bytes().startswith(b"\x89PNG")
    return (tmp_path / f"{arguments[0]}.md").read_text(), json.loads((tmp_path / f"{arguments[0]}.json").read_text())


def test_flash_attn_imports_nothing_of_it() -> None:
    run_script("""
    import sys, flash_attn
    heavy = {"matplotlib", "flash_attn.paper", "flash_attn.io_model", "local_attention"} & set(sys.modules)
    assert not heavy, heavy
    """)


# ---- Commands -------------------------------------------------------------------------------------------------------


def test_fig2(tmp_path: Path) -> None:
    text, found = run(tmp_path, "fig2", "--lengths", "256")
    rows = found["tables"]["attention"]
    assert [(r["attention"], r["dropout"]) for r in rows] == [
        (name, p) for name in ("standard", "flash", "torch") for p in (0.0, 0.1)
    ]
    assert all(r["ms"] > 0 for r in rows)
    w = io_model.Workload(256, 16, dtype=torch.float32)
    assert rows[0]["model_GB"] == io_model.standard_in_pytorch(w).bytes / 1e9
    assert rows[1]["model_GB"] == io_model.standard_in_pytorch(replace(w, dropout=True)).bytes / 1e9
    assert rows[2]["GFLOP"] == 14 * 256**2 * 16 / 1e9
    blocks = found["tables"]["blocks"]
    assert [r["B_c"] for r in blocks] == [64, 128, 256, 512] and blocks[0]["model_GB"] > 2 * blocks[2]["model_GB"]
    assert "No measured GB: DRAM bytes are counted on a GPU alone." in found["notes"] and "| 0.1 |" in text
    assert [r["density"] for r in found["tables"]["sparsity"]] == [0.125, 0.25, 0.375, 0.625, 0.75, 1.0]


def test_fig3(tmp_path: Path) -> None:
    text, found = run(tmp_path, "fig3", "--lengths", "256", "64", "--attentions", "flash", "block-sparse")
    points = [(r["attention"], r["seqlen"]) for r in found["tables"]["points"]]
    assert points == [(name, n) for name in ("flash", "block-sparse") for n in (64, 256)]
    assert all(r["ms"] > 0 for r in found["tables"]["points"])
    assert "padding mask" in text


def test_numerics(tmp_path: Path) -> None:
    text, found = run(tmp_path, "numerics", "--lengths", "96", "--dtypes", "fp16", "--attentions", "flash", "standard")
    rows = found["tables"]["errors"]
    assert len(rows) == 2 * len(numerics.INPUTS)
    for row in rows:  # the output is an average of values: an error of 2^-11 and what the sums add
        limit = 2e-3 if row["attention"] == "flash" else 1e-1
        assert 0 < row["out"] < limit, row
    assert "Error of flash over that of standard attention" in text


@pytest.mark.parametrize("attentions", ["flash torch", "flash standard torch", "torch"])
def test_numerics_of_any_attentions(tmp_path: Path, attentions: str) -> None:
    text, _ = run(tmp_path, "numerics", "--lengths", "32", "--dtypes", "fp16", "--attentions", *attentions.split())
    assert ("Error of flash over that of standard attention" in text) == ("standard" in attentions)


def test_fig2_goes_on_without_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "does_not_fit", lambda name, _: name == "standard")
    text, found = run(tmp_path, "fig2", "--lengths", "64")
    rows = found["tables"]["attention"]
    assert [r["attention"] for r in rows if "ms" in r] == ["flash", "flash", "torch", "torch"]
    assert all(r["model_GB"] > 0 for r in rows if r["attention"] == "standard")
    assert "No time of standard: its matrices would not fit into memory." in text and "Speed-up" not in text


def test_standard_attention_fits_or_not() -> None:
    assert not contenders.does_not_fit("standard", setting(seqlen=64))
    assert contenders.does_not_fit("standard", setting(seqlen=2**24))
    assert not contenders.does_not_fit("flash", setting(seqlen=2**24))


def test_an_unfinished_plot_has_a_legend(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """One dtype measured of two."""
    (o,) = options.parse(["numerics", "--lengths", "32", "--device", "cpu", "--out", str(tmp_path)])
    r = report.Report(tmp_path, "numerics", "title", {})
    row = {"dtype": "float16", "inputs": "gaussian", "seqlen": 32, "attention": "flash"}
    r.add("errors", row | dict.fromkeys(numerics.RESULTS, 1e-3))
    figure = numerics.plot(o, r)
    assert [text.get_text() for text in figure.axes[-1].get_legend().get_texts()] == ["gaussian, flash"]
    assert not recwarn.list


def test_a_report_does_not_stand_beside_an_older_one(tmp_path: Path) -> None:
    run(tmp_path, "numerics", "--lengths", "32", "--dtypes", "fp16")
    report.Report(tmp_path, "numerics", "title", {})
    assert [path.name for path in tmp_path.iterdir()] == ["numerics.json"]


def test_help_names_what_a_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for command, takes in (("fig2", False), ("fig3", True), ("numerics", False)):
        with pytest.raises(SystemExit):
            options.parse([command, "--help"])
        assert ("linformer" in capsys.readouterr().out) == takes


def test_sweeps_go_on_without_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    gone = {"local_attention", "linformer", "performer_pytorch", "reformer_pytorch"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else real(name))
    monkeypatch.setattr(fig3.Memory, "peak", lambda *_: 1 << 20)
    _, found = run(
        tmp_path, "fig3", "--lengths", "64", "--attentions", "local", "linformer", "performer", "reformer", "standard",
    )  # fmt: skip
    assert {r["attention"] for r in found["tables"]["points"]} == {"standard"}
    assert "No linformer: the package linformer is not installed (pip install 'flash-attn[paper]')." in found["notes"]
    assert len([note for note in found["notes"] if note.startswith("No ")]) == 4


def test_a_sweep_that_measures_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contenders, "unavailable", lambda name: f"the package {name} is not installed")
    assert program.main(["fig3", "--lengths", "64", "--attentions", "reformer", *SMALL, "--out", str(tmp_path)]) == 1
    said = "fig3: nothing could be measured: No reformer: the package reformer is not installed."
    assert said in capsys.readouterr().err
    assert "No reformer" in (tmp_path / "fig3.md").read_text()


def test_a_failure_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("the card fell off the bus")

    monkeypatch.setitem(contenders.CONTENDERS, "torch", lambda s: contenders.Contender(s.heads_first(), fail))
    monkeypatch.setattr(fig3.Memory, "peak", lambda *_: 1 << 20)
    out = ["--out", str(tmp_path)]
    assert program.main(["fig2", "--lengths", "64", *SMALL, *out]) == 1
    found = json.loads((tmp_path / "fig2.json").read_text())
    assert len(found["tables"]["attention"]) == 4
    assert found["notes"][-1] == "Failed: the card fell off the bus"
    # fig3 leaves that attention at that length and goes on.
    assert program.main(["fig3", "--lengths", "64", "--attentions", "torch", "standard", *SMALL, *out]) == 0
    found = json.loads((tmp_path / "fig3.json").read_text())
    assert "torch stops before 64: RuntimeError: the card fell off the bus" in found["notes"]
    assert len(found["tables"]["points"]) == 1


def interrupt_when(started: Callable[[], bool], command: list[str], by: int = signal.SIGINT) -> tuple[int, str]:
    """Exit status and output of a command that gets Ctrl-C, or another signal, when it has come that far. The output
    ends when all processes that write to it have ended."""
    process = start_program(command, {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    end = time.monotonic() + 100
    while not started() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(by)
    output, _ = process.communicate(timeout=100)
    return process.returncode, output


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("arguments", "table", "rows"),
    [
        ("numerics --lengths 16 2048", "errors", 1),
        pytest.param("fig3 --lengths 64 4096 --seconds 60", "points", 1, marks=pytest.mark.full),
    ],
)
def test_an_interruption_keeps_what_was_measured(
    tmp_path: Path, arguments: str, table: str, rows: int, by: signal.Signals
) -> None:
    name = arguments.split()[0]
    saved = tmp_path / f"{name}.json"

    def count() -> int:
        return len(json.loads(saved.read_text())["tables"].get(table, [])) if saved.is_file() else 0

    command = [sys.executable, "-m", "flash_attn.paper", *arguments.split(), "--device", "cpu", "--out", str(tmp_path)]
    status, output = interrupt_when(lambda: count() >= rows, command, by)
    assert status == 128 + by, output
    assert count() >= rows and "Interrupted: what was measured until then is here." in output
    assert "Interrupted" in (tmp_path / f"{name}.md").read_text()


def test_nothing_outlives_a_program_that_is_killed(tmp_path: Path) -> None:
    """The process that measures memory holds the output open: that it ends is that it has ended."""
    saved = tmp_path / "fig3.json"
    command = [
        sys.executable, "-m", "flash_attn.paper", "fig3", *"--lengths 64 128 --attentions flash --heads 1".split(),
        *"--seconds 5 --device cpu --out".split(), str(tmp_path),
    ]  # fmt: skip
    status, _ = interrupt_when(lambda: saved.is_file() and '"points"' in saved.read_text(), command, signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert len(json.loads(saved.read_text())["tables"]["points"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "arguments are required: COMMAND"),
        ("fig4", "invalid choice: 'fig4'"),
        ("fig3 --lengths 0", "--lengths 0: must be at least 1"),
        ("fig3 --lengths 64 64", "--lengths 64 64: one is given twice"),
        ("fig2 --lengths 64 128", "--lengths 64 128: fig2 takes one length"),
        ("fig2 --heads -1", "--heads -1: must be at least 1"),
        ("fig2 --dtypes fp8", "--dtypes fp8: must be of fp16, bf16, fp32"),
        ("fig3 --dtypes fp16 bf16", "--dtypes fp16 bf16: fig3 takes one dtype"),
        ("fig3 --attentions flash longformer", "--attentions flash longformer: must be of standard, flash,"),
        ("numerics --attentions reformer", "--attentions reformer: must be of standard, flash, torch"),
        ("fig3 --dropout 1", "--dropout 1.0: must be in [0, 1)"),
        ("fig3 --seconds 0", "--seconds 0.0: must be more than 0"),
        ("all --seconds nan", "--seconds nan: must be more than 0"),
        ("fig2 --seconds inf", "--seconds inf: must be finite"),
        (f"fig3 --seed {2**64}", f"--seed {2**64}: must fit into 64 bits"),
        (f"numerics --seed {-(2**63) - 1}", f"--seed {-(2**63) - 1}: must fit into 64 bits"),
        (f"fig2 --dim {2**31}", f"--dim {2**31}: must be at most {2**31 - 1}"),
        (f"fig3 --lengths 64 {10**30}", f"--lengths 64 {10**30}: must be at most {2**31 - 1}"),
        (f"fig3 --device cpu --out {__file__}/folder", "/folder: cannot be written to: Not a directory"),
        (f"fig3 --out {__file__}", "is a file, must be a folder"),
        ("fig3 --out=", "argument --out: must name a folder"),
        ("all --heads 2", "unrecognized arguments: --heads 2"),
        ("traffic --device cpu", "traffic: needs a GPU"),
    ],
)
def test_wrong_arguments_are_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        program.main(arguments.split())
    assert refusal.value.code == 2 and message in capsys.readouterr().err


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        program.main(["fig2", "--device", "cuda"])
    assert "--device cuda: torch sees no GPU" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert program.main(["fig2"]) == 2
    assert "flash_attn.paper needs matplotlib and tqdm: pip install 'flash-attn[paper]'" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not cases.KERNELS, reason="needs a GPU and its kernels")
@pytest.mark.parametrize(
    "arguments",
    [
        "fig2 --lengths 512 --dtypes fp16",
        "fig3 --lengths 256 512 --dtypes fp16",
        "numerics --lengths 256 --dtypes bf16",
    ],
)
def test_on_a_gpu(tmp_path: Path, arguments: str) -> None:
    small = "--batch 2 --heads 2 --seconds 0.01 --device cuda --out".split()
    assert program.main([*arguments.split(), *small, str(tmp_path)]) == 0
    found = json.loads((tmp_path / f"{arguments.split()[0]}.json").read_text())
    assert not [note for note in found["notes"] if "flash stops" in note or "Failed" in note]


# ---- Parts ----------------------------------------------------------------------------------------------------------


def setting(**options: object) -> Setting:
    return replace(Setting(2, 3, 128, 16, torch.float32, torch.device("cpu")), **options)


@pytest.mark.parametrize("padding", (False, True))
def test_exact_contenders_agree(padding: bool) -> None:
    """Standard, torch's and ours on the same inputs: they are timed on the same task."""
    outs = []
    for name in ("standard", "torch", "flash"):
        torch.manual_seed(1)
        c = contenders.CONTENDERS[name](setting(padding=padding))
        torch.manual_seed(2)
        q, k, v = (torch.randn(2, 3, 128, 16) for _ in range(3))
        if name == "flash":
            outs.append(c.attend(*(x.transpose(1, 2).contiguous() for x in (q, k, v))).transpose(1, 2))
        else:
            outs.append(c.attend(q, k, v))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", contenders.NEEDS)
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1, "padding": True}, {"seqlen": 64}], ids=str)
def test_peers_run_forward_and_backward(name: str, options: dict) -> None:
    if reason := contenders.unavailable(name):
        pytest.skip(reason)
    s = setting(**options)
    c = contenders.CONTENDERS[name](s)
    assert c.forward().numel() == s.batch * s.seqlen * s.heads * s.dim
    assert all(bool(g.isfinite().all()) for g in c.both()())


def test_linformer_without_projections_is_attention() -> None:
    """Its adapter leaves softmax(q (E k)ᵀ / √d) F v."""
    if reason := contenders.unavailable("linformer"):
        pytest.skip(reason)
    s = setting()
    c = contenders.linformer(s)
    x, e, f = (t.detach() for t in c.inputs)
    heads = x.view(2, 128, 3, 16).transpose(1, 2)
    k, v = (torch.einsum("bhnd,nk->bhkd", heads, projection) for projection in (e, f))
    expected = contenders.plain_attention(heads, k, v).transpose(1, 2).reshape(2, 128, 48)
    torch.testing.assert_close(c.forward(), expected, rtol=1e-5, atol=1e-5)


def test_local_attention_is_a_window_of_blocks() -> None:
    if reason := contenders.unavailable("local"):
        pytest.skip(reason)
    c = contenders.local(setting(seqlen=320))
    q, k, v = (x.detach() for x in c.inputs)
    block = torch.arange(320) // contenders.LOCAL_WINDOW
    mask = torch.zeros(320, 320).masked_fill((block[:, None] - block).abs() > 1, -torch.inf)
    torch.testing.assert_close(c.forward(), contenders.plain_attention(q, k, v, mask), rtol=1e-5, atol=1e-5)


def test_the_fp64_reference_is_autograd_in_one_piece() -> None:
    q, k, v, dout = (torch.randn(2, 600, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(4))
    out = numerics.ATTENTIONS["standard"](q, k, v)
    expected = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    for x, y in zip(numerics.exact(q, k, v, dout), expected, strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=1e-12, atol=1e-12)


def test_the_papers_figures_stand_beside_its_problem_alone() -> None:
    (small,) = options.parse(["fig2", "--device", "cpu"])
    (papers,) = options.parse("fig2 --device cpu --batch 64 --dtypes fp16".split())
    assert not fig2.is_papers(small) and fig2.is_papers(papers)


def test_block_sizes_are_put_back() -> None:
    before = fig2.reference.BLOCK_ROWS, fig2.reference.BLOCK_COLUMNS
    with pytest.raises(KeyError), fig2.tiles(io_model.Blocks(16, 32)):
        assert (fig2.reference.BLOCK_ROWS, fig2.reference.BLOCK_COLUMNS) == (16, 32)
        raise KeyError
    assert (fig2.reference.BLOCK_ROWS, fig2.reference.BLOCK_COLUMNS) == before


def test_peak_memory_is_what_a_call_holds() -> None:
    """Standard attention in a process of its own: S, P and their gradients, of 16 MB each."""
    s = Setting(1, 4, 1024, 64, torch.float32, torch.device("cpu"))
    with fig3.Memory(s.device) as memory:
        standard, flash = memory.peak("standard", s), memory.peak("flash", s)
    assert 2 * 4 * 1024**2 * 4 < standard < 6 * 4 * 1024**2 * 4
    assert 4 * 1024 * 4 * 64 * 4 < flash < standard / 4  # out, dq, dk, dv


def test_findings_are_arithmetic(tmp_path: Path) -> None:
    r = report.Report(tmp_path, "fig3", "title", {})
    for n in (1024, 2048, 4096):
        for name, mib in (("flash", n / 512 + 1), ("standard", n**2 / 2**14), ("linformer", n / 128)):
            r.add("points", {"attention": name, "seqlen": n, "ms": 1.0, "MiB": mib})
    lines = "\n".join(fig3.findings(r))
    assert "2.00 KiB for each token, R² = 1.000000" in lines
    assert "At 4096, standard takes 113.78× the memory of flash" in lines  # 1024 / 9
    assert "At 4096, linformer takes 3.56× the memory of flash" in lines  # 32 / 9


def test_sparsity_is_fitted(tmp_path: Path) -> None:
    r = report.Report(tmp_path, "fig2", "title", {})
    for density in (0.25, 0.5, 1.0):
        r.add("sparsity", {"density": density, "ms": 1 + 9 * density})
    assert "R² = 1.0000; 10.0 % of the dense time is left at 0" in fig2.sparsity_findings(r)[0]
    s = setting(seqlen=1000)
    assert contenders.kept_blocks(s, 0.01) == (1, 1 / 8) and contenders.kept_blocks(s, 1.0) == (8, 1.0)
