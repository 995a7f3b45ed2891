"""Cases of the paged caches: bytes, scales, slots, blocks that lie apart (classes D, E and I)."""

from __future__ import annotations

import math

import torch

from . import _faults_cache as faults
from . import _oracle
from ._adapters import Adapters
from ._cache_inputs import (
    BLOCK,
    CANARY,
    KEY,
    LATENT,
    assert_rows,
    block_bytes,
    fp8,
    gather,
    key_scale,
    latent_scale,
    new_cache,
    scale_of,
    stored,
    token_rows,
    write,
)
from ._case import Case, Size
from ._cases_topk import select
from ._faults import after, around, replacing
from ._inputs import index_inputs, normal


def _check_round_trip(adapters: Adapters, size: Size) -> None:
    """Two requests whose blocks are in no order, the second written in two steps."""
    for layout in adapters.layouts:
        cache = new_cache(adapters, layout, 6)
        rows = token_rows(adapters, layout, BLOCK + 3 + 5)
        first = [4 * BLOCK + offset for offset in range(BLOCK)] + [BLOCK, BLOCK + 1, BLOCK + 2]
        second = [3 * BLOCK + offset for offset in range(5)]
        slots = first + second
        for part in (slice(0, BLOCK + 5), slice(BLOCK + 5, None)):
            write(adapters, layout, tuple(row[part] for row in rows), cache, slots[part])
        got = gather(adapters, layout, cache, [[4, 1], [3, 0]], [BLOCK + 3, 5])
        assert_rows(got, stored(layout, rows, scale_of(adapters, layout)), layout)


def _check_untouched(adapters: Adapters, size: Size) -> None:
    for layout in adapters.layouts:
        cache = new_cache(adapters, layout, 3)
        slots = [BLOCK + 2, -1, BLOCK + 7, -1]
        write(adapters, layout, token_rows(adapters, layout, 4), cache, slots)
        changed = (block_bytes(cache) != CANARY).any(dim=1).tolist()
        assert changed == [False, True, False], f"{layout}: a write changes blocks {changed}"
        again = new_cache(adapters, layout, 3)
        rows = tuple(row[::2] for row in token_rows(adapters, layout, 4))
        write(adapters, layout, rows, again, slots[::2])
        same = torch.equal(block_bytes(cache), block_bytes(again))
        assert same, f"{layout}: a token with the slot -1 leaves a trace"


def _check_index_bytes(adapters: Adapters, size: Size) -> None:
    """Planar in a block: all keys, token after token, and behind them all scales."""
    for layout in adapters.layouts:
        if not layout.startswith("index"):
            continue
        cache = new_cache(adapters, layout, 2)
        (keys,) = token_rows(adapters, layout, 3)
        write(adapters, layout, (keys,), cache, [0, 5, BLOCK + BLOCK - 1])
        block = block_bytes(cache)
        for key, (of, offset) in zip(keys, ((0, 0), (0, 5), (1, BLOCK - 1)), strict=True):
            scale = key_scale(key)
            values = block[of, offset * KEY : (offset + 1) * KEY]
            assert torch.equal(values, fp8(key.float() / scale).view(torch.uint8)), "values"
            start = BLOCK * KEY + 4 * offset
            got = block[of, start : start + 4].tolist()
            assert got == _scale_bytes(layout, scale), f"{layout}: scale bytes {got}"


def _scale_bytes(layout: str, scale: float) -> list[int]:
    if layout == "index_ue8m0":
        return [math.frexp(scale)[1] - 1 + 127] * 4
    return torch.tensor([scale], dtype=torch.float32).view(torch.uint8).tolist()


def _check_tiny_keys(adapters: Adapters, size: Size) -> None:
    """Keys of zeros, of 1e-7, 1e-4, 1 and 1e4 in one block."""
    for layout in adapters.layouts:
        if not layout.startswith("index"):
            continue
        cache = new_cache(adapters, layout, 1)
        factor = torch.tensor([0.0, 1e-7, 1e-4, 1.0, 1e4], device=adapters.device)[:, None]
        rows = ((normal(adapters, 5, KEY) * factor).bfloat16(),)
        write(adapters, layout, rows, cache, [0, 1, 2, 3, 4])
        got = gather(adapters, layout, cache, [[0]], [5])
        assert bool((got[0][0] == 0).all()), f"{layout}: a key of zeros is stored as another one"
        assert_rows(got, stored(layout, rows, None), layout)


def _check_mla_bytes(adapters: Adapters, size: Size) -> None:
    """656 bytes: 512 of e4m3, 4 float32 scales of 128 values each, 64 bfloat16."""
    layout = "fp8_ds_mla"
    cache = new_cache(adapters, layout, 1)
    latent, rope = token_rows(adapters, layout, 2)
    write(adapters, layout, (latent, rope), cache, [3, 0])
    for token, offset in enumerate((3, 0)):
        row = cache[0, offset].contiguous()
        scales = [latent_scale(tile) for tile in latent[token].float().split(128)]
        wide = torch.tensor(scales, device=row.device).repeat_interleave(128)
        values = fp8(latent[token].float() / wide).view(torch.uint8)
        assert torch.equal(row[:LATENT], values), "bytes 0 to 511 are the latent in e4m3"
        got = row[LATENT : LATENT + 16].view(torch.float32).tolist()
        assert got == scales, f"bytes 512 to 527 are four scales, got {got}"
        assert torch.equal(row[LATENT + 16 :].view(torch.bfloat16), rope[token]), "then the RoPE"


def _check_blocks_apart(adapters: Adapters, size: Size) -> None:
    """One layer's view of an allocation of all layers: with an offset, and gaps between blocks."""
    for layout in adapters.layouts:
        apart = new_cache(adapters, layout, 3, apart=160)
        whole = new_cache(adapters, layout, 3)
        rows, slots = token_rows(adapters, layout, 3), [1, 2 * BLOCK + 3, BLOCK]
        store = torch.empty(0, dtype=apart.dtype, device=apart.device).set_(apart.untyped_storage())
        gaps = store.new_ones(store.shape, dtype=torch.bool)
        gaps.as_strided(apart.shape, apart.stride(), apart.storage_offset()).zero_()
        before = store.clone()
        for cache in (apart, whole):
            write(adapters, layout, rows, cache, slots)
        assert torch.equal(block_bytes(apart), block_bytes(whole)), (
            f"{layout}: the view has other bytes"
        )
        assert torch.equal(store[gaps].view(torch.uint8), before[gaps].view(torch.uint8)), (
            f"{layout}: a write reaches beyond its blocks"
        )
        table, lengths = [[0, 2]], [2 * BLOCK]
        got = gather(adapters, layout, apart, table, lengths)
        wanted = gather(adapters, layout, whole, table, lengths)
        for found, right in zip(got, wanted, strict=True):
            same = torch.equal(found.nan_to_num(), right.nan_to_num())
            assert same, f"{layout}: the view is read as if its blocks were adjacent"


def _check_stale_columns(adapters: Adapters, size: Size) -> None:
    for layout in adapters.layouts:
        cache = new_cache(adapters, layout, 4)
        rows = token_rows(adapters, layout, BLOCK + 4)
        slots = [2 * BLOCK + offset for offset in range(BLOCK + 4)]
        write(adapters, layout, rows, cache, slots)
        wanted = stored(layout, rows, scale_of(adapters, layout))
        stale = 40_000_000
        got = gather(adapters, layout, cache, [[2, 3, stale], [3, stale, -7]], [BLOCK + 1, 3])
        picked = [*range(BLOCK + 1), *range(BLOCK, BLOCK + 3)]
        assert_rows(got, tuple(part[picked] for part in wanted), layout)


def _check_nothing(adapters: Adapters, size: Size) -> None:
    for layout in adapters.layouts:
        cache = new_cache(adapters, layout, 2)
        before = block_bytes(cache).clone()
        write(adapters, layout, token_rows(adapters, layout, 0), cache, [])
        assert torch.equal(block_bytes(cache), before), (
            f"{layout}: writing nothing changes the cache"
        )
        got = gather(adapters, layout, cache, [[0], [1]], [0, 0])
        assert all(part.shape[0] == 0 for part in got), f"{layout}: rows of nothing"


def _check_recall(adapters: Adapters, size: Size) -> None:
    """Stored keys, some of them huge, still find the share of the selection that fp8 owes."""
    layout = next((name for name in adapters.layouts if name.startswith("index")), None)
    if layout is None:
        raise NotImplementedError("no index cache layout is served")
    rows, blocks, topk = 8, 128, 256
    keys = blocks * BLOCK
    k = normal(adapters, keys, KEY, seed=3)
    k[5 :: 16 * BLOCK] *= 1e7
    inputs = index_inputs(adapters, [0] * rows, [keys] * rows, dtype=torch.float32)
    inputs = inputs._replace(k=k, q=normal(adapters, rows, inputs.q.shape[1], KEY, seed=4))
    cache = new_cache(adapters, layout, blocks)
    write(adapters, layout, (k,), cache, list(range(keys)))
    (found,) = gather(adapters, layout, cache, [list(range(blocks))], [keys])
    idx = select(adapters, inputs._replace(k=found.float()), topk)
    ordered = _oracle.assert_form(adapters, idx, inputs, topk)
    chosen = torch.zeros(rows, keys, dtype=torch.bool, device=idx.device)
    chosen.scatter_(1, ordered.long(), True)
    seen = torch.ones_like(chosen)
    _oracle.assert_recall(chosen, _oracle.scores(inputs), seen, topk, torch.float8_e4m3fn)


CASES = (
    Case(
        "what is written comes back as the layout stores it",
        rules=("C14", "C18"),
        classes=("E6", "E11"),
        needs=("write", "gather"),
        check=_check_round_trip,
        fault=after("gather", faults.forgets_the_scale),
    ),
    Case(
        "a slot of -1 is skipped and other slots stay as they are",
        rules=("C9",),
        classes=("E13", "E14"),
        needs=("write",),
        check=_check_untouched,
        fault=replacing("write", slot_mapping=faults.minus_one_is_the_last_slot),
    ),
    Case(
        "an index block is planar: all keys and then all scales",
        rules=("C18",),
        classes=("D16",),
        needs=("write",),
        check=_check_index_bytes,
        fault=around("write", faults.interleaves_scales),
    ),
    Case(
        "the scale store is the one that was asked for",
        rules=("C18",),
        classes=("D19",),
        needs=("write",),
        check=_check_index_bytes,
        fault=around("write", faults.wrong_scale_store),
    ),
    Case(
        "tiny keys and keys of zeros have a finite scale",
        rules=("C18",),
        classes=("D19",),
        needs=("write", "gather"),
        check=_check_tiny_keys,
        fault=around("write", faults.no_floor),
    ),
    Case(
        "an fp8_ds_mla row is 512 values, four scales and 64 bfloat16",
        rules=("C18",),
        classes=("D16",),
        needs=("write",),
        check=_check_mla_bytes,
        fault=around("write", faults.rope_before_scales),
    ),
    Case(
        "an fp8_ds_mla scale serves 128 values",
        rules=("C18",),
        classes=("D19",),
        needs=("write",),
        check=_check_mla_bytes,
        fault=around("write", faults.one_scale_a_token),
    ),
    Case(
        "blocks may lie apart and behind an offset",
        rules=("C17",),
        classes=("D16", "D17"),
        needs=("write", "gather"),
        check=_check_blocks_apart,
        fault=around("write", faults.ignores_strides),
    ),
    Case(
        "a gather follows the strides of its blocks",
        rules=("C17",),
        classes=("D16", "D17"),
        needs=("write", "gather"),
        check=_check_blocks_apart,
        fault=around("gather", faults.ignores_strides),
    ),
    Case(
        "stale columns of a block table are not read",
        rules=("C8", "C9"),
        classes=("B3", "E13"),
        needs=("write", "gather"),
        check=_check_stale_columns,
        fault=around("gather", faults.reads_whole_tables),
    ),
    Case(
        "no tokens and requests without tokens are served",
        rules=("C12",),
        classes=("I1", "I2"),
        needs=("write", "gather"),
        check=_check_nothing,
        fault=after("gather", faults.one_row_at_least),
    ),
    Case(
        "keys stored in fp8 still find the selection",
        rules=("C10", "C14"),
        classes=("D19",),
        needs=("write", "gather", "select"),
        check=_check_recall,
        fault=around("write", faults.one_scale_a_block),
    ),
)
