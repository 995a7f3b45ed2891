"""Keys spread over ranks: the merged selection is that of one rank that holds all keys."""

from __future__ import annotations

import pytest
import torch
from _opcheck import arrange, one_graph_for_lengths, opcheck_all
from _reference import causal_intervals, int32

from dsafx import ops
from dsafx.ops.index_select_partial import index_select_partial
from dsafx.ops.merge_selection import merge_selection

INF, NAN = float("inf"), float("nan")
SPLITS = ("zigzag", "round robin")


def whole_numbers(*shape: int):
    """float32 small enough that every product and sum of a test is exact, in any order."""
    return torch.randint(-3, 4, shape).float()


def owner(length: int, ranks: int, split: str):
    """[length] the rank that holds each position of a request."""
    position = torch.arange(length)
    if split == "round robin":
        return position % ranks
    chunk = (position * 2 * ranks).div(max(length, 1), rounding_mode="floor")
    return torch.minimum(chunk, 2 * ranks - 1 - chunk)


def parts(q, k, weights, ks, ke, topk, ranks, split, shuffle=False):
    """What each rank makes of its share of the keys: positions and scores [ranks, T, K]."""
    visible = (ke - ks).clamp(min=0)
    starts = torch.unique(ks)
    found = []
    for rank in range(ranks):
        keys, positions, base = [], [], {}
        for start in starts.tolist():
            length = int(ke[ks == start].max()) - start
            mine = (owner(length, ranks, split) == rank).nonzero()[:, 0]
            if shuffle:
                mine = mine[torch.randperm(mine.shape[0])]
            base[start] = sum(len(part) for part in positions), mine
            keys.append(k[start : start + length][mine])
            positions.append(mine.to(torch.int32))
        local_ks = int32(*[base[start][0] for start in ks.tolist()])
        counts = [
            int((base[start][1] < seen).sum())
            for start, seen in zip(ks.tolist(), visible.tolist(), strict=True)
        ]
        local_ke = local_ks + int32(*counts)
        longest = int(visible.max()) if visible.numel() else 0
        result = index_select_partial(
            q,
            torch.cat(keys),
            weights,
            local_ks,
            local_ke,
            torch.cat(positions),
            visible,
            longest,
            topk,
        )
        found.append(result)
    return tuple(torch.stack(part) for part in zip(*found, strict=True))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("topk", [1, 4, 9, 64])
def test_the_merged_selection_is_that_of_all_keys(topk, ranks, split):
    ks, ke = causal_intervals([7, 1, 24], cached=3)
    q, k, weights = whole_numbers(32, 8, 4), whole_numbers(int(ke.max()), 4), whole_numbers(32, 8)
    merged = merge_selection(*parts(q, k, weights, ks, ke, topk, ranks, split), topk)
    assert torch.equal(merged, ops.index_select(q, k, weights, ks, ke, 27, topk))
    ops.check_indices(merged, ks, ke, topk)


@pytest.mark.parametrize("split", SPLITS)
def test_equal_scores_go_to_the_lowest_global_positions(split):
    ks, ke = causal_intervals([16])
    q, k, weights = torch.zeros(16, 8, 4), whole_numbers(16, 4), whole_numbers(16, 8)
    merged = merge_selection(*parts(q, k, weights, ks, ke, 4, 4, split), 4)
    assert merged[-1].tolist() == [0, 1, 2, 3]
    assert torch.equal(merged, ops.index_select(q, k, weights, ks, ke, 16, 4))


def test_a_rank_may_hold_its_keys_in_any_order():
    ks, ke = int32(0, 0), int32(24, 24)
    q, k, weights = whole_numbers(2, 8, 4), whole_numbers(24, 4), whole_numbers(2, 8)
    q[1] = 0
    for topk in (5, 24):
        merged = merge_selection(*parts(q, k, weights, ks, ke, topk, 2, "zigzag", True), topk)
        assert torch.equal(merged, ops.index_select(q, k, weights, ks, ke, 24, topk))


def test_closed_form_follows_the_count_of_all_ranks_and_not_the_shard():
    k = torch.tensor([[1.0], [9.0], [5.0]])
    q, weights = torch.ones(2, 1, 1), torch.ones(2, 1)
    ks, ke, positions = int32(0, 0), int32(3, 3), int32(0, 2, 4)
    named, scores = index_select_partial(q, k, weights, ks, ke, positions, int32(4, 6), 6, 4)
    assert named.tolist() == [[0, 2, 4, -1], [0, 2, 4, -1]]
    assert scores.tolist() == [[0.0, 0.0, 0.0, -INF], [1.0, 9.0, 5.0, -INF]]


def test_rows_that_are_short_on_all_ranks_together_are_never_scored():
    ks, ke = causal_intervals([16])
    q, k, weights = torch.full((16, 8, 4), NAN), whole_numbers(16, 4), whole_numbers(16, 8)
    positions, scores = parts(q, k, weights, ks, ke, 16, 2, "round robin")
    assert torch.equal(merge_selection(positions, scores, 16), ops.causal_positions(ks, ke, 16, 16))
    assert not scores.isnan().any()


def test_an_empty_row_and_a_rank_without_keys_select_nothing():
    q, weights = whole_numbers(2, 8, 4), whole_numbers(2, 8)
    none = torch.zeros(0, dtype=torch.int32)
    empty = index_select_partial(
        q, torch.zeros(0, 4), weights, int32(0, 0), int32(0, 0), none, int32(0, 9), 9, 2
    )
    assert empty[0].tolist() == [[-1, -1], [-1, -1]]
    assert (empty[1] == -INF).all()
    held = int32(-1, 3), torch.tensor([-INF, 2.0])
    positions = torch.stack([empty[0], held[0].expand(2, 2).clone()])
    scores = torch.stack([empty[1], held[1].expand(2, 2).clone()])
    assert merge_selection(positions, scores, 2).tolist() == [[3, -1], [3, -1]]


def test_merging_ranks_nan_below_minus_infinity_and_still_takes_it():
    positions = torch.tensor([[[0, 2, -1]], [[1, 3, 5]]], dtype=torch.int32)
    scores = torch.tensor([[[NAN, -INF, 9.0]], [[-INF, 1.0, NAN]]])
    merged = [merge_selection(positions, scores, topk).tolist()[0] for topk in (1, 2, 3)]
    assert merged == [[3], [1, 3], [1, 2, 3]]
    assert merge_selection(positions[:1], scores[:1], 3).tolist() == [[0, 2, -1]]


@pytest.mark.parametrize("rows", [1, 7])
def test_the_parts_do_not_depend_on_the_workspace(rows):
    ks, ke = causal_intervals([20, 12])
    q, k, weights = whole_numbers(32, 8, 4), whole_numbers(32, 4), whole_numbers(32, 8)
    whole = parts(q, k, weights, ks, ke, 4, 2, "zigzag")
    with ops.options(workspace_bytes=rows * 16 * (8 * 4 + 64)):
        blocked = parts(q, k, weights, ks, ke, 4, 2, "zigzag")
        assert torch.equal(merge_selection(*blocked, 4), merge_selection(*whole, 4))
    for one, other in zip(blocked, whole, strict=True):
        assert torch.equal(one, other)


def test_seven_tokens_over_four_ranks():
    for split in SPLITS:
        ks, ke = causal_intervals([7])
        q, k, weights = whole_numbers(7, 8, 4), whole_numbers(7, 4), whole_numbers(7, 8)
        merged = merge_selection(*parts(q, k, weights, ks, ke, 3, 4, split), 3)
        assert torch.equal(merged, ops.index_select(q, k, weights, ks, ke, 7, 3))


def test_a_shard_larger_than_the_whole_is_refused():
    q, k, weights = whole_numbers(1, 8, 4), whole_numbers(5, 4), whole_numbers(1, 8)
    positions = torch.arange(5, dtype=torch.int32)
    with pytest.raises(ValueError, match="less than this rank's own"):
        index_select_partial(q, k, weights, int32(0), int32(5), positions, int32(4), 9, 2)
    with pytest.raises(ValueError, match="max_kv_len must bound visible, got 4 for 5"):
        index_select_partial(q, k, weights, int32(0), int32(5), positions, int32(5), 4, 2)
    with pytest.raises(ValueError, match="one per key"):
        index_select_partial(q, k, weights, int32(0), int32(5), positions[:4], int32(5), 5, 2)


def test_merging_refuses_parts_that_are_narrower_than_the_result():
    positions = torch.zeros(2, 3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="at most the width of positions, 4, got 5"):
        merge_selection(positions, torch.zeros(2, 3, 4), 5)
    with pytest.raises(ValueError, match="must have the shape of positions"):
        merge_selection(positions, torch.zeros(2, 3, 5), 4)
    with pytest.raises(TypeError, match="scores must be float32"):
        merge_selection(positions, torch.zeros(2, 3, 4, dtype=torch.float64), 4)


def partial_arguments(tokens: int, layout: str = "contiguous", dtype=torch.float32):
    ks = torch.zeros(tokens, dtype=torch.int32)
    ke = torch.arange(1, tokens + 1, dtype=torch.int32)
    return (
        arrange(torch.randn(tokens, 8, 16).to(dtype), layout),
        arrange(torch.randn(tokens, 16).to(dtype), layout),
        arrange(torch.randn(tokens, 8), layout),
        ks,
        ke,
        2 * torch.arange(tokens, dtype=torch.int32),
        2 * ke,
        2 * tokens,
        3,
    )


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("layout", ["contiguous", "sliced", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ops_are_what_their_schemas_and_fakes_say(tokens, layout, dtype):
    args = partial_arguments(tokens, layout, dtype)
    opcheck_all(torch.ops.dsafx.index_select_partial.default, [args])
    found = index_select_partial(*args)
    stacked = [torch.stack([part, part + 1]) for part in found]
    opcheck_all(torch.ops.dsafx.merge_selection.default, [(*stacked, 3)])


def test_one_symbolic_graph_serves_every_length():
    def both(*args):
        found = index_select_partial(*args)
        return merge_selection(found[0][None], found[1][None], args[-1])

    one_graph_for_lengths(both, partial_arguments, (5, 9, 6))
