"""``select_topk``: the selection of given scores, one program a row."""

from __future__ import annotations

import torch
from torch import Tensor

from .._blocks import check_interval_values
from .radix_select import refusal, select_rows, visible_counts


def supports(scores: Tensor, *args: object) -> str | None:
    """None on every architecture that has a tile."""
    return refusal(scores)


@torch.no_grad()
def run(scores: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None = None) -> Tensor:
    """``select_topk``; a row that sees at most ``topk`` keys is answered without its scores."""
    keys = scores.shape[1]
    check_interval_values(ks, ke, keys)
    ks, ke = ks.contiguous(), ke.contiguous()
    indices = ks.new_empty((ks.shape[0], topk))
    counts = None if mask is None else visible_counts(ks, ke, mask)
    select_rows(indices, scores, ks, ke, keys, keys, mask, counts, absolute=True)
    return indices
