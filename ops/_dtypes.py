"""The dtype that references compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, otherwise float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
