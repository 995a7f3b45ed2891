"""Masks of two requests of 40 tokens, and calls that compare what models make of them."""

from __future__ import annotations

from typing import Any

import torch
from _tiny import left_padding
from torch import Tensor

LENGTH = 40
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
# Besides causality, no token sees the third one before it.
SEEN = (CAUSAL & ~torch.eye(LENGTH, dtype=torch.bool).roll(3, 0)).expand(2, 1, -1, -1)
ONE_ROW = (torch.arange(LENGTH) < 30).expand(2, 1, 1, -1)
DOCUMENTS = torch.cat((torch.arange(22), torch.arange(18)))[None]


def additive(seen: Tensor, hidden: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """``seen`` as what is added to scores: 0 at visible keys, ``hidden`` elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


def biased() -> Tensor:
    """An additive mask that wants one visible key to count less."""
    mask = additive(SEEN, -torch.inf)
    mask[..., 0] -= 0.5
    return mask


def with_holes() -> Tensor:
    """Left padding of the second request, and tokens hidden within both."""
    mask = left_padding(LENGTH, 0, 5)
    mask[0, 7:11] = 0
    mask[1, 30] = 0
    return mask


def logits(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """[B, S, vocab]"""
    with torch.no_grad():
        return model(*args, **kwargs).logits


def assert_close(got: Tensor, expected: Tensor, rows: Tensor | None = None) -> None:
    """Equal to 1e-4, in the rows of the 2-D mask ``rows`` or in all, and finite everywhere."""
    assert bool(got.isfinite().all())
    if rows is not None:
        got, expected = got[rows.bool()], expected[rows.bool()]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
