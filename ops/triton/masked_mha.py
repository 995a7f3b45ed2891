"""``masked_mha``: one bit for each row and key, then flash attention over the tiles in use."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .._blocks import check_interval_values
from . import _mha_launch
from ._mha_tiles import mark_kernel, selected_tiles_kernel
from ._sparse_launch import rows_of
from ._variants import Tile, Variant, variant

_MARK_LANES, _LIST_WORDS, _NUM_WARPS = 1024, 32, 4
"""Lanes of a program that sets bits; words of a step of the program that lists tiles."""


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    return_lse: bool = True,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> str | None:
    """None unless queries are float64, or wider than the tiles."""
    return _mha_launch.refusal(q, v, q_pe)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    return_lse: bool = True,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``masked_mha`` in blocks of rows whose bits fit the workspace; three launches each."""
    check_interval_values(ks, ke, k.shape[0])
    tokens, heads, keys = q.shape[0], q.shape[1], k.shape[0]
    out = q.new_empty((tokens, heads, v.shape[2]))
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    if tokens and heads:
        tile = _mha_launch.tile_for(q, v, q_pe)
        most_tiles = max(1, triton.cdiv(keys, tile.columns))
        words = most_tiles * tile.columns // 32
        indices, ks, ke = rows_of(indices), ks.contiguous(), ke.contiguous()
        # The bits of its rows and of all together, the list of tiles and its length.
        block_bytes = 4 * (words * (tile.rows + 1) + most_tiles + 1)
        for rows in _mha_launch.row_blocks(tokens, tile, block_bytes):
            lists = _selected_tiles(indices[rows], ks[rows], ke[rows], keys, tile, most_tiles)
            rotated = None if q_pe is None else q_pe[rows]
            _mha_launch.attend(
                tile, q[rows], k, v, rotated, k_pe, out[rows], lse[rows], scale, lists
            )
    return out, lse if return_lse else lse.new_empty(0)


def _selected_tiles(
    indices: Tensor, ks: Tensor, ke: Tensor, keys: int, tile: Tile, most_tiles: int
) -> dict[str, Tensor | None]:
    (tokens, lanes), words = indices.shape, most_tiles * tile.columns // 32
    blocks = triton.cdiv(tokens, tile.rows)
    bits = indices.new_zeros((tokens, words))
    if lanes:
        mark_kernel[(tokens, triton.cdiv(lanes, _MARK_LANES))](
            indices,
            ks,
            ke,
            bits,
            keys,
            lanes,
            words,
            indices.stride(0),
            BLOCK=_MARK_LANES,
            num_warps=_NUM_WARPS,
            num_stages=1,
        )
    live = bits.new_empty((blocks, words))
    starts, counts = bits.new_empty((blocks, most_tiles)), bits.new_empty(blocks)
    selected_tiles_kernel[(blocks,)](
        bits,
        live,
        starts,
        counts,
        tokens,
        words,
        most_tiles,
        BM=tile.rows,
        BN=tile.columns,
        WORDS=_LIST_WORDS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
    lists: dict[str, Tensor | None] = {"bits": bits, "live": live, "ks": None, "ke": None}
    return lists | {"starts": starts, "stops": None, "counts": counts}


def variants(arch: int) -> list[Variant]:
    """Every form that is launched on ``arch`` for the dims of DeepSeek-V3.2 and GLM-5."""
    found = _mha_launch.variants(arch, "masked_mha", selected=True)
    found += [
        variant(
            f"masked_mha tiles BM{rows} BN{columns} w{_NUM_WARPS}",
            selected_tiles_kernel,
            dict.fromkeys(("bits", "live", "starts", "counts"), "i32"),
            {"BM": rows, "BN": columns, "WORDS": _LIST_WORDS},
            num_warps=_NUM_WARPS,
            num_stages=1,
        )
        for rows, columns in _mha_launch.shapes(arch)
    ]
    marks = variant(
        f"masked_mha mark w{_NUM_WARPS}",
        mark_kernel,
        dict.fromkeys(("indices", "ks", "ke", "bits"), "i32"),
        {"BLOCK": _MARK_LANES},
        divisible=("index_row",),
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
    return [*found, marks]
