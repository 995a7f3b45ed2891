"""RoPE and the Hadamard transform of rows in registers, where every column stays in its place."""

from __future__ import annotations

import triton
import triton.language as tl

# Whether a style reads, and whether it writes, the pairs (2i, 2i+1); otherwise (i, i + R/2).
READS = {"half": False, "interleaved": True, "interleaved_to_half": True}
WRITES = {"half": False, "interleaved": True, "interleaved_to_half": False}


@triton.jit
def rotation(column, half, READ: tl.constexpr, WRITE: tl.constexpr):
    """What rotates into each output column.

    ``y = x[at] * cos[pair] + x[across] * sign * sin[pair]``. Columns from ``2 * half`` on
    are left alone: their ``at`` and ``across`` are themselves.
    """
    rotated = column < 2 * half
    if WRITE:
        pair = column // 2
        second = column % 2
    else:
        second = (column >= half).to(tl.int32)
        pair = column - second * half
    if READ:
        at = 2 * pair + second
        across = 2 * pair + 1 - second
    else:
        at = pair + second * half
        across = pair + (1 - second) * half
    sign = (2 * second - 1).to(tl.float32)
    return tl.where(rotated, at, column), tl.where(rotated, across, column), pair, sign, rotated


@triton.jit
def angles(cos, sin, pair, sign, rotated):
    """cos and signed sin of each column of a row whose tables start at ``cos`` and ``sin``."""
    c = tl.load(cos + pair, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + pair, mask=rotated, other=0.0).to(tl.float32)
    return c, sign * s


@triton.jit
def turned(x, across, c, s, rotated):
    """The rotated row. What is not rotated does not pass through a product: inf * 0 is NaN."""
    return tl.where(rotated, x * c + across * s, x)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, STEPS: tl.constexpr):
    """The orthonormal Hadamard transform of ``x`` [ROWS, 2**STEPS], see ``plain_hadamard``.

    Each step transforms the lowest bit of the column number and makes it the highest, so that
    after all steps every bit is transformed and back in its place.
    """
    width: tl.constexpr = 2**STEPS
    for _ in tl.static_range(STEPS):
        low, high = tl.split(tl.reshape(x, (ROWS, width // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (ROWS, width))
    norm: tl.constexpr = width**-0.5
    return x * norm
