"""The reference of attention over selected rows of keys, in one tensor or in several parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._blocks import checks_values, row_blocks
from ._dtypes import wide_dtype
from ._softmax import softmax_backward, softmax_lse, wide_rows


def check_positions(indices: Tensor, ks: Tensor, rows: int) -> None:
    """Raise ``ValueError`` where a position is neither -1 nor one of the packed rows."""
    if indices.numel() == 0 or not checks_values(indices):
        return
    row = indices + ks[:, None]
    wrong = (indices < -1) | ((indices >= 0) & ((row < 0) | (row >= rows)))
    if bool(wrong.any()):
        raise ValueError(
            f"indices must be -1 or name one of the {rows} packed rows, got positions from "
            f"{int(indices.min())} to {int(indices.max())}"
        )


def attend_rows(
    q: Tensor,
    parts: tuple[Tensor, ...],
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """out [T, N, v_dim] like ``q`` and lse [T, N]; keys are the rows of ``parts`` side by side."""
    keys = parts[0].shape[0]
    check_positions(indices, ks, keys)
    out = q.new_zeros((q.shape[0], q.shape[1], v_dim))
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=wide_dtype(q))
    if keys and indices.shape[1]:
        for block in _blocks(q, indices, batch_invariant):
            rows, valid = _gather(parts, indices[block], ks[block])
            scores = torch.matmul(q[block].to(rows.dtype), rows.transpose(1, 2)).mul_(scale)
            probabilities, lse[block] = softmax_lse(scores, valid[:, None])
            out[block] = torch.matmul(probabilities, rows[..., :v_dim]).to(q.dtype)
    return out, lse


def attend_rows_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    parts: tuple[Tensor, ...],
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``q`` and of the keys side by side; a row that nobody selects has none."""
    wide, keys = wide_dtype(q), parts[0].shape[0]
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_keys = q.new_zeros((keys, q.shape[2]), dtype=wide)
    if keys == 0 or indices.shape[1] == 0:
        return grad_q, grad_keys.to(q.dtype)
    for block in _blocks(q, indices, batch_invariant=False):
        rows, valid = _gather(parts, indices[block], ks[block])
        blind = ~valid.any(dim=1)
        wide_q = wide_rows(q[block], blind)
        scores = torch.matmul(wide_q, rows.transpose(1, 2)).mul_(scale)
        probabilities, _ = softmax_lse(scores, valid[:, None])
        grad_block = wide_rows(grad_out[block], blind)
        grad_scores = softmax_backward(
            probabilities,
            torch.matmul(grad_block, rows[..., :v_dim].transpose(1, 2)),
            None if grad_lse is None else wide_rows(grad_lse[block], blind),
        ).mul_(scale)
        grad_q[block] = torch.matmul(grad_scores, rows).to(q.dtype)
        grad_rows = torch.matmul(grad_scores.transpose(1, 2), wide_q)
        grad_rows[..., :v_dim] += torch.matmul(probabilities.transpose(1, 2), grad_block)
        lanes = valid.nonzero(as_tuple=True)
        target = (indices[block] + ks[block, None])[lanes].long()
        grad_keys.index_add_(0, target, grad_rows[lanes])
    return grad_q, grad_keys.to(q.dtype)


def _gather(parts: tuple[Tensor, ...], indices: Tensor, ks: Tensor) -> tuple[Tensor, Tensor]:
    """Selected rows [t, K, width], 0 where a lane holds no key, and which lanes hold one (C8)."""
    valid = indices >= 0
    row = torch.where(valid, indices + ks[:, None], 0).clamp_(0, parts[0].shape[0] - 1).long()
    # An empty lane may not read what lies in row 0: 0 * NaN would reach the output.
    rows = [part[row].to(wide_dtype(part)).masked_fill_(~valid[..., None], 0) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1), valid


def _blocks(q: Tensor, indices: Tensor, batch_invariant: bool) -> Iterator[slice]:
    wide = wide_dtype(q).itemsize
    per_row = indices.shape[1] * wide * (3 * q.shape[2] + 2 * q.shape[1])
    # One row a block is a fixed tile: what is computed for a row then depends on that row alone.
    return row_blocks(q.shape[0], 1 << 62 if batch_invariant else per_row)
