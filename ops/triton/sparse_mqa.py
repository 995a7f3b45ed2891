"""``sparse_mqa``: the kernel of ``sparse_mla`` on the two parts of joined queries and keys."""

from __future__ import annotations

from torch import Tensor

from .._sparse import check_positions
from . import _sparse_launch


def supports(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> str | None:
    """None unless queries are float64, or wider than the tiles."""
    return _sparse_launch.refusal(q, v_dim, q.shape[2] - v_dim)


def run(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """``sparse_mqa`` on views of ``q`` and ``kv``; nothing is copied where their rows are dense."""
    check_positions(indices, ks, kv.shape[0])
    q, kv = _sparse_launch.rows_of(q), _sparse_launch.rows_of(kv)
    return _sparse_launch.attend(
        q[..., :v_dim],
        q[..., v_dim:],
        kv[:, :v_dim],
        kv[:, v_dim:],
        indices,
        ks,
        scale,
        return_lse,
        batch_invariant,
    )
