"""``index_query``: one launch; a program takes a few heads of one token."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_layouts import FP8
from ._dtypes import unserved
from ._e4m3 import (
    FP8_MAX,
    e4m3_codes,
    finite_sizes,
    inverse_power_of_two,
    power_of_two_above,
)
from ._norm_rows import steps_of
from ._paged import rows_of
from ._rotation import READS, WRITES, angles, hadamard, rotation, turned
from ._variants import Variant, variant
from .norm_rope import too_wide

NUM_WARPS = 4
HEADS = 16
"""Heads of a program: 16 values a thread at D = 128, and two programs or more a token."""


@triton.jit
def _index_query(
    q,
    weights,
    cos,
    sin,
    out,
    folded,
    heads,
    width,
    half,
    q_t,
    q_h,
    weights_row,
    cos_row,
    sin_row,
    by_width,
    by_heads,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    HADAMARD: tl.constexpr,
    HEADS: tl.constexpr,
    STEPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < heads
    column = tl.arange(0, 2**STEPS)
    at, across, pair, sign, rotated = rotation(column, half, READ, WRITE)
    c, s = angles(cos + token * cos_row, sin + token * sin_row, pair, sign, rotated)
    row = q + token * q_t + head.to(tl.int64)[:, None] * q_h
    inside = there[:, None] & (column < width)[None, :]
    own = tl.load(row + at[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = there[:, None] & rotated[None, :]
    other = tl.load(row + across[None, :], mask=partner, other=0.0).to(tl.float32)
    x = turned(own, other, c[None, :], s[None, :], rotated[None, :])
    if HADAMARD:
        x = hadamard(x, HEADS, STEPS)
    weight = tl.load(weights + token * weights_row + head, mask=there, other=0.0).to(tl.float32)
    place = out + (token * heads + head)[:, None] * width + column[None, :]
    if QUANTIZE:
        amax = tl.max(finite_sizes(x), axis=1)
        scale = power_of_two_above(tl.div_rn(tl.maximum(amax, 1e-4), FP8_MAX))
        codes = e4m3_codes(x * inverse_power_of_two(scale)[:, None])
        tl.store(place, codes, mask=inside)
        weight = weight * scale
    else:
        tl.store(place, x.to(out.dtype.element_ty), mask=inside)
    tl.store(folded + token * heads + head, weight * by_width * by_heads, mask=there)


def supports(
    q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    quantize: bool,
    hadamard: bool = False,
) -> str | None:
    """None where ``run`` serves the call, else the reason why not."""
    return too_wide(q=q) or unserved(q=q, weights=weights, cos=cos, sin=sin)


def run(
    q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    quantize: bool,
    hadamard: bool = False,
) -> tuple[Tensor, Tensor]:
    """See ``ops.index_query``."""
    tokens, heads, width = q.shape
    out = q.new_empty(q.shape, dtype=FP8 if quantize else q.dtype)
    folded = weights.new_empty(weights.shape, dtype=torch.float32)
    if tokens * heads == 0:
        return out, folded
    q = q if q.stride(2) == 1 else q.contiguous()
    weights, cos, sin = map(rows_of, (weights, cos, sin))
    _index_query[(tokens, triton.cdiv(heads, HEADS))](
        q,
        weights,
        cos,
        sin,
        out.view(torch.uint8) if quantize else out,
        folded,
        heads,
        width,
        cos.shape[1],
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        cos.stride(0),
        sin.stride(0),
        width**-0.5,
        heads**-0.5,
        **_constexprs(width, style, quantize, hadamard),
        num_warps=NUM_WARPS,
    )
    return out, folded


def _constexprs(width: int, style: str, quantize: bool, hadamard: bool) -> dict[str, Any]:
    return {
        "READ": READS[style],
        "WRITE": WRITES[style],
        "QUANTIZE": quantize,
        "HADAMARD": hadamard,
        "HEADS": HEADS,
        "STEPS": steps_of(width),
    }


def variants(arch: int) -> list[Variant]:
    """The forms of the kernel at the indexer's width of 128."""
    return [
        variant(
            f"index_query {style}{' hadamard' * hadamard}{' e4m3' * quantize} {dtype}",
            _index_query,
            {
                "q": dtype,
                "weights": "fp32" if dtype == "fp32" else "bf16",
                "cos": "fp32",
                "sin": "fp32",
                "out": "u8" if quantize else dtype,
                "folded": "fp32",
            },
            _constexprs(128, style, quantize, hadamard),
            divisible=("heads", "width", "half", "q_t", "q_h", "weights_row", "cos_row", "sin_row"),
            floats=("by_width", "by_heads"),
            num_warps=NUM_WARPS,
        )
        for style, quantize, hadamard, dtype in (
            ("half", True, True, "bf16"),
            ("half", False, False, "bf16"),
            ("interleaved", True, False, "bf16"),
            ("interleaved", False, False, "bf16"),
            ("interleaved", False, False, "fp32"),
        )
    ]
