"""The paged cache of index keys: planar fp8 blocks with one scale a token."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import require_floating, require_rank, require_same_device
from ._library import define_op
from ._slots import (
    Places,
    block_and_offset,
    packed_slots,
    places,
    require_paged,
    require_slot_mapping,
)
from .cache_layouts import (
    FP8,
    SCALE_BYTES,
    decode_scale,
    encode_scale,
    index_planes,
    quantise_index_key,
    require_index_cache,
)
from .mla_cache import require_floating_dtype


def index_cache_write(
    index_k: Tensor, cache: Tensor, slot_mapping: Tensor, scale_store: str
) -> None:
    """Store index keys in their slots of a paged cache, as fp8 with a power-of-two scale each.

    This write happens for every token of a layer that owns an indexer, whatever its route
    (contract C5): later steps select among these keys. See ``cache_layouts`` for the bytes.

    Args:
        index_k: [T, D] keys after LayerNorm, RoPE and, if the query has it too, Hadamard.
        cache: [num_blocks, block_size, D + 4] uint8, changed in place.
        slot_mapping: [T] int64, ``block * block_size + offset``. -1 is skipped. Which of two
            tokens with one slot stays is not defined.
        scale_store: "fp32", or "ue8m0" for the exponent byte four times.

    Raises:
        ValueError: shapes, strides or devices that do not fit together, an unknown
            ``scale_store``, D above 128, or a slot that is neither -1 nor in the cache. Nothing is
            written then.
        TypeError: a dtype outside of those above.
    """
    require_index_key(index_k, cache, scale_store)
    require_slot_mapping("slot_mapping", slot_mapping, index_k.shape[0], cache)
    _write_op(index_k, cache, slot_mapping, scale_store)


def index_cache_gather(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    scale_store: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Read the first index keys of each request from a paged cache, dequantised and packed.

    Args:
        cache: [num_blocks, block_size, D + 4] uint8.
        block_table, cu_seqlens, total: see ``mla_cache_gather``.
        scale_store: as the cache was written.
        dtype: of the result. None is bfloat16, in which the keys are exact as this package
            writes them.

    Returns:
        [total, D], zero from row ``cu_seqlens[-1]`` on.

    Raises:
        ValueError: shapes, strides or devices that do not fit together, an unknown
            ``scale_store``, lengths beyond ``total``, or a token without a block in the cache.
        TypeError: a dtype outside of those above.
    """
    require_rank("cache", cache, 3)
    require_index_cache(cache, cache.shape[2] - SCALE_BYTES, scale_store)
    require_paged(block_table, cu_seqlens, cache)
    require_floating_dtype(dtype)
    return _gather_op(cache, block_table, cu_seqlens, total, scale_store, dtype)


def require_index_key(index_k: Tensor, cache: Tensor, scale_store: str) -> None:
    """Check index keys [T, D] and the index cache that is to hold them."""
    require_rank("index_k", index_k, 2)
    require_floating("index_k", index_k)
    require_index_cache(cache, index_k.shape[1], scale_store)
    require_same_device(index_k=index_k, cache=cache)


def store_index_keys(index_k: Tensor, cache: Tensor, at: Places, scale_store: str) -> None:
    """Write the rows ``at.row`` of ``index_k``, quantised, to their places."""
    values, scale = quantise_index_key(index_k[at.row])
    keys, scales = index_planes(cache)
    keys[at.block, at.offset] = values.view(torch.uint8)
    scales[at.block, at.offset] = encode_scale(scale, scale_store)


def load_index_keys(
    cache: Tensor, slot: Tensor, scale_store: str, dtype: torch.dtype | None
) -> Tensor:
    """Keys of the slots [...] int64, dequantised: [..., D], zero where a slot is negative.

    Slots are not checked.
    """
    dtype = dtype or torch.bfloat16
    if cache.shape[0] == 0:
        return cache.new_zeros((*slot.shape, cache.shape[2] - SCALE_BYTES), dtype=dtype)
    block, offset = block_and_offset(slot, cache.shape[1])
    keys, scales = index_planes(cache)
    scale = decode_scale(scales[block, offset], scale_store)
    wide = keys[block, offset].view(FP8).float() * scale[..., None]
    return wide.to(dtype).masked_fill((slot < 0)[..., None], 0)


@torch.no_grad()
def _write_reference(
    index_k: Tensor, cache: Tensor, slot_mapping: Tensor, scale_store: str
) -> None:
    store_index_keys(index_k, cache, places("slot_mapping", slot_mapping, cache), scale_store)


def _write_fake(index_k: Tensor, cache: Tensor, slot_mapping: Tensor, scale_store: str) -> None:
    return None


def _gather_reference(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    scale_store: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    slot = packed_slots(block_table, cu_seqlens, total, cache)
    return load_index_keys(cache, slot, scale_store, dtype)


def _gather_fake(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    scale_store: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return cache.new_empty((total, cache.shape[2] - SCALE_BYTES), dtype=dtype or torch.bfloat16)


_write_op = define_op(
    "index_cache_write(Tensor index_k, Tensor(a!) cache, Tensor slot_mapping, str scale_store)"
    " -> ()",
    reference=_write_reference,
    fake=_write_fake,
)

_gather_op = define_op(
    "index_cache_gather(Tensor cache, Tensor block_table, Tensor cu_seqlens, SymInt total,"
    " str scale_store, ScalarType? dtype=None) -> Tensor",
    reference=_gather_reference,
    fake=_gather_fake,
)
