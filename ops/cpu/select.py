"""Exact selection on the CPU: one threshold a row, then the positions that reach it, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from .. import _options
from .._blocks import check_interval_values
from ..causal_positions import closed_form

# score(rows, first, out): write into out [r, n] the scores of the query tokens ``rows`` [r] against
# the packed keys ``first .. first + n``.
Score = Callable[[Tensor, int, Tensor], None]

# Workspace of one (row, key) lane: its score, the masks of a tie and the address of a mask operand.
_LANE_BYTES = 16
# Workspace of one selected lane: value and index of ``topk``, or its row, lane and position.
_CHOSEN_BYTES = 64
# Rows of one selection: enough work for each round of threads, and scores that stay in cache.
MOST_ROWS = 256
# Rows of unlike length share a block while the lanes beyond their ends cost less than one more
# round of calls, or than an eighth of the scores.
_FREE_LANES = 1 << 16
# Below every rank of a score.
_HIDDEN = torch.iinfo(torch.int32).min


def supports(*args: object) -> str | None:
    """Every call of ``select_topk``."""
    return None


@torch.no_grad()
def run(scores: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None = None) -> Tensor:
    """``select_topk`` in blocks of rows: a long row costs one ``torch.topk`` and a few passes."""
    check_interval_values(ks, ke, scores.shape[1])

    def copy(rows: Tensor, first: int, out: Tensor) -> None:
        out.copy_(scores[:, first : first + out.shape[1]].index_select(0, rows))

    indices, long = close_short_rows(ks, ke, topk, mask)
    select_long_rows(indices, long, ks, ke, mask, copy)
    return indices


def close_short_rows(
    ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Select all keys of the rows that see at most ``topk``.

    Returns:
        [T, topk] int32 positions, undefined for the other rows, and the numbers of those, int64.
    """
    lengths = (ke - ks).clamp_(min=0)
    if mask is not None:
        return _close_masked_rows(ks, lengths, topk, mask)
    long = lengths > topk
    indices = ks.new_empty((ks.shape[0], topk))
    for start in range(0, ks.shape[0], MOST_ROWS):
        block = slice(start, start + MOST_ROWS)
        if not bool(long[block].all()):
            indices[block] = closed_form(ks[block], ke[block], topk)
    return indices, long.nonzero()[:, 0]


def _close_masked_rows(
    ks: Tensor, lengths: Tensor, topk: int, mask: Tensor
) -> tuple[Tensor, Tensor]:
    indices = ks.new_full((ks.shape[0], topk), -1)
    count = torch.empty_like(ks)
    for block in _row_blocks(lengths.tolist(), topk):
        rows = torch.arange(block.start, block.stop)
        visible = _visible(rows, ks[block], lengths[block], mask)
        count[block] = visible.sum(dim=-1)
        short = (count[block] <= topk).nonzero()[:, 0]
        row, position = visible[short].nonzero().unbind(1)
        before = count[block][short].cumsum(0) - count[block][short]
        lane = torch.arange(row.shape[0]) - before[row]
        indices[rows[short][row], lane] = position.to(torch.int32)
    return indices, (count > topk).nonzero()[:, 0]


def select_long_rows(
    indices: Tensor,
    long: Tensor,
    ks: Tensor,
    ke: Tensor,
    mask: Tensor | None,
    score: Score,
    rows_per_score: int = MOST_ROWS,
    bytes_per_row: int = 0,
) -> None:
    """Score and select the rows ``long`` of ``indices``, each of which sees more than its width.

    Scores lie in blocks of rows by position, so that rows of different requests share a call of
    the selection; ``score`` is called for runs of at most ``rows_per_score`` rows with equal
    ``ks``, so that it scores few keys that only later rows see.
    """
    topk = indices.shape[1]
    starts, lengths = ks[long], (ke - ks)[long]
    first, keys = starts.tolist(), lengths.tolist()
    blocks = list(_row_blocks(keys, topk, bytes_per_row))
    lanes = max((len(keys[block]) * max(keys[block]) for block in blocks), default=0)
    scratch = torch.empty(lanes, dtype=torch.float32)
    for block in blocks:
        rows, width = long[block], max(keys[block])
        scores = scratch[: len(rows) * width].view(len(rows), width)
        for start, stop in _runs(first, block, rows_per_score):
            seen = max(keys[start:stop])
            run_scores = scores[start - block.start : stop - block.start, :seen]
            score(long[start:stop], first[start], run_scores)
        rank = _order(scores)
        _hide(rank, rows, starts[block], lengths[block], min(keys[block]), mask)
        indices.index_copy_(0, rows, _highest(rank, topk))


def _row_blocks(keys: Sequence[int], topk: int, bytes_per_row: int = 0) -> Iterator[slice]:
    """Neighbouring rows of about the same length whose workspace fits half of the budget."""
    budget = _options.current().workspace_bytes // 2
    bytes_per_row += _CHOSEN_BYTES * topk
    start = width = lanes = 0
    for row, length in enumerate(keys):
        rows, wider, more = row + 1 - start, max(width, length), lanes + length
        full = (
            rows > MOST_ROWS
            or rows * (_LANE_BYTES * wider + bytes_per_row) > budget
            or rows * wider > more + more // 8 + _FREE_LANES
        )
        if full and rows > 1:
            yield slice(start, row)
            start, wider, more = row, length, length
        width, lanes = wider, more
    if start < len(keys):
        yield slice(start, len(keys))


def _runs(first: Sequence[int], block: slice, most_rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring rows of a block whose keys start at the same place."""
    for _, group in groupby(range(block.start, block.stop), key=first.__getitem__):
        members = list(group)
        for start in range(members[0], members[-1] + 1, most_rows):
            yield start, min(start + most_rows, members[-1] + 1)


def _visible(rows: Tensor, ks: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """[r, longest] bool: which of its positions each of ``rows`` sees."""
    position = torch.arange(int(lengths.max()), dtype=torch.int32)
    visible = position < lengths[:, None]
    key = (ks.to(torch.int64)[:, None] + position).clamp_(0, max(mask.shape[1] - 1, 0))
    return visible.logical_and_(mask[rows[:, None], key])


def _order(scores: Tensor) -> Tensor:
    """int32 that sorts as ``scores`` does, in its place; NaN is below -inf, -0.0 equals 0.0.

    Integers say all that a selection needs, and ``topk`` compares them faster than floats.
    """
    nan = scores.isnan() if bool(scores.amax().isnan()) else None
    rank = scores.add_(0.0).view(torch.int32)
    rank.bitwise_xor_((rank >> 31).bitwise_and_(0x7FFFFFFF))
    return rank if nan is None else rank.masked_fill_(nan, _HIDDEN + 1)


def _hide(
    rank: Tensor, rows: Tensor, ks: Tensor, lengths: Tensor, shortest: int, mask: Tensor | None
) -> None:
    """Rank the positions that a row does not see below all others."""
    if mask is not None:
        rank.masked_fill_(_visible(rows, ks, lengths, mask).logical_not_(), _HIDDEN)
    elif shortest < rank.shape[1]:
        position = torch.arange(shortest, rank.shape[1], dtype=torch.int32)
        rank[:, shortest:].masked_fill_(position >= lengths[:, None], _HIDDEN)


def _highest(rank: Tensor, topk: int) -> Tensor:
    """[r, topk] int32 ascending positions of the highest ranks; the lowest position wins a tie."""
    threshold = rank.topk(topk, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    taken = rank >= threshold
    if int(torch.count_nonzero(taken)) > taken.shape[0] * topk:
        _drop_late_ties(taken, rank, threshold, topk)
    offset = torch.arange(taken.shape[0])[:, None] * taken.shape[1]
    flat = taken.view(-1).nonzero().view(taken.shape[0], topk)
    return flat.sub_(offset).to(torch.int32)


def _drop_late_ties(taken: Tensor, rank: Tensor, threshold: Tensor, topk: int) -> None:
    """Keep of the ranks equal to the threshold those at the lowest positions."""
    excess = taken.sum(dim=-1, dtype=torch.int32) - topk
    tied = excess.nonzero()[:, 0]
    level = rank.index_select(0, tied) == threshold[tied]
    nth = level.cumsum(dim=-1, dtype=torch.int32)
    late = level.logical_and_(nth > nth[:, -1:] - excess[tied, None])
    taken.index_copy_(0, tied, taken.index_select(0, tied).logical_and_(late.logical_not_()))
