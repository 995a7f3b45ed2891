"""What the scoring kernels share: one tile of scores, and how large it is on each architecture."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_layouts import FP8
from ._device import INTERPRETER, architecture
from ._e4m3 import e4m3_values
from ._variants import Tile

MOST_HEADS = 128
MOST_DIM = 128
# Query tokens of a tile at most: with few heads a tile is narrower than its architecture allows.
_MOST_QUERIES = 16
# Programs that fill a device several times over; beyond these a program takes more key blocks.
_PROGRAMS = 1024
# Key blocks of a program at most: enough that loading its queries costs little.
_MOST_BLOCKS = 16

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8)

# By bytes of a query number. rows: queries times heads; columns: keys of a block. In fp8 the matrix
# instruction of sm_90 adds with fewer bits than float32 has, as in every kernel that uses it.
_TILES: dict[int, dict[int, Tile]] = {
    INTERPRETER: {size: Tile(32, 64, 4, 1) for size in (1, 2, 4)},
    80: {2: Tile(128, 64, 8, 2), 4: Tile(16, 32, 4, 1)},
    89: {1: Tile(128, 128, 8, 2), 2: Tile(128, 64, 8, 2), 4: Tile(16, 32, 4, 1)},
    90: {1: Tile(128, 128, 4, 3), 2: Tile(128, 128, 4, 2), 4: Tile(16, 32, 4, 1)},
    100: {1: Tile(128, 128, 8, 2), 2: Tile(128, 128, 8, 2), 4: Tile(16, 32, 4, 1)},
    120: {1: Tile(128, 128, 8, 2), 2: Tile(128, 64, 8, 2), 4: Tile(16, 32, 4, 1)},
}
# The same where keys are converted from fp8 on the way, which takes registers.
_CONVERTING: dict[int, dict[int, Tile]] = {
    80: {2: Tile(64, 64, 8, 2)},
    89: {2: Tile(64, 64, 8, 2)},
    90: {2: Tile(128, 128, 8, 2)},
    100: {2: Tile(64, 128, 8, 2)},
    120: {2: Tile(64, 64, 8, 2)},
}
# Dims of one step where dots are summed by single multiplications: a whole tile would not fit.
_WIDE_STEP = 16


class ScoreTile(NamedTuple):
    """A tile for given heads: ``queries`` tokens of ``heads`` padded heads against ``keys``."""

    queries: int
    heads: int
    keys: int
    num_warps: int
    num_stages: int
    wide: bool

    @property
    def name(self) -> str:
        """How the compile report calls it."""
        return f"BQ{self.queries} BH{self.heads} BN{self.keys} w{self.num_warps} s{self.num_stages}"

    def constexprs(self, heads: int, dim: int) -> dict[str, int]:
        """The compile-time sizes of a scoring kernel."""
        # A power of two that every matrix instruction takes.
        padded = max(32, triton.next_power_of_2(dim))
        return {
            "HEADS": heads,
            "DIM": dim,
            "BQ": self.queries,
            "BH": self.heads,
            "BN": self.keys,
            "BD": padded,
            "STEP": _WIDE_STEP if self.wide else padded,
        }


def score_tile(
    arch: int, q: torch.dtype, k: torch.dtype, heads: int, alone: bool = False
) -> ScoreTile:
    """The tile of ``heads`` index heads for queries and keys of these dtypes.

    ``alone`` gives each query token a tile of its own, for tokens that share no keys.
    """
    converts = k == FP8 and q != FP8
    wide = q == torch.float32 or not (converts or q == k)
    size = 4 if wide else q.itemsize
    found = _TILES[arch][size]
    if converts:
        found = _CONVERTING.get(arch, {}).get(size, found)
    padded = triton.next_power_of_2(heads)
    queries = min(_MOST_QUERIES, max(1, found.rows // padded))
    if alone:
        # No matrix instruction has fewer than 16 lanes.
        queries = min(queries, max(1, 16 // padded))
    queries = max(queries, 16 // padded)
    return ScoreTile(queries, padded, found.columns, found.num_warps, found.num_stages, wide)


def refusal(q: Tensor, keys: torch.dtype) -> str | None:
    """Why no scoring kernel serves these operands, or None."""
    arch = architecture(q.device)
    heads, dim = q.shape[1:]
    if arch not in _TILES:
        return f"no tile for compute capability {arch / 10}"
    for name, dtype in (("q", q.dtype), ("k", keys)):
        if dtype not in _DTYPES:
            return f"{name} must be float32, bfloat16, float16 or float8_e4m3fn, got {dtype}"
    if q.dtype == FP8 and keys != FP8:
        return f"queries in float8_e4m3fn take keys in it, got {keys}"
    if q.dtype.itemsize not in _TILES[arch]:
        return f"no matrix instruction for fp8 on compute capability {arch / 10}"
    if not 1 <= heads <= MOST_HEADS:
        return f"q must have 1 to {MOST_HEADS} heads, got {heads}"
    if not 1 <= dim <= MOST_DIM:
        return f"q must have a head dim of 1 to {MOST_DIM}, got {dim}"
    return None


def blocks_per_program(tiles: int, blocks: int) -> int:
    """How many of ``blocks`` key blocks a program scores for one of ``tiles`` of queries."""
    return max(1, min(_MOST_BLOCKS, tiles * blocks // _PROGRAMS))


@triton.jit
def tile_queries(
    q,
    weights,
    row,
    wanted,
    q_row,
    q_head,
    w_row,
    w_head,
    HEADS: tl.constexpr,
    BH: tl.constexpr,
):
    """Pointers to queries, which of them are read, and float32 weights, all [lanes].

    Lane i is head ``i % BH`` of the token ``row[i]``. It is read if it is ``wanted`` and there is
    such a head; its weight is 0 otherwise.
    """
    head = tl.arange(0, row.shape[0]) % BH
    read = wanted & (head < HEADS)
    row = row.to(tl.int64)
    head = head.to(tl.int64)
    factors = tl.load(weights + row * w_row + head * w_head, mask=read, other=0.0)
    return q + row * q_row + head * q_head, read, factors.to(tl.float32)


@triton.jit
def some_dims(at, read, stride, first, DIM: tl.constexpr, STEP: tl.constexpr):
    """[lanes, STEP]: dims from ``first`` on of the vectors at ``at``, 0 where not ``read``."""
    dim = first + tl.arange(0, STEP)
    inside = read[:, None] & (dim < DIM)[None, :]
    return tl.load(at[:, None] + dim[None, :] * stride, mask=inside, other=0.0)


@triton.jit
def _converted(keys, dtype: tl.constexpr):
    """Keys in ``dtype``; bytes are e4m3 on architectures that have no instruction for it."""
    if keys.dtype == tl.uint8:
        keys = e4m3_values(keys)
    return keys.to(dtype)


@triton.jit
def tile_dots(
    queries,
    query_at,
    query_read,
    q_dim,
    key_at,
    key_read,
    k_dim,
    DIM: tl.constexpr,
    BD: tl.constexpr,
    STEP: tl.constexpr,
):
    """float32 [keys, lanes]: dots of the keys at ``key_at`` with ``queries``.

    Keys are the rows of the product, so that the sum over heads is one over columns, which a
    thread has most of. If a STEP has fewer dims than there are, both operands are read step by
    step from their pointers, and multiplied in float32.
    """
    if STEP == BD:
        keys = _converted(some_dims(key_at, key_read, k_dim, 0, DIM, BD), queries.dtype)
        dots = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    else:
        dots = tl.zeros((key_at.shape[0], query_at.shape[0]), tl.float32)
        for first in range(0, DIM, STEP):
            part = some_dims(query_at, query_read, q_dim, first, DIM, STEP).to(tl.float32)
            keys = _converted(some_dims(key_at, key_read, k_dim, first, DIM, STEP), tl.float32)
            dots = tl.dot(keys, tl.trans(part), dots, input_precision="ieee")
    return dots


@triton.jit
def head_sum(dots, factors, HEADS: tl.constexpr, BQ: tl.constexpr, BH: tl.constexpr):
    """float32 [keys, BQ]: the weighted sum of rectified dots over heads; NaN stays NaN."""
    terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * factors[None, :]
    if BH > HEADS:
        # A key of infinities makes NaN of the zeros that stand where there is no head.
        head = tl.arange(0, BQ * BH) % BH
        terms = tl.where((head < HEADS)[None, :], terms, 0.0)
    return tl.sum(tl.reshape(terms, (dots.shape[0], BQ, BH)), axis=2)
