"""Whether nodes read what they read before, and new nodes what those in their place read."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from ._edit import STANDS_FOR, VIEWS, Argument
from ._torch_compat import is_erased, statically_known_true
from ._verify_entered import Entered, Final, outputs_of

Problems = Iterator[tuple[fx.Node, str]]


def misread_operands(final: Final) -> Problems:
    """Nodes that entered and now read something else than they did, or than what stands for it."""
    for node, (args, kwargs) in final.entered.arguments.items():
        untouched = node.args is args and node.kwargs is kwargs
        if is_erased(node) or untouched or node.op == "output":
            continue
        was, now = _leaves((args, kwargs)), _leaves((node.args, node.kwargs))
        if len(was) != len(now):
            yield node, f"had {len(was)} arguments and has {len(now)}"
            continue
        for before, after in zip(was, now, strict=True):
            if not _is_kept(final, before, after):
                yield node, f"no longer reads {before}"


def foreign_operands(final: Final) -> Problems:
    """New nodes that read more than was read by the nodes that they stand for.

    A pass says by ``replace`` which node gives whose value, and its word is taken for that. What it
    cannot say is that the value depends on something that the old one did not depend on: another
    layer's latents, say.
    """
    by_name = {node.name: node for node in final.entered.arguments}
    stand_ins: set[fx.Node] = set()
    replaced: dict[fx.Node, list[fx.Node]] = {}
    for node in final.new:
        old = [by_name[name] for name in node.meta.get(STANDS_FOR, ()) if name in by_name]
        if old:
            stand_ins.add(node)
            replaced.setdefault(_maker(node, final), []).extend(old)
    for made, old in replaced.items():
        allowed = _read_by(old, final)
        foreign = [read for read in _reads_of(made, stand_ins, final) if read not in allowed]
        if foreign:
            yield made, f"reads {foreign[0]}, which nothing that it stands for has read"


def changed_outputs(final: Final) -> Iterator[str | None]:
    """For each output None, or why it is not what it was."""
    outputs, were = outputs_of(final.graph), final.entered.outputs
    if len(outputs) != len(were):
        yield f"{len(were)} outputs became {len(outputs)}"
        return
    for number, (was, now) in enumerate(zip(were, outputs, strict=True)):
        if was is now:
            yield None
        elif not _is_kept(final, was, now):
            yield f"output {number} was {was} and is {now}"
        else:
            alike = _alike(was.meta["val"], now.meta["val"])
            yield None if alike else f"output {number} changed its shape or dtype"


def entered_source(node: fx.Node, entered: Entered) -> fx.Node:
    """The tensor that an entered node showed, behind views; one of several results is a tensor."""
    while node.target in VIEWS and node.target is not operator.getitem:
        node = entered.inputs(node)[0]
    return node


def _leaves(arguments: Any) -> list[Argument]:
    leaves: list[Argument] = []
    fx.node.map_aggregate(arguments, leaves.append)
    return leaves


def _is_kept(final: Final, was: Argument, now: Argument) -> bool:
    if isinstance(was, fx.Node):
        return now is final.standing(was)
    if was is now:
        return True
    # Comparing symbols would put a guard on them.
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return type(was) is type(now) and (isinstance(was, symbols) or was == now)


def _maker(node: fx.Node, final: Final) -> fx.Node:
    """The new call that makes a value, behind views: of several results, that of them all."""
    while node.target in VIEWS:
        source = node.args[0]
        if not isinstance(source, fx.Node) or source not in final.new:
            break
        node = source
    return node


def _read_by(nodes: Iterable[fx.Node], final: Final) -> set[fx.Node]:
    """What stands now for whatever ``nodes`` depended on through nodes that are gone, and views."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for read in final.entered.inputs(node):
            stands = final.standing(read)
            if stands is not None:
                found.add(stands)
            if is_erased(read) or read.target in VIEWS:
                waiting.append(read)
    return found


def _reads_of(made: fx.Node, stand_ins: set[fx.Node], final: Final) -> Iterator[fx.Node]:
    """What a new node depends on, through new nodes that stand for nothing themselves."""
    seen: set[fx.Node] = set()
    waiting = list(made.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in final.new or node in stand_ins:
            yield node
        else:
            waiting.extend(node.all_input_nodes)


def _alike(was: Any, now: Any) -> bool:
    if not isinstance(was, torch.Tensor) or not isinstance(now, torch.Tensor):
        return type(was) is type(now)
    if was.dtype != now.dtype or len(was.shape) != len(now.shape):
        return False
    return not any(statically_known_true(a != b) for a, b in zip(was.shape, now.shape, strict=True))
