from __future__ import annotations

import math

import pytest
import torch
from _norm_rope_cases import (
    DTYPES,
    EPS,
    ONE_ROUNDING,
    SAMPLES,
    Q,
    R,
    latents,
    norm_rope_args,
    norm_rope_index_args,
    tables,
)
from _opcheck import (
    LAYOUTS,
    compiled_gradients_equal_eager,
    one_graph_for_lengths,
    opcheck_all,
)
from torch import Tensor

from dsafx.ops.hadamard import plain_hadamard
from dsafx.ops.norm import layer_norm, plain_rms_norm_backward, rms_norm
from dsafx.ops.norm_rope import norm_rope, norm_rope_index
from dsafx.ops.rope import rope


def test_fused_ops_pass_opcheck():
    for number, (rows, layout) in enumerate(SAMPLES):
        dtype, other = DTYPES[number % 2], DTYPES[1 - number % 2]
        hadamard = number % 4 < 2
        opcheck_all(
            torch.ops.dsafx.norm_rope.default, [norm_rope_args(rows, dtype, layout, grad=True)]
        )
        opcheck_all(
            torch.ops.dsafx.norm_rope_index.default,
            [norm_rope_index_args(rows, other, layout, grad=True, hadamard=hadamard)],
        )


def test_the_hadamard_transform_is_sylvesters_matrix_over_the_root_of_its_size():
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randn(3, 2, 16, dtype=torch.float64)
    torch.testing.assert_close(plain_hadamard(x), x @ matrix / math.sqrt(16))
    torch.testing.assert_close(plain_hadamard(plain_hadamard(x)), x)
    assert plain_hadamard(x[:0]).shape == (0, 2, 16)
    assert plain_hadamard(torch.tensor([[3.0]])).tolist() == [[3.0]]


def separate(args: tuple, hadamard: bool) -> tuple[Tensor, ...]:
    """``norm_rope_index`` by the separate ops."""
    q_c, q_weight, kv_c, kv_weight, k_pe, index_k, index_weight, index_bias, cos, sin = args[:10]
    key = layer_norm(index_k, index_weight, index_bias, 1e-6)
    key = torch.cat((rope(key[:, :R], cos, sin, "half"), key[:, R:]), -1)
    if hadamard:
        key = plain_hadamard(key).to(index_k.dtype)
    return (
        rms_norm(q_c, q_weight, EPS),
        rms_norm(kv_c, kv_weight, EPS),
        rope(k_pe, cos, sin, "interleaved"),
        key,
    )


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_ops_equal_the_separate_ones_bit_for_bit(dtype, hadamard):
    for layout in LAYOUTS:
        args = norm_rope_index_args(33, dtype, layout, hadamard=hadamard)
        fused = norm_rope_index(*args)
        expected = separate(args, hadamard)
        torch.testing.assert_close(fused, expected, rtol=0, atol=0)
        assert all(out.is_contiguous() for out in fused)
        smaller = norm_rope(*args[:5], *args[8:12])
        torch.testing.assert_close(smaller, expected[:3], rtol=0, atol=0)


@pytest.mark.parametrize("hadamard", [False, True])
def test_in_bfloat16_the_fused_index_key_is_rounded_once_and_the_rest_is_unchanged(hadamard):
    args = norm_rope_index_args(200, torch.bfloat16, hadamard=hadamard)
    fused, unfused = norm_rope_index(*args), separate(args, hadamard)
    torch.testing.assert_close(fused[:3], unfused[:3], rtol=0, atol=0)
    exact = separate(tuple(arg.double() for arg in args[:10]), hadamard)[3]
    torch.testing.assert_close(fused[3].double(), exact, **ONE_ROUNDING)
    assert fused[3].dtype == torch.bfloat16
    error, error_unfused = ((key.double() - exact).abs().mean() for key in (fused[3], unfused[3]))
    assert error < error_unfused


def test_the_fused_index_key_may_be_rotated_as_a_whole():
    args = list(norm_rope_index_args(6, torch.float32))
    args[5], args[6], args[7] = args[5][:, :R], args[6][:R], args[7][:R]
    expected = rope(layer_norm(*args[5:8], 1e-6), *args[8:10], "half")
    torch.testing.assert_close(norm_rope_index(*args)[3], expected, rtol=0, atol=0)


@pytest.mark.parametrize("op", [norm_rope, norm_rope_index])
def test_fused_ops_have_right_gradients(op):
    make = norm_rope_args if op is norm_rope else norm_rope_index_args
    args = make(3, torch.float64, grad=True)
    variants = [args] if op is norm_rope else [args, (*args[:-1], True)]
    for variant in variants:
        assert torch.autograd.gradcheck(op, variant)
        assert torch.autograd.gradgradcheck(op, variant)


def test_only_needed_gradients_are_computed_when_one_output_is_used():
    args = list(norm_rope_index_args(4, torch.float32, grad=True))
    args[1].requires_grad_(False)
    args[5].requires_grad_(False)
    norm_rope_index(*args)[3].sum().backward()
    assert [arg.grad is not None for arg in args[:8]] == [False] * 6 + [True] * 2
    norm_rope_index(*args)[0].sum().backward()
    assert [arg.grad is not None for arg in args[:8]] == [True] + [False] * 5 + [True] * 2

    x, weight = args[0], args[1]
    grad_x, grad_weight = plain_rms_norm_backward(torch.ones_like(x), x, weight, EPS, (True, False))
    assert grad_x is not None
    assert grad_weight is None


def test_gradients_have_the_dtype_of_their_input():
    args = norm_rope_index_args(4, torch.bfloat16, grad=True)
    torch.cat([out.flatten() for out in norm_rope_index(*args)]).sum().backward()
    assert [arg.grad.dtype for arg in args[:8]] == [arg.dtype for arg in args[:8]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_gradients_equal_eager_ones(dtype):
    latent, index, (cos, sin) = latents(5, dtype, grad=True)
    x, weight = latent[:2]
    compiled_gradients_equal_eager(rms_norm, (x, weight, EPS))
    compiled_gradients_equal_eager(layer_norm, (*index, EPS))
    heads = torch.randn(5, 3, R, dtype=dtype, requires_grad=True)
    compiled_gradients_equal_eager(rope, (heads, cos, sin, "interleaved_to_half"))
    compiled_gradients_equal_eager(norm_rope, norm_rope_args(5, dtype, grad=True))
    compiled_gradients_equal_eager(
        norm_rope_index, norm_rope_index_args(5, dtype, grad=True, hadamard=True)
    )


@pytest.mark.parametrize("grad", [False, True])
def test_one_graph_serves_three_lengths(grad):
    weight, bias = torch.randn(Q), torch.randn(Q)
    lengths = (3, 7, 20)

    def x(rows: int, *rest: int) -> Tensor:
        return torch.randn(rows, *rest, requires_grad=grad)

    one_graph_for_lengths(lambda x: rms_norm(x, weight, EPS), lambda n: (x(n, Q),), lengths)
    one_graph_for_lengths(lambda x: layer_norm(x, weight, bias, EPS), lambda n: (x(n, Q),), lengths)
    one_graph_for_lengths(
        lambda x, cos, sin: rope(x, cos, sin, "half"), lambda n: (x(n, 2, R), *tables(n)), lengths
    )
    one_graph_for_lengths(norm_rope, lambda n: norm_rope_args(n, torch.float32, grad=grad), lengths)
    one_graph_for_lengths(
        norm_rope_index,
        lambda n: norm_rope_index_args(n, torch.float32, grad=grad, hadamard=True),
        lengths,
    )


def test_under_autocast_the_output_dtype_follows_the_input():
    args32, args16 = (norm_rope_index_args(4, dtype) for dtype in (torch.float32, torch.bfloat16))
    for args in (args32, args16):
        plain = norm_rope_index(*args)
        with torch.autocast("cpu", torch.bfloat16):
            inside = norm_rope_index(*args)
            single = (
                rms_norm(args[0], args[1], EPS),
                layer_norm(args[5], args[6], args[7], EPS),
                rope(args[4], *tables(4), "half"),
            )
        torch.testing.assert_close(inside, plain, rtol=0, atol=0)
        assert [out.dtype for out in single] == [args[0].dtype] * 3


def test_outputs_never_alias_inputs():
    args = norm_rope_index_args(3, torch.float32)
    before = [arg.clone() for arg in args[:10]]
    for out in norm_rope_index(*args):
        out.fill_(9.0)
    rms_norm(args[0], args[1], EPS).fill_(9.0)
    rope(args[4], args[8], args[9], "half").fill_(9.0)
    torch.testing.assert_close(list(args[:10]), before, rtol=0, atol=0)


def test_bad_arguments_of_the_fused_ops_are_refused_by_name():
    args = norm_rope_index_args(3, torch.float32)

    def call(position: int, value: object, hadamard: bool = False) -> None:
        changed = [*args[:14], hadamard]
        changed[position] = value
        norm_rope_index(*changed)

    with pytest.raises(ValueError, match="kv_c must have 3 in dimension 0"):
        call(2, args[2][1:])
    with pytest.raises(ValueError, match="q_weight must have 12 in dimension 0"):
        call(1, args[1][1:])
    with pytest.raises(ValueError, match="k_pe must have 4 in dimension 1"):
        call(4, args[4][:, 1:])
    with pytest.raises(ValueError, match="index_style must be one of"):
        call(13, "neox")
    with pytest.raises(ValueError, match="style must be one of"):
        call(11, "neox")
    with pytest.raises(ValueError, match="index_bias must have 16 in dimension 0"):
        call(7, args[7][1:])
    with pytest.raises(ValueError, match="q_c must have 2 dimensions"):
        call(0, args[0][None])

    narrow = [*args[:5], *(tensor[..., :3] for tensor in args[5:8]), *args[8:]]
    with pytest.raises(ValueError, match="index_k must have at least 4 columns"):
        norm_rope_index(*narrow)
    twelve = [*args[:5], *(tensor[..., :12] for tensor in args[5:8]), *args[8:14], True]
    with pytest.raises(ValueError, match=r"width of index_k must be a power of two.*got 12"):
        norm_rope_index(*twelve)
