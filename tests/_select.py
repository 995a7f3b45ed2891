"""The smallest model of which a length decides the graph, for what is about compiling as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsafx import ops

TOPK = 16
SHORT, SHORT_TOO, LONG = 9, 13, 37


class Select(torch.nn.Module):
    """The selection of one request without a prefix."""

    def __init__(self, topk: int = TOPK) -> None:
        super().__init__()
        self.topk = topk

    def forward(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        ke = torch.arange(1, k.shape[0] + 1, dtype=torch.int32)
        return ops.index_select(q, k, weights, ke * 0, ke, k.shape[0], self.topk)


def tokens(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of ``Select``."""
    return torch.randn(length, 8, 16), torch.randn(length, 16), torch.randn(length, 8)


def check(run: Callable[..., Any], model: Callable[..., Any], *lengths: int) -> None:
    """Assert that two functions select the same at each of ``lengths``."""
    for length in lengths:
        args = tokens(length)
        assert torch.equal(run(*args), model(*args)), length
