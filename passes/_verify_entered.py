"""A graph as it entered, and which node of the final graph stands for which of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ._cache_effects import CacheWrite, cache_writes
from ._edit import (
    ORIGIN,
    STANDS_FOR,
    VIEWS,
    Argument,
    arguments,
    calls,
    is_ours,
    selects,
    strip_views,
)
from ._torch_compat import AUTO_FUNCTIONALIZED, OpOverload, is_erased

aten = torch.ops.aten

Arguments = tuple[tuple[Argument, ...], Mapping[str, Argument]]

# Functional forms of a write into a cache.
_SCATTERS = frozenset(
    {
        aten.index_copy.default,
        aten.index_put.default,
        aten.scatter.src,
        aten.select_scatter.default,
        aten.slice_scatter.default,
        aten.cat.default,
    }
)


@dataclass(frozen=True)
class Entered:
    """What must survive of a graph. Nodes that are erased later keep their place here.

    arguments: of every node, ``args`` and ``kwargs``.
    outputs: the graph's. writes: every node that writes. paged: the writes into paged caches.
    routed, selections: arguments by name of the calls that are routed, and that select.
    late: each graph input that is written, with the names of those who read it behind the write.
    """

    arguments: Mapping[fx.Node, Arguments]
    outputs: tuple[Any, ...]
    writes: tuple[fx.Node, ...]
    paged: tuple[CacheWrite, ...]
    routed: Mapping[fx.Node, Mapping[str, Argument]]
    selections: Mapping[fx.Node, Mapping[str, Argument]]
    late: Mapping[fx.Node, frozenset[str]]

    @classmethod
    def of(cls, graph: fx.Graph) -> Entered:
        """The snapshot of a graph before any pass has seen it."""
        outputs = tuple(outputs_of(graph))
        routed = calls(graph, torch.ops.dsafx.mla_attention.default)
        late = {
            written: frozenset(reader.name for reader in readers)
            for written, readers in late_readers(graph).items()
        }
        return cls(
            arguments={node: (node.args, node.kwargs) for node in graph.nodes},
            outputs=outputs,
            writes=tuple(_writes(graph, outputs)),
            paged=tuple(cache_writes(graph)),
            routed={node: arguments(node) for node in routed},
            selections={node: arguments(node) for node in graph.nodes if selects(node)},
            late=late,
        )

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that an entered node read."""
        found: list[fx.Node] = []
        fx.node.map_arg(self.arguments[node], found.append)
        return found


class Final:
    """The graph after all passes, seen from the one that entered."""

    def __init__(self, graph: fx.Graph, entered: Entered) -> None:
        self.graph = graph
        self.entered = entered
        self.new = {node: None for node in graph.nodes if node not in entered.arguments}
        self._stand_ins = {
            name: node for node in graph.nodes for name in node.meta.get(STANDS_FOR, ())
        }

    def standing(self, node: fx.Node) -> fx.Node | None:
        """An entered node, or what a pass put in its place; None where it is gone."""
        return self._stand_ins.get(node.name) if is_erased(node) else node

    def standing_argument(self, argument: Argument) -> Argument:
        """An argument of an entered node with each node in it as ``standing``."""
        return fx.node.map_arg(argument, self.standing)

    def origin(self, node: fx.Node) -> str | None:
        """The name of the node that a new node was made for."""
        return None if node in self.entered.arguments else node.meta.get(ORIGIN)

    @cached_property
    def written(self) -> dict[fx.Node, fx.Node]:
        """Each graph input that the graph writes, with the node that makes its new value."""
        return written_inputs(self.graph)


def outputs_of(graph: fx.Graph) -> list[Any]:
    """The values that a graph returns."""
    outputs = graph.output_node().args[0]
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def written_inputs(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Each graph input that the graph writes, with the node that makes its first new value."""
    written: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for base, writer in _effects(node):
            if base.op == "placeholder":
                written.setdefault(base, writer)
    return written


def _effects(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What ``node`` writes, and who made the value."""
    if node.op != "call_function":
        return
    if node.target is aten.copy_.default:
        value = node.args[1]
        writer = strip_views(value) if isinstance(value, fx.Node) else node
        # A value that is an input itself was made before the graph: only the copy writes.
        yield strip_views(node.args[0]), node if writer.op == "placeholder" else writer  # type: ignore[arg-type]
        return
    for base in bases_of(node):
        yield strip_views(base), node


def bases_of(node: fx.Node) -> list[fx.Node]:
    """The tensors that a call writes, other than by ``copy_``."""
    if node.target in AUTO_FUNCTIONALIZED:
        bases: Any = node.kwargs.get("_all_bases")
        if bases is None:
            mutable = _mutable(node.args[0])
            bases = [value for name, value in node.kwargs.items() if name in mutable]
        return [each for each in bases if isinstance(each, fx.Node)]
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    named = arguments(node)
    return [named[name] for name in _mutable(node.target) if isinstance(named[name], fx.Node)]


def _mutable(op: Any) -> list[str]:
    parameters = op._schema.arguments if isinstance(op, OpOverload) else ()
    return [p.name for p in parameters if p.alias_info is not None and p.alias_info.is_write]


def late_readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Who reads the old value of a graph input behind the node that makes the new one."""
    late: dict[fx.Node, list[fx.Node]] = {}
    for base, writer in written_inputs(graph).items():
        readers = [node for node in _readers(base) if writer < node]
        if readers:
            late[base] = readers
    return late


def _readers(base: fx.Node) -> Iterator[fx.Node]:
    """Who reads the values of ``base``, views looked through; neither sizes nor writes count."""
    waiting = list(base.users)
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node.target in VIEWS - {aten.clone.default}:
            waiting.extend(node.users)
        elif not _only_writes(node, base) and (node.op == "output" or _has_tensors(node)):
            yield node


def _only_writes(node: fx.Node, base: fx.Node) -> bool:
    if node.target is not aten.copy_.default:
        return False
    value = node.args[1]
    return not isinstance(value, fx.Node) or strip_views(value) is not base


def _has_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values: Iterable[Any] = value if isinstance(value, (tuple, list)) else (value,)
    return is_ours(node) or any(isinstance(each, torch.Tensor) for each in values)


def _writes(graph: fx.Graph, outputs: Sequence[Any]) -> list[fx.Node]:
    """Everything that writes: in place, functionalised, or a scatter that is returned or copied."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in AUTO_FUNCTIONALIZED or bases_of(node):
            found[node] = None
        if node.target is aten.copy_.default:
            _add_scatter(found, node.args[1])
    for output in outputs:
        _add_scatter(found, output)
    return list(found)


def _add_scatter(found: dict[fx.Node, None], value: Any) -> None:
    if isinstance(value, fx.Node):
        source = strip_views(value)
        if source.op == "call_function" and source.target in _SCATTERS:
            found[source] = None
