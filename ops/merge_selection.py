"""From the parts of all ranks to one selection."""

from __future__ import annotations

import torch
from torch import Tensor

from ._blocks import row_blocks
from ._checks import require_dtype, require_positive, require_rank, require_same_device
from ._library import define_op
from .select_topk import highest

# A candidate: its position and score sorted, its ordered score and column, and their masks.
_LANE_BYTES = 72
_LAST = torch.iinfo(torch.int32).max


def merge_selection(positions: Tensor, scores: Tensor, topk: int) -> Tensor:
    """The selection of ``index_select`` on the keys of all ranks, from ``index_select_partial``.

    Exact: each of the ``topk`` best keys is among the ``topk`` best of the rank that holds it.
    Ties go to the lowest global position (contract C10, C16).

    Args:
        positions: [ranks, T, K] int32, global positions; -1 in any lane is no key. No position
            stands twice in a row.
        scores: [ranks, T, K] float32, the score of each position; not read where that is -1.
        topk: width of the result, at most K.

    Returns:
        [T, topk] int32 global positions, ascending, then -1.

    Raises:
        ValueError: ``topk`` is not in 1 .. K, or shapes or devices that do not fit together.
        TypeError: a dtype outside of those above.
    """
    require_positive("topk", topk)
    for name, tensor, dtype in (
        ("positions", positions, torch.int32),
        ("scores", scores, torch.float32),
    ):
        require_rank(name, tensor, 3)
        require_dtype(name, tensor, (dtype,))
    if positions.shape != scores.shape:
        raise ValueError(
            f"scores must have the shape of positions, {tuple(positions.shape)}, got"
            f" {tuple(scores.shape)}"
        )
    if topk > positions.shape[2]:
        raise ValueError(
            f"topk must be at most the width of positions, {positions.shape[2]}, got {topk}"
        )
    require_same_device(positions=positions, scores=scores)
    return _op(positions, scores, topk)


@torch.no_grad()
def _reference(positions: Tensor, scores: Tensor, topk: int) -> Tensor:
    ranks, rows, width = positions.shape
    merged = positions.new_full((rows, topk), -1)
    if ranks == 0:
        return merged
    for block in row_blocks(rows, ranks * width * _LANE_BYTES):
        named = positions[:, block].transpose(0, 1).flatten(1)
        named, order = torch.where(named < 0, _LAST, named).sort(dim=-1)
        score = scores[:, block].transpose(0, 1).flatten(1).gather(1, order)
        column = highest(score, named < _LAST, topk)
        chosen = named.gather(1, column.clamp(min=0).long())
        merged[block] = chosen.masked_fill(column < 0, -1)
    return merged


def _fake(positions: Tensor, scores: Tensor, topk: int) -> Tensor:
    return positions.new_empty((positions.shape[1], topk))


_op = define_op(
    "merge_selection(Tensor positions, Tensor scores, SymInt topk) -> Tensor",
    reference=_reference,
    fake=_fake,
)
