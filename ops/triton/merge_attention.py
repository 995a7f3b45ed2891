"""``merge_attention``: one program merges one head of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._dtypes import element, unserved
from ._variants import Variant, variant

NUM_WARPS = 4


@triton.jit
def _merge(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    heads,
    width,
    out_a_t,
    out_a_n,
    out_a_v,
    lse_a_t,
    lse_a_n,
    out_b_t,
    out_b_n,
    out_b_v,
    lse_b_t,
    lse_b_n,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    t, n = row // heads, row % heads
    column = tl.arange(0, BLOCK)
    inside = column < width
    a_lse = tl.load(lse_a + t * lse_a_t + n * lse_a_n).to(tl.float32)
    b_lse = tl.load(lse_b + t * lse_b_t + n * lse_b_n).to(tl.float32)
    # +inf marks a side without keys, as -inf does.
    a_lse = tl.where(a_lse == float("inf"), float("-inf"), a_lse)
    b_lse = tl.where(b_lse == float("inf"), float("-inf"), b_lse)
    a_empty = a_lse == float("-inf")
    b_empty = b_lse == float("-inf")
    # Not tl.maximum: it drops a NaN, which must reach the result.
    top = tl.where((a_lse >= b_lse) | (a_lse != a_lse), a_lse, b_lse)
    shift = tl.where(a_empty & b_empty, 0.0, top)
    a_share = tl.exp(a_lse - shift)
    b_share = tl.exp(b_lse - shift)
    total = tl.where(a_empty & b_empty, 1.0, a_share + b_share)
    a_at = out_a + t * out_a_t + n * out_a_n + column * out_a_v
    b_at = out_b + t * out_b_t + n * out_b_n + column * out_b_v
    # What a side without keys holds is not read: 0 * NaN would be NaN.
    a = tl.load(a_at, mask=inside & (a_empty == 0), other=0.0).to(tl.float32)
    b = tl.load(b_at, mask=inside & (b_empty == 0), other=0.0).to(tl.float32)
    merged = a_share / total * a + b_share / total * b
    tl.store(out + row * width + column, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, tl.where(a_empty & b_empty, top, shift + tl.log(total)))


def supports(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> str | None:
    """None where ``run`` serves the call, else the reason why not."""
    return unserved(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)


def run(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """See ``ops.merge_attention``."""
    tokens, heads, width = out_a.shape
    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    out = out_a.new_empty((tokens, heads, width), dtype=dtype)
    lse = lse_a.new_empty((tokens, heads), dtype=torch.float32)
    if tokens * heads == 0:
        return out, lse
    _merge[(tokens * heads,)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        heads,
        width,
        *out_a.stride(),
        *lse_a.stride(),
        *out_b.stride(),
        *lse_b.stride(),
        BLOCK=triton.next_power_of_2(max(1, width)),
        num_warps=NUM_WARPS,
    )
    return out, lse


def variants(arch: int) -> list[Variant]:
    """The forms of the kernel for MLA's latent outputs and expanded ones."""
    return [
        variant(
            f"merge_attention {width} {element(dtype)}",
            _merge,
            {
                **dict.fromkeys(("out_a", "out_b", "out"), element(dtype)),
                **dict.fromkeys(("lse_a", "lse_b", "lse"), "fp32"),
            },
            {"BLOCK": width, "out_a_v": 1, "out_b_v": 1, "lse_a_n": 1, "lse_b_n": 1},
            divisible=(
                "heads",
                "width",
                "out_a_t",
                "out_a_n",
                "out_b_t",
                "out_b_n",
                "lse_a_t",
                "lse_b_t",
            ),
            num_warps=NUM_WARPS,
        )
        for width in (128, 512)
        for dtype in (torch.bfloat16, torch.float32)
    ]
