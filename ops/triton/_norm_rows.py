"""One row of a latent, a rotated key or an index key, normed in the registers of a program."""

from __future__ import annotations

import triton
import triton.language as tl

from ._rotation import angles, hadamard, rotation, turned


def steps_of(width: int) -> int:
    """The least number of bits that number ``width`` columns."""
    return max(width - 1, 0).bit_length()


@triton.jit
def rms_normed(x, weight, width, eps, BLOCK: tl.constexpr):
    """float32 RMSNorm of the row at ``x``, whose columns lie side by side."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    return values * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rotated_key(x, cos, sin, half, READ: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    """float32 RoPE of the row at ``x``."""
    column = tl.arange(0, BLOCK)
    at, across, pair, sign, inside = rotation(column, half, READ, WRITE)
    c, s = angles(cos, sin, pair, sign, inside)
    own = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + across, mask=inside, other=0.0).to(tl.float32)
    return turned(own, other, c, s, inside)


@triton.jit
def _normed_at(x, weight, bias, column, inside, mean, scale):
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return (value - mean) * scale * w + b


@triton.jit
def index_key(
    x,
    weight,
    bias,
    cos,
    sin,
    width,
    half,
    eps,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    HADAMARD: tl.constexpr,
    STEPS: tl.constexpr,
):
    """float32 LayerNorm, RoPE and Hadamard transform of the index key at ``x``."""
    column = tl.arange(0, 2**STEPS)
    inside = column < width
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / width
    centred = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    at, across, pair, sign, rotated = rotation(column, half, READ, WRITE)
    c, s = angles(cos, sin, pair, sign, rotated)
    own = _normed_at(x, weight, bias, at, inside, mean, scale)
    other = _normed_at(x, weight, bias, across, rotated, mean, scale)
    key = turned(own, other, c, s, rotated)
    if HADAMARD:
        # A width that is transformed is a power of two, and fills the block.
        key = tl.reshape(hadamard(key[None, :], 1, STEPS), (2**STEPS,))
    return key


@triton.jit
def store_row(out, row, width, values, BLOCK: tl.constexpr):
    """Round ``values`` once, to row number ``row`` of a contiguous [T, width]."""
    column = tl.arange(0, BLOCK)
    at = out + row * width + column
    tl.store(at, values.to(out.dtype.element_ty), mask=column < width)
