"""Whether every write is still there, in place, and does what it did."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ._cache_effects import CacheWrite, cache_writes
from ._edit import STANDS_FOR, VIEWS
from ._torch_compat import AUTO_FUNCTIONALIZED, is_erased
from ._verify_entered import Final, bases_of, late_readers
from ._verify_wiring import Problems, entered_source

# What a fused op writes of its own results, by the write that it stands for.
_RESULTS = {"mla_cache_write": (1, 2), "index_cache_write": (3,)}


def lost_writes(final: Final) -> list[tuple[fx.Node, str | None]]:
    """Every write of the graph as it entered, and None or why it is not there."""
    moved = _moved(final)
    problems: list[tuple[fx.Node, str | None]] = []
    for write in final.entered.writes:
        kept = not is_erased(write) or write in moved
        if not kept and write.target not in AUTO_FUNCTIONALIZED:
            # A concatenation that is returned: the index key, which a fused op gives.
            kept = final.standing(write) is not None
        problems.append((write, None if kept else "a write of the graph is gone"))
    return problems


def added_writes(final: Final) -> Problems:
    """New nodes that write what no write that is gone wrote."""
    expected = set(_moved(final).values())
    for node in final.new:
        writes = node.target in AUTO_FUNCTIONALIZED or bases_of(node)
        copies = node.target is torch.ops.aten.copy_.default
        if (writes or copies) and node not in expected:
            yield node, "a write that the graph did not have"


def late_reads(final: Final) -> Problems:
    """Readers of a cache's old value that stand behind the write of the new one, and did not.

    The value is right even so, but Inductor then clones the cache to keep it.
    """
    for base, readers in late_readers(final.graph).items():
        known = final.entered.late.get(base, frozenset())
        for node in readers:
            names = {node.name, final.origin(node), *node.meta.get(STANDS_FOR, ())}
            if not names & known:
                yield node, f"reads the old value of {base.name} behind its write"


def _moved(final: Final) -> dict[fx.Node, fx.Node]:
    """Each erased write into paged caches, with the one new call that does all that it did."""
    new = [write for write in cache_writes(final.graph) if write.node in final.new]
    moved: dict[fx.Node, fx.Node] = {}
    claimed: set[int] = set()
    for write in final.entered.paged:
        if not is_erased(write.node):
            continue
        fitting = [n for n, each in enumerate(new) if _does(each, write, final)]
        if len(fitting) == 1 and fitting[0] not in claimed:
            claimed.add(fitting[0])
            moved[write.node] = new[fitting[0]].node
    unclaimed = {each.node for n, each in enumerate(new) if n not in claimed}
    return {write: call for write, call in moved.items() if call not in unclaimed}


def _does(now: CacheWrite, was: CacheWrite, final: Final) -> bool:
    """Whether a call writes the rows of an erased write to the same slots of the same cache."""
    same = (now.base, now.view, now.slots, now.settings) == final.standing_argument(
        (was.base, was.view, was.slots, was.settings)
    )
    return same and _stored(now, was) == [_source(row, final) for row in was.rows]


def _stored(now: CacheWrite, was: CacheWrite) -> list[tuple[Any, Any] | None]:
    return [(now.node, number) for number in _RESULTS.get(was.op, ())]


def _source(row: Any, final: Final) -> tuple[Any, Any] | None:
    """The call, and the number among its results, that an entered tensor shows now."""
    node = final.standing(entered_source(row, final.entered))
    while node is not None and node.target in VIEWS and node.target is not operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    if node is None or node.target is not operator.getitem:
        return None
    return node.args[0], node.args[1]
