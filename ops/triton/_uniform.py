"""Numbers that all threads of a program hold alike, in a form in which the assembler sees it."""

from __future__ import annotations

import triton
import triton.language as tl

from ._device import interpreted

_COMPILED = tl.constexpr(not interpreted())


@triton.jit
def uniform(x):
    """The scalar int32 ``x``, as a broadcast from the first lane of each warp.

    A loop whose bound was reduced or loaded counts as one that threads may leave apart. Then its
    addresses and matrix descriptors do not go to the uniform registers, and ``sparse_mla`` with 64
    heads spills on sm_90, where it otherwise takes 20 registers fewer than there are.
    """
    if _COMPILED:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
            "=r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return x
