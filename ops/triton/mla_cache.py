"""``mla_cache_write`` and ``mla_cache_gather``: one launch each, for every layout."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_layouts import LAYOUTS, TILE, mla_rope_dim
from ..mla_cache import require_scale_value, stored_dtype
from ..providers import Kernel
from ._device import architecture
from ._e4m3 import e4m3_values
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
from ._token_rows import store_latent, store_rope
from ._variants import Variant, variant


@triton.jit
def _write_kernel(
    kv_c,
    k_pe,
    cache,
    slot_mapping,
    scale,
    kv_stride,
    pe_stride,
    slot_stride,
    block_stride,
    block_size,
    capacity,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
):
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride)
    if (slot >= 0) & (slot < capacity):
        row = cache + (slot // block_size) * block_stride + (slot % block_size) * WIDTH
        if LAYOUT == "fp8_ds_mla":
            column = tl.arange(0, LATENT_PAD // 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
        else:
            column = tl.arange(0, LATENT_PAD)
        latent = tl.load(kv_c + token * kv_stride + column, mask=column < LATENT, other=0.0)
        store_latent(latent.to(tl.float32), row, scale, LATENT, LAYOUT, LATENT_PAD)
        lane = tl.arange(0, ROPE_PAD)
        rope = tl.load(k_pe + token * pe_stride + lane, mask=lane < ROPE, other=0.0)
        store_rope(rope.to(tl.float32), row, scale, LATENT, ROPE, LAYOUT, ROPE_PAD)


@triton.jit
def _gather_kernel(
    cache,
    block_table,
    cu_seqlens,
    kv_c,
    k_pe,
    scale,
    total,
    requests,
    table_row,
    table_column,
    columns,
    blocks,
    block_stride,
    block_size,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
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
    row = cache + block * block_stride + offset * WIDTH
    inside = packed < total
    known = known & inside
    lane = tl.arange(0, ROPE_PAD)[None, :]
    if LAYOUT == "fp8_ds_mla":
        tile = tl.arange(0, LATENT_PAD // 128)[None, :, None]
        column = tile * 128 + tl.arange(0, 128)[None, None, :]
        row3 = row[:, None, None]
        codes = tl.load(row3 + column, mask=known[:, None, None] & (column < LATENT), other=0)
        scales = (row3 + LATENT).to(tl.pointer_type(tl.float32)) + tile
        factor = tl.load(scales, mask=known[:, None, None] & (tile * 128 < LATENT), other=0.0)
        latent = e4m3_values(codes) * factor
        ropes = (row[:, None] + LATENT + LATENT // 32).to(tl.pointer_type(tl.bfloat16)) + lane
        rope = tl.load(ropes, mask=known[:, None] & (lane < ROPE), other=0.0).to(tl.float32)
        to = packed[:, None, None].to(tl.int64) * LATENT + column
        keep = inside[:, None, None] & (column < LATENT)
    else:
        column = tl.arange(0, LATENT_PAD)[None, :]
        stored = tl.load(row[:, None] + column, mask=known[:, None] & (column < LATENT), other=0)
        ropes = row[:, None] + LATENT + lane
        stored_rope = tl.load(ropes, mask=known[:, None] & (lane < ROPE), other=0)
        if LAYOUT == "fp8":
            by = tl.load(scale)
            latent = e4m3_values(stored) * by
            rope = e4m3_values(stored_rope) * by
        else:
            latent = stored.to(tl.float32)
            rope = stored_rope.to(tl.float32)
        to = packed[:, None].to(tl.int64) * LATENT + column
        keep = inside[:, None] & (column < LATENT)
    tl.store(kv_c + to, latent.to(kv_c.dtype.element_ty), mask=keep)
    to_rope = packed[:, None].to(tl.int64) * ROPE + lane
    keep_rope = inside[:, None] & (lane < ROPE)
    tl.store(k_pe + to_rope, rope.to(k_pe.dtype.element_ty), mask=keep_rope)


def supports_write(
    kv_c: Tensor,
    k_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    scale: Tensor | None = None,
) -> str | None:
    """None unless a dtype is float64 or the numbers of ``fp8_ds_mla`` are not aligned."""
    stored = cache.dtype if layout == "bf16" else None
    return refusal(cache, kv_c.dtype, k_pe.dtype, stored) or _misaligned(cache, layout)


def supports_gather(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    layout: str,
    scale: Tensor | None = None,
    kv_lora_rank: int = 512,
    dtype: torch.dtype | None = None,
) -> str | None:
    """None unless a dtype is float64 or the numbers of ``fp8_ds_mla`` are not aligned."""
    stored = cache.dtype if layout == "bf16" else None
    return refusal(cache, dtype, stored) or _misaligned(cache, layout)


@torch.no_grad()
def write(
    kv_c: Tensor,
    k_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    scale: Tensor | None = None,
) -> None:
    """``mla_cache_write``: a program a token."""
    require_scale_value(scale)
    check_slot_values("slot_mapping", slot_mapping, cache)
    if kv_c.shape[0] == 0:
        return
    kv_c, k_pe = rows_of(kv_c), rows_of(k_pe)
    tile = WRITE_TILES[architecture(cache.device)]
    _write_kernel[(kv_c.shape[0],)](
        kv_c,
        k_pe,
        as_bytes(cache, layout),
        slot_mapping,
        scale,
        kv_c.stride(0),
        k_pe.stride(0),
        slot_mapping.stride(0),
        cache.stride(0),
        cache.shape[1],
        cache.shape[0] * cache.shape[1],
        **layout_sizes(layout, kv_c.shape[1], k_pe.shape[1]),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@torch.no_grad()
def gather(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    layout: str,
    scale: Tensor | None = None,
    kv_lora_rank: int = 512,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``mla_cache_gather``: a few rows a program, which finds their request by itself."""
    require_scale_value(scale)
    check_request_values(block_table, cu_seqlens, total, cache)
    rope_dim = mla_rope_dim(layout, cache.shape[2], kv_lora_rank)
    dtype = dtype or stored_dtype(cache, layout)
    kv_c = cache.new_empty((total, kv_lora_rank), dtype=dtype)
    k_pe = cache.new_empty((total, rope_dim), dtype=dtype)
    if total == 0:
        return kv_c, k_pe
    tile = GATHER_TILES[architecture(cache.device)]
    _gather_kernel[(triton.cdiv(total, tile.rows),)](
        as_bytes(cache, layout),
        block_table,
        cu_seqlens.contiguous(),
        kv_c,
        k_pe,
        scale,
        total,
        block_table.shape[0],
        block_table.stride(0),
        block_table.stride(1),
        block_table.shape[1],
        cache.shape[0],
        cache.stride(0),
        cache.shape[1],
        **layout_sizes(layout, kv_lora_rank, rope_dim),
        ROWS=tile.rows,
        CHUNK=REQUESTS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return kv_c, k_pe


def as_bytes(cache: Tensor, layout: str) -> Tensor:
    """The cache as the kernels address it: bytes, save for the layout ``bf16``."""
    return cache if layout == "bf16" else cache.view(torch.uint8)


def layout_sizes(layout: str, latent: int, rope: int) -> dict[str, int | str]:
    """What a kernel that writes or reads a row of ``layout`` knows of it when it is compiled."""
    width = latent + rope if layout != "fp8_ds_mla" else latent + latent // 32 + 2 * rope
    pad = triton.next_power_of_2(latent)
    return {
        "LATENT": latent,
        "ROPE": rope,
        "WIDTH": width,
        "LAYOUT": layout,
        "LATENT_PAD": max(pad, TILE) if layout == "fp8_ds_mla" else pad,
        "ROPE_PAD": triton.next_power_of_2(rope),
    }


def _misaligned(cache: Tensor, layout: str) -> str | None:
    return misaligned(cache, 4, cache.shape[2]) if layout == "fp8_ds_mla" else None


def variants(arch: int) -> list[Variant]:
    """Every form that is launched on ``arch`` for the dims of DeepSeek-V3.2 and GLM-5."""
    write_tile, gather_tile = WRITE_TILES[arch], GATHER_TILES[arch]
    found = []
    for layout in LAYOUTS:
        scaled = {"scale": "fp32"} if layout == "fp8" else {}
        sizes = {**layout_sizes(layout, 512, 64), **({} if scaled else {"scale": None})}
        cache = {"cache": "bf16" if layout == "bf16" else "u8", **scaled}
        rows = {"kv_c": "bf16", "k_pe": "bf16"}
        found += [
            variant(
                f"mla_cache_write {layout}",
                _write_kernel,
                {**rows, **cache, "slot_mapping": "i64"},
                {**sizes, "slot_stride": 1},
                divisible=("kv_stride", "pe_stride", "block_stride", "block_size", "capacity"),
                num_warps=write_tile.num_warps,
                num_stages=write_tile.num_stages,
            ),
            variant(
                f"mla_cache_gather {layout}",
                _gather_kernel,
                {**rows, **cache, "block_table": "i32", "cu_seqlens": "i32"},
                {**sizes, "table_column": 1, "ROWS": gather_tile.rows, "CHUNK": REQUESTS.value},
                divisible=("block_stride", "block_size"),
                num_warps=gather_tile.num_warps,
                num_stages=gather_tile.num_stages,
            ),
        ]
    return found


KERNELS = {
    "mla_cache_write": Kernel(write, supports_write),
    "mla_cache_gather": Kernel(gather, supports_gather),
}
