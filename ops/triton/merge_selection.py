"""``merge_selection``: all candidates of a row by position, then the exact selection of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .._blocks import row_blocks
from .radix_select import refusal, select_rows

# A candidate: its position and score, both sorted, and the order that sorts them.
_LANE_BYTES = 48
_LAST = torch.iinfo(torch.int32).max


def supports(positions: Tensor, *args: object) -> str | None:
    """None on every architecture that has a tile."""
    return refusal(positions)


@torch.no_grad()
def run(positions: Tensor, scores: Tensor, topk: int) -> Tensor:
    """``merge_selection``: ties go to the lowest lane, which is the lowest position."""
    ranks, rows, width = positions.shape
    merged = positions.new_full((rows, topk), -1)
    if ranks == 0:
        return merged
    for block in row_blocks(rows, ranks * width * _LANE_BYTES):
        named = positions[:, block].transpose(0, 1).flatten(1)
        named, order = torch.where(named < 0, _LAST, named).sort(dim=-1)
        score = scores[:, block].transpose(0, 1).flatten(1).gather(1, order)
        held = (named < _LAST).sum(dim=-1, dtype=torch.int32)
        lane = torch.empty_like(merged[block])
        lanes = ranks * width
        select_rows(lane, score, torch.zeros_like(held), held, lanes, lanes)
        chosen = named.gather(1, lane.clamp(min=0).long())
        merged[block] = chosen.masked_fill_(lane < 0, -1)
    return merged
