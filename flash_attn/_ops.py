"""Finds the compiled library, loads it, and offers its ops under the contract that every backend has.

Importing this never fails: where the library is missing or does not load, `availability` keeps the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes

from flash_attn import checks
from flash_attn.problem import Problem, compute_dtype

# The ops have derivatives of their own, for graphs that hold them (autograd.py): who calls them from an
# autograd.Function, or needs none, goes past these.
below_autograd = torch._C._AutoDispatchBelowAutograd

PACKAGE = Path(__file__).resolve().parent
NAMESPACE = "flash_attn"


@dataclass(frozen=True)
class Availability:
    """Whether a backend can be used, and if not, why: true or false like a bool."""

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available


def _load_library() -> Availability:
    library = PACKAGE / "_C.so"
    if not library.exists():
        build = "build it with `pip install --no-build-isolation -e .`"
        return Availability(False, f"{library} does not exist: {build}, or leave that folder if it is installed")
    if hasattr(torch.ops.flash_attn, "attention_forward") and str(library) not in torch.ops.loaded_libraries:
        # A second registration of the ops would end the process.
        return Availability(False, "another copy of flash_attn has registered its ops in this process already")
    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        return Availability(False, f"{library} does not load with torch {torch.__version__}: {error}")
    return Availability(True, f"{library.name} is loaded")


def _build_info() -> dict:
    try:
        return json.loads((PACKAGE / "_build_info.json").read_text())
    except (OSError, ValueError):
        return {}


def _load_gpu_library(cpu: Availability) -> Availability:
    """The kernels of all families. Only a CUDA build of torch has what they need to load."""
    library = PACKAGE / "_C_cuda.so"
    if not cpu:
        return cpu
    if not library.exists():
        return Availability(False, _build_info().get("gpu") or "this build has no GPU kernels")
    if torch.version.cuda is None:
        return Availability(False, f"torch {torch.__version__} is no CUDA build")
    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        return Availability(False, f"{library} does not load with torch {torch.__version__}: {error}")
    return Availability(True, f"{library.name} is loaded")


def _wgmma_availability(gpu: Availability) -> Availability:
    """Hopper's own kernels, which a build for other GPUs leaves out."""
    if not gpu or any("(wgmma," in kernel for kernel in _build_info().get("gpu_kernels", ())):
        return gpu
    return Availability(False, "this build has no wgmma kernels: FLASH_ATTN_CUDA_ARCHS named no sm90")


_CPU = _load_library()
_GPU = _load_gpu_library(_CPU)
AVAILABILITY = {
    "cpu": _CPU,
    "mma_sync": _GPU,
    "wgmma": _wgmma_availability(_GPU),
    "reference": Availability(True, "plain PyTorch, on any device"),
}


def is_available(backend: str = "cpu") -> Availability:
    """Whether `backend` ("cpu", "mma_sync", "wgmma" or "reference") is built, and loads here.

    Whether the GPU at hand runs its kernels is a question of a call: `explain` answers it.

    Returns an `Availability`: true or false like a bool, with the `reason` as a sentence.

        >>> if not (cpu := flash_attn.is_available()): print(cpu.reason)

    Raises:
        ValueError: for any other name.
    """
    if type(backend) is not str or backend not in AVAILABILITY:
        raise ValueError(f"backend must be cpu, mma_sync, wgmma or reference; got {backend!r}")
    return AVAILABILITY[backend]


@dataclass(frozen=True)
class GpuPlan:
    """The kernel that serves a call on a GPU, or why none does."""

    reason: str  # empty: there is one
    arch: int = 0  # that it is compiled for: 80 is sm_80
    head_dim: int = 0  # the largest that it takes
    variant: str = ""
    tile: tuple[int, int] = (0, 0)
    family: str = ""
    queries: int = 0  # that the tile's rows are of: fewer, where they are several heads of each


DATA_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # DataType of csrc/common/params.h
VARIANTS = ("plain", "dropout", "modified", "biased")  # Variant of csrc/common/kernel_key.h
FAMILIES = {"mma_sync": 1, "wgmma": 2}  # Family of csrc/gpu/plan.h; 0 is any


def plan(op: Callable, *arguments: object) -> tuple[list[int], str]:
    """The numbers and the sentence of a plan, an op without tensors: modes that tell a device by them (FakeTensorMode)
    cannot run one."""
    with _disable_current_modes():
        numbers, letters = op(*arguments)
        return numbers.tolist(), bytes(letters.tolist()).decode()


@lru_cache(maxsize=1024)
def gpu_plan(
    device: int,
    dtype: torch.dtype,
    dim: int,
    dim_v: int,
    variant: str,
    block_size: tuple[int, int],
    keys: int = 0,
    has_window: bool = False,
    reachable: bool = True,
    family: int = 0,
    queries: int = 0,
    group: int = 1,
) -> GpuPlan:
    """What the library would use on CUDA device number `device` for sequences of that many queries and keys, `group`
    query heads to a key head. block_size: of the block mask; (0, 0) without one. reachable: `is_reachable`. family: one
    of FAMILIES; 0 is any."""
    numbers, reason = plan(
        torch.ops.flash_attn.gpu_plan,
        device,
        DATA_TYPES.index(dtype),
        dim,
        dim_v,
        VARIANTS.index(variant),
        keys,
        *block_size,
        has_window,
        reachable,
        family,
        queries,
        group,
    )
    if not numbers:
        return GpuPlan(reason)
    arch, head_dim, chosen, rows, keys, family, of_queries = numbers
    return GpuPlan("", arch, head_dim, VARIANTS[chosen], (rows, keys), list(FAMILIES)[family - 1], of_queries)


def is_reachable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether addresses and strides of CUDA tensors are such that wgmma kernels can read them."""
    with below_autograd():
        return torch.ops.flash_attn.gpu_is_reachable(q, k, v)


def variant_of(problem: Problem, bias: Tensor | None) -> str:
    """What a call needs of its kernel: as `variant_of` in csrc/gpu/plan.h decides, up to strides."""
    if bias is not None or problem.mask is not None:
        return "biased"
    if problem.block_kinds is not None:
        shifted = problem.leftpad_q is not None or problem.leftpad_k is not None
        if shifted or problem.block_patterns.shape[0] > 0:
            return "biased"
    plain_scale = 2.0**-60 < problem.softmax_scale < 2.0**60
    if problem.softcap > 0 or problem.alibi_slopes is not None or not plain_scale:
        return "modified"
    return "dropout" if problem.drops else "plain"


_SHORT = Problem._fields.index("dropout_p")


def _is_plain(problem: Problem) -> bool:
    """Whether the options before `dropout_p` are all there are."""
    return not (problem.dropout_p or problem.deterministic or problem.family or problem.has_tensors)


def _options(problem: Problem) -> tuple:
    """The options as arguments of an op; of a plain call the first ones alone, for the schema has the defaults of the
    others, and what is not passed need not be converted."""
    return problem[:_SHORT] if _is_plain(problem) else problem


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """out (..., heads, dim_v) in q's dtype, lse, and the statistics (2, *lse.shape) that `backward` needs."""
    if is_compiling():
        return attention_forward(q, k, v, bias, sink, *_options(problem))
    with below_autograd():
        if bias is None and sink is None and _is_plain(problem):
            return attention_forward_plain(q, k, v, *problem[:_SHORT])
        return attention_forward(q, k, v, bias, sink, *problem)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    problem: Problem,
    needs: tuple[bool, bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dbias, dsink: None where `needs` says so, and not computed."""
    arguments = (dout, dlse, q, k, v, out, statistics, bias, sink, *needs, *_options(problem))
    if is_compiling():
        dq, dk, dv, dbias, dsink = attention_backward(*arguments)
    else:
        with below_autograd():
            dq, dk, dv, dbias, dsink = attention_backward(*arguments)
    need_dq, need_dk, need_dv, need_dbias, need_dsink = needs
    return (
        dq if need_dq else None,
        dk if need_dk else None,
        dv if need_dv else None,
        dbias if need_dbias else None,
        dsink if need_dsink else None,
    )


# ---- Fake kernels: shapes, dtypes and strides of the real ones ------------------------------------------------------


def _fake_forward_plain(q, k, v, *options):  # noqa: ANN001, ANN002, ANN202 (a schema's arguments)
    return _fake_forward(q, k, v, None, None, *options)


def _fake_forward(q, k, v, bias, sink, *options):  # noqa: ANN001, ANN002, ANN202
    checks.operands(q, k, v, Problem(*options).is_varlen)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    dtype = compute_dtype(q.dtype)
    return out, q.new_empty(lse_shape, dtype=dtype), q.new_empty((2, *lse_shape), dtype=dtype)


def _fake_backward(dout, dlse, q, k, v, out, statistics, bias, sink, *rest):  # noqa: ANN001, ANN002, ANN202
    checks.operands(q, k, v, Problem(*rest[5:]).is_varlen)
    inputs = (q, k, v, q if bias is None else bias, q if sink is None else sink)
    return tuple(x.new_empty(x.shape if wanted else (0,)) for x, wanted in zip(inputs, rest[:5], strict=True))


def _fake_is_reachable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """As `is_reachable_by_tma` in csrc/gpu/plan.h says; their memory begins where torch's allocators let it, at whole
    16 bytes."""
    checks.operands(q, k, v, q.dim() == 3)
    for x in (q, k, v):
        *sizes, dim = x.shape
        *strides, last = x.stride()
        start = x.storage_offset() * x.element_size()
        if dim > 1 and last != 1:  # a copy is read
            *strides, _ = torch.empty(x.shape, device="meta").stride()
            start = 0
        is_vectorised = dim % 8 == 0 and start % 16 == 0 and all(stride % 8 == 0 for stride in strides)
        fits = all(size == 1 or (size > 1 and 0 < stride < 2**39) for size, stride in zip(sizes, strides, strict=True))
        if not (dim > 0 and is_vectorised and fits and sizes[-2] < 2**31):
            return False
    return True


def _register_fakes(fakes: dict[str, Callable]) -> None:
    for name, fake in fakes.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, allow_override=True)


if AVAILABILITY["cpu"]:
    attention_forward = torch.ops.flash_attn.attention_forward.default
    attention_forward_plain = torch.ops.flash_attn.attention_forward_plain.default
    attention_backward = torch.ops.flash_attn.attention_backward.default
    _register_fakes(
        {
            "attention_forward": _fake_forward,
            "attention_forward_plain": _fake_forward_plain,
            "attention_backward": _fake_backward,
            "gpu_is_reachable": _fake_is_reachable,
        }
    )
