"""What the selection kernels share: scores as integers, one digit of a search, what a row takes."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2147483648)


@triton.jit
def ordered_keys(scores):
    """int32 of the order of float32 ``scores``: -0.0 equals 0.0, and NaN is below -inf."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits == LOWEST, 0, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, LOWEST, ordered)


@triton.jit
def visible_at(mask, position, end, mask_column):
    """Which of the positions before ``end`` a row sees; ``mask`` is at its first key, or None."""
    visible = position < end
    if mask is not None:
        at = mask + position.to(tl.int64) * mask_column
        visible = visible & (tl.load(at, mask=visible, other=0) != 0)
    return visible


@triton.jit
def row_of(ks, ke, counts, row, keys, width):
    """Start, length and visible keys of a row."""
    start = tl.maximum(tl.load(ks + row), 0)
    length = tl.minimum(tl.minimum(tl.load(ke + row), keys) - start, width)
    count = length if counts is None else tl.load(counts + row)
    return start, length, count


@triton.jit
def keys_at(scores, mask, position, end, score_column, mask_column):
    """Keys of some positions, whose bits order them as unsigned numbers, and which are visible."""
    visible = visible_at(mask, position, end, mask_column)
    at = scores + position.to(tl.int64) * score_column
    return ordered_keys(tl.load(at, mask=visible, other=0.0)) ^ LOWEST, visible


@triton.jit
def digit_counts(
    scores,
    mask,
    begin,
    end,
    score_column,
    mask_column,
    prefix,
    known,
    shift,
    digits,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many visible keys with this prefix have each next digit."""
    counts = tl.zeros((1 << BITS,), tl.int32)
    for first in range(begin, end, BLOCK):
        position = first + tl.arange(0, BLOCK)
        key, visible = keys_at(scores, mask, position, end, score_column, mask_column)
        same = visible & ((key & known) == prefix)
        counts += tl.histogram((key >> shift) & digits, 1 << BITS, mask=same)
    return counts


@triton.jit
def digit_of(counts, need, BITS: tl.constexpr):
    """The digit of the ``need``-th highest key, how many it needs of it, and how many there are."""
    kind = tl.arange(0, 1 << BITS)
    reached = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    digit = tl.sum((reached >= need).to(tl.int32), axis=0) - 1
    need -= tl.sum(tl.where(kind > digit, counts, 0), axis=0)
    return digit, need, tl.sum(tl.where(kind == digit, counts, 0), axis=0)


@triton.jit
def taken_of(key, visible, prefix, known):
    """Which keys lie above the digits found, and which equal them."""
    digits = key & known
    higher = visible & ((digits ^ LOWEST) > (prefix ^ LOWEST))
    return higher, visible & (digits == prefix)


@triton.jit
def store_taken(
    out,
    scores,
    mask,
    begin,
    end,
    above,
    equal,
    score_column,
    mask_column,
    prefix,
    known,
    need,
    BLOCK: tl.constexpr,
):
    """Store, in order, the positions above the digits found and the first ``need`` of equal ones.

    above, equal: how many of each kind lie before ``begin``.
    """
    for first in range(begin, end, BLOCK):
        position = first + tl.arange(0, BLOCK)
        key, visible = keys_at(scores, mask, position, end, score_column, mask_column)
        higher, same = taken_of(key, visible, prefix, known)
        # Both counts in one number, since a step has fewer lanes than half of it holds.
        step = higher.to(tl.int32) + (same.to(tl.int32) << 16)
        through = tl.cumsum(step, axis=0)
        nth = equal + (through >> 16)
        slot = above + (through & 0xFFFF) + tl.minimum(nth, need) - 1
        tl.store(out + slot, position, mask=higher | (same & (nth <= need)))
        total = tl.sum(step, axis=0)
        above += total & 0xFFFF
        equal += total >> 16


@triton.jit
def store_short(out, mask, length, count, topk, mask_column, BLOCK: tl.constexpr):
    """Store all ``count`` visible positions of a row that sees at most ``topk``, then -1."""
    lane = tl.arange(0, BLOCK)
    if mask is not None:
        taken = 0
        for first in range(0, length, BLOCK):
            visible = visible_at(mask, first + lane, length, mask_column)
            step = visible.to(tl.int32)
            slot = taken + tl.cumsum(step, axis=0) - 1
            tl.store(out + slot, first + lane, mask=visible & (slot < topk))
            taken += tl.sum(step, axis=0)
    for first in range(0, topk, BLOCK):
        slot = first + lane
        if mask is None:
            tl.store(out + slot, tl.where(slot < count, slot, -1), mask=slot < topk)
        else:
            none = tl.full((BLOCK,), -1, tl.int32)
            tl.store(out + slot, none, mask=(slot >= count) & (slot < topk))
