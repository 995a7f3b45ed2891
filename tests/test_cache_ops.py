from __future__ import annotations

import math
import struct

import pytest
import torch
from _cache_cases import BLOCK, DTYPES, D, L, R, int64, latents, mla_cache, scale_of
from _fp8 import ds_mla_row, index_key_bytes
from _opcheck import arrange
from _reference import causal_intervals, int32
from torch import Tensor

from dsafx.ops import check_indices, index_select
from dsafx.ops.cache_layouts import (
    LAYOUTS,
    SCALE_STORES,
    mla_cache_shape,
    new_index_cache,
    new_mla_cache,
)
from dsafx.ops.index_cache import index_cache_gather, index_cache_write
from dsafx.ops.mla_cache import mla_cache_gather, mla_cache_write


def stored(x: Tensor, layout: str, part: str) -> Tensor:
    """What a cache of float32 values gives back for ``x``, by the meaning of its layout."""
    if layout == "bf16":
        return x
    if layout == "fp8_ds_mla" and part == "rope":
        return x.bfloat16().float()
    scale = scale_of(layout)
    if scale is None:
        rows = [ds_mla_row(row, []) for row in x.float().tolist()]
        table = torch.tensor([list(row) for row in rows], dtype=torch.uint8).view(len(rows), -1)
        factors = table[:, L:].contiguous().view(torch.float32)
        return table[:, :L].contiguous().view(torch.float8_e4m3fn).float() * factors
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def test_a_656_byte_row_is_what_was_worked_out_by_hand():
    kv_c = torch.randn(3, 512) * torch.tensor([1e-4, 1.0, 1e4, 0.0]).repeat_interleave(128)
    k_pe = torch.randn(3, 64)
    cache = new_mla_cache(2, 64, "fp8_ds_mla")
    mla_cache_write(kv_c, k_pe, cache, int64(70, -1, 3), "fp8_ds_mla")
    written = {70: 0, 3: 2}
    for slot, row in enumerate(cache.view(128, 656)):
        expected = bytes(656)
        if slot in written:
            token = written[slot]
            expected = ds_mla_row(kv_c[token].tolist(), k_pe[token].tolist())
        assert bytes(row.tolist()) == expected


@pytest.mark.parametrize("scale_store", SCALE_STORES)
def test_an_index_block_holds_all_keys_and_then_all_scales(scale_store):
    keys = torch.randn(3, 128) * torch.tensor([[1e-4], [1e4], [0.0]])
    cache = new_index_cache(2, 64)
    index_cache_write(keys, cache, int64(65, 127, 64), scale_store)
    block = bytearray(64 * 132)
    for token, offset in ((0, 1), (1, 63), (2, 0)):
        values, scale = index_key_bytes(keys[token].tolist())
        exponent = int(math.log2(scale)) + 127
        stored_scale = struct.pack("<f", scale)
        if scale_store == "ue8m0":
            stored_scale = bytes([exponent] * 4)
        block[offset * 128 : offset * 128 + 128] = values
        block[64 * 128 + offset * 4 : 64 * 128 + offset * 4 + 4] = stored_scale
    assert bytes(cache[1].flatten().tolist()) == bytes(block)
    assert not cache[0].any()


def test_per_tensor_fp8_divides_by_the_scale_and_stops_at_448():
    kv_c = torch.tensor([[1.0, 600.0, -2e4, math.inf]])
    k_pe = torch.tensor([[3.0, math.nan]])
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        cache = torch.zeros(1, 1, 6, dtype=torch.uint8).view(dtype)
        scale = torch.tensor([2.0])
        mla_cache_write(kv_c, k_pe, cache, int64(0), "fp8", scale)
        assert cache.view(torch.uint8).flatten().tolist() == [0x30, 0x79, 0xFE, 0x7F, 0x3C, 0x7F]
        latent, rope = mla_cache_gather(
            cache, int32(0)[None], int32(0, 1), 1, "fp8", scale, kv_lora_rank=4
        )
        assert latent.dtype == rope.dtype == torch.bfloat16
        assert latent[0, :3].tolist() == [1.0, 576.0, -896.0]
        assert latent[0, 3].isnan()
        assert (rope[0, 0].item(), bool(rope[0, 1].isnan())) == (3.0, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_come_back_packed_whatever_blocks_they_lie_in(layout, dtype):
    cache = mla_cache(layout)
    kv_c, k_pe = latents(11, dtype)
    # Request 0 has 6 tokens in blocks 5 and 2, request 1 none, request 2 has 5 in blocks 0 and 3.
    slot_mapping = int64(20, 21, 22, 23, 8, 9, 0, 1, 2, 3, 12)
    mla_cache_write(kv_c, k_pe, cache, slot_mapping, layout, scale_of(layout))
    table = torch.tensor([[5, 2, 99], [77, 78, 79], [0, 3, -7]], dtype=torch.int32)
    read = mla_cache_gather(
        cache, table, int32(0, 6, 6, 11), 13, layout, scale_of(layout), L, torch.float32
    )
    for part, x, got in zip(("latent", "rope"), (kv_c, k_pe), read, strict=True):
        torch.testing.assert_close(got[:11], stored(x.float(), layout, part), rtol=0, atol=0)
        assert got[11:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_store", SCALE_STORES)
def test_index_keys_come_back_packed_and_bfloat16_holds_them_exactly(scale_store, dtype):
    cache = new_index_cache(6, BLOCK, D)
    keys = torch.randn(7, D).to(dtype)
    index_cache_write(keys, cache, int64(20, 21, 22, 23, 8, 0, 1), scale_store)
    table = torch.tensor([[5, 2, 99], [0, 77, 77]], dtype=torch.int32)
    for out in (None, torch.float32):
        read = index_cache_gather(cache, table, int32(0, 5, 7), 8, scale_store, out)
        assert read.dtype == (out or torch.bfloat16)
        for row, key in enumerate(keys.float().tolist()):
            codes, scale = index_key_bytes(key)
            values = torch.tensor(list(codes), dtype=torch.uint8).view(torch.float8_e4m3fn)
            assert torch.equal(read[row].float(), values.float() * scale)
        assert read[7:].count_nonzero() == 0


def test_plain_caches_store_the_cast_of_their_dtype():
    for cache_dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        cache = mla_cache("bf16", dtype=cache_dtype)
        kv_c, k_pe = latents(3)
        mla_cache_write(kv_c, k_pe, cache, int64(4, 5, 6), "bf16")
        assert torch.equal(cache[1, :3], torch.cat((kv_c, k_pe), 1).to(cache_dtype))
        latent, rope = mla_cache_gather(
            cache, int32(1)[None], int32(0, 3), 3, "bf16", kv_lora_rank=L
        )
        assert latent.dtype == rope.dtype == cache_dtype
        assert torch.equal(latent, kv_c.to(cache_dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_view_of_one_layer_leaves_the_other_layers_alone(layout):
    """Blocks of one layer lie ``layers`` blocks apart, from a storage offset on."""
    shape = mla_cache_shape(3, BLOCK, layout, L, R)
    dtype = torch.float32 if layout == "bf16" else torch.uint8
    whole = torch.zeros(3, 2, *shape[1:], dtype=dtype)
    index_whole = torch.zeros(3, 2, BLOCK, D + 4, dtype=torch.uint8)
    slot_mapping, table = int64(1, 11, 4), torch.tensor([[2, 0]], dtype=torch.int32)

    def write_and_read(inputs: tuple[Tensor, ...], cache: Tensor, index_cache: Tensor):
        *latent, keys = inputs
        mla_cache_write(*latent, cache, slot_mapping, layout, scale_of(layout))
        index_cache_write(keys, index_cache, slot_mapping, "fp32")
        read = mla_cache_gather(cache, table, int32(0, 7), 7, layout, scale_of(layout), L)
        return (*read, index_cache_gather(index_cache, table, int32(0, 7), 7, "fp32"))

    for layer in (0, 1):
        inputs = (*latents(3), torch.randn(3, D))
        alone, index_alone = mla_cache(layout, 3), new_index_cache(3, BLOCK, D)
        other = whole[:, 1 - layer].clone(), index_whole[:, 1 - layer].clone()
        expected = write_and_read(inputs, alone, index_alone)
        read = write_and_read(inputs, whole[:, layer], index_whole[:, layer])
        torch.testing.assert_close(read, expected, rtol=0, atol=0)
        assert torch.equal(whole[:, layer], alone)
        assert torch.equal(index_whole[:, layer], index_alone)
        assert torch.equal(whole[:, 1 - layer], other[0])
        assert torch.equal(index_whole[:, 1 - layer], other[1])
        assert alone.any()
        assert index_alone.any()


@pytest.mark.parametrize("splits", [[13], [1] * 13, [5, 8], [1, 4, 4, 3, 1]])
def test_any_split_of_a_prompt_leaves_the_same_bytes(splits):
    torch.manual_seed(1)
    kv_c, k_pe = latents(13)
    keys = torch.randn(13, D)
    slot_mapping = torch.randperm(24)[:13]
    for layout in LAYOUTS:
        once, cache = mla_cache(layout), mla_cache(layout)
        index_once, index_cache = new_index_cache(6, BLOCK, D), new_index_cache(6, BLOCK, D)
        scale = scale_of(layout)
        mla_cache_write(kv_c, k_pe, once, slot_mapping, layout, scale)
        index_cache_write(keys, index_once, slot_mapping, "ue8m0")
        pieces = zip(*(x.split(splits) for x in (kv_c, k_pe, keys, slot_mapping)), strict=True)
        for latent, rope, key, slot in pieces:
            mla_cache_write(latent, rope, cache, slot, layout, scale)
            index_cache_write(key, index_cache, slot, "ue8m0")
        assert torch.equal(cache, once)
        assert torch.equal(index_cache, index_once)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_the_new_rows_do_not_matter(layout):
    kv_c, k_pe = latents(5)
    keys = torch.randn(5, D)
    slot_mapping = int64(0, 3, 7, -1, 23)
    spread = torch.stack((slot_mapping, torch.full((5,), 9)), dim=1)[:, 0]
    expected = mla_cache(layout), new_index_cache(6, BLOCK, D)
    mla_cache_write(kv_c, k_pe, expected[0], slot_mapping, layout, scale_of(layout))
    index_cache_write(keys, expected[1], slot_mapping, "fp32")
    for strides in ("sliced", "transposed"):
        cache, index_cache = mla_cache(layout), new_index_cache(6, BLOCK, D)
        latent, rope = arrange(kv_c, strides), arrange(k_pe, strides)
        mla_cache_write(latent, rope, cache, spread, layout, scale_of(layout))
        index_cache_write(arrange(keys, strides), index_cache, spread, "fp32")
        torch.testing.assert_close((cache, index_cache), expected, rtol=0, atol=0)


def test_selections_over_a_cache_of_fp8_keys_recall_those_over_exact_keys():
    """Keys of magnitude 1e-4, 1 and 1e4 in one block, topk far below the length."""
    tokens, heads, topk = 96, 8, 16
    size = torch.tensor([1.0, 1e-4, 1e4])[torch.arange(tokens) % 3]
    keys = torch.randn(tokens, 128) * size[:, None]
    keys[5] = 0.0
    q, weights = torch.randn(tokens, heads, 128), torch.rand(tokens, heads)
    cache = new_index_cache(2, 64)
    index_cache_write(keys, cache, torch.arange(tokens), "ue8m0")
    read = index_cache_gather(
        cache, int32(0, 1)[None], int32(0, tokens), tokens, "ue8m0", torch.float32
    )
    assert read[5].tolist() == [0.0] * 128
    ks, ke = causal_intervals([tokens])
    exact, found = (index_select(q, k, weights, ks, ke, tokens, topk) for k in (keys, read))
    check_indices(found, ks, ke, topk)
    common = sum(
        len(set(a) & set(b) - {-1}) for a, b in zip(exact.tolist(), found.tolist(), strict=True)
    )
    assert common / int((exact >= 0).sum()) >= 0.95
    assert not torch.equal(exact, found)
