"""Small caches and the rows that the tests of the cache ops write to them."""

from __future__ import annotations

import torch
from _opcheck import arrange
from torch import Tensor

from dsafx.ops.cache_layouts import new_mla_cache

L, R, D, BLOCK = 128, 8, 32, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def scale_of(layout: str) -> Tensor | None:
    return torch.tensor(0.037) if layout == "fp8" else None


def mla_cache(layout: str, blocks: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return new_mla_cache(blocks, BLOCK, layout, L, R, dtype=dtype)


def latents(rows: int, dtype: torch.dtype = torch.float32, strides: str = "contiguous"):
    return tuple(arrange(torch.randn(rows, size).to(dtype), strides) for size in (L, R))
