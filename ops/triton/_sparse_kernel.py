"""Absorbed attention over selected rows: one program for a query token, some heads, some lanes.

Keys come in two parts, the latent, which is also the value, and the rotated part; rows of keys lie
packed, or in the pages of a cache. Nothing here reads a length on the host: lanes behind the last
one that holds a key cost a program nothing, because it looks for that lane itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._uniform import uniform

# Lanes looked through at once for the last one that holds a key.
_SCAN = tl.constexpr(1024)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# The maximum before the first key: finite, because -inf less -inf is NaN.
_NO_KEY = tl.constexpr(-1e38)


@triton.jit
def key_offsets(
    position,
    first_key,
    seen,
    keys,
    table,
    columns,
    kv_block,
    kv_row,
    k_pe_row,
    BLOCK_SIZE: tl.constexpr,
):
    """Where the two parts of the keys at ``position`` stand, and which lanes hold a key at all.

    BLOCK_SIZE is 0 for packed rows, of which there are ``keys``. In pages both parts have the
    strides of the cache, and ``keys`` counts its blocks.
    """
    if BLOCK_SIZE == 0:
        row = position + first_key
        valid = (position >= 0) & (row >= 0) & (row < keys)
        offset = row.to(tl.int64) * kv_row
        pe_offset = row.to(tl.int64) * k_pe_row
    else:
        column = position // BLOCK_SIZE
        valid = (position >= 0) & (position < seen) & (column < columns)
        block = tl.load(table + column, mask=valid, other=-1)
        valid = valid & (block >= 0) & (block < keys)
        offset = block.to(tl.int64) * kv_block + (position % BLOCK_SIZE).to(tl.int64) * kv_row
        pe_offset = offset
    return offset, pe_offset, valid


# Sizes that differ from call to call and help no address: one compiled form serves them all.
_SIZES = ["heads", "lanes", "lanes_per_split", "keys", "requests", "columns", "split_rows"]
_SIZES += ["table_row"]


@triton.jit(do_not_specialize=_SIZES)
def sparse_kernel(
    q,
    q_pe,
    kv,
    k_pe,
    indices,
    ks,
    block_table,
    row_request,
    lens,
    out,
    lse,
    heads,
    lanes,
    lanes_per_split,
    keys,
    requests,
    columns,
    q_row,
    q_head,
    q_pe_row,
    q_pe_head,
    kv_block,
    kv_row,
    k_pe_row,
    index_row,
    table_row,
    split_rows,
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    HOIST: tl.constexpr,
):
    """out [splits, T, N, LATENT] and lse [splits, T, N], natural log, of the lanes of each split.

    The grid is (T * groups of BH heads, splits); ``split_rows`` is T * N.
    """
    groups = tl.cdiv(heads, BH)
    token = (tl.program_id(0) // groups).to(tl.int64)
    head = (tl.program_id(0) % groups) * BH + tl.arange(0, BH)
    split = tl.program_id(1)
    inside = head < heads
    dim = tl.arange(0, LATENT_PAD)
    pe_dim = tl.arange(0, ROPE_PAD)
    q_at = q + token * q_row + head.to(tl.int64)[:, None] * q_head + dim[None, :]
    query = tl.load(q_at, mask=inside[:, None] & (dim < LATENT)[None, :], other=0.0)
    if ROPE > 0:
        pe_at = q_pe + token * q_pe_row + head.to(tl.int64)[:, None] * q_pe_head + pe_dim[None, :]
        query_pe = tl.load(pe_at, mask=inside[:, None] & (pe_dim < ROPE)[None, :], other=0.0)

    lane_at = indices + token * index_row
    first = split * lanes_per_split
    last = tl.minimum(first + lanes_per_split, lanes)
    if BLOCK_SIZE == 0:
        first_key = tl.load(ks + token)
        seen = 0
        table = indices
    else:
        request = tl.load(row_request + token)
        known = (request >= 0) & (request < requests)
        first_key = 0
        seen = tl.load(lens + token, mask=known, other=0)
        table = block_table + tl.where(known, request, 0).to(tl.int64) * table_row
        last = tl.where(known, last, first)
    used = first
    for start in range(first, last, _SCAN):
        scanned = start + tl.arange(0, _SCAN)
        held = tl.load(lane_at + scanned, mask=scanned < last, other=-1)
        used = tl.maximum(used, tl.max(tl.where(held >= 0, scanned + 1, 0)))

    top = tl.full((BH,), _NO_KEY, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, LATENT_PAD), tl.float32)
    for start in tl.range(first, uniform(used), BN, disable_licm=not HOIST):
        lane = start + tl.arange(0, BN)
        position = tl.load(lane_at + lane, mask=lane < used, other=-1)
        offset, pe_offset, valid = key_offsets(
            position,
            first_key,
            seen,
            keys,
            table,
            columns,
            kv_block,
            kv_row,
            k_pe_row,
            BLOCK_SIZE,
        )
        latent_held = valid[:, None] & (dim < LATENT)[None, :]
        latent = tl.load(kv + offset[:, None] + dim[None, :], mask=latent_held, other=0.0)
        latent = latent.to(query.dtype)
        scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
        if ROPE > 0:
            pe_held = valid[:, None] & (pe_dim < ROPE)[None, :]
            rotated = tl.load(k_pe + pe_offset[:, None] + pe_dim[None, :], mask=pe_held, other=0.0)
            rotated = tl.trans(rotated.to(query.dtype))
            scores = tl.dot(query_pe, rotated, scores, input_precision="ieee")
        scores = tl.where(valid[None, :], scores * (scale * _LOG2_E), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weight = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, axis=1)
        acc = acc * fade[:, None]
        acc = tl.dot(weight.to(query.dtype), latent, acc, input_precision="ieee")
        top = higher

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    logsum = tl.where(empty, float("-inf"), top * _LN_2 + tl.log(tl.where(empty, 1.0, total)))
    row = split.to(tl.int64) * split_rows + token * heads + head
    out_at = out + row[:, None] * LATENT + dim[None, :]
    out_held = inside[:, None] & (dim < LATENT)[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=out_held)
    tl.store(lse + row, logsum, mask=inside)


@triton.jit(do_not_specialize=["splits", "rows"])
def combine_kernel(
    parts,
    part_lse,
    out,
    lse,
    splits,
    rows,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge float32 ``parts`` [splits, rows, WIDTH] by their lse, as ``merge_attention`` does.

    The grid is (rows, groups of BLOCK columns). A part without keys has lse -inf and out 0.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    part = split.to(tl.int64) * rows + row
    side = tl.load(part_lse + part, mask=split < splits, other=float("-inf"))
    top = tl.max(side, axis=0)
    empty = top == float("-inf")
    shift = tl.where(empty, 0.0, top)
    share = tl.exp2((side - shift) * _LOG2_E)
    total = tl.where(empty, 1.0, tl.sum(share, axis=0))
    held = (split < splits)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(parts + part[:, None] * WIDTH + column[None, :], mask=held, other=0.0)
    merged = tl.sum(values * share[:, None], axis=0) / total
    tl.store(out + row * WIDTH + column, merged.to(out.dtype.element_ty), mask=column < WIDTH)
    if tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(empty, top, shift + tl.log(total)))
