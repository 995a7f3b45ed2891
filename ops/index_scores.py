"""The lightning indexer's scores, held whole: for diagnosis and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import (
    FLOATING,
    require_dtype,
    require_interval,
    require_rank,
    require_same_device,
    require_size,
)
from ._dtypes import wide_dtype
from ._library import define_op
from .cache_layouts import FP8

INDEX_DTYPES = (*FLOATING, FP8)
"""Of index queries and keys."""


def index_scores(
    q: Tensor, k: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, mask: Tensor | None = None
) -> Tensor:
    """``score[t, s] = sum_h weights[t, h] * relu(q[t, h] . k[s])`` in float32 (DeepSeek-V3.2, 2.1).

    Holds ``T * S`` scores by design (contract C21 exempts it); ``index_select`` never does.

    float8_e4m3fn queries and keys are taken as the numbers that they are: the scale of a query
    stands in its weights, as ``index_query(quantize=True)`` gives them, and keys have none. The
    matrix units of sm_90 add the products of fp8 numbers with fewer bits than float32 has.

    Args:
        q: [T, H, D] indexer queries after RoPE, floating point or float8_e4m3fn.
        k: [S, D] indexer keys after LayerNorm and RoPE, packed; the same dtypes. Triton's
            kernels take fp8 queries with fp8 keys, and neither without the other.
        weights: [T, H] float32, already folded with ``D**-0.5 * H**-0.5``; may be negative.
        ks, ke: [T] int32, the visible interval of packed keys.
        mask: [T, S] bool, column = packed key, True = visible; visibility is interval and mask.

    Returns:
        [T, S] float32 (float64 for float64 queries), -inf where a key is not visible.

    Raises:
        ValueError: shapes or devices that do not fit together.
        TypeError: a dtype outside of those above.
    """
    check_index_inputs(q, k, weights, ks, ke, mask)
    return _op(q, k, weights, ks, ke, mask)


def check_index_inputs(
    q: Tensor, k: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, mask: Tensor | None
) -> None:
    """The checks that every op with indexer operands shares (contract C23)."""
    require_rank("q", q, 3)
    require_rank("k", k, 2)
    require_rank("weights", weights, 2)
    require_dtype("q", q, INDEX_DTYPES)
    require_dtype("k", k, INDEX_DTYPES)
    require_dtype("weights", weights, (torch.float32, torch.float64))
    require_size("k", k, 1, q.shape[2], "the head dim of q")
    require_size("weights", weights, 0, q.shape[0], "one row per query token")
    require_size("weights", weights, 1, q.shape[1], "one weight per head of q")
    require_interval(ks, ke, q.shape[0])
    if mask is not None:
        require_rank("mask", mask, 2)
        require_dtype("mask", mask, (torch.bool,))
        require_size("mask", mask, 0, q.shape[0], "one row per query token")
        require_size("mask", mask, 1, k.shape[0], "one column per packed key")
    require_same_device(q=q, k=k, weights=weights, ks=ks, ke=ke, mask=mask)


def score_block(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Scores of some rows against some keys, before visibility: [t, s] in float32 or float64."""
    wide = wide_dtype(q)
    dots = torch.matmul(q.to(wide).flatten(0, 1), k.to(wide).t())
    dots = dots.view(q.shape[0], q.shape[1], k.shape[0]).relu_()
    return torch.matmul(weights.to(wide)[:, None, :], dots)[:, 0]


def visible_keys(
    ks: Tensor, ke: Tensor, first: int, last: int, mask: Tensor | None = None
) -> Tensor:
    """[t, last - first] bool: which of the packed keys ``first .. last`` each row sees."""
    key = torch.arange(first, last, dtype=torch.int32, device=ks.device)
    visible = (key >= ks[:, None]) & (key < ke[:, None])
    return visible if mask is None else visible & mask[:, first:last]


def _reference(
    q: Tensor, k: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, mask: Tensor | None = None
) -> Tensor:
    scores = score_block(q, k, weights)
    return scores.masked_fill_(~visible_keys(ks, ke, 0, k.shape[0], mask), float("-inf"))


def _fake(
    q: Tensor, k: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, mask: Tensor | None = None
) -> Tensor:
    wide = wide_dtype(q)
    return q.new_empty((q.shape[0], k.shape[0]), dtype=wide)


_op = define_op(
    "index_scores(Tensor q, Tensor k, Tensor weights, Tensor ks, Tensor ke, Tensor? mask=None)"
    " -> Tensor",
    reference=_reference,
    fake=_fake,
)
