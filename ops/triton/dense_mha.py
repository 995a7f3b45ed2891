"""``dense_mha``: flash attention over the tiles of keys that the rows of a block see."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .._blocks import check_interval_values
from ..causal_positions import require_premise
from . import _mha_launch
from ._mha_tiles import interval_tiles_kernel
from ._variants import Tile, Variant, variant

_NUM_WARPS = 4


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    scale: float,
    bound: int | None = None,
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
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    scale: float,
    bound: int | None = None,
    return_lse: bool = True,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``dense_mha``; keys that no row of a block sees are neither read nor computed."""
    require_premise(max_kv_len, bound)
    check_interval_values(ks, ke, k.shape[0], max_kv_len)
    tokens, heads = q.shape[:2]
    out = q.new_empty((tokens, heads, v.shape[2]))
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    if tokens and heads:
        tile = _mha_launch.tile_for(q, v, q_pe)
        # Every row of a block may add one tile that is not full.
        most_tiles = triton.cdiv(k.shape[0], tile.columns) + tile.rows
        ks, ke = ks.contiguous(), ke.contiguous()
        for rows in _mha_launch.row_blocks(tokens, tile, 4 * (2 * most_tiles + 1)):
            lists = _interval_tiles(ks[rows], ke[rows], k.shape[0], tile, most_tiles)
            rotated = None if q_pe is None else q_pe[rows]
            _mha_launch.attend(
                tile, q[rows], k, v, rotated, k_pe, out[rows], lse[rows], scale, lists
            )
    return out, lse if return_lse else lse.new_empty(0)


def _interval_tiles(
    ks: Tensor, ke: Tensor, keys: int, tile: Tile, most_tiles: int
) -> dict[str, Tensor | None]:
    blocks = triton.cdiv(ks.shape[0], tile.rows)
    starts, stops = ks.new_empty((blocks, most_tiles)), ks.new_empty((blocks, most_tiles))
    counts = ks.new_empty(blocks)
    interval_tiles_kernel[(blocks,)](
        ks,
        ke,
        starts,
        stops,
        counts,
        ks.shape[0],
        keys,
        most_tiles,
        BM=tile.rows,
        BN=tile.columns,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
    lists: dict[str, Tensor | None] = {"bits": None, "live": None, "ks": ks, "ke": ke}
    return lists | {"starts": starts, "stops": stops, "counts": counts}


def variants(arch: int) -> list[Variant]:
    """Every form that is launched on ``arch`` for the dims of DeepSeek-V3.2 and GLM-5."""
    found = _mha_launch.variants(arch, "dense_mha", selected=False)
    found += [
        variant(
            f"dense_mha tiles BM{rows} BN{columns} w{_NUM_WARPS}",
            interval_tiles_kernel,
            dict.fromkeys(("ks", "ke", "starts", "stops", "counts"), "i32"),
            {"BM": rows, "BN": columns},
            num_warps=_NUM_WARPS,
            num_stages=1,
        )
        for rows, columns in _mha_launch.shapes(arch)
    ]
    return found
