"""Exact selection from given scores: highest first, the lowest position wins a tie."""

from __future__ import annotations

import torch
from torch import Tensor

from ._blocks import check_interval_values
from ._checks import (
    require_dtype,
    require_interval,
    require_positive,
    require_rank,
    require_same_device,
    require_size,
)
from ._library import define_op
from .index_scores import visible_keys


def select_topk(
    scores: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None = None
) -> Tensor:
    """The ``topk`` highest visible scores of each row (contract C8, C10).

    A visible -inf is a key, and NaN ranks below it and is still a key, so that a row always has
    ``min(visible keys, topk)`` valid positions.

    Args:
        scores: [T, S] float32, column = packed key.
        ks, ke: [T] int32, the visible interval of packed keys.
        topk: width of the result.
        mask: [T, S] bool, True = visible; visibility is interval and mask.

    Returns:
        [T, topk] int32 positions relative to ``ks``, ascending, then -1.

    Raises:
        ValueError: ``topk < 1``, shapes or devices that do not fit together, or an interval beyond
            the scores.
        TypeError: a dtype outside of those above.
    """
    require_positive("topk", topk)
    require_rank("scores", scores, 2)
    require_dtype("scores", scores, (torch.float32,))
    require_interval(ks, ke, scores.shape[0])
    if mask is not None:
        require_dtype("mask", mask, (torch.bool,))
        require_rank("mask", mask, 2)
        require_size("mask", mask, 0, scores.shape[0], "one row per row of scores")
        require_size("mask", mask, 1, scores.shape[1], "one column per column of scores")
    require_same_device(scores=scores, ks=ks, ke=ke, mask=mask)
    return _op(scores, ks, ke, topk, mask)


def highest(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """[t, topk] int32: columns of the highest visible scores, ascending, then -1.

    Each lane becomes one int64, its score as an ordered integer above its column counted
    downwards, so that no two lanes are equal and the order of ties is part of the value.
    """
    columns = scores.shape[1]
    rank = ordered(scores).to(torch.int64)
    rank = torch.where(visible, rank, torch.iinfo(torch.int32).min)
    column = torch.arange(columns, device=scores.device)
    taken = (rank * 2**32 + (columns - column)).topk(min(topk, columns), dim=-1, sorted=False)
    found = taken.indices
    found = torch.where(visible.gather(1, found), found, columns).sort(dim=-1).values
    found = torch.where(found < columns, found, -1).to(torch.int32)
    return torch.nn.functional.pad(found, (0, topk - found.shape[1]), value=-1)


def ordered(scores: Tensor) -> Tensor:
    """int32 that sorts as ``scores`` does; -0.0 equals 0.0, and NaN is below -inf."""
    bits = (scores + 0.0).view(torch.int32)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.where(scores.isnan(), torch.iinfo(torch.int32).min + 1, rank)


def _reference(
    scores: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None = None
) -> Tensor:
    check_interval_values(ks, ke, scores.shape[1])
    visible = visible_keys(ks, ke, 0, scores.shape[1], mask)
    found = highest(scores, visible, topk)
    return torch.where(found >= 0, found - ks[:, None], -1)


def _fake(scores: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None = None) -> Tensor:
    return ks.new_empty((scores.shape[0], topk))


_op = define_op(
    "select_topk(Tensor scores, Tensor ks, Tensor ke, SymInt topk, Tensor? mask=None) -> Tensor",
    reference=_reference,
    fake=_fake,
)
