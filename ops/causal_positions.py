"""The closed form of a short row: a query that sees at most K keys selects all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import require_interval, require_positive, require_same_device
from ._library import define_op


def causal_positions(
    ks: Tensor, ke: Tensor, max_kv_len: int, topk: int, bound: int | None = None
) -> Tensor:
    """Positions 0, 1, ... of the keys that each row sees, padded with -1 to width ``topk``.

    Args:
        ks, ke: [T] int32, the visible interval of packed keys; ``ks >= ke`` is an empty row.
        max_kv_len: host upper bound on ``ke - ks``.
        topk: width of the result.
        bound: the premise of a specialised graph; a longer ``max_kv_len`` raises.

    Returns:
        [T, topk] int32, relative to ``ks``, ascending.

    Raises:
        ValueError: ``topk < 1``, ``ks`` and ``ke`` of unlike shape or device, or ``max_kv_len``
            breaks the premise.
        TypeError: ``ks`` or ``ke`` is not int32.
    """
    require_positive("topk", topk)
    require_same_device(ks=ks, ke=ke)
    require_interval(ks, ke, ks.shape[0])
    return _op(ks, ke, max_kv_len, topk, bound)


def require_premise(max_kv_len: int, bound: int | None) -> None:
    """Raise ``ValueError`` where a graph that was specialised for short rows meets a long one."""
    if bound is not None and max_kv_len > bound:
        raise ValueError(
            f"this graph was compiled for at most {bound} keys a row, got max_kv_len {max_kv_len}"
        )


def _reference(
    ks: Tensor, ke: Tensor, max_kv_len: int, topk: int, bound: int | None = None
) -> Tensor:
    require_premise(max_kv_len, bound)
    return closed_form(ks, ke, topk)


def closed_form(ks: Tensor, ke: Tensor, topk: int) -> Tensor:
    """[T, topk] int32: 0 .. min(ke - ks, topk) - 1, then -1."""
    lane = torch.arange(topk, dtype=torch.int32, device=ks.device)
    return torch.where(lane < (ke - ks)[:, None], lane, -1)


def _fake(ks: Tensor, ke: Tensor, max_kv_len: int, topk: int, bound: int | None = None) -> Tensor:
    return ks.new_empty((ks.shape[0], topk))


_op = define_op(
    "causal_positions(Tensor ks, Tensor ke, SymInt max_kv_len, SymInt topk, SymInt? bound=None)"
    " -> Tensor",
    reference=_reference,
    fake=_fake,
)
