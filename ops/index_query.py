"""The indexer's query as its scoring kernels take it: rotated, quantised, scales in the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._checks import (
    require_floating,
    require_rank,
    require_same_device,
    require_size,
)
from ._dtypes import wide_dtype
from ._library import define_op
from .cache_layouts import FP8, quantise_index_key
from .hadamard import plain_hadamard, require_power_of_two
from .norm import rounded
from .rope import plain_rope, plain_rope_backward, require_style, require_tables


def index_query(
    q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    quantize: bool,
    hadamard: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate the first R dims of the index query and fold all its scales into the head weights.

    ``folded = weights * scale * D**-0.5 * H**-0.5``, multiplied in this order in float32, where
    ``scale`` is that of the quantised query and is left out otherwise. A positive scale may leave
    the query because ``relu(a * x) = a * relu(x)``. (vLLM 0.33 ``fused_q``; DeepSeek-V3.2, 2.1.)

    Args:
        q: [T, H, D] floating point, D >= R, any strides.
        weights: [T, H] floating point, the raw head weights; may be negative.
        cos, sin: [T, R/2], see ``rope``.
        style: RoPE style of the indexer, see ``rope``.
        quantize: return ``q`` as float8_e4m3fn with a power-of-two scale for each token and head:
            ``cache_layouts.quantise_index_key`` of the float32 query, without a rounding before.
            The ops that score and select take both results as they are.
        hadamard: end with the orthonormal Hadamard transform. The keys must have it too
            (``norm_rope_index(hadamard=True)``): one flag for both.

    Returns:
        q [T, H, D], of its own dtype, rounded once, or float8_e4m3fn; and the folded weights
        [T, H] float32 (float64 for float64 weights). Both are contiguous. Neither has a gradient
        if ``quantize``.

    Raises:
        ValueError: an unknown style, wrong ranks or sizes, two devices, a table that requires a
            gradient, or ``hadamard`` with a D that is not a power of two.
        TypeError: a tensor is not floating point.
    """
    require_style("style", style)
    require_floating("q", q)
    require_floating("weights", weights)
    require_rank("q", q, 3)
    require_rank("weights", weights, 2)
    require_tables(cos, sin, rows=q.shape[0])
    if q.shape[2] < max(1, 2 * cos.shape[1]):
        raise ValueError(
            f"q must have at least {max(1, 2 * cos.shape[1])} in dimension 2 (twice the columns"
            f" of cos), got shape {tuple(q.shape)}"
        )
    require_size("weights", weights, 0, q.shape[0], "one row per query token")
    require_size("weights", weights, 1, q.shape[1], "one weight per head of q")
    if hadamard:
        require_power_of_two("the head dim of q", q.shape[2])
    require_same_device(q=q, weights=weights, cos=cos, sin=sin)
    return _op(q, weights, cos, sin, style, quantize, hadamard)


def _factors(q: Tensor) -> tuple[float, float]:
    """``D**-0.5`` and ``H**-0.5``."""
    heads, width = int(q.shape[1]), int(q.shape[2])
    return width**-0.5, max(heads, 1) ** -0.5


def _reference(
    q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    quantize: bool,
    hadamard: bool = False,
) -> tuple[Tensor, Tensor]:
    rotated = 2 * cos.shape[1]
    wide = torch.cat(
        (plain_rope(q[..., :rotated], cos, sin, style), q[..., rotated:].to(wide_dtype(q))),
        dim=-1,
    )
    if hadamard:
        wide = plain_hadamard(wide)
    folded = weights.to(wide_dtype(weights))
    if quantize:
        wide, scale = quantise_index_key(wide)
        folded = folded * scale
    by_width, by_heads = _factors(q)
    return (
        rounded(wide, FP8 if quantize else q.dtype),
        rounded(folded * by_width * by_heads, wide_dtype(weights)),
    )


def _fake(
    q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    quantize: bool,
    hadamard: bool = False,
) -> tuple[Tensor, Tensor]:
    return (
        q.new_empty(q.shape, dtype=FP8 if quantize else q.dtype),
        weights.new_empty(weights.shape, dtype=wide_dtype(weights)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, weights, cos, sin, ctx.style, quantize, ctx.hadamard = inputs
    ctx.dtypes = q.dtype, weights.dtype
    ctx.factors = _factors(q)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin)
    if quantize:
        ctx.mark_non_differentiable(*output)


def _backward(
    ctx: Any, grad_q: Tensor | None, grad_folded: Tensor | None
) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    dtype, weights_dtype = ctx.dtypes
    grad_weights = None
    if grad_folded is not None and ctx.needs_input_grad[1]:
        by_width, by_heads = ctx.factors
        grad_weights = (grad_folded * by_heads * by_width).to(weights_dtype)
    if grad_q is None or not ctx.needs_input_grad[0]:
        return None, grad_weights, None, None, None, None, None
    grad = plain_hadamard(grad_q) if ctx.hadamard else grad_q
    rotated = 2 * cos.shape[1]
    turned = plain_rope_backward(grad[..., :rotated], cos, sin, ctx.style)
    grad = torch.cat((turned, grad[..., rotated:].to(turned.dtype)), dim=-1)
    return grad.to(dtype), grad_weights, None, None, None, None, None


_op = define_op(
    "index_query(Tensor q, Tensor weights, Tensor cos, Tensor sin, str style, bool quantize,"
    " bool hadamard=False) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
