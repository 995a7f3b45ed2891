"""Cases of index queries and keys that are fp8 already, their scales in the weights (class D)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import cache_layouts
from . import _oracle
from ._adapters import Adapters
from ._case import Case, Size
from ._cases_topk import select
from ._faults import Arguments, replacing
from ._inputs import IndexInputs, index_inputs


def _operands(adapters: Adapters, size: Size) -> IndexInputs:
    """Whole numbers of at most 8, so that no order or precision of sums changes a score.

    Heads differ by powers of two, and with them the scale that each would be quantised with.
    """
    if not adapters.fp8_operands:
        raise NotImplementedError("fp8 queries and keys are not served")
    inputs = index_inputs(adapters, [0] * size.rows, [size.keys] * size.rows)
    head = torch.arange(inputs.q.shape[1], device=adapters.device) % 4
    return inputs._replace(
        q=(_whole(inputs.q) * 0.5 ** head[:, None]).to(cache_layouts.FP8),
        k=_whole(inputs.k).to(cache_layouts.FP8),
        weights=_whole(64 * inputs.weights) / 8,
    )


def _whole(x: Tensor) -> Tensor:
    return (3 * x.float()).round().clamp(-8, 8)


def _check_scores(adapters: Adapters, size: Size) -> None:
    inputs = _operands(adapters, size)
    _oracle.assert_scores(adapters, adapters.function("scores")(*inputs), inputs)


def _check_selection(adapters: Adapters, size: Size) -> None:
    inputs = _operands(adapters, size)
    _oracle.assert_selection(adapters, select(adapters, inputs, size.topk), inputs, size.topk)


def _quantised_again(a: Arguments) -> Tensor:
    """With a scale that reaches no weight."""
    return cache_layouts.quantise_index_key(a["q"])[0]


CASES = (
    Case(
        "fp8 queries and keys are scored as the numbers that they are",
        rules=("C10", "C18"),
        classes=("D17",),
        needs=("scores",),
        check=_check_scores,
        fault=replacing("scores", q=_quantised_again),
    ),
    Case(
        "a selection of fp8 queries and keys takes the highest scores of these numbers",
        rules=("C10", "C18"),
        classes=("D17",),
        needs=("select",),
        check=_check_selection,
        fault=replacing("select", q=_quantised_again),
    ),
)
