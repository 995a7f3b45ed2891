"""Cases of attention over selected rows: lanes, empty rows, LSE, scale (classes B, C and D)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _faults_attend as faults
from . import _oracle
from ._adapters import Adapters
from ._case import Case, Size
from ._faults import after, around, replacing
from ._inputs import AttendInputs, attend_inputs, lanes, random_lanes

Attention = tuple[Tensor, Tensor]


def attend(adapters: Adapters, inputs: AttendInputs) -> Attention:
    """What the adapter returns."""
    result: Attention = adapters.function("attend")(*inputs)
    return result


def check_attention(adapters: Adapters, inputs: AttendInputs) -> None:
    """Attend, and hold the result to the exact one."""
    _oracle.assert_attention(adapters, attend(adapters, inputs), inputs)


def random_inputs(adapters: Adapters, size: Size, **options: Any) -> AttendInputs:
    """Rows of holes, of which the first starts at key 0 and the last at key 3."""
    keys = size.keys
    ks = [3 * row // max(1, size.rows - 1) for row in range(size.rows)]
    table = random_lanes(adapters, size.rows, keys - 3, size.topk)
    return attend_inputs(adapters, table, ks, keys, **options)


def _check_value(adapters: Adapters, size: Size) -> None:
    for dtype in adapters.dtypes:
        for heads in size.heads:
            check_attention(adapters, random_inputs(adapters, size, dtype=dtype, heads=heads))


def _check_holes(adapters: Adapters, size: Size) -> None:
    """-1 first, in the middle and last, in a request that lies behind another one."""
    table = lanes(adapters, [[-1, 3, -1, 5], [7, -1, -1, 0], [-1, -1, -1, 2], [4, 1, 6, -1]], 6)
    check_attention(adapters, attend_inputs(adapters, table, [8] * 4, 16))


def _check_empty_rows(adapters: Adapters, size: Size) -> None:
    table = random_lanes(adapters, 4, 20, size.topk)
    table[0], table[2] = -1, -1
    check_attention(adapters, attend_inputs(adapters, table, [0, 5, 5, 0], 32))


def _check_leading_gap(adapters: Adapters, size: Size) -> None:
    """The first keys of a row stand behind a whole tile of empty lanes, in rows of both orders."""
    width = min(256, 2 * max(size.widths))
    table = torch.full((3, width), -1, dtype=torch.int32, device=adapters.device)
    table[0, -3:] = torch.tensor([2, 9, 4], device=adapters.device, dtype=torch.int32)
    table[1, width // 2] = 7
    table[2, 0] = 1
    check_attention(adapters, attend_inputs(adapters, table, [0] * 3, 12))


def _check_unread_rows(adapters: Adapters, size: Size) -> None:
    """The first, the last and other rows are never selected, and hold NaN."""
    table = random_lanes(adapters, size.rows, size.keys - 2, size.topk)
    inputs = attend_inputs(adapters, table, [1] * size.rows, size.keys)
    unread = torch.ones(size.keys, dtype=torch.bool, device=adapters.device)
    unread[(table + 1)[table >= 0].long()] = False
    kv = inputs.kv.masked_fill(unread[:, None], math.nan)
    _oracle.assert_attention(adapters, attend(adapters, inputs._replace(kv=kv)), inputs)


def _check_widths(adapters: Adapters, size: Size) -> None:
    for width in size.widths:
        table = random_lanes(adapters, 2, width + 7, width, holes=False)
        check_attention(adapters, attend_inputs(adapters, table, [0, 0], width + 7))


def _check_order(adapters: Adapters, size: Size) -> None:
    table = random_lanes(adapters, size.rows, size.keys, size.topk, holes=False)
    inputs = attend_inputs(adapters, table, [0] * size.rows, size.keys)
    for order in (inputs.indices, inputs.indices.flip(1), inputs.indices.sort(dim=1).values):
        changed = inputs._replace(indices=order.contiguous())
        _oracle.assert_attention(adapters, attend(adapters, changed), inputs)


def _check_more_lanes_than_keys(adapters: Adapters, size: Size) -> None:
    for keys in (1, 2, 7):
        table = lanes(adapters, [list(range(keys))] * 2, size.topk)
        check_attention(adapters, attend_inputs(adapters, table, [0, 0], keys))


def _check_large_logits(adapters: Adapters, size: Size) -> None:
    for dtype in adapters.dtypes:
        inputs = random_inputs(adapters, size, dtype=dtype, magnitude=12.0)
        out, lse = attend(adapters, inputs)
        held = (inputs.indices >= 0).any(dim=1)
        assert bool(out.isfinite().all()), "large logits give NaN or an infinity"
        assert not adapters.returns_lse or bool(lse[held].isfinite().all()), "an lse is not finite"
    check_attention(adapters, random_inputs(adapters, size, magnitude=12.0))


CASES = (
    Case(
        "attention is softmax over the selected rows, scaled as the caller says",
        rules=("C18",),
        classes=("A13", "D11"),
        needs=("attend",),
        check=_check_value,
        fault=replacing("attend", scale=lambda a: a["q"].shape[-1] ** -0.5),
    ),
    Case(
        "a value is the leading part of a row",
        rules=("C18",),
        classes=("A13",),
        needs=("attend",),
        check=_check_value,
        fault=replacing(
            "attend", kv=lambda a: a["kv"].roll(1, dims=1), q=lambda a: a["q"].roll(1, dims=2)
        ),
    ),
    Case(
        "the log-sum-exp is a natural logarithm",
        rules=("C12",),
        classes=("H3", "H5"),
        needs=("attend",),
        check=_check_value,
        fault=after("attend", lambda result, a: (result[0], result[1] / math.log(2))),
    ),
    Case(
        "any number of heads is served whole",
        rules=("C23",),
        classes=("I8",),
        needs=("attend",),
        check=_check_value,
        fault=after("attend", faults.drops_an_odd_head),
    ),
    Case(
        "-1 in any lane is no key, and no address",
        rules=("C8",),
        classes=("B2", "B7", "B11"),
        needs=("attend",),
        check=_check_holes,
        fault=around("attend", faults.reads_empty_lanes),
    ),
    Case(
        "lanes behind a gap still count",
        rules=("C8",),
        classes=("B11",),
        needs=("attend",),
        check=_check_holes,
        fault=replacing("attend", indices=faults.stops_at_the_first_gap),
    ),
    Case(
        "a row without keys gives 0 and an LSE of -inf",
        rules=("C12",),
        classes=("B5", "B6"),
        needs=("attend",),
        check=_check_empty_rows,
        fault=around("attend", faults.averages_where_empty),
    ),
    Case(
        "a row without keys gives no NaN",
        rules=("C12",),
        classes=("B4", "B5"),
        needs=("attend",),
        check=_check_empty_rows,
        fault=around("attend", faults.nan_where_empty),
    ),
    Case(
        "a leading tile without keys does no harm",
        rules=("C12",),
        classes=("B4",),
        needs=("attend",),
        check=_check_leading_gap,
        fault=around("attend", faults.online_without_guard),
    ),
    Case(
        "what a row holds that is not selected reaches nothing",
        rules=("C8", "C13"),
        classes=("B1", "E7"),
        needs=("attend",),
        check=_check_unread_rows,
        fault=around("attend", faults.multiplies_by_zero),
    ),
    Case(
        "every lane of any width is read",
        rules=("C8",),
        classes=("B10", "I8"),
        needs=("attend",),
        check=_check_widths,
        fault=replacing("attend", indices=faults.loses_the_last_tile),
    ),
    Case(
        "the order of the lanes does not matter",
        rules=("C8",),
        classes=("C7",),
        needs=("attend",),
        check=_check_order,
        fault=replacing("attend", indices=faults.wants_ascending_lanes),
    ),
    Case(
        "more lanes than keys do not count keys twice",
        rules=("C8",),
        classes=("B1", "B8"),
        needs=("attend",),
        check=_check_more_lanes_than_keys,
        fault=around("attend", faults.reads_the_empty_tail),
    ),
    Case(
        "large logits give no NaN",
        rules=("C12",),
        classes=("D20",),
        needs=("attend",),
        check=_check_large_logits,
        fault=around("attend", faults.without_maximum),
    ),
)
