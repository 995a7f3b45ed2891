"""Prove on the final graph that the rewrites kept what they had no right to touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ._edit import ORIGIN, arguments, calls, is_ours, selects, strip_views, value_of
from ._report import PassContext, PassReport
from ._torch_compat import AUTO_FUNCTIONALIZED, OpOverload, is_erased, statically_known_true

aten = torch.ops.aten

# Ops of integers that keep a selection a selection: what ``compact`` and batching are made of.
_KEEPING = frozenset(
    {
        aten.where.self,
        aten.sort.default,
        aten.sort.stable,
        aten.cat.default,
        aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
    }
)
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


class VerificationError(RuntimeError):
    """A rewritten graph does not keep what the contract promises; nothing was compiled from it."""


@dataclass(frozen=True)
class Entered:
    """What must survive: outputs, writes with their operands, and the routed ops, by node."""

    outputs: tuple[Any, ...]
    writes: tuple[tuple[fx.Node, tuple[fx.Node, ...]], ...]
    routed: tuple[str, ...]

    @classmethod
    def of(cls, graph: fx.Graph) -> Entered:
        """The snapshot of a graph before any pass has seen it."""
        outputs = tuple(_outputs(graph))
        return cls(
            outputs=outputs,
            writes=tuple((node, tuple(node.all_input_nodes)) for node in _writes(graph, outputs)),
            routed=tuple(node.name for node in calls(graph, torch.ops.dsafx.mla_attention.default)),
        )


def verify_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """Check the final graph; whatever cannot be proved is declined with the reason.

    Invariants, against the graph as it entered: every index operand is a selection, a closed form
    or an int32 graph input that nothing writes; every write and every output is still there and
    reads what it read, unless that very node was rewritten; each routed op is there, or exactly one
    kernel in its place; and no op of this package reads a cache's old value behind the write of the
    new one.
    """
    report = PassReport("verify", verb="proved")
    if context.entered is None:
        raise ValueError("verify needs the snapshot of the graph as it entered: context.entered")
    written = _written_inputs(graph)
    for node in list(graph.nodes):
        if is_ours(node):
            _check_indices(report, node, written)
            _check_reads(report, node, written)
        elif node.op == "call_function" and node.target in AUTO_FUNCTIONALIZED:
            _check_cache(report, node)
    _check_writes(report, context.entered)
    _check_outputs(report, graph, context.entered)
    _check_routes(report, graph, context.entered)
    return report


def _prove(report: PassReport, node: fx.Node, problem: str | None) -> None:
    if problem is None:
        report.matched += 1
    else:
        report.decline(node, problem)


def _check_indices(report: PassReport, node: fx.Node, written: dict[fx.Node, fx.Node]) -> None:
    if not _has_parameter(node, "indices"):
        return
    indices = arguments(node)["indices"]
    if isinstance(indices, fx.Node):
        _prove(report, node, _why_no_selection(indices, written))


def _why_no_selection(node: fx.Node, written: dict[fx.Node, fx.Node]) -> str | None:
    """None where ``node`` holds selected positions, else why that does not show."""
    source = strip_views(node)
    if selects(source):
        return None
    if source.op == "placeholder":
        if source in written:
            return f"its indices are read from {source.name}, which the graph writes"
        if source.meta["val"].dtype is not torch.int32:
            return f"its indices are the input {source.name}, which is {source.meta['val'].dtype}"
        return None
    if source.op == "call_function" and source.target in _KEEPING:
        operands = [each for each in source.all_input_nodes if _holds_integers(each)]
        problems = [_why_no_selection(each, written) for each in operands]
        return next((problem for problem in problems if problem is not None), None)
    if source.op == "call_function" and not source.all_input_nodes:
        return None
    return f"its indices come from {source.name}, which selects nothing"


def _holds_integers(node: fx.Node) -> bool:
    value = value_of(node)
    if isinstance(value, (tuple, list)):
        return True
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


def _check_reads(report: PassReport, node: fx.Node, written: dict[fx.Node, fx.Node]) -> None:
    for operand in node.all_input_nodes:
        source = strip_views(operand)
        write = written.get(source)
        if write is not None and write < node and write is not node:
            report.decline(node, f"reads the old value of {source.name} behind its write")


def _check_cache(report: PassReport, node: fx.Node) -> None:
    """A cache that an op of this package writes must be an input: anything else is cloned first."""
    if not isinstance(node.args[0], OpOverload) or node.args[0].namespace != "dsafx":
        return
    local = [each.name for each in _bases(node) if strip_views(each).op != "placeholder"]
    _prove(report, node, f"writes {', '.join(local)}, which is no graph input" if local else None)


def _written_inputs(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Each graph input that the graph writes, with the node that makes its new value."""
    written: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.copy_.default:
            base, value = strip_views(node.args[0]), node.args[1]
            writer = strip_views(value) if isinstance(value, fx.Node) else node
            # A value that is an input itself was made before the graph: only the copy writes.
            bases = [(base, node if writer.op == "placeholder" else writer)]
        else:
            bases = [(strip_views(each), node) for each in _bases(node)]
        for base, writer in bases:
            if base.op == "placeholder":
                written.setdefault(base, writer)
    return written


def _bases(node: fx.Node) -> list[fx.Node]:
    """The tensors that a call writes, other than by ``copy_``."""
    if node.target in AUTO_FUNCTIONALIZED:
        bases = node.kwargs.get("_all_bases", ())
        return [each for each in bases if isinstance(each, fx.Node)]  # type: ignore[union-attr]
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    named = arguments(node)
    parameters = node.target._schema.arguments
    wanted = [p.name for p in parameters if p.alias_info is not None and p.alias_info.is_write]
    return [named[name] for name in wanted if isinstance(named[name], fx.Node)]


def _writes(graph: fx.Graph, outputs: Sequence[Any]) -> list[fx.Node]:
    """Everything that writes: in place, functionalised, or a scatter that is returned or copied."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in AUTO_FUNCTIONALIZED or _bases(node):
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


def _check_writes(report: PassReport, entered: Entered) -> None:
    for write, read in entered.writes:
        if is_erased(write):
            problem = None if _was_index_key(write, read) else "a write of the graph is gone"
        else:
            problem = _why_other_operands(write, read)
        _prove(report, write, problem)


def _why_other_operands(write: fx.Node, read: Sequence[fx.Node]) -> str | None:
    """None where a write reads what it read, or what a pass put in the place of it."""
    now = write.all_input_nodes
    lost = [each.name for each in read if each not in now and not is_erased(each)]
    foreign = [each.name for each in now if each not in read and ORIGIN not in each.meta]
    if not lost and not foreign:
        return None
    return f"a write no longer reads {', '.join(lost) or 'what it read'}"


def _was_index_key(write: fx.Node, read: Sequence[fx.Node]) -> bool:
    """Whether an erased concatenation was the index key that a fused op now returns."""
    return write.target is aten.cat.default and any(is_ours(e) and is_erased(e) for e in read)


def _check_outputs(report: PassReport, graph: fx.Graph, entered: Entered) -> None:
    final = _outputs(graph)
    output = graph.output_node()
    if len(final) != len(entered.outputs):
        report.decline(output, f"{len(entered.outputs)} outputs became {len(final)}")
        return
    for number, (was, now) in enumerate(zip(entered.outputs, final, strict=True)):
        problem = None
        if was is not now and not _was_rewritten(was, now):
            problem = f"output {number} was {was} and is {now}"
        elif was is not now and not _alike(was.meta["val"], now.meta["val"]):
            problem = f"output {number} changed its shape or dtype"
        _prove(report, output, problem)


def _was_rewritten(was: Any, now: Any) -> bool:
    """Whether a pass replaced the very node ``was`` by ``now``."""
    nodes = isinstance(was, fx.Node) and isinstance(now, fx.Node)
    return nodes and is_erased(was) and ORIGIN in now.meta


def _alike(was: Any, now: Any) -> bool:
    if not isinstance(was, torch.Tensor) or not isinstance(now, torch.Tensor):
        return type(was) is type(now)
    if was.dtype != now.dtype or len(was.shape) != len(now.shape):
        return False
    return not any(statically_known_true(a != b) for a, b in zip(was.shape, now.shape, strict=True))


def _check_routes(report: PassReport, graph: fx.Graph, entered: Entered) -> None:
    ops = torch.ops.dsafx
    kernels = (ops.dense_mha.default, ops.masked_mha.default, ops.sparse_mla.default)
    standing = [node.name for node in calls(graph, ops.mla_attention.default)]
    lowered = [node.meta.get(ORIGIN) for node in calls(graph, *kernels)]
    for name in entered.routed:
        paths = standing.count(name) + lowered.count(name)
        problem = None if paths == 1 else f"{name} went down {paths} paths"
        _prove(report, graph.output_node(), problem)


def _outputs(graph: fx.Graph) -> list[Any]:
    outputs = graph.output_node().args[0]
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _has_parameter(node: fx.Node, name: str) -> bool:
    return isinstance(node.target, OpOverload) and any(
        parameter.name == name for parameter in node.target._schema.arguments
    )
