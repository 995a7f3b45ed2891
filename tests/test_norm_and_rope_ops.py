from __future__ import annotations

import pytest
import torch
from _norm_rope_cases import (
    DTYPES,
    EPS,
    ONE_ROUNDING,
    SAMPLES,
    D,
    Q,
    R,
    tables,
)
from _opcheck import (
    LAYOUTS,
    arrange,
    opcheck_all,
)
from torch import Tensor

from dsafx.ops.norm import layer_norm, rms_norm
from dsafx.ops.rope import STYLES, rope


def exact_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Pair by pair, as complex numbers."""
    half = x.shape[-1] // 2
    turn = torch.complex(cos.double(), sin.double())
    if x.dim() == 3:
        turn = turn[:, None]
    adjacent, apart = (
        [(2 * i, 2 * i + 1) for i in range(half)],
        [(i, i + half) for i in range(half)],
    )
    read = apart if style == "half" else adjacent
    written = adjacent if style == "interleaved" else apart
    y = torch.empty_like(x, dtype=torch.float64)
    for i in range(half):
        pair = torch.complex(x[..., read[i][0]].double(), x[..., read[i][1]].double())
        turned = pair * turn[..., i]
        y[..., written[i][0]], y[..., written[i][1]] = turned.real, turned.imag
    return y


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_ops_pass_opcheck(dtype):
    for rows, layout in SAMPLES:
        x = arrange(torch.randn(rows, Q, dtype=dtype), layout).detach().requires_grad_()
        weight, bias = (torch.randn(Q, requires_grad=True) for _ in range(2))
        opcheck_all(torch.ops.dsafx.rms_norm.default, [(x, weight, EPS)])
        opcheck_all(torch.ops.dsafx.layer_norm.default, [(x, weight, bias, EPS)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_passes_opcheck_in_every_style_with_and_without_heads(dtype):
    for number, (rows, layout) in enumerate(SAMPLES):
        shape = (rows, 3, R) if number % 2 else (rows, R)
        x = arrange(torch.randn(shape, dtype=dtype), layout).detach().requires_grad_()
        style = STYLES[number % 3]
        opcheck_all(torch.ops.dsafx.rope.default, [(x, *tables(rows), style)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rms_norm_rounds_once(layout):
    x, weight = arrange(torch.randn(50, Q, dtype=torch.bfloat16), layout), torch.randn(Q)
    y = rms_norm(x, weight, EPS)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous()
    torch.testing.assert_close(y.double(), exact_rms_norm(x, weight), **ONE_ROUNDING)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_norm_rounds_once(layout):
    x = arrange(torch.randn(50, D, dtype=torch.bfloat16) + 3, layout)
    weight, bias = torch.randn(2, D)
    y = layer_norm(x, weight, bias, EPS)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous()
    expected = torch.nn.functional.layer_norm(
        x.double(), (D,), weight.double(), bias.double(), eps=EPS
    )
    torch.testing.assert_close(y.double(), expected, **ONE_ROUNDING)


def test_norms_take_any_leading_dimensions_and_keep_float64():
    x, weight, bias = torch.randn(2, 3, 4, Q).double(), torch.randn(Q), torch.randn(Q)
    y = rms_norm(x, weight, EPS)
    torch.testing.assert_close(y, exact_rms_norm(x, weight), rtol=1e-14, atol=1e-14)
    z = layer_norm(x, weight, bias, EPS)
    expected = torch.nn.functional.layer_norm(x, (Q,), weight.double(), bias.double(), eps=EPS)
    torch.testing.assert_close(z, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(rms_norm(x[0, 0, 0], weight, EPS), y[0, 0, 0])


def test_a_constant_row_normalizes_to_the_bias():
    y = layer_norm(torch.full((2, 3), 5.0), torch.ones(3), torch.tensor([1.0, 2.0, 3.0]), 1e-6)
    assert y.tolist() == [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]


def test_rope_places_the_pairs_as_the_style_says():
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])  # a quarter turn, then none
    assert rope(x, cos, sin, "half").tolist() == [[-3.0, 2.0, 1.0, 4.0]]
    assert rope(x, cos, sin, "interleaved").tolist() == [[-2.0, 1.0, 3.0, 4.0]]
    assert rope(x, cos, sin, "interleaved_to_half").tolist() == [[-2.0, 3.0, 1.0, 4.0]]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", [(20, 8), (20, 3, 8)])
def test_rope_equals_complex_multiplication_and_rounds_once(style, shape):
    cos, sin = tables(20, 8)
    for layout in LAYOUTS:
        for dtype, bound in (
            (torch.bfloat16, ONE_ROUNDING),
            (torch.float32, {"rtol": 1e-6, "atol": 1e-6}),
            (torch.float64, {"rtol": 1e-14, "atol": 1e-14}),
        ):
            x = arrange(torch.randn(shape, dtype=dtype), layout)
            y = rope(x, cos, sin, style)
            assert y.dtype == dtype
            assert y.is_contiguous()
            torch.testing.assert_close(y.double(), exact_rope(x, cos, sin, style), **bound)


def test_rope_casts_a_table_of_another_dtype():
    x, (cos, sin) = torch.randn(5, 2, R), tables(5)
    torch.testing.assert_close(
        rope(x, cos.bfloat16(), sin.bfloat16(), "half"),
        rope(x, cos.bfloat16().float(), sin.bfloat16().float(), "half"),
        rtol=0,
        atol=0,
    )


def test_rms_norm_and_rope_equal_those_of_transformers():
    glm = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
    deepseek = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    module = glm.GlmMoeDsaRMSNorm(Q, eps=EPS)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(7, Q)
    torch.testing.assert_close(rms_norm(x, module.weight, EPS), module(x), rtol=1e-6, atol=1e-6)

    q, k = torch.randn(7, 3, 8), torch.randn(7, 1, 8)
    cos, sin = tables(7, 8)
    wide = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    for theirs, style in (
        (glm.apply_rotary_pos_emb_interleave, "interleaved_to_half"),
        (deepseek.apply_rotary_pos_emb_interleave, "interleaved_to_half"),
        (deepseek.apply_rotary_pos_emb, "half"),
    ):
        for ours, expected in zip(
            (q, k), theirs(q[None], k[None], *wide, unsqueeze_dim=2), strict=True
        ):
            torch.testing.assert_close(
                rope(ours, cos, sin, style), expected[0], rtol=1e-6, atol=1e-6
            )


def test_norms_and_rope_have_right_gradients():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for row in (x, x[0, 0].detach().requires_grad_()):
        assert torch.autograd.gradcheck(lambda *a: rms_norm(*a, EPS), (row, weight))
        assert torch.autograd.gradcheck(lambda *a: layer_norm(*a, EPS), (row, weight, bias))
    for style in STYLES:
        cos, sin = tables(2, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin, style), x)  # noqa: B023


def test_bad_arguments_are_refused_by_name():
    x, weight, (cos, sin) = torch.randn(3, Q), torch.randn(Q), tables(3)
    pe = torch.randn(3, R)
    with pytest.raises(ValueError, match=r"weight must have 12 in dimension 0"):
        rms_norm(x, weight[1:], EPS)
    with pytest.raises(TypeError, match="x must be float16, bfloat16, float32, float64, got int32"):
        layer_norm(x.int(), weight, weight, EPS)
    with pytest.raises(ValueError, match="bias must have 1 dimensions"):
        layer_norm(x, weight, x, EPS)
    with pytest.raises(ValueError, match=r"style must be one of half, interleaved, inter.*got ''"):
        rope(pe, cos, sin, "")
    with pytest.raises(ValueError, match="x must have 2 or 3 dimensions"):
        rope(pe[0], cos, sin, "half")
    with pytest.raises(ValueError, match="x must have 4 in dimension -1"):
        rope(pe[:, 1:], cos, sin, "half")
    with pytest.raises(ValueError, match="cos must have 3 in dimension 0"):
        rope(pe, cos[1:], sin[1:], "half")
    with pytest.raises(ValueError, match="sin must have 2 in dimension 1"):
        rope(pe, cos, sin[:, 1:], "half")
    with pytest.raises(ValueError, match="cos must not require a gradient"):
        rope(pe, cos.requires_grad_(), sin, "half")
