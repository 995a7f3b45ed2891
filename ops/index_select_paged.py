"""``index_select`` on keys in a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from . import routing
from ._checks import (
    require_dtype,
    require_positive,
    require_rank,
    require_same_device,
    require_size,
)
from ._library import define_op
from ._paged import by_request, require_paged_rows, visible_lens
from .cache_layouts import FP8, require_index_cache
from .causal_positions import closed_form
from .index_cache import load_index_keys
from .index_scores import INDEX_DTYPES
from .index_select import index_select


def index_select_paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    lens: Tensor,
    max_kv_len: int,
    topk: int,
    scale_store: str,
    batch_invariant: bool = False,
) -> Tensor:
    """The keys that each query token attends to, from an index cache in pages.

    Equal to ``index_select`` on the dequantised keys of each row's request. The result holds
    positions in the request and not places in the cache, so that it does not depend on the block
    table (contract C9); ``slots`` turns one into the other.

    Args:
        q: [T, H, D] indexer queries after RoPE and, if the keys have it too, Hadamard; floating
            point or float8_e4m3fn with the scales in ``weights``, as ``index_query`` gives them.
        cache: [num_blocks, block_size, D + 4] uint8, see ``cache_layouts``.
        weights: [T, H] float32, already folded with ``D**-0.5 * H**-0.5``; may be negative.
        block_table: [B, blocks] int32, the blocks of each request in order. Columns past what a
            row sees may hold anything: they are not read.
        row_request: [T] int32, the request of each row. A request that the table does not have,
            such as -1, marks a padding row, which selects nothing.
        lens: [T] int32, how many of its request's first tokens each row sees.
        max_kv_len: host upper bound on ``lens``.
        topk: width of the result.
        scale_store: as the cache was written, "fp32" or "ue8m0".
        batch_invariant: score each row in fixed tiles (contract C11).

    Returns:
        [T, topk] int32 positions from the request's first token, ascending, then -1.

    Raises:
        ValueError: ``topk < 1``, shapes, strides or devices that do not fit together, an unknown
            ``scale_store``, a row beyond ``max_kv_len``, or a token without a block in the cache.
        TypeError: a dtype outside of those above.
    """
    require_positive("topk", topk)
    require_rank("q", q, 3)
    require_dtype("q", q, INDEX_DTYPES)
    require_rank("weights", weights, 2)
    require_dtype("weights", weights, (torch.float32, torch.float64))
    require_size("weights", weights, 0, q.shape[0], "one row per query token")
    require_size("weights", weights, 1, q.shape[1], "one weight per head of q")
    require_paged_rows(cache, block_table, row_request, lens, q.shape[0])
    require_index_cache(cache, q.shape[2], scale_store)
    require_same_device(q=q, cache=cache, weights=weights)
    return _op(
        q,
        cache,
        weights,
        block_table,
        row_request,
        lens,
        max_kv_len,
        topk,
        scale_store,
        batch_invariant,
    )


@torch.no_grad()
def _reference(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    lens: Tensor,
    max_kv_len: int,
    topk: int,
    scale_store: str,
    batch_invariant: bool = False,
) -> Tensor:
    seen = visible_lens(block_table, row_request, lens, max_kv_len)
    indices = closed_form(torch.zeros_like(seen), seen, topk)
    if routing.selection_form(max_kv_len, topk) is routing.Selection.CLOSED:
        return indices
    # A key in float16 or fp8 would lose exponents that a stored one can have.
    dtype = torch.float32 if q.dtype in (torch.float16, FP8) else q.dtype
    for part in by_request(cache, block_table, row_request, seen, seen > topk):
        indices[part.rows] = index_select(
            q[part.rows],
            load_index_keys(cache, part.slots, scale_store, dtype),
            weights[part.rows],
            torch.zeros_like(part.lens),
            part.lens,
            part.longest,
            topk,
            None,
            batch_invariant,
        )
    return indices


def _fake(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    lens: Tensor,
    max_kv_len: int,
    topk: int,
    scale_store: str,
    batch_invariant: bool = False,
) -> Tensor:
    return lens.new_empty((q.shape[0], topk))


_op = define_op(
    "index_select_paged(Tensor q, Tensor cache, Tensor weights, Tensor block_table,"
    " Tensor row_request, Tensor lens, SymInt max_kv_len, SymInt topk, str scale_store,"
    " bool batch_invariant=False) -> Tensor",
    reference=_reference,
    fake=_fake,
)
