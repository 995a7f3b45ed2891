"""The same selection with several programs a row, for few rows of many scores.

A launch cannot wait for all programs of a row, so each digit is a launch of its own: it counts its
part of every row and adds that to the row's counts of this digit, from which the next launch reads
what is known so far. Two more count what each part takes, and store it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ._radix import digit_counts, digit_of, keys_at, row_of, store_short, store_taken, taken_of
from ._variants import Variant, variant

# Programs that fill a device several times over.
_PROGRAMS = 512
_LEAST_PART = 4096
_LANES = 1024
_WARPS = 4
_BITS = 8
_PASSES = 32 // _BITS
_KINDS = 1 << _BITS
# Parts whose counts a program reads at once.
_MOST_PARTS = _PROGRAMS
_PLAIN = ("keys", "width", "topk", "span", "passes")


@triton.jit
def _digits_known(counts, topk, passes, BITS: tl.constexpr):
    """The digits of the K-th key that ``passes`` launches have counted; see ``_kth_key``."""
    need = topk
    prefix = 0
    known = 0
    for number in range(0, passes):
        shift = 32 - BITS * (number + 1)
        found = tl.load(counts + (number << BITS) + tl.arange(0, 1 << BITS))
        digit, need, _ = digit_of(found, need, BITS)
        prefix |= digit << shift
        known |= ((1 << BITS) - 1) << shift
    return prefix, known, need


@triton.jit(do_not_specialize=list(_PLAIN))
def _digit_kernel(
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
    digits,
    tallies,
    span,
    passes,
    ABSOLUTE: tl.constexpr,
    BITS: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the digit number ``passes`` in one part of a row."""
    row = tl.program_id(0).to(tl.int64)
    start, length, count = row_of(ks, ke, counts, row, keys, width)
    shown = mask if mask is None else mask + row * mask_row + start.to(tl.int64) * mask_column
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, length)
    if (count > topk) & (begin < end):
        line = scores + row * score_row
        if ABSOLUTE:
            line += start.to(tl.int64) * score_column
        table = digits + row * (PASSES << BITS)
        prefix, known, _ = _digits_known(table, topk, passes, BITS)
        found = digit_counts(
            line, shown, begin, end, score_column, mask_column, prefix, known,
            32 - BITS * (passes + 1), (1 << BITS) - 1, BITS, BLOCK,
        )  # fmt: skip
        tl.atomic_add(table + (passes << BITS) + tl.arange(0, 1 << BITS), found, mask=found > 0)


@triton.jit(do_not_specialize=list(_PLAIN))
def _tally_kernel(
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
    digits,
    tallies,
    span,
    passes,
    ABSOLUTE: tl.constexpr,
    BITS: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count what one part of a row has above the K-th key, and what equals it."""
    row = tl.program_id(0).to(tl.int64)
    start, length, count = row_of(ks, ke, counts, row, keys, width)
    shown = mask if mask is None else mask + row * mask_row + start.to(tl.int64) * mask_column
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, length)
    if (count > topk) & (begin < end):
        line = scores + row * score_row
        if ABSOLUTE:
            line += start.to(tl.int64) * score_column
        prefix, known, _ = _digits_known(digits + row * (PASSES << BITS), topk, passes, BITS)
        above = tl.zeros((BLOCK,), tl.int32)
        equal = tl.zeros((BLOCK,), tl.int32)
        for first in range(begin, end, BLOCK):
            position = first + tl.arange(0, BLOCK)
            key, visible = keys_at(line, shown, position, end, score_column, mask_column)
            higher, same = taken_of(key, visible, prefix, known)
            above += higher.to(tl.int32)
            equal += same.to(tl.int32)
        tally = tallies + (row * tl.num_programs(1) + tl.program_id(1)) * 2
        tl.store(tally, tl.sum(above, axis=0))
        tl.store(tally + 1, tl.sum(equal, axis=0))


@triton.jit(do_not_specialize=list(_PLAIN))
def _store_kernel(
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
    digits,
    tallies,
    span,
    passes,
    ABSOLUTE: tl.constexpr,
    BITS: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store what one part of a row takes, behind what the parts before it take."""
    row = tl.program_id(0).to(tl.int64)
    start, length, count = row_of(ks, ke, counts, row, keys, width)
    shown = mask if mask is None else mask + row * mask_row + start.to(tl.int64) * mask_column
    out = indices + row * topk
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, length)
    if count <= topk:
        if tl.program_id(1) == 0:
            store_short(out, shown, length, count, topk, mask_column, BLOCK)
    elif begin < end:
        line = scores + row * score_row
        if ABSOLUTE:
            line += start.to(tl.int64) * score_column
        prefix, known, need = _digits_known(digits + row * (PASSES << BITS), topk, passes, BITS)
        part = tl.arange(0, PARTS)
        before = part < tl.program_id(1)
        tally = tallies + (row * tl.num_programs(1) + part) * 2
        above = tl.sum(tl.load(tally, mask=before, other=0), axis=0)
        equal = tl.sum(tl.load(tally + 1, mask=before, other=0), axis=0)
        store_taken(
            out, line, shown, begin, end, above, equal, score_column, mask_column,
            prefix, known, need, BLOCK,
        )  # fmt: skip


def parts(rows: int, width: int) -> int:
    """How many programs share a row of ``width`` scores: enough of them to fill the device."""
    useful: int = triton.cdiv(width, _LEAST_PART)
    return max(1, min(useful, _PROGRAMS // rows))


def select(args: tuple[Any, ...], rows: int, parts: int, width: int, absolute: bool) -> None:
    """Launch the selection of ``rows`` rows; ``args`` are those of ``radix_select``'s kernel."""
    indices = args[0]
    span = triton.cdiv(triton.cdiv(width, parts), _LANES) * _LANES
    digits = indices.new_zeros((rows, _PASSES, _KINDS))
    tallies = indices.new_empty((rows, parts, 2))
    sizes = {"ABSOLUTE": absolute, "BITS": _BITS, "PASSES": _PASSES, "BLOCK": _LANES}
    grid = (rows, parts)
    for done in range(_PASSES):
        _digit_kernel[grid](*args, digits, tallies, span, done, **sizes, num_warps=_WARPS)
    known = (*args, digits, tallies, span, _PASSES)
    _tally_kernel[grid](*known, **sizes, num_warps=_WARPS)
    _store_kernel[grid](*known, **sizes, PARTS=_MOST_PARTS, num_warps=_WARPS)


def variants(arch: int) -> list[Variant]:
    """The three kernels, with and without a mask, for given scores and scores by position."""
    sizes = {"BITS": _BITS, "PASSES": _PASSES, "BLOCK": _LANES}
    kernels = {
        "digit": (_digit_kernel, sizes),
        "tally": (_tally_kernel, sizes),
        "store": (_store_kernel, {**sizes, "PARTS": _MOST_PARTS}),
    }
    return [
        select_variant(f"split {name} BLOCK{_LANES}", kernel, constants, _WARPS, columns, masked)
        for name, (kernel, constants) in kernels.items()
        for masked in (False, True)
        for columns in ("key", "position")
    ]


def select_variant(
    name: str, kernel: Any, sizes: dict[str, int], num_warps: int, columns: str, masked: bool
) -> Variant:
    """A selection kernel for scores whose columns are each a "key" or "position", or "none"."""
    fixed: dict[str, object] = {"score_column": 1, "mask_column": 1, **sizes}
    fixed["ABSOLUTE"] = columns == "key"
    pointers = {"indices": "i32", "scores": "fp32", "ks": "i32", "ke": "i32"}
    pointers |= {"mask": "u8", "counts": "i32", "digits": "i32", "tallies": "i32"}
    absent = [] if masked else ["mask", "counts"]
    if columns == "none":
        absent.append("scores")
    fixed |= dict.fromkeys(absent, None)
    return variant(
        f"select_topk {columns} {name} w{num_warps}" + (" mask" if masked else ""),
        kernel,
        {
            each: element
            for each, element in pointers.items()
            if each in kernel.arg_names and each not in absent
        },
        fixed,
        num_warps=num_warps,
        num_stages=1,
    )
