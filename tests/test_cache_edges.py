from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from _cache_cases import BLOCK, D, L, R, int64, latents, mla_cache, scale_of
from _reference import int32
from torch import Tensor

from dsafx.ops import options
from dsafx.ops._slots import packed_slots
from dsafx.ops.cache_layouts import (
    LAYOUTS,
    new_index_cache,
)
from dsafx.ops.index_cache import index_cache_gather, index_cache_write
from dsafx.ops.mla_cache import mla_cache_gather, mla_cache_write


@pytest.mark.parametrize("bad", [24, -2, 2**40])
def test_a_slot_outside_of_the_cache_raises_and_nothing_is_written(bad):
    kv_c, k_pe = latents(3)
    for layout in LAYOUTS:
        cache = mla_cache(layout)
        with pytest.raises(ValueError, match="slot_mapping must hold -1 or slots below 24, got"):
            mla_cache_write(kv_c, k_pe, cache, int64(0, bad, 2), layout, scale_of(layout))
        assert not cache.any()
    index_cache = new_index_cache(6, BLOCK, D)
    with pytest.raises(ValueError, match="slot_mapping must hold -1 or slots below 24, got"):
        index_cache_write(torch.randn(3, D), index_cache, int64(0, bad, 2), "fp32")
    assert not index_cache.any()


def test_a_step_of_padding_or_of_no_tokens_writes_nothing():
    for rows in (0, 3):
        slot_mapping = torch.full((rows,), -1)
        for layout in LAYOUTS:
            cache = mla_cache(layout)
            mla_cache_write(*latents(rows), cache, slot_mapping, layout, scale_of(layout))
            assert not cache.any()
        index_cache = new_index_cache(6, BLOCK, D)
        index_cache_write(torch.randn(rows, D), index_cache, slot_mapping, "ue8m0")
        assert not index_cache.any()


def test_no_request_and_no_token_give_no_rows():
    nothing = torch.zeros(0, 3, dtype=torch.int32)
    empty_requests = torch.full((2, 0), 5, dtype=torch.int32)
    for table, lens in ((nothing, int32(0)), (empty_requests, int32(0, 0, 0))):
        for layout in LAYOUTS:
            read = mla_cache_gather(
                mla_cache(layout), table, lens, 0, layout, scale_of(layout), L, torch.float16
            )
            assert [tuple(part.shape) for part in read] == [(0, L), (0, R)]
            padded = mla_cache_gather(
                mla_cache(layout)[:0], table, lens, 2, layout, scale_of(layout), L
            )
            assert [part.count_nonzero().item() for part in padded] == [0, 0]
        cache = new_index_cache(6, BLOCK, D)
        assert index_cache_gather(cache, table, lens, 0, "fp32").shape == (0, D)
        assert index_cache_gather(cache[:0], table, lens, 2, "fp32").tolist() == [[0.0] * D] * 2


def test_rows_past_the_last_request_are_zero_even_over_a_poisoned_cache():
    cache = torch.full((2, BLOCK, D + 4), 0x7F, dtype=torch.uint8)
    assert (
        index_cache_gather(cache, int32(1)[None], int32(0, 0), 3, "fp32").tolist()
        == [[0.0] * D] * 3
    )


def test_impossible_reads_are_refused():
    cache, index_cache = mla_cache("bf16"), new_index_cache(6, BLOCK, D)

    def both(table: Tensor, lens: Tensor, total: int, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            mla_cache_gather(cache, table, lens, total, "bf16", kv_lora_rank=L)
        with pytest.raises(ValueError, match=match):
            index_cache_gather(index_cache, table, lens, total, "fp32")

    two = torch.tensor([[0, 1], [2, 6]], dtype=torch.int32)
    both(two, int32(0, 4, 9), 9, "request 1 has none for its token 4")
    both(two, int32(0, 9, 9), 9, "request 0 has none for its token 8")
    both(two.neg(), int32(0, 5, 5), 5, "request 0 has none for its token 4")
    both(two, int32(0, 4, 6), 5, r"rise from 0 to at most total, 5, got \[0, 4, 6\]")
    both(two, int32(1, 4, 5), 5, "cu_seqlens must rise from 0")
    both(two, int32(0, 4, 3), 5, "cu_seqlens must rise from 0")
    both(two, int32(0, 4), 4, "cu_seqlens must have 3 in dimension 0")
    both(two, int32(0, 0, 0), -1, "total must be at least 0, got -1")


def test_slots_of_far_blocks_are_computed_in_64_bits():
    table = torch.tensor([[40_000_000]], dtype=torch.int32)
    cache = torch.empty(40_000_001, 64, 1, device="meta")
    slot = packed_slots(table, int32(0, 6), 7, cache)
    assert slot.tolist() == [2_560_000_000 + offset for offset in range(6)] + [-1]


def test_wrong_operands_of_the_mla_cache_are_refused_by_name_and_nothing_is_written():
    kv_c, k_pe = latents(2)
    slots, scale = int64(0, 1), torch.tensor(1.0)
    cache, fp8_cache = mla_cache("bf16"), mla_cache("fp8")

    def refuse(error: type[Exception], match: str, **changes: Any) -> None:
        args = {
            "kv_c": kv_c,
            "k_pe": k_pe,
            "cache": cache,
            "slot_mapping": slots,
            "layout": "bf16",
            **changes,
        }
        with pytest.raises(error, match=match):
            mla_cache_write(**args)

    refuse(ValueError, "k_pe must have 2 in dimension 0", k_pe=k_pe[1:])
    refuse(ValueError, "cache must have 135 in dimension 2", kv_c=kv_c[:, 1:])
    refuse(ValueError, "slot_mapping must have 2 in dimension 0", slot_mapping=slots[1:])
    refuse(TypeError, "slot_mapping must be int64, got int32", slot_mapping=slots.int())
    refuse(ValueError, "layout must be one of", layout="fp4")
    refuse(ValueError, "the layout fp8 takes one scale", cache=fp8_cache, layout="fp8")
    refuse(ValueError, "the layout bf16 takes no scale", scale=scale)
    refuse(TypeError, "cache must be uint8, float8_e4m3fn", layout="fp8", scale=scale)
    refuse(ValueError, "blocks must not overlap", cache=cache[:1].expand(6, -1, -1))
    refuse(ValueError, "cache must be contiguous in a block", cache=cache[:, ::2])
    refuse(ValueError, "cache must have 3 dimensions", cache=cache[0])
    refuse(
        ValueError, "cache must not require a gradient", cache=mla_cache("bf16").requires_grad_()
    )
    refuse(TypeError, "kv_c must be float16", kv_c=kv_c.int())
    refuse(ValueError, "cache must be on the device of kv_c", cache=cache.to("meta"))
    for value in (0.0, -1.0, math.inf, math.nan):
        bad = {"cache": fp8_cache, "layout": "fp8", "scale": torch.tensor(value)}
        refuse(ValueError, "scale must be positive and finite", **bad)
    two = {"cache": fp8_cache, "layout": "fp8", "scale": torch.ones(2)}
    refuse(ValueError, "scale must have one element", **two)
    with pytest.raises(ValueError, match="with a kv_lora_rank of 512"):
        mla_cache_gather(cache, int32(0)[None], int32(0, 1), 1, "bf16")
    assert not cache.any()
    assert not fp8_cache.any()


def test_wrong_operands_of_the_index_cache_are_refused_by_name_and_nothing_is_written():
    cache, keys, slots = new_index_cache(6, BLOCK, D), torch.randn(2, D), int64(0, 1)
    with pytest.raises(ValueError, match="scale_store must be one of fp32, ue8m0, got 'bf16'"):
        index_cache_write(keys, cache, slots, "bf16")
    with pytest.raises(ValueError, match="cache must have 32 in dimension 2"):
        index_cache_write(keys[:, 4:], cache, slots, "fp32")
    with pytest.raises(TypeError, match="cache must be uint8, got int32"):
        index_cache_write(keys, cache.int(), slots, "fp32")
    table, lens = int32(0)[None], int32(0, 1)
    with pytest.raises(TypeError, match="block_table must be int32, got int64"):
        index_cache_gather(cache, table.long(), lens, 1, "fp32")
    with pytest.raises(TypeError, match=r"dtype must be float16.*got int32"):
        index_cache_gather(cache, table, lens, 1, "fp32", torch.int32)
    assert not cache.any()


def test_elsewhere_than_on_the_cpu_values_are_checked_on_request_only(monkeypatch):
    """The CPU stands in for a device whose values are not read."""
    monkeypatch.setattr("dsafx.ops._slots.checks_values", lambda tensor: False)
    cache, index_cache = mla_cache("bf16"), new_index_cache(6, BLOCK, D)
    kv_c, k_pe = latents(3)
    mla_cache_write(kv_c, k_pe, cache, int64(24, 5, -9), "bf16")
    assert cache.flatten(0, 1).any(1).nonzero().flatten().tolist() == [5]
    index_cache_write(torch.ones(3, D), index_cache, int64(24, 5, -9), "fp32")
    table, lens = torch.tensor([[1, 6]], dtype=torch.int32), int32(0, 10)
    read = index_cache_gather(index_cache, table, lens, 10, "fp32")
    assert read.any(1).nonzero().flatten().tolist() == [1]
    monkeypatch.undo()
    with options(check=True), pytest.raises(ValueError, match="slot_mapping must hold -1"):
        mla_cache_write(kv_c, k_pe, cache, int64(24, 5, -9), "bf16")
