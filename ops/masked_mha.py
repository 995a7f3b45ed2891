"""Multi-head attention over the selected positions only, on expanded keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _mha
from ._blocks import check_interval_values
from ._checks import require_dtype, require_rank, require_same_device, require_size
from ._dtypes import wide_dtype
from ._library import define_op


def masked_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    return_lse: bool = True,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each row over the keys of its interval that ``indices`` names.

    The same function as ``sparse_mqa`` on expanded keys; cheaper where a row selects most of its
    keys.

    Args:
        q: [T, N, P + R].
        k: [S, N, P + R], packed; v: [S, N, V].
        indices: [T, K] int32 positions relative to ``ks``; -1 in any lane is no key.
        ks, ke: [T] int32, the visible interval of packed keys.
        scale: softmax scale.
        return_lse: whether the log-sum-exp is wanted.
        q_pe, k_pe: [T, N, R] and [S, R], the rotated parts, one key for all heads, where they are
            kept apart; ``q`` and ``k`` are then [T, N, P] and [S, N, P]. Saves joining them.

    Returns:
        out [T, N, V] like ``q``, 0 where nothing is selected; lse [T, N] float32 (float64 for
        float64 inputs), natural log, -inf where nothing is selected, or an empty tensor if not
        asked for.

    Raises:
        ValueError: shapes or devices that do not fit together.
        TypeError: a dtype outside of those above.
    """
    _mha.check_mha_inputs(q, k, v, ks, ke, q_pe, k_pe)
    check_selection(indices, q)
    return _op(q, k, v, indices, ks, ke, scale, return_lse, q_pe, k_pe)


def check_selection(indices: Tensor, q: Tensor) -> None:
    """``indices`` is [T, K] int32 on the device of ``q`` [T, ...]."""
    require_rank("indices", indices, 2)
    require_dtype("indices", indices, (torch.int32,))
    require_size("indices", indices, 0, q.shape[0], "one row per query token")
    require_same_device(q=q, indices=indices)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    return_lse: bool = True,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_interval_values(ks, ke, k.shape[0])
    q, k = _mha.joined(q, k, q_pe, k_pe)
    out, lse = _mha.attend(q, k, v, indices, ks, ke, scale)
    return out, lse if return_lse else lse.new_empty(0)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    return_lse: bool = True,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    lse_shape = (q.shape[0], q.shape[1]) if return_lse else (0,)
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    return out, q.new_empty(lse_shape, dtype=wide_dtype(q))


def _backward_reference(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _mha.attend_backward(grad_out, grad_lse, q, k, v, indices, ks, ke, scale, q_pe, k_pe)


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _mha.backward_fake(q, k, v, q_pe, k_pe)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, indices, ks, ke, ctx.scale, ctx.return_lse, q_pe, k_pe = inputs
    ctx.save_for_backward(q, k, v, indices, ks, ke, q_pe, k_pe)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, indices, ks, ke, q_pe, k_pe = ctx.saved_tensors
    grad_lse_or_none = grad_lse if ctx.return_lse else None
    grad_q, grad_k, grad_v, *grads_pe = masked_mha_backward(
        grad_out, grad_lse_or_none, q, k, v, indices, ks, ke, ctx.scale, q_pe, k_pe
    )
    return (grad_q, grad_k, grad_v, *[None] * 5, *(grads_pe if q_pe is not None else (None, None)))


masked_mha_backward = define_op(
    "masked_mha_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v,"
    " Tensor indices, Tensor ks, Tensor ke, float scale, Tensor? q_pe=None, Tensor? k_pe=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
)

_op = define_op(
    "masked_mha(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor ks, Tensor ke, float scale,"
    " bool return_lse=True, Tensor? q_pe=None, Tensor? k_pe=None) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
