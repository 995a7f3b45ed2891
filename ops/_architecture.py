"""Which architecture a CUDA device is, as the tile tables and limits of kernels name it."""

from __future__ import annotations

import functools

import torch

# Members of a family run the same kernels: B300 those of B200, DGX Spark those of RTX 50.
_FAMILY = {103: 100, 121: 120}


def cuda_architecture(device: torch.device) -> int:
    """Compute capability times ten of a CUDA device, families joined: 90 for an H200."""
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    found = 10 * major + minor
    return _FAMILY.get(found, found)
