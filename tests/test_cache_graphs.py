from __future__ import annotations

from typing import Any

import pytest
import torch
from _cache_cases import BLOCK, DTYPES, D, L, int64, latents, mla_cache, scale_of
from _opcheck import LAYOUTS as STRIDES
from _opcheck import arrange, one_graph_for_lengths, opcheck_all
from _reference import int32
from torch._inductor.utils import run_and_get_code

from dsafx.ops.cache_layouts import (
    LAYOUTS,
    SCALE_STORES,
    new_index_cache,
)
from dsafx.ops.index_cache import index_cache_gather, index_cache_write
from dsafx.ops.mla_cache import mla_cache_gather, mla_cache_write


def test_a_write_counts_as_a_mutation_and_cuts_off_gradients():
    cache, index_cache = mla_cache("bf16"), new_index_cache(6, BLOCK, D)
    kv_c, k_pe = (x.requires_grad_() for x in latents(2))
    key = torch.randn(2, D, requires_grad=True)
    versions = cache._version, index_cache._version
    mla_cache_write(kv_c, k_pe, cache, int64(0, 1), "bf16")
    index_cache_write(key, index_cache, int64(0, 1), "fp32")
    assert cache._version > versions[0]
    assert index_cache._version > versions[1]
    assert not cache.requires_grad
    assert torch.equal(cache[0, :2, :L], kv_c.detach())


def test_every_cache_op_passes_opcheck():
    ops = torch.ops.dsafx
    for number, (rows, strides) in enumerate((n, s) for n in (0, 1, 5) for s in STRIDES):
        dtype, grad = DTYPES[number % 3], number % 2 == 0
        layout = LAYOUTS[(number + rows) % 3]
        store = SCALE_STORES[number % 2]
        kv_c, k_pe = (x.requires_grad_(grad) for x in latents(rows, dtype, strides))
        keys = arrange(torch.randn(rows, D).to(dtype), strides).requires_grad_(grad)
        cache, scale = mla_cache(layout), scale_of(layout)
        index_cache = torch.zeros(3, 2, BLOCK, D + 4, dtype=torch.uint8)[:, 1]
        slot_mapping = torch.arange(rows) - 1
        paged = (torch.tensor([[2, 0, 1]], dtype=torch.int32), int32(0, rows), rows)
        as_dtype = (None, torch.float32)[number % 2]
        opcheck_all(ops.mla_cache_write.default, [(kv_c, k_pe, cache, slot_mapping, layout, scale)])
        opcheck_all(ops.mla_cache_gather.default, [(cache, *paged, layout, scale, L, as_dtype)])
        opcheck_all(ops.index_cache_write.default, [(keys, index_cache, slot_mapping, store)])
        opcheck_all(ops.index_cache_gather.default, [(index_cache, *paged, store, as_dtype)])


def step(kv_c, k_pe, key, cache, index_cache, slot_mapping, table, lens, layout, scale):
    """One step of a layer: write the new rows, then read all rows of the requests back."""
    mla_cache_write(kv_c, k_pe, cache, slot_mapping, layout, scale)
    index_cache_write(key, index_cache, slot_mapping, "ue8m0")
    total = kv_c.shape[0] + 2
    read = mla_cache_gather(cache, table, lens, total, layout, scale, L)
    return (*read, index_cache_gather(index_cache, table, lens, total, "ue8m0"))


def step_args(rows: int, layout: str) -> tuple[Any, ...]:
    torch.manual_seed(rows)
    slot_mapping = torch.arange(rows) + 4
    caches = mla_cache(layout), new_index_cache(6, BLOCK, D)
    table = torch.tensor([[1, 2, 3, 4, 5, 99]], dtype=torch.int32)
    tensors = (*latents(rows), torch.randn(rows, D), *caches)
    return (*tensors, slot_mapping, table, int32(0, rows), layout, scale_of(layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_graph_writes_and_reads_for_all_lengths(layout):
    one_graph_for_lengths(step, lambda rows: step_args(rows, layout), (3, 7, 19))


@pytest.mark.parametrize("backend", ["inductor", "dsafx"])
def test_a_compiled_step_writes_in_place_and_copies_no_cache(backend):
    for layout in LAYOUTS:
        args, eager = step_args(6, layout), step_args(6, layout)
        expected = step(*eager)
        read, (code,) = run_and_get_code(
            torch.compile(step, backend=backend, fullgraph=True), *args
        )
        torch.testing.assert_close(read, expected, rtol=0, atol=0)
        assert torch.equal(args[3], eager[3])
        assert torch.equal(args[4], eager[4])
        assert "dsafx.mla_cache_write.default" in code
        assert "dsafx.index_cache_write.default" in code
        for cache in args[3:5]:
            assert str(tuple(cache.shape)) in code
            for shape in (str(tuple(cache.shape)), f"({cache.numel()}, )"):
                assert f"empty_strided_cpu({shape}" not in code
        assert "clone" not in code
        assert "copy_" not in code
