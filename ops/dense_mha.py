"""Dense multi-head attention over the visible interval, on expanded keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import _mha
from ._blocks import check_interval_values
from ._dtypes import wide_dtype
from ._library import define_op
from .causal_positions import require_premise


def dense_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    scale: float,
    bound: int | None = None,
    return_lse: bool = True,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each row over all keys of its interval.

    Args:
        q: [T, N, P + R].
        k: [S, N, P + R], packed; v: [S, N, V].
        ks, ke: [T] int32, the visible interval; ``ks >= ke`` is an empty row: out 0, lse -inf.
        max_kv_len: host upper bound on ``ke - ks``.
        scale: softmax scale.
        bound: the premise of a specialised graph; a longer ``max_kv_len`` raises.
        return_lse: whether the log-sum-exp is wanted.
        q_pe, k_pe: [T, N, R] and [S, R], the rotated parts, one key for all heads, where they are
            kept apart; ``q`` and ``k`` are then [T, N, P] and [S, N, P]. Saves joining them.

    Returns:
        out [T, N, V] like ``q``; lse [T, N] float32 (float64 for float64 inputs), natural log, or
        an empty tensor if not asked for.

    Raises:
        ValueError: shapes or devices that do not fit together, or ``max_kv_len`` breaks the
            premise.
        TypeError: a dtype outside of those above.
    """
    _mha.check_mha_inputs(q, k, v, ks, ke, q_pe, k_pe)
    return _op(q, k, v, ks, ke, max_kv_len, scale, bound, return_lse, q_pe, k_pe)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    scale: float,
    bound: int | None = None,
    return_lse: bool = True,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    require_premise(max_kv_len, bound)
    check_interval_values(ks, ke, k.shape[0], max_kv_len)
    q, k = _mha.joined(q, k, q_pe, k_pe)
    out, lse = _mha.attend(q, k, v, None, ks, ke, scale)
    return out, lse if return_lse else lse.new_empty(0)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    scale: float,
    bound: int | None = None,
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
    ks: Tensor,
    ke: Tensor,
    scale: float,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _mha.attend_backward(grad_out, grad_lse, q, k, v, None, ks, ke, scale, q_pe, k_pe)


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _mha.backward_fake(q, k, v, q_pe, k_pe)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ks, ke, _, ctx.scale, _, ctx.return_lse, q_pe, k_pe = inputs
    ctx.save_for_backward(q, k, v, ks, ke, q_pe, k_pe)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, ks, ke, q_pe, k_pe = ctx.saved_tensors
    grad_lse_or_none = grad_lse if ctx.return_lse else None
    grad_q, grad_k, grad_v, *grads_pe = dense_mha_backward(
        grad_out, grad_lse_or_none, q, k, v, ks, ke, ctx.scale, q_pe, k_pe
    )
    return (grad_q, grad_k, grad_v, *[None] * 6, *(grads_pe if q_pe is not None else (None, None)))


dense_mha_backward = define_op(
    "dense_mha_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor ks,"
    " Tensor ke, float scale, Tensor? q_pe=None, Tensor? k_pe=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
)

_op = define_op(
    "dense_mha(Tensor q, Tensor k, Tensor v, Tensor ks, Tensor ke, SymInt max_kv_len, float scale,"
    " SymInt? bound=None, bool return_lse=True, Tensor? q_pe=None, Tensor? k_pe=None)"
    " -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
