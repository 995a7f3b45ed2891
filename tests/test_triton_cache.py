"""The Triton kernels of the caches, in Triton's interpreter: the bytes of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsafx import ops
from dsafx.ops.cache_layouts import LAYOUTS, SCALE_STORES, new_index_cache, new_mla_cache
from dsafx.ops.index_cache import index_cache_gather, index_cache_write
from dsafx.ops.mla_cache import mla_cache_gather, mla_cache_write

pytestmark = pytest.mark.triton

BLOCK, BLOCKS = 64, 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Out of order, the last of a block, the first of another, and tokens that have no place.
SLOTS = torch.tensor([3 * BLOCK + 7, -1, 63, 64, 4 * BLOCK + 63, -1, 0], dtype=torch.int64)
# Request 0 has 70 tokens in blocks 4 and 1, request 1 none, request 2 has 3 tokens in block 3.
TABLE = torch.tensor([[4, 1, 1_000_000], [77, 78, 79], [3, -7, 40_000_000]], dtype=torch.int32)
BOUNDS = torch.tensor([0, 70, 70, 73], dtype=torch.int32)
NAN = float("nan")


def nasty(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of every size from subnormal codes to saturation, ties, zeros, infinities and NaN."""
    x = torch.randn(rows, width) * 10.0 ** torch.randint(-9, 5, (rows, 1))
    x[:, ::7] = x[:, ::7].round(decimals=1)
    x[0] = 0.0
    x[1, :2] = torch.tensor([torch.inf, NAN])
    x[2] = torch.arange(width) / 16
    x[3] = 448.0 * 2.0 ** torch.randint(-3, 4, (width,))
    return x.to(dtype)


def apart(cache: Tensor, gap: int) -> Tensor:
    """The same cache as a view of a larger allocation: an offset, and gaps between the blocks."""
    blocks, block, width = cache.shape
    store = torch.zeros((gap + block * width) * blocks, dtype=cache.dtype)
    view = store.as_strided(cache.shape, (block * width + gap, width, 1), gap)
    return view.copy_(cache)


def mla_cache(layout: str, latent: int, rope: int, dtype: torch.dtype, gap: int) -> Tensor:
    cache = new_mla_cache(BLOCKS, BLOCK, layout, latent, rope, dtype=dtype)
    canary = torch.tensor([0x5A], dtype=torch.uint8)
    cache.view(torch.uint8).copy_(canary)
    return apart(cache, gap) if gap else cache


def scale_of(layout: str) -> Tensor | None:
    return torch.tensor([0.037]) if layout == "fp8" else None


def both(write, cache: Tensor) -> tuple[Tensor, Tensor]:
    """What Triton and the reference leave in the allocation of equal caches."""
    found = []
    for provider in ("triton", "reference"):
        store = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage()).clone()
        mine = store.as_strided(cache.shape, cache.stride(), cache.storage_offset())
        with ops.use_provider(provider):
            write(mine)
        found.append(store.view(torch.uint8))
    return found[0], found[1]


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """Equal bit for bit, where NaN is NaN."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0))


@pytest.mark.parametrize("gap", [0, 160])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_leaves_the_bytes_of_the_reference_and_no_others(layout, dtype, gap):
    kv_c, k_pe = nasty(7, 512, dtype), nasty(7, 64, dtype)
    kv_c[1] = kv_c[1].nan_to_num(nan=1.0)
    k_pe[1] = k_pe[1].nan_to_num(nan=1.0)
    cache = mla_cache(layout, 512, 64, torch.bfloat16, gap)
    scale = scale_of(layout)
    got, wanted = both(lambda mine: mla_cache_write(kv_c, k_pe, mine, SLOTS, layout, scale), cache)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
def test_a_floating_cache_holds_each_dtype_rounded_once(given, stored):
    # Sizes that are no powers of two, and rows that are columns of a wider projection.
    joint = torch.randn(7, 40 + 6).to(given)
    cache = mla_cache("bf16", 40, 6, stored, 0)
    got, wanted = both(
        lambda mine: mla_cache_write(joint[:, :40], joint[:, 40:], mine, SLOTS, "bf16"), cache
    )
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_sizes_and_strides_are_served(layout):
    kv_c, k_pe = torch.randn(384, 14).t()[::2], torch.randn(7, 20)[:, ::2]
    slots = torch.stack((SLOTS, SLOTS), dim=1)[:, 0]
    cache = mla_cache(layout, 384, 10, torch.float32, 16)
    scale = scale_of(layout)
    got, wanted = both(lambda mine: mla_cache_write(kv_c, k_pe, mine, slots, layout, scale), cache)
    assert torch.equal(got, wanted)
    with ops.use_provider("reference"):
        mla_cache_write(kv_c, k_pe, cache, slots, layout, scale)
        wanted_rows = mla_cache_gather(cache, TABLE, BOUNDS, 75, layout, scale, 384)
    with ops.use_provider("triton"):
        rows = mla_cache_gather(cache, TABLE, BOUNDS, 75, layout, scale, 384)
    for part, right in zip(rows, wanted_rows, strict=True):
        assert_same(part, right)


@pytest.mark.parametrize("gap", [0, 160])
@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gather_reads_what_the_reference_reads(layout, dtype, gap):
    stored = torch.bfloat16 if dtype is None else torch.float32
    cache = mla_cache(layout, 512, 64, stored, gap)
    # Requests 0 and 2 take tokens of blocks 4, 1 and 3, of which only some were written: what lies
    # in the others are canary bytes, numbers like any.
    slots = torch.cat((torch.arange(4 * BLOCK, 5 * BLOCK), torch.arange(BLOCK, BLOCK + 6)))
    scale = scale_of(layout)
    mla_cache_write(nasty(70, 512), nasty(70, 64), cache, slots, layout, scale)
    arguments = cache, TABLE, BOUNDS, 76, layout, scale, 512, dtype
    with ops.use_provider("reference"):
        wanted = mla_cache_gather(*arguments)
    with ops.use_provider("triton"):
        got = mla_cache_gather(*arguments)
    for part, right in zip(got, wanted, strict=True):
        assert_same(part, right)
        assert part[73:].count_nonzero() == 0


def test_every_fp8_byte_is_read_as_the_reference_reads_it():
    cache = torch.arange(256, dtype=torch.uint8).repeat(2).view(1, 1, 512)
    table, bounds = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    arguments = cache, table, bounds, 1, "fp8", torch.tensor([0.3]), 448, torch.float32
    with ops.use_provider("reference"):
        wanted = mla_cache_gather(*arguments)
    with ops.use_provider("triton"):
        got = mla_cache_gather(*arguments)
    for part, right in zip(got, wanted, strict=True):
        assert_same(part, right)


@pytest.mark.parametrize("dim", [128, 24])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_store", SCALE_STORES)
def test_index_keys_are_written_with_the_bytes_of_the_reference(scale_store, dtype, dim):
    keys = nasty(7, dim, dtype)
    for gap in (0, 160):
        cache = new_index_cache(BLOCKS, BLOCK, dim).fill_(0x5A)
        cache = apart(cache, gap) if gap else cache
        got, wanted = both(lambda mine: index_cache_write(keys, mine, SLOTS, scale_store), cache)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("scale_store", SCALE_STORES)
def test_index_keys_are_read_as_the_reference_reads_them(scale_store, dtype):
    slots = torch.cat((torch.arange(4 * BLOCK, 5 * BLOCK), torch.arange(BLOCK, BLOCK + 6)))
    for gap in (0, 160):
        cache = new_index_cache(BLOCKS, BLOCK).fill_(0x5A)
        cache = apart(cache, gap) if gap else cache
        index_cache_write(nasty(70, 128), cache, slots, scale_store)
        with ops.use_provider("reference"):
            wanted = index_cache_gather(cache, TABLE, BOUNDS, 76, scale_store, dtype)
        with ops.use_provider("triton"):
            got = index_cache_gather(cache, TABLE, BOUNDS, 76, scale_store, dtype)
        assert_same(got, wanted)
        assert got[73:].count_nonzero() == 0


def test_more_requests_than_a_program_compares_at_once_find_their_own_rows():
    lengths = torch.arange(300) % 3
    bounds = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
    table = (torch.arange(300, dtype=torch.int32) * 7 % 11)[:, None]
    cache = new_index_cache(11, 4, 8)
    index_cache_write(torch.randn(44, 8), cache, torch.randperm(44), "fp32")
    total = int(bounds[-1])
    with ops.use_provider("reference"):
        wanted = index_cache_gather(cache, table, bounds, total, "fp32")
    with ops.use_provider("triton"):
        got = index_cache_gather(cache, table, bounds, total, "fp32")
    assert_same(got, wanted)


def test_nothing_to_write_or_read_launches_nothing():
    none = torch.empty(0, dtype=torch.int64)
    table, bounds = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    for layout in LAYOUTS:
        cache = mla_cache(layout, 128, 8, torch.float32, 0)
        rows = torch.empty(0, 128), torch.empty(0, 8)
        scale = scale_of(layout)
        got, wanted = both(
            lambda mine, rows=rows, layout=layout, scale=scale: mla_cache_write(
                *rows, mine, none, layout, scale
            ),
            cache,
        )
        assert torch.equal(got, wanted)
        with ops.use_provider("triton"):
            latent, rope = mla_cache_gather(cache, table, bounds, 0, layout, scale, 128)
        assert (tuple(latent.shape), tuple(rope.shape)) == ((0, 128), (0, 8))


def test_a_cache_without_blocks_gives_rows_of_zeros_for_requests_without_tokens():
    cache = new_index_cache(1, 4, 8)[:0]
    bounds, table = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 0, dtype=torch.int32)
    with ops.use_provider("triton"):
        assert index_cache_gather(cache, table, bounds, 3, "fp32").count_nonzero() == 0


def test_wrong_slots_and_blocks_are_refused_before_anything_is_written():
    cache = new_index_cache(2, 4, 8)
    keys, slots = torch.ones(2, 8), torch.tensor([0, 8], dtype=torch.int64)
    with ops.use_provider("triton"):
        with pytest.raises(ValueError, match="slot_mapping must hold -1 or slots below 8"):
            index_cache_write(keys, cache, slots, "fp32")
        assert cache.count_nonzero() == 0
        table, bounds = torch.tensor([[2]], dtype=torch.int32), torch.tensor([0, 3]).int()
        with pytest.raises(ValueError, match="request 0 has none for its token 0"):
            index_cache_gather(cache, table, bounds, 3, "fp32")
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most total"):
            index_cache_gather(cache, table, bounds, 2, "fp32")


def test_float64_and_unaligned_scales_are_left_to_the_reference():
    slots = torch.tensor([1], dtype=torch.int64)
    with ops.use_provider("triton"):
        with pytest.raises(NotImplementedError, match="got float64"):
            index_cache_write(torch.ones(1, 8).double(), new_index_cache(1, 4, 8), slots, "fp32")
        with pytest.raises(NotImplementedError, match="not aligned"):
            index_cache_write(torch.ones(1, 7), new_index_cache(1, 3, 7), slots, "fp32")
        shifted = torch.zeros(2 * 656 + 2, dtype=torch.uint8)[2:].view(1, 2, 656)
        with pytest.raises(NotImplementedError, match="not aligned"):
            mla_cache_write(torch.ones(1, 512), torch.ones(1, 64), shifted, slots, "fp8_ds_mla")
