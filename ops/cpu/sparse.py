"""Absorbed attention over selected rows on the CPU: gather once, two GEMMs over what was gathered.

A tile of gathered keys stays in cache between the products. It is float32 whatever the dtype of the
cache: products of bfloat16 would round the scores, and no cached row that nobody selected is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _options
from .._sparse import check_positions

# Gathered rows, scores and probabilities of one tile of query tokens.
_TILE_BYTES = 4 << 20


def supports(q: Tensor, *args: object) -> str | None:
    """None unless ``q`` is float64."""
    return "float64 attention is computed in float64" if q.dtype == torch.float64 else None


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
    """``sparse_mqa`` for float32, bfloat16 and float16."""
    return _attend((q,), (kv,), indices, ks, scale, v_dim, return_lse, batch_invariant)


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
    """``sparse_mla`` for float32, bfloat16 and float16; scores are the sum of two products."""
    queries, keys = (q_latent, q_pe), (kv_c, k_pe)
    v_dim = kv_c.shape[1]
    return _attend(queries, keys, indices, ks, scale, v_dim, return_lse, batch_invariant)


def _attend(
    queries: tuple[Tensor, ...],
    keys: tuple[Tensor, ...],
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
    return_lse: bool,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """The score is the sum over the parts; the value is the start of the first part."""
    check_positions(indices, ks, keys[0].shape[0])
    rows, heads = queries[0].shape[:2]
    out = queries[0].new_empty((rows, heads, v_dim))
    lse = out.new_full((rows, heads) if return_lse else (0,), float("-inf"), dtype=torch.float32)
    step = 1 if batch_invariant else _rows_at_once(indices.shape[1], heads, keys)
    for start in range(0, rows, step):
        block = slice(start, start + step)
        chosen, first = used_lanes(indices[block]), ks[block]
        if chosen.shape[1] == 0:
            out[block] = 0.0
            continue
        gathered = None if batch_invariant else _consecutive(keys, chosen, first)
        if gathered is None:
            gathered = gather(keys, key_rows(chosen, first, keys[0].shape[0]))
        scores = sum_of_scores([query[block] for query in queries], gathered, scale)
        valid = chosen >= 0
        every = bool(valid.all())
        if not every:
            scores.masked_fill_(~valid[:, None], float("-inf"))
        probabilities = scores.softmax(dim=-1)
        _product(probabilities, gathered[0][..., :v_dim], out[block])
        if return_lse:
            # p = e^(s - lse) at the highest score: one pass, where logsumexp takes four.
            best = scores.argmax(dim=-1, keepdim=True)
            log_p = probabilities.gather(-1, best).log_()
            lse[block] = scores.gather(-1, best).sub_(log_p)[..., 0]
        if not every:
            # Softmax of a row without a key is NaN.
            blind = ~valid.any(dim=1)[:, None]
            out[block].masked_fill_(blind[..., None], 0.0)
            if return_lse:
                lse[block].masked_fill_(blind, float("-inf"))
    return out, lse


def _rows_at_once(topk: int, heads: int, keys: tuple[Tensor, ...]) -> int:
    """Query tokens of one tile: keys as cached and in float32, scores and probabilities."""
    width = sum(part.shape[1] for part in keys)
    row_bytes = topk * (8 * width + 8 * heads + 16)
    return max(1, min(_TILE_BYTES, _options.current().workspace_bytes) // max(1, row_bytes))


def used_lanes(indices: Tensor) -> Tensor:
    """``indices`` without the trailing lanes that hold no key in any row."""
    used = (indices >= 0).any(dim=0).nonzero()
    return indices[:, : int(used[-1]) + 1] if used.shape[0] else indices[:, :0]


def _consecutive(keys: tuple[Tensor, ...], chosen: Tensor, ks: Tensor) -> list[Tensor] | None:
    """Views of the keys of one row that selects consecutive positions, else None."""
    if chosen.shape[0] != 1:
        return None
    start, stop = int(chosen[0, 0]), int(chosen[0, -1]) + 1
    lanes = torch.arange(start, start + chosen.shape[1], dtype=torch.int32)
    if stop - start != chosen.shape[1] or start < 0 or not torch.equal(chosen[0], lanes):
        return None
    span = slice(int(ks[0]) + start, int(ks[0]) + stop)
    return [part[span].to(torch.float32)[None] for part in keys]


def key_rows(chosen: Tensor, ks: Tensor, keys: int) -> Tensor:
    """[t, lanes] int32, which of the packed ``keys`` each lane reads.

    A lane without a key repeats the last key of its row: any other address may hold NaN, which
    survives a probability of 0.
    """
    row = torch.where(chosen >= 0, chosen, chosen.amax(dim=1, keepdim=True)) + ks[:, None]
    return row.clamp_(0, keys - 1)


def gather(keys: tuple[Tensor, ...], rows: Tensor) -> list[Tensor]:
    """[t, lanes, width] float32 of each part, at the addresses ``rows`` [t, lanes]."""
    return [
        part.index_select(0, rows.flatten()).to(torch.float32).view(*rows.shape, part.shape[1])
        for part in keys
    ]


def sum_of_scores(queries: list[Tensor], gathered: list[Tensor], scale: float) -> Tensor:
    """[t, N, lanes] float32."""
    tokens, heads, lanes = *queries[0].shape[:2], gathered[0].shape[1]
    scores = gathered[0].new_empty((tokens, heads, lanes))
    for part, (query, keys) in enumerate(zip(queries, gathered, strict=True)):
        # With beta 0, what lies in fresh memory is not read.
        scores.baddbmm_(
            query.to(scores.dtype), keys.transpose(1, 2), beta=min(part, 1), alpha=scale
        )
    return scores


def _product(probabilities: Tensor, values: Tensor, out: Tensor) -> None:
    """Write their product into ``out``, without a copy where that is float32 too.

    For one token each call that starts all threads shows, so there are as few as can be.
    """
    if out.dtype == probabilities.dtype:
        torch.bmm(probabilities, values, out=out)
    else:
        out.copy_(torch.bmm(probabilities, values))
