"""explain(): the backend that a call gets, with what, and why the others do not serve it."""

from __future__ import annotations

import pytest
import torch
from test_memory import measure
from torch import Tensor

import flash_attn
from flash_attn import explain, flash_attn_func, flash_attn_varlen_func

BACKENDS = ("cpu", "mma_sync", "wgmma", "reference")


def qkv(device: str = "cpu", dtype: torch.dtype = torch.float32, seqlen: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, seqlen, 4, 64), (2, seqlen + 33, 2, 64), (2, seqlen + 33, 2, 32))
    return tuple(torch.zeros(s, device=device, dtype=dtype) for s in shapes)


def plausible(found: flash_attn.Explanation) -> None:
    assert all(n >= 1 for n in found.tile) and found.threads >= 1 and found.kernel
    assert found.forward_workspace_bytes >= 0 and found.backward_workspace_bytes >= 0
    assert found.backend not in found.refusals
    assert {found.backend, *found.refusals} == set(BACKENDS)
    for name, reason in found.refusals.items():
        assert len(reason) > 10, (name, reason)
        assert f"not {name}: {reason}" in str(found)
    first = str(found).splitlines()[0]
    assert found.backend in first and found.kernel in first and str(found.tile[0]) in first


@pytest.mark.parametrize("device", ("cpu", "meta"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str)
def test_auto_takes_the_cpu_library(device: str, dtype: torch.dtype):
    """With or without storage behind the tensors."""
    found = explain(*qkv(device, dtype), causal=True, softcap=2.0)
    assert found.backend == "cpu" and "micro-kernels" in found.kernel
    assert "reference" in found.refusals["reference"]
    plausible(found)


@pytest.mark.parametrize("backend", ("auto", *BACKENDS))
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_every_backend_by_name(backend: str, device: str):
    """The answer agrees with what the call does: it runs there, or raises that reason."""
    tensors = qkv(device)
    found = explain(*tensors, backend=backend)
    if found.backend is None:
        with pytest.raises(NotImplementedError) as error:
            flash_attn_func(*tensors, backend=backend)
        assert found.refusals[backend] in str(error.value)
        assert str(found).startswith("no backend serves this call")
        assert set(found.refusals) == set(BACKENDS)
        return
    assert found.backend == ("cpu" if backend == "auto" else backend)
    plausible(found)
    if device == "cpu":
        flash_attn_func(*tensors, backend=found.backend)


def test_reasons_of_absent_kernels():
    """What `is_available` says, and another name that is not asked for says so."""
    refusals = explain(*qkv(), backend="reference").refusals
    assert flash_attn.is_available("wgmma").reason in refusals["wgmma"]
    assert 'backend="reference"' in refusals["cpu"]


def test_threads_and_tiles_follow_the_call():
    tensors = qkv(seqlen=2000)
    torch.set_num_threads(1)
    assert explain(*tensors).threads == 1
    assert explain(*(t[:, :3] for t in tensors), backend="reference").tile == (3, 3)
    small = explain(*(t[:1, :1] for t in tensors))
    assert small.backward_workspace_bytes <= explain(*tensors).backward_workspace_bytes


@pytest.mark.parametrize("backend", ("auto", "reference"))
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_varlen(backend: str, device: str):
    """Sequences are taken to be max_seqlen long: the numbers are those of the dense call of that shape."""
    q, k, v = (t.flatten(0, 1) for t in qkv(device))
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (300, 333))
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 300, "max_seqlen_k": 333}
    found, dense = explain(q, k, v, **lengths, backend=backend), explain(*qkv(device), backend=backend)
    plausible(found)
    assert (found.backend, found.kernel, found.tile) == (dense.backend, dense.kernel, dense.tile)
    assert 0 < found.forward_workspace_bytes <= dense.forward_workspace_bytes or backend == "auto"


def test_empty_calls():
    """Nothing to compute is no error."""
    q, k, v = (torch.zeros(0, 5, 2, 8) for _ in range(3))
    assert explain(q, k, v).backend == "cpu"
    q = torch.zeros(1, 0, 2, 8)
    assert explain(q, q, q).backend == "cpu" and explain(q, q, q, backend="reference").backend == "reference"


def test_computes_nothing_and_draws_no_seed():
    """The generator stays, no graph is built, and shapes whose tensors would fill any memory are no trouble."""
    q = torch.zeros(1, 1, 1, 64, device="meta").expand(64, 1 << 20, 64, 64)
    before = torch.get_rng_state()
    found = explain(q, q, q, dropout_p=0.5, causal=True)
    assert torch.equal(torch.get_rng_state(), before)
    plausible(found)
    assert found.forward_workspace_bytes < 1 << 34


def test_is_a_value():
    """Two equal calls, equal answers; the fields cannot be set."""
    found = explain(*qkv())
    assert found == explain(*qkv())
    with pytest.raises(AttributeError):
        found.backend = "reference"  # type: ignore[misc]


def wrong() -> dict[str, tuple[tuple, dict]]:
    q, k, v = qkv()
    return {
        "shape": ((q, k[:, :, :1, :5], v), {}),
        "rank": ((q[0], k, v), {}),
        "dtype": ((q, k.double(), v), {}),
        "integers": ((q.int(), k.int(), v.int()), {}),
        "batch": ((q, k[:1], v[:1]), {}),
        "device": ((q, k.to("meta"), v), {}),
        "bias": ((q, k, v), {"bias": torch.zeros(7)}),
        "mask": ((q, k, v), {"mask": torch.zeros(300, 333)}),
        "sink": ((q, k, v), {"learnable_sink": torch.zeros(3)}),
        "window": ((q, k, v), {"window_size": (-2, 0)}),
        "dropout": ((q, k, v), {"dropout_p": 1.5}),
        "scale": ((q, k, v), {"softmax_scale": float("nan")}),
        "lengths": ((q, k, v), {"seqused_k": torch.zeros(3, dtype=torch.int32)}),
        "backend": ((q, k, v), {"backend": "nonsense"}),
        "no tensor": ((q, None, v), {}),
    }


@pytest.mark.parametrize("name", wrong())
def test_wrong_arguments_raise_as_the_call_does(name: str):
    arguments, options = wrong()[name]
    messages = []
    for function in (flash_attn_func, explain):
        with pytest.raises(Exception) as error:  # noqa: B017 (the same one is what is tested)
            function(*arguments, **options)
        messages.append((type(error.value), str(error.value)))
    assert messages[0] == messages[1]


def test_wrong_varlen_arguments_raise_as_the_call_does():
    q, k, v = (t.flatten(0, 1) for t in qkv())
    cu = torch.tensor([0, 300, 600])
    for cu_q, cu_k in ((cu, cu[:2]), (cu.float(), cu), (cu[None], cu)):
        messages = []
        for function in (flash_attn_varlen_func, explain):
            lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 300, "max_seqlen_k": 333}
            with pytest.raises(RuntimeError, match="cu_seqlens") as error:
                function(q, k, v, **lengths)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_workspace_is_what_calls_take(backend: str, monkeypatch: pytest.MonkeyPatch):
    """Peak memory of forward and of backward beside inputs and outputs: within a factor of two, and 3 MB of noise."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed counts as free
    measure(f"""
    backend, n, heads, dim = {backend!r}, 2048, 16, 64
    q, k, v = (torch.randn(1, n, heads, dim, requires_grad=True) for _ in range(3))
    dout, size = torch.randn_like(q), q.numel() * 4
    lse = 3 * n * heads * 4  # and the statistics
    found = flash_attn.explain(q, k, v, backend=backend)
    for _ in range(2):  # first uses take memory of their own
        results = []
        forward = peak_above(lambda: results.append(flash_attn.flash_attn_func(q, k, v, backend=backend))) - size - lse
        backward = peak_above(lambda: results.append(torch.autograd.grad(results[0], (q, k, v), dout))) - 3 * size
    print(found, forward / MB, backward / MB)
    for measured, said in ((forward, found.forward_workspace_bytes), (backward, found.backward_workspace_bytes)):
        assert measured <= 2 * said + 3 * MB and said <= 2 * measured + 3 * MB, (measured / MB, said / MB)
    """)
