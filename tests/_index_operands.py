"""Operands of the indexer's ops, and calls by a named provider."""

from __future__ import annotations

import torch
from torch import Tensor

from dsafx import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def by(name: str, op, *args) -> Tensor:
    with ops.use_provider(name):
        return op(*args)


def whole_numbers(tokens: int, keys: int, heads: int = 8, dim: int = 16, dtype=torch.float32):
    """Indexer operands whose scores are small whole numbers: exact in any order, rich in ties."""
    q = torch.randint(-2, 3, (tokens, heads, dim)).to(dtype)
    k = torch.randint(-2, 3, (keys, dim)).to(dtype)
    return q, k, torch.randint(-2, 3, (tokens, heads)).float()


def gaussian(tokens: int, keys: int, heads: int = 8, dim: int = 16, dtype=torch.float32):
    q, k = torch.randn(tokens, heads, dim).to(dtype), torch.randn(keys, dim).to(dtype)
    return q, k, torch.randn(tokens, heads) * heads**-0.5 * dim**-0.5
