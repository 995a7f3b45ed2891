"""Cases of exact selection: ties, precision of the ranks, infinities, NaN, order (class C)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from .. import ops
from . import _oracle
from ._adapters import Adapters, Function
from ._case import Case, Size
from ._faults import (
    Arguments,
    around,
    in_batch_invariant_mode,
    replacing,
    rescored,
    scores_of,
)
from ._inputs import INF, NAN, IndexInputs, index_inputs, spelled


def select(adapters: Adapters, inputs: IndexInputs, topk: int, bound: int | None = None) -> Tensor:
    """A selection, with the tightest ``max_kv_len`` unless a looser ``bound`` is given."""
    q, k, weights, ks, ke, mask = inputs
    bound = inputs.longest if bound is None else bound
    result: Tensor = adapters.function("select")(q, k, weights, ks, ke, bound, topk, mask)
    return result


def _spell_and_select(
    adapters: Adapters, scores: list[float], topk: int, ks: int = 0, ke: int | None = None
) -> None:
    ends = [len(scores) if ke is None else ke] * 2
    inputs = spelled(adapters, scores, [ks] * 2, ends)
    _oracle.assert_exact(adapters, select(adapters, inputs, topk), inputs, topk, scores)


def _check_plateau(adapters: Adapters, size: Size) -> None:
    keys = size.keys
    scores = [0.0] * keys
    scores[keys // 2], scores[3], scores[keys - 1] = 2.0, 1.0, -1.0
    _spell_and_select(adapters, scores, size.topk)


def _check_signed_zero(adapters: Adapters, size: Size) -> None:
    _spell_and_select(adapters, [-1.0, -0.0, 0.0, -0.0, 0.0, -2.0, 1.0], 3)


def _check_many_ties(adapters: Adapters, size: Size) -> None:
    """A threshold bin of 1500, whose lowest positions win."""
    scores = [1.0] * 1500
    scores[700] = 2.0
    _spell_and_select(adapters, scores, min(256, max(size.widths)))


def _check_full_bucket(adapters: Adapters, size: Size) -> None:
    """1500 scores with one float16 rendering; the highest ones come last."""
    scores = [1 + index * 2.0**-23 for index in range(1500)]
    _spell_and_select(adapters, scores, size.topk)


def _check_one_step_apart(adapters: Adapters, size: Size) -> None:
    keys = size.keys
    order = [(37 * key) % keys for key in range(keys)]
    scores = [3.0 + rank * 2.0**-22 for rank in order]
    _spell_and_select(adapters, scores, size.topk)


def _check_beyond_float16(adapters: Adapters, size: Size) -> None:
    scores = [-2e6] * 9
    scores[7], scores[4], scores[1] = -9e4, -8e4, -7.5e4
    _spell_and_select(adapters, scores, 2)
    _spell_and_select(adapters, [7e4, 1e5, 6.9e4, 2e5, 8e4], 2)


def _check_visible_infinity(adapters: Adapters, size: Size) -> None:
    """Three finite scores among 44 visible keys of 64; the next keys are visible -inf."""
    for start in (0, 5):
        scores = [-INF] * 64
        for key in (0, 1, 2, start + 9):
            scores[key] = 1.0 + key
        scores[60] = 99.0
        _spell_and_select(adapters, scores, 12, ks=start, ke=start + 44)


def _check_plus_infinity(adapters: Adapters, size: Size) -> None:
    _spell_and_select(adapters, [1.0, INF, 3.0, INF, -INF, 2.0], 3)


def _check_nan(adapters: Adapters, size: Size) -> None:
    scores = [NAN, 4.0, -INF, NAN, 1.0, 2.0, -INF, 3.0, NAN, 5.0]
    for topk in (4, 6, 8, 9):
        _spell_and_select(adapters, scores, topk)


def _check_unseen_maximum(adapters: Adapters, size: Size) -> None:
    """The highest scores of all lie just outside the interval."""
    scores = [float(key % 7) for key in range(size.keys)]
    scores[4], scores[size.keys - 3] = 100.0, 100.0
    _spell_and_select(adapters, scores, size.topk, ks=5, ke=size.keys - 3)


def _check_repeats(adapters: Adapters, size: Size) -> None:
    scores = [float(key % 3 == 0) for key in range(size.keys)]
    inputs = spelled(adapters, scores, [0] * size.rows, [size.keys] * size.rows)
    first = select(adapters, inputs, size.topk)
    for _ in range(size.repeats):
        again = select(adapters, inputs, size.topk)
        assert torch.equal(first, again), "the same call gives another selection"


def _check_precise_order(adapters: Adapters, size: Size) -> None:
    for dtype in adapters.dtypes:
        for heads in size.heads:
            ks, ke = [0] * size.rows, [size.keys] * size.rows
            inputs = index_inputs(adapters, ks, ke, heads=heads, dtype=dtype)
            idx = select(adapters, inputs, size.topk)
            _oracle.assert_selection(adapters, idx, inputs, size.topk)


def _check_batch_invariance(adapters: Adapters, size: Size) -> None:
    mode = adapters.batch_invariant
    if mode is None or mode.select is None:
        raise NotImplementedError("no batch-invariant mode is declared")
    inputs = index_inputs(mode, [0] * size.rows, [size.keys] * size.rows)
    # All keys are nearly one key, so that the roundings of a score decide on its rank.
    inputs = inputs._replace(k=(inputs.k[:1] + 1e-6 * inputs.k).contiguous())
    whole = select(mode, inputs, size.topk)
    for row in range(size.rows):
        for first in {row, max(0, row - 1), 0}:
            part = select(mode, inputs.rows(slice(first, row + 1)), size.topk)
            assert torch.equal(part[-1], whole[row]), f"row {row} depends on its batch"


def _check_very_long(adapters: Adapters, size: Size) -> None:
    keys = 131_073
    scores = [0.0] * keys
    for rank, key in enumerate((12, 65_537, 90_000, keys - 4)):
        scores[key] = 1.0 + rank
    inputs = spelled(adapters, scores, [0], [keys])
    for topk in (4, 2048):
        _oracle.assert_exact(adapters, select(adapters, inputs, topk), inputs, topk, scores)


def _tie_cap(scores: Tensor, a: Arguments) -> Tensor:
    """A bin keeps the last 1024 of its arrivals."""
    bucket = scores == scores.median(dim=1, keepdim=True).values
    arrival = bucket.sum(dim=1, keepdim=True) - bucket.cumsum(dim=1)
    return scores.masked_fill(bucket & (arrival >= 1024), -math.inf)


def _bucket_cap(scores: Tensor, a: Arguments) -> Tensor:
    """A bin of equal float16 keys keeps its first 1024 arrivals."""
    bucket = scores.half() == scores.half()[:, :1]
    return scores.masked_fill(bucket & (bucket.cumsum(dim=1) > 1024), -math.inf)


def _later_wins(right: Function, a: Arguments) -> Tensor:
    """Ranks from the last key to the first."""
    scores = scores_of(a)
    keys = scores.shape[1]
    ks, ke = keys - a["ke"], keys - a["ks"]
    found = ops.select_topk(scores.flip(1).contiguous(), ks, ke, a["topk"])
    width = (a["ke"] - a["ks"])[:, None]
    return ops.compact(torch.where(found >= 0, width - 1 - found, -1))


def _padding_wins(right: Function, a: Arguments) -> Tensor:
    """Lanes outside the interval hold the lowest finite number and compete."""
    scores = scores_of(a)
    seen = _oracle.visible(a["ks"], a["ke"], scores.shape[1], a["mask"])
    scores = scores.masked_fill(~seen, torch.finfo(torch.float32).min)
    everything = torch.zeros_like(a["ks"]), torch.full_like(a["ke"], scores.shape[1])
    found = ops.select_topk(scores, *everything, a["topk"])
    return ops.compact(found - a["ks"][:, None])


def _drops_nan(right: Function, a: Arguments) -> Tensor:
    scores = scores_of(a)
    return ops.select_topk(scores, a["ks"], a["ke"], a["topk"], ~scores.isnan())


def _sixteen_bit_positions(right: Function, a: Arguments) -> Tensor:
    found = right(*a.values())
    return ops.compact(torch.where(found >= 0, found & 0xFFFF, -1))


def _unstable_ties(adapters: Adapters) -> Adapters:
    calls = itertools.count()

    def body(right: Function, a: Arguments) -> Any:
        return _later_wins(right, a) if next(calls) % 2 else right(*a.values())

    return around("select", body)(adapters)


def _sums_by_batch(right: Function, a: Arguments) -> Any:
    """The order of summation follows the number of rows."""
    if a["q"].shape[0] > 1:
        a["q"], a["k"] = a["q"].flip(2), a["k"].flip(1)
    return right(*a.values())


CASES = (
    Case(
        "on a plateau of equal scores the lowest positions win",
        rules=("C10",),
        classes=("C1", "C7"),
        needs=("select",),
        check=_check_plateau,
        fault=around("select", _later_wins),
        exact=True,
    ),
    Case(
        "minus zero and zero are equal scores",
        rules=("C10",),
        classes=("C1",),
        needs=("select",),
        check=_check_signed_zero,
        fault=around("select", _later_wins),
        exact=True,
    ),
    Case(
        "more than 1024 tied keys keep the lowest of them",
        rules=("C10",),
        classes=("C1",),
        needs=("select",),
        check=_check_many_ties,
        fault=rescored(_tie_cap),
        exact=True,
    ),
    Case(
        "more than 1024 keys that float16 cannot tell apart keep the highest of them",
        rules=("C10",),
        classes=("C2",),
        needs=("select",),
        check=_check_full_bucket,
        fault=rescored(_bucket_cap),
        exact=True,
    ),
    Case(
        "scores one float32 step apart keep their order",
        rules=("C10",),
        classes=("C2",),
        needs=("select",),
        check=_check_one_step_apart,
        fault=rescored(lambda scores, a: scores.half().float()),
        exact=True,
    ),
    Case(
        "scores beyond the range of float16 keep their order",
        rules=("C10",),
        classes=("C5",),
        needs=("select",),
        check=_check_beyond_float16,
        fault=rescored(lambda scores, a: scores.clamp(-65504, 65504)),
        exact=True,
    ),
    Case(
        "a visible -inf is a key and no padding lane beats it",
        rules=("C10", "C13"),
        classes=("C3", "C5"),
        needs=("select",),
        check=_check_visible_infinity,
        fault=around("select", _padding_wins),
        exact=True,
    ),
    Case(
        "plus infinity is the highest score",
        rules=("C10",),
        classes=("C1",),
        needs=("select",),
        check=_check_plus_infinity,
        fault=rescored(lambda scores, a: scores.nan_to_num(posinf=0.0)),
        exact=True,
    ),
    Case(
        "NaN ranks below -inf",
        rules=("C10",),
        classes=("C4",),
        needs=("select",),
        check=_check_nan,
        fault=rescored(lambda scores, a: scores.nan_to_num(nan=INF, neginf=-INF)),
        exact=True,
    ),
    Case(
        "a NaN score still makes a key, so the count is right",
        rules=("C10",),
        classes=("C4",),
        needs=("select",),
        check=_check_nan,
        fault=around("select", _drops_nan),
        exact=True,
    ),
    Case(
        "the highest scores of all are not taken from outside the interval",
        rules=("C13",),
        classes=("C3", "E12"),
        needs=("select",),
        check=_check_unseen_maximum,
        fault=replacing(
            "select", ke=lambda a: a["ke"] + 1, max_kv_len=lambda a: a["max_kv_len"] + 1
        ),
        exact=True,
    ),
    Case(
        "repeating a selection gives the same bits",
        rules=("C10", "C11"),
        classes=("C7",),
        needs=("select",),
        check=_check_repeats,
        fault=_unstable_ties,
    ),
    Case(
        "a selection takes the keys of the highest exact scores",
        rules=("C10", "C18"),
        classes=("C8", "D11", "D13"),
        needs=("select",),
        check=_check_precise_order,
        fault=rescored(lambda scores, a: scores.bfloat16().float()),
    ),
    Case(
        "in batch-invariant mode a row selects the same alone and in any batch",
        rules=("C11",),
        classes=("C7",),
        needs=("select",),
        check=_check_batch_invariance,
        fault=in_batch_invariant_mode(around("select", _sums_by_batch)),
    ),
    Case(
        "positions beyond 65 535 and 131 072 are found",
        rules=("C9", "C10"),
        classes=("C6", "I7"),
        needs=("select",),
        check=_check_very_long,
        fault=around("select", _sixteen_bit_positions),
        exact=True,
        sizes=("full",),
    ),
)
