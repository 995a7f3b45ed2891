"""Tiles, splits and launches of absorbed attention over selected rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .. import _options
from ._device import architecture
from ._sparse_kernel import combine_kernel, sparse_kernel
from ._variants import Tile, Variant, variant

# The widest padded parts of a key: the tiles below are proven for them.
_LATENT_MOST, _ROPE_MOST = 512, 64
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

TILES: dict[int, dict[int, Tile]] = {
    0: {16: Tile(16, 64, 4, 1)},
    80: {16: Tile(16, 64, 8, 2), 32: Tile(32, 32, 8, 2)},
    89: {16: Tile(16, 32, 4, 2), 32: Tile(32, 32, 8, 2)},
    90: {16: Tile(16, 64, 8, 2), 32: Tile(32, 32, 8, 2), 64: Tile(64, 32, 8, 3, hoist=False)},
    100: {16: Tile(16, 64, 8, 2), 32: Tile(32, 32, 8, 2), 64: Tile(64, 32, 8, 2)},
    120: {16: Tile(16, 32, 4, 2), 32: Tile(32, 32, 8, 2)},
}
"""16-bit tiles by architecture and most heads of a program: a call takes the first that holds its
heads, or the last. Rows are heads, columns selected keys. Only 64 heads reach wgmma and tcgen05."""

PAGED_TILES: dict[int, dict[int, Tile]] = {
    **TILES,
    100: {**TILES[100], 64: Tile(64, 16, 8, 2)},
}
"""The same for rows in pages, whose addresses take more registers."""

FLOAT32_TILES: dict[int, Tile] = {
    0: Tile(16, 64, 4, 1),
    80: Tile(16, 32, 8, 1),
    89: Tile(16, 16, 16, 1),
    90: Tile(16, 32, 8, 1),
    100: Tile(16, 32, 8, 1),
    120: Tile(16, 16, 16, 1),
}
"""float32 products are exact and leave the matrix units out, whatever the number of heads."""

_PROCESSORS = {0: 4, 80: 108, 89: 128, 90: 132, 100: 148, 120: 188}
"""Programs that run at once, each as large as a multiprocessor holds: those of the largest part."""

# Selected keys for which a split of its own pays, and columns of a program that merges splits.
_SPLIT_LANES = 128
_MERGE = Tile(1, 128, 4, 1)
_MOST_SPLITS = 32

_STRIDES = (
    "q_row",
    "q_head",
    "q_pe_row",
    "q_pe_head",
    "kv_block",
    "kv_row",
    "k_pe_row",
    "index_row",
)


class Pages(NamedTuple):
    """Where a paged cache keeps rows, as ``sparse_mqa_paged`` takes it; strides are in elements."""

    block_table: Tensor
    row_request: Tensor
    lens: Tensor
    block_size: int
    blocks: int
    block_stride: int


def refusal(q: Tensor, latent: int, rope: int) -> str | None:
    """Why no tile serves queries ``q`` of parts ``latent`` and ``rope``, or None."""
    arch = architecture(q.device)
    if arch not in TILES:
        return f"no tile for compute capability {arch / 10}"
    if q.dtype not in _DTYPES:
        return f"serves float32, bfloat16 and float16, got {str(q.dtype).removeprefix('torch.')}"
    if latent > _LATENT_MOST or rope > _ROPE_MOST:
        return (
            f"serves values of at most {_LATENT_MOST} dims and keys of {_ROPE_MOST} more, got"
            f" {latent} and {rope}"
        )
    return None


def attend(
    q: Tensor,
    q_pe: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    indices: Tensor,
    ks: Tensor | None,
    scale: float,
    return_lse: bool,
    batch_invariant: bool,
    pages: Pages | None = None,
) -> tuple[Tensor, Tensor]:
    """out [T, N, L] like ``q`` and lse [T, N], or an empty tensor if not asked for.

    ``kv`` [S, L] and ``k_pe`` [S, R] are packed rows that start at ``ks``, or with ``pages`` the
    parts [blocks, block_size, L or R] of a cache. ``batch_invariant`` takes one split, so that the
    order of a row's sums depends on its own heads and lanes alone.
    """
    tokens, heads, latent = q.shape
    rope, lanes = q_pe.shape[2], indices.shape[1]
    out = q.new_empty((tokens, heads, latent))
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    if tokens == 0 or heads == 0:
        return out, lse if return_lse else lse.new_empty(0)
    arch = architecture(q.device)
    tile = tile_for(arch, heads, q.dtype, pages is not None)
    q, q_pe, indices = rows_of(q), rows_of(q_pe), rows_of(indices)
    if pages is None:
        kv, k_pe = rows_of(kv), rows_of(k_pe)
    groups = triton.cdiv(heads, tile.rows)
    splits = 1
    if not batch_invariant:
        splits = splits_for(arch, tokens * groups, lanes, 4 * tokens * heads * (latent + 1))
    lanes_per_split = triton.cdiv(triton.cdiv(lanes, splits), tile.columns) * tile.columns
    splits = max(1, triton.cdiv(lanes, max(1, lanes_per_split)))
    parts, part_lse = out, lse
    if splits > 1:
        parts = q.new_empty((splits, tokens, heads, latent), dtype=torch.float32)
        part_lse = parts.new_empty((splits, tokens, heads))
    table = None if pages is None else rows_of(pages.block_table)
    sparse_kernel[(tokens * groups, splits)](
        q,
        q_pe,
        kv,
        k_pe,
        indices,
        None if ks is None else ks.contiguous(),
        table,
        None if pages is None else pages.row_request.contiguous(),
        None if pages is None else pages.lens.contiguous(),
        parts,
        part_lse,
        heads,
        lanes,
        lanes_per_split,
        kv.shape[0] if pages is None else pages.blocks,
        0 if table is None else table.shape[0],
        0 if table is None else table.shape[1],
        q.stride(0),
        q.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        0 if pages is None else pages.block_stride,
        kv.stride(-2),
        k_pe.stride(-2),
        indices.stride(0),
        0 if table is None else table.stride(0),
        tokens * heads,
        scale,
        **dims(latent, rope),
        BLOCK_SIZE=0 if pages is None else pages.block_size,
        BH=tile.rows,
        BN=tile.columns,
        HOIST=tile.hoist,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        combine_kernel[(tokens * heads, triton.cdiv(latent, _MERGE.columns))](
            parts,
            part_lse,
            out,
            lse,
            splits,
            tokens * heads,
            WIDTH=latent,
            SPLITS=triton.next_power_of_2(splits),
            BLOCK=_MERGE.columns,
            num_warps=_MERGE.num_warps,
            num_stages=_MERGE.num_stages,
        )
    return out, lse if return_lse else lse.new_empty(0)


def tile_for(arch: int, heads: int, dtype: torch.dtype, paged: bool) -> Tile:
    """The tile of a call with ``heads`` query heads on packed rows, or on ``paged`` ones."""
    if dtype == torch.float32:
        return FLOAT32_TILES[arch]
    tiles = PAGED_TILES[arch] if paged else TILES[arch]
    return tiles[min((most for most in tiles if heads <= most), default=max(tiles))]


def rows_of(x: Tensor) -> Tensor:
    """``x`` where it lies, if its last dimension is dense; otherwise a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def splits_for(arch: int, programs: int, lanes: int, split_bytes: int) -> int:
    """Parts of the lanes that fill the device and fit the workspace; from static sizes alone."""
    idle = _PROCESSORS[arch] // programs
    fitting = _options.current().workspace_bytes // split_bytes
    return max(1, min(idle, fitting, lanes // _SPLIT_LANES, _MOST_SPLITS))


def dims(latent: int, rope: int) -> dict[str, int]:
    """The compile-time sizes of the two parts; the matrix units take no fewer than 16 dims."""
    return {
        "LATENT": latent,
        "ROPE": rope,
        "LATENT_PAD": max(16, triton.next_power_of_2(latent)),
        "ROPE_PAD": max(16, triton.next_power_of_2(rope)) if rope else 1,
    }


def variants(arch: int, op: str, split: bool, block_size: int = 0) -> list[Variant]:
    """Every form of the kernel on ``arch``, for the latents of DeepSeek-V3.2 and GLM-5.

    With ``split``, those that write parts in float32, and the kernel that merges these.
    """
    found = []
    table = PAGED_TILES[arch] if block_size else TILES[arch]
    for dtype, name in _DTYPES.items():
        tiles = [FLOAT32_TILES[arch]] if dtype == torch.float32 else list(table.values())
        result = "fp32" if split else name
        found += [_variant(tile, op, name, result, block_size) for tile in tiles]
        if split:
            found.append(_merge_variant(op, name))
    return found


def _variant(tile: Tile, op: str, dtype: str, result: str, block_size: int) -> Variant:
    pages = ("block_table", "row_request", "lens")
    pointers = dict.fromkeys(("q", "q_pe", "kv", "k_pe"), dtype) | {"out": result, "lse": "fp32"}
    pointers |= dict.fromkeys(("indices", *(pages if block_size else ("ks",))), "i32")
    constexprs: dict[str, object] = {
        **dims(_LATENT_MOST, _ROPE_MOST),
        **dict.fromkeys(("ks",) if block_size else pages),
        "BLOCK_SIZE": block_size,
        "BH": tile.rows,
        "BN": tile.columns,
        "HOIST": tile.hoist,
    }
    return variant(
        f"{op} BH{tile.rows} BN{tile.columns} w{tile.num_warps} s{tile.num_stages} {dtype}"
        + (" split" if dtype != result else ""),
        sparse_kernel,
        pointers,
        constexprs,
        divisible=_STRIDES,
        floats=("scale",),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        matrix=dtype != "fp32",
    )


def _merge_variant(op: str, dtype: str) -> Variant:
    return variant(
        f"{op} merge of {_MOST_SPLITS} w{_MERGE.num_warps} {dtype}",
        combine_kernel,
        {"parts": "fp32", "part_lse": "fp32", "out": dtype, "lse": "fp32"},
        {"WIDTH": _LATENT_MOST, "SPLITS": _MOST_SPLITS, "BLOCK": _MERGE.columns},
        num_warps=_MERGE.num_warps,
        num_stages=_MERGE.num_stages,
    )
