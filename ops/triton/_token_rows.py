"""One token in the registers of a program, quantised and written to its place in a cache."""

from __future__ import annotations

import triton
import triton.language as tl

from ._e4m3 import (
    FP8_MAX,
    e4m3_codes,
    exponent_bytes,
    finite_sizes,
    inverse_power_of_two,
    power_of_two_above,
)


@triton.jit
def store_latent(values, row, scale, LATENT: tl.constexpr, LAYOUT: tl.constexpr, PAD: tl.constexpr):
    """Write the latent of one token, [PAD] or for ``fp8_ds_mla`` [PAD / 128, 128], to its row.

    The same numbers as ``mla_cache.store_latents``. ``values`` is float32, 0 beyond the latent.
    """
    if LAYOUT == "fp8_ds_mla":
        tile = tl.arange(0, PAD // 128)
        column = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
        amax = tl.max(finite_sizes(values), axis=1)
        factor = power_of_two_above(tl.maximum(tl.div_rn(amax, FP8_MAX), 1e-4))
        codes = e4m3_codes(values * inverse_power_of_two(factor)[:, None])
        tl.store(row + column, codes, mask=column < LATENT)
        scales = (row + LATENT).to(tl.pointer_type(tl.float32))
        tl.store(scales + tile, factor, mask=tile * 128 < LATENT)
    else:
        column = tl.arange(0, PAD)
        if LAYOUT == "fp8":
            stored = e4m3_codes(tl.div_rn(values, tl.load(scale)))
        else:
            stored = values.to(row.dtype.element_ty)
        tl.store(row + column, stored, mask=column < LATENT)


@triton.jit
def store_rope(
    values,
    row,
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LAYOUT: tl.constexpr,
    PAD: tl.constexpr,
):
    """Write the rotated key of one token, float32 [PAD], to its row."""
    column = tl.arange(0, PAD)
    if LAYOUT == "fp8_ds_mla":
        rope = (row + LATENT + LATENT // 32).to(tl.pointer_type(tl.bfloat16))
        tl.store(rope + column, values.to(tl.bfloat16), mask=column < ROPE)
    else:
        if LAYOUT == "fp8":
            stored = e4m3_codes(tl.div_rn(values, tl.load(scale)))
        else:
            stored = values.to(row.dtype.element_ty)
        tl.store(row + LATENT + column, stored, mask=column < ROPE)


@triton.jit
def store_index_key(
    key, block, offset, block_size, DIM: tl.constexpr, UE8M0: tl.constexpr, PAD: tl.constexpr
):
    """Write one index key, float32 [PAD] and 0 beyond DIM, and its scale to the planes of a block.

    The same numbers as ``index_cache.store_index_keys``.
    """
    lane = tl.arange(0, PAD)
    amax = tl.max(finite_sizes(key), axis=0)
    scale = power_of_two_above(tl.div_rn(tl.maximum(amax, 1e-4), FP8_MAX))
    codes = e4m3_codes(key * inverse_power_of_two(scale))
    tl.store(block + offset * DIM + lane, codes, mask=lane < DIM)
    scales = (block + block_size * DIM).to(tl.pointer_type(tl.int32))
    stored = exponent_bytes(scale) if UE8M0 else scale.to(tl.int32, bitcast=True)
    tl.store(scales + offset, stored)
