"""One rank's part of a selection whose keys are spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from . import routing
from ._blocks import check_interval_values, checks_values, key_span, row_blocks
from ._checks import (
    require_dtype,
    require_positive,
    require_rank,
    require_same_device,
    require_size,
)
from ._library import define_op
from .causal_positions import closed_form
from .index_scores import check_index_inputs, score_block, visible_keys
from .select_topk import highest

# A lane of the workspace beside its H dots: the ordered score and column, and the masks of both.
_LANE_BYTES = 64
_NO_KEY = -1


def index_select_partial(
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
    """The best of this rank's keys for each query token, for ``merge_selection`` to merge.

    Every rank calls this with the same queries and its own keys. Whether a row is closed form is
    decided by how many keys it sees on all ranks together, never by how few this one holds
    (contract C16): a row that sees at most ``topk`` keys selects all of them and is not scored.

    Args:
        q: [T, H, D] indexer queries after RoPE, floating point or float8_e4m3fn.
        k: [S, D] this rank's indexer keys, packed; see ``index_scores`` on fp8.
        weights: [T, H] float32, already folded with ``D**-0.5 * H**-0.5``; may be negative.
        ks, ke: [T] int32, the interval of this rank's keys that each row sees.
        positions: [S] int32, the position of each of these keys in its request, on all ranks.
        visible: [T] int32, how many keys each row sees on all ranks together.
        max_kv_len: host upper bound on ``visible``.
        topk: width of the results.

    Returns:
        global positions [T, topk] int32, ascending, then -1; and the float32 score of each, 0 in a
        row that is closed form and -inf where the position is -1.

    Raises:
        ValueError: ``topk < 1``, shapes or devices that do not fit together, an interval beyond
            the keys, a row with more keys here than it sees in all, or ``visible`` beyond
            ``max_kv_len``.
        TypeError: a dtype outside of those above.
    """
    require_positive("topk", topk)
    check_index_inputs(q, k, weights, ks, ke, None)
    for name, tensor in (("positions", positions), ("visible", visible)):
        require_rank(name, tensor, 1)
        require_dtype(name, tensor, (torch.int32,))
    require_size("positions", positions, 0, k.shape[0], "one per key")
    require_size("visible", visible, 0, q.shape[0], "one per query token")
    require_same_device(q=q, positions=positions, visible=visible)
    return _op(q, k, weights, ks, ke, positions, visible, max_kv_len, topk)


def check_values(
    ks: Tensor, ke: Tensor, positions: Tensor, visible: Tensor, max_kv_len: int
) -> None:
    """Raise ``ValueError`` where counts contradict each other or leave the keys (C23)."""
    check_interval_values(ks, ke, positions.shape[0])
    if ks.shape[0] == 0 or not checks_values(ks):
        return
    if int(visible.max()) > max_kv_len:
        raise ValueError(
            f"max_kv_len must bound visible, got {max_kv_len} for {int(visible.max())}"
        )
    if bool(((ke - ks) > visible.clamp(min=0)).any()):
        raise ValueError("visible must count the keys of all ranks, got less than this rank's own")


@torch.no_grad()
def _reference(
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
    check_values(ks, ke, positions, visible, max_kv_len)
    found, scores = _all_of(ks, ke, positions, topk)
    if routing.selection_form(max_kv_len, topk) is routing.Selection.CLOSED:
        return found, scores
    long = (visible > topk).nonzero()[:, 0]
    wide = 8 if q.dtype == torch.float64 else 4
    for block in row_blocks(long.shape[0], k.shape[0] * (q.shape[1] * wide + _LANE_BYTES)):
        rows = long[block]
        found[rows], scores[rows] = _best_of(
            q[rows], k, weights[rows], ks[rows], ke[rows], positions, topk
        )
    return found, scores


def _all_of(ks: Tensor, ke: Tensor, positions: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """All of a rank's keys in rows that are closed form, and the start of every other row."""
    lane = closed_form(ks, ke, topk)
    none = lane < 0
    if positions.shape[0] == 0:
        return lane, torch.where(none, -torch.inf, 0.0)
    named = positions[torch.where(none, 0, lane + ks[:, None]).long()]
    last = torch.iinfo(torch.int32).max
    named = named.masked_fill(none, last).sort(dim=-1).values
    return named.masked_fill(none, _NO_KEY), torch.where(none, -torch.inf, 0.0)


def _best_of(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    positions: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """Score some rows against the keys that they see here; ties go to the lowest position."""
    first, last = key_span(ks, ke)
    order = positions[first:last].argsort()
    scores = score_block(q, k[first:last][order], weights).to(torch.float32)
    seen = visible_keys(ks, ke, first, last)[:, order]
    column = highest(scores, seen, topk)
    none = column < 0
    if last == first:
        return column, torch.full_like(column, -torch.inf, dtype=torch.float32)
    taken = column.clamp(min=0).long()
    named = positions[first:last][order][taken]
    return named.masked_fill(none, _NO_KEY), scores.gather(1, taken).masked_fill(none, -torch.inf)


def _fake(
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
    shape = (q.shape[0], topk)
    return ks.new_empty(shape), q.new_empty(shape, dtype=torch.float32)


_op = define_op(
    "index_select_partial(Tensor q, Tensor k, Tensor weights, Tensor ks, Tensor ke,"
    " Tensor positions, Tensor visible, SymInt max_kv_len, SymInt topk) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
)
