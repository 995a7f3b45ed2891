"""The Triton kernel of exact selection, in Triton's interpreter: the ids of the reference."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from _reference import int32, padded, select_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsafx import ops
from dsafx.ops.index_select_partial import index_select_partial
from dsafx.ops.merge_selection import merge_selection

pytestmark = pytest.mark.triton

INF, NAN = math.inf, math.nan
NEGATIVE_NAN = struct.unpack("f", struct.pack("I", 0xFFC00001))[0]


def by_triton(op, *args) -> Tensor:
    with ops.use_provider("triton"):
        return op(*args)


@pytest.fixture(params=["one program a row", "several programs a row"])
def programs(request, monkeypatch):
    """How wide rows are selected; narrow ones have one program each."""
    from dsafx.ops.triton import _radix_split

    if request.param == "one program a row":
        monkeypatch.setattr(_radix_split, "_PROGRAMS", 1)


def assert_same(scores: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None = None):
    """The kernel answers what the reference answers."""
    found = by_triton(ops.select_topk, scores, ks, ke, topk, mask)
    with ops.use_provider("reference"):
        expected = ops.select_topk(scores, ks, ke, topk, mask)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("topk", [1, 3, 64, 300, 2051])
def test_the_highest_scores_win_and_the_lowest_of_equal_ones(topk, programs):
    """Rows of several steps of the kernel: distinct scores, many ties, one plateau, bf16 scores."""
    scores = torch.randn(5, 9000)
    scores[1] = scores[1].mul(4).round()
    scores[2] = 0.0
    scores[3] = scores[3].bfloat16().float()
    scores[4] = torch.arange(9000).fmod(7)
    ks, ke = int32(0, 7, 0, 2, 4500), int32(9000, 8990, 8193, 5000, 9000)
    found = by_triton(ops.select_topk, scores, ks, ke, topk)
    assert torch.equal(found, padded(select_by_hand(scores, ks, ke, topk), topk))
    ops.check_indices(found, ks, ke, topk)


@pytest.mark.parametrize("topk", [1, 3, 20, 700])
def test_a_mask_hides_keys_and_a_row_of_few_visible_keys_selects_them_all(topk, programs):
    scores = torch.randn(4, 5000).mul(3).round()
    mask = torch.rand(4, 5000) < 0.3
    mask[1] = False
    mask[1, [4, 900, 4200, 4999]] = True
    mask[2] = False
    ks, ke = int32(0, 3, 0, 100), int32(5000, 5000, 5000, 4900)
    assert_same(scores, ks, ke, topk, mask)
    found = by_triton(ops.select_topk, scores, ks, ke, topk, mask)
    ops.check_indices(found, ks, ke, topk, mask)


def test_a_short_row_is_answered_without_its_scores():
    scores = torch.full((4, 50), NAN)
    scores[1, 0] = 3.0
    ks, ke = int32(0, 5, 9, 20), int32(4, 12, 9, 10)
    found = by_triton(ops.select_topk, scores, ks, ke, 7)
    expected = [[0, 1, 2, 3, -1, -1, -1], list(range(7)), [-1] * 7, [-1] * 7]
    assert found.tolist() == expected


def test_signed_zeros_are_equal_and_nan_beats_what_is_hidden():
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, 1.0, -1.0]])
    assert by_triton(ops.select_topk, scores, int32(0), int32(6), 3).tolist() == [[0, 1, 4]]
    scores = torch.tensor([[5.0, NEGATIVE_NAN, -INF, NAN, 1.0, NAN]])
    mask = torch.tensor([[False, True, True, True, True, True]])
    found = by_triton(ops.select_topk, scores, int32(0), int32(6), 3, mask)
    assert found.tolist() == [[1, 2, 4]]


@settings(max_examples=60)
@given(data=st.data())
def test_any_intervals_and_scores_select_as_the_reference(data):
    tokens, keys = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 30))
    bound = st.lists(st.integers(0, keys), min_size=tokens, max_size=tokens)
    ks, ke = int32(*data.draw(bound)), int32(*data.draw(bound))
    special = st.sampled_from(
        [NAN, NEGATIVE_NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, -7e4, 3e38]
    )
    count = tokens * keys
    drawn = data.draw(st.lists(special, min_size=count, max_size=count))
    scores = torch.tensor(drawn).view(tokens, keys)
    mask = torch.rand(tokens, keys) < 0.6 if data.draw(st.booleans()) else None
    untouched = scores.clone()
    assert_same(scores, ks, ke, data.draw(st.integers(1, 12)), mask)
    assert torch.equal(scores.view(torch.int32), untouched.view(torch.int32))


def test_scores_one_step_apart_keep_their_order():
    order = (37 * torch.arange(600)) % 600
    scores = (order + 0x40400000).to(torch.int32).view(torch.float32)[None]
    for topk in (1, 64, 599):
        assert_same(scores, int32(0), int32(600), topk)
        assert_same(-scores, int32(0), int32(600), topk)


def test_strided_operands_select_as_their_copies_do():
    scores = torch.randn(80, 160)[::8, ::2].mul(2).round()
    mask = (torch.rand(80, 10) < 0.7).t()
    ks = torch.arange(20, dtype=torch.int32)[::2]
    for given_scores in (scores, scores.t().clone().t()):
        assert_same(given_scores, ks, ks + 60, 9)
        assert_same(given_scores, ks, ks + 60, 9, mask)


def test_rows_without_tokens_or_keys_select_nothing():
    for tokens, keys in ((0, 0), (0, 9), (3, 0)):
        none = torch.zeros(tokens, dtype=torch.int32)
        for mask in (None, torch.ones(tokens, keys, dtype=torch.bool)):
            found = by_triton(ops.select_topk, torch.zeros(tokens, keys), none, none, 4, mask)
            assert found.tolist() == [[-1] * 4] * tokens


def test_an_interval_beyond_the_scores_is_refused():
    with pytest.raises(ValueError, match=r"within the 5 packed keys, got \[0, 6\)"):
        by_triton(ops.select_topk, torch.zeros(1, 5), int32(0), int32(6), 2)


def test_special_scores_of_wide_rows_keep_their_order(programs):
    scores = torch.randn(3, 9000)
    scores[0, ::3], scores[0, 1::3] = NAN, -INF
    scores[1, ::2], scores[1, 4001] = -0.0, INF
    scores[1, 1::2].clamp_(max=0.0)
    scores[2] = NEGATIVE_NAN
    for topk in (1, 2999, 3001, 6100):
        assert_same(scores, int32(0, 5, 8), int32(9000, 8999, 8900), topk)


@pytest.mark.parametrize("topk", [1, 4, 9, 64])
def test_the_parts_of_two_ranks_are_those_of_the_reference_and_merge_to_the_whole(topk):
    """One rank holds its keys out of order, so that a tie follows positions and not places."""
    q = torch.randint(-2, 3, (5, 8, 16)).float()
    k = torch.randint(-2, 3, (70, 16)).float()
    weights = torch.randint(-2, 3, (5, 8)).float()
    visible = int32(70, 70, 40, 3, 0)
    found = []
    for rank, order in enumerate((torch.randperm(35), torch.arange(35))):
        positions = (2 * order + rank).int()
        # The interval of a row is of places: on the first rank it holds any of its keys.
        seen = (35, 35, 20, 2 - rank, 0)
        args = q, k[positions.long()], weights, int32(0, 0, 0, 0, 0), int32(*seen), positions
        args = *args, visible, 70, topk
        parts = by_triton(index_select_partial, *args)
        with ops.use_provider("reference"):
            expected = index_select_partial(*args)
        assert torch.equal(parts[0], expected[0])
        assert torch.equal(parts[1], expected[1])
        found.append(parts)
    both = [torch.stack(part) for part in zip(*found, strict=True)]
    merged = by_triton(merge_selection, *both, topk)
    with ops.use_provider("reference"):
        assert torch.equal(merged, merge_selection(*both, topk))
    interval = int32(0, 0), int32(70, 70)
    whole = by_triton(ops.index_select, q[:2], k, weights[:2], *interval, 70, topk)
    assert torch.equal(merged[:2], whole)


def test_merging_ranks_nan_below_minus_infinity_and_still_takes_it():
    positions = torch.tensor([[[0, 2, -1]], [[1, 3, 5]]], dtype=torch.int32)
    scores = torch.tensor([[[NAN, -INF, 9.0]], [[-INF, 1.0, NAN]]])
    merged = [by_triton(merge_selection, positions, scores, topk).tolist()[0] for topk in (1, 2, 3)]
    assert merged == [[3], [1, 3], [1, 2, 3]]
    assert by_triton(merge_selection, positions[:1], scores[:1], 3).tolist() == [[0, 2, -1]]


def test_a_rank_without_keys_or_tokens_selects_nothing():
    q, weights, none = torch.ones(2, 8, 4), torch.ones(2, 8), torch.zeros(0, dtype=torch.int32)
    args = q, torch.zeros(0, 4), weights, int32(0, 0), int32(0, 0), none, int32(0, 9), 9, 2
    named, scores = by_triton(index_select_partial, *args)
    assert named.tolist() == [[-1, -1], [-1, -1]]
    assert bool((scores == -INF).all())
    empty = torch.zeros(2, 0, 3, dtype=torch.int32), torch.zeros(2, 0, 3)
    assert by_triton(merge_selection, *empty, 2).tolist() == []
