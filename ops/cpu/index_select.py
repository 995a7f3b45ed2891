"""Scores of long rows on the CPU, in tiles that stay in cache between GEMM, relu and head sum.

The compiled kernel (``_index_tiles``) scores at the rate of its GEMM; without it each tile is a few
calls of ATen, for each of which all threads meet, and takes 1.4 times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _options, routing
from .._blocks import check_interval_values
from ..causal_positions import closed_form
from . import _index_tiles
from .select import MOST_ROWS, Score, close_short_rows, select_long_rows

# Dots of one tile at most: 4 MiB lie in the shared cache together with the operands.
_DOTS = 1 << 20
# Rows times heads of one GEMM: enough for its full rate; more only adds keys that causality hides.
_GEMM_ROWS = 2048
# Keys of one tile at most, so that what they become in float32 stays in the cache of a core.
_MOST_KEYS = 2048
# Keys of one tile where a row's scores may not depend on its neighbours.
_FIXED_KEYS = 1024
# Lanes of a cache line, so that each row of a padded operand has the same alignment.
_ALIGNED = 16


def supports(q: Tensor, *args: object) -> str | None:
    """None unless ``q`` is float64."""
    return "float64 queries are scored in float64" if q.dtype == torch.float64 else None


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
    """``index_select`` for float32 and narrower, of which tiles become float32: exactly."""
    check_interval_values(ks, ke, k.shape[0], max_kv_len)
    if mask is None and (routing.selection_form(max_kv_len, topk) is routing.Selection.CLOSED):
        return closed_form(ks, ke, topk)
    indices, long = close_short_rows(ks, ke, topk, mask)
    if long.shape[0] > 0:
        heads, dim = q.shape[1:]
        rows = max(1, _GEMM_ROWS // max(1, heads))
        if batch_invariant:
            score = _fixed_tiles(q, k, weights)
        elif _index_tiles.serve():
            # The kernel passes over the keys that only rows outside of a tile see.
            score, rows = _compiled_tiles(q, k, weights, ks, ke), MOST_ROWS
        else:
            score = _tiles(q, k, weights)
        select_long_rows(indices, long, ks, ke, mask, score, rows, 8 * heads * (dim + 2))
    return indices


def _compiled_tiles(q: Tensor, k: Tensor, weights: Tensor, ks: Tensor, ke: Tensor) -> Score:
    """The compiled kernel, over no more keys at once than a quarter of the budget holds."""
    step = max(1, _options.current().workspace_bytes // 16 // max(1, k.shape[1]))
    lengths = (ke - ks).to(torch.int64)

    def score(rows: Tensor, first: int, out: Tensor) -> None:
        queries = q.index_select(0, rows).to(torch.float32)
        by_head = weights.index_select(0, rows).to(torch.float32)
        ends = lengths.index_select(0, rows)
        for start in range(0, out.shape[1], step):
            stop = min(start + step, out.shape[1])
            keys = k[first + start : first + stop].to(torch.float32)
            if keys.stride(1) != 1:
                keys = keys.contiguous()
            _index_tiles.score(out[:, start:stop], queries, keys, by_head, ends - start)

    return score


def _tiles(q: Tensor, k: Tensor, weights: Tensor) -> Score:
    """One GEMM for all rows and heads of a tile, one small product a row for the sum over heads."""
    heads, dim = q.shape[1:]
    # A quarter of the budget for the dots, a quarter for keys in float32, half for a block of rows.
    most = min(_DOTS, _options.current().workspace_bytes // 16)
    lanes = max(heads, min(most, q.shape[0] * heads * min(_MOST_KEYS, k.shape[0])))
    dots = torch.empty(lanes, dtype=torch.float32)

    def score(rows: Tensor, first: int, out: Tensor) -> None:
        queries = q.index_select(0, rows).to(torch.float32).flatten(0, 1)
        by_head = weights.index_select(0, rows).to(torch.float32)[:, None, :]
        step = min(_MOST_KEYS, most // max(1, dim), lanes // max(1, queries.shape[0])) or 1
        for start in range(0, out.shape[1], step):
            stop = min(start + step, out.shape[1])
            keys = k[first + start : first + stop].to(torch.float32)
            tile = dots[: queries.shape[0] * (stop - start)].view(queries.shape[0], stop - start)
            torch.mm(queries, keys.t(), out=tile).relu_()
            by_key = tile.view(rows.shape[0], heads, stop - start)
            # A product into a strip of the block would be split into one call for each row.
            out[:, start:stop] = torch.bmm(by_head, by_key)[:, 0]

    return score


def _fixed_tiles(q: Tensor, k: Tensor, weights: Tensor) -> Score:
    """Tiles of one row and a fixed number of its positions (contract C11).

    Every call of a product has the same shape, strides and alignment whatever the batch, so that
    a library that picks its code by these picks the same one.
    """
    heads, dim = q.shape[1:]
    lanes = -(-dim // _ALIGNED) * _ALIGNED
    keys = torch.zeros(_FIXED_KEYS, lanes, dtype=torch.float32)
    dots = torch.empty(heads, _FIXED_KEYS, dtype=torch.float32)
    line = torch.empty(1, _FIXED_KEYS, dtype=torch.float32)
    padded_heads = -(-heads // _ALIGNED) * _ALIGNED

    def score(rows: Tensor, first: int, out: Tensor) -> None:
        queries = torch.zeros(rows.shape[0], heads, lanes, dtype=torch.float32)
        queries[:, :, :dim] = q.index_select(0, rows)
        by_head = torch.zeros(rows.shape[0], 1, padded_heads, dtype=torch.float32)[:, :, :heads]
        by_head[:, 0] = weights.index_select(0, rows)
        for start in range(0, out.shape[1], _FIXED_KEYS):
            stop = min(start + _FIXED_KEYS, out.shape[1])
            keys[: stop - start, :dim] = k[first + start : first + stop]
            for row in range(rows.shape[0]):
                torch.mm(queries[row], keys.t(), out=dots).relu_()
                torch.mm(by_head[row], dots, out=line)
                out[row, start:stop] = line[0, : stop - start]

    return score
