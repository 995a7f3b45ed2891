"""RMSNorm and LayerNorm over the last dimension: float32 inside, one rounding at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._checks import require_floating, require_rank, require_same_device, require_size
from ._dtypes import wide_dtype
from ._library import define_op


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Args:
        x: [..., C] floating point, any leading dimensions and strides.
        weight: [C] floating point, of any dtype: it is multiplied in before the one rounding.
        eps: added to the mean square.

    Returns:
        Like ``x``, contiguous. Computed in float32, or in float64 for a float64 ``x``.

    Raises:
        ValueError: wrong ranks or sizes, or two devices.
        TypeError: a tensor is not floating point.
    """
    require_normalizable("x", x, weight=weight)
    out: Tensor = _rms_norm(x, weight, eps)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension.

    Args:
        x: [..., C] floating point, any leading dimensions and strides.
        weight, bias: [C] floating point, of any dtype: they are applied before the one rounding.
        eps: added to the (biased) variance.

    Returns:
        Like ``x``, contiguous. Computed in float32, or in float64 for a float64 ``x``.

    Raises:
        ValueError: wrong ranks or sizes, or two devices.
        TypeError: a tensor is not floating point.
    """
    require_normalizable("x", x, weight=weight, bias=bias)
    out: Tensor = _layer_norm(x, weight, bias, eps)
    return out


def require_normalizable(name: str, x: Tensor, **parameters: Tensor) -> None:
    """Check that ``x`` is [..., C] and that each of ``parameters`` is [C], all floating point."""
    require_floating(name, x)
    if x.dim() < 1:
        raise ValueError(f"{name} must have at least 1 dimension, got shape ()")
    for parameter_name, parameter in parameters.items():
        require_floating(parameter_name, parameter)
        require_rank(parameter_name, parameter, 1)
        require_size(parameter_name, parameter, 0, x.shape[-1], f"the last dimension of {name}")
    require_same_device(**{name: x}, **parameters)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm without the final rounding: the result has the working dtype of ``x``."""
    x = x.to(wide_dtype(x))
    return x * _rms_scale(x, eps) * weight.to(x.dtype)


def plain_rms_norm_backward(
    grad: Tensor | None, x: Tensor, weight: Tensor, eps: float, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``x`` and ``weight``, each None where ``needs`` or ``grad`` has none."""
    if grad is None:
        return None, None
    work = wide_dtype(x)
    grad, wide = grad.to(work), x.to(work)
    scale = _rms_scale(wide, eps)
    normed = wide * scale
    grad_x = _input_grad(grad, weight, normed, scale, x.dtype, centred=False) if needs[0] else None
    grad_weight = _sum_rows(grad * normed, weight.dtype) if needs[1] else None
    return grad_x, grad_weight


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm without the final rounding: the result has the working dtype of ``x``."""
    x = x.to(wide_dtype(x))
    x = x - x.mean(-1, keepdim=True)
    return x * _rms_scale(x, eps) * weight.to(x.dtype) + bias.to(x.dtype)


def plain_layer_norm_backward(
    grad: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``x``, ``weight`` and ``bias``, each None where not needed."""
    if grad is None:
        return None, None, None
    work = wide_dtype(x)
    grad, wide = grad.to(work), x.to(work)
    wide = wide - wide.mean(-1, keepdim=True)
    scale = _rms_scale(wide, eps)
    normed = wide * scale
    grad_x = _input_grad(grad, weight, normed, scale, x.dtype, centred=True) if needs[0] else None
    grad_weight = _sum_rows(grad * normed, weight.dtype) if needs[1] else None
    grad_bias = _sum_rows(grad, bias.dtype) if needs[2] else None
    return grad_x, grad_weight, grad_bias


def rounded(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The one rounding that ends an op: ``y`` as a contiguous tensor of ``dtype``."""
    return y.to(dtype).contiguous()


def _rms_scale(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _input_grad(
    grad: Tensor,
    weight: Tensor,
    normed: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    centred: bool,
) -> Tensor:
    grad = grad * weight.to(grad.dtype)
    along = (grad * normed).mean(-1, keepdim=True)
    if centred:
        grad = grad - grad.mean(-1, keepdim=True)
    return (scale * (grad - normed * along)).to(dtype)


def _sum_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.reshape(-1, rows.shape[-1]).sum(0).to(dtype)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What ``rms_norm`` means, in plain PyTorch."""
    return rounded(plain_rms_norm(x, weight, eps), x.dtype)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _rms_norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grads = plain_rms_norm_backward(grad, x, weight, ctx.eps, ctx.needs_input_grad)
    return (*grads, None)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """What ``layer_norm`` means, in plain PyTorch."""
    return rounded(plain_layer_norm(x, weight, bias, eps), x.dtype)


def _layer_norm_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _layer_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias)


def _layer_norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    grads = plain_layer_norm_backward(grad, x, weight, bias, ctx.eps, ctx.needs_input_grad)
    return (*grads, None)


_rms_norm = define_op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=rms_norm_reference,
    fake=_rms_norm_fake,
    backward=_rms_norm_backward,
    setup_context=_rms_norm_setup,
)

_layer_norm = define_op(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    reference=layer_norm_reference,
    fake=_layer_norm_fake,
    backward=_layer_norm_backward,
    setup_context=_layer_norm_setup,
)
