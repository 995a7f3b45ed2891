"""Exact selection of each row: a radix search for its K-th key, then one pass.

Scores become integers of the same order, so that equal keys are equal scores and ties are exact.
Digits of the K-th key are found from the highest down by counting the keys that share the digits
known so far; then a pass over the row takes what lies above it, and of the keys that equal it the
first ones, in the order of their positions (contract C8, C10).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _radix_split
from ._device import ARCHITECTURES, INTERPRETER, architecture
from ._radix import digit_counts, digit_of, row_of, store_short, store_taken, visible_at
from ._variants import Variant, variant


class SelectTile(NamedTuple):
    """How rows are selected.

    lanes: scores of one step. bits: of a digit; a step counts ``2**bits`` kinds of it.
    split: rows of more scores are given to several programs each, if the rows are few.
    """

    lanes: int
    bits: int
    num_warps: int
    split: int


# A digit costs votes of a warp that grow with its bits, and bit counts that grow with their power.
_TILES: dict[int, SelectTile] = {
    INTERPRETER: SelectTile(1024, 8, 4, 2048),
    **{arch: SelectTile(4096, 6, 16, 32768) for arch in ARCHITECTURES},
}
_COUNT_LANES = 1024
# What differs from call to call and is not worth a compiled form of its own.
_PLAIN = ("keys", "width", "topk")


@triton.jit
def _kth_key(
    scores,
    mask,
    length,
    topk,
    score_column,
    mask_column,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The highest digits of the K-th key, which bits they are, and how many equal ones to take.

    Stops where all keys with these digits are taken.
    """
    shift = 32
    need = topk
    prefix = 0
    known = 0
    while shift > 0:
        step = tl.minimum(shift, BITS)
        shift -= step
        digits = (1 << step) - 1
        counts = digit_counts(
            scores, mask, 0, length, score_column, mask_column, prefix, known, shift, digits,
            BITS, BLOCK,
        )  # fmt: skip
        digit, need, equal = digit_of(counts, need, BITS)
        prefix |= digit << shift
        known |= digits << shift
        shift = tl.where(equal == need, 0, shift)
    return prefix, known, need


@triton.jit(do_not_specialize=list(_PLAIN))
def _select_kernel(
    indices,
    scores,
    ks,
    ke,
    mask,
    counts,
    keys,
    width,
    topk,
    score_row,
    score_column,
    mask_row,
    mask_column,
    ABSOLUTE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row. Scores lie in the column of the packed key if ABSOLUTE, else of the position.

    Without ``scores`` every row sees at most ``topk`` keys.
    """
    row = tl.program_id(0).to(tl.int64)
    start, length, count = row_of(ks, ke, counts, row, keys, width)
    shown = mask if mask is None else mask + row * mask_row + start.to(tl.int64) * mask_column
    out = indices + row * topk
    if count <= topk:
        store_short(out, shown, length, count, topk, mask_column, BLOCK)
    elif scores is not None:
        line = scores + row * score_row
        if ABSOLUTE:
            line += start.to(tl.int64) * score_column
        prefix, known, need = _kth_key(
            line, shown, length, topk, score_column, mask_column, BITS, BLOCK
        )
        none = tl.full((), 0, tl.int32)
        store_taken(
            out, line, shown, 0, length, none, none, score_column, mask_column,
            prefix, known, need, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["keys"])
def _count_kernel(counts, ks, ke, mask, keys, mask_row, mask_column, BLOCK: tl.constexpr):
    """How many keys one row sees in its interval."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.maximum(tl.load(ks + row), 0)
    length = tl.minimum(tl.load(ke + row), keys) - start
    shown = mask + row * mask_row + start.to(tl.int64) * mask_column
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, length, BLOCK):
        position = first + tl.arange(0, BLOCK)
        count += visible_at(shown, position, length, mask_column).to(tl.int32)
    tl.store(counts + row, tl.sum(count, axis=0))


def visible_counts(ks: Tensor, ke: Tensor, mask: Tensor) -> Tensor:
    """[T] int32: how many keys each row sees in its interval under a mask [T, S]."""
    counts = torch.empty_like(ks)
    if ks.shape[0]:
        _count_kernel[(ks.shape[0],)](
            counts,
            ks,
            ke,
            mask.view(torch.uint8),
            mask.shape[1],
            *mask.stride(),
            BLOCK=_COUNT_LANES,
        )
    return counts


def select_rows(
    indices: Tensor,
    scores: Tensor | None,
    ks: Tensor,
    ke: Tensor,
    keys: int,
    width: int,
    mask: Tensor | None = None,
    counts: Tensor | None = None,
    absolute: bool = False,
) -> None:
    """Fill ``indices`` with the selection of each row; scores of short rows are not read.

    Args:
        indices: [T, K] int32, contiguous.
        scores: [T, at least width] float32; column = packed key if ``absolute``, else the position
            in the row's interval. None where no row sees more than K keys.
        ks, ke: [T] int32, contiguous.
        keys: how many packed keys there are.
        width: host upper bound on ``ke - ks``.
        mask: [T, S] bool, with ``counts`` from ``visible_counts``.
    """
    rows = indices.shape[0]
    if rows == 0:
        return
    tile = _TILES[architecture(indices.device)]
    args = (
        indices,
        scores,
        ks,
        ke,
        None if mask is None else mask.view(torch.uint8),
        counts,
        keys,
        width,
        indices.shape[1],
        *((0, 1) if scores is None else scores.stride()),
        *((0, 1) if mask is None else mask.stride()),
    )
    parts = _radix_split.parts(rows, width) if scores is not None and width > tile.split else 1
    if parts > 1:
        _radix_split.select(args, rows, parts, width, absolute)
    else:
        _select_kernel[(rows,)](
            *args, ABSOLUTE=absolute, BITS=tile.bits, BLOCK=tile.lanes, num_warps=tile.num_warps
        )


def refusal(tensor: Tensor) -> str | None:
    """Why the device of ``tensor`` has no selection kernel, or None."""
    arch = architecture(tensor.device)
    return None if arch in _TILES else f"no tile for compute capability {arch / 10}"


def variants(arch: int) -> list[Variant]:
    """With and without a mask: a column for each key, for each position, and no scores."""
    lanes, bits, num_warps, _ = _TILES[arch]
    sizes = {"BITS": bits, "BLOCK": lanes}
    name = f"BLOCK{lanes} BITS{bits}"
    found = [
        _radix_split.select_variant(name, _select_kernel, sizes, num_warps, columns, masked)
        for masked in (False, True)
        for columns in ("key", "position", "none")
    ]
    count = variant(
        f"visible_counts BLOCK{_COUNT_LANES} w4",
        _count_kernel,
        {"counts": "i32", "ks": "i32", "ke": "i32", "mask": "u8"},
        {"mask_column": 1, "BLOCK": _COUNT_LANES},
        num_warps=4,
        num_stages=1,
    )
    return [*found, count, *_radix_split.variants(arch)]
