"""``index_select_paged``: the indexer on an fp8 cache in pages, which it reads where they lie."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import routing
from .._blocks import checks_values
from .._paged import by_request, visible_lens
from ..cache_layouts import FP8, SCALE_BYTES
from . import radix_select
from ._device import architecture
from ._dtypes import element
from ._e4m3 import exponent_value
from ._paged import misaligned
from ._score_tiles import (
    ScoreTile,
    blocks_per_program,
    head_sum,
    refusal,
    score_tile,
    some_dims,
    tile_dots,
    tile_queries,
)
from ._uniform import uniform
from ._variants import Variant, variant
from .index_select import score_blocks

# What differs from call to call and is not worth a compiled form of its own.
_PLAIN = ("rows", "columns", "pages", "width", "least", "blocks")
# The first architecture that converts fp8 in one instruction.
_CONVERTS_FP8 = 89


@triton.jit
def _lengths(lens, row, rows, width, least):
    """What each row sees, as far as it is scored: 0 keys otherwise."""
    seen = tl.load(lens + row, mask=row < rows, other=0)
    return tl.where(seen > least, tl.minimum(seen, width), 0)


@triton.jit
def _page_keys(
    cache,
    table,
    position,
    end,
    columns,
    pages,
    page_stride,
    table_column,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    UE8M0: tl.constexpr,
):
    """Pointers to the stored keys of one request, which are read, and their float32 scales.

    A position without a block in the cache is not read, and its scale is 0.
    """
    column = position // PAGE
    inside = (position < end) & (column < columns)
    page = tl.load(table + column.to(tl.int64) * table_column, mask=inside, other=-1)
    inside = inside & (page >= 0) & (page < pages)
    offset = position % PAGE
    start = cache + page.to(tl.int64) * page_stride
    words = (start + PAGE * DIM + offset * 4).to(tl.pointer_type(tl.int32))
    word = tl.load(words, mask=inside, other=0)
    scale = exponent_value(word) if UE8M0 else word.to(tl.float32, bitcast=True)
    return start + offset * DIM, inside, tl.where(inside, scale, 0.0)


@triton.jit(do_not_specialize=list(_PLAIN))
def _paged_scores_kernel(
    out,
    q,
    cache,
    weights,
    block_table,
    row_request,
    lens,
    rows,
    columns,
    pages,
    width,
    least,
    blocks,
    out_row,
    q_row,
    q_head,
    q_dim,
    page_stride,
    table_row,
    table_column,
    w_row,
    w_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BQ: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    UE8M0: tl.constexpr,
):
    """BQ query tokens against ``blocks`` blocks of BN positions of their requests.

    Exits where no row sees more than ``least`` keys. A score is stored in the column of its
    position. Tokens of one request share their keys; those of others take turns. A key's scale is
    positive and therefore multiplies its score.
    """
    row = tl.program_id(0) * BQ + tl.arange(0, BQ)
    length = _lengths(lens, row, rows, width, least)
    begin = tl.program_id(1) * blocks * BN
    if tl.max(length, axis=0) > begin:
        lane_row = tl.program_id(0) * BQ + tl.arange(0, BQ * BH) // BH
        wanted = _lengths(lens, lane_row, rows, width, least) > begin
        query_at, query_read, factors = tile_queries(
            q, weights, lane_row, wanted, q_row, q_head, w_row, w_head, HEADS, BH
        )
        queries = some_dims(query_at, query_read, q_dim, 0, DIM, BD) if STEP == BD else None
        lines = out + row.to(tl.int64) * out_row
        rest = length > begin
        request = tl.load(row_request + row, mask=rest, other=0)
        while tl.max(rest.to(tl.int32), axis=0) > 0:
            first = tl.min(tl.where(rest, request, 2147483647), axis=0)
            ends = tl.where(rest & (request == first), length, 0)
            end = uniform(tl.minimum(tl.max(ends, axis=0), begin + blocks * BN))
            table = block_table + first.to(tl.int64) * table_row
            for block in range(begin, end, BN):
                position = block + tl.arange(0, BN)
                key_at, key_read, scale = _page_keys(
                    cache, table, position, end, columns, pages, page_stride, table_column,
                    DIM, PAGE, UE8M0,
                )  # fmt: skip
                dots = tile_dots(
                    queries, query_at, query_read, q_dim, key_at, key_read, 1, DIM, BD, STEP
                )
                tl.store(
                    lines[None, :] + position[:, None],
                    head_sum(dots, factors, HEADS, BQ, BH) * scale[:, None],
                    mask=position[:, None] < ends[None, :],
                )
            rest = rest & (request != first)


def supports(q: Tensor, cache: Tensor, *args: object) -> str | None:
    """None unless dtype, heads or head dim have no tile, or the scales are not aligned."""
    dim = cache.shape[2] - SCALE_BYTES
    return refusal(q, FP8) or misaligned(cache, SCALE_BYTES, cache.shape[1] * dim)


@torch.no_grad()
def run(
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
    """``index_select_paged``: reads no device value on the host, whatever the requests.

    Queries in fp8 meet the stored keys as they are; for others a tile of keys is converted, which
    is exact. With ``batch_invariant`` a tile does not follow from the number of requests (C11).
    """
    seen = visible_lens(block_table, row_request, lens, max_kv_len)
    if checks_values(seen):
        for _ in by_request(cache, block_table, row_request, seen, seen > topk):
            pass
    indices = seen.new_empty((seen.shape[0], topk))
    starts = torch.zeros_like(seen)
    if routing.selection_form(max_kv_len, topk) is routing.Selection.CLOSED:
        radix_select.select_rows(indices, None, starts, seen, max_kv_len, max_kv_len)
        return indices
    row_request = row_request.contiguous()
    alone = not batch_invariant and q.shape[0] <= block_table.shape[0]
    tile = score_tile(architecture(q.device), q.dtype, FP8, q.shape[1], alone)
    for rows, scores in score_blocks(seen, max_kv_len):
        _score_rows(
            scores,
            q[rows],
            cache,
            weights[rows],
            block_table,
            row_request[rows],
            seen[rows],
            max_kv_len,
            topk,
            scale_store,
            tile,
        )
        radix_select.select_rows(
            indices[rows], scores, starts[rows], seen[rows], max_kv_len, max_kv_len
        )
    return indices


def _score_rows(
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    lens: Tensor,
    width: int,
    least: int,
    scale_store: str,
    tile: ScoreTile,
) -> None:
    """Store the scores [T, width] of the rows that see more than ``least`` keys, by position."""
    tiles, blocks = triton.cdiv(q.shape[0], tile.queries), triton.cdiv(width, tile.keys)
    share = blocks_per_program(tiles, blocks)
    converts = architecture(q.device) >= _CONVERTS_FP8 or q.dtype == FP8
    _paged_scores_kernel[(tiles, triton.cdiv(blocks, share))](
        out,
        q,
        cache.view(FP8) if converts else cache,
        weights,
        block_table,
        row_request,
        lens,
        q.shape[0],
        block_table.shape[1],
        cache.shape[0],
        width,
        least,
        share,
        out.stride(0),
        *q.stride(),
        cache.stride(0),
        *block_table.stride(),
        *weights.stride(),
        **tile.constexprs(q.shape[1], q.shape[2]),
        PAGE=cache.shape[1],
        UE8M0=scale_store == "ue8m0",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def variants(arch: int) -> list[Variant]:
    """Keys of 128 dims in pages of 64, queries in bf16 and fp8 with 8 to 128 heads."""
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, FP8):
        if dtype == FP8 and arch < _CONVERTS_FP8:
            continue
        for heads in (64,) if dtype == torch.float16 else (8, 16, 32, 64, 128):
            tiles = {score_tile(arch, dtype, FP8, heads, alone) for alone in (False, True)}
            found += [_variant(arch, tile, dtype, heads, "ue8m0") for tile in sorted(tiles)]
    tile = score_tile(arch, torch.bfloat16, FP8, 64)
    return [*found, _variant(arch, tile, torch.bfloat16, 64, "fp32")]


def _variant(
    arch: int, tile: ScoreTile, dtype: torch.dtype, heads: int, scale_store: str
) -> Variant:
    stored = "fp8e4nv" if arch >= _CONVERTS_FP8 else "u8"
    pointers = {"out": "fp32", "q": element(dtype), "cache": stored, "weights": "fp32"}
    pointers |= {"block_table": "i32", "row_request": "i32", "lens": "i32"}
    fixed: dict[str, object] = {"q_dim": 1, "table_column": 1, "w_head": 1}
    fixed |= {**tile.constexprs(heads, 128), "PAGE": 64, "UE8M0": scale_store == "ue8m0"}
    return variant(
        f"index_scores_paged {tile.name} {element(dtype)} {scale_store}",
        _paged_scores_kernel,
        pointers,
        fixed,
        divisible=("out_row", "q_row", "q_head", "page_stride", "table_row", "w_row"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        matrix=not tile.wide,
        fp8=dtype == FP8,
    )
