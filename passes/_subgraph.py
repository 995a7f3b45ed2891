"""Whether a part of a graph is what a plain function traces to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ._torch_compat import fake_mode_of, trace

aten = torch.ops.aten


def trace_of(function: Callable[..., Any], value: Tensor, graph: fx.Graph) -> fx.Graph:
    """The ATen graph of a function of one tensor, as it would stand in ``graph``."""
    return trace(function, [value], fake_mode_of(graph))


def match(pattern: fx.Node, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Which node each node of a pattern stands for where ``node`` computes ``pattern``, else None.

    A placeholder of the pattern stands for any node, the same one wherever it is read.
    """
    found: dict[fx.Node, fx.Node] = {}
    return found if _same(pattern, node, found) else None


def visible(node: fx.Node) -> fx.Node:
    """``node`` behind aliases, which the passes before ours may have removed."""
    while node.target is aten.alias.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _same(pattern: Any, value: Any, found: dict[fx.Node, fx.Node]) -> bool:
    if isinstance(pattern, fx.Node):
        if not isinstance(value, fx.Node):
            return False
        pattern, value = visible(pattern), visible(value)
        if pattern in found:
            return found[pattern] is value
        if pattern.op != "placeholder" and not _same_call(pattern, value, found):
            return False
        found[pattern] = value
        return True
    if isinstance(pattern, (tuple, list)):
        same_length = isinstance(value, (tuple, list)) and len(pattern) == len(value)
        return same_length and all(_same(p, v, found) for p, v in zip(pattern, value, strict=True))
    if isinstance(pattern, float) and isinstance(value, float) and math.isnan(pattern):
        return math.isnan(value)
    return not isinstance(value, fx.Node) and bool(pattern == value)


def _same_call(pattern: fx.Node, node: fx.Node, found: dict[fx.Node, fx.Node]) -> bool:
    constants = _constant(pattern), _constant(node)
    if None not in constants:
        alike = pattern.meta["val"].dtype == node.meta["val"].dtype
        return alike and _same(*constants, found)
    return (
        pattern.op == node.op
        and pattern.target == node.target
        and pattern.kwargs == node.kwargs
        and _same(pattern.args, node.args, found)
    )


def _constant(node: fx.Node) -> Any:
    """The value of a tensor without dims that holds a constant, in either form that has."""
    if node.target is aten.scalar_tensor.default:
        return node.args[0]
    if node.target is aten.full.default and not node.args[0]:
        return node.args[1]
    return None
