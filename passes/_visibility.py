"""What an attention mask in a Dynamo graph says, where the graph itself builds it.

transformers builds masks from ranges of positions. Those ranges are known exactly, so that
``kv <= q`` is recognised as causality, and a test for packed documents that can find none as true.
Everything else stays a mask (contract C13).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ._match import called, is_written
from ._torch_compat import statically_known_true


@dataclass(frozen=True)
class Affine:
    """Integers known exactly: ``start`` plus ``steps[d]`` for each step along dim d."""

    steps: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Always:
    """A condition that holds everywhere, or nowhere."""

    holds: bool


@dataclass(frozen=True)
class Causal:
    """``kv <= q``: ``compare`` is the node, ``kv`` its range of positions and ``q`` the bounds."""

    compare: fx.Node
    kv: fx.Node
    q: fx.Node


Known: TypeAlias = Affine | Always | Causal


def causality(mask: fx.Node) -> Causal | None:
    """The comparison that ``mask`` says and nothing else, or None.

    Args:
        mask: bool [B, 1, S, T], True = visible; or additive, where it is 0 and at most the dtype's
            minimum elsewhere.
    """
    known = _evaluate(_condition(mask), {})
    return known if isinstance(known, Causal) else None


def condition(mask: fx.Node) -> fx.Node | None:
    """The bool mask that ``mask`` is or was made from in the graph; None where that is not seen."""
    node = _condition(mask)
    return node if _value(node).dtype == torch.bool else None


def _condition(mask: fx.Node) -> fx.Node:
    """Behind ``where(visible, 0, minimum)``, the visibility."""
    if called(mask) != "where" or mask.kwargs or len(mask.args) != 3:
        return mask
    seen, zero, hidden = mask.args
    blank = called(zero) == "zeros" and zero.args == ((),)  # type: ignore[union-attr]
    lowest = torch.finfo(_value(mask).dtype).min
    if isinstance(seen, fx.Node) and blank and isinstance(hidden, float) and hidden <= lowest:
        return seen
    return mask


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["example_value"]
    return value


def _evaluate(node: Any, memo: dict[fx.Node, Known | None]) -> Known | None:
    if not isinstance(node, fx.Node) or node.kwargs.keys() - _KEYWORDS or is_written(node):
        return None
    if node not in memo:
        rule = _RULES.get(called(node) or "")
        memo[node] = None if rule is None else rule(node, memo)
    return memo[node]


_KEYWORDS = frozenset({"device", "dtype", "prepend", "dim"})
Memo: TypeAlias = dict[fx.Node, Known | None]


def _arange(node: fx.Node, memo: Memo) -> Known | None:
    integers = _value(node).dtype in (torch.int32, torch.int64)
    return Affine((1,), 0) if len(node.args) == 1 and integers else None


def _shift(node: fx.Node, memo: Memo) -> Known | None:
    base, amount = _evaluate(node.args[0], memo), node.args[1]
    if not isinstance(base, Affine) or not isinstance(amount, int):
        return None
    return Affine(base.steps, base.start + (amount if called(node) == "add" else -amount))


def _unsqueeze(node: fx.Node, memo: Memo) -> Known | None:
    base, dim = _evaluate(node.args[0], memo), node.kwargs.get("dim", node.args[-1])
    if not isinstance(base, Affine) or not isinstance(dim, int) or dim < 0:
        return None
    return Affine((*base.steps[:dim], 0, *base.steps[dim:]), base.start)


def _expand(node: fx.Node, memo: Memo) -> Known | None:
    base = _evaluate(node.args[0], memo)
    if not isinstance(base, Affine):
        return base
    source, result = _value(node.args[0]), _value(node)  # type: ignore[arg-type]
    new = result.dim() - source.dim()
    # Along a dim of size 1 there is no step, whatever was noted.
    kept = [0 if size == 1 else step for size, step in zip(source.shape, base.steps, strict=True)]
    return Affine((*(0,) * new, *kept), base.start)


def _getitem(node: fx.Node, memo: Memo) -> Known | None:
    base, index = _evaluate(node.args[0], memo), node.args[1]
    if not isinstance(base, Affine):
        return None
    if not isinstance(index, tuple):
        index = (index,)
    if all(isinstance(each, fx.Node) for each in index):
        return _gathered(base, [_evaluate(each, memo) for each in index])
    steps: list[int] = []
    remaining = list(base.steps)
    for each in index:
        if each is None:
            steps.append(0)
        elif each in (slice(None), slice(None, 1)) and remaining:
            steps.append(remaining.pop(0))
        else:
            return None
    return Affine((*steps, *remaining), base.start)


def _gathered(base: Affine, index: list[Known | None]) -> Known | None:
    """``base[i, j, ...]`` for exactly known positions."""
    if len(index) != len(base.steps) or not all(isinstance(each, Affine) for each in index):
        return None
    known = [each for each in index if isinstance(each, Affine)]
    rank = max(len(each.steps) for each in known)
    # A negative position would count from the end.
    if any(len(each.steps) != rank or min((each.start, *each.steps)) < 0 for each in known):
        return None
    start = base.start + sum(s * each.start for s, each in zip(base.steps, known, strict=True))
    steps = tuple(
        sum(s * each.steps[dim] for s, each in zip(base.steps, known, strict=True))
        for dim in range(rank)
    )
    return Affine(steps, start)


def _diff(node: fx.Node, memo: Memo) -> Known | None:
    base, first = _evaluate(node.args[0], memo), _evaluate(node.kwargs.get("prepend"), memo)
    if not isinstance(base, Affine) or not isinstance(first, Affine):
        return None
    if len(node.args) != 1 or node.kwargs.get("dim", -1) != -1:
        return None
    if base.steps[:-1] != first.steps[:-1] or base.start - first.start != base.steps[-1]:
        return None
    return Affine((0,) * len(base.steps), base.steps[-1])


def _cumsum(node: fx.Node, memo: Memo) -> Known | None:
    if _evaluate(node.args[0], memo) != Always(False):
        return None
    return Affine((0,) * _value(node).dim(), 0)


def _equal(node: fx.Node, memo: Memo) -> Known | None:
    a, b = (_evaluate(each, memo) for each in node.args)
    if isinstance(node.args[1], int) and isinstance(a, Affine):
        b = Affine((0,) * len(a.steps), node.args[1])
    if not isinstance(a, Affine) or not isinstance(b, Affine) or any((*a.steps, *b.steps)):
        return None
    return Always((a.start == b.start) == (called(node) == "eq"))


def _at_most(node: fx.Node, memo: Memo) -> Known | None:
    kv, q = node.args
    if not isinstance(kv, fx.Node) or not isinstance(q, fx.Node):
        return None
    ranks = _value(kv).dim() == 4 and _value(q).dim() == 4
    if not ranks or _evaluate(kv, memo) != Affine((0, 0, 0, 1), 0):
        return None
    bounds = _value(q)
    single = statically_known_true(bounds.shape[1] == 1) and statically_known_true(
        bounds.shape[3] == 1
    )
    if not single or not statically_known_true(bounds.shape[2] == _value(node).shape[2]):
        return None
    return Causal(node, kv, q)


def _both(node: fx.Node, memo: Memo) -> Known | None:
    a, b = (_evaluate(each, memo) for each in node.args)
    if a == Always(True):
        return b
    return a if b == Always(True) else None


def _cast(node: fx.Node, memo: Memo) -> Known | None:
    source = node.args[0]
    if not isinstance(source, fx.Node) or _value(source).dtype != _value(node).dtype:
        return None
    return _evaluate(source, memo)


def _ones(node: fx.Node, memo: Memo) -> Known | None:
    return Always(True) if _value(node).dtype == torch.bool else None


_RULES = {
    "arange": _arange,
    "add": _shift,
    "sub": _shift,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "getitem": _getitem,
    "diff": _diff,
    "cumsum": _cumsum,
    "eq": _equal,
    "ne": _equal,
    "le": _at_most,
    "and_": _both,
    "to": _cast,
    "new_ones": _ones,
}
