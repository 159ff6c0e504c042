"""Train a small GPT on real text with standard attention and with flash_attn, side by side, and compare the two.

    python benchmarks/train_gpt.py                               both attentions, on a GPU if there is one
    python benchmarks/train_gpt.py --attention flash --data TEXT
    torchrun --nproc-per-node 2 benchmarks/train_gpt.py          data parallel: gloo on CPUs, nccl on GPUs

Each attention trains its own copy of the model, from the same initial weights on the same batches, in turns. In fp32
all losses must agree within `--tolerance`; if not, the exit status is 1. Tokens are bytes. Times are those of the
median step; attention time runs from q, k, v to the output and from its gradient to theirs, stamped while training.
Peak memory is that of two training steps in a fresh process (the plot: of one attention call), above what was held
before: on a CPU the high-water mark of resident memory, on a GPU torch.cuda.max_memory_allocated.

A run that is killed goes on with `--resume` and has the same losses as an unbroken one: the checkpoint holds models,
optimizers and histories, and what is random (batches, dropout) is a function of seed, step and process alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from flash_attn import flash_attn_func, is_available, standard_attention

ATTENTIONS = ("standard", "sdpa", "flash")
VOCABULARY = 256  # tokens are bytes
VAL_SHARE = 10  # one byte in ten, the last ones, is for validation
NOT_EVERYWHERE = {"test", "tests", "site-packages", "dist-packages"}  # directories of a standard library
WARM_UP = 0.1  # of all steps: the learning rate rises
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

History = dict[str, list[float]]
Peaks = dict[str, dict[int, float]]  # MiB by attention and seqlen, 0 = training


def option(default: Any, text: str, choices: Any = None, fixed: bool = True) -> Any:  # fixed: must not change on resume
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "fixed": fixed})


class World(NamedTuple):
    rank: int
    size: int
    device: torch.device


@dataclasses.dataclass(frozen=True)
class Config:
    """The command line: field `batch` is option `--batch`."""

    attention: tuple[str, ...] = option(("standard", "flash"), "comma list of standard, sdpa, flash")
    data: str = option("", "text file or directory; empty = the source of Python's standard library", fixed=False)
    out: str = option("runs/train_gpt", "directory for plots, results.json and the checkpoint", fixed=False)
    device: str = option("auto", "auto takes a GPU if there is one", ("auto", "cpu", "cuda"))
    dtype: str = option("auto", "bf16 = autocast; auto: bf16 on a GPU that has it, else fp32", ("auto", "fp32", "bf16"))
    backend: str = option("auto", "backend of flash_attn", ("auto", "cpu", "mma_sync", "wgmma", "reference"))
    layers: int = option(4, "transformer blocks")
    heads: int = option(4, "attention heads")
    width: int = option(256, "model width; head dim = width / heads")
    seqlen: int = option(1024, "tokens of a sequence")
    batch: int = option(2, "sequences of a step, in each process")
    steps: int = option(40, "training steps")
    lr: float = option(1e-3, "peak learning rate; a tenth of the steps warms up, then cosine to a tenth")
    dropout: float = option(0.0, "on attention probabilities, embeddings and both residual branches")
    seed: int = option(1337, "of weights, batches and dropout")
    deterministic: bool = option(True, "the same bits in every run, which an exact --resume needs (the default)")
    eval_every: int = option(10, "steps between validation losses")
    eval_batches: int = option(2, "batches of a validation loss")
    checkpoint_every: int = option(20, "steps between checkpoints; 0 = none", fixed=False)
    resume: bool = option(False, "go on from the checkpoint in --out, if there is one", fixed=False)
    tolerance: float = option(1e-3, "largest relative difference of the losses in fp32", fixed=False)
    memory: bool = option(True, "measure peak memory, in further processes (the default)", fixed=False)
    memory_seqlen: int = option(16384, "longest of the memory plot; standard stops at half", fixed=False)


def parse(arguments: list[str] | None) -> Config:
    """The checked options, with device and dtype resolved. Wrong ones exit with status 2 and a sentence."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for field in dataclasses.fields(Config):
        flag, default, choices = "--" + field.name.replace("_", "-"), field.default, field.metadata["choices"]
        note = field.metadata["help"]
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=note)
        else:
            kind = type(default) if field.name != "attention" else lambda names: tuple(names.split(","))
            parser.add_argument(flag, type=kind, default=default, choices=choices, help=f"{note} (default: {default})")
    config = Config(**vars(parser.parse_args(arguments)))

    def require(holds: bool, message: str) -> None:
        return None if holds else parser.error(message)

    for name in config.attention:
        require(name in ATTENTIONS, f"--attention {name!r}: must be one of {', '.join(ATTENTIONS)}")
        require(config.attention.count(name) == 1, f"--attention {name}: given twice")
    for name in ("layers", "heads", "width", "seqlen", "batch", "steps", "eval_every", "eval_batches"):
        require(getattr(config, name) >= 1, f"--{name.replace('_', '-')} {getattr(config, name)}: must be at least 1")
    require(config.checkpoint_every >= 0, f"--checkpoint-every {config.checkpoint_every}: must be at least 0")
    require(config.width % config.heads == 0, f"--width {config.width}: must be a multiple of --heads {config.heads}")
    require(0 <= config.dropout < 1, f"--dropout {config.dropout}: must be in [0, 1)")
    n_gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    device = ("cuda" if n_gpus else "cpu") if config.device == "auto" else config.device
    require(device == "cpu" or local_rank < n_gpus, f"--device {device}: torch sees {n_gpus}, one a process is needed")
    if device == "cpu" and "flash" in config.attention and config.backend in ("auto", "cpu"):
        library = is_available("cpu")
        require(bool(library), f"flash_attn has no CPU library ({library.reason}); --backend reference needs none")
    has_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = ("bf16" if has_bf16 else "fp32") if config.dtype == "auto" else config.dtype
    return dataclasses.replace(config, device=device, dtype=dtype)


def load_text(config: Config) -> tuple[bytes, str]:
    """All files joined by name, hidden ones and those with a NUL byte left out, and a line that says what they are."""
    root, pattern = Path(config.data or sysconfig.get_path("stdlib")), "*" if config.data else "*.py"
    if not root.exists():
        raise ValueError(f"--data {root}: there is no such file or directory")
    names = [path.relative_to(root) for path in root.rglob(pattern) if path.is_file()]  # none if root is a file
    names = [n for n in names if not any(p[0] == "." or (p in NOT_EVERYWHERE and not config.data) for p in n.parts)]
    paths = [root / name for name in sorted(names, key=Path.as_posix)] if root.is_dir() else [root]
    contents = [content for content in map(Path.read_bytes, paths) if b"\0" not in content]
    text, least = b"\n".join(contents), VAL_SHARE * (config.seqlen + 1)  # seqlen inputs and, one further, targets
    if len(text) < least:
        raise ValueError(f"--data {root}: {len(text)} bytes of text; --seqlen {config.seqlen} needs at least {least}")
    return text, f"{root}, {len(contents)} files, {len(text) / 2**20:.1f} MiB"


def draw_batches(tokens: Tensor, n_steps: int, config: Config, world: World) -> Callable[[int], Tensor]:
    """The batch of a step: int64 (batch, seqlen + 1). P processes with b sequences read what one with P·b reads."""
    shape, generator = (n_steps, world.size, config.batch, 1), torch.Generator().manual_seed(config.seed)
    starts = torch.randint(len(tokens) - config.seqlen, shape, generator=generator)[:, world.rank]
    offsets = torch.arange(config.seqlen + 1)
    return lambda step: tokens[starts[step] + offsets].long().to(world.device)


class Stamp(torch.autograd.Function):
    """Identity that stamps the time when tensors pass, and in backward when all of their gradients have come."""

    @staticmethod
    def forward(ctx: Any, stamps: list[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.stamps = stamps
        Stamp.append_now(stamps, tensors[0])
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        Stamp.append_now(ctx.stamps, gradients[0])
        return None, *gradients

    @staticmethod
    def append_now(stamps: list[Any], like: Tensor) -> None:
        stamps.append(torch.cuda.Event(enable_timing=True) if like.is_cuda else time.perf_counter())
        if like.is_cuda:
            stamps[-1].record()

    @staticmethod
    def seconds(stamps: list[Any]) -> float:
        """Sum over begin, end, begin, end, …: forward and backward come in pairs alike. CUDA: after synchronising."""
        pairs = zip(stamps[0::2], stamps[1::2], strict=True)
        return sum(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3 for begin, end in pairs)


def make_attend(name: str, backend: str) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    if name == "standard":
        return lambda q, k, v, dropout_p: standard_attention(q, k, v, dropout_p, causal=True)
    if name == "flash":
        return lambda q, k, v, dropout_p: flash_attn_func(q, k, v, dropout_p, causal=True, backend=backend)
    sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    return lambda q, k, v, dropout_p: sdpa(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=dropout_p).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, config: Config, attend: Callable[..., Tensor], stamps: list[Any]) -> None:
        super().__init__()
        self.heads, self.attend, self.stamps, self.dropout = config.heads, attend, stamps, config.dropout
        self.norm_attention = nn.LayerNorm(config.width, bias=False)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.LayerNorm(config.width, bias=False)
        self.expand = nn.Linear(config.width, 4 * config.width, bias=False)
        self.contract = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seqlen, width) → the same."""
        dropout_p = self.dropout if self.training else 0.0
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = Stamp.apply(self.stamps, q, k, v)
        (attended,) = Stamp.apply(self.stamps, self.attend(q, k, v, dropout_p))
        x = x + F.dropout(self.project(attended.flatten(2)), dropout_p)
        return x + F.dropout(self.contract(F.gelu(self.expand(self.norm_mlp(x)))), dropout_p)


class GPT(nn.Module):
    """Pre-norm decoder with learned positions; the output layer shares the token embedding's weights."""

    def __init__(self, config: Config, attend: Callable[..., Tensor], stamps: list[Any]) -> None:
        super().__init__()
        self.dropout, self.is_bf16 = config.dropout, config.dtype == "bf16"
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.seqlen, config.width)
        self.blocks = nn.Sequential(*(Block(config, attend, stamps) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width, bias=False)
        for weight in [weight for weight in self.parameters() if weight.dim() == 2]:
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 (batch, seqlen + 1) → mean cross-entropy in nats of each byte given those before it."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = F.dropout(self.token(inputs) + self.position.weight, self.dropout, self.training)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.is_bf16):
            logits = F.linear(self.norm(self.blocks(x)), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def set_up(config: Config) -> World:
    """Process-wide switches, and this process's place among those of torchrun, if there are others."""
    torch.use_deterministic_algorithms(config.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that would cost time
    device = torch.device("cpu")
    if config.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not repeatable
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return World(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), device)


class Trainer:
    def __init__(self, name: str, config: Config, world: World) -> None:
        torch.manual_seed(config.seed)
        self.config, self.world, self.stamps = config, world, list[Any]()
        self.model = GPT(config, make_attend(name, config.backend), self.stamps).to(world.device)
        self.parallel = nn.parallel.DistributedDataParallel(self.model) if world.size > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.history: History = {"loss": [], "seconds": [], "attention_seconds": [], "val_step": [], "val_loss": []}

    def now(self) -> float:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter()

    def mean_over_processes(self, loss: Tensor) -> float:
        loss = loss.detach().clone()
        if self.world.size > 1:
            dist.all_reduce(loss)
        return loss.item() / self.world.size

    def step(self, step: int, tokens: Tensor) -> None:
        """`step`, from 0, decides the learning rate and the dropout masks, which are alike in all attentions."""
        torch.manual_seed(self.config.seed + 1 + step * self.world.size + self.world.rank)
        cosine = 0.55 + 0.45 * math.cos(math.pi * (step / self.config.steps - WARM_UP) / (1 - WARM_UP))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * min((step + 1) / (WARM_UP * self.config.steps), cosine)
        self.stamps.clear()
        begin = self.now()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.parallel(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.history["seconds"].append(self.now() - begin)
        self.history["attention_seconds"].append(Stamp.seconds(self.stamps))
        self.history["loss"].append(self.mean_over_processes(loss))

    @torch.no_grad()
    def evaluate(self, n_done: int, batches: Callable[[int], Tensor]) -> None:
        self.model.eval()
        losses = [self.mean_over_processes(self.parallel(batches(i))) for i in range(self.config.eval_batches)]
        self.model.train()
        self.history["val_step"].append(n_done)
        self.history["val_loss"].append(statistics.fmean(losses))


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Whole or not at all: a kill at any moment leaves the old file or the new one at `path`."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # the bytes are on disk before the name leads to them
    os.replace(temporary, path)


def load_checkpoint(path: Path, identity: dict[str, Any], world: World) -> dict[str, Any] | None:
    """The first process's checkpoint, given to all; None if there is none. ValueError if it is of another run."""
    found = [torch.load(path, map_location="cpu", weights_only=True) if world.rank == 0 and path.exists() else None]
    if world.size > 1:
        dist.broadcast_object_list(found, device=world.device)
    for name in identity if found[0] else ():
        if identity[name] != (saved := found[0]["identity"].get(name)):
            raise ValueError(f"--resume: {path} is of a run with {name} = {saved!r}, this one has {identity[name]!r}")
    return found[0]


def train(config: Config, text: bytes, world: World) -> dict[str, History]:
    """Trains one model for each attention, in turns, and writes checkpoints. Every process calls it."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    n_val = len(tokens) // VAL_SHARE
    batches = draw_batches(tokens[:-n_val], config.steps, config, world)
    val_batches = draw_batches(tokens[-n_val:], config.eval_batches, config, world)
    trainers = {name: Trainer(name, config, world) for name in config.attention}
    identity = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.metadata["fixed"]}
    identity |= {"processes": world.size, "text's sha256": hashlib.sha256(text).hexdigest()}
    path, start = Path(config.out) / "checkpoint.pt", 0
    if config.resume and (checkpoint := load_checkpoint(path, identity, world)):
        start = checkpoint["step"]
        for name, trainer in trainers.items():
            model, optimizer, trainer.history = checkpoint["trainers"][name]
            trainer.model.load_state_dict(model)
            trainer.optimizer.load_state_dict(optimizer)
    if config.resume and world.rank == 0:
        print(f"resuming after step {start}" if start else f"--resume: there is no {path} yet, so from the start")
    progress = tqdm(range(start, config.steps), "training", config.steps, initial=start, disable=world.rank != 0)
    for step in progress:
        batch, n_done, is_last = batches(step), step + 1, step + 1 == config.steps
        for trainer in trainers.values():
            trainer.step(step, batch)
            if n_done % config.eval_every == 0 or is_last:
                trainer.evaluate(n_done, val_batches)
        progress.set_postfix({name: f"{trainer.history['loss'][-1]:.4f}" for name, trainer in trainers.items()})
        if world.rank == 0 and config.checkpoint_every and (n_done % config.checkpoint_every == 0 or is_last):
            state = {name: (t.model.state_dict(), t.optimizer.state_dict(), t.history) for name, t in trainers.items()}
            save_checkpoint(path, {"identity": identity, "step": n_done, "trainers": state})
    return {name: trainer.history for name, trainer in trainers.items()}


def peak_memory(config: Config, name: str, seqlen: int) -> float:
    """MiB that two training steps need (seqlen 0), or forward + backward of one call with batch 1 and 1 head."""
    world = set_up(config)._replace(rank=0, size=1)
    is_cuda, attend = world.device.type == "cuda", make_attend(name, config.backend)

    def allocated(cpu_field: str, peak: Callable[[], int]) -> float:
        status = Path("/proc/self/status").read_text().split()  # unlike ru_maxrss, VmHWM starts anew in a new process
        return peak() / 2**20 if is_cuda else int(status[status.index(cpu_field) + 1]) / 1024

    def inputs(n: int) -> list[Tensor]:
        shape = (1, n, 1, config.width // config.heads)
        return [torch.randn(shape, device=world.device, dtype=DTYPES[config.dtype], requires_grad=True) for _ in "qkv"]

    def call(q: Tensor, k: Tensor, v: Tensor) -> None:
        attend(q, k, v, config.dropout).backward(torch.ones_like(q))

    call(*inputs(64))  # loads libraries and starts threads
    qkv = inputs(seqlen)
    held = allocated("VmRSS:", torch.cuda.memory_allocated)
    if seqlen:
        call(*qkv)
    else:
        trainer = Trainer(name, config, world)
        for step in range(2):  # the second holds the optimizer's state too
            trainer.step(step, torch.randint(VOCABULARY, (config.batch, config.seqlen + 1), device=world.device))
    return allocated("VmHWM:", torch.cuda.max_memory_allocated) - held


def measure_memory(config: Config) -> Peaks:
    """`peak_memory` by attention and seqlen, 0 = the training steps; NaN where there was not enough."""
    lengths = [0] + [512 << i for i in range(20) if 512 << i <= config.memory_seqlen]
    longest = {name: config.memory_seqlen // (1 + (name == "standard")) for name in config.attention}
    cases = [(name, n) for name in config.attention for n in lengths if n <= longest[name]]
    peaks: Peaks = {name: {} for name in config.attention}
    context = multiprocessing.get_context("forkserver")  # a case forks from a process that imported these alone
    context.set_forkserver_preload(["torch", "torch._inductor.config", "flash_attn"])
    for name, seqlen in tqdm(cases, "peak memory"):
        try:
            with ProcessPoolExecutor(1, context) as pool:
                peaks[name][seqlen] = pool.submit(peak_memory, config, name, seqlen).result()
        except (BrokenExecutor, RuntimeError, ValueError) as error:  # out of memory, killed, no VmHWM
            tqdm.write(f"peak memory of {name} at seqlen {seqlen or config.seqlen} is unknown: {error}")
            peaks[name][seqlen] = math.nan
    return peaks


def differences(a: History, b: History) -> list[float]:
    """Relative difference of the training losses, step by step, then of the validation losses."""
    pairs = [pair for key in ("loss", "val_loss") for pair in zip(a[key], b[key], strict=True)]
    return [abs(x - y) / abs(x) for x, y in pairs]


def report(config: Config, world: World, histories: dict[str, History], peaks: Peaks) -> bool:
    """Prints the table and the verdict: whether the losses agree, where that is asked. Writes results.json."""
    first, agree, rows, verdicts = config.attention[0], True, {"": list(config.attention)}, list[str]()
    for name, history in histories.items():
        relative = differences(histories[first], history)
        seconds, in_attention = (statistics.median(history[key]) for key in ("seconds", "attention_seconds"))
        for row, cell in {
            "train loss, last step": f"{history['loss'][-1]:.6f}",
            "val loss, last step": f"{history['val_loss'][-1]:.6f}",
            f"max relative difference from {first}": f"{max(relative):.1e}",
            "tokens/s": f"{config.batch * config.seqlen * world.size / seconds:,.0f}",
            "attention time, ms of a step": f"{in_attention * 1e3:,.0f} of {seconds * 1e3:,.0f}",
            "peak memory of training, MiB": f"{peaks[name][0]:,.0f}" if peaks else "not measured",
        }.items():
            rows.setdefault(row, []).append(cell)
        if name != first:
            judged = config.dtype == "fp32" and not (config.dropout and "sdpa" in (first, name))  # it draws other masks
            holds = all(difference <= config.tolerance for difference in relative)  # NaN does not
            agree = agree and (holds or not judged)
            verdict = ("they agree" if holds else "THEY DO NOT AGREE") if judged else "not judged, as only fp32 is"
            worst = f"{max(relative):.1e} relative, limit {config.tolerance:.0e}"
            verdicts.append(f"{first} and {name}: losses within {worst}: {verdict}")
    lines = [f"{row:42}" + "".join(f"{cell:>16}" for cell in cells) for row, cells in rows.items()]
    print("\n".join(lines + verdicts))
    results = {"config": dataclasses.asdict(config), "processes": world.size, "torch": torch.__version__}
    results |= {"agree": agree, "table": rows, "peak_memory_mib": peaks, "history": histories}
    (Path(config.out) / "results.json").write_text(json.dumps(results, indent=1))
    return agree


def plot(config: Config, histories: dict[str, History], peaks: Peaks) -> None:
    import matplotlib.pyplot as plt  # here, since the processes that measure need no plots

    what, steps, first = f"{config.dtype}, {config.device}", range(1, config.steps + 1), config.attention[0]
    losses, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 1), layout="constrained")
    memory, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, (name, history) in enumerate(histories.items()):
        color, width, alpha = f"C{i}", 1.5 if i else 6, 1 if i else 0.4  # curves coincide: the first is wide and pale
        top.plot(steps, history["loss"], color, linewidth=width, alpha=alpha, label=f"{name}, train")
        val, marker = (history["val_step"], history["val_loss"]), color + ("x" if i else "o")
        top.plot(*val, marker, markersize=width + 5, alpha=alpha, label=f"{name}, val")
        if i:
            relative = [max(each, 1e-9) for each in differences(histories[first], history)[: config.steps]]
            bottom.semilogy(steps, relative, color + ".", label=f"{name} (1e-9: equal)")
        points = {n: mib for n, mib in peaks.get(name, {}).items() if n}
        axes.loglog(points.keys(), points.values(), color + ("x--" if i else "o-"), label=name)
        for n, mib in list(points.items())[-1:]:
            axes.annotate(f"{mib:,.0f} MiB", (n, mib), (-10, 0), textcoords="offset points", ha="right")
    bottom.axhline(config.tolerance, color="black", linestyle="--", linewidth=1, label="limit in fp32")
    top.set(ylabel="loss (nats a byte)", title=f"GPT, {config.layers} layers, seqlen {config.seqlen}, {what}")
    bottom.set(ylabel=f"train loss: relative\ndifference from {first}", xlabel="step")
    axes.set(xlabel="sequence length", ylabel="peak memory above the inputs (MiB)")
    axes.set_title(f"One attention call, forward + backward: 1 head of {config.width // config.heads}, {what}")
    ticks = sorted({n for points in peaks.values() for n in points if n})
    axes.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    for each in (top, bottom, axes):
        each.grid(alpha=0.3)
        each.legend(loc="center right" if each is bottom else "best")
    losses.savefig(Path(config.out) / "losses.png", dpi=120)
    if peaks:
        memory.savefig(Path(config.out) / "memory.png", dpi=120)


def choose_backend(config: Config) -> str:
    """`--backend auto` on a GPU: its kernels if there are any for this model, else the reference, with a note."""
    if config.device == "cpu" or config.backend != "auto" or "flash" not in config.attention:
        return config.backend
    q = torch.zeros(1, 16, config.heads, config.width // config.heads, dtype=DTYPES[config.dtype], device="cuda")
    try:
        flash_attn_func(q.requires_grad_(), q, q, config.dropout, causal=True).sum().backward()
    except NotImplementedError as error:
        print(f'note: flash runs with backend="reference" (plain PyTorch, slow), because: {error}')
        return "reference"
    return "auto"


def main(arguments: list[str] | None = None) -> int:
    """0; 1 if losses that must agree do not; 2 for wrong options or data."""
    config = parse(arguments)
    world, out = set_up(config), Path(config.out)
    try:
        text, origin = load_text(config)
        out.mkdir(parents=True, exist_ok=True)
        config = dataclasses.replace(config, backend=choose_backend(config))
        if world.rank == 0:
            print(f"text: {origin}\nprocesses: {world.size}, CPU threads each: {torch.get_num_threads()}\n{config}")
        if world.size > 1:
            dist.init_process_group("nccl" if config.device == "cuda" else "gloo")
        histories = train(config, text, world)  # frees its models, so that none is the last to hold the process group:
        if world.size > 1:  # a DDP model that ends gloo does so with the GIL held, and gloo's threads may wait for that
            dist.destroy_process_group()
    except (ValueError, OSError) as error:
        print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2
    if world.rank != 0:
        return 0
    peaks = measure_memory(config) if config.memory else {}
    agree = report(config, world, histories, peaks)
    plot(config, histories, peaks)
    print(f"numbers and plots are in {out}: {', '.join(sorted(p.name for p in out.iterdir() if p.suffix != '.pt'))}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
