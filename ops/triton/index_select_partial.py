"""``index_select_partial``: this rank's scores by the kernel, its best keys by position."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import routing
from .._blocks import row_blocks
from ..index_select_partial import check_values
from ..select_topk import ordered
from .index_scores import score_rows, supports

__all__ = ["run", "supports"]

# A lane: its score, its position, and both in one int64 that is masked and then partly sorted.
_LANE_BYTES = 48
_LAST = torch.iinfo(torch.int32).max
_HIDDEN = torch.iinfo(torch.int64).min


@torch.no_grad()
def run(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    positions: Tensor,
    visible: Tensor,
    max_kv_len: int,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """``index_select_partial`` without a host read.

    A rank may hold its keys in any order, so that a tie is decided by the position of a key and not
    by its place: each lane becomes one number, its score above its position counted downwards.
    """
    check_values(ks, ke, positions, visible, max_kv_len)
    ks, ke, visible = ks.contiguous(), ke.contiguous(), visible.contiguous()
    rows, keys = q.shape[0], k.shape[0]
    named = ks.new_full((rows, topk), -1)
    scores = q.new_full((rows, topk), -torch.inf, dtype=torch.float32)
    width = min(keys, max_kv_len)
    if width <= 0:
        return named, scores
    closed = routing.selection_form(max_kv_len, topk) is routing.Selection.CLOSED
    lane = torch.arange(width, dtype=torch.int32, device=ks.device)
    for block in row_blocks(rows, width * _LANE_BYTES):
        found = q.new_zeros((block.stop - block.start, width), dtype=torch.float32)
        if not closed:
            score_rows(
                found,
                q[block],
                k,
                weights[block],
                ks[block],
                ke[block],
                width,
                topk,
                visible[block],
            )
        inside = lane < (ke - ks)[block, None]
        at = positions[(ks[block, None] + lane).clamp_(0, keys - 1).long()]
        rank = ordered(found).to(torch.int64) * 2**32 + (_LAST - at)
        best = rank.masked_fill_(~inside, _HIDDEN).topk(min(topk, width), dim=-1, sorted=False)
        held = best.values > _HIDDEN
        taken = torch.where(held, at.gather(1, best.indices), _LAST)
        taken, order = taken.sort(dim=-1)
        score = found.gather(1, best.indices).masked_fill_(~held, -torch.inf).gather(1, order)
        named[block, : taken.shape[1]] = taken.masked_fill_(taken == _LAST, -1)
        scores[block, : taken.shape[1]] = score
    return named, scores
