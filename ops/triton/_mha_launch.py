"""Tiles and argument lists that dense and masked attention over expanded keys share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from .. import _options
from ._device import architecture
from ._mha_kernel import mha_kernel
from ._sparse_launch import rows_of
from ._variants import Tile, Variant, variant

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
STRIDES = (
    "q_row",
    "q_head",
    "q_pe_row",
    "q_pe_head",
    "k_row",
    "k_head",
    "k_pe_row",
    "v_row",
    "v_head",
)

# Padded dims of a query and of a value: those of GLM-5 (192 + 64, 256) are wide, those of
# DeepSeek-V3.2 (128 + 64, 128) narrow.
_WIDE, _NARROW = (256, 256), (192, 128)
# Query rows up to which a call takes the first tile of its table.
_FEW_ROWS = 16

TILES: dict[int, dict[tuple[int, int], tuple[Tile, Tile]]] = {
    0: {_WIDE: (Tile(16, 64, 4, 1), Tile(16, 64, 4, 1))},
    80: {
        _NARROW: (Tile(16, 64, 4, 2), Tile(128, 32, 8, 2)),
        _WIDE: (Tile(16, 64, 4, 2), Tile(64, 32, 8, 2)),
    },
    89: {
        _NARROW: (Tile(16, 64, 4, 2), Tile(64, 64, 8, 2)),
        _WIDE: (Tile(16, 32, 4, 2), Tile(64, 32, 8, 2)),
    },
    90: {
        _NARROW: (Tile(16, 64, 4, 2), Tile(128, 64, 8, 2)),
        _WIDE: (Tile(16, 64, 4, 2), Tile(128, 64, 8, 2, hoist=False)),
    },
    100: {
        _NARROW: (Tile(16, 64, 4, 2), Tile(128, 64, 8, 2)),
        _WIDE: (Tile(16, 64, 4, 2), Tile(128, 32, 8, 2)),
    },
    120: {
        _NARROW: (Tile(16, 64, 4, 2), Tile(64, 64, 8, 2)),
        _WIDE: (Tile(16, 32, 4, 2), Tile(64, 32, 8, 2)),
    },
}
"""16-bit tiles by architecture and by the widest query and value: for at most 16 query rows, and
for more. Rows are query tokens of a head, columns keys."""

FLOAT32_TILES: dict[int, Tile] = {
    0: Tile(16, 64, 4, 1),
    **{arch: Tile(16, 32, 16, 1) for arch in (80, 89, 90, 100)},
    120: Tile(16, 32, 8, 1, hoist=False),
}
"""float32 products are exact and leave the matrix units out."""


def refusal(q: Tensor, v: Tensor, q_pe: Tensor | None) -> str | None:
    """Why no tile serves queries ``q`` and values ``v``, or None."""
    arch = architecture(q.device)
    if arch not in TILES:
        return f"no tile for compute capability {arch / 10}"
    if q.dtype not in DTYPES:
        return f"serves float32, bfloat16 and float16, got {str(q.dtype).removeprefix('torch.')}"
    query, value = _padded(q.shape[2], 0 if q_pe is None else q_pe.shape[2], v.shape[2])
    if query > _WIDE[0] or value > _WIDE[1]:
        return (
            f"serves head dims of {_WIDE[0]} and values of {_WIDE[1]} at most, each part rounded"
            f" up to a power of two, got {query} and {value}"
        )
    return None


def tile_for(q: Tensor, v: Tensor, q_pe: Tensor | None) -> Tile:
    """The tile of a call; from shapes, dtype and device alone."""
    arch = architecture(q.device)
    if q.dtype == torch.float32:
        return FLOAT32_TILES[arch]
    widths = _padded(q.shape[2], 0 if q_pe is None else q_pe.shape[2], v.shape[2])
    few, many = next(
        tiles
        for most, tiles in TILES[arch].items()
        if widths[0] <= most[0] and widths[1] <= most[1]
    )
    return few if q.shape[0] <= _FEW_ROWS else many


def row_blocks(tokens: int, tile: Tile, block_bytes: int) -> Iterator[slice]:
    """Slices of rows whose lists and bits fit the workspace, in whole blocks of the tile.

    block_bytes: of one block of rows.
    """
    step = max(1, _options.current().workspace_bytes // block_bytes) * tile.rows
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def attend(
    tile: Tile,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pe: Tensor | None,
    k_pe: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    lists: dict[str, Tensor | None],
) -> None:
    """Write the rows of ``out`` and ``lse`` that the given lists of tiles are for.

    lists: ``starts`` and ``counts``, and either ``ks``, ``ke`` and ``stops`` or ``bits`` and
        ``live``, as ``mha_kernel`` takes them.
    """
    bits, starts = lists["bits"], lists["starts"]
    assert starts is not None
    tokens, heads = q.shape[:2]
    given, compiled = _operands(q, k, v, q_pe, k_pe)
    mha_kernel[(triton.cdiv(tokens, tile.rows), heads)](
        **given,
        **lists,
        out=out,
        lse=lse,
        heads=heads,
        tokens=tokens,
        keys=k.shape[0],
        words=0 if bits is None else bits.shape[1],
        most_tiles=starts.shape[1],
        scale=scale,
        SELECTED=bits is not None,
        **compiled,
        BM=tile.rows,
        BN=tile.columns,
        HOIST=tile.hoist,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _operands(
    q: Tensor, k: Tensor, v: Tensor, q_pe: Tensor | None, k_pe: Tensor | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """The operands and their strides by argument, and their sizes as compile-time arguments."""
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    q_pe = None if q_pe is None else rows_of(q_pe)
    k_pe = None if k_pe is None else rows_of(k_pe)
    q_pe_row, q_pe_head = (0, 0) if q_pe is None else q_pe.stride()[:2]
    strides = (*q.stride()[:2], q_pe_row, q_pe_head, *k.stride()[:2])
    strides += (0 if k_pe is None else k_pe.stride(0), *v.stride()[:2])
    given: dict[str, Tensor | int | None] = {"q": q, "q_pe": q_pe, "k": k, "k_pe": k_pe, "v": v}
    given.update(zip(STRIDES, strides, strict=True))
    return given, sizes(q.shape[2], 0 if q_pe is None else q_pe.shape[2], v.shape[2])


def sizes(nope: int, rope: int, value: int) -> dict[str, int]:
    """The compile-time sizes; a query that is no power of two is read in two parts."""
    low, high = _halves(nope)
    return {
        "NOPE": nope,
        "LOW": low,
        "HIGH": high,
        "ROPE": rope,
        "ROPE_PAD": _pad(rope) if rope else 1,
        "VALUE": value,
        "VALUE_PAD": _pad(value),
    }


def variants(arch: int, op: str, selected: bool) -> list[Variant]:
    """Every form of the kernel on ``arch``: rotated parts apart, as models call it."""
    found = []
    for (query, value), tiles in TILES[arch].items():
        for name in ("bf16", "fp16"):
            found += [form(op, selected, name, tile, query - 64, value) for tile in tiles]
    query, value = _WIDE
    found.append(form(op, selected, "fp32", FLOAT32_TILES[arch], query - 64, value))
    return found


def shapes(arch: int) -> list[tuple[int, int]]:
    """Rows and columns of all tiles of ``arch``, for which lists are made."""
    tiles = [FLOAT32_TILES[arch], *(tile for pair in TILES[arch].values() for tile in pair)]
    return sorted({(tile.rows, tile.columns) for tile in tiles})


def form(op: str, selected: bool, dtype: str, tile: Tile, nope: int, value: int) -> Variant:
    """One form: queries of ``nope`` dims and 64 rotated ones."""
    intervals, selection = ("ks", "ke", "stops"), ("bits", "live")
    lists = (*(selection if selected else intervals), "starts", "counts")
    pointers = dict.fromkeys(("q", "q_pe", "k", "k_pe", "v", "out"), dtype) | {"lse": "fp32"}
    pointers |= dict.fromkeys(lists, "i32")
    constexprs: dict[str, object] = {
        **dict.fromkeys(intervals if selected else selection),
        "SELECTED": selected,
        **sizes(nope, 64, value),
        "BM": tile.rows,
        "BN": tile.columns,
        "HOIST": tile.hoist,
    }
    return variant(
        f"{op} {nope}+64/{value} BM{tile.rows} BN{tile.columns} w{tile.num_warps}"
        f" s{tile.num_stages} {dtype}",
        mha_kernel,
        pointers,
        constexprs,
        divisible=STRIDES,
        floats=("scale",),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        matrix=dtype != "fp32",
    )


def _padded(nope: int, rope: int, value: int) -> tuple[int, int]:
    """Dims of a query and of a value as a program holds them."""
    return sum(_halves(nope)) + (_pad(rope) if rope else 0), _pad(value)


def _halves(nope: int) -> tuple[int, int]:
    """A power of two, and what is left rounded up to one, which may be 0."""
    whole = _pad(nope)
    if whole == nope or whole <= 32:
        return whole, 0
    return whole // 2, _pad(nope - whole // 2)


def _pad(size: int) -> int:
    # The matrix units take no fewer dims.
    return max(16, int(triton.next_power_of_2(size)))
