"""The norms and rotations of one layer, found in a graph and put back as one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ._edit import Argument, arguments, erase, hoist, inline, replace, strip_views, value_of
from ._layer import (
    columns,
    hidden_states,
    open_shape,
    projection_of,
    projections_of,
    readers_of,
    rotated,
    same_rows,
    same_shape,
    shaped,
    writes_between,
)
from ._torch_compat import OpOverload

_INDEX_OPERANDS = ("index_k", "index_weight", "index_bias", "index_eps", "index_style")
# The operands that have a row for each token, in the order of the outputs that they become.
ROWS = ("q_c", "kv_c", "k_pe", "index_k")


@dataclass(frozen=True)
class NormRope:
    """The parts of one layer that ``norm_rope`` or ``norm_rope_index`` stands for.

    parts: all nodes that go.
    operands: arguments of the fused op by name; ``index_k`` is there in a layer with an indexer.
    outputs: the nodes that show q_c, kv_c, k_pe and, with an indexer, index_k.
    """

    parts: tuple[fx.Node, ...]
    operands: dict[str, Argument]
    outputs: tuple[fx.Node, ...]

    @property
    def has_index_key(self) -> bool:
        """Whether the layer's index key is one of the outputs."""
        return "index_k" in self.operands


def fused_already(node: fx.Node) -> NormRope | str:
    """The group of a ``norm_rope`` or ``norm_rope_index`` call; a reason where it is unlike one."""
    picked = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    count = len(value_of(node))
    if len(picked) != len(node.users) or set(picked) != set(range(count)):
        return "not all of its outputs are read one by one"
    return NormRope((node,), arguments(node), tuple(picked[number] for number in range(count)))


def find(rope: fx.Node) -> NormRope | str | None:
    """The group of the layer that ``rope`` rotates the key of.

    The parts are told by what they read: all are projections of the same hidden states, the rotated
    dims come from the projection that also gives a normed latent, and all rotations share their
    angles.

    Returns:
        None where ``rope`` rotates something else, or the reason why the parts do not fit.
    """
    projection = projection_of(arguments(rope)["x"])
    hidden = hidden_states(projection)
    if projection is None or hidden is None:
        return None
    norms = _beside(torch.ops.dsafx.rms_norm.default, hidden)
    if not any(projection_of(arguments(norm)["x"]) is projection for norm in norms):
        return None
    if len(norms) != 2:
        return f"its hidden states have {len(norms)} normed projections, not 2"
    kv = _latent_of(rope, norms)
    if kv is None:
        return "its projection has two normed latents, and none of them ends where it starts"
    (q,) = (norm for norm in norms if norm is not kv)
    if len(_reading(torch.ops.dsafx.rope.default, projection)) != 1:
        return "its projection is rotated more than once"
    value = value_of(rope)
    if value.dim() == 3 and value.shape[1] != 1:
        return f"its key has {value.shape[1]} heads, not 1"
    if not same_rows(q, kv, rope):
        return "its parts are not rows of the same tokens"
    of_q, of_kv, of_pe = arguments(q), arguments(kv), arguments(rope)
    if of_q["eps"] != of_kv["eps"]:
        return f"its norms have unlike eps {of_q['eps']} and {of_kv['eps']}"
    operands = {
        "q_c": of_q["x"],
        "q_weight": of_q["weight"],
        "kv_c": of_kv["x"],
        "kv_weight": of_kv["weight"],
        "k_pe": of_pe["x"],
        "cos": of_pe["cos"],
        "sin": of_pe["sin"],
        "eps": of_q["eps"],
        "style": of_pe["style"],
    }
    return _with_index_key(NormRope((q, kv, rope), operands, (q, kv, rope)), hidden)


def _with_index_key(latents: NormRope, hidden: fx.Node) -> NormRope | str:
    """The group with the layer's index key, where the layer has one."""
    norms = _beside(torch.ops.dsafx.layer_norm.default, hidden)
    if not norms:
        return latents
    if len(norms) > 1:
        return f"its hidden states have {len(norms)} LayerNorms"
    (norm,) = norms
    rotations = _reading(torch.ops.dsafx.rope.default, norm)
    if len(rotations) != 1:
        return f"its LayerNorm is rotated {len(rotations)} times"
    mine, theirs = latents.operands, arguments(rotations[0])
    if (mine["cos"], mine["sin"]) != (theirs["cos"], theirs["sin"]):
        return "its index key is rotated by other angles"
    key = rotated(rotations[0])
    if key is None or readers_of(norm) != {key.rope, key.joined}:
        return "its index key is not [rotated | passed] of its LayerNorm"
    if not same_rows(latents.outputs[0], key.joined):
        return "its index key has other rows"
    index = arguments(norm)
    values = (index["x"], index["weight"], index["bias"], index["eps"], theirs["style"])
    return NormRope(
        (*latents.parts, norm, key.rope, key.joined),
        {**mine, **dict(zip(_INDEX_OPERANDS, values, strict=True))},
        (*latents.outputs, key.joined),
    )


def _beside(norm: OpOverload, hidden: fx.Node) -> list[fx.Node]:
    """The norms of one kind whose operands are projections of ``hidden``."""
    return [each for source in projections_of(hidden) for each in _reading(norm, source)]


def _reading(op: OpOverload, source: fx.Node) -> list[fx.Node]:
    """The calls of ``op`` whose ``x`` shows ``source``, in program order."""
    found = [reader for reader in readers_of(source) if reader.target is op]
    return sorted(each for each in found if strip_views(arguments(each)["x"]) is source)


def _latent_of(rope: fx.Node, norms: Sequence[fx.Node]) -> fx.Node | None:
    """The norm of the columns in front of those that ``rope`` rotates."""
    projection = projection_of(arguments(rope)["x"])
    beside = [norm for norm in norms if projection_of(arguments(norm)["x"]) is projection]
    if len(beside) == 1:
        return beside[0]
    pe = columns(arguments(rope)["x"])
    for norm in beside:
        shown = columns(arguments(norm)["x"])
        if pe is not None and shown is not None and shown.end == pe.start:
            return norm
    return None


def rewrite(
    graph: fx.Graph,
    group: NormRope,
    fused: Callable[..., Sequence[Tensor]],
    last: fx.Node,
    *more: Argument,
) -> list[fx.Node] | str:
    """Put one call where the first part of a group stands; the reason where it must not be.

    Args:
        graph: the graph of the group.
        group: what goes.
        fused: called with the group's operands, those in ``ROWS`` as [T, C], and ``more``; its
            first results are those of the group.
        last: the last node that the call stands for.
        more: further arguments, nodes in nested lists and dicts included.

    Returns:
        The nodes of the results of ``fused`` that are not the group's.
    """
    first = min(group.parts)
    if writes_between(first, last):
        return "a write stands between its parts"
    operands = group.operands
    rows = [name for name in ROWS if name in operands]
    shapes = [open_shape(value_of(output)) for output in group.outputs]
    for name, output, shape in zip(rows, group.outputs, shapes, strict=True):
        if shape is None and not same_shape(output, operands[name]):
            return f"{output.name} has more than one symbolic size"

    def on_values(values: dict[str, Any], more: Sequence[Any]) -> list[Tensor]:
        flat = {name: _as_rows(value) if name in rows else value for name, value in values.items()}
        results = list(fused(flat, *more))
        for number, (name, shape) in enumerate(zip(rows, shapes, strict=True)):
            results[number] = shaped(results[number], shape, values[name])
        return results

    inputs: list[fx.Node] = []
    fx.node.map_arg((operands, more), inputs.append)
    try:
        hoist(inputs, before=first)
    except ValueError as dependent:
        return str(dependent)
    results = inline(graph, first, on_values, [operands, more])
    for output, result in zip(group.outputs, results, strict=False):
        replace(output, result)
    erase(*group.parts)
    return list(results[len(group.outputs) :])


def _as_rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
