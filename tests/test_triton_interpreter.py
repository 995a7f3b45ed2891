"""The correction of Triton's interpreter: narrow floats are numbers, and casts round to even."""

from __future__ import annotations

import math

import pytest
import torch

from dsafx.conformance import interpreter

pytestmark = pytest.mark.triton

FP8 = torch.float8_e4m3fn
SIZE = 16


def launch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Operands and results of the kernel ``products`` on random matrices of ``dtype``."""
    from _triton_kernels import products

    made = {name: torch.randn(SIZE, SIZE).to(dtype) for name in ("a", "b", "squares", "larger")}
    made["dots"] = torch.empty(SIZE, SIZE)
    made["e4m3"] = torch.empty(SIZE, SIZE, dtype=FP8)
    products[(1,)](**made, SIZE=SIZE, ARITHMETIC=dtype != FP8)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.float8_e5m2, torch.float16])
def test_a_dot_multiplies_numbers_and_not_their_bits(dtype: torch.dtype):
    made = launch(dtype)
    exact = made["a"].double() @ made["b"].double()
    torch.testing.assert_close(made["dots"].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_and_comparisons_are_those_of_torch_bit_for_bit(dtype: torch.dtype):
    made = launch(dtype)
    a, b = made["a"], made["b"]
    assert torch.equal(made["squares"], a * a - b)
    assert torch.equal(made["larger"], torch.maximum(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_to_fp8_rounds_to_even_and_stops_at_the_largest_number(dtype: torch.dtype):
    made = launch(dtype)
    scaled = made["a"].float() * 300
    assert (scaled.abs() > 448).any()
    assert torch.equal(made["e4m3"].float(), scaled.clamp(-448, 448).to(FP8).float())


def test_it_may_be_entered_twice_and_ends_with_the_outer_one():
    with interpreter():
        pass
    assert math.isfinite(launch(torch.bfloat16)["dots"].abs().max().item())
    test_a_dot_multiplies_numbers_and_not_their_bits(torch.bfloat16)
