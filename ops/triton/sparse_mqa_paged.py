"""``sparse_mqa_paged``: rows of floats are read where they lie, rows of fp8 are unpacked first.

Unpacking fp8 between two matrix products takes more registers than there are. So the selected rows
of a block of query tokens are gathered once, in the dtype of the queries, and the kernel for packed
rows attends to these; a block is what the workspace holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._blocks import checks_values, row_blocks
from ..mla_cache import require_scale_value
from ..sparse_mqa_paged import selected_slots
from . import _sparse_launch
from ._device import ARCHITECTURES, INTERPRETER, architecture
from ._e4m3 import e4m3_values
from ._paged import misaligned
from ._sparse_kernel import key_offsets
from ._variants import Tile, Variant, variant

_GATHER: dict[int, Tile] = {arch: Tile(4, 512, 4, 1) for arch in (INTERPRETER, *ARCHITECTURES)}
"""Lanes of a program that unpacks; columns are the latent."""


@triton.jit(do_not_specialize=["lanes", "requests", "columns", "blocks"])
def unpack_kernel(
    cache,
    factors,
    ropes,
    cache_scale,
    indices,
    block_table,
    row_request,
    lens,
    rows,
    packed,
    lanes,
    requests,
    columns,
    blocks,
    block_bytes,
    row_bytes,
    index_row,
    table_row,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILED: tl.constexpr,
    BN: tl.constexpr,
):
    """rows [T * lanes, LATENT + ROPE], dequantised, and packed [T, lanes]: the lane, or -1.

    The grid is (groups of BN lanes, T). TILED is ``fp8_ds_mla``: ``factors`` and ``ropes`` are then
    the cache seen as float32 and bfloat16. A lane without a key is not written to ``rows``.
    """
    token = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BN + tl.arange(0, BN)
    request = tl.load(row_request + token)
    known = (request >= 0) & (request < requests)
    seen = tl.load(lens + token, mask=known, other=0)
    table = block_table + tl.where(known, request, 0).to(tl.int64) * table_row
    inside = lane < lanes
    position = tl.load(indices + token * index_row + lane, mask=inside, other=-1)
    at, _, valid = key_offsets(
        position, 0, seen, blocks, table, columns, block_bytes, row_bytes, row_bytes, BLOCK_SIZE
    )
    tl.store(packed + token * lanes + lane, tl.where(valid, lane, -1), mask=inside)
    to = rows + (token * lanes + lane).to(tl.int64)[:, None] * (LATENT + ROPE)
    dim = tl.arange(0, LATENT_PAD)[None, :]
    held = valid[:, None] & (dim < LATENT)
    pe_dim = tl.arange(0, ROPE_PAD)[None, :]
    pe_held = valid[:, None] & (pe_dim < ROPE)
    latent = e4m3_values(tl.load(cache + at[:, None] + dim, mask=held, other=0))
    if TILED:
        factor = tl.load(
            factors + (at // 4 + LATENT // 4)[:, None] + dim // 128, mask=held, other=0.0
        )
        latent = latent * factor
        rope_at = (at // 2 + (LATENT + LATENT // 32) // 2)[:, None] + pe_dim
        rotated = tl.load(ropes + rope_at, mask=pe_held, other=0.0).to(tl.float32)
    else:
        by = tl.load(cache_scale)
        latent = latent * by
        codes = tl.load(cache + at[:, None] + LATENT + pe_dim, mask=pe_held, other=0)
        rotated = e4m3_values(codes) * by
    tl.store(to + dim, latent.to(rows.dtype.element_ty), mask=held)
    tl.store(to + LATENT + pe_dim, rotated.to(rows.dtype.element_ty), mask=pe_held)


def supports(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    lens: Tensor,
    scale: float,
    v_dim: int,
    layout: str,
    cache_scale: Tensor | None = None,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> str | None:
    """None unless a dtype is float64, ``q`` is wider than the tiles, or a cache is misaligned."""
    refused = _sparse_launch.refusal(q, v_dim, q.shape[2] - v_dim)
    if refused is None and layout == "bf16" and cache.dtype == torch.float64:
        return "serves caches of float32, bfloat16 and float16, got float64"
    if refused is None and layout == "fp8_ds_mla":
        return misaligned(cache, 4, cache.shape[2])
    return refused


def run(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    lens: Tensor,
    scale: float,
    v_dim: int,
    layout: str,
    cache_scale: Tensor | None = None,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """``sparse_mqa_paged``: one launch for rows of floats, two a block of tokens for fp8."""
    require_scale_value(cache_scale)
    if checks_values(indices):
        selected_slots(cache, indices, block_table, row_request, lens)
    parts = q[..., :v_dim], q[..., v_dim:]
    blocks, block_size = cache.shape[:2]
    if layout == "bf16":
        pages = _sparse_launch.Pages(
            block_table, row_request, lens, block_size, blocks, cache.stride(0)
        )
        keys = cache[..., :v_dim], cache[..., v_dim:]
        return _sparse_launch.attend(
            *parts, *keys, indices, None, scale, return_lse, batch_invariant, pages
        )
    tokens, heads, width = q.shape
    lanes = indices.shape[1]
    out = q.new_empty((tokens, heads, v_dim))
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    for block in row_blocks(tokens, lanes * (width * q.element_size() + 4)):
        at = indices[block], row_request[block], lens[block]
        rows, packed = _unpack(q, cache, *at, block_table, v_dim, layout, cache_scale)
        starts = torch.arange(packed.shape[0], dtype=torch.int32, device=q.device) * lanes
        out[block], lse[block] = _sparse_launch.attend(
            parts[0][block],
            parts[1][block],
            rows[:, :v_dim],
            rows[:, v_dim:],
            packed,
            starts,
            scale,
            True,
            batch_invariant,
        )
    return out, lse if return_lse else lse.new_empty(0)


def _unpack(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    row_request: Tensor,
    lens: Tensor,
    block_table: Tensor,
    v_dim: int,
    layout: str,
    cache_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Selected rows [T * K, L + R] in the dtype of ``q``, and [T, K] which lanes hold one."""
    tokens, lanes = indices.shape
    rows = q.new_empty((tokens * lanes, q.shape[2]))
    packed = indices.new_empty((tokens, lanes))
    if tokens == 0 or lanes == 0:
        return rows, packed
    indices, block_table = _sparse_launch.rows_of(indices), _sparse_launch.rows_of(block_table)
    stored = cache.view(torch.uint8)
    tiled = layout == "fp8_ds_mla"
    tile = _GATHER[architecture(q.device)]
    unpack_kernel[(triton.cdiv(lanes, tile.rows), tokens)](
        stored,
        stored.view(torch.float32) if tiled else None,
        stored.view(torch.bfloat16) if tiled else None,
        cache_scale,
        indices,
        block_table,
        row_request.contiguous(),
        lens.contiguous(),
        rows,
        packed,
        lanes,
        block_table.shape[0],
        block_table.shape[1],
        cache.shape[0],
        cache.stride(0),
        cache.shape[2],
        indices.stride(0),
        block_table.stride(0),
        **_sparse_launch.dims(v_dim, q.shape[2] - v_dim),
        BLOCK_SIZE=cache.shape[1],
        TILED=tiled,
        BN=tile.rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return rows, packed


def variants(arch: int) -> list[Variant]:
    """Every form that is launched on ``arch``, for 64 tokens a page."""
    found = _sparse_launch.variants(arch, "sparse_mqa_paged", False, 64)
    found += _sparse_launch.variants(arch, "sparse_mqa_paged", True, 64)
    tile = _GATHER[arch]
    tables = ("indices", "block_table", "row_request", "lens", "packed")
    for layout in ("fp8", "fp8_ds_mla"):
        scales = {"factors": "fp32", "ropes": "bf16"}, {"cache_scale": "fp32"}
        used, absent = scales if layout == "fp8_ds_mla" else scales[::-1]
        found.append(
            variant(
                f"sparse_mqa_paged unpack {layout} BN{tile.rows} w{tile.num_warps}",
                unpack_kernel,
                {"cache": "u8", "rows": "bf16"} | used | dict.fromkeys(tables, "i32"),
                {
                    **_sparse_launch.dims(512, 64),
                    **dict.fromkeys(absent),
                    "BLOCK_SIZE": 64,
                    "TILED": layout == "fp8_ds_mla",
                    "BN": tile.rows,
                },
                divisible=("block_bytes", "row_bytes", "index_row"),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        )
    return found
