"""Which rows go to which slots of which paged cache, whatever op writes them.

After functionalisation a write is ``auto_functionalized_v2(op, ..., _all_bases=[...])``. It takes
the old caches as bases, says which part of which base the op writes, and gives the op's results and
then a new value of each base.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ._edit import Argument
from ._torch_compat import AUTO_FUNCTIONALIZED, OpOverload

_, FUNCTIONALIZED = AUTO_FUNCTIONALIZED


@dataclass(frozen=True)
class _Parameters:
    """Names in the schema of an op: the cache that it writes, and what says where and how."""

    cache: str
    slots: str
    settings: tuple[str, ...]
    rows: tuple[str, ...] = ()


_MLA = _Parameters("cache", "slot_mapping", ("layout", "scale"))
_INDEX = _Parameters("index_cache", "index_slot_mapping", ("scale_store",))
_WRITING = {
    "mla_cache_write": (_Parameters(_MLA.cache, _MLA.slots, _MLA.settings, ("kv_c", "k_pe")),),
    "index_cache_write": (_Parameters("cache", "slot_mapping", _INDEX.settings, ("index_k",)),),
    "norm_rope_write": (_MLA,),
    "norm_rope_index_write": (_MLA, _INDEX),
}


@dataclass(frozen=True)
class CacheWrite:
    """One write of rows into one paged cache.

    node: the functionalised call. op: the name of the op that it calls.
    base: the old value of the tensor that the cache is, or is a view of.
    view: which part of ``base`` the cache is, as functionalisation describes it.
    slots: where the rows go. settings: how they are stored: by name.
    rows: what is stored; nothing where the op itself makes it.
    """

    node: fx.Node
    op: str
    base: fx.Node
    view: dict[str, Argument]
    slots: fx.Node
    settings: dict[str, Argument]
    rows: tuple[Argument, ...]


def cache_writes(graph: fx.Graph) -> list[CacheWrite]:
    """All functionalised writes into paged caches, in program order."""
    return [write for node in _calls(graph) for write in _writes_of(node)]


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=FUNCTIONALIZED))


def _writes_of(node: fx.Node) -> Iterator[CacheWrite]:
    op = node.args[0]
    if not isinstance(op, OpOverload) or op.namespace != "dsafx":
        return
    given: dict[str, Any] = dict(node.kwargs)
    for names in _WRITING.get(op._opname, ()):
        prefix = f"_{names.cache}_"
        view = {
            key.removeprefix(prefix): value
            for key, value in given.items()
            if key.startswith(prefix)
        }
        base = given["_all_bases"][view.pop("base_index")]
        settings = {name: given[name] for name in names.settings}
        rows = tuple(given[name] for name in names.rows)
        yield CacheWrite(node, op._opname, base, view, given[names.slots], settings, rows)


def functionalized_operands(op: str, writes: Sequence[CacheWrite]) -> dict[str, Argument]:
    """The keyword arguments with which a call of ``op`` does what ``writes`` do, in their order."""
    found: dict[str, Argument] = {}
    for names, write in zip(_WRITING[op], writes, strict=True):
        found |= {names.slots: write.slots, **write.settings}
    for number, (names, write) in enumerate(zip(_WRITING[op], writes, strict=True)):
        found[f"_{names.cache}_base_index"] = number
        found |= {f"_{names.cache}_{key}": value for key, value in write.view.items()}
    return {**found, "_all_bases": [write.base for write in writes]}


def new_values(write: CacheWrite) -> list[fx.Node]:
    """The nodes that show the base after the write."""
    bases: list[fx.Node] = list(write.node.kwargs["_all_bases"])  # type: ignore[arg-type]
    position = len(write.node.meta["val"]) - len(bases) + bases.index(write.base)
    return [
        user
        for user in write.node.users
        if user.target is operator.getitem and user.args[1] == position
    ]
