"""Fuse the norms and rotations between one layer's down-projections and its caches."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..fusion import norm_rope
from ._edit import VIEWS, arguments, calls, emit, hoist, replace, strip_views, value_of
from ._report import PassContext, PassReport
from ._torch_compat import is_erased

aten = torch.ops.aten

# How a bias-free or biased linear layer looks after decomposition, and which operand holds the
# activations.
_PROJECTIONS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0}
_CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})


@dataclass(frozen=True)
class _IndexKey:
    """``cat(rope(n[:, :R]), n[:, R:])`` with ``n = layer_norm(wk(x))``."""

    norm: fx.Node
    rope: fx.Node
    joined: fx.Node


@dataclass(frozen=True)
class _Latents:
    """The two RMSNorms and the RoPE of one layer; the kernel treats ``q`` and ``kv`` alike."""

    q: fx.Node
    kv: fx.Node
    k_pe: fx.Node


def fuse_norm_rope_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """Rewrite ``rms_norm``, ``rms_norm`` and ``rope`` of one layer, and its index key, to one op.

    Invariant: the parts are those of one layer, which shows in the graph: all are projections of
    the same hidden states, the rotated dims come from the projection that also gives a normed
    latent, and all rotations share their angles. Where several choices fit, nothing is fused. The
    fused op stands where the first part stood and its operands move above it, which is right only
    while nothing in between writes; so a write there declines.
    """
    report = PassReport("fuse_norm_rope")
    for rope in calls(graph, torch.ops.dsafx.rope.default):
        if is_erased(rope):
            continue
        found = _latents_of(graph, rope)
        if found is None:
            continue
        if isinstance(found, str):
            report.decline(rope, found)
            continue
        key = _index_key_of(graph, rope)
        if isinstance(key, str):
            report.decline(rope, key)
            continue
        fusion = norm_rope.NORM_ROPE if key is None else norm_rope.NORM_ROPE_INDEX
        device = value_of(rope).device.type
        reason = norm_rope.reason_not_to_fuse(fusion, context.options.fuse, device)
        reason = reason or _fuse(graph, found, key)
        if reason is None:
            report.rewrite(rope, f"part of {fusion.op}")
        else:
            report.decline(rope, reason)
    return report


def _fuse(graph: fx.Graph, latents: _Latents, key: _IndexKey | None) -> str | None:
    """Rewrite one group; a reason where it must stay."""
    parts = [latents.q, latents.kv, latents.k_pe]
    if key is not None:
        parts += [key.norm, key.rope, key.joined]
    first, last = min(parts), max(parts)
    if _writes_between(first, last):
        return "a write stands between its parts"
    q, kv, pe = arguments(latents.q), arguments(latents.kv), arguments(latents.k_pe)
    if q["eps"] != kv["eps"]:
        return f"its norms have unlike eps {q['eps']} and {kv['eps']}"
    operands = [q["x"], q["weight"], kv["x"], kv["weight"], pe["x"]]
    angles = [pe["cos"], pe["sin"], q["eps"], pe["style"]]
    if key is None:
        target, args = torch.ops.dsafx.norm_rope.default, [*operands, *angles]
    else:
        index, rotation = arguments(key.norm), arguments(key.rope)
        target = torch.ops.dsafx.norm_rope_index.default
        args = [*operands, index["x"], index["weight"], index["bias"], *angles]
        args += [index["eps"], rotation["style"]]
    try:
        hoist([arg for arg in args if isinstance(arg, fx.Node)], before=first)
    except ValueError as dependent:
        return str(dependent)
    with graph.inserting_before(first):
        fused = emit(graph, target, *args, origin=latents.k_pe)
        outputs = [
            emit(graph, operator.getitem, fused, number, origin=latents.k_pe)
            for number in range(3 if key is None else 4)
        ]
    replaced = [latents.q, latents.kv, latents.k_pe] + ([] if key is None else [key.joined])
    for part, output in zip(replaced, outputs, strict=True):
        replace(part, output)
    return None


def _latents_of(graph: fx.Graph, rope: fx.Node) -> _Latents | str | None:
    """The layer's latents whose rotated part is ``rope``; None where it rotates something else."""
    projection = strip_views(arguments(rope)["x"])
    hidden = _hidden_states(projection)
    if hidden is None:
        return None
    norms = [
        norm
        for norm in calls(graph, torch.ops.dsafx.rms_norm.default)
        if _hidden_states(strip_views(arguments(norm)["x"])) is hidden
    ]
    beside = [norm for norm in norms if strip_views(arguments(norm)["x"]) is projection]
    if not beside:
        return None
    if len(norms) != 2:
        return f"its hidden states have {len(norms)} normed projections, not 2"
    if sum(strip_views(arguments(each)["x"]) is projection for each in _ropes(graph)) != 1:
        return "its projection is rotated more than once"
    kv = beside[-1]
    (q,) = (norm for norm in norms if norm is not kv)
    values = [value_of(each) for each in (q, kv, rope)]
    if any(value.dim() != 2 or value.shape[0] != values[0].shape[0] for value in values):
        return "its parts are not rows of the same tokens"
    return _Latents(q, kv, rope)


def _index_key_of(graph: fx.Graph, rope: fx.Node) -> _IndexKey | str | None:
    """The index key of the layer of ``rope``; None without one, a reason where it does not fit."""
    hidden = _hidden_states(strip_views(arguments(rope)["x"]))
    norms = [
        norm
        for norm in calls(graph, torch.ops.dsafx.layer_norm.default)
        if _hidden_states(strip_views(arguments(norm)["x"])) is hidden
    ]
    if not norms:
        return None
    if len(norms) > 1:
        return f"its hidden states have {len(norms)} LayerNorms"
    rotations = [
        each
        for each in _ropes(graph)
        if isinstance(arguments(each)["x"], fx.Node)
        and strip_views(arguments(each)["x"]) is norms[0]
    ]
    if len(rotations) != 1:
        return f"its LayerNorm is rotated {len(rotations)} times"
    mine, theirs = arguments(rope), arguments(rotations[0])
    if (mine["cos"], mine["sin"]) != (theirs["cos"], theirs["sin"]):
        return "its index key is rotated by other angles"
    joined = _joined(norms[0], rotations[0])
    return (
        joined if joined is not None else "its index key is not [rotated | passed] of its LayerNorm"
    )


def _joined(norm: fx.Node, rope: fx.Node) -> _IndexKey | None:
    if len(rope.users) != 1:
        return None
    (cat,) = rope.users
    if cat.target is not aten.cat.default or len(arguments(cat)["tensors"]) != 2:
        return None
    first, second = arguments(cat)["tensors"]
    dim = arguments(cat)["dim"]
    rotated, width = value_of(rope).shape[-1], value_of(norm).shape[-1]
    rows = value_of(norm).dim() == 2 and dim in (1, -1)
    if not rows or first is not rope or not isinstance(second, fx.Node):
        return None
    if _columns(arguments(rope)["x"], norm) != (0, rotated):
        return None
    if _columns(second, norm) != (rotated, width):
        return None
    inside = _readers(norm) - {rope, cat}
    return None if inside else _IndexKey(norm, rope, cat)


def _columns(node: Any, source: fx.Node) -> tuple[int, int] | None:
    """Which columns of the rows of ``source`` a slice or a split shows."""
    if node.target is aten.slice.Tensor:
        args = arguments(node)
        width = value_of(source).shape[-1]
        if args["self"] is source and args["dim"] in (1, -1) and args["step"] == 1:
            return args["start"] or 0, width if args["end"] is None else min(args["end"], width)
    elif node.target is operator.getitem and node.args[0].target in (
        aten.split_with_sizes.default,
        aten.split.Tensor,
    ):
        split = arguments(node.args[0])
        parts = [part.shape[-1] for part in node.args[0].meta["val"]]
        if split["self"] is source and split["dim"] in (1, -1):
            start = sum(parts[: node.args[1]])
            return start, start + parts[node.args[1]]
    return None


def _readers(node: fx.Node) -> set[fx.Node]:
    """Who reads the values of ``node``, views looked through."""
    readers: set[fx.Node] = set()
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user.op == "call_function" and user.target in VIEWS and user.users:
            waiting.extend(user.users)
        elif user.users or user.op == "output":
            readers.add(user)
    return readers


def _ropes(graph: fx.Graph) -> list[fx.Node]:
    return calls(graph, torch.ops.dsafx.rope.default)


def _hidden_states(projection: Any) -> fx.Node | None:
    """What a projection projects, behind views and casts; None if it is no projection."""
    if not isinstance(projection, fx.Node) or projection.target not in _PROJECTIONS:
        return None
    source = projection.args[_PROJECTIONS[projection.target]]
    while isinstance(source, fx.Node):
        shown = strip_views(source)
        if shown.target not in _CASTS:
            return shown
        source = shown.args[0]
    return None


def _writes_between(first: fx.Node, last: fx.Node) -> bool:
    node = first
    while node is not last:
        node = node.next
        if node.op == "call_function" and node.is_impure():
            return True
    return False
