from __future__ import annotations

import math
import struct

import pytest
import torch
from _fp8 import float32, index_key_bytes
from _norm_rope_cases import ONE_ROUNDING, norm_rope_index_args, tables
from _opcheck import (
    LAYOUTS,
    arrange,
    compiled_gradients_equal_eager,
    one_graph_for_lengths,
    opcheck_all,
)
from _reference import causal_intervals
from torch import Tensor

from dsafx.ops import check_indices, index_scores, index_select, norm_rope_index, rope
from dsafx.ops.hadamard import plain_hadamard
from dsafx.ops.index_query import index_query
from dsafx.ops.rope import STYLES

H, D, R = 8, 16, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def query(
    rows: int,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    heads: int = H,
    width: int = D,
) -> tuple[Tensor, ...]:
    q = arrange(torch.randn(rows, heads, width).to(dtype), layout)
    weights = arrange(torch.randn(rows, heads).to(dtype), layout)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (q, weights, *tables(rows, R, wide))


def separate(q: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    return torch.cat((rope(q[..., :R], cos, sin, style), q[..., R:]), dim=-1)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_without_quantisation_it_is_rope_of_the_first_dims_bit_for_bit(dtype, style):
    for layout in LAYOUTS:
        q, weights, cos, sin = query(5, dtype, layout)
        out, folded = index_query(q, weights, cos, sin, style, False)
        torch.testing.assert_close(out, separate(q, cos, sin, style), rtol=0, atol=0)
        assert out.dtype == dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert folded.dtype == wide
        expected = weights.to(wide) * D**-0.5 * H**-0.5
        torch.testing.assert_close(folded, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_queries_and_weights_are_the_numbers_worked_out_by_hand(dtype):
    q, weights, cos, sin = query(3, dtype, width=128)
    q[1] *= 1e-4
    q[2] *= 1e4
    q[0, 3] = 0.0
    out, folded = index_query(q, weights, cos, sin, "half", True)
    assert (out.dtype, folded.dtype) == (torch.float8_e4m3fn, torch.float32)
    exact = separate(q.float(), cos, sin, "half")
    for token in range(3):
        for head in range(H):
            codes, scale = index_key_bytes(exact[token, head].tolist())
            assert bytes(out[token, head].view(torch.uint8).tolist()) == codes
            product = weights[token, head].item()
            for factor in (scale, 128**-0.5, H**-0.5):
                product = float32(product * float32(factor))
            assert struct.pack("<f", folded[token, head].item()) == struct.pack("<f", product)


def test_the_query_is_not_rounded_to_its_dtype_before_it_is_quantised():
    q, weights, cos, sin = query(64, torch.bfloat16)
    out, _ = index_query(q, weights, cos, sin, "half", True)
    once = index_query(q.float(), weights.float(), cos, sin, "half", True)[0]
    twice = index_query(separate(q, cos, sin, "half"), weights, cos * 0 + 1, sin * 0, "half", True)
    assert torch.equal(out.view(torch.uint8), once.view(torch.uint8))
    assert not torch.equal(out.view(torch.uint8), twice[0].view(torch.uint8))


@pytest.mark.parametrize("quantize", [False, True])
def test_scores_of_folded_queries_are_those_of_the_formula(quantize):
    tokens, topk = 64, 8
    q, weights, cos, sin = query(tokens, heads=16, width=32)
    keys = torch.randn(tokens, 32)
    ks, ke = causal_intervals([tokens])
    out, folded = index_query(q, weights, cos, sin, "interleaved", quantize)
    scores = index_scores(out, keys, folded, ks, ke)
    exact = separate(q, cos, sin, "interleaved").double()
    plain = weights.double() * (16 * 32) ** -0.5
    expected = index_scores(exact, keys.double(), plain, ks, ke)
    # e4m3 rounds a value by at most 1/16 of it, or by 2**-10 of a scale that is below amax / 224.
    error = exact.abs() / 16 + exact.abs().amax(-1, keepdim=True) / 224 * 2.0**-10
    budget = torch.einsum("th,thd,sd->ts", plain.abs(), error, keys.double().abs())
    visible = expected.isfinite()
    off = (scores.double() - expected)[visible].abs()
    assert bool((off <= (budget[visible] if quantize else 1e-5)).all())
    assert torch.equal(scores.isfinite(), visible)
    chosen = index_select(out, keys, folded, ks, ke, tokens, topk)
    check_indices(chosen, ks, ke, topk)
    wanted = index_select(exact, keys.double(), plain, ks, ke, tokens, topk)
    common = sum(
        len(set(a) & set(b) - {-1}) for a, b in zip(chosen.tolist(), wanted.tolist(), strict=True)
    )
    assert common / int((wanted >= 0).sum()) >= (0.9 if quantize else 1.0)


def test_an_all_zero_query_scores_exactly_zero():
    q, weights, cos, sin = query(1, width=32)
    out, folded = index_query(q * 0, weights, cos, sin, "half", True, True)
    assert out.float().tolist() == torch.zeros(1, H, 32).tolist()
    assert folded.isfinite().all()
    assert folded.abs().max() > 0
    ks, ke = causal_intervals([1])
    assert index_scores(out, torch.randn(1, 32) * 1e4, folded, ks, ke).tolist() == [[0.0]]


@pytest.mark.parametrize("quantize", [False, True])
def test_a_hadamard_transform_of_both_sides_keeps_scores_and_one_of_a_single_side_does_not(
    quantize,
):
    tokens, topk = 40, 6
    args = norm_rope_index_args(tokens, torch.float32)[:-1]
    q, weights, cos, sin = query(tokens)
    ks, ke = causal_intervals([tokens])

    def scored(of_query: bool, of_key: bool) -> tuple[Tensor, Tensor]:
        out, folded = index_query(q, weights, cos, sin, "half", quantize, of_query)
        key = norm_rope_index(*args, of_key)[3]
        operands = (out, key, folded, ks, ke)
        chosen = index_select(*operands, tokens, topk)
        check_indices(chosen, ks, ke, topk)
        return index_scores(*operands), chosen

    plain, chosen = scored(False, False)
    both, chosen_both = scored(True, True)
    visible = plain.isfinite()
    size = plain[visible].norm()
    if quantize:
        assert (both - plain)[visible].norm() < 0.05 * size
    else:
        torch.testing.assert_close(both, plain, rtol=0, atol=1e-3)
        assert torch.equal(chosen_both, chosen)
    for one_side in (scored(True, False), scored(False, True)):
        assert (one_side[0] - plain)[visible].norm() > 0.5 * size
        differing = (one_side[1] != chosen).any(1).sum()
        assert differing > (tokens - topk) // 2


def test_the_hadamard_transform_of_a_query_is_the_last_step_before_rounding():
    q, weights, cos, sin = query(50, torch.bfloat16)
    out, _ = index_query(q, weights, cos, sin, "interleaved", False, True)
    exact = plain_hadamard(separate(q.double(), cos.double(), sin.double(), "interleaved"))
    torch.testing.assert_close(out.double(), exact, **ONE_ROUNDING)


def test_a_query_with_nan_or_infinity_stays_visible_and_spoils_no_other_head():
    q, weights, cos, sin = query(1)
    clean, clean_folded = index_query(q, weights, cos, sin, "half", True)
    q[0, 2, D - 1], q[0, 5, D - 1] = math.nan, math.inf
    out, folded = index_query(q, weights, cos, sin, "half", True)
    bad = out.float().isnan()
    assert bad.nonzero().tolist() == [[0, 2, D - 1], [0, 5, D - 1]]
    others = [head for head in range(H) if head not in (2, 5)]
    assert torch.equal(out.view(torch.uint8)[:, others], clean.view(torch.uint8)[:, others])
    assert torch.equal(folded[:, others], clean_folded[:, others])
    assert folded.isfinite().all()


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize(("heads", "width"), [(1, 32), (3, 64), (24, 128), (0, 16)])
def test_any_number_of_rows_and_heads_is_served(rows, heads, width):
    for quantize in (False, True):
        q, weights, cos, sin = query(rows, heads=heads, width=width)
        out, folded = index_query(q, weights, cos, sin, "half", quantize, True)
        assert out.shape == q.shape
        assert folded.shape == weights.shape


@pytest.mark.parametrize("hadamard", [False, True])
def test_unquantised_queries_have_right_gradients_and_quantised_ones_have_none(hadamard):
    q, weights, cos, sin = query(3, torch.float64, heads=2)
    q.requires_grad_()
    weights.requires_grad_()
    for style in STYLES:
        args = (q, weights, cos, sin, style, False, hadamard)
        assert torch.autograd.gradcheck(index_query, args)
        assert torch.autograd.gradgradcheck(index_query, args)
    assert not any(
        out.requires_grad for out in index_query(q, weights, cos, sin, "half", True, hadamard)
    )


def test_compiled_gradients_equal_eager_ones():
    q, weights, cos, sin = query(5, torch.bfloat16)
    args = (q.requires_grad_(), weights.requires_grad_(), cos, sin, "half", False, True)
    compiled_gradients_equal_eager(index_query, args)


def test_index_query_passes_opcheck():
    for number, (rows, layout) in enumerate((n, s) for n in (0, 1, 5) for s in LAYOUTS):
        q, weights, cos, sin = query(rows, DTYPES[number % 3], layout)
        q, weights = q.requires_grad_(number % 2 == 0), weights.requires_grad_(number % 2 == 0)
        rest = (cos, sin, STYLES[number % 3], False, number % 4 < 2)
        opcheck_all(torch.ops.dsafx.index_query.default, [(q, weights, *rest)])
        quantised = (q, weights, cos, sin, "half", True, number % 4 < 2)
        opcheck_all(torch.ops.dsafx.index_query.default, [quantised])


@pytest.mark.parametrize("quantize", [False, True])
def test_one_graph_serves_three_lengths(quantize):
    def run(q: Tensor, weights: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        out, folded = index_query(q, weights, cos, sin, "interleaved", quantize, True)
        return out.float(), folded

    one_graph_for_lengths(run, query, (3, 7, 20))


def test_under_autocast_nothing_changes():
    q, weights, cos, sin = query(4, torch.bfloat16)
    for quantize in (False, True):
        plain = index_query(q, weights, cos, sin, "half", quantize)
        with torch.autocast("cpu", torch.bfloat16):
            inside = index_query(q, weights, cos, sin, "half", quantize)
        assert [out.dtype for out in inside] == [out.dtype for out in plain]
        assert torch.equal(inside[1], plain[1])
        assert torch.equal(inside[0].float(), plain[0].float())


def test_bad_arguments_are_refused_by_name():
    q, weights, cos, sin = query(3)
    with pytest.raises(ValueError, match="style must be one of"):
        index_query(q, weights, cos, sin, "neox", False)
    with pytest.raises(ValueError, match="q must have 3 dimensions"):
        index_query(q[0], weights, cos, sin, "half", False)
    with pytest.raises(ValueError, match="weights must have 8 in dimension 1"):
        index_query(q, weights[:, 1:], cos, sin, "half", False)
    with pytest.raises(ValueError, match="cos must have 3 in dimension 0"):
        index_query(q, weights, cos[1:], sin, "half", False)
    with pytest.raises(ValueError, match="q must have at least 4 in dimension 2"):
        index_query(q[..., :3], weights, cos, sin, "half", False)
    with pytest.raises(ValueError, match=r"head dim of q must be a power of two.*got 12"):
        index_query(q[..., :12], weights, cos, sin, "half", False, True)
    with pytest.raises(TypeError, match="weights must be float16"):
        index_query(q, weights.int(), cos, sin, "half", False)
