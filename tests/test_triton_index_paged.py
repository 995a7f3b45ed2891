"""The Triton kernel that selects from keys in pages, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from _index_operands import DTYPES, by, whole_numbers
from _pages import DIM, STALE, filled_index_cache, index_inputs, pages
from torch import Tensor

from dsafx import ops
from dsafx.ops.cache_layouts import FP8, quantise_index_key
from dsafx.ops.index_cache import index_cache_gather
from dsafx.ops.index_select_paged import index_select_paged

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("scale_store", ["fp32", "ue8m0"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_paged_selection_is_that_of_the_stored_keys(scale_store, dtype):
    at = pages((9, 1, 40), new=3)
    q, keys, weights = whole_numbers(at.lens.shape[0], int(at.cu_seqlens[-1]), 8, DIM, dtype)
    keys = keys.float() * torch.tensor([0.25, 1.0, 8.0]).repeat(17)[: keys.shape[0], None]
    cache = filled_index_cache(at, keys, scale_store)
    stored = index_cache_gather(cache, *at.packed, scale_store, torch.float32)
    assert torch.equal(stored, keys)
    rows = at.row_request, at.lens
    for topk in (1, 4, 20, 64):
        for batch_invariant in (False, True):
            args = q, cache, weights, at.block_table, *rows, 40, topk, scale_store, batch_invariant
            found = by("triton", index_select_paged, *args)
            assert torch.equal(found, by("reference", index_select_paged, *args))
            ops.check_indices(found, torch.zeros_like(at.lens), at.lens, topk)


def test_a_padding_row_selects_nothing_and_no_stale_column_is_read():
    at = pages((9, 30), new=3)
    q, keys, weights = index_inputs(at)
    cache = filled_index_cache(at, keys)
    request, lens = at.row_request.clone(), at.lens.clone()
    request[1], request[4], lens[4] = -1, STALE, 1000
    rows = request, lens
    found = by(
        "triton", index_select_paged, q, cache, weights, at.block_table, *rows, 1000, 4, "fp32"
    )
    assert found[[1, 4]].tolist() == [[-1] * 4] * 2
    packed = index_cache_gather(cache, *at.packed, "fp32", torch.float32)
    kept = [0, 2, 3, 5]
    expected = by(
        "triton",
        ops.index_select,
        *(q[kept], packed, weights[kept], at.ks[kept], at.ke[kept], 30, 4),
    )
    assert torch.equal(found[kept], expected)


def test_decoding_rows_of_one_request_each_have_tiles_of_their_own_and_score_alike():
    at = pages((21, 9, 30, 17), new=1)
    q, keys, weights = whole_numbers(4, int(at.cu_seqlens[-1]), 16, DIM, torch.bfloat16)
    cache = filled_index_cache(at, keys.float(), "ue8m0")
    args = q, cache, weights, at.block_table, at.row_request, at.lens, 30, 8, "ue8m0"
    alone = by("triton", index_select_paged, *args)
    assert torch.equal(alone, by("triton", index_select_paged, *args, True))
    assert torch.equal(alone, by("reference", index_select_paged, *args))


def test_a_paged_row_selects_alike_alone_and_in_a_batch():
    """Nearly equal keys, and queries between their steps: selections hang on the last bits."""
    at = pages((40, 40, 17), new=2)
    q, keys, weights = index_inputs(at, torch.bfloat16)
    keys = (torch.randn(1, DIM) + 0.05 * keys).float()
    cache = filled_index_cache(at, keys, "ue8m0")

    def select(rows: list[int]) -> Tensor:
        where = at.block_table, at.row_request[rows], at.lens[rows]
        args = q[rows], cache, weights[rows], *where, 40, 12, "ue8m0", True
        return by("triton", index_select_paged, *args)

    whole = select([0, 1, 2, 3, 4, 5])
    for rows in ([0], [3], [1, 4, 3], [5, 3, 2, 1, 0, 0, 3]):
        assert torch.equal(select(rows), whole[rows])


def test_a_quantised_query_meets_the_stored_keys_as_they_are():
    at = pages((9, 40), new=3)
    q, keys, weights = index_inputs(at)
    cache = filled_index_cache(at, keys, "ue8m0")
    quantised, scale = quantise_index_key(q)
    assert quantised.dtype == FP8
    rows = at.row_request, at.lens
    args = cache, weights * scale, at.block_table, *rows, 40, 8, "ue8m0"
    expected = by("reference", index_select_paged, quantised, *args)
    assert torch.equal(by("triton", index_select_paged, quantised, *args), expected)


def test_a_token_without_a_block_is_refused():
    at = pages((9, 30), new=1)
    q, keys, weights = index_inputs(at)
    cache = filled_index_cache(at, keys)
    at.block_table[1, 3] = STALE
    rows = at.row_request, at.lens
    with pytest.raises(ValueError, match="block_table must name one of"):
        by("triton", index_select_paged, q, cache, weights, at.block_table, *rows, 30, 4, "fp32")
