"""Absorbed multi-query attention over selected latent rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._checks import (
    require_dtype,
    require_floating,
    require_rank,
    require_same_device,
    require_size,
)
from ._dtypes import wide_dtype
from ._library import define_op
from ._sparse import attend_rows, attend_rows_backward
from .masked_mha import check_selection


def sparse_mqa(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each row over the latent rows ``ks + indices`` alone.

    Time and memory do not depend on the number of cached rows, only on K.

    Args:
        q: [T, N, L + R], the absorbed query and its rotated part.
        kv: [S, L + R], packed rows ``[latent | rope]``.
        indices: [T, K] int32 positions relative to ``ks``; -1 in any lane is no key; order is free.
        ks: [T] int32, where each row's keys start.
        scale: softmax scale, ``(P + R)**-0.5`` of the model and never of the absorbed width.
        v_dim: leading dims of a row that are its value (L).
        return_lse: whether the log-sum-exp is wanted.
        batch_invariant: compute each row in a fixed tile, so that it is bit-equal alone and in any
            batch (contract C11).

    Returns:
        out [T, N, v_dim] like ``q``, 0 where nothing is selected; lse [T, N] float32 (float64 for
        float64 inputs), natural log, -inf where nothing is selected, or an empty tensor if not
        asked for.

    Raises:
        ValueError: shapes or devices that do not fit together, or a position beyond the packed
            rows.
        TypeError: a dtype outside of those above.
    """
    require_rank("q", q, 3)
    require_rank("kv", kv, 2)
    require_rank("ks", ks, 1)
    require_floating("q", q)
    require_dtype("kv", kv, (q.dtype,))
    require_dtype("ks", ks, (torch.int32,))
    require_size("kv", kv, 1, q.shape[2], "the width of q")
    require_size("ks", ks, 0, q.shape[0], "one per query token")
    check_selection(indices, q)
    require_same_device(q=q, kv=kv, ks=ks)
    if not 1 <= v_dim <= kv.shape[1]:
        raise ValueError(f"v_dim must be between 1 and the width of kv, {kv.shape[1]}, got {v_dim}")
    return _op(q, kv, indices, ks, scale, v_dim, return_lse, batch_invariant)


def _reference(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    out, lse = attend_rows(q, (kv,), indices, ks, scale, v_dim, batch_invariant)
    return out, lse if return_lse else lse.new_empty(0)


def _fake(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    lse_shape = (q.shape[0], q.shape[1]) if return_lse else (0,)
    out = q.new_empty((q.shape[0], q.shape[1], v_dim))
    return out, q.new_empty(lse_shape, dtype=wide_dtype(q))


def _backward_reference(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
) -> tuple[Tensor, Tensor]:
    return attend_rows_backward(grad_out, grad_lse, q, (kv,), indices, ks, scale, v_dim)


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, indices, ks, ctx.scale, ctx.v_dim, ctx.return_lse, _ = inputs
    ctx.save_for_backward(q, kv, indices, ks)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, kv, indices, ks = ctx.saved_tensors
    grad_lse_or_none = grad_lse if ctx.return_lse else None
    grads = _backward_op(grad_out, grad_lse_or_none, q, kv, indices, ks, ctx.scale, ctx.v_dim)
    return (*grads, None, None, None, None, None, None)


_backward_op = define_op(
    "sparse_mqa_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor kv, Tensor indices,"
    " Tensor ks, float scale, SymInt v_dim) -> (Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
)

_op = define_op(
    "sparse_mqa(Tensor q, Tensor kv, Tensor indices, Tensor ks, float scale, SymInt v_dim,"
    " bool return_lse=True, bool batch_invariant=False) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
