"""Float64 references, written as loops over rows: slow, and short enough to be believed."""

from __future__ import annotations

import torch
from torch import Tensor


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def causal_intervals(lengths: list[int], cached: int = 0) -> tuple[Tensor, Tensor]:
    """ks, ke of packed requests: request b has ``cached`` keys and then ``lengths[b]`` new ones."""
    ks, ke, start = [], [], 0
    for length in lengths:
        ks += [start] * length
        ke += [start + cached + row + 1 for row in range(length)]
        start += cached + length
    return int32(*ks), int32(*ke)


def scores_by_hand(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[T, S] float64: ``sum_h w * relu(q . k)``."""
    dots = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    return torch.einsum("th,ths->ts", weights.double(), dots)


def select_by_hand(
    scores: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None = None
) -> list[list[int]]:
    """Ascending positions of the highest scores of each row; the lowest wins a tie."""
    rows = []
    for t in range(scores.shape[0]):
        visible = [s for s in range(int(ks[t]), int(ke[t])) if mask is None or bool(mask[t, s])]
        ordered = sorted(visible, key=lambda s: (-float(scores[t, s]), s))
        rows.append(sorted(s - int(ks[t]) for s in ordered[:topk]))
    return rows


def attend_by_hand(
    q: Tensor, k: Tensor, v: Tensor, keys: list[list[int]], scale: float
) -> tuple[Tensor, Tensor]:
    """float64 out [T, N, V] and lse [T, N], where row t attends to the keys ``keys[t]``."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    for t, chosen in enumerate(keys):
        if chosen:
            scores = torch.einsum("nd,snd->ns", q[t].double(), k[chosen].double()) * scale
            lse[t] = scores.logsumexp(-1)
            out[t] = torch.einsum("ns,snv->nv", scores.softmax(-1), v[chosen].double())
    return out, lse


def padded(rows: list[list[int]], topk: int) -> Tensor:
    """[T, topk] int32 from lists of positions."""
    return torch.tensor([row + [-1] * (topk - len(row)) for row in rows], dtype=torch.int32).view(
        len(rows), topk
    )
