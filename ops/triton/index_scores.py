"""The lightning indexer's scores of packed keys: one launch, each row over its own interval."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_layouts import FP8
from ._device import architecture
from ._dtypes import element
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

# What differs from call to call and is not worth a compiled form of its own.
_PLAIN = ("rows", "keys", "width", "least", "blocks")


@triton.jit
def _interval(ks, ke, counts, row, rows, keys, width, least):
    """Start and length of what each row sees, as far as it is scored: 0 keys otherwise."""
    inside = row < rows
    start = tl.maximum(tl.load(ks + row, mask=inside, other=0), 0)
    stop = tl.minimum(tl.load(ke + row, mask=inside, other=0), keys)
    length = tl.minimum(stop - start, width)
    seen = length if counts is None else tl.load(counts + row, mask=inside, other=0)
    return start, tl.where(seen > least, length, 0)


@triton.jit(do_not_specialize=list(_PLAIN))
def _scores_kernel(
    out,
    q,
    k,
    weights,
    ks,
    ke,
    counts,
    rows,
    keys,
    width,
    least,
    blocks,
    out_row,
    q_row,
    q_head,
    q_dim,
    k_row,
    k_dim,
    w_row,
    w_head,
    ABSOLUTE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BQ: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    STEP: tl.constexpr,
):
    """BQ query tokens against ``blocks`` blocks of BN positions; exits where none are visible.

    Only visible scores are stored: in the column of the packed key if ABSOLUTE, else of the
    position. Tokens of one request share their keys; those of others take turns.
    """
    row = tl.program_id(0) * BQ + tl.arange(0, BQ)
    start, length = _interval(ks, ke, counts, row, rows, keys, width, least)
    begin = tl.program_id(1) * blocks * BN
    if tl.max(length, axis=0) > begin:
        lane_row = tl.program_id(0) * BQ + tl.arange(0, BQ * BH) // BH
        _, lane_length = _interval(ks, ke, counts, lane_row, rows, keys, width, least)
        query_at, query_read, factors = tile_queries(
            q, weights, lane_row, lane_length > begin, q_row, q_head, w_row, w_head, HEADS, BH
        )
        queries = some_dims(query_at, query_read, q_dim, 0, DIM, BD) if STEP == BD else None
        lines = out + row.to(tl.int64) * out_row
        rest = length > begin
        while tl.max(rest.to(tl.int32), axis=0) > 0:
            first = tl.min(tl.where(rest, start, 2147483647), axis=0)
            ends = tl.where(rest & (start == first), length, 0)
            end = uniform(tl.minimum(tl.max(ends, axis=0), begin + blocks * BN))
            for block in range(begin, end, BN):
                position = block + tl.arange(0, BN)
                key_at = k + (first + position).to(tl.int64) * k_row
                dots = tile_dots(
                    queries, query_at, query_read, q_dim, key_at, position < end, k_dim,
                    DIM, BD, STEP,
                )  # fmt: skip
                column = position + first if ABSOLUTE else position
                tl.store(
                    lines[None, :] + column[:, None],
                    head_sum(dots, factors, HEADS, BQ, BH),
                    mask=position[:, None] < ends[None, :],
                )
            rest = rest & (start != first)


def supports(
    q: Tensor, k: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, *args: object
) -> str | None:
    """None unless the dtypes, heads or head dim have no tile."""
    if k.dtype == FP8 and q.dtype != FP8:
        # Packed keys in fp8 have no scales, and so come with no other queries.
        return f"keys in float8_e4m3fn take queries in it, got {q.dtype}"
    return refusal(q, k.dtype)


@torch.no_grad()
def run(
    q: Tensor, k: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, mask: Tensor | None = None
) -> Tensor:
    """``index_scores``: as the reference; each tile of rows reads only keys that it sees."""
    out = q.new_full((q.shape[0], k.shape[0]), -torch.inf, dtype=torch.float32)
    score_rows(out, q, k, weights, ks.contiguous(), ke.contiguous(), k.shape[0], absolute=True)
    return out if mask is None else out.masked_fill_(~mask, -torch.inf)


def score_rows(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    width: int,
    least: int = 0,
    counts: Tensor | None = None,
    absolute: bool = False,
) -> None:
    """Store the visible scores of the rows that see more than ``least`` keys.

    Args:
        out: [T, at least width] float32, contiguous rows; lanes that are not visible stay as they
            are. Column = packed key if ``absolute``, else the position in the row's interval.
        q, k, weights, ks, ke: as ``index_scores`` has them; ``ks`` and ``ke`` contiguous.
        width: host upper bound on ``ke - ks``; what lies beyond is not scored.
        counts: [T] int32, how many keys each row sees; None: its whole interval.
    """
    rows, keys = q.shape[0], k.shape[0]
    if rows == 0 or min(keys, width) <= 0:
        return
    tile = score_tile(architecture(q.device), q.dtype, k.dtype, q.shape[1])
    tiles, blocks = triton.cdiv(rows, tile.queries), triton.cdiv(width, tile.keys)
    share = blocks_per_program(tiles, blocks)
    _scores_kernel[(tiles, triton.cdiv(blocks, share))](
        out,
        q,
        k,
        weights,
        ks,
        ke,
        counts,
        rows,
        keys,
        width,
        least,
        share,
        out.stride(0),
        *q.stride(),
        *k.stride(),
        *weights.stride(),
        ABSOLUTE=absolute,
        **tile.constexprs(q.shape[1], q.shape[2]),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def variants(arch: int) -> list[Variant]:
    """Scores of 128 dims with 8 to 128 heads: a column for each key, or for each position."""
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, FP8):
        if dtype == FP8 and arch < 89:
            continue
        for heads in (64,) if dtype == torch.float16 else (8, 16, 32, 64, 128):
            tile = score_tile(arch, dtype, dtype, heads)
            found += [_variant(tile, dtype, heads, columns) for columns in ("key", "position")]
    tile = score_tile(arch, torch.bfloat16, torch.bfloat16, 64)
    return [*found, _variant(tile, torch.bfloat16, 64, "position", counted=True)]


def _variant(
    tile: ScoreTile, dtype: torch.dtype, heads: int, columns: str, counted: bool = False
) -> Variant:
    pointers = {"out": "fp32", "q": element(dtype), "k": element(dtype), "weights": "fp32"}
    pointers |= {"ks": "i32", "ke": "i32"}
    fixed: dict[str, object] = {"q_dim": 1, "k_dim": 1, "w_head": 1}
    fixed |= {"ABSOLUTE": columns == "key", **tile.constexprs(heads, 128)}
    if counted:
        pointers["counts"] = "i32"
    else:
        fixed["counts"] = None
    return variant(
        f"index_scores {columns} {tile.name} {element(dtype)}" + (" counted" if counted else ""),
        _scores_kernel,
        pointers,
        fixed,
        divisible=("out_row", "q_row", "q_head", "k_row", "w_row"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        matrix=not tile.wide,
        fp8=dtype == FP8,
    )
