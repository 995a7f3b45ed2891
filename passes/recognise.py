"""Find the DSA layers of models that nobody enabled, and put semantic ops in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ops import routing
from ..ops._requests import (
    attend_requests,
    causal_intervals,
    foreign_indices,
    select_requests,
)
from ._dsa_layers import Attention, Layers, Selection, find_layers
from ._edit import copy_provenance
from ._match import called, erase_unread, writes
from ._recognise_norms import recognise_norms
from ._report import PassReport
from ._torch_compat import statically_known_true
from ._visibility import causality, condition

# What the recognised form of attention can run: it hands over latents and their up-projection.
_CAPABILITIES = routing.LayerCapabilities(dense_mha=True, masked_mha=True)
_SPEC = routing.encode_spec(_CAPABILITIES, routing.RouteConfig())


@dataclass(frozen=True)
class _Group:
    """A selection and everybody who reads it."""

    leader: Selection
    followers: list[Attention]
    outputs: list[fx.Node]


class _Declined(Exception):
    """Why a group is left alone."""


def recognise_pass(graph: fx.Graph) -> PassReport:
    """Rewrite indexers and attention of transformers to ``index_select`` and ``mla_attention``.

    Runs on the Dynamo graph, where one form serves each dtype, length and cache. Invariant: a
    selection is rewritten together with all layers that attend with it, or not at all, and only
    where the whole chain of operations is the known one; whatever else reads the selection gets it
    in the form that it had. Causality that the graph builds from ranges becomes intervals, any
    other mask stays a mask operand. Cache updates are not touched: the new nodes read what the old
    ones read, at a place where it still holds the same.
    """
    report = PassReport("recognise")
    layers = find_layers(graph)
    report.declined.extend(layers.declined)
    visibility: dict[fx.Node, fx.Node] = {}
    found: list[tuple[str, str]] = []
    for leader in layers.selections:
        try:
            group = _group_of(leader, layers)
            _rewrite(graph, group, visibility)
        except _Declined as reason:
            report.declined.append((leader.path, str(reason)))
            continue
        found.append((leader.path, "index_select"))
        found.extend((each.path, "mla_attention") for each in group.followers)
    found.extend(recognise_norms(graph, {path for path, _ in found}))
    report.matched = len(found)
    report.became.extend(_summed(found))
    known = {leader.node for leader in layers.selections}
    for each in layers.attentions:
        if each.match["indices"] not in known:
            report.declined.append((each.path, "its selection was not made in this graph"))
    return report


def _group_of(leader: Selection, layers: Layers) -> _Group:
    followers = [each for each in layers.attentions if each.match["indices"] is leader.node]
    accounted = {node for each in followers for node in each.match.nodes}
    others = [user for user in leader.node.users if user not in accounted]
    outputs = [user for user in others if user.op == "output"]
    foreign = next((user for user in others if user.op != "output"), None)
    if foreign is not None:
        raise _Declined(f"its selection is read by {foreign}, which is no attention that is known")
    mask = leader.match["mask"]
    for each in followers:
        if each.match["mask"] is not mask:
            raise _Declined(f"{each.path} has another mask than its selection")
    return _Group(leader, followers, outputs)


def _rewrite(graph: fx.Graph, group: _Group, visibility: dict[fx.Node, fx.Node]) -> None:
    leader, operands = group.leader, group.leader.match
    _require_unwritten(leader.node, operands.nodes, _operands(leader))
    for each in group.followers:
        _require_unwritten(each.node, each.match.nodes, _operands(each))
    seen = _visibility_of(graph, leader, visibility)
    with graph.inserting_before(leader.node):
        weights = graph.call_function(torch.mul, (operands["weights"], operands["index_scale"]))
        arguments = (operands["query"], operands["keys"], weights, seen, leader.topk)
        selected = graph.call_function(select_requests, arguments)
    for node in (weights, selected):
        copy_provenance(node, leader.node)
    if group.outputs:
        with graph.inserting_before(leader.node):
            foreign = graph.call_function(foreign_indices, (selected, operands["width"]))
        copy_provenance(foreign, leader.node)
        foreign.meta["example_value"] = leader.node.meta["example_value"]
        for output in group.outputs:
            output.replace_input_with(leader.node, foreign)
    for each in group.followers:
        last = (selected, seen, leader.topk, each.match["scale"], _SPEC)
        with graph.inserting_before(each.node):
            attended = graph.call_function(attend_requests, (*_operands(each), *last))
        copy_provenance(attended, each.node)
        attended.meta["example_value"] = each.node.meta["example_value"]
        each.node.replace_all_uses_with(attended)
        erase_unread(graph, each.match.nodes)
    erase_unread(graph, operands.nodes)


def _operands(layer: Selection | Attention) -> list[fx.Node]:
    names = (
        ("query", "keys", "weights")
        if isinstance(layer, Selection)
        else ("q_nope", "q_pe", "kv_c", "k_pe", "kv_b_weight")
    )
    return [layer.match[name] for name in names]


def _require_unwritten(at: fx.Node, nodes: list[fx.Node], operands: list[fx.Node]) -> None:
    """What the old nodes read is unchanged where the new one will read it.

    Raises:
        _Declined: an operand is written between its first reader among ``nodes`` and ``at``.
    """
    inside = set(nodes)
    for operand in operands:
        root = _root(operand)
        node = min(user for user in operand.users if user in inside)
        while node is not at:
            if writes(node) and node not in inside and _root(node.args[0]) is root:
                raise _Declined(f"{node} writes what it reads")
            node = node.next


def _root(node: Any) -> Any:
    """The node whose memory ``node`` may show."""
    while called(node) in _VIEWS:
        node = node.args[0]
    return node


_VIEWS = frozenset(
    {"contiguous", "expand", "flatten", "getitem", "reshape", "split", "squeeze", "to"}
    | {"transpose", "unsqueeze", "view"}
)


def _visibility_of(graph: fx.Graph, leader: Selection, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """Intervals or mask, [B or 1, S, 2] or [B or 1, S, T], of a mask [B or 1, 1, S, T]."""
    mask = leader.match["mask"]
    if mask in known:
        return known[mask]
    causal = causality(mask)
    if causal is not None:
        with graph.inserting_before(causal.compare):
            node = graph.call_function(causal_intervals, (causal.kv, causal.q))
        copy_provenance(node, causal.compare)
    else:
        seen = condition(mask)
        if seen is None:
            raise _Declined("its mask is additive and comes from outside of the graph")
        rows = leader.node.meta["example_value"].shape[1]
        shape = seen.meta["example_value"].shape
        if len(shape) != 4 or not statically_known_true(shape[2] == rows):
            raise _Declined(f"its mask has the shape {list(shape)}")
        with graph.inserting_after(seen):
            node = graph.call_function(torch.select, (seen, 1, 0))
        copy_provenance(node, seen)
    known[mask] = node
    return node


def _summed(found: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Each layer with the ops that stand in it now, such as ``index_select, 2 rms_norm``."""
    for path in dict.fromkeys(path for path, _ in found):
        counts = Counter(op for where, op in found if where == path)
        yield path, ", ".join(op if n == 1 else f"{n} {op}" for op, n in sorted(counts.items()))
