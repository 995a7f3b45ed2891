"""Cases of single rows: width, short and empty rows, masks, heads (classes A, B, C and I)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import ops
from . import _oracle
from ._adapters import Adapters, Function
from ._case import Case, Size
from ._cases_topk import select
from ._faults import Arguments, after, around, replacing, scores_of
from ._inputs import IndexInputs, index_inputs, normal, prompt


def check_selection(
    adapters: Adapters, inputs: IndexInputs, topk: int, bound: int | None = None
) -> None:
    """Select, and hold the selection to the exact scores."""
    idx = select(adapters, inputs, topk, bound)
    _oracle.assert_selection(adapters, idx, inputs, topk)


def _check_width(adapters: Adapters, size: Size) -> None:
    for keys in (1, 2, 7, 8, 9, 33):
        ks, ke = prompt([min(size.rows, keys)], cached=keys - min(size.rows, keys))
        check_selection(adapters, index_inputs(adapters, ks, ke), 8)


def _check_widths(adapters: Adapters, size: Size) -> None:
    for topk in size.widths:
        keys = topk + topk // 2 + 5
        check_selection(adapters, index_inputs(adapters, [0, 0, 2], [keys, topk, keys]), topk)


def _check_heads(adapters: Adapters, size: Size) -> None:
    for heads in size.heads:
        ends = [size.keys, size.topk, size.keys - 1]
        check_selection(adapters, index_inputs(adapters, [0] * 3, ends, heads=heads), size.topk)


def _check_short_rows(adapters: Adapters, size: Size) -> None:
    """Rows of 0 to K keys, some beside long ones, whose scores are all NaN."""
    topk = size.topk
    ks, ke = [0, 3, 5, 9, 4, 0], [topk, 3, 6, 9 + topk // 2, 4 + topk, size.keys]
    inputs = index_inputs(adapters, ks, ke, keys=size.keys)
    q = inputs.q.clone()
    q[:5] = math.nan
    idx = select(adapters, inputs._replace(q=q), topk)
    _oracle.assert_form(adapters, idx, inputs, topk)
    check_selection(adapters, inputs.rows(slice(5, 6)), topk)


def _check_long_beside_short(adapters: Adapters, size: Size) -> None:
    ends = [2] * (size.rows - 1) + [size.keys]
    check_selection(adapters, index_inputs(adapters, [0] * size.rows, ends), size.topk)


def _check_empty_rows(adapters: Adapters, size: Size) -> None:
    inputs = index_inputs(adapters, [0, 7, 9, 4], [0, 3, 9, 4], keys=size.keys)
    idx = select(adapters, inputs, size.topk)
    assert bool((idx == -1).all()), f"a row without keys selects {idx[idx != -1].tolist()}"


def _check_no_rows(adapters: Adapters, size: Size) -> None:
    for rows, keys in ((0, size.keys), (3, 0), (0, 0)):
        check_selection(
            adapters, index_inputs(adapters, [0] * rows, [keys] * rows, keys=keys), size.topk
        )


def _check_mask(adapters: Adapters, size: Size) -> None:
    ks, ke = prompt([3, size.rows - 3], cached=2 * size.topk)
    inputs = index_inputs(adapters, ks, ke)
    holes = normal(adapters, len(ks), inputs.k.shape[0], seed=9) > -0.5
    check_selection(adapters, inputs._replace(mask=holes), size.topk)


def _check_mask_of_few(adapters: Adapters, size: Size) -> None:
    """Intervals longer than K of which the mask leaves at most K keys, and in one row none."""
    inputs = index_inputs(adapters, [2] * 4, [size.keys] * 4)
    mask = torch.zeros(4, size.keys, dtype=torch.bool, device=adapters.device)
    for row, step in enumerate((7, 9, 31)):
        mask[row, row::step] = True
    q = inputs.q.clone().fill_(math.nan)
    inputs = inputs._replace(mask=mask)
    idx = select(adapters, inputs._replace(q=q), size.topk)
    _oracle.assert_form(adapters, idx, inputs, size.topk)


def _as_wide_as_keys(result: Tensor, a: Arguments) -> Tensor:
    return result[:, : a["k"].shape[0]]


def _next_power_of_two_only(right: Function, a: Arguments) -> Tensor:
    """A width that is no power of two is served by the next lower one."""
    topk = a["topk"]
    found = right(*{**a, "topk": 1 << (topk.bit_length() - 1)}.values())
    return torch.nn.functional.pad(found, (0, topk - found.shape[1]), value=-1)


def _scores_short_rows(right: Function, a: Arguments) -> Tensor:
    """No closed form, and a NaN score is no key."""
    scores = scores_of(a)
    seen = ~scores.isnan()
    return ops.select_topk(scores, a["ks"], a["ke"], a["topk"], seen)


def _closed_by_the_mean(right: Function, a: Arguments) -> Any:
    if float((a["ke"] - a["ks"]).float().mean()) <= a["topk"]:
        return ops.causal_positions(a["ks"], a["ke"], a["max_kv_len"], a["topk"])
    return right(*a.values())


def _even_heads(a: Arguments) -> Tensor:
    """Heads are taken in pairs, and an odd one is left over."""
    weights: Tensor = a["weights"]
    head = torch.arange(weights.shape[1], device=weights.device)
    return weights * (head < weights.shape[1] // 2 * 2)


def _mask_by_position(a: Arguments) -> Tensor:
    mask: Tensor = a["mask"]
    column = torch.arange(mask.shape[1], device=mask.device)
    return mask.gather(1, (column - a["ks"][:, None]).clamp(min=0).long())


def _closed_in_spite_of_a_mask(right: Function, a: Arguments) -> Tensor:
    """Rows with few visible keys get the closed form of an interval."""
    return ops.causal_positions(a["ks"], a["ke"], a["max_kv_len"], a["topk"])


def _zero_where_empty(result: Tensor, a: Arguments) -> Tensor:
    result = result.clone()
    if result.numel():
        result[a["ks"] >= a["ke"], 0] = 0
    return result


def _one_row_at_least(result: Tensor, a: Arguments) -> Tensor:
    return result if result.shape[0] else result.new_full((1, a["topk"]), -1)


CASES = (
    Case(
        "a selection is K wide whatever the number of keys",
        rules=("C8",),
        classes=("B8", "I9"),
        needs=("select",),
        check=_check_width,
        fault=after("select", _as_wide_as_keys),
    ),
    Case(
        "a width need not be a power of two",
        rules=("C8", "C23"),
        classes=("B10", "I8"),
        needs=("select",),
        check=_check_widths,
        fault=around("select", _next_power_of_two_only),
    ),
    Case(
        "any number of index heads is summed whole",
        rules=("C18", "C23"),
        classes=("I8",),
        needs=("select",),
        check=_check_heads,
        fault=replacing("select", weights=_even_heads),
    ),
    Case(
        "a row of at most K keys selects all of them without a look at their scores",
        rules=("C8", "C10"),
        classes=("A7", "C4"),
        needs=("select",),
        check=_check_short_rows,
        fault=around("select", _scores_short_rows),
    ),
    Case(
        "one long row among short ones is scored",
        rules=("C1", "C10"),
        classes=("A5",),
        needs=("select",),
        check=_check_long_beside_short,
        fault=around("select", _closed_by_the_mean),
    ),
    Case(
        "a row without keys selects nothing",
        rules=("C12",),
        classes=("B5", "I2"),
        needs=("select",),
        check=_check_empty_rows,
        fault=after("select", _zero_where_empty),
    ),
    Case(
        "no rows or no keys give an empty selection",
        rules=("C8", "C12"),
        classes=("I1", "I2"),
        needs=("select",),
        check=_check_no_rows,
        fault=after("select", _one_row_at_least),
    ),
    Case(
        "a mask with holes hides keys by their packed column",
        rules=("C13",),
        classes=("E8",),
        needs=("select",),
        check=_check_mask,
        fault=replacing("select", mask=_mask_by_position),
    ),
    Case(
        "where a mask leaves at most K keys, all of them are selected",
        rules=("C8", "C13"),
        classes=("E8",),
        needs=("select",),
        check=_check_mask_of_few,
        fault=around("select", _closed_in_spite_of_a_mask),
    ),
)
