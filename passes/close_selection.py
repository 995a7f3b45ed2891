"""Replace the scoring of short rows by its closed form, and drop selections that nothing reads."""

from __future__ import annotations

import torch
from torch import fx

from ..ops import routing
from ._edit import arguments, emit, erase, replace, selects, value_of
from ._oracles import burnt_in, static
from ._report import PassContext, PassReport


def close_selection_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """Rewrite ``index_select`` to ``causal_positions`` where no row sees more than K keys.

    Invariant: the selection's value is unchanged (contract, closed form of a short row), so its
    consumers need no thought. They are its users in the graph: the layers of its index group that
    select, a draft step, an output. A selection without one disappears from inference graphs. What
    becomes dead by either, the indexer's query projection included, goes with it; the index-key
    cache write is a mutation and stays.

    A guard is spent on a fresh prefill alone. In a step behind a longer prefix the closed form
    would save the projection of few rows, and the guard would cost a second compile while somebody
    generates, as soon as the context passes K.
    """
    report = PassReport("close_selection")
    # Last first: what goes with one selection may have been all that read an earlier one.
    for node in reversed([each for each in graph.nodes if selects(each)]):
        if not node.users:
            if context.inference:
                erase(node)
                report.remove(node, "nothing reads it")
            else:
                report.decline(node, "nothing reads it, but gradients may be asked of this graph")
            continue
        if node.target is not torch.ops.dsafx.index_select.default:
            continue
        args = arguments(node)
        reason = _reason_to_leave(args, context)
        if reason is not None:
            report.decline(node, reason)
            continue
        length, topk = args["max_kv_len"], args["topk"]
        # The premise can only break where the length is an input of the graph (C20).
        premise = (topk,) if isinstance(value_of(length), torch.SymInt) else ()
        with graph.inserting_before(node):
            closed = emit(
                graph,
                torch.ops.dsafx.causal_positions.default,
                args["ks"],
                args["ke"],
                length,
                topk,
                *premise,
                origin=node,
            )
        replace(node, closed)
        report.matched += 1
    report.removed.reverse()
    report.declined.reverse()
    return report


def _reason_to_leave(args: dict[str, object], context: PassContext) -> str | None:
    if args["mask"] is not None:
        return "has a mask operand"
    length, keys = value_of(args["max_kv_len"]), value_of(args["k"]).shape[0]
    fresh = context.prefer(length, value_of(args["q"]).shape[0])
    form = routing.selection_form(
        length, value_of(args["topk"]), le=context.le if fresh else static
    )
    if form is not routing.Selection.CLOSED:
        return "rows may see more than K keys"
    if burnt_in(length, keys, context.guards_live):
        return "its length is a constant although its keys may be more"
    return None
