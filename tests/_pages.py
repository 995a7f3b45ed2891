"""Requests in pages: caches that hold NaN wherever no token is, and tables with stale columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from _reference import int32
from torch import Tensor

from dsafx import ops, routing
from dsafx.ops.cache_layouts import new_index_cache, new_mla_cache
from dsafx.ops.index_cache import index_cache_write
from dsafx.ops.mla_cache import mla_cache_write

HEADS, NOPE, ROPE, LATENT, VALUE, DIM = 3, 8, 8, 128, 12, 32
BLOCK, STALE = 4, 1_000_000
SCALE = (NOPE + ROPE) ** -0.5
LENGTHS = (9, 1, 14)
TOPK = 4


@dataclass
class Pages:
    """Requests whose tokens lie in pages, and the same rows packed.

    Each request has ``new`` rows of queries, its last tokens; ``ks, ke`` are over packed keys.
    """

    block_table: Tensor
    row_request: Tensor
    lens: Tensor
    ks: Tensor
    ke: Tensor
    slot_mapping: Tensor
    cu_seqlens: Tensor
    blocks: int

    @property
    def packed(self) -> tuple[Tensor, Tensor, int]:
        return self.block_table.clone(), self.cu_seqlens, int(self.cu_seqlens[-1])


def pages(lengths=LENGTHS, new=3, seed=0) -> Pages:
    """Blocks in random order; columns past a request's own blocks are stale."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // BLOCK) for length in lengths]
    width = max(needed, default=0) + 2
    free = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    table = torch.full((len(lengths), width), STALE, dtype=torch.int32)
    row_request, lens, ks, mapping, start = [], [], [], [], 0
    for request, length in enumerate(lengths):
        for column in range(needed[request]):
            table[request, column] = free.pop()
        mapping += [int(table[request, p // BLOCK]) * BLOCK + p % BLOCK for p in range(length)]
        seen = list(range(max(1, length - new + 1), length + 1))
        row_request += [request] * len(seen)
        lens += seen
        ks += [start] * len(seen)
        start += length
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    starts, ends = int32(*ks), int32(*ks) + int32(*lens)
    return Pages(
        table,
        int32(*row_request),
        int32(*lens),
        starts,
        ends,
        torch.tensor(mapping, dtype=torch.int64),
        bounds,
        sum(needed) + 3,
    )


def filled_index_cache(at: Pages, keys: Tensor, scale_store: str = "fp32") -> Tensor:
    """The keys in their pages, and NaN in every other place."""
    cache = new_index_cache(at.blocks, BLOCK, DIM).fill_(0x7F)
    index_cache_write(keys, cache, at.slot_mapping, scale_store)
    return cache


def filled_mla_cache(at: Pages, kv_c: Tensor, k_pe: Tensor, layout: str, scale) -> Tensor:
    """The latents in their pages, and NaN in every other place."""
    cache = new_mla_cache(at.blocks, BLOCK, layout, LATENT, ROPE, dtype=torch.float32)
    cache.fill_(float("nan") if layout == "bf16" else 0x7F)
    mla_cache_write(kv_c, k_pe, cache, at.slot_mapping, layout, scale)
    return cache


def index_inputs(at: Pages, dtype=torch.float32):
    rows = at.lens.shape[0]
    keys = torch.randn(int(at.cu_seqlens[-1]), DIM)
    return torch.randn(rows, 8, DIM).to(dtype), keys, torch.randn(rows, 8)


def mla_inputs(at: Pages, dtype=torch.float32):
    rows, keys = at.lens.shape[0], int(at.cu_seqlens[-1])
    return (
        torch.randn(rows, HEADS, NOPE).to(dtype),
        torch.randn(rows, HEADS, ROPE).to(dtype),
        torch.randn(keys, LATENT),
        torch.randn(keys, ROPE),
        torch.randn(HEADS * (NOPE + VALUE), LATENT).to(dtype) * LATENT**-0.5,
    )


def some_selection(at: Pages) -> Tensor:
    """[T, K] int32, up to K of the tokens that each row sees."""
    scores = torch.randn(at.lens.shape[0], int(at.lens.max()))
    return ops.select_topk(scores, torch.zeros_like(at.lens), at.lens, TOPK)


def spec(mode: str) -> str:
    """Of a layer that can do all, in this mode."""
    layer = routing.LayerCapabilities(dense_mha=True, masked_mha=True)
    return routing.encode_spec(layer, routing.RouteConfig(mode=mode))
