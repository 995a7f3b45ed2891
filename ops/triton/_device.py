"""Which architecture a tensor's device is, as tile tables name it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._architecture import cuda_architecture
from ..libraries import interpreted

__all__ = ["ARCHITECTURES", "INTERPRETER", "architecture", "interpreted", "on_its_device"]

ARCHITECTURES = (80, 89, 90, 100, 120)
"""The architectures that kernels are compiled for: compute capability times ten."""

INTERPRETER = 0
"""The architecture of CPU tensors, which Triton's interpreter serves."""


def architecture(device: torch.device) -> int:
    """80, 89, 90, 100 or 120 for a CUDA device; 0 for the CPU under the interpreter.

    Any other compute capability is returned as it is, and found in no tile table.

    Raises:
        NotImplementedError: a CPU device without ``TRITON_INTERPRET=1``, or another device type.
    """
    if device.type == "cuda":
        return cuda_architecture(device)
    if device.type == "cpu" and interpreted():
        return INTERPRETER
    raise NotImplementedError(f"Triton kernels run on cuda devices, got {device.type}")


def on_its_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the device of its first tensor as the current one, on which Triton launches."""

    @functools.wraps(run)
    def guarded(*args: Any) -> Any:
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        if device.type != "cuda":
            return run(*args)
        with torch.cuda.device(device):
            return run(*args)

    return guarded
