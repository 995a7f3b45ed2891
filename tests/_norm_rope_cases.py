"""Sizes, tables and arguments that the tests of the norms and rotations share."""

from __future__ import annotations

from typing import Any

import torch
from _opcheck import LAYOUTS, arrange
from torch import Tensor

EPS = 1e-5
Q, L, R, D = 12, 8, 4, 16
# Half a unit in the last place of bfloat16, with room for the float32 arithmetic before it.
ONE_ROUNDING = {"rtol": 2.0**-8 * 1.001, "atol": 1e-6}
SAMPLES = [(rows, layout) for rows in (0, 1, 5) for layout in LAYOUTS]
DTYPES = [torch.float32, torch.bfloat16]


def tables(rows: int, width: int = R, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.arange(rows)[:, None] * torch.logspace(0, -2, width // 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def latents(
    rows: int, dtype: torch.dtype, layout: str = "contiguous", grad: bool = False
) -> tuple[tuple[Any, ...], ...]:
    """Latents, index key and tables with their weights, which are float32 except for float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def tensor(*shape: int, of: torch.dtype = dtype) -> Tensor:
        values = torch.randn(shape, dtype=of)
        laid = arrange(values, layout) if len(shape) > 1 else values
        return laid.detach().requires_grad_(grad)

    return (
        (tensor(rows, Q), tensor(Q, of=wide), tensor(rows, L), tensor(L, of=wide), tensor(rows, R)),
        (tensor(rows, D), tensor(D, of=wide), tensor(D, of=wide)),
        tables(rows, dtype=wide),
    )


def norm_rope_args(
    rows: int, dtype: torch.dtype, layout: str = "contiguous", grad: bool = False
) -> tuple[Any, ...]:
    latent, _, table = latents(rows, dtype, layout, grad)
    return (*latent, *table, EPS, "interleaved")


def norm_rope_index_args(
    rows: int,
    dtype: torch.dtype,
    layout: str = "contiguous",
    grad: bool = False,
    hadamard: bool = False,
) -> tuple[Any, ...]:
    latent, index, table = latents(rows, dtype, layout, grad)
    return (*latent, *index, *table, EPS, "interleaved", 1e-6, "half", hadamard)
