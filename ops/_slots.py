"""From slots of a paged cache to its blocks, with every value checked before it is used."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._blocks import checks_values
from ._checks import require_dtype, require_rank, require_same_device, require_size
from .indices import slots


class Places(NamedTuple):
    """Where new tokens go: token ``row[i]`` to offset ``offset[i]`` of block ``block[i]``."""

    row: Tensor
    block: Tensor
    offset: Tensor


def require_slot_mapping(name: str, slot_mapping: Tensor, rows: int, cache: Tensor) -> None:
    """Check that ``slot_mapping`` is [rows] int64 beside ``cache``."""
    require_rank(name, slot_mapping, 1)
    require_dtype(name, slot_mapping, (torch.int64,))
    require_size(name, slot_mapping, 0, rows, "one per new token")
    require_same_device(**{"cache": cache, name: slot_mapping})


def require_paged(block_table: Tensor, cu_seqlens: Tensor, cache: Tensor) -> None:
    """Check that ``block_table`` is [B, blocks] and ``cu_seqlens`` [B + 1], int32."""
    for name, tensor, rank in (("block_table", block_table, 2), ("cu_seqlens", cu_seqlens, 1)):
        require_rank(name, tensor, rank)
        require_dtype(name, tensor, (torch.int32,))
    require_size("cu_seqlens", cu_seqlens, 0, block_table.shape[0] + 1, "one more than requests")
    require_same_device(cache=cache, block_table=block_table, cu_seqlens=cu_seqlens)


def places(name: str, slot_mapping: Tensor, cache: Tensor) -> Places:
    """Places of the tokens that have one: a slot of -1 is skipped.

    Raises:
        ValueError: where values are checked (contract C23), a slot that is neither -1 nor in the
            cache. Elsewhere it is skipped.
    """
    capacity = cache.shape[0] * cache.shape[1]
    if slot_mapping.shape[0] and checks_values(slot_mapping):
        low, high = int(slot_mapping.min()), int(slot_mapping.max())
        if low < -1 or high >= capacity:
            raise ValueError(f"{name} must hold -1 or slots below {capacity}, got {low} to {high}")
    row = ((slot_mapping >= 0) & (slot_mapping < capacity)).nonzero().flatten()
    slot = slot_mapping[row]
    block = slot.div(cache.shape[1], rounding_mode="floor")
    return Places(row, block, slot.remainder(cache.shape[1]))


def packed_slots(block_table: Tensor, cu_seqlens: Tensor, total: int, cache: Tensor) -> Tensor:
    """[total] int64: the slot of each packed row, -1 for rows from ``cu_seqlens[-1]`` on.

    Reads no column of ``block_table`` beyond a request's own blocks.

    Raises:
        ValueError: ``total`` is negative, or, where values are checked (contract C23),
            ``cu_seqlens`` does not rise from 0 to at most ``total``, or a needed block is missing
            or not in the cache. Elsewhere such a row has the slot -1.
    """
    if total < 0:
        raise ValueError(f"total must be at least 0, got {total}")
    checked = checks_values(cu_seqlens)
    if checked:
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last > total or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must rise from 0 to at most total, {total}, got {cu_seqlens.tolist()}"
            )
    packed = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    request = torch.bucketize(packed, cu_seqlens[1:], right=True)
    position = packed - cu_seqlens[request]
    slot = slots(position[:, None], block_table, request, cache.shape[1])[:, 0]
    capacity = cache.shape[0] * cache.shape[1]
    if checked:
        wrong = ((slot < 0) | (slot >= capacity))[:last].nonzero().flatten()
        if wrong.numel():
            row = int(wrong[0])
            raise ValueError(
                f"block_table must name one of {cache.shape[0]} blocks for every token: request"
                f" {int(request[row])} has none for its token {int(position[row])}"
            )
    return torch.where(slot < capacity, slot, -1)


def block_and_offset(slot: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Block and offset of slots, those of slot 0 where ``slot`` is negative."""
    slot = slot.clamp(min=0)
    return slot.div(block_size, rounding_mode="floor"), slot.remainder(block_size)
