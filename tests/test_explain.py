"""explain(): the backend that a call gets, with what, and why the others do not serve it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from test_memory import measure
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn
from flash_attn import _ops, dispatch, explain, flash_attn_func, flash_attn_varlen_func, gpu
from flash_attn.problem import Problem

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
    found = flash_attn.is_available("wgmma")
    assert ("no kernel for cpu tensors" if found else found.reason) in refusals["wgmma"]
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


def test_plans_of_any_size():
    """A plan takes no time and no memory that grow with the call, and refuses what is no size of a call."""
    plan = torch.ops.flash_attn.cpu_plan
    for sizes in (
        (1, 1, 1, 2**40, 2**40, 64, 64), (2**24, 8, 8, 16, 16, 64, 64), (1, 2**24, 2**24, 16, 16, 64, 64),
        (2**30, 8, 2, 16, 3, 8, 8), (2**36, 1, 1, 0, 0, 8, 8),
    ):  # fmt: skip
        numbers, _ = plan(1, *sizes, False, False)
        assert all(x >= 0 for x in numbers.tolist())
    of_three, of_many = (plan(1, n, 2, 2, 300, 300, 64, 64, False, False)[0].tolist() for n in (3, 2**20))
    assert of_three[1:3] == of_many[1:3] and of_three[3] <= of_many[3] <= 2 * of_three[3] + 2**24
    for sizes, words in (
        ((-1, 1, 1, 1, 1, 1, 1), "at least 0"), ((1, 1, 1, 1, -(2**62), 1, 1), "at least 0"),
        ((1, 3, 2, 1, 1, 1, 1), "must divide"), ((1, 3, 0, 1, 1, 1, 1), "must divide"),
        ((2**62, 8, 8, 1, 1, 1, 1), "too many"), ((1, 1, 1, 2**62, 2**62, 1, 1), "too many"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            plan(1, *sizes, False, False)


def test_is_a_value():
    """Two equal calls, equal answers; the fields cannot be set."""
    found = explain(*qkv())
    assert found == explain(*qkv())
    with pytest.raises(AttributeError):
        found.backend = "reference"  # type: ignore[misc]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    """CUDA tensors without a GPU, and the answers of a library on a Hopper card; the plans that were asked for."""
    asked = []

    def plan(device, dtype, dim, dim_v, variant, block_size, keys=0, has_window=False, reachable=True, family=0, *_):
        asked.append((keys, has_window, reachable, family))
        if dtype not in (torch.float16, torch.bfloat16):
            return _ops.GpuPlan("no kernel for fp32")
        serves = variant != "biased" and reachable
        if family == 2 and not serves:
            return _ops.GpuPlan("wgmma kernels have no such thing")
        if family != 1 and serves:
            return _ops.GpuPlan("", 90, 64, variant, (128, 128), "wgmma", 128)
        return _ops.GpuPlan("", 80, 64, variant, (128, 64), "mma_sync", 128)

    monkeypatch.setattr(_ops, "gpu_plan", plan)
    monkeypatch.setattr(_ops, "is_reachable", lambda *x: all(0 not in t.stride() for t in x))
    for name in ("mma_sync", "wgmma"):
        monkeypatch.setitem(_ops.AVAILABILITY, name, _ops.Availability(True, "loaded"))
    with FakeTensorMode():
        yield asked


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The op that plans for GPUs, as the dispatcher knows it; without a GPU, one that always has a kernel."""
    if flash_attn.is_available("mma_sync"):
        yield
        return
    monkeypatch.setitem(_ops.AVAILABILITY, "mma_sync", _ops.Availability(True, "loaded"))
    _ops.gpu_plan.cache_clear()
    with torch.library._scoped_library("flash_attn", "IMPL") as library:
        answer = torch.tensor([80, 64, 0, 128, 64, 1, 128]), torch.empty(0, dtype=torch.uint8)
        library.impl("gpu_plan", lambda *numbers: answer, "CompositeExplicitAutograd")
        yield
    _ops.gpu_plan.cache_clear()


@pytest.mark.parametrize("device", ("cpu", "cuda:0"))
def test_fake_tensors(planned: None, device: str):
    """Plans are ops without tensors, by which FakeTensorMode would tell their device."""
    with FakeTensorMode():
        q, k, v = qkv(device, torch.bfloat16)
        plausible(explain(q, k, v))
        assert flash_attn_func(q, k, v).shape == (*q.shape[:-1], v.shape[-1])
        compiled = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
        assert compiled(q, k, v).shape == (*q.shape[:-1], v.shape[-1])


LAYOUTS = {
    "contiguous": (lambda x: x, True),
    "heads first": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
    "packed": (lambda x: x[0], True),
    "a copy is read": (lambda x: x[..., ::2], True),  # 32 elements
    "a copy of too few": (lambda x: x[..., :24:2], False),  # 12
    "8 elements on": (lambda x: x[..., 8:], True),
    "one element on": (lambda x: x[..., 1:57], False),
    "dim 60": (lambda x: x[..., :60], False),
    "expanded heads": (lambda x: x[:, :, :1].expand(-1, -1, 4, -1), False),
    "expanded axis of one": (lambda x: x[:1].expand(1, -1, -1, -1), True),
    "rows that are no whole 16 bytes": (
        lambda x: x.new_empty(2, 5, 4 * 64 + 4)[..., :256].unflatten(-1, (4, 64)),
        False,
    ),
    "no row": (lambda x: x[:, :0], False),
    "far apart": (lambda x: x.as_strided(x.shape, (2**39, 256, 64, 1)), False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_fake_tensors_are_reachable_where_real_ones_are(name: str):
    """What a tensor map can describe: whole 16 bytes apart, from whole 16 bytes on, no axis of equal places."""
    layout, reachable = LAYOUTS[name]
    on_meta = torch.empty(2, 5, 4, 64, dtype=torch.bfloat16, device="meta")
    x, other = layout(on_meta), layout(on_meta).contiguous()
    assert torch.ops.flash_attn.gpu_is_reachable(x, x, x) == reachable
    fine = other.shape[-1] % 8 == 0 and 0 not in other.shape
    assert torch.ops.flash_attn.gpu_is_reachable(x, other, other) == reachable or not fine
    assert torch.ops.flash_attn.gpu_is_reachable(other, other, x) == reachable or not fine
    if flash_attn.is_available("mma_sync") and torch.cuda.is_available() and name != "far apart":
        real = layout(torch.empty(2, 5, 4, 64, dtype=torch.bfloat16, device="cuda"))
        assert torch.ops.flash_attn.gpu_is_reachable(real, real, real) == reachable


def test_auto_on_hopper(hopper: list[tuple]):
    """wgmma where it serves the call, else mma_sync, each with the reason why not the other."""
    q, k, v = qkv("cuda:0", torch.bfloat16)
    found = explain(q, k, v, causal=True)
    assert found.backend == "wgmma" and found.kernel.startswith("wgmma kernel for sm_90") and found.tile == (128, 128)
    assert "faster" in found.refusals["mma_sync"] and (333, True, True, 2) in hopper
    plausible(found)
    for arguments, options in (
        ((q, k, v), {"bias": torch.zeros(1, 1, 300, 333, dtype=torch.bfloat16, device="cuda:0")}),
        ((q, k, v.narrow(2, 0, 1).expand_as(v)), {}),
    ):
        found = explain(*arguments, **options)
        assert found.backend == "mma_sync" and found.kernel.startswith("mma_sync kernel for sm_80")
        assert "no such thing" in found.refusals["wgmma"] and 'backend="mma_sync"' in found.refusals["wgmma"]
        assert explain(*arguments, **options, backend="wgmma").backend is None
        with pytest.raises(NotImplementedError, match='backend="mma_sync" serves'):
            flash_attn_func(*arguments, **options, backend="wgmma")
        plausible(found)
    found = explain(q.float(), k.float(), v.float())
    assert found.backend is None and 'backend="reference"' in found.refusals["wgmma"]


def test_heads_in_one_tile_are_named(hopper: list[tuple], monkeypatch: pytest.MonkeyPatch):
    """The library's plan says of how many queries a tile's rows are; it is asked with lengths and groups."""
    asked = []

    def plan(*arguments: object, family: int = 0) -> _ops.GpuPlan:
        asked.append(arguments)
        return _ops.GpuPlan("", 90, 64, "plain", (128, 64), "wgmma", 16 if arguments[-2:] == (5, 4) else 128)

    monkeypatch.setattr(_ops, "gpu_plan", plan)
    q, k, v = (torch.empty(2, n, h, 64, dtype=torch.bfloat16, device="cuda:0") for n, h in ((5, 8), (333, 2), (333, 2)))
    found = explain(q, k, v, backend="wgmma")
    assert found.kernel.endswith("plain, heads that share keys in one tile") and found.tile == (128, 64)
    assert asked[-1][6:] == (333, False, True, 2, 5, 4)
    assert "share" not in explain(q.narrow(2, 0, 2), k, v, backend="wgmma").kernel


def test_families_reach_the_op(hopper: list[tuple], monkeypatch: pytest.MonkeyPatch):
    """By name, a family; "auto" leaves it to the library and asks no more than whether there is a kernel."""
    seen = []

    def forward(q: Tensor, k: Tensor, v: Tensor, bias: None, sink: None, problem: Problem) -> tuple[Tensor, ...]:
        seen.append(problem.family)
        return q, q, q

    monkeypatch.setattr(gpu, "forward", forward)
    monkeypatch.setattr(dispatch, "_SERVED", {})
    q, k, v = qkv("cuda:0", torch.bfloat16)
    for _ in range(2):  # the second time a remembered call
        for backend, family in (("auto", 0), ("mma_sync", 1), ("wgmma", 2)):
            flash_attn_func(q, k, v, backend=backend)
            assert seen.pop() == family and not seen
    assert hopper == [(0, False, True, 0), (0, False, True, 1), (333, False, True, 2)]
    with pytest.raises(NotImplementedError, match="no such thing"):
        flash_attn_func(q, k, v.narrow(2, 0, 1).expand_as(v), backend="wgmma")


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiled_calls_are_refused_while_tracing(hopper: list[tuple], dynamic: bool):
    """What needs no strides is known then. The plan, an op without tensors, is no part of the graph."""
    tensors, graphs = qkv("cuda:0", torch.bfloat16), []

    def keep(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    for backend, family in (("auto", 0), ("mma_sync", 1), ("wgmma", 2)):
        torch._dynamo.reset()
        call = functools.partial(flash_attn_func, backend=backend)
        compiled = torch.compile(call, fullgraph=True, backend=keep, dynamic=dynamic)
        out = compiled(*tensors, causal=True, dropout_p=0.1)
        assert out.shape == (2, 300, 4, 32) and out.device.type == "cuda"
        assert "attention_forward" in graphs[-1].code and "gpu_plan" not in graphs[-1].code
        assert (0, True, True, family) in hopper
        with pytest.raises(torch._dynamo.exc.Unsupported, match="NotImplementedError"):  # fp32
            compiled(*(x.float() for x in tensors))
        bias = torch.zeros(1, 1, 300, 333, dtype=torch.bfloat16, device="cuda:0")
        if backend == "wgmma":
            with pytest.raises(torch._dynamo.exc.Unsupported, match="NotImplementedError.*no such thing") as refused:
                compiled(*tensors, bias=bias)
            assert 'backend="mma_sync" serves this call' in str(refused.value)
        else:
            assert compiled(*tensors, bias=bias).shape == out.shape


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
