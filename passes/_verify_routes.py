"""Whether selections reach whom they reached, and each routed op went down one legal path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..ops import routing
from ._edit import arguments, calls, is_ours, selects, strip_views, value_of
from ._oracles import burnt_in, static
from ._report import PassContext
from ._torch_compat import OpOverload, is_erased
from ._verify_entered import Final
from ._verify_wiring import Problems

aten = torch.ops.aten

_KERNELS = frozenset({"dense_mha", "masked_mha", "sparse_mla", "sparse_mqa", "sparse_mqa_paged"})

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
# Ops that pick rows of their first operand.
_PICKING = frozenset({aten.index.Tensor, aten.index_select.default, aten.gather.default})


def index_operands(final: Final) -> Iterator[tuple[fx.Node, str | None]]:
    """Every operand of indices, and None or why it does not show that it holds a selection."""
    answers: dict[fx.Node, str | None] = {}
    for node in final.graph.nodes:
        if is_ours(node) and _has_indices(node):
            indices = arguments(node)["indices"]
            if isinstance(indices, fx.Node):
                yield node, _why_no_selection(indices, final, answers)


def misplaced_selections(final: Final, context: PassContext) -> Problems:
    """Selections that are gone although they are read, or that something else stands for.

    A closed form of the same rows may stand for a scored selection; nothing else may, so that what
    a layer reads is its own group's.
    """
    for node, was in final.entered.selections.items():
        if not is_erased(node):
            continue
        now = final.standing(node)
        if now is None:
            if not context.inference:
                yield node, "a selection is gone from a graph that gradients may be asked of"
            continue
        problem = _why_not_closed(now, was, final, context)
        if problem is not None:
            yield node, problem


def routed_ops(final: Final, context: PassContext) -> Iterator[tuple[fx.Node, str | None]]:
    """Every routed op, and None or why it did not go down exactly one legal path."""
    kernels: dict[str | None, list[fx.Node]] = {}
    for node in final.new:
        if is_ours(node) and node.target._opname in _KERNELS:
            kernels.setdefault(final.origin(node), []).append(node)
    output = final.graph.output_node()
    for node, was in final.entered.routed.items():
        paths = kernels.pop(node.name, [])
        count = len(paths) + (not is_erased(node))
        if count != 1:
            yield output, f"{node.name} went down {count} paths"
        else:
            problems = [_why_illegal(path, was, final, context) for path in paths]
            yield (paths or [node])[0], next(iter(problems), None)
    for strays in kernels.values():
        for node in strays:
            yield node, "stands for no routed op of the graph"
    standing = set(calls(final.graph, torch.ops.dsafx.mla_attention.default))
    for node in standing - final.entered.routed.keys():
        yield node, "a routed op that the graph did not have"


def _why_illegal(kernel: fx.Node, was: Any, final: Final, context: PassContext) -> str | None:
    now = arguments(kernel)
    if "indices" in now and not _shows(now["indices"], was["indices"], final):
        return f"reads the selection {now['indices']} and not {was['indices']}"
    if kernel.target is not torch.ops.dsafx.dense_mha.default:
        return None
    if was["masked"] or not was["own_selection"]:
        return "reads all keys, but its selection is masked or not its own"
    if not _same_size(now["max_kv_len"], was["max_kv_len"], final):
        return f"has the length {now['max_kv_len']} and not {was['max_kv_len']}"
    limit = _dense_limit(was)
    if limit is None:
        return None
    if was["captured"] or not isinstance(value_of(now["max_kv_len"]), torch.SymInt):
        length = was["capture_bound"] if was["captured"] else value_of(now["max_kv_len"])
        keys = value_of(was["kv_c"]).shape[0]
        return _why_long(length, keys, limit, bool(was["captured"]), context)
    return _why_unbounded(now["bound"], now["max_kv_len"], limit)


def _why_long(
    length: Any, keys: Any, limit: int, promised: bool, context: PassContext
) -> str | None:
    """None where a constant length is known to be at most ``limit``."""
    if length is None or static(length, limit) is not True:
        return f"is right for {limit} keys a row at most, and there may be {length}"
    if not promised and burnt_in(length, keys, context.guards_live):
        return "its length is a constant although its keys may be more"
    return None


def _why_unbounded(bound: Any, length: Any, limit: int) -> str | None:
    """None where a symbolic length is checked at run time to be at most ``limit``.

    A guard is not enough: whoever loads the compiled graph may have dropped it (contract C20).
    """
    if not isinstance(bound, int):
        return f"does not check that {length} is at most {limit}"
    return None if bound <= limit else f"its bound is {bound}, above {limit}"


def _dense_limit(was: Any) -> int | None:
    """What ``routing`` calls the limit of a routed op; only its configuration and K matter."""
    layer, config = routing.decode_spec(was["spec"])
    kernels, sizes = routing.KernelCapabilities(), (1, 1, 0, 1, 1)
    spec = routing.RouteSpec(layer, kernels, config, value_of(was["topk"]), *sizes)
    return routing.dense_limit(spec)


def _why_not_closed(now: fx.Node, was: Any, final: Final, context: PassContext) -> str | None:
    """None where ``now`` is the closed form of an erased selection with the arguments ``was``."""
    if now.target is not torch.ops.dsafx.causal_positions.default:
        return f"{now.name} stands for it, which is no closed form"
    closed = arguments(now)
    rows = [name for name in ("ks", "ke") if not _shows(closed[name], was.get(name), final)]
    if rows or was.get("mask") is not None:
        return f"{now.name} stands for it, which is of other rows"
    if not _same_size(closed["topk"], was["topk"], final):
        return f"{now.name} stands for it, which has another width"
    if not _same_size(closed["max_kv_len"], was.get("max_kv_len"), final):
        return f"{now.name} stands for it, which has another length"
    length, topk = value_of(closed["max_kv_len"]), value_of(closed["topk"])
    if isinstance(length, torch.SymInt):
        return _why_unbounded(closed["bound"], closed["max_kv_len"], topk)
    return _why_long(length, value_of(was["k"]).shape[0], topk, False, context)


def _shows(now: Any, was: Any, final: Final) -> bool:
    """Whether ``now`` shows, behind views, what stands for the entered argument ``was``."""
    if not isinstance(now, fx.Node) or not isinstance(was, fx.Node):
        return now is was
    standing = final.standing(was)
    return standing is not None and strip_views(now) is strip_views(standing)


def _same_size(now: Any, was: Any, final: Final) -> bool:
    if isinstance(was, fx.Node):
        return now is final.standing(was)
    return now is was or (isinstance(now, int) and isinstance(was, int) and now == was)


def _why_no_selection(
    node: fx.Node, final: Final, answers: dict[fx.Node, str | None]
) -> str | None:
    """None where ``node`` holds selected positions, else why that does not show."""
    source = strip_views(node)
    if source not in answers:
        answers[source] = _why_source_selects_nothing(source, final, answers)
    return answers[source]


def _why_source_selects_nothing(
    source: fx.Node, final: Final, answers: dict[fx.Node, str | None]
) -> str | None:
    if selects(source):
        return None
    if source.op == "placeholder":
        if source in final.written:
            return f"its indices are read from {source.name}, which the graph writes"
        if source.meta["val"].dtype is not torch.int32:
            return f"its indices are the input {source.name}, which is {source.meta['val'].dtype}"
        return None
    if source.op == "call_function" and source.target in _KEEPING:
        operands = [each for each in source.all_input_nodes if _holds_integers(each)]
        problems = [_why_no_selection(each, final, answers) for each in operands]
        return next((problem for problem in problems if problem is not None), None)
    if source.op == "call_function" and source.target in _PICKING:
        return _why_no_selection(source.all_input_nodes[0], final, answers)
    if source.op == "call_function" and not source.all_input_nodes:
        return None
    return f"its indices come from {source.name}, which selects nothing"


def _holds_integers(node: fx.Node) -> bool:
    value = value_of(node)
    if isinstance(value, (tuple, list)):
        return True
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


def _has_indices(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and any(
        parameter.name == "indices" for parameter in node.target._schema.arguments
    )
