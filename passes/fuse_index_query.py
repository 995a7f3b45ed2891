"""Fuse the rotation of the indexer's query with the scales that its head weights take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .. import fusion
from ..ops.cache_layouts import FP8, quantise_index_key
from ._edit import arguments, calls, hoist, inline, replace, strip_views, value_of
from ._layer import (
    CASTS,
    Rotated,
    count_rows,
    open_shape,
    rotated,
    rows_of,
    same_shape,
    shaped,
    writes_between,
)
from ._report import PassContext, PassReport
from ._subgraph import match, trace_of, visible
from ._torch_compat import statically_known_true

aten = torch.ops.aten

_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})


@dataclass(frozen=True)
class _Query:
    """What an indexer scores with.

    key: the rotated query, whose ``joined`` is what the parts rotate and join.
    query, weights: the nodes that show the two results. raw_weights: before any scale.
    quantized: whether ``query`` is fp8 and its scale is in ``weights``.
    """

    key: Rotated
    query: fx.Node
    weights: fx.Node
    raw_weights: fx.Node
    quantized: bool


def fuse_index_query_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """Rewrite the rotated query of an indexer and its folded head weights to ``index_query``.

    Invariant: a selection's query is ``[rotated | passed]`` of one tensor, perhaps quantised as
    this package does it, and its weights are the raw ones times exactly the scales that the fused
    op folds in: ``D**-0.5``, ``H**-0.5`` and that of the quantised query. Any other factor
    declines. The selection itself is not touched. The fused op stands where the first part stood,
    and nothing in between may write.
    """
    report = PassReport("fuse_index_query")
    ops = torch.ops.dsafx
    selections = (ops.index_select, ops.index_select_paged, ops.index_select_partial)
    for select in calls(graph, *(packet.default for packet in selections)):
        shown = strip_views(arguments(select)["q"])
        if _behind_casts(shown).target is ops.index_query.default:
            continue
        found = _query_of(graph, select)
        if isinstance(found, str):
            report.decline(select, found)
            continue
        which = fusion.INDEX_QUERY_FP8 if found.quantized else fusion.INDEX_QUERY
        device = value_of(found.query).device.type
        reason = fusion.reason_not_to_fuse(which, context.options.fuse, device)
        reason = reason or _fuse(graph, found)
        if reason is None:
            report.rewrite(select, f"the reader of {which.op}")
        else:
            report.decline(select, reason)
    return report


def _query_of(graph: fx.Graph, select: fx.Node) -> _Query | str:
    """The parts that make the query and the weights of ``select``; a reason where they differ."""
    args = arguments(select)
    query, weights = strip_views(args["q"]), strip_views(args["weights"])
    joined, scale = query, None
    if _behind_casts(query).meta["val"].dtype == FP8:
        query = _behind_casts(query)
        quantised = _quantised(graph, query)
        if quantised is None:
            return "its query is fp8, but not as quantise_index_key makes it"
        joined, scale = quantised
    key = _rotated_as(joined)
    if key is None:
        return "its query is not [rotated | passed] of one tensor"
    heads, width = value_of(key.rope).shape[-2], value_of(joined).shape[-1]
    if value_of(key.rope).dim() != 3 or not isinstance(heads, int):
        return "its query is not rotated head by head"
    constant, factors = _factors(weights)
    if scale is not None:
        if factors.count(scale) != 1:
            return "its weights do not hold the scale of its query"
        factors.remove(scale)
    if any(value_of(factor).dim() == 0 for factor in factors):
        return "its weights are scaled by a number that is known only when it runs"
    if len(factors) != 1:
        return f"its weights are a product of {len(factors)} tensors, not 1"
    if not math.isclose(constant, width**-0.5 * heads**-0.5, rel_tol=1e-6):
        return f"its weights are scaled by {constant:g}, not by D**-0.5 * H**-0.5"
    if value_of(factors[0]).shape[-1] != heads or not statically_known_true(
        count_rows(joined) == count_rows(weights) * heads
    ):
        return "its weights are not one for each row and head"
    return _Query(key, query, weights, factors[0], scale is not None)


def _rotated_as(joined: fx.Node) -> Rotated | None:
    """The rotation that ``joined`` joins to the rest of its query."""
    if joined.target is not aten.cat.default:
        return None
    turned = rows_of(arguments(joined)["tensors"][0])
    if turned is None or turned.target is not torch.ops.dsafx.rope.default:
        return None
    found = rotated(turned)
    return found if found is not None and found.joined is joined else None


def _behind_casts(node: fx.Node) -> fx.Node:
    while node.target in CASTS and isinstance(node.args[0], fx.Node):
        if value_of(node).dtype == FP8:
            break
        node = strip_views(node.args[0])
    return node


def _quantised(graph: fx.Graph, query: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What ``query`` is the fp8 form of, and the node of its scales."""
    like = value_of(query)
    wide = like.new_empty(like.shape, dtype=torch.float32)
    pattern = trace_of(quantise_index_key, wide, graph)
    outputs: Any = pattern.output_node().args[0]
    values, scale = outputs
    found = match(values, query)
    if found is None:
        return None
    (source,) = (found[node] for node in found if node.op == "placeholder")
    return _behind_casts(source), found[visible(scale)]


def _factors(node: fx.Node) -> tuple[float, list[fx.Node]]:
    """A product as its constant and its tensors, those before a cast to float32 uncast."""
    whole = rows_of(node)
    node = visible(node if whole is None else whole)
    wide = value_of(node).dtype in (torch.float32, torch.float64)
    if wide and node.target in _PRODUCTS:
        constant = 1.0
        tensors: list[fx.Node] = []
        for factor in node.args:
            if isinstance(factor, fx.Node):
                inner, inside = _factors(factor)
                constant, tensors = constant * inner, tensors + inside
            else:
                constant *= float(factor)  # type: ignore[arg-type]
        return constant, tensors
    if wide and node.target is aten.div.Tensor and isinstance(node.args[1], (int, float)):
        constant, tensors = _factors(node.args[0])  # type: ignore[arg-type]
        return constant / node.args[1], tensors
    if wide and node.target in CASTS and value_of(node.args[0]).is_floating_point():
        return _factors(node.args[0])  # type: ignore[arg-type]
    return 1.0, [node]


def _fuse(graph: fx.Graph, found: _Query) -> str | None:
    """Rewrite one query; the reason where it must stay."""
    source, rope, joined = found.key.source, found.key.rope, found.key.joined
    parts = [rope, joined, found.query, found.weights]
    first = min(parts)
    if writes_between(first, max(parts)):
        return "a write stands between its parts"
    for output, like in ((found.query, source), (found.weights, found.raw_weights)):
        if open_shape(value_of(output)) is None and not same_shape(output, like):
            return f"{output.name} has more than one symbolic size"
    heads, width = value_of(rope).shape[1], value_of(joined).shape[-1]
    shapes = [open_shape(value_of(output)) for output in (found.query, found.weights)]
    turning = arguments(rope)

    def fused(q: Tensor, weights: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, folded = torch.ops.dsafx.index_query.default(
            q if q.dim() == 3 else q.reshape(-1, heads, width),
            weights if weights.dim() == 2 else weights.reshape(-1, heads),
            cos,
            sin,
            turning["style"],
            found.quantized,
        )
        return shaped(query, shapes[0], q), shaped(folded, shapes[1], weights)

    operands = [source, found.raw_weights, turning["cos"], turning["sin"]]
    try:
        hoist(operands, before=first)
    except ValueError as dependent:
        return str(dependent)
    query, folded = inline(graph, first, fused, operands)
    replace(found.query, query)
    replace(found.weights, folded)
    return None
