"""``index_select``: blocks of rows whose scores fit the workspace, each scored, then selected."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from .. import routing
from .._blocks import check_interval_values, row_blocks
from .index_scores import score_rows, supports
from .radix_select import select_rows, visible_counts

__all__ = ["run", "score_blocks", "supports"]

# Bytes of a score, and scores of a line, so that every row starts on an aligned address.
_SCORE_BYTES = 4
_LINE = 64


@torch.no_grad()
def run(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    topk: int,
    mask: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """``index_select``: two launches a block of rows, or one in all where no row can be long.

    Tiles are fixed and each of its scores is a function of one row and one key, so that
    ``batch_invariant`` has nothing to change (contract C11).
    """
    keys = k.shape[0]
    check_interval_values(ks, ke, keys, max_kv_len)
    ks, ke = ks.contiguous(), ke.contiguous()
    width = min(max_kv_len, keys)
    indices = ks.new_empty((ks.shape[0], topk))
    counts = None if mask is None else visible_counts(ks, ke, mask)
    if routing.selection_form(width, topk) is routing.Selection.CLOSED:
        select_rows(indices, None, ks, ke, keys, width, mask, counts)
        return indices
    for rows, scores in score_blocks(ks, width):
        seen = None if counts is None else counts[rows]
        score_rows(scores, q[rows], k, weights[rows], ks[rows], ke[rows], width, topk, seen)
        shown = None if mask is None else mask[rows]
        select_rows(indices[rows], scores, ks[rows], ke[rows], keys, width, shown, seen)
    return indices


def score_blocks(ks: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of consecutive rows, and room for ``width`` float32 scores of each (contract C21).

    The room is one allocation, which every block writes anew.
    """
    stride = triton.cdiv(width, _LINE) * _LINE
    room: Tensor | None = None
    for rows in row_blocks(ks.shape[0], _SCORE_BYTES * stride):
        if room is None:
            room = ks.new_empty((rows.stop, stride), dtype=torch.float32)
        yield rows, room[: rows.stop - rows.start]
