"""Calls of every op that the flashinfer provider has, at the dimensions that FlashInfer serves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from _reference import int32
from torch import Tensor

from dsafx import ops
from dsafx.ops.cache_layouts import new_mla_cache

LATENT, ROPE, TOPK = 512, 64, 16
SCALE = 192**-0.5


class Packed(NamedTuple):
    """Arguments of ``sparse_mqa``."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    ks: Tensor
    scale: float
    v_dim: int

    def parts(self) -> tuple[Any, ...]:
        """Arguments of ``sparse_mla``."""
        q, kv = self.q, self.kv
        queries = (q[..., : self.v_dim].clone(), q[..., self.v_dim :].clone())
        keys = (kv[:, : self.v_dim].clone(), kv[:, self.v_dim :].clone())
        return (*queries, *keys, self.indices, self.ks, self.scale)


class Paged(NamedTuple):
    """Arguments of ``sparse_mqa_paged``."""

    q: Tensor
    cache: Tensor
    indices: Tensor
    block_table: Tensor
    row_request: Tensor
    lens: Tensor
    scale: float
    v_dim: int
    layout: str


def packed(heads: int = 8, keys: int = 80, dtype: torch.dtype = torch.bfloat16) -> Packed:
    """Rows whose lanes of -1 stand anywhere, one of them empty; top-k is far below the keys."""
    indices = torch.stack([torch.randperm(keys - 30)[:TOPK] for _ in range(5)]).to(torch.int32)
    indices[1, ::3] = -1
    indices[2] = -1
    indices[3, 1:] = -1
    return Packed(
        torch.randn(5, heads, LATENT + ROPE).to(dtype),
        torch.randn(keys, LATENT + ROPE).to(dtype),
        indices,
        int32(0, 30, 4, 11, 30),
        SCALE,
        LATENT,
    )


def paged(
    layout: str, heads: int = 8, page: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Paged:
    """Two requests of 90 and 40 tokens in pages out of order; a padding row, an empty selection."""
    cache = new_mla_cache(5, page, layout, LATENT, ROPE, dtype=dtype)
    cache.fill_(float("nan") if layout == "bf16" else 0x7F)
    table = int32(3, 1, 99, 4, 99, 99).view(2, 3) if page == 64 else None
    assert table is not None
    lengths = (90, 40)
    for request, length in enumerate(lengths):
        position = torch.arange(length)
        slot = table[request, position // page].long() * page + position % page
        rows = torch.randn(length, LATENT), torch.randn(length, ROPE)
        ops.mla_cache_write(*rows, cache, slot, layout)
    lens = int32(90, 88, 40, 0, 39)
    indices = torch.full((5, TOPK), -1, dtype=torch.int32)
    for row in (0, 1, 2):
        indices[row] = torch.randperm(int(lens[row]))[:TOPK].to(torch.int32)
    indices[1, 2::2] = -1
    return Paged(
        torch.randn(5, heads, LATENT + ROPE).to(dtype),
        cache,
        indices,
        table,
        int32(0, 0, 1, -1, 1),
        lens,
        SCALE,
        LATENT,
        layout,
    )


def dense(dims: tuple[int, int] = (192, 128), rope: int = 0, heads: int = 2) -> tuple[Any, ...]:
    """Arguments of ``dense_mha``: two prompts, one with context, decode rows, and an empty row.

    The last two rows see the same keys, and keys between the requests are seen by nobody.
    """
    ks = int32(*[0] * 5, *[9] * 4, 20, 25, 0, 31, 31)
    ke = int32(*range(1, 6), *range(12, 16), 25, 30, 0, 36, 36)
    width, value = dims
    q = torch.randn(ks.shape[0], heads, width - rope).bfloat16()
    k, v = torch.randn(40, heads, width - rope), torch.randn(40, heads, value)
    k, v = k.bfloat16(), v.bfloat16()
    k[[16, 17, 38]] = v[[16, 17, 38]] = float("nan")
    args = (q, k, v, ks, ke, 6, width**-0.5)
    if not rope:
        return args
    pe = torch.randn(ks.shape[0], heads, rope).bfloat16(), torch.randn(40, rope).bfloat16()
    return (*args, None, True, *pe)


def scores() -> tuple[Any, ...]:
    """Arguments of ``select_topk``: ties, both zeros, NaN, infinities, a short and an empty row."""
    given = torch.randn(6, 40).mul(3).round()
    given[0, :20] = torch.tensor([0.0, -0.0]).repeat(10)
    given[1, 5:9] = float("nan")
    given[1, 9:30] = float("-inf")
    given[2, 3] = float("inf")
    given[5, 4:] = float("nan")
    return given, int32(0, 4, 3, 7, 9, 4), int32(40, 30, 40, 12, 9, 40), 8


def states(value: int = 128) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of ``merge_attention``: sides without keys hold NaN, one marks them by +inf."""
    out_a, out_b = torch.randn(4, 3, value).bfloat16(), torch.randn(4, 3, value).bfloat16()
    lse_a, lse_b = torch.randn(4, 3) * 5, torch.randn(4, 3) * 5
    out_a[0], lse_a[0] = float("nan"), float("-inf")
    out_b[1], lse_b[1] = float("nan"), float("inf")
    out_a[2], lse_a[2], out_b[2], lse_b[2] = float("nan"), float("inf"), 1.0, float("-inf")
    return out_a, lse_a, out_b, lse_b
