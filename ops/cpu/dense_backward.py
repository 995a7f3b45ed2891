"""Gradients of attention over expanded keys on the CPU: GEMMs and softmax on tiles of rows.

A tile is all keys that some rows see, for a few heads. Its scores are computed again and need no
statistics of the forward. Products, softmax and its gradient are single calls of ATen, large enough
to hide what starting them costs: on one thread in float32 they take 1.3 to 1.4 times what the
products alone take at the rate of a large GEMM. PyTorch's flash kernel is as fast, but knows no
gradient of the LSE, no keys before a causal run, and one head dim. Gradients of keys and values are
summed in float32, whatever the dtype, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _options
from .._mha import selected_keys
from ..index_scores import visible_keys
from ._gradients import through_softmax
from ._runs import Form, Run, runs
from .dense import selects_all
from .sparse import sum_of_scores

# Longer tiles spread the cost of packing keys for a product; where causality cuts a tile, half of
# it is computed in vain.
_MOST_ROWS = 256
_LEAST_ROWS = 64
# Of one thread. A third of it, the scores, is still memory that the allocator reuses, where more
# would be fresh pages each time. Among very many keys, rows matter more.
_TILE_BYTES = 32 << 20


def dense_mha_backward(
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
    """``dense_mha_backward`` for float32, bfloat16 and float16."""
    return _backward(grad_out, grad_lse, q, k, v, None, ks, ke, scale, q_pe, k_pe)


def masked_mha_backward(
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
    """``masked_mha_backward`` for float32, bfloat16 and float16."""
    return _backward(grad_out, grad_lse, q, k, v, indices, ks, ke, scale, q_pe, k_pe)


def _backward(
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
    queries, keys = [q], [k]
    if q_pe is not None and k_pe is not None:
        queries, keys = [q, q_pe], [k, k_pe[:, None].expand(-1, q.shape[1], -1)]
    grad_queries = [part.new_zeros(part.shape) for part in queries]
    grad_k, grad_v = (part.new_zeros(part.shape, dtype=torch.float32) for part in (k, v))
    grad_k_pe = q.new_zeros(0 if k_pe is None else k_pe.shape, dtype=torch.float32)
    copied = 0 if k.dtype == torch.float32 else 4 * sum(x.shape[2] for x in (*keys, v))
    for block in _blocks(ks, ke):
        rows, span = slice(block.start, block.stop), slice(block.first, block.last)
        mask = _mask(block, None if indices is None else indices[rows], ks[rows], ke[rows])
        bias, blind, unread = _bias(block, mask)
        step = _heads_at_once(block, copied)
        for start in range(0, q.shape[1], step):
            heads = slice(start, start + step)
            tile = [_operand(part[rows, heads], blind) for part in queries]
            read = [_operand(part[span, heads], unread) for part in keys]
            grad_tile = _operand(grad_out[rows, heads], blind)
            scores = sum_of_scores(tile, read, scale)
            scores[..., scores.shape[2] - bias.shape[1] :].add_(bias)
            probabilities, grad = through_softmax(
                scores,
                grad_tile,
                _operand(v[span, heads], unread),
                None if grad_lse is None else _operand(grad_lse[rows, heads, None], blind)[..., 0],
                scale,
            )
            grad_by_key = grad.transpose(1, 2)
            for grad_query, part in zip(grad_queries, read, strict=True):
                grad_query[rows, heads] = torch.bmm(grad, part).transpose(0, 1)
            grad_k[span, heads].transpose(0, 1).baddbmm_(grad_by_key, tile[0])
            grad_v[span, heads].transpose(0, 1).baddbmm_(probabilities.transpose(1, 2), grad_tile)
            if k_pe is not None:
                grad_k_pe[span].addbmm_(grad_by_key, tile[1])
    grad_q_pe = q.new_empty(0) if q_pe is None else grad_queries[1]
    return grad_queries[0], grad_k.to(k.dtype), grad_v.to(v.dtype), grad_q_pe, grad_k_pe.to(k.dtype)


def _blocks(ks: Tensor, ke: Tensor) -> Iterator[Run]:
    """Even parts of the runs, such that scores of one head fit, three times."""
    for run in runs(ks, ke):
        rows, row_bytes = run.stop - run.start, 12 * (run.last - run.first)
        fitting = min(_half_of_workspace() // row_bytes, _LEAST_ROWS)
        most = max(1, fitting, min(_tile_bytes() // row_bytes, _MOST_ROWS))
        yield from run.even_parts(-(-rows // most))


def _heads_at_once(block: Run, copied: int) -> int:
    """How many fit, with ``copied`` bytes for the key and the value of a token and head."""
    keys, rows = block.last - block.first, block.stop - block.start
    return max(1, _tile_bytes() // (keys * (12 * rows + copied)))


def _tile_bytes() -> int:
    return min(_TILE_BYTES * torch.get_num_threads(), _half_of_workspace())


def _half_of_workspace() -> int:
    return _options.current().workspace_bytes // 2


def _mask(block: Run, indices: Tensor | None, ks: Tensor, ke: Tensor) -> Tensor | None:
    """[t, s] bool, which keys a row attends to, where the form of the block does not say it."""
    if indices is not None and not selects_all(indices, ks, ke):
        return selected_keys(indices, ks, ke, block.first, block.last)
    if block.form is Form.RAGGED:
        return visible_keys(ks, ke, block.first, block.last)
    return None


def _bias(block: Run, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What hides the last keys of a block, [t, keys]; rows and keys that nothing is read of.

    These may hold NaN, and 0 * NaN is NaN; they are read as 0, which leaves nothing to hide.
    """
    rows = block.stop - block.start
    if mask is None:
        hidden = torch.full((rows, rows if block.form is Form.CAUSAL else 0), float("-inf"))
        return hidden.triu_(1), None, None
    blind, unread = ~mask.any(dim=1), ~mask.any(dim=0)
    bias = torch.zeros(mask.shape).masked_fill_(~(mask | blind[:, None]), float("-inf"))
    return bias, blind if bool(blind.any()) else None, unread if bool(unread.any()) else None


def _operand(x: Tensor, unread: Tensor | None) -> Tensor:
    """[n, rows, width] float32 of [rows, n, width], with 0 in rows that are not read."""
    x = x.to(torch.float32)
    if unread is not None:
        x = x.masked_fill(unread[:, None, None], 0.0)
    return x.transpose(0, 1)
