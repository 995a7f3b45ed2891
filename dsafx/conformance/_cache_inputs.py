"""Paged caches for the cases, and what right ones hold: bytes written out by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops import tolerances
from ._adapters import Adapters
from ._inputs import int32, normal

LATENT, ROPE, KEY, BLOCK = 512, 64, 128, 16
WIDTHS = {
    "bf16": LATENT + ROPE,
    "fp8": LATENT + ROPE,
    "fp8_ds_mla": LATENT + 16 + 2 * ROPE,
    "index_fp32": KEY + 4,
    "index_ue8m0": KEY + 4,
}
CANARY = 0x5A


def new_cache(adapters: Adapters, layout: str, blocks: int, apart: int = 0) -> Tensor:
    """A cache of canary bytes; ``apart`` elements lie before its first and behind each block."""
    if layout not in adapters.layouts:
        raise NotImplementedError(f"the layout {layout} is not served")
    dtype = torch.bfloat16 if layout == "bf16" else torch.uint8
    inner = BLOCK * WIDTHS[layout]
    count = apart + blocks * (inner + apart)
    store = torch.full((count * dtype.itemsize,), CANARY, dtype=torch.uint8).to(adapters.device)
    shape, strides = (blocks, BLOCK, WIDTHS[layout]), (inner + apart, WIDTHS[layout], 1)
    return store.view(dtype).as_strided(shape, strides, apart)


def block_bytes(cache: Tensor) -> Tensor:
    """[blocks, bytes of a block]"""
    return cache.contiguous().view(torch.uint8).flatten(1)


def token_rows(adapters: Adapters, layout: str, tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    """bfloat16 rows whose tiles of 128 and tokens differ in magnitude."""
    scale = 2.0 ** torch.arange(tokens, device=adapters.device).remainder(7)[:, None]
    if layout.startswith("index"):
        return ((normal(adapters, tokens, KEY, seed=seed) * scale).bfloat16(),)
    tile = 4.0 ** torch.arange(4, device=adapters.device).repeat_interleave(128)
    latent = normal(adapters, tokens, LATENT, seed=seed) * scale
    if layout == "fp8_ds_mla":
        latent = latent * tile
    return latent.bfloat16(), normal(adapters, tokens, ROPE, seed=seed + 1).bfloat16()


def scale_of(adapters: Adapters, layout: str) -> Tensor | None:
    """The per-tensor scale of the layout fp8."""
    return torch.tensor([2.5], device=adapters.device) if layout == "fp8" else None


def _power_above(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def fp8(x: Tensor) -> Tensor:
    """e4m3 without an overflow."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def key_scale(key: Tensor) -> float:
    """2**ceil(log2(max(amax, 1e-4) / 448)), rounded as float32 arithmetic rounds it."""
    amax = torch.tensor(max(float(key.abs().max()), 1e-4), dtype=torch.float32)
    return _power_above(float(amax / 448))


def latent_scale(tile: Tensor) -> float:
    """2**ceil(log2(max(amax / 448, 1e-4)))"""
    amax = torch.tensor(float(tile.abs().max()), dtype=torch.float32)
    return _power_above(max(float(amax / 448), float(torch.tensor(1e-4))))


def stored(layout: str, rows: tuple[Tensor, ...], scale: Tensor | None) -> tuple[Tensor, ...]:
    """The rows as the cache holds them, dequantised: float32."""
    wide = tuple(part.float() for part in rows)
    if layout == "bf16":
        return wide
    if scale is not None:
        return tuple(fp8(part / scale).float() * scale for part in wide)
    found = torch.empty_like(wide[0])
    for token, row in enumerate(wide[0]):
        for first in range(0, row.shape[0], 128):
            tile = row[first : first + 128]
            by = latent_scale(tile) if layout == "fp8_ds_mla" else key_scale(tile)
            found[token, first : first + 128] = fp8(tile / by).float() * by
    return (found, *wide[1:])


def write(
    adapters: Adapters, layout: str, rows: tuple[Tensor, ...], cache: Tensor, slots: list[int]
) -> None:
    """Write ``rows`` to ``slots``."""
    mapping = torch.tensor(slots, dtype=torch.int64, device=adapters.device)
    adapters.function("write")(rows, cache, mapping, layout, scale_of(adapters, layout))


def gather(
    adapters: Adapters, layout: str, cache: Tensor, table: list[list[int]], lengths: list[int]
) -> tuple[Tensor, ...]:
    """Read requests of ``lengths`` tokens from the blocks in ``table``."""
    starts = [sum(lengths[:request]) for request in range(len(lengths) + 1)]
    blocks = torch.tensor(table, dtype=torch.int32, device=adapters.device)
    gathered: tuple[Tensor, ...] = adapters.function("gather")(
        cache,
        blocks.view(len(lengths), -1),
        int32(adapters, starts),
        starts[-1],
        layout,
        scale_of(adapters, layout),
    )
    return gathered


def assert_rows(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], layout: str) -> None:
    """Gathered rows are the stored ones, rounded to their dtype."""
    for found, right in zip(got, wanted, strict=True):
        assert found.shape == right.shape, f"{layout}: {tuple(found.shape)} rows are gathered"
        # A product of an e4m3 number and a scale is rounded once more, to the result's dtype.
        slack = tolerances.value_tolerance(found.dtype, 1, right.abs())
        wrong = ~((found.float() - right).abs() <= slack)
        assert not bool(wrong.any()), f"{layout}: {int(wrong.sum())} gathered values are wrong"
