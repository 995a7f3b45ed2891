from __future__ import annotations

import pytest
import torch
from _opcheck import one_graph_for_lengths
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsafx.ops.indices import check_indices, compact, slots


def int32(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_compact_sorts_the_valid_ids_and_moves_the_rest_to_the_end():
    assert compact(int32([-1, 7, -1, 2, 5], [-1, -1, -1, -1, -1])).tolist() == [
        [2, 5, 7, -1, -1],
        [-1, -1, -1, -1, -1],
    ]


def test_compact_ignores_lanes_beyond_the_length_whatever_they_hold():
    indices = int32([9, 3, 5, 1], [9, -1, 5, 2_000_000_000], [4, 3, 2, 1])
    assert compact(indices, int32(2, 3, 0)).tolist() == [
        [3, 9, -1, -1],
        [5, 9, -1, -1],
        [-1, -1, -1, -1],
    ]


def test_compact_takes_any_leading_dimensions_and_no_lanes_at_all():
    indices = int32([[3, -1], [1, 0]], [[-1, 8], [-1, -1]])
    lengths = torch.tensor([[2, 1], [2, 2]])
    assert compact(indices).tolist() == [[[3, -1], [0, 1]], [[8, -1], [-1, -1]]]
    assert compact(indices, lengths).tolist() == [[[3, -1], [1, -1]], [[8, -1], [-1, -1]]]
    assert compact(int32(4, -1, 2)).tolist() == [2, 4, -1]
    assert compact(torch.empty(3, 0, dtype=torch.int32)).shape == (3, 0)
    assert compact(torch.empty(0, 4, dtype=torch.int32)).shape == (0, 4)


@given(st.lists(st.lists(st.integers(-1, 40), min_size=6, max_size=6), min_size=1, max_size=4))
def test_compact_keeps_exactly_the_valid_ids(rows):
    result = compact(torch.tensor(rows, dtype=torch.int32))
    assert result.dtype == torch.int32
    for got, row in zip(result.tolist(), rows, strict=True):
        ids = sorted(i for i in row if i >= 0)
        assert got == ids + [-1] * (6 - len(ids))


def test_compact_makes_a_selection_that_check_indices_accepts():
    scores = torch.randn(4, 40)
    unordered = scores.topk(8, dim=1).indices.int()[:, torch.randperm(8)]
    ks, ke = torch.zeros(4, dtype=torch.int32), torch.full((4,), 40, dtype=torch.int32)
    check_indices(compact(unordered), ks, ke, topk=8)


def test_slots_follow_the_block_table():
    table = int32([4, 7], [2, 9])
    positions = int32([0, 63, 64, 127], [64, 1, -1, -1], [0, 70, -1, 2])
    assert slots(positions, table, int32(0, 1, 0), block_size=64).tolist() == [
        [256, 319, 448, 511],
        [576, 129, -1, -1],
        [256, 454, -1, 258],
    ]


def test_slots_are_int64_all_the_way():
    table = int32([40_000_000])
    result = slots(int32([5, -1]), table, int32(0), block_size=64)
    assert result.dtype == torch.int64
    assert result.tolist() == [[2_560_000_005, -1]]


def test_slots_never_use_a_stale_block_beyond_the_request():
    table = int32([4, 7, 99], [1, -1, -1])
    positions = int32([0, 99, 100, 128], [0, 63, 64, 5])
    result = slots(positions, table, int32(0, 1), block_size=64, lens=int32(100, 64))
    assert result.tolist() == [[256, 7 * 64 + 35, -1, -1], [64, 127, -1, 69]]


def test_slots_without_a_block_are_minus_one():
    table = int32([4, 7], [1, -1])
    positions = int32([128, 2_000_000_000, -5, 0], [64, 0, -1, 1])
    assert slots(positions, table, int32(0, 1), block_size=64).tolist() == [
        [-1, -1, -1, 256],
        [-1, 64, -1, 65],
    ]


def test_slots_of_a_padding_row_are_minus_one():
    table = int32([4])
    assert slots(int32([0], [1], [2]), table, int32(-1, 0, 3), 8).tolist() == [[-1], [33], [-1]]


def test_slots_of_an_empty_table_or_no_rows_have_the_right_shape():
    positions = int32([0, 1])
    for table in (torch.empty(1, 0, dtype=torch.int32), torch.empty(0, 3, dtype=torch.int32)):
        result = slots(positions, table, int32(0), 8)
        assert result.tolist() == [[-1, -1]]
        assert result.dtype == torch.int64
    none = torch.empty(0, 5, dtype=torch.int32)
    assert slots(none, int32([4]), torch.empty(0, dtype=torch.int32), 8).shape == (0, 5)


def test_one_graph_without_breaks_serves_three_lengths():
    def make(rows: int) -> tuple[Tensor, ...]:
        positions = torch.randint(-1, 20, (rows, 6), dtype=torch.int32)
        request = torch.randint(0, 2, (rows,), dtype=torch.int32)
        return positions, torch.randint(0, 7, (rows,)), int32([3, 1, 4], [1, 5, 9]), request

    def both(positions: Tensor, lengths: Tensor, table: Tensor, request: Tensor):
        return compact(positions, lengths), slots(positions, table, request, 8, int32(20, 11))

    one_graph_for_lengths(both, make, (4, 7, 9))


KS, KE = int32(0, 3, 5), int32(9, 5, 5)
GOOD = int32([1, 4, 6], [0, 1, -1], [-1, -1, -1])


def test_check_indices_accepts_long_short_and_empty_rows():
    check_indices(GOOD, KS, KE, topk=3)
    check_indices(torch.empty(0, 3, dtype=torch.int32), KS[:0], KE[:0], topk=3)
    check_indices(int32([-1, -1]), int32(7), int32(2), topk=2)


@pytest.mark.parametrize(
    ("row", "ids", "sentence"),
    [
        (0, [4, 1, 6], "row 0 is not ascending: [4, 1, 6]"),
        (0, [1, 1, 6], "row 0 repeats an id"),
        (0, [6, 1, 6], "row 0 repeats an id"),
        (0, [1, 4, 9], "row 0 holds a position outside its interval (of 9 keys)"),
        (0, [1, 4, -1], "row 0 has a wrong count (of 3 keys)"),
        (0, [-1, 1, 4], "row 0 holds -1 before a valid id"),
        (0, [1, 4, -2], "row 0 holds a negative id other than -1"),
        (1, [0, 2, -1], "row 1 holds a position outside its interval (of 2 keys)"),
        (1, [0, -1, -1], "row 1 has a wrong count (of 2 keys)"),
        (1, [-1, -1, -1], "row 1 has a wrong count (of 2 keys)"),
        (2, [0, -1, -1], "row 2 holds a position outside its interval (of 0 keys)"),
    ],
)
def test_check_indices_names_the_row_and_what_is_wrong(row, ids, sentence):
    bad = GOOD.clone()
    bad[row] = torch.tensor(ids, dtype=torch.int32)
    with pytest.raises(AssertionError) as raised:
        check_indices(bad, KS, KE, topk=3)
    assert sentence in str(raised.value)
    assert str(ids) in str(raised.value)


def test_check_indices_names_a_wrong_dtype_and_width():
    with pytest.raises(AssertionError, match=r"a selection is int32, got torch\.int64"):
        check_indices(GOOD.long(), KS, KE, topk=3)
    with pytest.raises(AssertionError, match=r"has shape \(3, 4\), got \(3, 3\)"):
        check_indices(GOOD, KS, KE, topk=4)


def test_check_indices_counts_what_the_mask_leaves_visible():
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, [0, 2, 3, 7, 9]] = True  # row 0 sees packed keys 2..8: positions 0, 1 and 5
    mask[1] = True
    ks, ke = int32(2, 4), int32(9, 10)
    check_indices(int32([0, 1, 5, -1], [0, 2, 3, 5]), ks, ke, topk=4, mask=mask)
    with pytest.raises(AssertionError, match="row 0 holds a position that the mask hides"):
        check_indices(int32([0, 1, 4, -1], [0, 2, 3, 5]), ks, ke, topk=4, mask=mask)
    with pytest.raises(AssertionError, match=r"row 0 has a wrong count \(of 3 keys\)"):
        check_indices(int32([0, 1, -1, -1], [0, 2, 3, 5]), ks, ke, topk=4, mask=mask)


def test_check_indices_refuses_a_wrong_interval_or_mask():
    with pytest.raises(TypeError, match="ke must be int32"):
        check_indices(GOOD, KS, KE.long(), topk=3)
    with pytest.raises(TypeError, match="mask must be bool"):
        check_indices(GOOD, KS, KE, topk=3, mask=torch.ones(3, 9))
    with pytest.raises(ValueError, match="mask must have 3 in dimension 0"):
        check_indices(GOOD, KS, KE, topk=3, mask=torch.ones(2, 9, dtype=torch.bool))


def test_bad_arguments_of_compact_and_slots_are_refused_by_name():
    with pytest.raises(TypeError, match="indices must be int32, got int64"):
        compact(GOOD.long())
    with pytest.raises(ValueError, match="lengths must have 3 in dimension 0"):
        compact(GOOD, int32(1, 2))
    with pytest.raises(TypeError, match="lengths must be int32, int64, got float32"):
        compact(GOOD, torch.ones(3))
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        slots(GOOD, int32([1]), int32(0, 0, 0), 0)
    with pytest.raises(ValueError, match="row_request must have 3 in dimension 0"):
        slots(GOOD, int32([1]), int32(0), 8)
    with pytest.raises(ValueError, match="block_table must have 2 dimensions"):
        slots(GOOD, int32(1), int32(0, 0, 0), 8)
    with pytest.raises(ValueError, match="lens must have 1 in dimension 0"):
        slots(GOOD, int32([1]), int32(0, 0, 0), 8, lens=int32(1, 2))
