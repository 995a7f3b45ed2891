"""The reference of attention over expanded keys, in blocks of rows, for dense and masked."""

from __future__ import annotations

import torch
from torch import Tensor

from ._blocks import key_span, row_blocks
from ._checks import (
    require_floating,
    require_interval,
    require_rank,
    require_same_device,
    require_size,
)
from ._dtypes import wide_dtype
from ._softmax import softmax_backward, softmax_lse, wide_rows
from .index_scores import visible_keys


def check_mha_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ks: Tensor,
    ke: Tensor,
    q_pe: Tensor | None,
    k_pe: Tensor | None,
) -> None:
    """The operands that dense and masked attention share; one dtype, one device."""
    tensors = {"q": q, "k": k, "v": v}
    ranks = dict.fromkeys(tensors, 3)
    if q_pe is not None and k_pe is not None:
        tensors |= {"q_pe": q_pe, "k_pe": k_pe}
        ranks |= {"q_pe": 3, "k_pe": 2}
    elif q_pe is not k_pe:
        given, missing = ("q_pe", "k_pe") if k_pe is None else ("k_pe", "q_pe")
        raise ValueError(f"q_pe and k_pe come together or not at all, got {given} and no {missing}")
    for name, tensor in tensors.items():
        require_rank(name, tensor, ranks[name])
        require_floating(name, tensor)
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {tensor.dtype}")
    require_size("k", k, 1, q.shape[1], "the heads of q")
    require_size("k", k, 2, q.shape[2], "the head dim of q")
    require_size("v", v, 0, k.shape[0], "the keys of k")
    require_size("v", v, 1, q.shape[1], "the heads of q")
    if q_pe is not None and k_pe is not None:
        require_size("q_pe", q_pe, 0, q.shape[0], "the tokens of q")
        require_size("q_pe", q_pe, 1, q.shape[1], "the heads of q")
        require_size("k_pe", k_pe, 0, k.shape[0], "the keys of k")
        require_size("k_pe", k_pe, 1, q_pe.shape[2], "the rotated dims of q_pe")
    require_interval(ks, ke, q.shape[0])
    require_same_device(**tensors, ks=ks, ke=ke)


def joined(q: Tensor, k: Tensor, q_pe: Tensor | None, k_pe: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [T, N, P + R] and k [S, N, P + R], put together where their rotated parts came apart."""
    if q_pe is None or k_pe is None:
        return q, k
    shared = k_pe[:, None].expand(-1, k.shape[1], -1)
    return torch.cat([q, q_pe], dim=-1), torch.cat([k, shared], dim=-1)


def backward_fake(
    q: Tensor, k: Tensor, v: Tensor, q_pe: Tensor | None, k_pe: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What ``attend_backward`` returns, without its values."""
    grads = [part.new_empty(part.shape) for part in (q, k, v)]
    pe = [q.new_empty(0 if part is None else part.shape) for part in (q_pe, k_pe)]
    return grads[0], grads[1], grads[2], pe[0], pe[1]


def selected_keys(indices: Tensor, ks: Tensor, ke: Tensor, first: int, last: int) -> Tensor:
    """[t, last - first] bool: the visible keys that ``indices`` names."""
    length = last - first
    column = torch.where(indices >= 0, indices + (ks[:, None] - first), length).long()
    column = torch.where((column >= 0) & (column < length), column, length)
    chosen = torch.zeros(
        (indices.shape[0], length + 1), dtype=torch.bool, device=indices.device
    ).scatter_(1, column, True)
    return chosen[:, :length] & visible_keys(ks, ke, first, last)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor | None,
    ks: Tensor,
    ke: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [T, N, V] and lse [T, N]; ``indices`` restricts each row to some visible keys."""
    out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = q.new_full((q.shape[0], q.shape[1]), float("-inf"), dtype=wide_dtype(q))
    for block in row_blocks(q.shape[0], _bytes_per_row(q, k)):
        first, last = key_span(ks[block], ke[block])
        if first == last:
            continue
        visible = _visible(indices, ks, ke, block, first, last)
        scores = _scores(q[block], k[first:last], scale)
        probabilities, lse_block = softmax_lse(scores, visible[None])
        wide_v = _read(v, first, last, visible).transpose(0, 1)
        out[block] = torch.matmul(probabilities, wide_v).transpose(0, 1).to(q.dtype)
        lse[block] = lse_block.t()
    return out, lse


def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor | None,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    q_pe: Tensor | None,
    k_pe: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, q_pe and k_pe, the last two empty where those are None.

    Probabilities are computed again, block by block.
    """
    wide, nope = wide_dtype(q), q.shape[2]
    q, k = joined(q, k, q_pe, k_pe)
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_k = k.new_zeros((k.shape[1], k.shape[0], k.shape[2]), dtype=wide)
    grad_v = v.new_zeros((v.shape[1], v.shape[0], v.shape[2]), dtype=wide)
    for block in row_blocks(q.shape[0], 3 * _bytes_per_row(q, k)):
        first, last = key_span(ks[block], ke[block])
        if first == last:
            continue
        visible = _visible(indices, ks, ke, block, first, last)
        blind = ~visible.any(dim=1)
        probabilities, _ = softmax_lse(_scores(q[block], k[first:last], scale), visible[None])
        grad_block = wide_rows(grad_out[block], blind).transpose(0, 1)
        grad_v[:, first:last] += torch.matmul(probabilities.transpose(1, 2), grad_block)
        wide_v = _read(v, first, last, visible).permute(1, 2, 0)
        grad_scores = softmax_backward(
            probabilities,
            torch.matmul(grad_block, wide_v),
            None if grad_lse is None else wide_rows(grad_lse[block], blind).t(),
        ).mul_(scale)
        wide_k = _read(k, first, last, visible).transpose(0, 1)
        grad_q[block] = torch.matmul(grad_scores, wide_k).transpose(0, 1).to(q.dtype)
        wide_q = wide_rows(q[block], blind).transpose(0, 1)
        grad_k[:, first:last] += torch.matmul(grad_scores.transpose(1, 2), wide_q)
    grad_k_pe = grad_k.new_empty(0) if k_pe is None else grad_k[..., nope:].sum(dim=0)
    return (
        grad_q[..., :nope].contiguous(),
        grad_k[..., :nope].transpose(0, 1).to(k.dtype).contiguous(),
        grad_v.transpose(0, 1).to(v.dtype).contiguous(),
        # Never a view: for one token and one head it would lie in the memory of the first.
        grad_q.new_empty(0) if q_pe is None else grad_q[..., nope:].clone(),
        grad_k_pe.to(k.dtype),
    )


def _visible(
    indices: Tensor | None, ks: Tensor, ke: Tensor, block: slice, first: int, last: int
) -> Tensor:
    if indices is None:
        return visible_keys(ks[block], ke[block], first, last)
    return selected_keys(indices[block], ks[block], ke[block], first, last)


def _read(rows: Tensor, first: int, last: int, visible: Tensor) -> Tensor:
    """Rows ``first .. last`` in the wide dtype, 0 where nobody reads one.

    Memory between requests or behind a row's end may hold anything, and 0 * NaN is NaN.
    """
    unread = ~visible.any(dim=0)[:, None, None]
    return rows[first:last].to(wide_dtype(rows)).masked_fill(unread, 0)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[N, t, s] in the wide dtype."""
    wide = wide_dtype(q)
    return torch.matmul(q.to(wide).transpose(0, 1), k.to(wide).permute(1, 2, 0)).mul_(scale)


def _bytes_per_row(q: Tensor, k: Tensor) -> int:
    """Scores and probabilities of one row over all keys, in the wide dtype, and its masks."""
    return k.shape[0] * (2 * q.shape[1] * wide_dtype(q).itemsize + 4)
