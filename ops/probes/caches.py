"""Probes of the caches: every layout, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..cache_layouts import LAYOUTS, SCALE_STORES, new_index_cache, new_mla_cache
from ..index_cache import index_cache_write
from ..mla_cache import mla_cache_write
from ..providers import Provider, use_provider
from .inputs import Probe, equal, int32, normal
from .rows import EPS, index_key, latents, rounded_rows, tables

LATENT, ROPE, DIM, BLOCK, BLOCKS = 512, 64, 128, 64, 3
# Out of order, and a token without a place; the request that is read spans two blocks.
SLOTS = torch.tensor([BLOCK + 1, -1, 2 * BLOCK + 63, 0, BLOCK], dtype=torch.int64)
FEW_SLOTS = torch.tensor([BLOCK + 1, -1, 5], dtype=torch.int64)


def _scale(layout: str) -> Tensor | None:
    return torch.tensor([0.037], dtype=torch.float32) if layout == "fp8" else None


def _cache(layout: str) -> Tensor:
    cache = new_mla_cache(BLOCKS, BLOCK, layout)
    cache.view(torch.uint8).fill_(0x35)
    return cache


def _index_cache() -> Tensor:
    return new_index_cache(BLOCKS, BLOCK, DIM).fill_(0x35)


def _token_rows() -> tuple[Tensor, Tensor, Tensor]:
    """kv_c, k_pe and index_k of five tokens, of sizes from codes near zero to saturation."""
    size = torch.tensor([[1e-6], [1.0], [1e-3], [0.0], [300.0]], dtype=torch.float32)
    widths = (LATENT, ROPE, DIM)
    kv_c, k_pe, index_k = (
        (normal(5, width, seed=seed, dtype=torch.float32) * size).bfloat16()
        for seed, width in enumerate(widths)
    )
    return kv_c, k_pe, index_k


def _pages() -> tuple[Tensor, Tensor, int]:
    """block_table, cu_seqlens and total: 70 tokens in blocks 2 and 0, none, and 3 in block 1."""
    stale = 1_000_000
    table = torch.tensor([[2, 0, stale], [stale, -7, stale], [1, stale, -1]], dtype=torch.int32)
    return table, int32(0, 70, 70, 73), 75


def _mla_cache_write(provider: Provider) -> list[Probe]:
    rows = _token_rows()[:2]
    return [
        Probe((*rows, _cache(layout), SLOTS, layout, _scale(layout)), equal, wide=False)
        for layout in LAYOUTS
    ]


def _mla_cache_gather(provider: Provider) -> list[Probe]:
    found = []
    for layout in LAYOUTS:
        cache = _cache(layout)
        with use_provider("reference"):
            mla_cache_write(*_token_rows()[:2], cache, SLOTS, layout, _scale(layout))
        found.append(Probe((cache, *_pages(), layout, _scale(layout)), equal, wide=False))
    return found


def _index_cache_write(provider: Provider) -> list[Probe]:
    rows = _token_rows()[2]
    return [
        Probe((rows, _index_cache(), SLOTS, scale_store), equal, wide=False)
        for scale_store in SCALE_STORES
    ]


def _index_cache_gather(provider: Provider) -> list[Probe]:
    found = []
    for scale_store in SCALE_STORES:
        cache = _index_cache()
        with use_provider("reference"):
            index_cache_write(_token_rows()[2], cache, SLOTS, scale_store)
        found.append(Probe((cache, *_pages(), scale_store), equal, wide=False))
    return found


def _norm_rope_write(provider: Provider) -> list[Probe]:
    """Rows within rounding, and in the cache what the reference stores of them."""
    found = []
    for layout in LAYOUTS:
        cache, scale = _cache(layout), _scale(layout)

        def judge(
            got: Sequence[Tensor],
            exact: Sequence[Tensor],
            cache: Tensor = cache,
            layout: str = layout,
            scale: Tensor | None = scale,
        ) -> str | None:
            wrong = rounded_rows(3)(got, exact)
            if wrong is None:
                wrong = _stored(got[1], got[2], got[3], cache, layout, scale)
            return wrong

        args = (*latents(), *tables(), cache, FEW_SLOTS, EPS, "interleaved", layout, scale)
        found.append(Probe(args, judge, wide=False))
    return found


def _norm_rope_index_write(provider: Provider) -> list[Probe]:
    """The same, and the index keys."""
    found = []
    for layout in LAYOUTS:
        scale_store = "ue8m0" if layout == "fp8_ds_mla" else "fp32"
        cache, keys, scale = _cache(layout), _index_cache(), _scale(layout)

        def judge(
            got: Sequence[Tensor],
            exact: Sequence[Tensor],
            caches: tuple[Tensor, Tensor] = (cache, keys),
            layout: str = layout,
            scale: Tensor | None = scale,
            scale_store: str = scale_store,
        ) -> str | None:
            wrong = rounded_rows(4)(got, exact)
            if wrong is None:
                wrong = _stored(got[1], got[2], got[4], caches[0], layout, scale)
            if wrong is None:
                expected = caches[1].clone()
                with use_provider("reference"):
                    index_cache_write(got[3], expected, FEW_SLOTS.flip(0), scale_store)
                wrong = equal((got[5],), (expected,))
            return wrong

        slots = FEW_SLOTS, keys, FEW_SLOTS.flip(0)
        given = (*latents(), *index_key(), *tables(), cache, *slots, EPS, "interleaved", EPS)
        args = (*given, "half", layout, scale_store, False, scale)
        found.append(Probe(args, judge, wide=False))
    return found


def _stored(
    kv_c: Tensor, k_pe: Tensor, found: Tensor, before: Tensor, layout: str, scale: Tensor | None
) -> str | None:
    expected = before.clone()
    with use_provider("reference"):
        mla_cache_write(kv_c, k_pe, expected, FEW_SLOTS, layout, scale)
    return equal((found,), (expected,))


CACHES: dict[str, Callable[[Provider], list[Probe]]] = {
    "mla_cache_write": _mla_cache_write,
    "mla_cache_gather": _mla_cache_gather,
    "index_cache_write": _index_cache_write,
    "index_cache_gather": _index_cache_gather,
    "norm_rope_write": _norm_rope_write,
    "norm_rope_index_write": _norm_rope_index_write,
}
