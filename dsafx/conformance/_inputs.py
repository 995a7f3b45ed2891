"""Inputs of the cases: random ones, and indexer operands that spell given scores exactly."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._adapters import Adapters

INF, NAN = math.inf, math.nan
_HUGE = 3e38


class IndexInputs(NamedTuple):
    """Operands of ``scores`` and, with a width, of ``select``."""

    q: Tensor
    k: Tensor
    weights: Tensor
    ks: Tensor
    ke: Tensor
    mask: Tensor | None = None

    def rows(self, rows: slice) -> IndexInputs:
        """The same keys for some of the rows."""
        mask = None if self.mask is None else self.mask[rows]
        return IndexInputs(
            self.q[rows], self.k, self.weights[rows], self.ks[rows], self.ke[rows], mask
        )

    @property
    def longest(self) -> int:
        """The tightest ``max_kv_len``."""
        return max(0, int((self.ke - self.ks).max())) if self.ks.shape[0] else 0


class AttendInputs(NamedTuple):
    """Operands of ``attend``."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    ks: Tensor
    scale: float
    v_dim: int


def int32(adapters: Adapters, values: list[int]) -> Tensor:
    """One dimension of int32."""
    return torch.tensor(values, dtype=torch.int32, device=adapters.device)


def normal(adapters: Adapters, *shape: int, seed: int = 0) -> Tensor:
    """float32 standard normal numbers, the same on every device and in every order of cases."""
    generator = torch.Generator().manual_seed(0x5EED + seed)
    return torch.randn(shape, generator=generator).to(adapters.device)


def index_inputs(
    adapters: Adapters,
    ks: list[int],
    ke: list[int],
    *,
    keys: int | None = None,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> IndexInputs:
    """Random indexer operands of ``len(ks)`` rows; weights of both signs, folded as C18 says."""
    heads = heads or adapters.dims.index_heads
    dim = adapters.dims.index_dim
    keys = max(ke, default=0) if keys is None else keys
    dtype = dtype or adapters.dtypes[0]
    return IndexInputs(
        normal(adapters, len(ks), heads, dim, seed=seed).to(dtype),
        normal(adapters, keys, dim, seed=seed + 1).to(dtype),
        normal(adapters, len(ks), heads, seed=seed + 2) * (heads * dim) ** -0.5,
        int32(adapters, ks),
        int32(adapters, ke),
        mask,
    )


def spelled(
    adapters: Adapters,
    scores: list[float],
    ks: list[int],
    ke: list[int],
    mask: Tensor | None = None,
) -> IndexInputs:
    """Operands whose float32 score of key s is exactly ``scores[s]``, in every row.

    Two heads of weights 1 and -1 see a key with opposite signs, so that ReLU keeps the score's
    sign. A score is split into parts that the dtype holds exactly and whose float32 sum is exact
    in any order. An infinity is an overflow of two large finite parts, and a NaN the difference of
    two such infinities, so that no operand is itself an infinity or NaN.
    """
    dtype = next((d for d in adapters.dtypes if d != torch.float16), None)
    if dtype is None:
        raise NotImplementedError("exact scores need float32 or bfloat16 operands")
    q = torch.zeros(len(ks), adapters.dims.index_heads, adapters.dims.index_dim)
    q[:, 0, :5], q[:, 1, :5] = 1, -1
    q[:, 2:4, 5:7] = 1
    weights = torch.zeros(q.shape[:2])
    weights[:, 0:4] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    k = torch.zeros(len(scores), adapters.dims.index_dim)
    values = torch.tensor(scores)
    rest = torch.where(values.isfinite(), values, 0.0)
    for column in range(3):
        k[:, column] = rest.to(dtype).float()
        rest = rest - k[:, column]
    k[:, 3:5] = torch.where(values.isinf(), values.sign() * _HUGE, 0.0)[:, None]
    k[:, 5:7] = torch.where(values.isnan(), _HUGE, 0.0)[:, None]
    device = adapters.device
    return IndexInputs(
        q.to(device, dtype),
        k.to(device, dtype),
        weights.to(device),
        int32(adapters, ks),
        int32(adapters, ke),
        mask,
    )


def prompt(lengths: list[int], cached: int = 0) -> tuple[list[int], list[int]]:
    """ks and ke of packed requests, each of ``cached`` keys and then its new tokens."""
    ks, ke, start = [], [], 0
    for length in lengths:
        ks += [start] * length
        ke += [start + cached + row + 1 for row in range(length)]
        start += cached + length
    return ks, ke


def lanes(adapters: Adapters, rows: list[list[int]], width: int) -> Tensor:
    """[T, width] int32 from lists of positions, -1 behind them."""
    padded = [row + [-1] * (width - len(row)) for row in rows]
    table = torch.tensor(padded, dtype=torch.int32, device=adapters.device)
    return table.view(len(rows), width)


def random_lanes(
    adapters: Adapters, rows: int, keys: int, width: int, holes: bool = True, seed: int = 0
) -> Tensor:
    """[rows, width] int32: distinct positions below ``keys`` in no order, with -1 among them."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.full((rows, width), -1, dtype=torch.int32)
    taken = min(width, keys) if not holes else min(max(1, 2 * width // 3), keys)
    for row in range(rows):
        where = torch.randperm(width, generator=generator)[:taken]
        table[row, where] = torch.randperm(keys, generator=generator)[:taken].int()
    return table.to(adapters.device)


def attend_inputs(
    adapters: Adapters,
    indices: Tensor,
    ks: list[int],
    keys: int,
    *,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    magnitude: float = 1.0,
    seed: int = 0,
) -> AttendInputs:
    """Random operands of ``attend``; the scale is that of a narrower query, as in MLA (C18)."""
    dims = adapters.dims
    width = dims.latent + dims.rope
    dtype = dtype or adapters.dtypes[0]
    return AttendInputs(
        (magnitude * normal(adapters, len(ks), heads or dims.heads, width, seed=seed)).to(dtype),
        (magnitude * normal(adapters, keys, width, seed=seed + 1)).to(dtype),
        indices,
        int32(adapters, ks),
        (dims.latent // 2 + dims.rope) ** -0.5,
        dims.latent,
    )
