"""Faulty caches: what public engines did with scales, bytes, slots and strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._adapters import Function
from ._faults import Arguments


def _touched(right: Function, a: Arguments) -> tuple[Any, Tensor, Tensor]:
    """The result of a right write, its cache's blocks and the mapping without -1."""
    result = right(*a.values())
    return result, a["cache"], a["slot_mapping"][a["slot_mapping"] >= 0]


def minus_one_is_the_last_slot(a: Arguments) -> Tensor:
    cache, slots = a["cache"], a["slot_mapping"]
    return torch.where(slots < 0, cache.shape[0] * cache.shape[1] - 1, slots)


def interleaves_scales(right: Function, a: Arguments) -> Any:
    """A token's scale stands behind its own key."""
    result, cache, _ = _touched(right, a)
    if a["layout"].startswith("index"):
        size, width = cache.shape[1], cache.shape[2]
        flat = cache.reshape(cache.shape[0], -1)
        keys = flat[:, : size * (width - 4)].unflatten(1, (size, width - 4))
        scales = flat[:, size * (width - 4) :].unflatten(1, (size, 4))
        cache.copy_(torch.cat([keys, scales], dim=2))
    return result


def wrong_scale_store(right: Function, a: Arguments) -> Any:
    """The scale store of the other architecture."""
    other = {"index_fp32": "index_ue8m0", "index_ue8m0": "index_fp32"}
    return right(*{**a, "layout": other.get(a["layout"], a["layout"])}.values())


def no_floor(right: Function, a: Arguments) -> Any:
    """Scales of the largest magnitude alone: 0 / 0 for a key of zeros."""
    result, cache, slots = _touched(right, a)
    if a["layout"] == "index_fp32":
        size, width = cache.shape[1], cache.shape[2]
        for key, slot in zip(a["rows"][0].float(), slots.tolist(), strict=True):
            scale = key.abs().max() / 448
            values = (key / scale).to(torch.float8_e4m3fn).view(torch.uint8)
            _poke(cache, slot, values, scale.view(1).view(torch.uint8), size, width)
    return result


def _poke(cache: Tensor, slot: int, values: Tensor, scale: Tensor, size: int, width: int) -> None:
    block = cache[slot // size].view(-1)
    offset = slot % size
    block[offset * (width - 4) : (offset + 1) * (width - 4)] = values
    start = size * (width - 4) + 4 * offset
    block[start : start + 4] = scale


def rope_before_scales(right: Function, a: Arguments) -> Any:
    result, cache, _ = _touched(right, a)
    if a["layout"] == "fp8_ds_mla":
        cache[..., 512:] = torch.cat([cache[..., 528:], cache[..., 512:528]], dim=-1)
    return result


def one_scale_a_token(right: Function, a: Arguments) -> Any:
    """All four tiles share the scale of the largest."""
    result, cache, slots = _touched(right, a)
    if a["layout"] == "fp8_ds_mla":
        latent = a["rows"][0].float()[a["slot_mapping"] >= 0]
        block, offset = slots // cache.shape[1], slots % cache.shape[1]
        stored = cache[block, offset].clone()
        scales = stored[:, 512:528].contiguous().view(torch.float32).amax(1, keepdim=True)
        stored[:, :512] = (latent / scales).to(torch.float8_e4m3fn).view(torch.uint8)
        stored[:, 512:528] = scales.expand(-1, 4).contiguous().view(torch.uint8)
        cache[block, offset] = stored
    return result


def ignores_strides(right: Function, a: Arguments) -> Any:
    """Blocks are taken to lie next to each other at the start of the allocation."""
    cache = a["cache"]
    shape = cache.shape
    strides = (shape[1] * shape[2], shape[2], 1)
    return right(*{**a, "cache": cache.as_strided(shape, strides, 0)}.values())


def forgets_the_scale(result: tuple[Tensor, ...], a: Arguments) -> tuple[Tensor, ...]:
    if a["scale"] is None:
        return result
    return tuple(part / a["scale"].to(part.dtype) for part in result)


def reads_whole_tables(right: Function, a: Arguments) -> Any:
    """Rows are packed as if every request filled the blocks of the first column."""
    size = a["cache"].shape[1]
    lengths = a["cu_seqlens"].diff()
    table = a["block_table"].clamp(0, a["cache"].shape[0] - 1)
    requests = torch.arange(table.shape[0], device=table.device).repeat_interleave(lengths)
    packed = torch.arange(a["total"], device=table.device)
    everything = a["cu_seqlens"].new_tensor([0, table.numel() * size])
    rows = right(
        a["cache"],
        table.reshape(1, -1),
        everything,
        table.numel() * size,
        a["layout"],
        a["scale"],
    )
    return tuple(row[requests * size + packed.remainder(size)] for row in rows)


def one_row_at_least(result: tuple[Tensor, ...], a: Arguments) -> tuple[Tensor, ...]:
    return tuple(part if part.shape[0] else part.new_zeros(1, part.shape[1]) for part in result)


def one_scale_a_block(right: Function, a: Arguments) -> Any:
    """Keys of a block are stored with the scale of the largest among them."""
    rows = a["rows"]
    if a["layout"].startswith("index"):
        size = a["cache"].shape[1]
        key = rows[0].float()
        block = a["slot_mapping"].clamp(min=0).div(size, rounding_mode="floor")
        largest = key.new_zeros(a["cache"].shape[0])
        largest = largest.scatter_reduce(0, block, key.abs().amax(dim=1), "amax")
        scale = (largest / 448).clamp(min=1e-4 / 448).log2().ceil().exp2()[block][:, None]
        rows = ((key / scale).to(torch.float8_e4m3fn).float() * scale,)
    return right(*{**a, "rows": rows}.values())
