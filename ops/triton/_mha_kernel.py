"""Flash attention over expanded keys: one program for a block of query rows and a head.

A program walks the list of key tiles that ``_mha_tiles`` made for its block of rows, so that keys
which none of them attends to cost nothing, in one loop. Which row attends to which key of a tile is
told by the intervals of the rows, or by one bit for each row and key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._uniform import uniform

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# The maximum before the first key: finite, because -inf less -inf is NaN.
_NO_KEY = tl.constexpr(-1e38)


@triton.jit
def _part(base, row_offset, dim, held, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """[rows, dims] of one operand; ``held`` [rows] and the width mask what is not there."""
    at = base + row_offset[:, None] + dim[None, :]
    if WIDTH == PAD:
        return tl.load(at, mask=held[:, None], other=0.0)
    return tl.load(at, mask=held[:, None] & (dim < WIDTH)[None, :], other=0.0)


@triton.jit
def _queries(
    q,
    q_pe,
    q_row,
    q_pe_row,
    row,
    tokens,
    NOPE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
):
    """The queries of a block in three parts: the first LOW dims, the next HIGH, the rotated."""
    held = row < tokens
    at = row.to(tl.int64)
    low = _part(q, at * q_row, tl.arange(0, LOW), held, NOPE, LOW)
    high = low
    if HIGH > 0:
        high = _part(q + LOW, at * q_row, tl.arange(0, HIGH), held, NOPE - LOW, HIGH)
    rotated = low
    if ROPE > 0:
        rotated = _part(q_pe, at * q_pe_row, tl.arange(0, ROPE_PAD), held, ROPE, ROPE_PAD)
    return low, high, rotated


@triton.jit
def _attend_tile(
    top,
    total,
    acc,
    low,
    high,
    rotated,
    k,
    k_pe,
    v,
    k_row,
    k_pe_row,
    v_row,
    key,
    held,
    visible,
    scale2,
    NOPE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """One step of the online softmax, in base 2, over the keys ``key`` [BN].

    A key that is not ``held`` is not read: what lies there may be NaN, which survives a weight of
    0. ``visible`` [BM, BN] says which row attends to which key.
    """
    at = key.to(tl.int64)
    keys = _part(k, at * k_row, tl.arange(0, LOW), held, NOPE, LOW)
    scores = tl.dot(low, tl.trans(keys), input_precision="ieee")
    if HIGH > 0:
        more = _part(k + LOW, at * k_row, tl.arange(0, HIGH), held, NOPE - LOW, HIGH)
        scores = tl.dot(high, tl.trans(more), scores, input_precision="ieee")
    if ROPE > 0:
        shared = _part(k_pe, at * k_pe_row, tl.arange(0, ROPE_PAD), held, ROPE, ROPE_PAD)
        scores = tl.dot(rotated, tl.trans(shared), scores, input_precision="ieee")
    scores = tl.where(visible, scores * scale2, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weight = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    values = _part(v, at * v_row, tl.arange(0, VALUE_PAD), held, VALUE, VALUE_PAD)
    acc = acc * fade[:, None]
    acc = tl.dot(weight.to(low.dtype), values, acc, input_precision="ieee")
    return higher, total * fade + tl.sum(weight, axis=1), acc


@triton.jit
def _finish(
    top,
    total,
    acc,
    out,
    lse,
    row,
    head,
    heads,
    tokens,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """Write the rows of a block: 0 and -inf for one that attends to nothing."""
    held = row < tokens
    sees = total != 0.0
    dim = tl.arange(0, VALUE_PAD)
    at = row.to(tl.int64) * heads + head
    result = tl.where(sees[:, None], acc / tl.where(sees, total, 1.0)[:, None], 0.0)
    to = out + at[:, None] * VALUE + dim[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=held[:, None] & (dim < VALUE)[None, :])
    logsum = tl.where(sees, top * _LN_2 + tl.log(tl.where(sees, total, 1.0)), float("-inf"))
    tl.store(lse + at, logsum, mask=held)


@triton.jit(do_not_specialize=["heads", "tokens", "keys", "words", "most_tiles"])
def mha_kernel(
    q,
    q_pe,
    k,
    k_pe,
    v,
    ks,
    ke,
    bits,
    live,
    starts,
    stops,
    counts,
    out,
    lse,
    heads,
    tokens,
    keys,
    words,
    most_tiles,
    q_row,
    q_head,
    q_pe_row,
    q_pe_head,
    k_row,
    k_head,
    k_pe_row,
    v_row,
    v_head,
    scale,
    SELECTED: tl.constexpr,
    NOPE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HOIST: tl.constexpr,
):
    """out [T, N, VALUE] and lse [T, N]; the grid is (blocks of BM rows, N).

    For each block of rows, starts [most_tiles] holds the first keys of its ``counts`` tiles. With
    SELECTED, bits [T, words] holds key ``32 * w + b`` of a row as bit b of word w, and live [words]
    those of all rows of the block; else a tile ends at ``stops`` and rows see ``ks .. ke``.
    """
    # The last rows of a causal prompt see the most keys, and start first.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    block = number.to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = number * BM + tl.arange(0, BM)
    held = row < tokens
    if SELECTED:
        bits_at = bits + row.to(tl.int64) * words
    else:
        first = tl.load(ks + row, mask=held, other=0)
        last = tl.minimum(tl.load(ke + row, mask=held, other=0), keys)
    q += head * q_head
    k += head * k_head
    v += head * v_head
    if ROPE > 0:
        q_pe += head * q_pe_head
    low, high, rotated = _queries(
        q, q_pe, q_row, q_pe_row, row, tokens, NOPE, LOW, HIGH, ROPE, ROPE_PAD
    )
    top = tl.full((BM,), _NO_KEY, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, VALUE_PAD), tl.float32)
    scale2 = scale * _LOG2_E
    lane = tl.arange(0, BN)
    starts_at = starts + block * most_tiles
    for step in tl.range(uniform(tl.load(counts + block)), disable_licm=not HOIST):
        start = uniform(tl.load(starts_at + step))
        key = start + lane
        if SELECTED:
            word = start // 32
            chosen = tl.load(bits_at + word, mask=held, other=0)[:, None]
            for more in tl.static_range(1, BN // 32):
                next_word = tl.load(bits_at + word + more, mask=held, other=0)[:, None]
                chosen = tl.where((lane < more * 32)[None, :], chosen, next_word)
            visible = ((chosen >> (lane % 32)[None, :]) & 1) != 0
            alive = tl.load(live + block * words + key // 32)
            read = ((alive >> (key % 32)) & 1) != 0
        else:
            read = key < tl.load(stops + block * most_tiles + step)
            visible = (key[None, :] >= first[:, None]) & (key[None, :] < last[:, None])
            visible = visible & read[None, :]
        top, total, acc = _attend_tile(
            top,
            total,
            acc,
            low,
            high,
            rotated,
            k,
            k_pe,
            v,
            k_row,
            k_pe_row,
            v_row,
            key,
            read,
            visible,
            scale2,
            NOPE,
            LOW,
            HIGH,
            ROPE,
            ROPE_PAD,
            VALUE,
            VALUE_PAD,
        )
    _finish(top, total, acc, out, lse, row, head, heads, tokens, VALUE, VALUE_PAD)
