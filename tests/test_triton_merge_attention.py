"""``merge_attention`` of the triton provider, in the interpreter, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from _opcheck import LAYOUTS, arrange
from torch import Tensor

from dsafx.ops import use_provider
from dsafx.ops.merge_attention import merge_attention
from dsafx.ops.tolerances import unit_roundoff

pytestmark = pytest.mark.triton
INF = math.inf


def sides(rows: int, width: int, dtype: torch.dtype, layout: str) -> tuple[Tensor, ...]:
    def tensor(*shape: int, of: torch.dtype) -> Tensor:
        return arrange(torch.randn(shape).to(of), layout)

    return (
        tensor(rows, 3, width, of=dtype),
        tensor(rows, 3, of=torch.float32) * 4,
        tensor(rows, 3, width, of=dtype),
        tensor(rows, 3, of=torch.float32) * 4,
    )


def by_triton(*args: Tensor) -> tuple[Tensor, Tensor]:
    with use_provider("triton"):
        return merge_attention(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 12, 64])
def test_merged_sides_are_those_of_float64_rounded_once(dtype: torch.dtype, width: int):
    for layout in LAYOUTS:
        args = sides(5, width, dtype, layout)
        out, lse = by_triton(*args)
        exact_out, exact_lse = merge_attention(*(each.double() for each in args))
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert out.is_contiguous()
        assert lse.is_contiguous()
        error = 1.01 * unit_roundoff(dtype) + 1e-6
        torch.testing.assert_close(out.double(), exact_out, rtol=error, atol=1e-6)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def test_sides_of_two_dtypes_merge_to_the_wider_one():
    out_a, lse_a, _, _ = sides(4, 8, torch.bfloat16, "contiguous")
    _, _, out_b, lse_b = sides(4, 8, torch.float32, "contiguous")
    out, _ = by_triton(out_a, lse_a, out_b, lse_b)
    assert out.dtype == torch.float32
    exact, _ = merge_attention(out_a.double(), lse_a, out_b.double(), lse_b)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mark", [-INF, INF])
@pytest.mark.parametrize("garbage", [0.0, math.nan, INF])
def test_a_side_without_keys_changes_nothing_whatever_it_holds(mark: float, garbage: float):
    out, lse, _, _ = sides(5, 8, torch.float32, "contiguous")
    nothing = torch.full_like(out, garbage), torch.full_like(lse, mark)
    for merged in (by_triton(out, lse, *nothing), by_triton(*nothing, out, lse)):
        torch.testing.assert_close(merged, (out, lse), rtol=0, atol=0)


@pytest.mark.parametrize("marks", [(-INF, -INF), (INF, -INF), (INF, INF)])
def test_a_row_without_keys_on_both_sides_is_zero_and_minus_infinity(marks: tuple[float, float]):
    out = torch.full((1, 1, 2), math.nan)
    merged, lse = by_triton(out, torch.full((1, 1), marks[0]), out, torch.full((1, 1), marks[1]))
    assert merged.tolist() == [[[0.0, 0.0]]]
    assert lse.tolist() == [[-INF]]


def test_far_apart_sums_neither_overflow_nor_lose_the_larger_side():
    out_a, lse_a, out_b, _ = sides(4, 8, torch.float32, "contiguous")
    merged = by_triton(out_a, lse_a + 1e4, out_b, lse_a - 1e4)
    torch.testing.assert_close(merged, (out_a, lse_a + 1e4), rtol=0, atol=0)


def test_a_lost_sum_is_not_hidden():
    out, lse, _, _ = sides(2, 4, torch.float32, "contiguous")
    lse[1, 2] = math.nan
    for args in ((out, lse, out, lse * 0), (out, lse * 0, out, lse)):
        merged, sums = by_triton(*args)
        assert sums.isnan().nonzero().tolist() == [[1, 2]]
        assert merged.isnan().any(-1).nonzero().tolist() == [[1, 2]]


def test_no_rows_merge_to_no_rows_and_float64_is_refused_by_name():
    out, lse = by_triton(*sides(0, 4, torch.float32, "contiguous"))
    assert (out.shape, lse.shape) == ((0, 3, 4), (0, 3))
    with pytest.raises(NotImplementedError, match=r"out_a is torch\.float64, served are"):
        by_triton(*(each.double() for each in sides(2, 4, torch.float32, "contiguous")))
