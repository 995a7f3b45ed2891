"""Cases of the score formula: ReLU, head sum, weights, precision, visibility (classes D and E)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _oracle
from ._adapters import Adapters
from ._case import Case, Size
from ._faults import Arguments, after, around, as_if_contiguous, replacing
from ._inputs import IndexInputs, index_inputs, normal, prompt


def _score(adapters: Adapters, inputs: IndexInputs) -> Tensor:
    result: Tensor = adapters.function("scores")(*inputs)
    return result


def _check_formula(adapters: Adapters, size: Size) -> None:
    for dtype in adapters.dtypes:
        for heads in size.heads:
            if heads > 1:  # one head hides a missing ReLU: it then keeps the order
                inputs = index_inputs(
                    adapters, [0] * size.rows, [size.keys] * size.rows, heads=heads, dtype=dtype
                )
                _oracle.assert_scores(adapters, _score(adapters, inputs), inputs)


def _check_one_head(adapters: Adapters, size: Size) -> None:
    inputs = index_inputs(adapters, *prompt([size.rows]), heads=1)
    _oracle.assert_scores(adapters, _score(adapters, inputs), inputs)


def _check_negative_weights(adapters: Adapters, size: Size) -> None:
    inputs = index_inputs(adapters, [0] * size.rows, [size.keys] * size.rows)
    inputs = inputs._replace(weights=-inputs.weights.abs())
    _oracle.assert_scores(adapters, _score(adapters, inputs), inputs)


def _check_precise_weights(adapters: Adapters, size: Size) -> None:
    inputs = index_inputs(adapters, [0] * size.rows, [size.keys] * size.rows)
    step = torch.arange(inputs.weights.numel(), device=adapters.device).view_as(inputs.weights)
    # Weights of one bf16 number each, and one float32 step apart.
    inputs = inputs._replace(weights=1 + step * 2.0**-12)
    _oracle.assert_scores(adapters, _score(adapters, inputs), inputs)


def _check_precise_dots(adapters: Adapters, size: Size) -> None:
    for dtype in adapters.dtypes:
        inputs = index_inputs(adapters, [0] * size.rows, [size.keys] * size.rows, dtype=dtype)
        _oracle.assert_scores(adapters, _score(adapters, inputs), inputs)


def _check_large_numbers(adapters: Adapters, size: Size) -> None:
    for dtype in adapters.dtypes:
        if dtype == torch.float16:
            continue
        ks, ke = [0] * size.rows, [size.keys] * size.rows
        ke[0] = 0
        inputs = index_inputs(adapters, ks, ke, keys=size.keys, dtype=dtype)
        inputs = inputs._replace(q=inputs.q * 1000, k=inputs.k * 1000)
        _oracle.assert_scores(adapters, _score(adapters, inputs), inputs)


def _check_packed(adapters: Adapters, size: Size) -> None:
    inputs = index_inputs(adapters, *prompt([3, size.rows - 3], cached=5))
    _oracle.assert_scores(adapters, _score(adapters, inputs), inputs)


def _check_mask(adapters: Adapters, size: Size) -> None:
    ks, ke = prompt([3, size.rows - 3], cached=20)
    inputs = index_inputs(adapters, ks, ke)
    holes = normal(adapters, len(ks), inputs.k.shape[0], seed=9) > 0
    inputs = inputs._replace(mask=holes)
    _oracle.assert_scores(adapters, _score(adapters, inputs), inputs)


def _check_strides(adapters: Adapters, size: Size) -> None:
    inputs = index_inputs(adapters, [0] * size.rows, [size.keys] * size.rows)
    q, k, weights = inputs.q, inputs.k, inputs.weights
    wide = torch.full((k.shape[0], 2 * k.shape[1]), 7, dtype=k.dtype, device=k.device)
    wide[:, 3 : 3 + k.shape[1]] = k
    inputs = inputs._replace(
        q=q.transpose(0, 1).contiguous().transpose(0, 1),
        k=wide[:, 3 : 3 + k.shape[1]],
        weights=weights.t().contiguous().t(),
    )
    _oracle.assert_scores(adapters, _score(adapters, inputs), inputs)


def _check_unread_keys(adapters: Adapters, size: Size) -> None:
    """Two requests in a static cache: what is not valid yet is NaN, between them too."""
    inputs = index_inputs(adapters, [4, 4, 50], [20, 21, 70], keys=size.keys)
    k = inputs.k.clone()
    k[:4], k[21:50], k[70:] = math.nan, math.inf, math.nan
    _oracle.assert_scores(adapters, _score(adapters, inputs._replace(k=k)), inputs)


def _check_inputs_kept(adapters: Adapters, size: Size) -> None:
    inputs = index_inputs(adapters, *prompt([size.rows]))
    seen = _oracle.visible(inputs.ks, inputs.ke, inputs.k.shape[0])
    inputs = inputs._replace(mask=seen)
    kept = [tensor.clone() for tensor in inputs if tensor is not None]
    first = _score(adapters, inputs)
    assert torch.equal(first, _score(adapters, inputs)), "the second call gives other scores"
    for was, tensor in zip(kept, inputs, strict=True):
        assert tensor is not None
        assert torch.equal(was, tensor), "a call changes its inputs"


def _check_degenerate(adapters: Adapters, size: Size) -> None:
    for rows, keys in ((0, size.keys), (size.rows, 0), (0, 0)):
        inputs = index_inputs(adapters, [0] * rows, [keys] * rows, keys=keys)
        _oracle.assert_scores(adapters, _score(adapters, inputs), inputs)


def _formula(a: Arguments, relu: bool = True, dots: torch.dtype = torch.float32) -> Tensor:
    q, k = a["q"].float(), a["k"].float()
    found = torch.einsum("thd,sd->ths", q, k).to(dots).float()
    found = found.relu() if relu else found
    seen = _oracle.visible(a["ks"], a["ke"], k.shape[0], a["mask"])
    return torch.einsum("th,ths->ts", a["weights"], found).masked_fill(~seen, -math.inf)


def _padded_with_minimum(result: Tensor, a: Arguments) -> Tensor:
    low = torch.finfo(torch.float32).min
    return result.masked_fill(result == -math.inf, low)


def _adds_a_mask(right: object, a: Arguments) -> Tensor:
    result = _formula(a)
    a["mask"].logical_not_()
    return result


def _one_row_at_least(result: Tensor, a: Arguments) -> Tensor:
    return result if result.numel() else result.new_zeros(max(1, result.shape[0]), 1)


def _hides_by_adding(right: object, a: Arguments) -> Tensor:
    """Visibility as an additive mask: a NaN of a hidden key stays one."""
    q, k = a["q"].float(), a["k"].float()
    seen = _oracle.visible(a["ks"], a["ke"], k.shape[0], a["mask"])
    found = torch.einsum("th,ths->ts", a["weights"], torch.einsum("thd,sd->ths", q, k).relu())
    return found + torch.where(seen, 0.0, -math.inf)


CASES = (
    Case(
        "scores are the weighted head sum of rectified dots",
        rules=("C10", "C18"),
        classes=("D11", "D12"),
        needs=("scores",),
        check=_check_formula,
        fault=around("scores", lambda right, a: _formula(a, relu=False)),
    ),
    Case(
        "a single head is rectified and weighted too",
        rules=("C18",),
        classes=("D11", "I8"),
        needs=("scores",),
        check=_check_one_head,
        fault=replacing("scores", weights=lambda a: a["weights"].softmax(dim=1)),
    ),
    Case(
        "negative weights lower a score",
        rules=("C18",),
        classes=("D12",),
        needs=("scores",),
        check=_check_negative_weights,
        fault=replacing("scores", weights=lambda a: a["weights"].relu()),
    ),
    Case(
        "weights keep float32 through the head sum",
        rules=("C10", "C18"),
        classes=("D13", "D14"),
        needs=("scores",),
        check=_check_precise_weights,
        fault=replacing("scores", weights=lambda a: a["weights"].bfloat16().float()),
        exact=True,
    ),
    Case(
        "dots of each head accumulate and stay in float32",
        rules=("C10",),
        classes=("C2", "D13"),
        needs=("scores",),
        check=_check_precise_dots,
        fault=around("scores", lambda right, a: _formula(a, dots=torch.bfloat16)),
        exact=True,
    ),
    Case(
        "a rotation is of both sides or of none",
        rules=("C18",),
        classes=("D9", "D10"),
        needs=("scores",),
        check=_check_precise_dots,
        fault=replacing("scores", q=lambda a: _reflected(a["q"])),
    ),
    Case(
        "large bf16 numbers and a row without keys give no NaN",
        rules=("C10", "C12"),
        classes=("D20",),
        needs=("scores",),
        check=_check_large_numbers,
        fault=after("scores", _padded_with_minimum),
    ),
    Case(
        "a key outside the interval of a packed row has no score",
        rules=("C13",),
        classes=("E12",),
        needs=("scores",),
        check=_check_packed,
        fault=replacing("scores", ks=lambda a: torch.zeros_like(a["ks"])),
    ),
    Case(
        "a mask hides keys by their packed column",
        rules=("C13",),
        classes=("E8",),
        needs=("scores",),
        check=_check_mask,
        fault=replacing("scores", mask=lambda a: None),
    ),
    Case(
        "strides of the operands do not matter to scores",
        rules=("C17",),
        classes=("D16", "D17"),
        needs=("scores",),
        check=_check_strides,
        fault=replacing("scores", k=lambda a: as_if_contiguous(a["k"])),
    ),
    Case(
        "what an invisible key holds reaches no score",
        rules=("C13",),
        classes=("B4", "E7"),
        needs=("scores",),
        check=_check_unread_keys,
        fault=around("scores", _hides_by_adding),
    ),
    Case(
        "scoring leaves its inputs as they were",
        rules=("C17",),
        classes=("E10",),
        needs=("scores",),
        check=_check_inputs_kept,
        fault=around("scores", _adds_a_mask),
    ),
    Case(
        "no rows or no keys give empty scores",
        rules=("C12", "C23"),
        classes=("I1", "I2"),
        needs=("scores",),
        check=_check_degenerate,
        fault=after("scores", _one_row_at_least),
    ),
)


def _reflected(x: Tensor) -> Tensor:
    """A Householder reflection: it keeps dots if, and only if, the other side has it as well."""
    return x - 2 * x.mean(dim=-1, keepdim=True)
