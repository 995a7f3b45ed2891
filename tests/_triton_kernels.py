"""A Triton kernel of the operations that its interpreter gets wrong by itself."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def products(a, b, dots, squares, larger, e4m3, SIZE: tl.constexpr, ARITHMETIC: tl.constexpr):
    """Of two square matrices: their product, and elementwise results in their own dtype."""
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(dots + at, tl.dot(x, y, input_precision="ieee"))
    if ARITHMETIC:
        tl.store(squares + at, x * x - y)
        tl.store(larger + at, tl.where(x > y, x, y))
    tl.store(e4m3 + at, (x.to(tl.float32) * 300).to(tl.float8e4nv))
