from __future__ import annotations

import math

import pytest
import torch
from _opcheck import (
    LAYOUTS,
    arrange,
    compiled_gradients_equal_eager,
    one_graph_for_lengths,
    opcheck_all,
)
from torch import Tensor

from dsafx.ops.merge_attention import merge_attention

INF = math.inf


def sides(rows: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous", grad=False):
    lse_dtype = torch.promote_types(dtype, torch.float32)

    def tensor(*shape: int, of: torch.dtype) -> Tensor:
        return arrange(torch.randn(shape, dtype=of), layout).detach().requires_grad_(grad)

    return (
        tensor(rows, 3, 4, of=dtype),
        tensor(rows, 3, of=lse_dtype),
        tensor(rows, 3, 4, of=dtype),
        tensor(rows, 3, of=lse_dtype),
    )


def attention(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over [T, N, S] scores of [T, S, V] values."""
    return torch.einsum("tns,tsv->tnv", scores.softmax(-1), v), scores.logsumexp(-1)


def test_merging_two_chunks_equals_attention_over_all_keys():
    scores, v = torch.randn(5, 2, 9).double() * 4, torch.randn(5, 9, 3).double()
    for cut in (1, 4, 8):
        merged = merge_attention(
            *attention(scores[..., :cut], v[:, :cut]), *attention(scores[..., cut:], v[:, cut:])
        )
        torch.testing.assert_close(merged, attention(scores, v))


def test_three_chunks_merge_to_the_same_in_any_order():
    a, b, c = (sides(6, torch.float64)[:2] for _ in range(3))
    left = merge_attention(*merge_attention(*a, *b), *c)
    right = merge_attention(*a, *merge_attention(*c, *b))
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize("mark", [-INF, INF])
@pytest.mark.parametrize("garbage", [0.0, math.nan, INF])
def test_a_side_without_keys_changes_nothing_whatever_it_holds(mark, garbage):
    out, lse, _, _ = sides(5)
    nothing = torch.full_like(out, garbage), torch.full_like(lse, mark)
    torch.testing.assert_close(merge_attention(out, lse, *nothing), (out, lse), rtol=0, atol=0)
    torch.testing.assert_close(merge_attention(*nothing, out, lse), (out, lse), rtol=0, atol=0)


@pytest.mark.parametrize("marks", [(-INF, -INF), (INF, -INF), (INF, INF)])
def test_a_row_without_keys_on_both_sides_is_zero_and_minus_infinity(marks):
    out = torch.full((1, 1, 2), math.nan)
    merged, lse = merge_attention(
        out, torch.full((1, 1), marks[0]), out, torch.full((1, 1), marks[1])
    )
    assert merged.tolist() == [[[0.0, 0.0]]]
    assert lse.tolist() == [[-INF]]


def test_far_apart_sums_neither_overflow_nor_lose_the_larger_side():
    out_a, lse_a, out_b, _ = sides(4)
    out, lse = merge_attention(out_a, lse_a + 1e4, out_b, lse_a - 1e4)
    torch.testing.assert_close((out, lse), (out_a, lse_a + 1e4), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_attention_passes_opcheck(dtype):
    for rows in (0, 1, 5):
        for layout in LAYOUTS:
            opcheck_all(
                torch.ops.dsafx.merge_attention.default, [sides(rows, dtype, layout, grad=True)]
            )


def test_one_graph_serves_three_lengths():
    one_graph_for_lengths(merge_attention, sides, (2, 5, 11))


def test_dtypes_follow_the_outputs_also_under_autocast():
    out_a, lse_a, out_b, lse_b = sides(3, torch.bfloat16)
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            assert dtypes(out_a, lse_a, out_b, lse_b) == (torch.bfloat16, torch.float32)
            assert dtypes(out_a, lse_a, out_b.float(), lse_b) == (torch.float32, torch.float32)
            assert dtypes(out_a, lse_a, out_b.double(), lse_b) == (torch.float64, torch.float64)
            assert dtypes(out_a, lse_a.double(), out_b, lse_b) == (torch.bfloat16, torch.float32)


def dtypes(*args: Tensor) -> tuple[torch.dtype, torch.dtype]:
    out, lse = merge_attention(*args)
    return out.dtype, lse.dtype


def test_bfloat16_outputs_round_once():
    args = sides(100, torch.bfloat16)
    exact, _ = merge_attention(*(arg.double() for arg in args))
    out, _ = merge_attention(*args)
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-8 * 1.001, atol=1e-6)


def test_gradients_are_right():
    args = sides(3, torch.float64, grad=True)
    assert torch.autograd.gradcheck(merge_attention, args)
    assert torch.autograd.gradgradcheck(merge_attention, args)


def test_gradients_with_empty_sides_are_finite_and_zero_on_the_empty_side():
    out_a, lse_a, out_b, lse_b = sides(3, torch.float64)
    lse_a[0], lse_b[1], lse_a[2], lse_b[2] = -INF, INF, -INF, -INF
    out_a[0] = math.nan
    args = tuple(arg.requires_grad_() for arg in (out_a, lse_a, out_b, lse_b))
    out, lse = merge_attention(*args)
    grads = torch.autograd.grad(out.sum() + lse[:2].sum() * 2, args)
    ones, zeros, twos = torch.ones(3, 4), torch.zeros(3, 4), torch.full((3,), 2.0)
    assert grads[0].tolist() == torch.stack((zeros, ones, zeros)).tolist()
    assert grads[2].tolist() == torch.stack((ones, zeros, zeros)).tolist()
    assert grads[1].tolist() == torch.stack((zeros[:, 0], twos, zeros[:, 0])).tolist()
    assert grads[3].tolist() == torch.stack((twos, zeros[:, 0], zeros[:, 0])).tolist()


@pytest.mark.parametrize("used", [0, 1])
def test_gradients_of_one_output_do_not_need_the_other(used):
    out_a, lse_a, out_b, lse_b = sides(2, torch.float64, grad=True)
    lse_b.requires_grad_(False)
    merge_attention(out_a, lse_a, out_b, lse_b)[used].sum().backward()
    assert lse_a.grad is not None
    assert lse_b.grad is None
    assert (out_a.grad is not None) == (used == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gradients_equal_eager_ones(dtype):
    compiled_gradients_equal_eager(merge_attention, sides(4, dtype, grad=True))


def test_bad_arguments_are_refused_by_name():
    out_a, lse_a, out_b, lse_b = sides(3)
    with pytest.raises(ValueError, match="out_b must have 4 in dimension 2"):
        merge_attention(out_a, lse_a, out_b[..., 1:], lse_b)
    with pytest.raises(ValueError, match="lse_a must have 3 in dimension 1"):
        merge_attention(out_a, lse_a[:, 1:], out_b, lse_b)
    with pytest.raises(ValueError, match="lse_b must have 2 dimensions"):
        merge_attention(out_a, lse_a, out_b, lse_b[0])
    with pytest.raises(TypeError, match="lse_b must be float32, float64, got bfloat16"):
        merge_attention(out_a, lse_a, out_b, lse_b.bfloat16())
    with pytest.raises(TypeError, match="out_a must be float16, bfloat16, float32, float64"):
        merge_attention(out_a.int(), lse_a, out_b, lse_b)
