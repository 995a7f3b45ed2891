"""Argument checks that every op shares: one sentence, with what was given and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_rank(name: str, tensor: Tensor, *ranks: int) -> None:
    """Raise ``ValueError`` unless ``tensor`` has one of ``ranks`` dimensions."""
    if tensor.dim() not in ranks:
        accepted = " or ".join(str(rank) for rank in ranks)
        raise ValueError(f"{name} must have {accepted} dimensions, got shape {tuple(tensor.shape)}")


def require_size(name: str, tensor: Tensor, dim: int, size: int, what: str) -> None:
    """Raise ``ValueError`` unless ``tensor.shape[dim]`` is ``size``, which is ``what``."""
    if tensor.shape[dim] != size:
        raise ValueError(
            f"{name} must have {size} in dimension {dim} ({what}), got shape {tuple(tensor.shape)}"
        )


def require_dtype(name: str, tensor: Tensor, accepted: Sequence[torch.dtype]) -> None:
    """Raise ``TypeError`` unless the dtype of ``tensor`` is one of ``accepted``."""
    if tensor.dtype not in accepted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        raise TypeError(f"{name} must be {names}, got {str(tensor.dtype).removeprefix('torch.')}")


def require_floating(name: str, tensor: Tensor) -> None:
    """Raise ``TypeError`` unless ``tensor`` is float16, bfloat16, float32 or float64."""
    require_dtype(name, tensor, FLOATING)


def require_same_device(**tensors: Tensor | None) -> None:
    """Raise ``ValueError`` unless all given tensors are on one device."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    (first, reference), *rest = given.items()
    for name, tensor in rest:
        if tensor.device != reference.device:
            raise ValueError(
                f"{name} must be on the device of {first}, {reference.device}, got {tensor.device}"
            )


def require_positive(name: str, value: int) -> None:
    """Raise ``ValueError`` unless ``value`` is at least 1."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def require_interval(ks: Tensor, ke: Tensor, rows: int) -> None:
    """Check the visible interval: ``ks`` and ``ke`` are [rows] int32."""
    for name, tensor in (("ks", ks), ("ke", ke)):
        require_rank(name, tensor, 1)
        require_dtype(name, tensor, (torch.int32,))
        require_size(name, tensor, 0, rows, "one per query token")
