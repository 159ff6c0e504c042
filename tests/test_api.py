"""The public surface: names, signatures, import without a library, and the small functions beside attention."""

from __future__ import annotations

import inspect
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
from oracle import Options

import flash_attn

PACKAGE = Path(flash_attn.__file__).resolve().parent

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
KEYWORDS = (
    "*, bias=None, mask=None, block_mask=None, learnable_sink=None, seqused_q=None, seqused_k=None, leftpad_q=None, "
    "leftpad_k=None, dropout_seed=None, return_lse=False, backend='auto'"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
PLAIN = (
    "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None{}, "
    "*, bias=None, mask=None, learnable_sink=None, seqused_q=None, seqused_k=None, leftpad_q=None, leftpad_k=None, "
    "dropout_seed=None, return_lse=False"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}, {KEYWORDS}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}, {KEYWORDS}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}, {KEYWORDS}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None, {KEYWORDS}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL}, {KEYWORDS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}, {KEYWORDS}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
    "merge_attention": "outs, lses",
    "attention_probs": (
        "q_rows, k, lse, *, rows=None, seqlen_q=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "softcap=0.0, alibi_slopes=None, bias=None, mask=None, block_mask=None, seqused_q=None, seqused_k=None, "
        "leftpad_q=None, leftpad_k=None"
    ),
    "dropout_mask": "seed, dropout_p, batch, heads, seqlen_q, seqlen_k",
    "is_available": "backend='cpu'",
}


def signature(function) -> str:
    """Names, kinds and defaults, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))[1:-1]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert signature(getattr(flash_attn, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", ("standard_attention", "tiled_attention"))
def test_signatures_of_the_plain_ones(name):
    """The options of flash_attn_func; `deterministic` and others may stand anywhere among the keywords."""
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    got = {n: (p.kind, p.default) for n, p in parameters.items()}
    want = {n: (p.kind, p.default) for n, p in inspect.signature(flash_attn.flash_attn_func).parameters.items()}
    for absent in ("backend", "return_attn_probs", "deterministic"):
        del want[absent]
    if name == "tiled_attention":
        assert got.pop("deterministic")[1] is False
    assert got == want
    assert [n for n in got if n in want] == list(want)


def test_names():
    for name in (*SIGNATURES, "standard_attention", "tiled_attention", "__version__"):
        assert hasattr(flash_attn, name), name
    assert set(flash_attn.__all__) <= set(dir(flash_attn))
    assert flash_attn.__version__.startswith("2.8.3")


def python(*arguments: str, path: Path, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(path), **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=env, cwd="/")


def test_import_before_torch():
    """In a fresh process, the package first."""
    done = python("-c", "import flash_attn, sys; assert 'torch' in sys.modules; assert flash_attn.is_available()",
                  path=PACKAGE.parent)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fault", ("missing", "other machine", "empty", "text"))
def test_import_without_a_library(fault, tmp_path):
    """Importing works; is_available() is false and says why; calls say it too; the reference still runs."""
    shutil.copytree(PACKAGE, tmp_path / "flash_attn", ignore=shutil.ignore_patterns("*.so", "__pycache__", "_build*"))
    library = tmp_path / "flash_attn" / "_C.so"
    if fault == "other machine":
        elf = bytearray((PACKAGE / "_C.so").read_bytes())
        elf[18] ^= 0x20  # e_machine
        library.write_bytes(elf)
    elif fault == "empty":
        library.write_bytes(b"")
    elif fault == "text":
        library.write_bytes(b"this is no library" * 100)
    script = """
import flash_attn, torch
from pathlib import Path
assert str(Path(flash_attn.__file__).resolve()).startswith(HERE), flash_attn.__file__
answer = flash_attn.is_available()
assert not answer and not flash_attn.is_available("cpu") and flash_attn.is_available("reference")
assert len(answer.reason) > 20 and "_C.so" in answer.reason, answer.reason
assert answer.reason in repr(answer), repr(answer)
q = torch.randn(1, 5, 2, 8, requires_grad=True)
for backend in ("auto", "cpu"):
    try:
        flash_attn.flash_attn_func(q, q, q, backend=backend)
    except (NotImplementedError, RuntimeError) as error:
        assert "_C.so" in str(error) and "reference" in str(error), str(error)
    else:
        raise AssertionError("a call without a library")
flash_attn.flash_attn_func(q, q, q, backend="reference").sum().backward()
flash_attn.dropout_mask(torch.tensor([1, 2]), 0.5, 1, 1, 3, 3)
""".replace("HERE", repr(str(tmp_path.resolve())))
    done = python("-c", script, path=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_second_copy_does_not_crash(tmp_path):
    """Two copies of the package in one process: the second one says why it is not available."""
    shutil.copytree(PACKAGE, tmp_path / "flash_attn", ignore=shutil.ignore_patterns("__pycache__"))
    script = f"""
import sys
import flash_attn
assert flash_attn.is_available()
for name in [n for n in sys.modules if n.split(".")[0] == "flash_attn"]:
    del sys.modules[name]
sys.path.insert(0, {str(tmp_path)!r})
import flash_attn
assert str(flash_attn.__file__).startswith({str(tmp_path)!r})
assert not flash_attn.is_available() and flash_attn.is_available().reason
"""
    done = python("-c", script, path=PACKAGE.parent)
    assert done.returncode == 0, f"{done.returncode} {done.stderr}"


def test_import_prints_and_warns_nothing():
    done = python("-W", "error", "-c", "import flash_attn", path=PACKAGE.parent)
    assert done.returncode == 0 and done.stdout == "" and done.stderr == "", done.stderr


def test_is_available():
    answer = flash_attn.is_available()
    assert answer and bool(answer) is True and isinstance(answer.reason, str) and answer.reason in repr(answer)
    for backend in ("wgmma", "mma_sync"):
        assert isinstance(flash_attn.is_available(backend).reason, str)
    mma_sync = flash_attn.is_available("mma_sync")
    assert mma_sync or flash_attn.is_available("wgmma") == mma_sync  # one library has both
    with pytest.raises(ValueError, match="nonsense"):
        flash_attn.is_available("nonsense")
    for name in (["cpu"], {}, None, 3, torch.zeros(2)):  # some have no hash, or no plain ==
        with pytest.raises(ValueError, match="backend must be cpu, mma_sync"):
            flash_attn.is_available(name)


def test_wgmma_needs_its_kernels(monkeypatch):
    """A library for other GPUs has none of Hopper's."""
    ops, loaded = flash_attn._ops, flash_attn._ops.Availability(True, "_C_cuda.so is loaded")
    other, hopper = "FWD(mma_sync, sm80, bf16, 64, plain)", "FWD(wgmma, sm90, bf16, 64, plain)"
    for kernels, available in (([other], False), ([other, hopper], True), ([], False)):
        monkeypatch.setattr(ops, "_build_info", lambda kernels=kernels: {"gpu_kernels": kernels})
        answer = ops._wgmma_availability(loaded)
        assert bool(answer) == available and ("sm90" in answer.reason) != available
        missing = ops.Availability(False, "no library")
        assert ops._wgmma_availability(missing) is missing


def tensors(**sizes) -> list[torch.Tensor]:
    s = {"batch": 2, "seqlen_q": 9, "seqlen_k": 33, "heads": 4, "heads_k": 2, "dim": 8, "dtype": torch.float64, **sizes}
    shapes = ((s["seqlen_q"], s["heads"]), (s["seqlen_k"], s["heads_k"]), (s["seqlen_k"], s["heads_k"]))
    return [torch.randn(s["batch"], *n, s["dim"], dtype=s["dtype"]) for n in shapes]


ALGORITHMS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "scores": {"softcap": 2.0, "softmax_scale": 0.7, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "lengths": {"seqused_k": torch.tensor([33, 5]), "leftpad_k": torch.tensor([7, 0]), "seqused_q": torch.tensor([9,
    4]),
                "leftpad_q": torch.tensor([2, 0]), "causal": True},
    "mask": {"mask": torch.rand(2, 1, 1, 33, generator=torch.Generator().manual_seed(1)) < 0.3},
    "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor([5, 6])},
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("function", ("standard_attention", "tiled_attention", "flash_attn_func"))
def test_algorithms_agree_with_the_oracle(function, name):
    """Algorithm 0, Algorithm 1 and the library: fp64 values and gradients of (out, LSE) to 1e-10."""
    q, k, v = tensors()
    bias, sink = torch.randn(1, 4, 9, 33, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v, bias, sink)]
    o = dict(ALGORITHMS[name])
    out, lse = getattr(flash_attn, function)(q, k, v, bias=bias, learnable_sink=sink, return_lse=True, **o)
    keep = oracle.keep_mask(o["dropout_seed"].tolist(), 0.3, 2, 4, 9, 33) if "dropout_p" in o else None
    o = {"scale" if n == "softmax_scale" else n: t for n, t in o.items() if n != "dropout_seed"}
    o = {{"window_size": "window", "alibi_slopes": "alibi"}.get(n, n): t for n, t in o.items()}
    want, want_lse = oracle.attention(q, k, v, bias, sink, Options(keep=keep, **o))
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dlse = dlse.masked_fill(want_lse == -math.inf, 0.0)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    for g, w in zip(got, torch.autograd.grad((want, want_lse), leaves, (dout, dlse)), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cuts", ((0, 33), (0, 10, 33), (0, 1, 2, 20, 20, 33)))
def test_merge_attention(cuts):
    """Attention over pieces of the keys, merged: attention over all of them, with gradients through out and LSE."""
    q, k, v = (t.requires_grad_() for t in tensors())
    pieces = [
        flash_attn.flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    out, lse = flash_attn.merge_attention([o for o, _ in pieces], [x for _, x in pieces])
    want, want_lse = oracle.attention(q, k, v)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    for g, w in zip(got, torch.autograd.grad((want, want_lse), (q, k, v), (dout, dlse)), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


def test_merge_of_empty_pieces():
    """Rows that saw nothing (LSE −inf) weigh nothing; rows that saw nothing anywhere stay 0 and −inf, not NaN."""
    out = [torch.randn(1, 3, 2, 4), torch.zeros(1, 3, 2, 4)]
    lse = [torch.randn(1, 2, 3), torch.full((1, 2, 3), -math.inf)]
    lse[0][0, 1, 2], out[0][0, 2, 1] = -math.inf, 0.0
    leaves = [t.requires_grad_() for t in (*out, *lse)]
    merged, merged_lse = flash_attn.merge_attention(out, lse)
    assert torch.equal(merged, out[0]) and torch.equal(merged_lse, lse[0])
    grads = torch.autograd.grad(merged.sum() + merged_lse[merged_lse != -math.inf].sum(), leaves, allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in grads)


def test_merge_in_half_precision_and_far_apart():
    """LSEs 1e4 apart: the larger wins, nothing overflows; the result keeps the dtype of the pieces."""
    outs = [torch.full((1, 1, 1, 4), x, dtype=torch.bfloat16) for x in (1.0, 2.0)]
    out, lse = flash_attn.merge_attention(outs, [torch.full((1, 1, 1), 1e4), torch.full((1, 1, 1), -1e4)])
    assert torch.equal(out, outs[0]) and float(lse) == 1e4 and out.dtype == torch.bfloat16


@pytest.mark.parametrize("options", (
    {}, {"causal": True}, {"window_size": (4, 3)}, {"softcap": 2.0, "softmax_scale": 0.6},
    {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}, {"mask": torch.arange(33) % 3 > 0},
    {"bias": torch.arange(33) / 9.0},
    {"seqused_k": torch.tensor([33, 20]), "leftpad_k": torch.tensor([3, 0]), "causal": True},
    {"seqused_q": torch.tensor([9, 5]), "leftpad_q": torch.tensor([2, 0]), "causal": True},
), ids=str)  # fmt: skip
def test_attention_probs(options):
    """Exact rows of P, rebuilt from LSE: all rows, then chosen ones."""
    q, k, v = tensors()
    if "bias" in options:
        options = {**options, "bias": options["bias"].double()}
    names = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "alibi"}
    o = {names.get(n, n): t for n, t in options.items() if n != "bias"}
    identity = torch.eye(33, dtype=torch.float64)[None, :, None].expand(2, 33, 2, 33)
    want = oracle.attention(q, k, identity, options.get("bias"), None, Options(**o))[0].transpose(1, 2)
    lse = flash_attn.flash_attn_func(q, k, v, return_lse=True, **options)[1]
    got = flash_attn.attention_probs(q, k, lse, **options)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    rows = torch.tensor([7, 0, 3])
    got = flash_attn.attention_probs(q[:, rows], k, lse[:, :, rows], rows=rows, seqlen_q=9, **options)
    torch.testing.assert_close(got, want[:, :, rows], rtol=1e-9, atol=1e-12)


def test_autocast_casts_all_three():
    """Under autocast fp32 inputs, or a mixture, are computed in bf16; without it fp32 stays fp32."""
    q, k, v = tensors(dtype=torch.float32)
    want = flash_attn.flash_attn_func(*(t.bfloat16() for t in (q, k, v)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flash_attn.flash_attn_func(q, k, v), want)
        assert torch.equal(flash_attn.flash_attn_func(q, k.bfloat16(), v.bfloat16()), want)
    out = flash_attn.flash_attn_func(q, k, v)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, oracle.attention(q, k, v)[0].float(), rtol=1e-5, atol=1e-6)
