"""Gradients of absorbed attention on the CPU: each tile is gathered again, then come five products.

Scores are computed again, so nothing of the size of the selection is kept from the forward.
Gradients of keys are summed in float32, whatever the dtype of the cache, and rounded once. On one
thread in float32, a row that selects 2048 keys at the dimensions of GLM-5.2 takes 1.6 times what
its products take at the rate of a large GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _options
from ._gradients import through_softmax
from .sparse import gather, key_rows, sum_of_scores, used_lanes

# What one tile of query tokens holds.
_TILE_BYTES = 16 << 20


def sparse_mqa_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
) -> tuple[Tensor, Tensor]:
    """``sparse_mqa_backward`` for float32, bfloat16 and float16."""
    (grad_q,), (grad_kv,) = _backward(grad_out, grad_lse, (q,), (kv,), indices, ks, scale, v_dim)
    return grad_q, grad_kv


def sparse_mla_backward(
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
    """``sparse_mla_backward`` for float32, bfloat16 and float16."""
    queries, keys = (q_latent, q_pe), (kv_c, k_pe)
    (grad_q_latent, grad_q_pe), (grad_kv_c, grad_k_pe) = _backward(
        grad_out, grad_lse, queries, keys, indices, ks, scale, kv_c.shape[1]
    )
    return grad_q_latent, grad_q_pe, grad_kv_c, grad_k_pe


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    queries: tuple[Tensor, ...],
    keys: tuple[Tensor, ...],
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the parts of the query and of the key; the value is the start of the first."""
    grad_queries = [part.new_empty(part.shape) for part in queries]
    grad_keys = [part.new_zeros(part.shape, dtype=torch.float32) for part in keys]
    step = _rows_at_once(indices.shape[1], grad_out.shape[1], keys)
    for start in range(0, grad_out.shape[0], step):
        block = slice(start, start + step)
        chosen = used_lanes(indices[block])
        if chosen.shape[1] == 0:
            for grad in grad_queries:
                grad[block] = 0.0
            continue
        tile = [part[block].float() for part in queries]
        grad_tile = grad_out[block].float()
        valid = chosen >= 0
        hidden, blind = None, None
        if not bool(valid.all()):
            # What a row without a key holds, and what it reads, may be NaN, and 0 * NaN is NaN.
            hidden, blind = ~valid[:, None], ~valid.any(dim=1)[:, None, None]
            tile = [part.masked_fill(blind, 0.0) for part in tile]
            grad_tile = grad_tile.masked_fill(blind, 0.0)
        rows = key_rows(chosen, ks[block], keys[0].shape[0])
        gathered = gather(keys, rows)
        scores = sum_of_scores(tile, gathered, scale)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        probabilities, grad_scores = through_softmax(
            scores,
            grad_tile,
            gathered[0][..., :v_dim],
            None if grad_lse is None else grad_lse[block],
            scale,
        )
        if hidden is not None:
            # Softmax of a row without a key is NaN.
            probabilities.masked_fill_(hidden, 0.0)
            grad_scores.masked_fill_(hidden, 0.0)
        for part, (query, read) in enumerate(zip(tile, gathered, strict=True)):
            grad_query = torch.bmm(grad_scores, read)
            if blind is not None:
                grad_query.masked_fill_(blind, 0.0)
            grad_queries[part][block] = grad_query
            grad_read = torch.bmm(grad_scores.transpose(1, 2), query)
            if part == 0:
                grad_read[..., :v_dim].baddbmm_(probabilities.transpose(1, 2), grad_tile)
            # A lane without a key adds 0 to the key that it repeats.
            grad_keys[part].index_add_(0, rows.flatten(), grad_read.flatten(0, 1))
    return grad_queries, [grad.to(part.dtype) for grad, part in zip(grad_keys, keys, strict=True)]


def _rows_at_once(topk: int, heads: int, keys: tuple[Tensor, ...]) -> int:
    """Query tokens of one tile: keys as cached, as float32, their gradients, and three scores."""
    width = sum(part.shape[1] for part in keys)
    row_bytes = topk * (12 * width + 12 * heads + 32)
    return max(1, min(_TILE_BYTES, _options.current().workspace_bytes) // max(1, row_bytes))
