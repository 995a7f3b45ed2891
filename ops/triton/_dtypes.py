"""Triton's names of torch dtypes, and the dtypes that every kernel here serves."""

from __future__ import annotations

import torch
from torch import Tensor

from ._device import ARCHITECTURES, INTERPRETER, architecture

SERVED = (torch.float16, torch.bfloat16, torch.float32)

_ELEMENTS = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}


def element(dtype: torch.dtype) -> str:
    """What a kernel's signature calls ``dtype``."""
    return _ELEMENTS[dtype]


def unserved(**tensors: Tensor) -> str | None:
    """None where a kernel without tiles of its own serves these tensors, else why not."""
    for name, tensor in tensors.items():
        arch = architecture(tensor.device)
        if arch not in (INTERPRETER, *ARCHITECTURES):
            return f"{name} is on a device of compute capability {arch / 10}, which is not served"
        if tensor.dtype not in SERVED:
            return f"{name} is {tensor.dtype}, served are float16, bfloat16 and float32"
    return None
