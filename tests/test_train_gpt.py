"""The main job, benchmarks/train_gpt.py, run as a user runs it: in processes of its own, small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "train_gpt.py"
N_STEPS = 12
SMALL = "--device cpu --layers 2 --heads 2 --width 32 --seqlen 96 --batch 2 --lr 5e-3 --eval-every 4 --steps".split()
SMALL.append(str(N_STEPS))
# One thread each, so that the processes here stay out of each other's way.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}

Losses = dict[str, list[float]]


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *SMALL, "--no-memory", "--out", str(out), *options]


def run(arguments: list[str], status: int = 0) -> str:
    """Its whole output, after it has ended with `status`."""
    done = subprocess.run(
        arguments, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def losses(out: Path) -> dict[str, Losses]:
    """Of each attention: the training losses and the validation losses."""
    history = json.loads((out / "results.json").read_text())["history"]
    return {name: {key: series[key] for key in ("loss", "val_loss")} for name, series in history.items()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A default run, but small and with dropout: (directory, output)."""
    out = tmp_path_factory.mktemp("unbroken")
    return out, run(command(out, "--dropout", "0.1"))


def test_losses_agree_also_with_dropout(unbroken: tuple[Path, str]) -> None:
    out, output = unbroken
    both = losses(out)
    assert list(both) == ["standard", "flash"]
    assert "they agree" in output
    for key, count in (("loss", N_STEPS), ("val_loss", N_STEPS // 4)):
        assert len(both["flash"][key]) == count
        assert both["flash"][key] == pytest.approx(both["standard"][key], rel=1e-3)
    assert both["flash"]["loss"][-1] < both["flash"]["loss"][0] - 0.5
    assert (out / "losses.png").stat().st_size > 10_000


def test_killed_run_resumes_with_the_same_losses(unbroken: tuple[Path, str], tmp_path: Path) -> None:
    """SIGKILL as soon as there is a checkpoint; the rest of the run must repeat the unbroken one bit by bit."""
    checkpoint = tmp_path / "checkpoint.pt"
    arguments = command(tmp_path, "--dropout", "0.1", "--checkpoint-every", "2")
    process = subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 2 <= torch.load(checkpoint, weights_only=True)["step"] < N_STEPS
    assert "resuming after step" in run([*arguments, "--resume"])
    assert losses(tmp_path) == losses(unbroken[0])


def test_kill_in_mid_write_leaves_the_old_checkpoint(unbroken: tuple[Path, str], tmp_path: Path) -> None:
    """The second write dies with half of its bytes on disk."""
    script = f"""
import os, runpy, signal, sys, torch
save, written = torch.save, []
def save_half(state, file):
    save(state, file)
    written.append(state["step"])
    if len(written) == 2:
        file.truncate(file.tell() // 2)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = save_half
sys.argv = {command(tmp_path, "--dropout", "0.1", "--checkpoint-every", "3")[1:]!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    run([sys.executable, "-c", script], status=-signal.SIGKILL)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 3
    assert "resuming after step 3" in run(command(tmp_path, "--dropout", "0.1", "--checkpoint-every", "3", "--resume"))
    assert losses(tmp_path) == losses(unbroken[0])
    assert not list(tmp_path.glob("*.tmp"))


def test_two_processes_equal_one_with_twice_the_batch(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ("--attention", "flash", "--steps", "6")
    run([*torchrun, *command(tmp_path / "two", *options, "--checkpoint-every", "3")[1:]])
    run(command(tmp_path / "one", *options, "--batch", "4"))
    two, one = losses(tmp_path / "two")["flash"], losses(tmp_path / "one")["flash"]
    for key in one:
        assert two[key] == pytest.approx(one[key], rel=1e-5)
    assert torch.load(tmp_path / "two" / "checkpoint.pt", weights_only=True)["step"] == 6


@pytest.mark.full
def test_two_processes_resume(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ("--attention", "flash", "--dropout", "0.1", "--checkpoint-every", "5")
    run([*torchrun, *command(tmp_path, *options)[1:]])
    expected, checkpoint = losses(tmp_path), tmp_path / "checkpoint.pt"
    checkpoint.unlink()
    arguments = [*torchrun, *command(tmp_path, *options)[1:]]
    process = subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    process.terminate()  # torchrun ends its processes
    process.wait()
    (tmp_path / "results.json").unlink(missing_ok=True)
    assert "resuming after step" in run([*arguments, "--resume"])
    assert losses(tmp_path) == expected


@pytest.mark.full
def test_memory_is_measured(tmp_path: Path) -> None:
    """Standard attention's N × N matrices show, ours has none."""
    arguments = command(tmp_path, "--steps", "2", "--attention", "standard,flash,sdpa", "--memory-seqlen", "4096")
    output = run([argument for argument in arguments if argument != "--no-memory"])
    assert "peak memory of training, MiB" in output
    peaks = json.loads((tmp_path / "results.json").read_text())["peak_memory_mib"]
    assert sorted(map(int, peaks["standard"])) == [0, 512, 1024, 2048]
    assert sorted(map(int, peaks["flash"])) == [0, 512, 1024, 2048, 4096]
    assert peaks["standard"]["2048"] > 2 * 2048 * 2048 * 4 / 2**20  # P and dP at least
    assert peaks["flash"]["4096"] < 4096 * 4096 * 4 / 2**20 / 2
    assert (tmp_path / "memory.png").stat().st_size > 10_000


@pytest.mark.full
def test_bf16_and_reference(tmp_path: Path) -> None:
    options = ("--dtype", "bf16", "--backend", "reference", "--steps", "2", "--attention", "standard,sdpa,flash")
    assert run(command(tmp_path, *options)).count("not judged") == 2


def test_wrong_options_and_what_they_end_with(unbroken: tuple[Path, str], tmp_path: Path) -> None:
    """Many command lines in one process, since a start costs seconds: (options, exit status, words of the output)."""
    short, empty, data = tmp_path / "short.txt", tmp_path / "empty", tmp_path / "data"
    short.write_text("too short " * 5)
    empty.mkdir()
    (data / "b").mkdir(parents=True)
    (data / "b" / "first.txt").write_text("the quick brown fox " * 200)
    (data / "a.txt").write_text("jumps over the lazy dog " * 200)
    (data / "image.bin").write_bytes(b"\0" * 5000)
    (data / ".hidden").write_text("not this " * 1000)
    small = [*SMALL, "--no-memory", "--steps", "2", "--attention", "standard,sdpa", "--data", str(data)]
    of_another_run = [*SMALL, "--no-memory", "--out", str(unbroken[0]), "--resume", "--dropout", "0.2"]
    cases: list[tuple[list[str], int, str]] = [
        (
            ["--data", str(tmp_path / "nowhere")],
            2,
            f"--data {tmp_path / 'nowhere'}: there is no such file or directory",
        ),
        (["--data", str(short)], 2, "50 bytes of text; --seqlen 1024 needs at least 10250"),
        (["--data", str(empty)], 2, "0 bytes of text; --seqlen 1024 needs at least 10250"),
        (["--attention", "standard,fast"], 2, "--attention 'fast': must be one of standard, sdpa, flash"),
        (["--attention", "flash,flash"], 2, "--attention flash: given twice"),
        (["--width", "100", "--heads", "3"], 2, "--width 100: must be a multiple of --heads 3"),
        (["--dropout", "1"], 2, "--dropout 1.0: must be in [0, 1)"),
        (["--eval-every", "0"], 2, "--eval-every 0: must be at least 1"),
        (["--steps", "many"], 2, "argument --steps: invalid int value: 'many'"),
        (of_another_run, 2, "is of a run with dropout = 0.1, this one has 0.2"),
        (small, 0, f"text: {data}, 2 files"),
        ([*small, "--resume"], 0, "resuming after step 2"),
        ([*small, "--tolerance", "-1"], 1, "THEY DO NOT AGREE"),
    ]
    if not torch.cuda.is_available():
        cases.append((["--device", "cuda"], 2, "--device cuda: torch sees 0"))
    script = f"""
import contextlib, io, json, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import train_gpt
results = []
for options in {[options for options, _, _ in cases]!r}:
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            status = train_gpt.main(["--out", {str(tmp_path / "out")!r}, *options])
        except SystemExit as error:
            status = error.code
    results.append((status, output.getvalue()))
print(json.dumps(results))
"""
    results = json.loads(run([sys.executable, "-c", script]).splitlines()[-1])
    for (_, expected, words), (status, output) in zip(cases, results, strict=True):
        assert status == expected and words in output, output
