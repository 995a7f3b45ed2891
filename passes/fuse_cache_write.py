"""Fuse the cache writes of one layer into the op that makes what they store."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import fusion
from . import _norm_rope
from ._cache_effects import (
    FUNCTIONALIZED,
    CacheWrite,
    cache_writes,
    functionalized_operands,
    new_values,
)
from ._edit import replace, value_of
from ._layer import readers_of, rows_of
from ._norm_rope import NormRope, rewrite
from ._report import PassContext, PassReport
from ._torch_compat import OpOverload

_FUSED_BEFORE = (torch.ops.dsafx.norm_rope.default, torch.ops.dsafx.norm_rope_index.default)


def fuse_cache_write_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """Rewrite ``norm_rope``, or its parts, and the paged writes of its values to one op.

    Invariant: the caches hold what they held, and nothing else is written. In a graph both the
    writes and the op in their place are functionalised: they take the old caches and give new
    ones, so that readers of the new caches order themselves. What has to be seen to is the old
    ones. The op stands where the first part stood, hence above the writes that it replaces; were
    an old cache read in between, Inductor could not write in place and would clone the cache. So
    such a read declines, and so does a cache that is itself made in between.
    """
    report = PassReport("fuse_cache_write")
    for node in [write.node for write in cache_writes(graph) if write.op == "mla_cache_write"]:
        # Read anew, because each rewrite changes what other writes take.
        writes = cache_writes(graph)
        (write,) = (each for each in writes if each.node is node)
        group = _group_of(write)
        if isinstance(group, str):
            report.decline(write.node, group)
            continue
        which = fusion.NORM_ROPE_INDEX_WRITE if group.has_index_key else fusion.NORM_ROPE_WRITE
        device = value_of(write.base).device.type
        reason = fusion.reason_not_to_fuse(which, context.options.fuse, device)
        reason = reason or _fuse(graph, group, write, writes)
        if reason is None:
            report.rewrite(write.node, f"part of {which.op}")
        else:
            report.decline(write.node, reason)
    return report


def _group_of(write: CacheWrite) -> NormRope | str:
    """The parts that make what ``write`` stores, or the reason why they are not known."""
    kv, pe = (rows_of(stored) for stored in write.rows)
    if kv is None or pe is None:
        return "it stores a part of a tensor"
    if kv.target is operator.getitem and pe.target is operator.getitem:
        source = kv.args[0]
        if not isinstance(source, fx.Node) or source.target not in _FUSED_BEFORE:
            return "it stores what no norm_rope makes"
        group: NormRope | str | None = _norm_rope.fused_already(source)
    elif pe.target is torch.ops.dsafx.rope.default:
        group = _norm_rope.find(pe)
    else:
        group = None
    if group is None:
        return "it stores what no norm_rope makes"
    if isinstance(group, NormRope) and group.outputs[1:3] != (kv, pe):
        return "it stores other values of its layer"
    return group


def _fuse(
    graph: fx.Graph, group: NormRope, write: CacheWrite, writes: Sequence[CacheWrite]
) -> str | None:
    """Rewrite one group with its writes; the reason where it must stay."""
    ops, replaced = torch.ops.dsafx, [write]
    op = ops.norm_rope_write.default
    if group.has_index_key:
        op = ops.norm_rope_index_write.default
        key = group.outputs[3]
        mine = [each for each in writes if _stores(each, "index_cache_write", key)]
        if len(mine) != 1:
            return f"its index key goes to {len(mine)} paged caches, not 1"
        replaced += mine
    if len({each.base for each in replaced}) != len(replaced):
        return "its caches lie in one tensor"
    first, last = min(group.parts), max(max(group.parts), *(each.node for each in replaced))
    for each in replaced:
        if each.base.op != "placeholder" and first < each.base:
            return f"{each.base.name} is made between its parts"
        if any(first < reader for reader in _readers_of_old(each)):
            return f"the old value of {each.base.name} is read behind its first part"

    def fused(operands: dict[str, Any], writing: dict[str, Any]) -> tuple[Tensor, ...]:
        return functionalized(op, operands, writing)

    writing = functionalized_operands(op._opname, replaced)
    caches = rewrite(graph, group, fused, last, writing)
    if isinstance(caches, str):
        return caches
    for each, cache in zip(replaced, caches, strict=True):
        for old in new_values(each):
            replace(old, cache)
        graph.erase_node(each.node)
    return None


def _stores(write: CacheWrite, op: str, value: fx.Node) -> bool:
    return write.op == op and rows_of(write.rows[0]) is value


def _readers_of_old(write: CacheWrite) -> set[fx.Node]:
    """Who reads the cache's value before ``write``; the copy into the graph's input only writes."""
    readers = readers_of(write.base) - {write.node}
    copy = torch.ops.aten.copy_.default
    return {r for r in readers if r.target is not copy or r.args[1] is write.base}


def functionalized(
    op: OpOverload, operands: dict[str, Any], writing: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Call a writing op as functionalisation would: schema order, then views, then bases.

    Returns:
        The results of ``op``, and a new value of each base.
    """
    given = {**operands, **writing}
    mine = {}
    for parameter in op._schema.arguments:
        if parameter.alias_info is None:
            known = parameter.name in given
            mine[parameter.name] = given.pop(parameter.name) if known else parameter.default_value
    results: Any = FUNCTIONALIZED(op, **mine, **given)
    return tuple(results)
