"""How the parts of one attention layer show in a graph: projections, column slices, rotations."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ._edit import VIEWS, arguments, strip_views, value_of
from ._torch_compat import statically_known_true

aten = torch.ops.aten

# How a bias-free or biased linear layer looks after decomposition, and which operand holds the
# activations.
_PROJECTIONS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0}
CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})
# Views in row-major order: rows stay rows as long as the last dim keeps its size.
_RESHAPES = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default})


@dataclass(frozen=True)
class Columns:
    """The columns ``start .. end`` of all rows of ``source``, in the order of its rows."""

    source: fx.Node
    start: int
    end: int


@dataclass(frozen=True)
class Rotated:
    """``joined = cat(rope(source[..., :R]), source[..., R:])``."""

    source: fx.Node
    rope: fx.Node
    joined: fx.Node


def columns(node: Any) -> Columns | None:
    """What ``node`` shows of the tensor that it is a view of; None where that is not columns.

    Walks back over slices of the last dim and over reshapes that keep it. A node that is no such
    view shows itself.
    """
    if not isinstance(node, fx.Node) or not isinstance(value_of(node), Tensor):
        return None
    width = value_of(node).shape[-1] if value_of(node).dim() else None
    if not isinstance(width, int):
        return None
    start, end = 0, width
    while True:
        step = _one_step(node)
        if step is None:
            return Columns(node, start, end)
        node, offset = step
        start, end = start + offset, end + offset


def _one_step(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The tensor that ``node`` is a view of and its first column there; None where it is none."""
    if node.target in _RESHAPES:
        source = node.args[0]
        kept = isinstance(source, fx.Node) and _width(source) == _width(node)
        return (source, 0) if kept else None  # type: ignore[return-value]
    if node.target is aten.slice.Tensor:
        args = arguments(node)
        last = args["dim"] in (-1, value_of(node).dim() - 1)
        start = args["start"] or 0
        if not last or args["step"] != 1 or not isinstance(start, int):
            return None
        return args["self"], start if start >= 0 else _width(args["self"]) + start
    if node.target is operator.getitem:
        split, number = node.args
        if not isinstance(split, fx.Node) or split.target not in _SPLITS:
            return None
        args = arguments(split)
        if args["dim"] not in (-1, value_of(node).dim() - 1):
            return None
        before = [part.shape[-1] for part in split.meta["val"][:number]]
        return args["self"], sum(before)
    return None


def _width(node: fx.Node) -> Any:
    shape = value_of(node).shape
    return shape[-1] if len(shape) else None


def rows_of(node: Any) -> fx.Node | None:
    """The node all of whose values ``node`` shows, row by row; None where it shows a part."""
    shown = columns(node)
    if shown is None or (shown.start, shown.end) != (0, _width(shown.source)):
        return None
    return shown.source


def rotated(rope: fx.Node) -> Rotated | None:
    """The tensor whose first columns ``rope`` rotates; None where nothing joins it to the rest."""
    first = columns(arguments(rope)["x"])
    readers = readers_of(rope)
    if first is None or first.start != 0 or len(readers) != 1:
        return None
    (cat,) = readers
    if cat.target is not aten.cat.default or len(arguments(cat)["tensors"]) != 2:
        return None
    if arguments(cat)["dim"] not in (-1, value_of(cat).dim() - 1):
        return None
    turned, passed = arguments(cat)["tensors"]
    if rows_of(turned) is not rope:
        return None
    if columns(passed) != Columns(first.source, first.end, _width(first.source)):
        return None
    return Rotated(first.source, rope, cat)


def readers_of(node: fx.Node) -> set[fx.Node]:
    """Who reads the values of ``node``, views looked through; a view that nothing reads is none."""
    readers: set[fx.Node] = set()
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user.op == "call_function" and user.target in VIEWS and user.users:
            waiting.extend(user.users)
        elif user.users or user.op == "output" or user.is_impure():
            readers.add(user)
    return readers


def projection_of(node: Any) -> fx.Node | None:
    """The matrix product whose columns ``node`` shows, behind views; None where it shows none."""
    source = strip_views(node) if isinstance(node, fx.Node) else None
    return source if source is not None and source.target in _PROJECTIONS else None


def hidden_states(projection: fx.Node | None) -> fx.Node | None:
    """What a projection projects, behind views and casts."""
    source = None if projection is None else projection.args[_PROJECTIONS[projection.target]]
    while isinstance(source, fx.Node):
        shown = strip_views(source)
        if shown.target not in CASTS:
            return shown
        source = shown.args[0]
    return None


def projections_of(hidden: fx.Node) -> list[fx.Node]:
    """All projections of ``hidden``, in program order."""
    found: list[fx.Node] = []
    waiting = [hidden]
    while waiting:
        for reader in readers_of(waiting.pop()):
            if reader.target in CASTS:
                waiting.append(reader)
            elif reader.target in _PROJECTIONS and hidden_states(reader) is hidden:
                found.append(reader)
    return sorted(found)


def count_rows(node: fx.Node) -> Any:
    """How many rows a tensor has: the product of all its dims but the last."""
    return math.prod(value_of(node).shape[:-1])


def same_rows(*nodes: fx.Node) -> bool:
    """Whether tensors are known to have the same number of rows."""
    first, *rest = (count_rows(node) for node in nodes)
    return all(statically_known_true(first == other) for other in rest)


def same_shape(node: fx.Node, other: fx.Node) -> bool:
    """Whether two tensors are known to have the same shape."""
    mine, theirs = value_of(node).shape, value_of(other).shape
    return len(mine) == len(theirs) and all(
        statically_known_true(a == b) for a, b in zip(mine, theirs, strict=True)
    )


def open_shape(value: Tensor) -> list[int] | None:
    """The shape of a tensor with -1 for the one size that is symbolic; None where several are."""
    shape = [size if isinstance(size, int) else -1 for size in value.shape]
    return shape if shape.count(-1) <= 1 else None


def shaped(x: Tensor, shape: list[int] | None, like: Tensor) -> Tensor:
    """``x`` with the dims of ``shape``, one of them open, or else in the shape of ``like``."""
    if len(like.shape if shape is None else shape) == x.dim():
        return x
    return x.view(like.shape if shape is None else shape)


def writes_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether anything between two nodes of a graph has an effect."""
    node = first
    while node is not last:
        node = node.next
        if node.op == "call_function" and node.is_impure():
            return True
    return False
