"""Put ``rms_norm``, ``layer_norm`` and ``rope`` in place of their chains in recognised layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor, fx

from ..ops._requests import normed_requests, packed_angles, rotated_requests
from ._dsa_layers import owner_of
from ._edit import copy_provenance
from ._match import Match, Mismatch, Pattern, called, erase_unread, match
from ._norm_patterns import HALF_SPLIT, INTERLEAVED_TO_HALF, LAYER_NORM, RMS_NORM


@dataclass(frozen=True)
class _Form:
    """An op and the chain that it stands for; ``style`` is that of a rotation."""

    op: str
    chain: Pattern
    style: str | None = None


# By the last call of the chain.
_FORMS = {
    "mul": _Form("rms_norm", RMS_NORM),
    "layer_norm": _Form("layer_norm", LAYER_NORM),
    "cat": _Form("rope", INTERLEAVED_TO_HALF, "interleaved_to_half"),
    "add": _Form("rope", HALF_SPLIT, "half"),
}


def recognise_norms(graph: fx.Graph, paths: Collection[str]) -> Iterator[tuple[str, str]]:
    """Rewrite the norms and rotations inside of the attention modules named by ``paths``.

    The parts are rounded as the ops round, once at the end. All rotations by the same angles read
    the same packed rows of them. A chain that differs is left alone; it is as right, and the fusion
    of norms and rotations does without it.

    Yields:
        The path and the op of each rewrite.
    """
    angles: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        form = _FORMS.get(called(node) or "")
        owner = None if form is None else owner_of(node)
        if form is None or owner is None or owner[0] not in paths:
            continue
        try:
            found = match(form.chain, node)
            _require_alike(form, found, node)
        except Mismatch:
            continue
        _replace(graph, node, form, found, angles)
        yield owner[0], form.op


def _replace(
    graph: fx.Graph, node: fx.Node, form: _Form, found: Match, angles: dict[fx.Node, fx.Node]
) -> None:
    x = found["x"]
    with graph.inserting_before(node):
        if form.style is None:
            arguments = (x, found["weight"], found.bound.get("bias"), found["eps"])
            new = graph.call_function(normed_requests, arguments)
        else:
            for name in ("cos", "sin"):
                if found[name] not in angles:
                    angles[found[name]] = graph.call_function(packed_angles, (found[name], x))
                    copy_provenance(angles[found[name]], node)
            turn = (angles[found["cos"]], angles[found["sin"]], form.style, found["heads_dim"])
            new = graph.call_function(rotated_requests, (x, *turn))
    copy_provenance(new, node)
    new.meta["example_value"] = node.meta["example_value"]
    node.replace_all_uses_with(new)
    erase_unread(graph, found.nodes)


def _require_alike(form: _Form, found: Match, node: fx.Node) -> None:
    """Tokens in one dtype before and after, whose rotated dims are two for each angle.

    Raises:
        Mismatch: the op would give another shape or dtype than the chain.
    """
    x: Tensor = found["x"].meta["example_value"]
    if node.meta["example_value"].dtype != x.dtype:
        raise Mismatch("it changes the dtype")
    if form.style is None:
        if x.dim() != 3:
            raise Mismatch("it is no norm of tokens")
    elif x.dim() != 4 or found["heads_dim"] not in (1, 2) or x.shape[-1] != 2 * found["half"]:
        raise Mismatch("it is no rotation of heads of tokens")
