"""Replace routed attention by the kernels of the route that the routing contract answers."""

from __future__ import annotations

import torch
from torch import fx

from ..ops import providers, routing
from ..ops._attend import attend
from ..ops.mla_attention import Operands
from ._edit import arguments, calls, inline, replace, value_of
from ._oracles import burnt_in, static
from ._report import PassContext, PassReport
from ._torch_compat import hint

_ATTEND_OPERANDS = Operands._fields[: Operands._fields.index("max_kv_len") + 1]


def resolve_route_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """Rewrite ``mla_attention`` to dense, masked or sparse attention where ``decide()`` answers.

    Invariant: the pass asks exactly the question that the op's body asks when it runs, with
    symbolic facts and an oracle that may not know. Every answer is legal, so the value is
    unchanged; without an answer the op stays and decides at run time. A dense route rests on short
    rows: it carries its bound where the length is an input of the graph, and is not taken where the
    length was burnt in as a constant.
    """
    report = PassReport("resolve_route")
    for node in calls(graph, torch.ops.dsafx.mla_attention.default):
        operands = arguments(node)
        call = Operands(**{name: value_of(argument) for name, argument in operands.items()})
        dims = _with_known_dims(call)
        if dims is None:
            report.decline(node, "decides at run time: its head sizes are not known")
            continue
        spec = dims.route_spec(providers.kernel_capabilities(call.q_nope.device.type))
        try:
            decision = _decide(spec, call.batch_facts(), context)
        except ValueError as impossible:
            report.decline(node, f"raises when it runs: {impossible}")
            continue
        limit = routing.dense_limit(spec)
        reason = _reason_to_leave(call, decision, limit, context)
        if reason is not None:
            report.decline(node, reason)
            continue
        dense = decision.route is routing.Route.DENSE_MHA
        symbolic = isinstance(call.max_kv_len, torch.SymInt)
        # The premise can only break where the length is an input of the graph (C20).
        bound = limit if dense and symbolic else None
        first = [operands[name] for name in _ATTEND_OPERANDS]
        last = [bound, call.return_lse, spec.config.batch_invariant]
        args = [decision.route, *first, call.scale, *last]
        replace(node, inline(graph, node, attend, args, context.traces))
        report.rewrite(node, f"{decision.route.value}: {decision.reason.value}")
    return report


def _decide(
    spec: routing.RouteSpec, facts: routing.BatchFacts, context: PassContext
) -> routing.Decision:
    """The decision, with a guard only where the route cannot be told without one."""
    decision = routing.decide(spec, facts, le=static, prefer=context.prefer)
    if decision.route is routing.Route.DEFER:
        decision = routing.decide(spec, facts, le=context.le, prefer=context.prefer)
    return decision


def _with_known_dims(call: Operands) -> Operands | None:
    """The call with operands of the example inputs' sizes, or None where a size has none.

    Head sizes only weigh cost, so that symbolic ones need no guard. K decides what is legal and
    must be known.
    """
    if isinstance(call.topk, torch.SymInt):
        return None
    operands = (call.q_nope, call.q_pe, call.kv_c, call.kv_b_weight)
    known = []
    for tensor in operands:
        shape = [size for size in map(hint, tensor.shape) if size is not None]
        if len(shape) != tensor.dim():
            return None
        known.append(torch.empty(shape, device="meta"))
    q_nope, q_pe, kv_c, weight = known
    return call._replace(q_nope=q_nope, q_pe=q_pe, kv_c=kv_c, kv_b_weight=weight)


def _reason_to_leave(
    call: Operands, decision: routing.Decision, limit: int | None, context: PassContext
) -> str | None:
    if decision.route is routing.Route.DEFER:
        return f"decides at run time: {decision.reason.value}"
    if decision.route is not routing.Route.DENSE_MHA:
        return None if call.indices is not None else "raises when it runs: it has no selection"
    if limit is None or call.captured:
        return None
    if burnt_in(call.max_kv_len, call.kv_c.shape[0], context.guards_live):
        return "decides at run time: its length is a constant although its keys may be more"
    return None
