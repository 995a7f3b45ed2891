"""Which tiles of keys a block of query rows attends to, found out on the device."""

from __future__ import annotations

import triton
import triton.language as tl

_BEYOND = tl.constexpr(2147483647)
# Tiles of a run of keys that are written at once.
_AT_ONCE = tl.constexpr(64)


@triton.jit(do_not_specialize=["tokens", "keys", "most_tiles"])
def interval_tiles_kernel(
    ks, ke, starts, stops, counts, tokens, keys, most_tiles, BM: tl.constexpr, BN: tl.constexpr
):
    """Cut each run of keys that the rows of a block see into tiles ``starts .. stops``.

    Every key of a tile is seen by some row. At most ``keys / BN`` tiles, and one more for each row.
    """
    block = tl.program_id(0).to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    first = tl.maximum(tl.load(ks + row, mask=row < tokens, other=0), 0)
    last = tl.minimum(tl.load(ke + row, mask=row < tokens, other=0), keys)
    sees = first < last
    lane = tl.arange(0, _AT_ONCE)
    at = block * most_tiles
    count = 0
    start = tl.min(tl.where(sees, first, _BEYOND))
    while start < _BEYOND:
        stop = start
        reach = tl.max(tl.where(sees & (first <= start), last, 0))
        while reach > stop:
            stop = reach
            reach = tl.max(tl.where(sees & (first <= stop), last, 0))
        tiles = tl.cdiv(stop - start, BN)
        for written in range(0, tiles, _AT_ONCE):
            tile = written + lane
            key = start + tile * BN
            tl.store(starts + at + count + tile, key, mask=tile < tiles)
            tl.store(stops + at + count + tile, tl.minimum(key + BN, stop), mask=tile < tiles)
        count += tiles
        start = tl.min(tl.where(sees & (first > stop), first, _BEYOND))
    tl.store(counts + block, count)


@triton.jit(do_not_specialize=["keys", "lanes", "words"])
def mark_kernel(indices, ks, ke, bits, keys, lanes, words, index_row, BLOCK: tl.constexpr):
    """Set the bits of the visible positions of a row; the grid is (T, groups of BLOCK lanes)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(ks + row)
    last = tl.minimum(tl.load(ke + row), keys)
    position = tl.load(indices + row * index_row + lane, mask=lane < lanes, other=-1)
    key = first + position
    visible = (position >= 0) & (key >= 0) & (key < last)
    bit = tl.full((BLOCK,), 1, tl.int32) << (key & 31)
    tl.atomic_or(bits + row * words + key // 32, bit, mask=visible, sem="relaxed")


@triton.jit
def _either(left, right):
    return left | right


@triton.jit(do_not_specialize=["tokens", "words", "most_tiles"])
def selected_tiles_kernel(
    bits,
    live,
    starts,
    counts,
    tokens,
    words,
    most_tiles,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The bits of all rows of a block together, and the starts of its tiles that have a bit."""
    block = tl.program_id(0).to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    count = 0
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        at = bits + row[:, None] * words + word[None, :]
        held = (row < tokens)[:, None] & (word < words)[None, :]
        alive = tl.reduce(tl.load(at, mask=held, other=0), 0, _either)
        tl.store(live + block * words + word, alive, mask=word < words)
        used = (alive != 0).to(tl.int32).reshape(WORDS * 32 // BN, BN // 32)
        used = tl.max(used, axis=1)
        place = block * most_tiles + count + tl.cumsum(used, axis=0) - 1
        key = first * 32 + tl.arange(0, WORDS * 32 // BN) * BN
        tl.store(starts + place, key, mask=used > 0)
        count += tl.sum(used, axis=0)
    tl.store(counts + block, count)
