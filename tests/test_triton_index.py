"""The Triton kernels of the indexer, in Triton's interpreter, against float64 and the reference."""

from __future__ import annotations

import math

import pytest
import torch
from _capture import as_on_a_device
from _index_operands import DTYPES, by, gaussian, whole_numbers
from _pages import filled_index_cache, index_inputs, pages
from _reference import causal_intervals, int32, scores_by_hand
from torch import Tensor

from dsafx import ops
from dsafx.ops import tolerances
from dsafx.ops.cache_layouts import FP8, quantise_index_key
from dsafx.ops.index_select_paged import index_select_paged
from dsafx.ops.index_select_partial import index_select_partial
from dsafx.ops.merge_selection import merge_selection

pytestmark = pytest.mark.triton

INF, NAN = math.inf, math.nan
# Rows that share keys, that start elsewhere, an empty one, and a row of one key.
KS, KE = int32(0, 0, 0, 40, 40, 60, 149), int32(1, 100, 101, 140, 141, 20, 150)
KEYS = 150


def assert_scores(found: Tensor, q, k, weights, ks=KS, ke=KE, mask=None) -> None:
    """Within the error budget of float32 sums where a key is visible, and -inf elsewhere."""
    column = torch.arange(k.shape[0])
    seen = (column >= ks[:, None]) & (column < ke[:, None])
    if mask is not None:
        seen = seen & mask
    assert found.dtype == torch.float32
    assert bool((found[~seen] == -INF).all())
    exact = scores_by_hand(q, k, weights)
    budget = tolerances.score_tolerance(
        torch.float32, q.shape[1], q.shape[2], tolerances.score_magnitude(q, k, weights)
    )
    assert bool(((found.double() - exact).abs() <= budget)[seen].all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim"), [(1, 32), (3, 40), (16, 32), (24, 64), (64, 128), (128, 33)]
)
def test_scores_are_the_weighted_head_sum_of_rectified_dots(heads, dim, dtype):
    q, k, weights = gaussian(7, KEYS, heads, dim, dtype)
    assert_scores(by("triton", ops.index_scores, q, k, weights, KS, KE), q, k, weights)
    mask = torch.rand(7, KEYS) < 0.6
    masked = by("triton", ops.index_scores, q, k, weights, KS, KE, mask)
    assert_scores(masked, q, k, weights, mask=mask)


def test_queries_and_keys_of_two_dtypes_meet_in_float32():
    q, k, weights = gaussian(7, KEYS)
    q, weights = q.bfloat16(), weights.double()
    assert_scores(by("triton", ops.index_scores, q, k, weights, KS, KE), q, k, weights)
    assert_scores(
        by("triton", ops.index_scores, q.half(), k.bfloat16(), weights, KS, KE),
        q.half(), k.bfloat16(), weights,
    )  # fmt: skip


def test_fp8_operands_are_scored_as_they_are():
    q, k, weights = gaussian(7, KEYS, 16, 64)
    q, scale = quantise_index_key(q)
    k, weights = quantise_index_key(k)[0], weights * scale
    assert_scores(by("triton", ops.index_scores, q, k, weights, KS, KE), q, k, weights)


def test_fp8_queries_and_keys_come_together_and_are_left_to_the_reference_otherwise():
    q, k, weights = whole_numbers(7, KEYS, 16, 64)
    places = torch.arange(KEYS, dtype=torch.int32)
    for op, *rest in (
        (ops.index_scores,),
        (ops.index_select, 101, 24),
        (index_select_partial, places, KE - KS, 101, 24),
    ):
        with pytest.raises(NotImplementedError, match="queries in float8_e4m3fn take keys in it"):
            by("triton", op, q.to(FP8), k, weights, KS, KE, *rest)
        with pytest.raises(NotImplementedError, match="keys in float8_e4m3fn take queries in it"):
            by("triton", op, q, k.to(FP8), weights, KS, KE, *rest)
        found = by("triton", op, q.to(FP8), k.to(FP8), weights, KS, KE, *rest)
        expected = by("reference", op, q, k, weights, KS, KE, *rest)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_strided_operands_score_as_their_copies_do():
    q, k, weights = whole_numbers(160, 450, 16, 64)
    q, k, weights = q[:14:2, ::2, 1::2], k.view(150, 192)[:, 64:96], weights.t().clone().t()
    weights = weights[:14:2, 1::2]
    packed = by("triton", ops.index_scores, q, k, weights, KS, KE)
    assert torch.equal(packed, by("reference", ops.index_scores, q, k, weights, KS, KE))


def test_what_an_invisible_key_holds_reaches_no_score_and_a_visible_nan_stays():
    q, k, weights = gaussian(3, 80, 3, 32)
    ks, ke = int32(4, 4, 50), int32(20, 21, 70)
    k[:4], k[21:50], k[70:] = NAN, INF, NAN
    clean = k.nan_to_num(0.0, 0.0, 0.0)
    found = by("triton", ops.index_scores, q, k, weights, ks, ke)
    assert torch.equal(found, by("triton", ops.index_scores, q, clean, weights, ks, ke))
    k[10] = NAN
    found = by("triton", ops.index_scores, q, k, weights, ks, ke)
    assert found[:2, 10].isnan().all()
    assert found.isnan().sum() == 2


def test_a_key_of_infinities_does_not_meet_heads_that_only_pad_the_tile():
    q, weights = torch.ones(1, 3, 16), torch.ones(1, 3)
    k = torch.ones(2, 16)
    k[0, 0], k[1, 0] = -INF, INF
    assert by("triton", ops.index_scores, q, k, weights, int32(0), int32(2)).tolist() == [[0, INF]]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_step_without_tokens_or_keys_is_empty(batch_invariant):
    for tokens, keys in ((0, 0), (0, 9), (3, 0)):
        q, k, weights = gaussian(tokens, keys)
        none = torch.zeros(tokens, dtype=torch.int32)
        found = by("triton", ops.index_scores, q, k, weights, none, none)
        assert tuple(found.shape) == (tokens, keys)
        for bound in (keys, 9):
            args = q, k, weights, none, none, bound, 4, None, batch_invariant
            assert by("triton", ops.index_select, *args).tolist() == [[-1] * 4] * tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(2, 128), (24, 64), (64, 32), (128, 33)])
def test_selections_are_those_of_the_reference(heads, dim, dtype):
    q, k, weights = whole_numbers(7, KEYS, heads, dim, dtype)
    mask = torch.rand(7, KEYS) < 0.7
    for topk in (1, 24, 96):
        for operand in (None, mask):
            args = q, k, weights, KS, KE, 101, topk, operand
            found = by("triton", ops.index_select, *args)
            assert torch.equal(found, by("reference", ops.index_select, *args))
            ops.check_indices(found, KS, KE, topk, operand)


def test_real_scores_give_the_highest_keys_but_for_rounding_at_the_threshold():
    ks, ke = causal_intervals([5, 3], cached=120)
    q, k, weights = gaussian(8, int(ke.max()), 16, 64, torch.bfloat16)
    exact = scores_by_hand(q, k, weights)
    chosen = by("triton", ops.index_select, q, k, weights, ks, ke, 125, 24)
    ops.check_indices(chosen, ks, ke, 24)
    for row in range(8):
        visible = exact[row, int(ks[row]) : int(ke[row])]
        picked = torch.zeros_like(visible, dtype=torch.bool)
        picked[chosen[row].long()] = True
        assert visible[picked].min() >= visible[~picked].max() - 1e-5


@pytest.mark.parametrize("masked", [False, True])
def test_scores_stay_within_the_workspace_and_a_selection_does_not_depend_on_it(
    masked, monkeypatch
):
    from dsafx.ops.triton import index_select

    held = []

    def record(scores: Tensor, *args: object) -> None:
        held.append((scores.shape[0], scores.untyped_storage().nbytes()))
        score_rows(scores, *args)

    score_rows = index_select.score_rows
    monkeypatch.setattr(index_select, "score_rows", record)
    q, k, weights = whole_numbers(7, KEYS)
    mask = torch.rand(7, KEYS) < 0.7 if masked else None
    args = q, k, weights, KS, KE, 101, 16, mask
    whole = by("triton", ops.index_select, *args)
    # A row of 101 scores takes the room of 128.
    with ops.options(workspace_bytes=3 * 128 * 4):
        blocked = by("triton", ops.index_select, *args)
    assert torch.equal(blocked, whole)
    assert held == [(7, 7 * 512), (3, 3 * 512), (3, 3 * 512), (1, 3 * 512)]


def test_no_scoring_kernel_is_launched_where_the_host_knows_that_all_rows_are_short(monkeypatch):
    from dsafx.ops.triton import index_select

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a scoring kernel was launched")

    monkeypatch.setattr(index_select, "score_rows", refuse)
    q, k, weights = gaussian(7, KEYS)
    mask = torch.rand(7, KEYS) < 0.7
    for operand in (None, mask):
        found = by("triton", ops.index_select, q, k, weights, KS, KE, 101, 101, operand)
        ops.check_indices(found, KS, KE, 101, operand)
    with pytest.raises(AssertionError, match="was launched"):
        by("triton", ops.index_select, q, k, weights, KS, KE, 102, 101)


@pytest.mark.parametrize("masked", [False, True])
def test_a_row_that_sees_at_most_topk_keys_gets_no_score(masked):
    from dsafx.ops.triton.index_scores import score_rows
    from dsafx.ops.triton.radix_select import visible_counts

    q, k, weights = gaussian(7, KEYS)
    mask = torch.rand(7, KEYS) < 0.5
    counts = visible_counts(KS, KE, mask) if masked else (KE - KS)
    for topk in (45, 100):
        out = torch.full((7, 101), 99.0)
        score_rows(out, q, k, weights, KS, KE, 101, topk, counts if masked else None)
        position = torch.arange(101)
        scored = (counts[:, None] > topk) & (position < (KE - KS)[:, None])
        assert torch.equal(out != 99.0, scored)


def test_short_rows_among_long_ones_are_never_looked_at():
    q, k, weights = whole_numbers(7, KEYS)
    expected = by("triton", ops.index_select, q, k, weights, KS, KE, 101, 100)
    q[KE - KS <= 100] = NAN
    weights[KE - KS <= 100] = NAN
    found = by("triton", ops.index_select, q, k, weights, KS, KE, 101, 100)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 40), (32, 64)])
def test_a_row_selects_alike_alone_and_anywhere_in_any_batch(heads, dim, dtype):
    """Nearly equal keys make every selection hang on the last bit of a score."""
    q, _, weights = gaussian(8, 0, heads, dim, dtype)
    k = (torch.randn(1, dim) + 1e-2 * torch.randn(300, dim)).to(dtype)

    def select(batch: list[int], at: int) -> Tensor:
        ks, ke = torch.full((len(batch),), 17), torch.full((len(batch),), 217)
        ks[:at], ke[at + 1 :] = 0, 280
        args = q[batch], k, weights[batch], ks.int(), ke.int(), 263, 50, None, True
        return by("triton", ops.index_select, *args)[at]

    alone = select([5], 0)
    for size in (2, 7):
        for at in (0, size // 2, size - 1):
            others = [row % 5 for row in range(size)]
            others[at] = 5
            assert torch.equal(select(others, at), alone)


def test_gradients_are_detached_and_other_operands_refused_by_name():
    q, k, weights = (operand.requires_grad_() for operand in gaussian(7, KEYS))
    assert not by("triton", ops.index_select, q, k, weights, KS, KE, 101, 8).requires_grad
    with pytest.raises(ValueError, match="got 100 for a row of 101"):
        by("triton", ops.index_select, q, k, weights, KS, KE, 100, 8)
    with pytest.raises(NotImplementedError, match=r"index_select .*q must be float32, bfloat16"):
        by("triton", ops.index_select, q.double(), k, weights, KS, KE, 101, 8)
    q, k, weights = gaussian(7, KEYS, 129)
    with pytest.raises(NotImplementedError, match="1 to 128 heads, got 129"):
        by("triton", ops.index_scores, q, k, weights, KS, KE)


def test_no_launcher_reads_a_value_of_the_device():
    """So that a CUDA graph can record each of them (contract C6)."""
    q, k, weights = whole_numbers(7, KEYS)
    mask = torch.rand(7, KEYS) < 0.7
    at = pages((9, 40), new=3)
    page_q, keys, page_weights = index_inputs(at)
    cache = filled_index_cache(at, keys, "ue8m0")
    rows = at.block_table, at.row_request, at.lens
    places = torch.arange(KEYS, dtype=torch.int32)
    with as_on_a_device():
        for topk in (16, 101):
            for operand in (None, mask):
                by("triton", ops.index_select, q, k, weights, KS, KE, 101, topk, operand)
            scores = by("triton", ops.index_scores, q, k, weights, KS, KE, mask)
            by("triton", ops.select_topk, scores, KS, KE, topk, mask)
            args = page_q, cache, page_weights, *rows, 40, topk, "ue8m0"
            by("triton", index_select_paged, *args)
            args = q, k, weights, KS, KE, places, KE - KS, 101, topk
            part = by("triton", index_select_partial, *args)
            by("triton", merge_selection, part[0][None], part[1][None], topk)
