"""What data sheets say about GPUs, for io_model.py."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gpu:
    """Figures of a data sheet: no card holds all of them at once."""

    name: str
    bytes_per_second: float  # of DRAM
    half_flops: float  # a second, dense fp16 products with fp32 sums on tensor cores
    fp32_flops: float  # a second, outside of tensor cores
    has_bf16: bool
    sms: int
    sm_shared_bytes: int  # the most shared memory of an SM
    l2_bytes: int
    source: str


# Shared memory of an SM: CUDA C++ programming guide, table of technical specifications by compute capability.
GPUS: dict[str, Gpu] = {
    "T4": Gpu(
        *("T4", 320e9, 65e12, 8.1e12, False, 40, 64 << 10, 4 << 20),
        "NVIDIA T4 Tensor Core GPU data sheet, 2019; L2: NVIDIA Turing GPU Architecture whitepaper, WP-09183-001",
    ),
    "A100": Gpu(
        *("A100-SXM4-40GB", 1555e9, 312e12, 19.5e12, True, 108, 164 << 10, 40 << 20),
        "NVIDIA A100 Tensor Core GPU data sheet, 2020; L2: NVIDIA A100 Tensor Core GPU Architecture whitepaper",
    ),
    "RTX 3090": Gpu(
        *("GeForce RTX 3090", 936e9, 71e12, 35.6e12, True, 82, 100 << 10, 6 << 20),
        "NVIDIA Ampere GA102 GPU Architecture whitepaper, 2021, table of GeForce RTX 3090 against 2080 Ti",
    ),
    "H200": Gpu(
        *("H200-SXM", 4.8e12, 989.5e12, 67e12, True, 132, 228 << 10, 50 << 20),
        "NVIDIA H200 Tensor Core GPU data sheet, 2024 (half of its figures with sparsity); L2: NVIDIA H100 whitepaper",
    ),
}


def peak_flops(gpu: Gpu, dtype: torch.dtype) -> float:
    """FLOPs a second of matrix products in a dtype.

    Raises:
        ValueError: a dtype that the card has no such units for, or that the table has no figure of; no Gpu.
    """
    if not isinstance(gpu, Gpu):
        raise ValueError(f"gpu must be a Gpu, such as those of flash_attn.gpus.GPUS, is {gpu!r}")
    if dtype == torch.float32:
        return gpu.fp32_flops
    known = dtype == torch.float16 or (dtype == torch.bfloat16 and gpu.has_bf16)
    if not known:
        raise ValueError(f"dtype {dtype}: no figure for {gpu.name}")
    return gpu.half_flops


def find_gpu(name: str) -> Gpu:
    """The card of the table whose key stands in `name`, as in torch's "NVIDIA H200".

    Raises:
        ValueError: none does; the message lists the table.
    """
    for key, gpu in GPUS.items():
        if re.search(rf"\b{key}\b", name, re.IGNORECASE):
            return gpu
    raise ValueError(f"gpu {name!r} is not in the table: {', '.join(GPUS)}")
