"""``index_query`` of the triton provider, in the interpreter: bit for bit where it is quantised."""

from __future__ import annotations

import math

import pytest
import torch
from _norm_rope_cases import tables
from _opcheck import LAYOUTS, arrange
from torch import Tensor

from dsafx.ops import index_scores, use_provider
from dsafx.ops.hadamard import plain_hadamard
from dsafx.ops.index_query import index_query
from dsafx.ops.rope import STYLES

pytestmark = pytest.mark.triton

H, D, R = 20, 32, 8
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def query(rows: int, dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, ...]:
    q = arrange(torch.randn(rows, H, D).to(dtype), layout)
    weights = arrange(torch.randn(rows, H).to(dtype), layout)
    return (q, weights, *tables(rows, R))


def by_triton(*args: object) -> tuple[Tensor, Tensor]:
    with use_provider("triton"):
        return index_query(*args)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_queries_are_those_of_float64_rounded_once_and_weights_are_folded_in_order(
    dtype, style, hadamard
):
    for layout in LAYOUTS:
        args = query(3, dtype, layout)
        out, folded = by_triton(*args, style, False, hadamard)
        exact, _ = index_query(*(each.double() for each in args), style, False, hadamard)
        assert out.dtype == dtype
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), exact, rtol=1.01 * ROUNDING[dtype], atol=2e-6)
        expected = args[1].float() * D**-0.5 * H**-0.5
        torch.testing.assert_close(folded, expected, rtol=0, atol=0)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_quantised_queries_and_their_weights_are_the_reference_s_bit_for_bit(dtype, style):
    q, weights, cos, sin = query(4, dtype)
    q[1] *= 1e-4
    q[2] *= 1e3
    q[0, 3] = 0.0
    q[3, 1, 20] = math.inf
    # Angles whose products and sums are exact, so that no order of operations shows.
    cos, sin = (
        torch.tensor([1.0, 0.0, -1.0, 0.0]).expand(4, -1),
        torch.tensor([0.0, 1.0, 0.0, -1.0]).expand(4, -1),
    )
    out, folded = by_triton(q, weights, cos, sin, style, True)
    right_out, right_folded = index_query(q, weights, cos, sin, style, True)
    assert out.dtype == torch.float8_e4m3fn
    assert torch.equal(out.view(torch.uint8), right_out.view(torch.uint8))
    assert torch.equal(folded, right_folded)


def test_a_row_whose_largest_number_is_a_power_of_two_times_448_is_stored_as_448():
    q, weights, cos, sin = query(1, torch.float32)
    powers = 2.0 ** torch.arange(-10, 10)
    q.zero_()
    q[0, :, 30] = 448.0 * powers
    out, folded = by_triton(q, weights, cos, sin, "half", True)
    assert out[0, :, 30].tolist() == [448.0] * H
    assert torch.equal(folded, weights * powers * D**-0.5 * H**-0.5)


def test_scores_of_transformed_queries_and_keys_are_those_without_the_transform():
    q, weights, cos, sin = query(4, torch.float32)
    k = torch.randn(40, D)
    ks, ke = torch.zeros(4, dtype=torch.int32), torch.full((4,), 40, dtype=torch.int32)
    plain, folded = by_triton(q, weights, cos, sin, "half", False, False)
    turned, _ = by_triton(q, weights, cos, sin, "half", False, True)
    torch.testing.assert_close(
        index_scores(plain, k, folded, ks, ke),
        index_scores(turned, plain_hadamard(k), folded, ks, ke),
        rtol=1e-4,
        atol=1e-5,
    )


def test_no_tokens_give_no_rows_and_float64_is_refused_by_name():
    out, folded = by_triton(*query(0, torch.float32), "half", True)
    assert (out.shape, folded.shape) == ((0, H, D), (0, H))
    args = tuple(each.double() for each in query(2, torch.float32))
    with pytest.raises(NotImplementedError, match=r"q is torch\.float64, served are"):
        by_triton(*args, "half", False)
