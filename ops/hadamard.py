"""The orthonormal Walsh-Hadamard transform: a change of basis that keeps every dot product."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._dtypes import wide_dtype


def require_power_of_two(name: str, size: int) -> None:
    """Raise ``ValueError`` unless ``size`` is a power of two."""
    if size < 1 or int(size) & (int(size) - 1):
        raise ValueError(f"{name} must be a power of two for the Hadamard transform, got {size}")


def plain_hadamard(x: Tensor) -> Tensor:
    """Multiply the last dimension [..., D] by the symmetric matrix ``H / sqrt(D)``.

    ``H`` is Sylvester's matrix in natural order. The transform is its own inverse and, being
    symmetric, its own gradient. Queries and keys must both be transformed: then their dot
    products are what they were, while outliers are spread over all D values before quantisation.
    Not an op by itself: written as additions, which no autocast touches and any compiler fuses.

    Raises:
        ValueError: D is not a power of two.
    """
    size = int(x.shape[-1])
    require_power_of_two("the last dimension", size)
    x = x.to(wide_dtype(x))
    span = 1
    while span < size:
        low, high = x.unflatten(-1, (size // (2 * span), 2, span)).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        span *= 2
    return x * (1.0 / math.sqrt(size))
