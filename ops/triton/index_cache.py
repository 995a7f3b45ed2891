"""``index_cache_write`` and ``index_cache_gather``: planar fp8 blocks, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_layouts import SCALE_BYTES, SCALE_STORES
from ..providers import Kernel
from ._device import architecture
from ._e4m3 import e4m3_values, exponent_value
from ._paged import (
    GATHER_TILES,
    REQUESTS,
    WRITE_TILES,
    check_request_values,
    check_slot_values,
    misaligned,
    packed_places,
    refusal,
    rows_of,
)
from ._token_rows import store_index_key
from ._variants import Variant, variant


@triton.jit
def _write_kernel(
    index_k,
    cache,
    slot_mapping,
    key_stride,
    slot_stride,
    block_stride,
    block_size,
    capacity,
    DIM: tl.constexpr,
    UE8M0: tl.constexpr,
    PAD: tl.constexpr,
):
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride)
    if (slot >= 0) & (slot < capacity):
        lane = tl.arange(0, PAD)
        key = tl.load(index_k + token * key_stride + lane, mask=lane < DIM, other=0.0)
        block = cache + (slot // block_size) * block_stride
        store_index_key(key.to(tl.float32), block, slot % block_size, block_size, DIM, UE8M0, PAD)


@triton.jit
def _gather_kernel(
    cache,
    block_table,
    cu_seqlens,
    index_k,
    total,
    requests,
    table_row,
    table_column,
    columns,
    blocks,
    block_stride,
    block_size,
    DIM: tl.constexpr,
    UE8M0: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """ROWS packed rows a program."""
    packed = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block, offset, known = packed_places(
        packed,
        cu_seqlens,
        requests,
        block_table,
        table_row,
        table_column,
        columns,
        blocks,
        block_size,
        CHUNK,
    )
    inside = packed < total
    known = known & inside
    start = cache + block * block_stride
    lane = tl.arange(0, PAD)[None, :]
    column = lane < DIM
    keys = (start + offset * DIM)[:, None] + lane
    codes = tl.load(keys, mask=known[:, None] & column, other=0)
    scales = (start + block_size * DIM).to(tl.pointer_type(tl.int32)) + offset
    stored = tl.load(scales, mask=known, other=0)
    scale = exponent_value(stored) if UE8M0 else stored.to(tl.float32, bitcast=True)
    key = tl.where(known[:, None], e4m3_values(codes) * scale[:, None], 0.0)
    to = packed[:, None].to(tl.int64) * DIM + lane
    tl.store(index_k + to, key.to(index_k.dtype.element_ty), mask=inside[:, None] & column)


def supports_write(
    index_k: Tensor, cache: Tensor, slot_mapping: Tensor, scale_store: str
) -> str | None:
    """None unless ``index_k`` is float64 or the scales are not aligned."""
    return refusal(cache, index_k.dtype) or _misaligned(cache)


def supports_gather(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    scale_store: str,
    dtype: torch.dtype | None = None,
) -> str | None:
    """None unless ``dtype`` is float64 or the scales are not aligned."""
    return refusal(cache, dtype) or _misaligned(cache)


@torch.no_grad()
def write(index_k: Tensor, cache: Tensor, slot_mapping: Tensor, scale_store: str) -> None:
    """``index_cache_write``: a program a token."""
    check_slot_values("slot_mapping", slot_mapping, cache)
    if index_k.shape[0] == 0:
        return
    index_k = rows_of(index_k)
    tile = WRITE_TILES[architecture(cache.device)]
    _write_kernel[(index_k.shape[0],)](
        index_k,
        cache,
        slot_mapping,
        index_k.stride(0),
        slot_mapping.stride(0),
        cache.stride(0),
        cache.shape[1],
        cache.shape[0] * cache.shape[1],
        **_sizes(index_k.shape[1], scale_store),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@torch.no_grad()
def gather(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    scale_store: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``index_cache_gather``: a few rows a program, which finds their request by itself."""
    check_request_values(block_table, cu_seqlens, total, cache)
    dim = cache.shape[2] - SCALE_BYTES
    index_k = cache.new_empty((total, dim), dtype=dtype or torch.bfloat16)
    if total == 0:
        return index_k
    tile = GATHER_TILES[architecture(cache.device)]
    _gather_kernel[(triton.cdiv(total, tile.rows),)](
        cache,
        block_table,
        cu_seqlens.contiguous(),
        index_k,
        total,
        block_table.shape[0],
        block_table.stride(0),
        block_table.stride(1),
        block_table.shape[1],
        cache.shape[0],
        cache.stride(0),
        cache.shape[1],
        **_sizes(dim, scale_store),
        ROWS=tile.rows,
        CHUNK=REQUESTS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return index_k


def _sizes(dim: int, scale_store: str) -> dict[str, int | bool]:
    return {"DIM": dim, "UE8M0": scale_store == "ue8m0", "PAD": triton.next_power_of_2(dim)}


def _misaligned(cache: Tensor) -> str | None:
    keys = cache.shape[1] * (cache.shape[2] - SCALE_BYTES)
    return misaligned(cache, SCALE_BYTES, keys)


def variants(arch: int) -> list[Variant]:
    """Every form that is launched on ``arch`` for index keys of 128 values."""
    write_tile, gather_tile = WRITE_TILES[arch], GATHER_TILES[arch]
    found = []
    for scale_store in SCALE_STORES:
        sizes, rows = _sizes(128, scale_store), {"index_k": "bf16", "cache": "u8"}
        found += [
            variant(
                f"index_cache_write {scale_store}",
                _write_kernel,
                {**rows, "slot_mapping": "i64"},
                {**sizes, "slot_stride": 1},
                divisible=("key_stride", "block_stride", "block_size", "capacity"),
                num_warps=write_tile.num_warps,
                num_stages=write_tile.num_stages,
            ),
            variant(
                f"index_cache_gather {scale_store}",
                _gather_kernel,
                {**rows, "block_table": "i32", "cu_seqlens": "i32"},
                {**sizes, "table_column": 1, "ROWS": gather_tile.rows, "CHUNK": REQUESTS.value},
                divisible=("block_stride", "block_size"),
                num_warps=gather_tile.num_warps,
                num_stages=gather_tile.num_stages,
            ),
        ]
    return found


KERNELS = {
    "index_cache_write": Kernel(write, supports_write),
    "index_cache_gather": Kernel(gather, supports_gather),
}
