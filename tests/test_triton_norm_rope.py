"""``norm_rope`` and its kin of the triton provider, in the interpreter, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from _norm_rope_cases import ONE_ROUNDING, norm_rope_args, norm_rope_index_args
from _opcheck import LAYOUTS
from torch import Tensor

from dsafx.ops import norm_rope, norm_rope_index, use_provider
from dsafx.ops.norm_rope import _norm_rope_index_reference, norm_rope_reference
from dsafx.ops.rope import STYLES

pytestmark = pytest.mark.triton

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: ONE_ROUNDING | {"atol": 2e-6},
    torch.float16: {"rtol": 2.0**-11 * 1.01, "atol": 2e-6},
}


def wide(args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(each.double() if isinstance(each, Tensor) else each for each in args)


def assert_is_rounded_once(found: tuple[Tensor, ...], exact: tuple[Tensor, ...], dtype):
    for each, right in zip(found, exact, strict=True):
        assert each.dtype == dtype
        assert each.is_contiguous()
        torch.testing.assert_close(each.double(), right, **TOLERANCE[dtype])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_latents_and_rotated_keys_are_those_of_float64_rounded_once(dtype, style):
    for layout in LAYOUTS:
        *args, _ = norm_rope_args(5, dtype, layout)
        with use_provider("triton"):
            found = norm_rope(*args, style)
        assert_is_rounded_once(found, norm_rope_reference(*wide(args), style), dtype)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("index_style", STYLES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_index_keys_are_those_of_float64_rounded_once(dtype, index_style, hadamard):
    for layout in LAYOUTS:
        *args, _, _ = norm_rope_index_args(5, dtype, layout)
        rest = (index_style, hadamard)
        with use_provider("triton"):
            found = norm_rope_index(*args, *rest)
        assert_is_rounded_once(found, _norm_rope_index_reference(*wide(args), *rest), dtype)


def test_widths_of_released_models_that_are_no_powers_of_two():
    q_c, kv_c, k_pe, index_k = (torch.randn(2, n).bfloat16() for n in (1536, 512, 64, 128))
    weights = [torch.randn(n) for n in (1536, 512, 128, 128)]
    angle = torch.rand(2, 32) * 6
    args = (
        *(q_c, weights[0], kv_c, weights[1], k_pe, index_k, weights[2], weights[3]),
        *(angle.cos(), angle.sin(), 1e-6, "interleaved", 1e-6, "half", True),
    )
    with use_provider("triton"):
        found = norm_rope_index(*args)
    assert_is_rounded_once(found, _norm_rope_index_reference(*wide(args)), torch.bfloat16)


def test_what_is_not_rotated_keeps_infinities_and_they_stay_in_their_row():
    *args, _ = norm_rope_index_args(3, torch.float32)
    args[5][1] = torch.linspace(-1, 1, 16)
    args[6][15], args[4][2] = math.inf, math.inf
    with use_provider("triton"):
        *_, k_pe, index_k = norm_rope_index(*args, False)
    assert index_k.isinf().nonzero().tolist() == [[0, 15], [1, 15], [2, 15]]
    assert not index_k.isnan().any()
    assert k_pe[:2].isfinite().all()


def test_no_tokens_give_empty_rows_and_float64_is_refused_by_name():
    with use_provider("triton"):
        shapes = [
            each.shape[1] for each in norm_rope_index(*norm_rope_index_args(0, torch.float32))
        ]
        assert shapes == [12, 8, 4, 16]
        with pytest.raises(NotImplementedError, match=r"q_c is torch\.float64, served are"):
            norm_rope(*norm_rope_args(2, torch.float64))


def test_gradients_come_with_the_kernel_s_results():
    args = norm_rope_args(3, torch.float32, grad=True)
    with use_provider("triton"):
        sum(each.sum() for each in norm_rope(*args)).backward()
    found = [each.grad for each in args[:5]]
    same = [each.detach().clone().requires_grad_(True) for each in args[:5]]
    sum(each.sum() for each in norm_rope(*same, *args[5:])).backward()
    torch.testing.assert_close(found, [each.grad for each in same], rtol=1e-5, atol=1e-6)
