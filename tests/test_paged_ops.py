"""Paged forms: the packed ops on what the cache stores, whatever the block table."""

from __future__ import annotations

import sys

import pytest
import torch
from _inside import Inside
from _pages import (
    BLOCK,
    DIM,
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    SCALE,
    STALE,
    TOPK,
    VALUE,
    filled_index_cache,
    filled_mla_cache,
    index_inputs,
    mla_inputs,
    pages,
    some_selection,
    spec,
)
from torch import Tensor

from dsafx import ops
from dsafx.ops.index_cache import index_cache_gather
from dsafx.ops.index_select_paged import index_select_paged
from dsafx.ops.mla_attention_paged import mla_attention_paged
from dsafx.ops.mla_cache import mla_cache_gather
from dsafx.ops.sparse_mqa_paged import sparse_mqa_paged

LAYOUTS = [("bf16", None), ("fp8", 0.05), ("fp8_ds_mla", None)]


def factor(scale: float | None) -> Tensor | None:
    return None if scale is None else torch.tensor(scale)


@pytest.fixture(params=["by request", "by bounds"])
def _gathers(request, monkeypatch):
    """Dense and masked attention over keys gathered for each request, and at a host's bound."""
    module = sys.modules["dsafx.ops.mla_attention_paged"]
    monkeypatch.setattr(module, "_leaves_values", lambda device_type: request.param == "by bounds")


@pytest.mark.parametrize("scale_store", ["fp32", "ue8m0"])
@pytest.mark.parametrize("topk", [1, TOPK, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_paged_selection_is_that_of_the_stored_keys(scale_store, topk, dtype):
    at = pages()
    q, keys, weights = index_inputs(at, dtype)
    cache = filled_index_cache(at, keys, scale_store)
    rows = at.row_request, at.lens
    found = index_select_paged(q, cache, weights, at.block_table, *rows, 14, topk, scale_store)
    stored = index_cache_gather(cache, *at.packed, scale_store, torch.float32)
    expected = ops.index_select(q, stored, weights, at.ks, at.ke, 14, topk)
    assert torch.equal(found, expected)
    ops.check_indices(found, torch.zeros_like(at.lens), at.lens, topk)


def test_a_selection_does_not_depend_on_the_block_table_and_its_slots_do():
    first, second = pages(seed=1), pages(seed=2)
    q, keys, weights = index_inputs(first)
    found, where = [], []
    for at in (first, second):
        cache = filled_index_cache(at, keys)
        rows = at.row_request, at.lens
        found.append(index_select_paged(q, cache, weights, at.block_table, *rows, 14, TOPK, "fp32"))
        where.append(ops.slots(found[-1], at.block_table, at.row_request, BLOCK))
    assert torch.equal(*found)
    assert (where[0] != where[1])[found[0] >= 0].any()


@pytest.mark.parametrize(("layout", "scale"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_sparse_attention_is_that_of_the_stored_rows(layout, scale, dtype):
    at = pages()
    _, _, kv_c, k_pe, _ = mla_inputs(at)
    q = torch.randn(at.lens.shape[0], HEADS, LATENT + ROPE).to(dtype)
    cache = filled_mla_cache(at, kv_c, k_pe, layout, factor(scale))
    indices = some_selection(at)
    out, lse = sparse_mqa_paged(
        q,
        cache,
        indices,
        at.block_table,
        at.row_request,
        at.lens,
        SCALE,
        LATENT,
        layout,
        factor(scale),
    )
    stored = mla_cache_gather(cache, *at.packed, layout, factor(scale), LATENT, dtype)
    kv = torch.cat(stored, dim=-1)
    expected, expected_lse = ops.sparse_mqa(q, kv, indices, at.ks, SCALE, LATENT)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def routed(at, inputs, cache, indices, mode, layout="bf16", scale=None, return_lse=True):
    q_nope, q_pe, _, _, weight = inputs
    return mla_attention_paged(
        q_nope,
        q_pe,
        cache,
        weight,
        indices,
        at.block_table,
        at.row_request,
        at.lens,
        int(at.lens.max()),
        3,
        TOPK,
        SCALE,
        spec(mode),
        layout,
        scale,
        return_lse=return_lse,
    )


@pytest.mark.usefixtures("_gathers")
@pytest.mark.parametrize(("layout", "scale"), LAYOUTS)
@pytest.mark.parametrize("mode", ["sparse", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_routed_attention_is_that_of_the_stored_latents(layout, scale, mode, dtype):
    at = pages()
    inputs = mla_inputs(at, dtype)
    cache = filled_mla_cache(at, *inputs[2:4], layout, factor(scale))
    indices = some_selection(at)
    out, lse = routed(at, inputs, cache, indices, mode, layout, factor(scale))
    stored = mla_cache_gather(cache, *at.packed, layout, factor(scale), LATENT, dtype)
    expected, expected_lse = ops.mla_attention(
        *inputs[:2],
        *stored,
        inputs[4],
        indices,
        at.ks,
        at.ke,
        14,
        3,
        TOPK,
        SCALE,
        spec(mode),
        return_lse=True,
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.usefixtures("_gathers")
@pytest.mark.parametrize("lengths", [(3, 4), (1,), (2, 0, 4, 1)])
def test_a_short_segment_runs_dense_without_a_selection(lengths):
    at = pages(lengths, new=2)
    inputs = mla_inputs(at)
    cache = filled_mla_cache(at, *inputs[2:4], "bf16", None)
    dense, lse = routed(at, inputs, cache, None, "auto")
    closed = ops.causal_positions(torch.zeros_like(at.lens), at.lens, 4, TOPK)
    sparse, sparse_lse = routed(at, inputs, cache, closed, "sparse")
    torch.testing.assert_close(dense, sparse)
    torch.testing.assert_close(lse, sparse_lse)


@pytest.mark.parametrize("mode", ["auto", "masked"])
def test_expanded_keys_of_a_bound_stay_within_the_workspace(mode, monkeypatch):
    """In groups of requests, so that a loose bound and a wide table do not cost their product."""
    module = sys.modules["dsafx.ops.mla_attention_paged"]
    monkeypatch.setattr(module, "_leaves_values", lambda device_type: True)
    at = pages((3, 4, 1, 2, 4), new=2)
    inputs = mla_inputs(at)
    cache = filled_mla_cache(at, *inputs[2:4], "bf16", None)
    closed = ops.causal_positions(torch.zeros_like(at.lens), at.lens, 4, TOPK)
    out, lse = routed(at, inputs, cache, closed, mode)
    a_request = 4 * TOPK * (LATENT + HEADS * (NOPE + VALUE) + ROPE)
    for requests in (1, 2, 4):
        with ops.options(workspace_bytes=requests * a_request), Inside() as seen:
            grouped, grouped_lse = routed(at, inputs, cache, closed, mode)
        torch.testing.assert_close(grouped, out)
        torch.testing.assert_close(grouped_lse, lse)
        assert seen.bytes <= requests * a_request


def test_a_route_that_reads_indices_refuses_none():
    at = pages()
    inputs = mla_inputs(at)
    cache = filled_mla_cache(at, *inputs[2:4], "bf16", None)
    with pytest.raises(ValueError, match="indices must be given where the route reads them"):
        routed(at, inputs, cache, None, "auto")


@pytest.mark.usefixtures("_gathers")
@pytest.mark.parametrize("padding", [-1, 3, 77])
@pytest.mark.parametrize("mode", ["sparse", "masked"])
def test_padding_rows_select_nothing_and_change_nothing(padding, mode):
    at = pages()
    q, keys, weights = index_inputs(at)
    inputs = mla_inputs(at)
    index_cache = filled_index_cache(at, keys)
    cache = filled_mla_cache(at, *inputs[2:4], "bf16", None)
    rows = at.row_request, at.lens
    alone = index_select_paged(q, index_cache, weights, at.block_table, *rows, 14, TOPK, "fp32")
    out, _ = routed(at, inputs, cache, alone, mode)

    last = at.row_request.shape[0] - 1
    at.row_request[last] = padding
    rows = at.row_request, at.lens
    found = index_select_paged(q, index_cache, weights, at.block_table, *rows, 14, TOPK, "fp32")
    assert found[last].tolist() == [-1] * TOPK
    assert torch.equal(found[:last], alone[:last])
    found[last] = STALE
    padded, lse = routed(at, inputs, cache, found, mode)
    assert (padded[last] == 0).all()
    assert (lse[last] == -float("inf")).all()
    torch.testing.assert_close(padded[:last], out[:last])


@pytest.mark.usefixtures("_gathers")
@pytest.mark.parametrize("rows", [0, 3])
def test_no_rows_and_rows_that_see_nothing_are_empty(rows):
    at = pages()
    none = torch.zeros(rows, dtype=torch.int32)
    found = index_select_paged(
        torch.randn(rows, 8, DIM),
        filled_index_cache(at, index_inputs(at)[1]),
        torch.randn(rows, 8),
        at.block_table,
        none,
        none,
        0,
        TOPK,
        "fp32",
    )
    assert found.tolist() == [[-1] * TOPK] * rows
    inputs = mla_inputs(at)
    cache = filled_mla_cache(at, *inputs[2:4], "bf16", None)
    at.row_request = at.lens = none
    for mode in ("sparse", "masked"):
        out, lse = mla_attention_paged(
            inputs[0][:rows],
            inputs[1][:rows],
            cache,
            inputs[4],
            found,
            at.block_table,
            none,
            none,
            TOPK + 1,
            1,
            TOPK,
            SCALE,
            spec(mode),
            "bf16",
            return_lse=True,
        )
        assert out.shape == (rows, HEADS, VALUE)
        assert (out == 0).all()
        assert (lse == -float("inf")).all()


def test_paged_results_do_not_depend_on_the_workspace():
    at = pages()
    q, keys, weights = index_inputs(at)
    inputs = mla_inputs(at)
    index_cache = filled_index_cache(at, keys)
    cache = filled_mla_cache(at, *inputs[2:4], "bf16", None)
    rows = at.row_request, at.lens
    indices = index_select_paged(q, index_cache, weights, at.block_table, *rows, 14, TOPK, "fp32")
    out, lse = routed(at, inputs, cache, indices, "sparse")
    with ops.options(workspace_bytes=1 << 13):
        again = index_select_paged(q, index_cache, weights, at.block_table, *rows, 14, TOPK, "fp32")
        assert torch.equal(again, indices)
        blocked, blocked_lse = routed(at, inputs, cache, indices, "sparse")
    torch.testing.assert_close(blocked, out)
    torch.testing.assert_close(blocked_lse, lse)


def test_a_position_that_its_row_does_not_see_is_refused_before_any_block_is_read():
    at = pages()
    inputs = mla_inputs(at)
    cache = filled_mla_cache(at, *inputs[2:4], "bf16", None)
    indices = some_selection(at)
    indices[0, 0] = at.lens[0]
    with pytest.raises(ValueError, match="a position below the lens of its row"):
        routed(at, inputs, cache, indices, "sparse")


@pytest.mark.usefixtures("_gathers")
def test_a_token_without_a_block_is_refused():
    at = pages()
    q, keys, weights = index_inputs(at)
    inputs = mla_inputs(at)
    index_cache = filled_index_cache(at, keys)
    cache = filled_mla_cache(at, *inputs[2:4], "bf16", None)
    indices = ops.causal_positions(torch.zeros_like(at.lens), at.lens, 14, TOPK)
    at.block_table[0, 0] = -1
    with pytest.raises(ValueError, match="block_table must name one of"):
        index_select_paged(
            q, index_cache, weights, at.block_table, at.row_request, at.lens, 14, TOPK, "fp32"
        )
    for mode in ("sparse", "masked"):
        with pytest.raises(ValueError, match="block_table must name one of"):
            routed(at, inputs, cache, indices, mode)


def test_a_row_longer_than_the_host_says_is_refused():
    at = pages()
    q, keys, weights = index_inputs(at)
    cache = filled_index_cache(at, keys)
    with pytest.raises(ValueError, match="max_kv_len must bound lens, got 13 for a row of 14"):
        index_select_paged(
            q, cache, weights, at.block_table, at.row_request, at.lens, 13, TOPK, "fp32"
        )
