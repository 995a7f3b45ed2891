"""The dtype that references compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, otherwise float32."""
    return torch.promote_types(tensor.dtype, torch.float32)
