"""What the cache kernels share: where packed rows lie in pages, and what they refuse."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._blocks import checks_values
from .._slots import packed_slots, places
from ._device import ARCHITECTURES, INTERPRETER, architecture
from ._dtypes import SERVED
from ._variants import Tile

# Requests whose ends a program compares at once.
REQUESTS = tl.constexpr(128)
_EVERYWHERE = (INTERPRETER, *ARCHITECTURES)
WRITE_TILES: dict[int, Tile] = {arch: Tile(1, 512, 4, 1) for arch in _EVERYWHERE}
"""Tokens of a program that writes: latency counts, so that one token each is the most parallel."""

GATHER_TILES: dict[int, Tile] = {arch: Tile(4, 512, 4, 1) for arch in _EVERYWHERE}
"""Tokens of a program that reads: 16 values a thread keep enough loads in flight."""


@triton.jit
def packed_places(
    row,
    cu_seqlens,
    requests,
    block_table,
    table_row,
    table_column,
    columns,
    blocks,
    block_size,
    CHUNK: tl.constexpr,
):
    """Blocks and offsets of the packed rows ``row``, and which of them have a token."""
    request = tl.zeros_like(row)
    for first in range(0, requests, CHUNK):
        bound = first + tl.arange(0, CHUNK)
        end = tl.load(cu_seqlens + 1 + bound, mask=bound < requests, other=2147483647)
        request += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), axis=1)
    known = request < requests
    position = row - tl.load(cu_seqlens + request, mask=known, other=0)
    column = position // block_size
    known = known & (position >= 0) & (column < columns)
    entry = request.to(tl.int64) * table_row + column.to(tl.int64) * table_column
    block = tl.load(block_table + entry, mask=known, other=-1)
    known = known & (block >= 0) & (block < blocks)
    return block.to(tl.int64), position % block_size, known


def refusal(cache: Tensor, *dtypes: torch.dtype | None) -> str | None:
    """Why no cache kernel serves this device and these floating dtypes, or None."""
    arch = architecture(cache.device)
    if arch not in WRITE_TILES:
        return f"no tile for compute capability {arch / 10}"
    for dtype in dtypes:
        if dtype is not None and dtype not in SERVED:
            return f"served are 16 and 32 bits, got {str(dtype).removeprefix('torch.')}"
    return None


def misaligned(cache: Tensor, align: int, *offsets: int) -> str | None:
    """Why numbers of ``align`` bytes cannot be addressed in a cache of bytes, or None.

    offsets: bytes from the start of a block at which they stand.
    """
    strides = [cache.stride(0)] if cache.shape[0] > 1 else []
    if any(at % align for at in (cache.data_ptr(), *strides, *offsets)):
        return f"numbers of {align} bytes in the cache are not aligned"
    return None


def rows_of(x: Tensor) -> Tensor:
    """``x`` [T, C] with its columns side by side; its rows may lie apart."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def check_slot_values(name: str, slot_mapping: Tensor, cache: Tensor) -> None:
    """Raise ``ValueError`` for a slot outside of the cache, where values are checked (C23)."""
    if checks_values(slot_mapping):
        places(name, slot_mapping, cache)


def check_request_values(
    block_table: Tensor, cu_seqlens: Tensor, total: int, cache: Tensor
) -> None:
    """Raise ``ValueError`` for lengths or blocks that are wrong, where values are checked (C23)."""
    if total < 0 or checks_values(cu_seqlens):
        packed_slots(block_table, cu_seqlens, total, cache)
