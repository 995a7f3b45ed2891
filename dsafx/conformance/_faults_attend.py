"""Faulty attention: what public kernels did with lanes, empty rows, scale and LSE."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ._adapters import Adapters, Function
from ._faults import Arguments, around

Attention = tuple[Tensor, Tensor]


def _gathered(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, N, K], rows [T, K, L + R] and which lanes hold a key."""
    held = a["indices"] >= 0
    rows = a["kv"][torch.where(held, a["indices"] + a["ks"][:, None], 0).long()].float()
    return a["q"].float() @ rows.transpose(1, 2) * a["scale"], rows, held


def _finish(a: Arguments, probabilities: Tensor, rows: Tensor, lse: Tensor) -> Attention:
    return (probabilities @ rows[..., : a["v_dim"]]).to(a["q"].dtype), lse


def reads_empty_lanes(right: Function, a: Arguments) -> Attention:
    """-1 is added to the row's start, and names the last token of the request before it."""
    key = (a["indices"] + a["ks"][:, None]).clamp(min=0)
    result: Attention = right(*{**a, "indices": key, "ks": torch.zeros_like(a["ks"])}.values())
    return result


def stops_at_the_first_gap(a: Arguments) -> Tensor:
    """Lanes are taken for a compact prefix."""
    return torch.where((a["indices"] < 0).cumsum(dim=1) > 0, -1, a["indices"])


def nan_where_empty(right: Function, a: Arguments) -> Attention:
    """A softmax over -inf alone."""
    if not a["kv"].shape[0]:
        result: Attention = right(*a.values())
        return result
    logits, rows, held = _gathered(a)
    logits = logits.masked_fill(~held[:, None], -math.inf)
    return _finish(a, logits.softmax(-1), rows, logits.logsumexp(-1))


def averages_where_empty(right: Function, a: Arguments) -> Attention:
    """A finite minimum instead of -inf."""
    if not a["kv"].shape[0]:
        result: Attention = right(*a.values())
        return result
    logits, rows, held = _gathered(a)
    logits = logits.masked_fill(~held[:, None], torch.finfo(torch.float32).min)
    return _finish(a, logits.softmax(-1), rows, logits.logsumexp(-1))


def online_without_guard(right: Function, a: Arguments) -> Attention:
    """An online softmax whose running maximum starts at -inf: a first tile without keys is NaN."""
    logits, rows, held = _gathered(a)
    logits = logits.masked_fill(~held[:, None], -math.inf)
    values = rows[..., : a["v_dim"]]
    top = logits.new_full(logits.shape[:2], -math.inf)
    total, out = torch.zeros_like(top), values.new_zeros(*top.shape, values.shape[2])
    for first in range(0, logits.shape[2], 64):
        tile = logits[..., first : first + 64]
        now = torch.maximum(top, tile.amax(-1))
        weights, shrink = (tile - now[..., None]).exp(), (top - now).exp()
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + weights @ values[:, first : first + 64]
        top = now
    return (out / total[..., None]).to(a["q"].dtype), top + total.log()


def without_maximum(right: Function, a: Arguments) -> Attention:
    """Exponentials of the logits as they are."""
    logits, rows, held = _gathered(a)
    weights = logits.exp() * held[:, None]
    total = weights.sum(-1)
    return _finish(a, weights / total[..., None].clamp(min=1e-30), rows, total.log())


def multiplies_by_zero(right: Function, a: Arguments) -> Attention:
    """All rows are read, and those that are not selected weighted by 0."""
    q, kv = a["q"].float(), a["kv"].float()
    key = torch.where(a["indices"] >= 0, a["indices"] + a["ks"][:, None], kv.shape[0]).long()
    chosen = torch.zeros(q.shape[0], kv.shape[0] + 1, dtype=torch.bool, device=q.device)
    chosen = chosen.scatter_(1, key, True)[:, None, :-1]
    logits = (q @ kv.T * a["scale"]).masked_fill(~chosen, -math.inf)
    lse = logits.logsumexp(-1)
    weights = torch.where(chosen, (logits - lse[..., None]).exp(), 0.0)
    return (weights @ kv[:, : a["v_dim"]]).to(a["q"].dtype), lse


def loses_the_last_tile(a: Arguments) -> Tensor:
    """Lanes beyond the last whole tile of 16 are not read."""
    width = a["indices"].shape[1]
    lane = torch.arange(width, device=a["indices"].device)
    return torch.where(lane < width // 16 * 16, a["indices"], -1)


def wants_ascending_lanes(a: Arguments) -> Tensor:
    """A position below its predecessor is taken for padding."""
    before = a["indices"].cummax(dim=1).values if a["indices"].numel() else a["indices"]
    return torch.where(a["indices"] < before, -1, a["indices"])


def reads_the_empty_tail(right: Function, a: Arguments) -> Attention:
    """All K lanes are read, the empty ones as key 0."""
    result: Attention = right(*{**a, "indices": a["indices"].clamp(min=0)}.values())
    return result


def drops_an_odd_head(result: Attention, a: Arguments) -> Attention:
    heads = result[0].shape[1]
    out = result[0].clone()
    if heads % 2:
        out[:, -1] = 0
    return out, result[1]


def one_row_at_least(result: Attention, a: Arguments) -> Attention:
    out, lse = result
    return (out, lse) if out.shape[0] else (out.new_zeros(1, *out.shape[1:]), lse)


def clamps_in_place(right: Function, a: Arguments) -> Any:
    result = right(*a.values())
    a["indices"].clamp_(min=0)
    return result


def unfilled_output(right: Function, a: Arguments) -> Attention:
    """Rows without keys are left as they were allocated."""
    out, lse = right(*a.values())
    buffer = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    held = (a["indices"] >= 0).any(dim=1)[:, None, None]
    return torch.where(held, out, buffer), lse


def splits_by_batch(right: Function, a: Arguments) -> Any:
    """More than one row is computed in two halves of the lanes, which are merged."""
    if a["q"].shape[0] < 2:
        return right(*a.values())
    width = a["indices"].shape[1] // 2
    parts = (a["indices"][:, :width], a["indices"][:, width:])
    first, second = (right(*{**a, "indices": part.contiguous()}.values()) for part in parts)
    return ops.merge_attention(*first, *second)


def splits_every_other_call(adapters: Adapters) -> Adapters:
    """Every other call splits its sum."""
    calls = itertools.count()

    def body(right: Function, a: Arguments) -> Any:
        if next(calls) % 2:
            return splits_by_batch(right, a)
        return right(*a.values())

    return around("attend", body)(adapters)
