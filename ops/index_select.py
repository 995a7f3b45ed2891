"""Scores and top-k without ever holding all scores: short rows closed, long rows in blocks."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from . import routing
from ._blocks import check_interval_values, key_span, row_blocks
from ._checks import require_positive
from ._library import define_op
from .causal_positions import closed_form
from .index_scores import check_index_inputs, score_block, visible_keys
from .select_topk import highest


def index_select(
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
    """The keys that each query token attends to: ``select_topk(index_scores(...))`` in bounded
    memory.

    A row that sees at most ``topk`` keys selects all of them and is never scored.

    Args:
        q: [T, H, D] indexer queries after RoPE, floating point or float8_e4m3fn.
        k: [S, D] indexer keys after LayerNorm and RoPE, packed; see ``index_scores`` on fp8.
        weights: [T, H] float32, already folded with ``D**-0.5 * H**-0.5``; may be negative.
        ks, ke: [T] int32, the visible interval of packed keys.
        max_kv_len: host upper bound on ``ke - ks``.
        topk: width of the result.
        mask: [T, S] bool, column = packed key, True = visible; visibility is interval and mask.
        batch_invariant: score each row in fixed tiles, so that a row's selection is bit-equal
            alone and in any batch (contract C11).

    Returns:
        [T, topk] int32 positions relative to ``ks``, ascending, then -1 (contract C8).

    Raises:
        ValueError: ``topk < 1``, shapes or devices that do not fit together, or an interval beyond
            the keys or ``max_kv_len``.
        TypeError: a dtype outside of those above.
    """
    require_positive("topk", topk)
    check_index_inputs(q, k, weights, ks, ke, mask)
    return _op(q, k, weights, ks, ke, max_kv_len, topk, mask, batch_invariant)


def _reference(
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
    check_interval_values(ks, ke, k.shape[0], max_kv_len)
    if mask is not None:
        indices, visible = _all_visible(ks, ke, k.shape[0], topk, mask)
    elif routing.selection_form(max_kv_len, topk) is routing.Selection.CLOSED:
        return closed_form(ks, ke, topk)
    else:
        indices, visible = closed_form(ks, ke, topk), ke - ks
    long = (visible > topk).nonzero()[:, 0]
    # One row a block is a fixed tile: what is computed for a row then depends on that row alone.
    bytes_per_row = sys.maxsize if batch_invariant else _bytes_per_key(q) * k.shape[0]
    for block in row_blocks(long.shape[0], bytes_per_row):
        rows = long[block]
        indices[rows] = _select_rows(
            q[rows],
            k,
            weights[rows],
            ks[rows],
            ke[rows],
            topk,
            None if mask is None else mask[rows],
        )
    return indices


def _all_visible(
    ks: Tensor, ke: Tensor, keys: int, topk: int, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Positions of each row's visible keys, right where at most ``topk``, and their count."""
    indices = ks.new_empty((ks.shape[0], topk))
    count = torch.empty_like(ks)
    for block in row_blocks(ks.shape[0], 48 * keys):
        first, last = key_span(ks[block], ke[block])
        visible = visible_keys(ks[block], ke[block], first, last, mask[block])
        count[block] = visible.sum(dim=-1)
        found = highest(visible.to(torch.float32), visible, topk)
        indices[block] = torch.where(found >= 0, found + first - ks[block, None], -1)
    return indices, count


def _select_rows(
    q: Tensor, k: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None
) -> Tensor:
    """Score some rows against the span of keys that they see, and select."""
    first, last = key_span(ks, ke)
    scores = score_block(q, k[first:last], weights)
    visible = visible_keys(ks, ke, first, last, mask)
    found = highest(scores.to(torch.float32), visible, topk)
    return torch.where(found >= 0, found + first - ks[:, None], -1)


def _bytes_per_key(q: Tensor) -> int:
    """Workspace of one (row, key) pair: H dots, and the int64 lanes and masks of the selection."""
    wide = 8 if q.dtype == torch.float64 else 4
    return q.shape[1] * wide + 48


def _fake(
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
    return ks.new_empty((q.shape[0], topk))


_op = define_op(
    "index_select(Tensor q, Tensor k, Tensor weights, Tensor ks, Tensor ke, SymInt max_kv_len,"
    " SymInt topk, Tensor? mask=None, bool batch_invariant=False) -> Tensor",
    reference=_reference,
    fake=_fake,
)
