"""Patterns over Dynamo graphs, where an op is known by its name and a method is as good as it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

Pattern: TypeAlias = Any


@dataclass(frozen=True)
class Var:
    """Anything; where it stands several times, always the same."""

    name: str


@dataclass(frozen=True)
class Rest:
    """The remaining positional arguments, whatever they are."""


@dataclass(frozen=True)
class Call:
    """A call of the function or method ``name``; ``bind`` names the node itself."""

    name: str
    args: tuple[Pattern, ...]
    kwargs: dict[str, Pattern] = field(default_factory=dict)
    bind: str | None = None


@dataclass(frozen=True)
class Either:
    """The first of several patterns that fits."""

    patterns: tuple[Pattern, ...]


def call(name: str, *args: Pattern, bind: str | None = None, **kwargs: Pattern) -> Call:
    """``Call`` as it is written in a program."""
    return Call(name, args, kwargs, bind)


@dataclass
class Match:
    """What the variables stand for, and the nodes that the calls of the pattern matched."""

    bound: dict[str, Any] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]


class Mismatch(Exception):
    """Why a node is not what a pattern says."""


def called(node: Any) -> str | None:
    """The name of the function or method that a node calls; None for anything else."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_method":
        name = str(node.target)
        # Torch 2.11 leaves ``a == b`` a method.
        return name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if node.op == "call_function":
        return str(node.target.__name__)  # type: ignore[union-attr]
    return None


_WRITING_OPERATORS = frozenset(
    {"setitem", "iadd", "iand", "ifloordiv", "ilshift", "imod", "imul", "ior", "ipow", "irshift"}
    | {"isub", "itruediv", "ixor"}
)
_OTHER_OPERATORS = frozenset({"and_", "is_", "not_", "or_"})


def writes(node: fx.Node) -> bool:
    """Whether a node changes its first argument in place, by Python's and torch's naming."""
    name = called(node) or ""
    method = name.endswith("_") and not name.endswith("__") and name not in _OTHER_OPERATORS
    return method or name in _WRITING_OPERATORS


def is_written(node: fx.Node) -> bool:
    """Whether ``node`` itself is changed in place after it was made."""
    return any(writes(user) and user.args[0] is node for user in node.users)


def match(pattern: Pattern, node: fx.Node, into: Match | None = None) -> Match:
    """Unify ``pattern`` with what ``node`` is computed from.

    Args:
        pattern, node: what is compared.
        into: a match to go on with, whose variables keep what they stand for.

    Raises:
        Mismatch: with the first place that differs.
    """
    found = Match() if into is None else into
    _unify(pattern, node, found)
    return found


def erase_unread(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Take out replaced nodes, readers first; writes of a buffer that nobody reads included."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            graph.erase_node(node)


def _unify(pattern: Pattern, value: Any, found: Match) -> None:
    if isinstance(pattern, Var):
        if pattern.name in found.bound and not _same(found.bound[pattern.name], value):
            raise Mismatch(f"{pattern.name} is both {found.bound[pattern.name]} and {value}")
        found.bound[pattern.name] = value
    elif isinstance(pattern, Either):
        _unify_either(pattern, value, found)
    elif isinstance(pattern, Call):
        _unify_call(pattern, value, found)
    elif isinstance(pattern, slice):
        if not isinstance(value, slice):
            raise Mismatch(f"expected a slice, found {value}")
        _unify_each(_fields(pattern), _fields(value), found)
    elif isinstance(pattern, (tuple, list)):
        if not isinstance(value, (tuple, list)):
            raise Mismatch(f"expected {len(pattern)} values, found {value}")
        _unify_each(pattern, value, found)
    elif not _same(pattern, value):
        raise Mismatch(f"expected {pattern}, found {value}")


def _unify_call(pattern: Call, value: Any, found: Match) -> None:
    if called(value) != pattern.name:
        raise Mismatch(f"expected {pattern.name}, found {_described(value)}")
    if set(value.kwargs) != set(pattern.kwargs):
        raise Mismatch(f"{value.name} has the keywords {sorted(value.kwargs)}")
    found.nodes.append(value)
    if pattern.bind is not None:
        _unify(Var(pattern.bind), value, found)
    _unify_each(pattern.args, value.args, found)
    for name, each in pattern.kwargs.items():
        _unify(each, value.kwargs[name], found)


def _unify_each(patterns: Sequence[Pattern], values: Sequence[Any], found: Match) -> None:
    if patterns and isinstance(patterns[-1], Rest):
        patterns = patterns[:-1]
        values = values[: len(patterns)]
    if len(patterns) != len(values):
        raise Mismatch(f"expected {len(patterns)} arguments, found {list(values)}")
    for pattern, value in zip(patterns, values, strict=True):
        _unify(pattern, value, found)


def _unify_either(pattern: Either, value: Any, found: Match) -> None:
    reasons = []
    for each in pattern.patterns:
        attempt = Match(dict(found.bound), list(found.nodes))
        try:
            _unify(each, value, attempt)
        except Mismatch as reason:
            reasons.append(str(reason))
            continue
        found.bound, found.nodes = attempt.bound, attempt.nodes
        return
    raise Mismatch(" or ".join(dict.fromkeys(reasons)))


def _fields(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return a is b
    return type(a) is type(b) and bool(a == b)


def _described(value: Any) -> str:
    name = called(value)
    return str(value) if name is None else f"{name} ({value})"
