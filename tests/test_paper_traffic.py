"""Memory traffic in `python -m flash_attn.paper`: the model of PyTorch's kernels, and what Nsight Compute counts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from flash_attn import io_model
from flash_attn.paper import contenders, fig2, ncu, options, report, traffic
from flash_attn.paper.contenders import Setting


def setting(**options: object) -> Setting:
    return replace(Setting(2, 3, 128, 16, torch.float32, torch.device("cpu")), **options)


# ---- The model -----------------------------------------------------------------------------------------------------


class BytesOfOperations(TorchDispatchMode):
    """What PyTorch's operations read and write, if each reads its inputs and writes its outputs once; views nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            flat = torch.utils._pytree.tree_leaves((args, kwargs, result))
            self.bytes += sum(x.numel() * x.element_size() for x in flat if isinstance(x, Tensor))
        return result


@pytest.mark.parametrize("mask", (False, True))
@pytest.mark.parametrize("dropout", (False, True))
def test_the_model_of_standard_attention_is_what_pytorch_does(dropout: bool, mask: bool) -> None:
    """Bytes of all inputs and outputs of its operations, to the byte."""
    n, d, batch, heads = 96, 16, 2, 3
    w = io_model.Workload(n, d, heads, batch, torch.float32, dropout=dropout, mask=mask)
    q, k, v = (torch.randn(batch * heads, n, d, requires_grad=True) for _ in range(3))
    # One mask for each head here, so that the operation reads what the model counts.
    added, dout = torch.randn(batch * heads, 1, n), torch.randn(batch * heads, n, d)
    with BytesOfOperations() as counter:
        s = torch.bmm(q, k.mT)
        p = (s + added if mask else s).softmax(-1)
        p = torch.native_dropout(p, 0.1, True)[0] if dropout else p
        out = torch.bmm(p, v)
        forward = counter.bytes
        torch.autograd.grad(out, (q, k, v), dout)
    assert forward == io_model.standard_forward(w).bytes
    assert counter.bytes == io_model.standard(w).bytes


class KernelsForCuda(BytesOfOperations):
    """The same of PyTorch's kernels for CUDA, where those for CPUs are others. What backward's softmax does there
    beside its kernel is `grad * output`, as in torch._decomp; dropout is fused."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function == torch.ops.aten._softmax_backward_data.default:
            grad, output, dim, dtype = args
            args = (super().__torch_dispatch__(torch.ops.aten.mul.Tensor, types, (grad, output)), output, dim, dtype)
        if function == torch.ops.aten._unsafe_view.default:  # of a product that nothing else holds
            return function(*args)
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.mark.parametrize("mask", (False, True))
@pytest.mark.parametrize("dropout", (False, True))
def test_the_model_of_pytorchs_kernels_is_what_is_measured(
    dropout: bool, mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of a forward and backward of the function that ncu measures, to the byte."""
    n, d, batch, heads = 96, 16, 2, 3
    w = io_model.Workload(n, d, heads, batch, torch.float32, dropout=dropout, mask=mask)
    q, k, v, dout = (torch.randn(batch, heads, n, d, requires_grad=True) for _ in range(4))
    added = torch.randn(batch, heads, 1, n) if mask else None
    # F.dropout takes the fused kernel on a GPU alone.
    monkeypatch.setattr(
        contenders.F, "dropout", lambda x, p, train: torch.native_dropout(x, p, train)[0] if train else x
    )
    with KernelsForCuda() as counter:
        out = contenders.plain_attention(q, k, v, added, 0.1 * dropout)
        torch.autograd.grad(out, (q, k, v), dout)
    assert counter.bytes == io_model.standard_in_pytorch(w).bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
def test_pytorchs_kernels_are_the_passes_of_the_model(dropout_p: float) -> None:
    """As many launches as the model has passes, but for what a matrix product may need beside its kernel."""
    call = contenders.standard(
        setting(seqlen=1024, dim=64, dtype=torch.float16, device=torch.device("cuda"), dropout_p=dropout_p)
    ).both()
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    elementwise = [name for name in names if "at::native" in name or "softmax" in name]
    passes = io_model.standard_in_pytorch(io_model.Workload(1024, 64, dropout=dropout_p > 0)).passes
    assert len(elementwise) == len([p for p in passes if p.flops == 0]), names


# ---- Nsight Compute -------------------------------------------------------------------------------------------------

RAW = """==PROF== Connected to process 4711 (/usr/bin/python3.11)
==PROF== Profiling "kernel_one": 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes_read.sum","dram__bytes_write.sum"
"","","","","","","","","","","","byte","byte"
"0","4711","python3.11","127.0.0.1","void fwd_kernel<64, 128>(FwdParams, int)","1","7","(128, 1, 1)","(8, 1, 1)","0",\
"9.0","402,653,184","134,217,728.00"
"1","4711","python3.11","127.0.0.1","void at::fill<float>(""x"")","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0","96","0"
"2","4711","python3.11","127.0.0.1","void fwd_kernel<64, 128>(FwdParams, int)","1","7","(128, 1, 1)","(8, 1, 1)","0",\
"9.0","1","2"
"""
DETAILS = """==PROF== Connected to process 1
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","python","127.0.0.1","fwd(int)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics",\
"dram__bytes_read.sum","Mbyte","402.65"
"0","1","python","127.0.0.1","fwd(int)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics",\
"dram__bytes_write.sum","Kbyte","1,234.5"
"""


def test_ncus_raw_page_is_read() -> None:
    kernels = ncu.parse(RAW)
    assert kernels[0] == ("void fwd_kernel<64, 128>(FwdParams, int)", 402653184, 134217728)
    assert [k.read for k in kernels] == [402653184, 96, 1]
    assert ncu.by_name(kernels) == {
        "fwd_kernel<64, 128>": (2, 402653185, 134217730),
        "fill<float>": (1, 96, 0),
    }


def test_names_of_kernels_say_what_they_do() -> None:
    """Namespaces go, those without a name too, so that what follows is neither lost nor cut."""
    elementwise = (
        "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::Half, c10::Half, c10::Half, "
        "at::native::binary_internal::MulFunctor<float>>, std::array<char *, 3>>(int, T2, T3)"
    )
    names = [elementwise]
    for unnamed in ("(anonymous namespace)", "<unnamed>"):
        names.append(f"void {unnamed}::softmax_warp_backward<c10::Half, float, 10, 0, 0>(T1 *, const T1 *, int)")
    assert ncu.by_name([ncu.KernelTraffic(name, 2, 1) for name in names]) == {
        "vectorized_elementwise_kernel<8, BinaryFunctor<Half, Half, Half, MulFunctor<float>>,": (1, 2, 1),
        "softmax_warp_backward<Half, float, 10, 0, 0>": (2, 4, 2),
    }


def test_ncus_details_page_is_read() -> None:
    assert ncu.parse(DETAILS) == [("fwd(int)", 402650000, 1234500)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM: no permission", "ncu wrote no table; it said:\n==ERROR== ERR_NVGPUCTRPERM"),
        (RAW[: RAW.index('"0"')], "ncu counted no kernel"),
        (RAW.replace('"byte","byte"', '"byte","sector"'), "dram__bytes_write.sum of kernel void fwd_kernel<64, 128>"),
        (RAW.replace('"96"', '""'), "dram__bytes_read.sum of kernel void at::fill<float>"),
        (DETAILS[: DETAILS.rindex('"0","1"')], "dram__bytes_write.sum of kernel fwd(int) is ''"),
    ],
)
def test_what_ncu_cannot_count_is_an_error(text: str, message: str) -> None:
    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        ncu.parse(text)


def fake_ncu(folder: Path, says: str, status: int = 0) -> str:
    """A program that writes what ncu would, after running nothing."""
    program = folder / "ncu"
    (folder / "says").write_text(says)
    program.write_text(f"#!/bin/sh\necho \"$@\" > '{folder}/arguments'\ncat '{folder}/says'\nexit {status}\n")
    program.chmod(0o755)
    return str(program)


def test_ncu_is_asked_for_bytes_of_one_case(tmp_path: Path) -> None:
    s = setting(dropout_p=0.1, dtype=torch.float16)
    kernels = ncu.measure(fake_ncu(tmp_path, RAW), "flash", s)
    assert sum(k.read for k in kernels) == 402653281
    arguments = (tmp_path / "arguments").read_text()
    assert "--metrics dram__bytes_read.sum,dram__bytes_write.sum" in arguments
    assert arguments.endswith(" -m flash_attn.paper.ncu flash 2 3 128 16 float16 0.1\n")
    with pytest.raises(RuntimeError, match="ended with 3:\n(.|\n)*Disconnected"):
        ncu.measure(fake_ncu(tmp_path, RAW[:400], 3), "flash", s)


def test_the_case_for_ncu_runs() -> None:
    ncu.run_case("flash", setting(dropout_p=0.1))


def test_where_nothing_can_be_counted() -> None:
    cuda = torch.device("cuda")
    assert ncu.unavailable("ncu", torch.device("cpu")) == "DRAM bytes are counted on a GPU alone"
    assert "switched off" in ncu.unavailable("", cuda)
    assert "no-such-ncu is not there: Nsight Compute" in ncu.unavailable("no-such-ncu", cuda)


def test_traffic_is_reported_by_kernel(tmp_path: Path) -> None:
    r = report.Report(tmp_path, "traffic", traffic.TITLE, {})
    traffic.add_kernels(r, "flash", ncu.parse(RAW))
    assert r.rows("attention") == [{"attention": "flash", "GB": (402653281 + 134217730) / 1e9}]
    assert [row["launches"] for row in r.rows("kernels")] == [2, 1]
    assert json.loads((tmp_path / "traffic.json").read_text())["tables"]["kernels"][0]["read_GB"] == 0.402653185


def test_fig2_shows_kernels(tmp_path: Path) -> None:
    """What was counted stands below the sums, so that a gap to the model can be traced."""
    (o,) = options.parse(
        ["fig2", "--device", "cpu", "--lengths", "64", "--seconds", "0.01", "--ncu", fake_ncu(tmp_path, RAW)]
    )
    r = report.Report(tmp_path, "fig2", fig2.TITLE, {})
    row = fig2.attention_row(o, "flash", 0.1, None, r, "")
    r.add("attention", row)
    assert row["GB"] == (402653281 + 134217730) / 1e9
    assert [(k["attention"], k["dropout"], k["launches"]) for k in r.rows("kernels")] == [
        ("flash", 0.1, 2),
        ("flash", 0.1, 1),
    ]
    assert "| flash | 0.1 | fwd_kernel<64, 128> | 2 | 0.403 | 0.134 |" in "\n".join(fig2.sections(o, r))
