"""How far two results of one case lie apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VALUES_MOST = 0.05
"""Of bfloat16 results of kernels that round in unlike places, over the largest value."""

IDS_MOST = 0.05
"""Of the keys of a row: those whose scores lie within the rounding of bfloat16 products."""

_ROWS = 64


def first(value: Any) -> Tensor:
    """The result itself, where a log-sum-exp or the like comes with it."""
    result: Tensor = value[0] if isinstance(value, tuple) else value
    return result


def values(ours: Any, theirs: Any) -> float:
    """The largest difference over the peer's largest value; infinite where one is not a number."""
    mine, other = first(ours).flatten().float(), first(theirs).flatten().float()
    difference = float((mine - other).abs().max() / other.abs().max())
    return difference if difference == difference else float("inf")


def weighted(ours: Any, theirs: Any) -> float:
    """The same for queries times their weights, which hold the scale where they are quantised."""
    mine, other = (q.float() * folded[..., None] for q, folded in (ours, theirs))
    return values(mine, other)


def finite(ours: Any, theirs: Any) -> float:
    """The same over places where both are finite, for scores of keys that nobody sees."""
    mine, other = first(ours), first(theirs)
    both = mine.isfinite() & other.isfinite()
    return values(mine.where(both, 0), other.where(both, 0))


def ids(ours: Any, theirs: Any) -> float:
    """The part of ours that the peer does not select, over some rows; -1 is no key."""
    mine, other = first(ours), first(theirs)
    mine, other = (x.reshape(-1, x.shape[-1]) for x in (mine, other))
    step = max(1, mine.shape[0] // _ROWS)
    missing = total = 0
    for row, known in zip(mine[::step], other[::step], strict=True):
        taken = row[row >= 0]
        missing += int((~torch.isin(taken, known.to(taken.dtype))).sum())
        total += taken.numel()
    return missing / max(1, total)
