"""Index queries in fp8, as ``index_query(quantize=True)`` gives them, through the ops of scores."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from _norm_rope_cases import tables
from _opcheck import LAYOUTS, arrange, one_graph_for_lengths
from _pages import DIM, filled_index_cache, index_inputs, pages
from _reference import causal_intervals, padded, scores_by_hand, select_by_hand
from torch import Tensor

from dsafx import ops
from dsafx.ops.cache_layouts import FP8, quantise_index_key
from dsafx.ops.index_cache import index_cache_gather
from dsafx.ops.index_query import index_query
from dsafx.ops.index_select_paged import index_select_paged
from dsafx.ops.index_select_partial import index_select_partial
from dsafx.ops.merge_selection import merge_selection

KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8)
TOPK = 8


class Operands(NamedTuple):
    q: Tensor
    k: Tensor
    weights: Tensor
    ks: Tensor
    ke: Tensor
    longest: int


@pytest.fixture(autouse=True, params=["reference", "dispatched", "without C++"])
def _provider(request):
    """On the meaning of the ops, and on what runs on this device, compiled and not."""
    if request.param == "reference":
        with ops.use_provider("reference"):
            yield
    else:
        with ops.options(compiled_kernels=request.param == "dispatched"):
            yield


def operands(lengths: tuple[int, ...] = (40, 25), cached: int = 30, keys=FP8) -> Operands:
    torch.manual_seed(sum(lengths))
    ks, ke = causal_intervals([*lengths], cached)
    rows = ks.shape[0]
    q, weights = torch.randn(rows, 16, 32, dtype=torch.bfloat16), torch.randn(rows, 16)
    # Heads and tokens need scales of their own.
    q = q * 4.0 ** torch.randint(-4, 5, (rows, 16, 1))
    q8, folded = index_query(q, weights, *tables(rows, 8, torch.float32), "interleaved", True)
    k = torch.randn(int(ke.max()), 32)
    return Operands(q8, k.to(keys), folded, ks, ke, max(lengths) + cached)


@pytest.mark.parametrize("keys", [*KEY_DTYPES, torch.float64])
def test_fp8_queries_are_scored_as_the_numbers_that_they_are(keys):
    q, k, weights, ks, ke, _ = operands(keys=keys)
    scores = ops.index_scores(q, k, weights, ks, ke)
    exact = scores_by_hand(q, k, weights)
    visible = (torch.arange(k.shape[0]) >= ks[:, None]) & (torch.arange(k.shape[0]) < ke[:, None])
    size = float(exact.abs().max())
    assert scores.dtype == torch.float32
    assert torch.equal(scores.isfinite(), visible)
    torch.testing.assert_close(
        scores[visible].double(), exact[visible], rtol=1e-5, atol=1e-6 * size
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("keys", KEY_DTYPES)
def test_the_selection_of_fp8_queries_is_that_of_a_loop_over_rows(keys, batch_invariant, masked):
    q, k, weights, ks, ke, longest = operands(keys=keys)
    mask = torch.rand(q.shape[0], k.shape[0]) < 0.7 if masked else None
    chosen = ops.index_select(q, k, weights, ks, ke, longest, TOPK, mask, batch_invariant)
    by_hand = select_by_hand(scores_by_hand(q, k, weights), ks, ke, TOPK, mask)
    assert chosen.tolist() == padded(by_hand, TOPK).tolist()
    ops.check_indices(chosen, ks, ke, TOPK, mask)


def test_fp8_keys_are_scored_for_any_queries():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        q, k, weights, ks, ke, longest = operands()
        q = q.to(dtype)
        chosen = ops.index_select(q, k, weights, ks, ke, longest, TOPK)
        by_hand = select_by_hand(scores_by_hand(q, k, weights), ks, ke, TOPK)
        assert chosen.tolist() == padded(by_hand, TOPK).tolist()


def test_a_query_goes_from_its_op_to_the_selection_without_a_cast_and_recalls_the_exact_one():
    ks, ke = causal_intervals([64], cached=64)
    q, weights, k = torch.randn(64, 32, 64), torch.randn(64, 32), torch.randn(128, 64)
    rope = tables(64, 8, torch.float32)
    q8, folded = index_query(q, weights, *rope, "half", True)
    chosen = ops.index_select(q8, k, folded, ks, ke, 128, 16)
    assert torch.equal(chosen, ops.index_select(q8.float(), k, folded, ks, ke, 128, 16))
    exact, plain = index_query(q.double(), weights.double(), *rope, "half", False)
    wanted = ops.index_select(exact, k.double(), plain, ks, ke, 128, 16)
    pairs = zip(chosen.tolist(), wanted.tolist(), strict=True)
    assert sum(len({*a} & {*b}) for a, b in pairs) / chosen.numel() > 0.93


@pytest.mark.parametrize("keys", KEY_DTYPES)
def test_parts_of_a_selection_over_ranks_merge_to_the_whole(keys):
    q, k, weights, ks, ke, longest = operands((30,), keys=keys)
    parts = []
    for rank in range(2):
        mine = torch.arange(rank, k.shape[0], 2, dtype=torch.int32)
        ends = (ke - rank + 1).div(2, rounding_mode="floor").int()
        at = k[rank::2], weights, ks, ends, mine, ke - ks, longest, TOPK
        parts.append(index_select_partial(q, *at))
    merged = merge_selection(*map(torch.stack, zip(*parts, strict=True)), TOPK)
    assert torch.equal(merged, ops.index_select(q, k, weights, ks, ke, longest, TOPK))
    kept = parts[0][0] >= 0
    exact = scores_by_hand(q, k, weights).gather(1, parts[0][0].clamp(min=0).long())
    long = kept & (ke - ks > TOPK)[:, None]
    torch.testing.assert_close(
        parts[0][1][long].double(), exact[long], rtol=1e-5, atol=1e-6 * float(exact.abs().max())
    )


@pytest.mark.parametrize("scale_store", ["fp32", "ue8m0"])
@pytest.mark.parametrize("size", [2.0**-18, 1.0, 2.0**18])
def test_a_paged_selection_is_that_of_the_stored_keys_whatever_their_exponents(size, scale_store):
    at = pages((40, 9, 33), new=3)
    q, keys, weights = index_inputs(at)
    cache = filled_index_cache(at, keys * size, scale_store)
    q8, scale = quantise_index_key(q)
    weights = weights * scale
    stored = index_cache_gather(cache, *at.packed, scale_store, torch.float64)
    by_hand = select_by_hand(scores_by_hand(q8, stored, weights), at.ks, at.ke, TOPK)
    args = q8, cache, weights, at.block_table, at.row_request, at.lens, 40, TOPK, scale_store
    for batch_invariant in (False, True):
        found = index_select_paged(*args, batch_invariant)
        assert found.tolist() == padded(by_hand, TOPK).tolist()


def calls(op: str, rows: int, layout: str = "contiguous") -> tuple[object, ...]:
    ks, ke = torch.zeros(rows, dtype=torch.int32), torch.arange(1, rows + 1, dtype=torch.int32)
    q = arrange(torch.randn(rows, 8, DIM), layout).to(FP8)
    k = arrange(torch.randn(rows, DIM), layout).to(FP8)
    weights = arrange(torch.randn(rows, 8), layout)
    packed = q, k, weights, ks, ke
    if op == "index_select_paged":
        at = pages(lengths=(9,), new=1)
        cache = filled_index_cache(at, index_inputs(at)[1])
        request, lens = ks, torch.full_like(ks, 9)
        return q, cache, weights, at.block_table, request, lens, 9, 3, "fp32"
    return {
        "index_scores": packed,
        "index_select": (*packed, rows, 3),
        "index_select_partial": (*packed, 2 * ks + ke, 2 * ke, 2 * rows, 3),
    }[op]


OPS = {
    "index_scores": ops.index_scores,
    "index_select": ops.index_select,
    "index_select_partial": index_select_partial,
    "index_select_paged": index_select_paged,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_an_op_of_fp8_queries_is_what_its_schema_and_fake_say(op, layout):
    # Without the check of the schema, which compares inputs in a way that torch lacks for fp8.
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for rows in (0, 1, 5):
        args = calls(op, rows, layout)
        torch.library.opcheck(getattr(torch.ops.dsafx, op).default, args, test_utils=utilities)


@pytest.mark.parametrize("op", OPS)
def test_one_symbolic_graph_serves_every_length(op):
    one_graph_for_lengths(OPS[op], lambda rows: calls(op, rows), (7, 8, 10))


def test_other_fp8_dtypes_are_refused_by_name():
    q, k, weights, ks, ke, longest = operands()
    accepted = "float16, bfloat16, float32, float64, float8_e4m3fn, got float8_e5m2"
    other = q.float().to(torch.float8_e5m2)
    with pytest.raises(TypeError, match=f"q must be {accepted}"):
        ops.index_scores(other, k, weights, ks, ke)
    with pytest.raises(TypeError, match=f"k must be {accepted}"):
        ops.index_select(q, k.float().to(torch.float8_e5m2), weights, ks, ke, longest, TOPK)
    paged = calls("index_select_paged", 2)
    with pytest.raises(TypeError, match=f"q must be {accepted}"):
        index_select_paged(paged[0].float().to(torch.float8_e5m2), *paged[1:])
