"""The DSA layers of a Dynamo graph: where each selection is made, and who attends with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ._dsa_patterns import EAGER_ATTENTION, KEY_WRITES, SDPA_ATTENTION, SELECTION
from ._match import Either, Match, Mismatch, called, match

# Attention classes of transformers 5.24 whose indexer and attention have the forms of
# ``_dsa_patterns``.
ATTENTION = frozenset(
    {"AXK2Attention", "DeepseekV32Attention", "Dots3NoteTextAttention", "GlmMoeDsaAttention"}
)


@dataclass(frozen=True)
class Selection:
    """Where an indexer selects.

    path: of the attention module. node: [B, S, min(K, T)] int32. topk: K, or the number of keys
    where that is constant and not above K, which selects the same.
    """

    path: str
    node: fx.Node
    match: Match
    topk: int


@dataclass(frozen=True)
class Attention:
    """Where a layer attends.

    path: of the attention module. node: [B, N, S, V].
    """

    path: str
    node: fx.Node
    match: Match


@dataclass
class Layers:
    """What was found, and what looked like a layer and was none, by path and with the reason."""

    selections: list[Selection] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    declined: list[tuple[str, str]] = field(default_factory=list)


def find_layers(graph: fx.Graph) -> Layers:
    """All selections and attentions inside of the known attention classes, in program order."""
    layers = Layers()
    for node in graph.nodes:
        name = called(node)
        if name not in ("topk", "scaled_dot_product_attention", "dropout"):
            continue
        owner = owner_of(node)
        if owner is None:
            path, kind = (_modules(node) or [("", "")])[-1]
            if name == "topk" and kind.endswith("Indexer"):
                layers.declined.append((path, "the graph does not say which attention it is of"))
            continue
        path, kind, inner = owner
        if kind not in ATTENTION:
            if name == "topk" and inner.endswith("Indexer"):
                layers.declined.append((path, f"{kind} is not a layer that is known"))
            continue
        try:
            if name == "topk":
                layers.selections.append(_selection(path, node))
            elif name == "scaled_dot_product_attention":
                layers.attentions.append(_attention(path, node, SDPA_ATTENTION))
            else:
                layers.attentions.append(_attention(path, _only_user(node), EAGER_ATTENTION))
        except Mismatch as reason:
            what = "selection" if name == "topk" else "attention"
            layers.declined.append((path, f"its {what} differs: {reason}"))
    return layers


def owner_of(node: fx.Node) -> tuple[str, str, str] | None:
    """Path and class of the outermost attention module that a node belongs to, and innermost class.

    None for a node outside of any attention module.
    """
    modules = _modules(node)
    for path, kind in modules:
        if kind.endswith("Attention"):
            return path, kind, modules[-1][1]
    return None


def _modules(node: fx.Node) -> list[tuple[str, str]]:
    """Path and class name of the modules that a node belongs to, the outermost first."""
    return [
        (_short(path), (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2])
        for path, kind in node.meta.get("nn_module_stack", {}).values()
    ]


def _short(path: str) -> str:
    """``L['self'].model.layers.0.self_attn`` without the part that names the compiled function."""
    return path.partition("].")[2] or path


def _only_user(node: fx.Node) -> fx.Node:
    if len(node.users) != 1:
        raise Mismatch(f"{node} has {len(node.users)} readers")
    return next(iter(node.users))


def _selection(path: str, topk: fx.Node) -> Selection:
    node = _only_user(_only_user(topk))
    found = match(SELECTION, node)
    _require_private(found, node)
    width = found["width"]
    if called(width) == "sym_min":
        width = width.args[0]
    if not isinstance(width, int):
        raise Mismatch(f"its width is {width}, and K is not known")
    # Only a positive factor may move from in front of the relu to behind it. A symbolic one stands
    # for the constant of the module, and would be pinned by a question about its sign.
    factor = found["index_scale"]
    if not _is_number(factor) or (isinstance(factor, float) and factor <= 0):
        raise Mismatch(f"its scores are scaled by {factor}")
    return Selection(path, node, found, width)


def _attention(path: str, node: fx.Node, pattern: Any) -> Attention:
    found = match(pattern, node)
    _match_key_writes(found)
    _require_private(found, node)
    _require_constants(found)
    weight: Tensor = found["kv_b_weight"].meta["example_value"]
    if not weight.is_floating_point() or weight.itemsize < 2:
        raise Mismatch(f"kv_b_proj has a weight of {weight.dtype}")
    heads, width = found["q_nope"].meta["example_value"].shape[1::2]
    if weight.shape[0] != heads * found["expanded"]:
        raise Mismatch(f"kv_b_proj does not give {heads} heads of {found['expanded']}")
    if width != found["nope"]:
        raise Mismatch(f"{width} dims of its queries meet {found['nope']} of its keys")
    return Attention(path, node, found)


def _is_number(value: Any) -> bool:
    known = value.meta.get("example_value") if isinstance(value, fx.Node) else value
    return isinstance(known, (float, torch.SymFloat))


def _require_constants(found: Match) -> None:
    """The numbers that the replacement takes from the graph, or takes for granted.

    Raises:
        Mismatch: one of them is another.
    """
    if not _is_number(found["scale"]):
        raise Mismatch(f"its logits are scaled by {found['scale']}")
    if "minimum" not in found.bound:
        return
    query: Tensor = found["q_nope"].meta["example_value"]
    lowest = torch.finfo(query.dtype).min
    if not isinstance(found["minimum"], float) or found["minimum"] > lowest:
        raise Mismatch(f"keys that are not selected get {found['minimum']}")
    if found["dtype"] != query.dtype:
        raise Mismatch(f"its weights are rounded to {found['dtype']}")


def _match_key_writes(found: Match) -> None:
    """Add the writes of both parts of the expanded keys, one each, which bind ``k_pe``.

    Raises:
        Mismatch: the keys are made up in another way, or read by more than the attention.
    """
    parts = [user for user in found["keys"].users if called(user) == "getitem"]
    if len(parts) != 2 or len(found["keys"].users) != 3:
        raise Mismatch("its keys are not [nope | rotated], read once")
    for part in parts:
        match(Either(KEY_WRITES), _only_user(part), into=found)


def _require_private(found: Match, result: fx.Node) -> None:
    """Nothing but the layer reads what stands between its operands and ``result``.

    Raises:
        Mismatch: somebody does, so that the replaced work would be done beside the new.
    """
    inside = set(found.nodes)
    for node in inside - {result}:
        reader = next((user for user in node.users if user not in inside), None)
        if reader is not None:
            raise Mismatch(f"{node} is also read by {reader}")
