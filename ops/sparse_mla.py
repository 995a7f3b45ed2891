"""``sparse_mqa`` on latents and rotated keys that are kept apart, as a cache keeps them."""

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


def sparse_mla(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each row over the latent rows ``ks + indices`` alone.

    Equal to ``sparse_mqa`` on queries and keys put together, without copying the keys: time and
    memory do not depend on the number of cached rows, only on K.

    Args:
        q_latent: [T, N, L], the absorbed query; q_pe: [T, N, R], rotated.
        kv_c: [S, L], normed latents, packed; k_pe: [S, R], rotated.
        indices: [T, K] int32 positions relative to ``ks``; -1 in any lane is no key; order is free.
        ks: [T] int32, where each row's keys start.
        scale: softmax scale, ``(P + R)**-0.5`` of the model and never of the absorbed width.
        return_lse: whether the log-sum-exp is wanted.
        batch_invariant: compute each row in a fixed tile, so that it is bit-equal alone and in any
            batch (contract C11).

    Returns:
        out [T, N, L] like ``q_latent``, 0 where nothing is selected; lse [T, N] float32 (float64
        for float64 inputs), natural log, -inf where nothing is selected, or an empty tensor if not
        asked for.

    Raises:
        ValueError: shapes or devices that do not fit together, or a position beyond the packed
            rows.
        TypeError: a dtype outside of those above.
    """
    for name, tensor, rank in (("q_latent", q_latent, 3), ("q_pe", q_pe, 3), ("kv_c", kv_c, 2)):
        require_rank(name, tensor, rank)
    require_rank("k_pe", k_pe, 2)
    require_rank("ks", ks, 1)
    require_floating("q_latent", q_latent)
    for name, tensor in (("q_pe", q_pe), ("kv_c", kv_c), ("k_pe", k_pe)):
        require_dtype(name, tensor, (q_latent.dtype,))
    require_dtype("ks", ks, (torch.int32,))
    require_size("q_pe", q_pe, 0, q_latent.shape[0], "the tokens of q_latent")
    require_size("q_pe", q_pe, 1, q_latent.shape[1], "the heads of q_latent")
    require_size("kv_c", kv_c, 1, q_latent.shape[2], "the width of q_latent")
    require_size("k_pe", k_pe, 0, kv_c.shape[0], "the rows of kv_c")
    require_size("k_pe", k_pe, 1, q_pe.shape[2], "the width of q_pe")
    require_size("ks", ks, 0, q_latent.shape[0], "one per query token")
    check_selection(indices, q_latent)
    require_same_device(q_latent=q_latent, q_pe=q_pe, kv_c=kv_c, k_pe=k_pe, ks=ks)
    return _op(q_latent, q_pe, kv_c, k_pe, indices, ks, scale, return_lse, batch_invariant)


def _reference(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    q = torch.cat([q_latent, q_pe], dim=-1)
    out, lse = attend_rows(q, (kv_c, k_pe), indices, ks, scale, kv_c.shape[1], batch_invariant)
    return out, lse if return_lse else lse.new_empty(0)


def _fake(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    lse_shape = (q_latent.shape[0], q_latent.shape[1]) if return_lse else (0,)
    return q_latent.new_empty(q_latent.shape), q_latent.new_empty(
        lse_shape, dtype=wide_dtype(q_latent)
    )


def _backward_reference(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    latent = kv_c.shape[1]
    grad_q, grad_kv = attend_rows_backward(
        grad_out,
        grad_lse,
        torch.cat([q_latent, q_pe], dim=-1),
        (kv_c, k_pe),
        indices,
        ks,
        scale,
        latent,
    )
    parts = (grad_q[..., :latent], grad_q[..., latent:], grad_kv[:, :latent], grad_kv[:, latent:])
    return tuple(part.contiguous() for part in parts)  # type: ignore[return-value]


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = (q_latent, q_pe, kv_c, k_pe)
    return tuple(part.new_empty(part.shape) for part in parts)  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.return_lse, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    q_latent, q_pe, kv_c, k_pe, indices, ks = ctx.saved_tensors
    grad_lse_or_none = grad_lse if ctx.return_lse else None
    grads = sparse_mla_backward(
        grad_out, grad_lse_or_none, q_latent, q_pe, kv_c, k_pe, indices, ks, ctx.scale
    )
    return (*grads, None, None, None, None, None)


sparse_mla_backward = define_op(
    "sparse_mla_backward(Tensor grad_out, Tensor? grad_lse, Tensor q_latent, Tensor q_pe,"
    " Tensor kv_c, Tensor k_pe, Tensor indices, Tensor ks, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
)

_op = define_op(
    "sparse_mla(Tensor q_latent, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor indices, Tensor ks,"
    " float scale, bool return_lse=True, bool batch_invariant=False) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
