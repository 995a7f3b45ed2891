"""Paged MLA caches: writing a step's latents, and reading requests back as packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cache_layouts
from ._blocks import checks_values
from ._checks import (
    FLOATING,
    require_floating,
    require_rank,
    require_same_device,
    require_size,
)
from ._library import define_op
from ._slots import (
    Places,
    block_and_offset,
    packed_slots,
    places,
    require_paged,
    require_slot_mapping,
)
from .cache_layouts import FP8, mla_fields, mla_rope_dim, quantise_latent, require_mla_cache, to_fp8


def mla_cache_write(
    kv_c: Tensor,
    k_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    scale: Tensor | None = None,
) -> None:
    """Store latents and rotated keys in their slots of a paged cache; see ``cache_layouts``.

    A cache keeps no gradient: what is read back is cut off from ``kv_c`` and ``k_pe``.

    Args:
        kv_c: [T, L] normed latents; k_pe: [T, R] rotated keys. Each is cast to what the cache
            stores for it; the casts of the fp8 layouts start from float32.
        cache: [num_blocks, block_size, width], changed in place.
        slot_mapping: [T] int64, ``block * block_size + offset``. -1 is skipped. Which of two
            tokens with one slot stays is not defined.
        layout: one of ``cache_layouts.LAYOUTS``.
        scale: one float32 > 0 on the device of ``cache``, for the layout ``fp8`` and no other.

    Raises:
        ValueError: shapes, strides, devices, a layout or a scale that do not fit together, or a
            slot that is neither -1 nor in the cache. Nothing is written then.
        TypeError: a dtype outside of those above.
    """
    require_latents(kv_c, k_pe, cache)
    require_mla_cache(cache, layout, kv_c.shape[1], k_pe.shape[1], scale)
    require_slot_mapping("slot_mapping", slot_mapping, kv_c.shape[0], cache)
    _write_op(kv_c, k_pe, cache, slot_mapping, layout, scale)


def mla_cache_gather(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    layout: str,
    scale: Tensor | None = None,
    kv_lora_rank: int = 512,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Read the first tokens of each request from a paged cache, dequantised and packed.

    Latents and rotated keys stay apart, as ``mla_attention`` and ``sparse_mla`` take them, so that
    no caller concatenates or splits a cache.

    Args:
        cache: [num_blocks, block_size, width].
        block_table: [B, blocks] int32, the blocks of each request in order. Columns past a
            request's own tokens may hold anything: they are not read.
        cu_seqlens: [B + 1] int32, rising from 0: request b fills the packed rows
            ``cu_seqlens[b] .. cu_seqlens[b + 1]``.
        total: rows of the result, a host upper bound on ``cu_seqlens[-1]``.
        layout, scale: as the cache was written.
        kv_lora_rank: L, which the width of a row does not tell.
        dtype: of the result. None is that of the cache for ``bf16``, else bfloat16, in which
            ``fp8_ds_mla`` is exact as this package writes it. Every value is rounded once, from
            float32.

    Returns:
        kv_c [total, L] and k_pe [total, R], zero from row ``cu_seqlens[-1]`` on.

    Raises:
        ValueError: shapes, strides, devices, a layout or a scale that do not fit together, lengths
            beyond ``total``, or a token without a block in the cache.
        TypeError: a dtype outside of those above.
    """
    require_rank("cache", cache, 3)
    require_mla_cache(
        cache, layout, kv_lora_rank, mla_rope_dim(layout, cache.shape[2], kv_lora_rank), scale
    )
    require_paged(block_table, cu_seqlens, cache)
    require_floating_dtype(dtype)
    return _gather_op(cache, block_table, cu_seqlens, total, layout, scale, kv_lora_rank, dtype)


def require_latents(kv_c: Tensor, k_pe: Tensor, cache: Tensor) -> None:
    """Check that ``kv_c`` [T, L] and ``k_pe`` [T, R] are floating point, beside ``cache``."""
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe)):
        require_rank(name, tensor, 2)
        require_floating(name, tensor)
    require_size("k_pe", k_pe, 0, kv_c.shape[0], "the rows of kv_c")
    require_same_device(kv_c=kv_c, k_pe=k_pe, cache=cache)


def require_floating_dtype(dtype: torch.dtype | None) -> None:
    """Raise ``TypeError`` unless ``dtype`` is None or one that gathered rows can have."""
    if dtype is not None and dtype not in FLOATING:
        names = ", ".join(str(accepted).removeprefix("torch.") for accepted in FLOATING)
        raise TypeError(f"dtype must be {names}, got {str(dtype).removeprefix('torch.')}")


def require_scale_value(scale: Tensor | None) -> None:
    """Raise ``ValueError`` where a scale, if its value is checked, is not positive and finite."""
    if scale is not None and checks_values(scale):
        value = float(scale)
        if not 0.0 < value < float("inf"):
            raise ValueError(f"scale must be positive and finite, got {value}")


def store_latents(
    kv_c: Tensor, k_pe: Tensor, cache: Tensor, at: Places, layout: str, scale: Tensor | None
) -> None:
    """Write the rows ``at.row`` of ``kv_c`` and ``k_pe``, quantised, to their places."""
    kv_c, k_pe = kv_c[at.row], k_pe[at.row]
    fields = mla_fields(layout, kv_c.shape[1], k_pe.shape[1])
    scales: Tensor | None = None
    if layout == "bf16":
        latent, rope = kv_c.to(cache.dtype), k_pe.to(cache.dtype)
    elif scale is not None:
        latent, rope = (_bytes(to_fp8(part.float() / scale)) for part in (kv_c, k_pe))
    else:
        values, factors = quantise_latent(kv_c)
        latent, scales, rope = map(_bytes, (values, factors, k_pe.to(torch.bfloat16)))
    rows = cache if layout == "bf16" else cache.view(torch.uint8)
    rows[..., fields.latent][at.block, at.offset] = latent
    rows[..., fields.rope][at.block, at.offset] = rope
    if scales is not None:
        rows[..., fields.scales][at.block, at.offset] = scales


def load_latents(
    cache: Tensor,
    slot: Tensor,
    layout: str,
    scale: Tensor | None,
    kv_lora_rank: int,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Rows of the slots [...] int64, dequantised: kv_c [..., L] and k_pe [..., R].

    Rows of a negative slot are zero. Slots are not checked.
    """
    rope_dim = mla_rope_dim(layout, cache.shape[2], kv_lora_rank)
    fields = mla_fields(layout, kv_lora_rank, rope_dim)
    dtype = dtype or stored_dtype(cache, layout)
    if cache.shape[0] == 0:
        empty = cache.new_zeros((), dtype=dtype)
        return empty.new_zeros(*slot.shape, kv_lora_rank), empty.new_zeros(*slot.shape, rope_dim)
    block, offset = block_and_offset(slot, cache.shape[1])
    rows = cache if layout == "bf16" else cache.view(torch.uint8)
    latent = rows[..., fields.latent][block, offset]
    rope = rows[..., fields.rope][block, offset]
    if scale is not None:
        latent, rope = (part.view(FP8).float() * scale for part in (latent, rope))
    elif layout == "fp8_ds_mla":
        factors = rows[..., fields.scales][block, offset].view(torch.float32)
        tiles = latent.view(FP8).float().unflatten(-1, (-1, cache_layouts.TILE))
        latent = (tiles * factors[..., None]).flatten(-2)
        rope = rope.view(torch.bfloat16)
    absent = (slot < 0)[..., None]
    return latent.to(dtype).masked_fill(absent, 0), rope.to(dtype).masked_fill(absent, 0)


def stored_dtype(cache: Tensor, layout: str) -> torch.dtype:
    """The dtype in which stored values are read where none is asked for."""
    return cache.dtype if layout == "bf16" else torch.bfloat16


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@torch.no_grad()
def _write_reference(
    kv_c: Tensor,
    k_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    scale: Tensor | None = None,
) -> None:
    require_scale_value(scale)
    store_latents(kv_c, k_pe, cache, places("slot_mapping", slot_mapping, cache), layout, scale)


def _write_fake(
    kv_c: Tensor,
    k_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    scale: Tensor | None = None,
) -> None:
    return None


def _gather_reference(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    layout: str,
    scale: Tensor | None = None,
    kv_lora_rank: int = 512,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    require_scale_value(scale)
    slot = packed_slots(block_table, cu_seqlens, total, cache)
    return load_latents(cache, slot, layout, scale, kv_lora_rank, dtype)


def _gather_fake(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    layout: str,
    scale: Tensor | None = None,
    kv_lora_rank: int = 512,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    dtype = dtype or stored_dtype(cache, layout)
    rope_dim = mla_rope_dim(layout, cache.shape[2], kv_lora_rank)
    return (
        cache.new_empty((total, kv_lora_rank), dtype=dtype),
        cache.new_empty((total, rope_dim), dtype=dtype),
    )


_write_op = define_op(
    "mla_cache_write(Tensor kv_c, Tensor k_pe, Tensor(a!) cache, Tensor slot_mapping, str layout,"
    " Tensor? scale=None) -> ()",
    reference=_write_reference,
    fake=_write_fake,
)

_gather_op = define_op(
    "mla_cache_gather(Tensor cache, Tensor block_table, Tensor cu_seqlens, SymInt total,"
    " str layout, Tensor? scale=None, SymInt kv_lora_rank=512, ScalarType? dtype=None)"
    " -> (Tensor, Tensor)",
    reference=_gather_reference,
    fake=_gather_fake,
)
