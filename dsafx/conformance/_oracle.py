"""What is right, in float64 and independent of the ops, and how results are held to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import ops
from ..ops import tolerances
from ..ops.cache_layouts import FP8
from ._adapters import Adapters
from ._inputs import AttendInputs, IndexInputs


def visible(ks: Tensor, ke: Tensor, keys: int, mask: Tensor | None = None) -> Tensor:
    """[T, S] bool: the packed keys that each row sees."""
    key = torch.arange(keys, device=ks.device)
    seen = (key >= ks[:, None]) & (key < ke[:, None])
    return seen if mask is None else seen & mask


def scores(inputs: IndexInputs) -> Tensor:
    """[T, S] float64, the score formula of the contract; -inf where a key is not visible."""
    q, k, weights, ks, ke, mask = inputs
    dots = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    exact = torch.einsum("th,ths->ts", weights.double(), dots)
    return exact.masked_fill(~visible(ks, ke, k.shape[0], mask), -math.inf)


def assert_scores(adapters: Adapters, got: Tensor, inputs: IndexInputs) -> None:
    """Scores are float32, within the budget where a key is visible, and -inf elsewhere."""
    q, k, weights, ks, ke, mask = inputs
    assert got.dtype == torch.float32, f"scores are float32, got {got.dtype}"
    assert got.shape == (q.shape[0], k.shape[0]), f"scores are [T, S], got {tuple(got.shape)}"
    seen = visible(ks, ke, k.shape[0], mask)
    hidden = got[~seen]
    assert bool((hidden == -math.inf).all()), "a key that a row does not see has a score"
    budget = tolerances.score_tolerance(
        _rounded_to(adapters, q),
        q.shape[1],
        q.shape[2],
        tolerances.score_magnitude(q, k, weights),
    )
    _assert_within(got[seen].double(), scores(inputs)[seen], budget[seen], "score")


def assert_form(adapters: Adapters, idx: Tensor, inputs: IndexInputs, topk: int) -> Tensor:
    """A selection has the form of C8; returns it in ascending order."""
    assert idx.dtype == torch.int32, f"a selection is int32, got {idx.dtype}"
    wanted = (inputs.q.shape[0], topk)
    assert tuple(idx.shape) == wanted, f"a selection is {wanted}, got {tuple(idx.shape)}"
    ordered = idx if adapters.sorted_ids else ops.compact(idx)
    ops.check_indices(ordered, inputs.ks, inputs.ke, topk, inputs.mask)
    return ordered


def assert_selection(adapters: Adapters, idx: Tensor, inputs: IndexInputs, topk: int) -> None:
    """The K highest visible scores of each row, up to the score margin; recall for fp8."""
    ordered = assert_form(adapters, idx, inputs, topk)
    q, k, weights, ks, ke, mask = inputs
    if k.shape[0] == 0 or q.shape[0] == 0:
        return
    exact = scores(inputs)
    seen = visible(ks, ke, k.shape[0], mask)
    chosen = _chosen(ordered, ks, k.shape[0])
    if adapters.fp8_scores:
        assert_recall(chosen, exact, seen, topk, FP8)
        return
    left_out = seen & ~chosen
    magnitude = tolerances.score_magnitude(q, k, weights).masked_fill(~seen, 0.0).amax(dim=1)
    rounded = _rounded_to(adapters, q)
    margin = tolerances.selection_margin(rounded, q.shape[1], q.shape[2], magnitude)
    worst = exact.masked_fill(~chosen, math.inf).amin(dim=1)
    best = exact.masked_fill(~left_out, -math.inf).amax(dim=1)
    wrong = (worst < best - margin).nonzero().flatten()
    assert not wrong.numel(), (
        f"row {int(wrong[0])} selects a key of score {float(worst[wrong[0]]):.6g} and leaves out"
        f" one of {float(best[wrong[0]]):.6g} ({wrong.numel()} rows are wrong)"
    )


def assert_recall(
    chosen: Tensor, exact: Tensor, seen: Tensor, topk: int, dtype: torch.dtype
) -> None:
    """``chosen`` [T, S] finds the share of the exact selection that ``dtype`` owes.

    A key of the exact selection's lowest score is as good as another.
    """
    ranked = exact.masked_fill(~seen, -math.inf).sort(dim=1, descending=True).values
    enough = ranked[:, min(topk, ranked.shape[1]) - 1, None]
    found, owed = int((chosen & (exact >= enough)).sum()), int(chosen.sum())
    least = tolerances.least_recall(dtype, max(1, owed))
    assert found >= least * owed, (
        f"{found} of {owed} selected keys belong to the exact selection, and {least:.1%} are owed"
    )


def assert_exact(
    adapters: Adapters, idx: Tensor, inputs: IndexInputs, topk: int, spelled: list[float]
) -> None:
    """The selection of exactly known scores: NaN below -inf, the lowest position wins a tie."""
    ordered = assert_form(adapters, idx, inputs, topk).tolist()
    seen = visible(inputs.ks, inputs.ke, len(spelled), inputs.mask).tolist()
    for row, (got, sees) in enumerate(zip(ordered, seen, strict=True)):
        start = int(inputs.ks[row])
        keys = [key for key, shown in enumerate(sees) if shown]
        keys.sort(key=lambda key: (*_rank(spelled[key]), key))
        wanted = sorted(key - start for key in keys[:topk])
        found = [p for p in got if p >= 0]
        ranks = [sorted(_rank(spelled[start + p]) for p in row) for row in (found, wanted)]
        right = found == wanted if adapters.lowest_tie else ranks[0] == ranks[1]
        assert right, f"row {row} selects {found}, and {wanted} is right"


def attention(inputs: AttendInputs) -> tuple[Tensor, Tensor]:
    """float64 out [T, N, v_dim] and lse [T, N] over the lanes that hold a key."""
    q, kv, indices, ks, scale, v_dim = inputs
    out = q.new_zeros((*q.shape[:2], v_dim), dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    for row in range(q.shape[0]):
        held = indices[row][indices[row] >= 0].long() + int(ks[row])
        if held.numel():
            keys = kv[held].double()
            logits = q[row].double() @ keys.T * scale
            lse[row] = logits.logsumexp(-1)
            out[row] = logits.softmax(-1) @ keys[:, :v_dim]
    return out, lse


def assert_attention(adapters: Adapters, got: object, inputs: AttendInputs) -> None:
    """Output and LSE are those of ``attention`` within their budgets; empty rows give 0, -inf."""
    q, kv, indices, ks, scale, v_dim = inputs
    held = indices[indices >= 0]
    rows = (indices + ks[:, None])[indices >= 0].long()
    keys = kv[rows] if held.numel() else kv[:0]
    assert_mha(adapters, got, attention(inputs), q, keys, keys[:, :v_dim], scale, indices.shape[1])


def assert_mha(
    adapters: Adapters,
    got: object,
    exact: tuple[Tensor, Tensor],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    lanes: int,
) -> None:
    """``got`` is (out, lse), within the budgets that follow from the keys that any row reads."""
    assert isinstance(got, tuple | list), f"attention returns (out, lse), got {type(got).__name__}"
    out, lse = got
    assert out.dtype == q.dtype, f"out has the dtype of q, {q.dtype}, got {out.dtype}"
    assert out.shape == exact[0].shape, f"out is {tuple(exact[0].shape)}, got {tuple(out.shape)}"
    if not out.numel():
        return
    longest = float(keys.double().norm(dim=-1).max()) if keys.numel() else 0.0
    value = float(values.double().abs().max()) if values.numel() else 0.0
    logit = scale * float(q.double().norm(dim=-1).max()) * longest
    width = q.shape[-1]
    empty = exact[1] == -math.inf
    assert bool((out[empty] == 0).all()), "a row without keys gives 0"
    budget = tolerances.attention_tolerance(q.dtype, width, lanes, logit, value)
    _assert_within(out.double(), exact[0], torch.full_like(exact[0], budget), "out")
    if not adapters.returns_lse:
        return
    assert lse.dtype == torch.float32, f"lse is float32, got {lse.dtype}"
    assert lse.shape == exact[1].shape, f"lse is {tuple(exact[1].shape)}, got {tuple(lse.shape)}"
    assert bool((lse[empty] == -math.inf).all()), "a row without keys has an lse of -inf"
    size = exact[1][~empty].abs()
    budget_lse = tolerances.lse_tolerance(q.dtype, width, lanes, logit + 0 * size, size)
    _assert_within(lse[~empty].double(), exact[1][~empty], budget_lse, "lse")


def _rounded_to(adapters: Adapters, q: Tensor) -> torch.dtype:
    """What ``tolerances`` are asked for: queries that are given in fp8 are not rounded to it."""
    if adapters.fp8_scores:
        return FP8
    return torch.float32 if q.dtype == FP8 else q.dtype


def _rank(score: float) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(score) else (False, -score)


def _chosen(ordered: Tensor, ks: Tensor, keys: int) -> Tensor:
    """[T, S] bool: the packed keys that positions name."""
    column = torch.where(ordered >= 0, ordered + ks[:, None], keys).long()
    chosen = torch.zeros(ordered.shape[0], keys + 1, dtype=torch.bool, device=ordered.device)
    return chosen.scatter_(1, column, True)[:, :keys]


def _assert_within(got: Tensor, exact: Tensor, budget: Tensor, what: str) -> None:
    error = (got - exact).abs()
    wrong = ~(error <= budget)
    if bool(wrong.any()):
        worst = int(torch.where(error.isnan(), math.inf, error - budget).flatten().argmax())
        raise AssertionError(
            f"{what} is {float(got.flatten()[worst]):.7g} where"
            f" {float(exact.flatten()[worst]):.7g} +- {float(budget.flatten()[worst]):.2g} is"
            f" right ({int(wrong.sum())} of {wrong.numel()} are wrong)"
        )
