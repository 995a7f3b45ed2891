from __future__ import annotations

import pytest
import torch
from _inside import Inside
from _reference import (
    causal_intervals,
    int32,
    padded,
    scores_by_hand,
    select_by_hand,
)

from dsafx import ops

INF = float("inf")
NAN = float("nan")
WORK = {"aten::mm", "aten::bmm", "aten::topk", "aten::sort"}


@pytest.fixture(autouse=True, params=["reference", "dispatched"])
def _provider(request):
    """Every test twice: on the meaning of the ops, and on what runs on this device."""
    if request.param == "dispatched":
        yield
    else:
        with ops.use_provider("reference"):
            yield


def indexer(tokens: int, keys: int, heads: int = 8, dim: int = 16, dtype=torch.float32):
    torch.manual_seed(tokens + keys)
    q = torch.randn(tokens, heads, dim).to(dtype)
    k = torch.randn(keys, dim).to(dtype)
    return q, k, torch.randn(tokens, heads) * heads**-0.5 * dim**-0.5


def test_an_empty_row_selects_nothing():
    ks, ke = int32(0, 5), int32(2, 3)
    assert ops.causal_positions(ks, ke, 2, 4).tolist() == [[0, 1, -1, -1], [-1, -1, -1, -1]]


def test_a_closed_form_refuses_rows_beyond_its_premise():
    with pytest.raises(ValueError, match="at most 4 keys a row, got max_kv_len 5"):
        ops.causal_positions(int32(0), int32(5), 5, 4, bound=4)


def test_scores_are_the_formula_and_minus_infinity_where_not_visible():
    q, k, weights = indexer(5, 12)
    ks, ke = int32(0, 0, 3, 4, 9), int32(4, 12, 9, 4, 2)
    scores = ops.index_scores(q, k, weights, ks, ke)
    expected = scores_by_hand(q, k, weights)
    column = torch.arange(12)
    visible = (column >= ks[:, None]) & (column < ke[:, None])
    assert (scores[~visible] == -INF).all()
    torch.testing.assert_close(scores[visible].double(), expected[visible], atol=1e-5, rtol=1e-5)


def test_equal_scores_go_to_the_lowest_positions():
    scores = torch.zeros(1, 6)
    assert ops.select_topk(scores, int32(0), int32(6), 3).tolist() == [[0, 1, 2]]
    signed = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert ops.select_topk(signed, int32(0), int32(4), 2).tolist() == [[0, 1]]


def test_a_visible_minus_infinity_is_a_key_and_nan_ranks_below_it():
    scores = torch.tensor([[1.0, NAN, -INF, 2.0, NAN, -INF]])
    select = [ops.select_topk(scores, int32(0), int32(6), topk).tolist()[0] for topk in range(1, 7)]
    assert select == [
        [3],
        [0, 3],
        [0, 2, 3],
        [0, 2, 3, 5],
        [0, 1, 2, 3, 5],
        [0, 1, 2, 3, 4, 5],
    ]


def test_lanes_outside_of_a_row_never_beat_a_visible_minus_infinity():
    scores = torch.full((2, 64), 1e30)
    scores[0, :51], scores[1, 3:54] = -INF, -INF
    scores[0, :3], scores[1, 3:6] = 1.0, 1.0
    chosen = ops.select_topk(scores, int32(0, 3), int32(51, 54), 16)
    assert chosen.tolist() == [list(range(16)), list(range(16))]


def test_scores_below_the_range_of_half_precision_keep_their_order():
    scores = torch.full((1, 8), -1e6)
    scores[0, 5], scores[0, 2] = -7e4, -6.6e4
    assert ops.select_topk(scores, int32(0), int32(8), 2).tolist() == [[2, 5]]


@pytest.mark.parametrize("topk", [1, 3, 16, 40])
@pytest.mark.parametrize("masked", [False, True])
def test_selection_is_that_of_a_loop_over_rows(topk, masked):
    ks, ke = causal_intervals([9, 1, 24], cached=3)
    q, k, weights = indexer(34, int(ke.max()))
    mask = torch.rand(34, k.shape[0]) < 0.7 if masked else None
    chosen = ops.index_select(q, k, weights, ks, ke, 27, topk, mask)
    by_hand = select_by_hand(scores_by_hand(q, k, weights), ks, ke, topk, mask)
    assert chosen.tolist() == padded(by_hand, topk).tolist()
    ops.check_indices(chosen, ks, ke, topk, mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_selection_does_not_depend_on_the_workspace(rows, masked):
    ks, ke = causal_intervals([40, 20])
    q, k, weights = indexer(60, 60)
    mask = torch.rand(60, 60) < 0.8 if masked else None
    whole = ops.index_select(q, k, weights, ks, ke, 40, 8, mask)
    with ops.options(workspace_bytes=rows * 60 * (8 * 4 + 48)):
        assert torch.equal(ops.index_select(q, k, weights, ks, ke, 40, 8, mask), whole)


def test_no_tensor_grows_beyond_the_workspace():
    ks, ke = causal_intervals([512])
    q, k, weights = indexer(512, 512)
    budget = 1 << 20
    with ops.options(workspace_bytes=budget), Inside() as seen:
        ops.index_select(q, k, weights, ks, ke, 512, 8)
    with ops.use_provider("reference"), Inside() as whole:
        ops.index_scores(q, k, weights, ks, ke)
    assert seen.bytes <= budget
    # What the budget keeps away: all dots of all heads.
    assert whole.bytes >= 512 * 512 * 8 * 4


def test_short_rows_are_never_scored():
    ks, ke = causal_intervals([16])
    q, k, weights = indexer(16, 16)
    with Inside() as seen:
        chosen = ops.index_select(q * NAN, k, weights, ks, ke, 16, 16)
    with Inside() as scoring:
        ops.index_select(q, k, weights, ks, ke, 16, 15)
    assert not WORK & seen.names
    assert WORK & scoring.names
    assert torch.equal(chosen, ops.causal_positions(ks, ke, 16, 16))


def test_a_long_row_among_short_ones_is_scored_and_only_it():
    ks, ke = int32(0, 0, 0), int32(4, 9, 2)
    q, k, weights = indexer(3, 9)
    poisoned = q.clone()
    poisoned[[0, 2]] = NAN
    chosen = ops.index_select(poisoned, k, weights, ks, ke, 9, 4)
    by_hand = select_by_hand(scores_by_hand(q, k, weights), ks, ke, 4)
    assert chosen.tolist() == padded(by_hand, 4).tolist()


def test_packed_requests_do_not_see_each_other():
    ks, ke = causal_intervals([5, 7])
    q, k, weights = indexer(12, 12)
    whole = ops.index_select(q, k, weights, ks, ke, 7, 3)
    second = ops.index_select(q[5:], k[5:], weights[5:], ks[5:] - 5, ke[5:] - 5, 7, 3)
    assert torch.equal(whole[5:], second)


def test_a_batch_invariant_row_is_bit_equal_alone_and_in_any_batch():
    ks, ke = causal_intervals([30, 50])
    q, k, weights = indexer(80, 80, dtype=torch.bfloat16)
    whole = ops.index_select(q, k, weights, ks, ke, 50, 8, batch_invariant=True)
    for row in (0, 29, 30, 64, 79):
        one = slice(row, row + 1)
        alone = ops.index_select(
            q[one], k, weights[one], ks[one], ke[one], 50, 8, batch_invariant=True
        )
        assert torch.equal(alone, whole[one])


def test_a_key_beyond_sixteen_bits_is_found():
    k = torch.zeros(131_073, 4)
    k[[10, 70_000, 131_068]] = 1.0
    q, weights = torch.ones(1, 1, 4), torch.ones(1, 1)
    found = ops.index_select(q, k, weights, int32(0), int32(131_073), 131_073, 3)
    assert found.tolist() == [[10, 70_000, 131_068]]


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_step_without_keys_selects_nothing(tokens):
    q, k, weights = indexer(tokens, 0)
    none = torch.zeros(tokens, dtype=torch.int32)
    chosen = ops.index_select(q, k, weights, none, none, 0, 4)
    assert chosen.tolist() == [[-1] * 4] * tokens


def test_the_width_is_topk_even_where_there_are_fewer_keys():
    for keys in (1, 7, 8, 9, 33):
        ks, ke = causal_intervals([keys])
        q, k, weights = indexer(keys, keys)
        chosen = ops.index_select(q, k, weights, ks, ke, keys, 8)
        assert chosen.shape == (keys, 8)
        assert (chosen >= 0).sum(1).tolist() == [min(t + 1, 8) for t in range(keys)]


def test_bad_index_operands_name_the_argument():
    q, k, weights = indexer(3, 5)
    ks, ke = int32(0, 0, 0), int32(1, 2, 3)
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        ops.index_select(q, k, weights, ks, ke, 3, 0)
    with pytest.raises(ValueError, match="q must have 3 dimensions"):
        ops.index_select(q[0], k, weights, ks, ke, 3, 2)
    with pytest.raises(TypeError, match="weights must be float32, float64, got bfloat16"):
        ops.index_select(q, k, weights.bfloat16(), ks, ke, 3, 2)
    with pytest.raises(TypeError, match="ks must be int32, got int64"):
        ops.index_select(q, k, weights, ks.long(), ke, 3, 2)
    with pytest.raises(ValueError, match="k must be on the device of q, cpu, got meta"):
        ops.index_select(q, k.to("meta"), weights, ks, ke, 3, 2)
    with pytest.raises(ValueError, match=r"within the 5 packed keys, got \[0, 6\)"):
        ops.index_select(q, k, weights, ks, ke + 3, 6, 2)
    with pytest.raises(ValueError, match=r"within the 4 packed keys, got \[0, 5\)"):
        ops.select_topk(torch.zeros(1, 4), int32(0), int32(5), 2)
    with pytest.raises(ValueError, match=r"max_kv_len must bound .* got 2 for a row of 3"):
        ops.index_select(q, k, weights, ks, ke, 2, 2)
