"""Rotary position embedding with the pairing of the rotated dimensions spelled out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._checks import require_floating, require_rank, require_same_device, require_size
from ._dtypes import wide_dtype
from ._library import define_op
from .norm import rounded

# Whether a style reads, and whether it writes, the pairs (2i, 2i+1); otherwise (i, i + R/2).
_INTERLEAVED = {
    "half": (False, False),
    "interleaved": (True, True),
    "interleaved_to_half": (True, False),
}
STYLES = tuple(_INTERLEAVED)


def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotate pairs of the last dimension: ``y1 = x1*cos - x2*sin``, ``y2 = x2*cos + x1*sin``.

    Args:
        x: [T, R] or [T, heads, R] floating point, any strides.
        cos, sin: [T, R/2], one angle per token and pair, for all heads; float32, other floating
            dtypes are cast. They are tables and have no gradient.
        style: where the pair (x1, x2) number i stands. ``half``: at (i, i + R/2);
            ``interleaved``: at (2i, 2i+1); ``interleaved_to_half``: read at (2i, 2i+1) and
            written at (i, i + R/2).

    Returns:
        Like ``x``, contiguous. Computed in float32, or in float64 for a float64 ``x``.

    Raises:
        ValueError: an unknown style, wrong ranks or sizes, two devices, or a table that
            requires a gradient.
        TypeError: a tensor is not floating point.
    """
    require_style("style", style)
    require_floating("x", x)
    require_rank("x", x, 2, 3)
    require_tables(cos, sin, rows=x.shape[0])
    require_size("x", x, -1, 2 * cos.shape[1], "twice the columns of cos")
    require_same_device(x=x, cos=cos, sin=sin)
    out: Tensor = _op(x, cos, sin, style)
    return out


def require_style(name: str, style: str) -> None:
    """Raise ``ValueError`` unless ``style`` is one of ``STYLES``."""
    if style not in STYLES:
        raise ValueError(f"{name} must be one of {', '.join(STYLES)}, got {style!r}")


def require_tables(cos: Tensor, sin: Tensor, rows: int) -> None:
    """Check that ``cos`` and ``sin`` are floating point [rows, R/2] without a gradient."""
    for name, table in (("cos", cos), ("sin", sin)):
        require_floating(name, table)
        require_rank(name, table, 2)
        require_size(name, table, 0, rows, "one row per token")
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require a gradient: rope has none for its tables")
    require_size("sin", sin, 1, cos.shape[1], "the columns of cos")


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """RoPE without the final rounding: the result has the working dtype of ``x``."""
    reads, writes = _INTERLEAVED[style]
    return _rotate(x, cos, sin, reads, writes)


def plain_rope_backward(grad: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Gradient of ``x``: the rotation by the opposite angle, back to the places read."""
    reads, writes = _INTERLEAVED[style]
    return _rotate(grad, cos, -sin, writes, reads)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, reads: bool, writes: bool) -> Tensor:
    work = wide_dtype(x)
    x, cos, sin = x.to(work), cos.to(work), sin.to(work)
    half = cos.shape[1]
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    x1, x2 = (x[..., 0::2], x[..., 1::2]) if reads else (x[..., :half], x[..., half:])
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return torch.stack((y1, y2), dim=-1).flatten(-2) if writes else torch.cat((y1, y2), dim=-1)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """What ``rope`` means, in plain PyTorch."""
    return rounded(plain_rope(x, cos, sin, style), x.dtype)


def _fake(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, ctx.style = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Only x has a gradient, so that this runs only when x needs one.
    cos, sin = ctx.saved_tensors
    return plain_rope_backward(grad, cos, sin, ctx.style).to(ctx.dtype), None, None, None


_op = define_op(
    "rope(Tensor x, Tensor cos, Tensor sin, str style) -> Tensor",
    reference=rope_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
