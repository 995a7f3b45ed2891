"""The one decision: which route a segment takes and what becomes of its selection (C1 to C6)."""

from __future__ import annotations

import operator
from typing import NoReturn

from ._cost import Thresholds, thresholds
from ._route_spec import RouteSpec
from ._route_types import BatchFacts, Compare, Decision, Length, Reason, Route, Selection

_Verdict = tuple[bool | None, Reason]


def decide(
    spec: RouteSpec,
    facts: BatchFacts,
    le: Compare = operator.le,
    prefer: Compare | None = None,
) -> Decision:
    """Choose the route of one segment: the cheapest among the legal ones, or the forced one.

    Eager ops call this with integers, passes with symbols and their own oracles; there is no
    second place that chooses. A route is taken where it is legal *and* cheaper. Flags are tested
    before facts, so a layer that declares nothing asks no question and costs no guard. Cost is
    asked before length: where dense MHA would not pay, its legality is never asked.

    A question that goes unanswered and could change the route gives ``Route.DEFER`` with
    ``Selection.SCORED``: the op stays and decides with this function when it runs. One that only
    separates closed from scored gives ``Selection.SCORED`` with the decided route. Both are always
    right, since the selection op closes short rows by itself. With ``operator.le`` every question
    has an answer, so a decision at run time is never DEFER.

    Inside a captured region (C6) nothing depends on the batch's lengths. ``capture_bound``, a plain
    integer that needs no oracle, stands in for ``max_kv_len``; ``max_query_len`` is not read, and
    ``mode="auto"`` takes top-k MQA unless dense MHA pays for a single query token. Without a bound
    no length is known: dense and masked MHA are illegal, and the selection is scored, which closes
    short rows on the device. So a captured step is decided at once, never deferred for a length.

    Args:
        spec: the layer, its kernels, the configuration and the dimensions.
        facts: host facts of the segment.
        le: answers ``a <= b`` for legality and for closed against scored: True, False or None.
        prefer: the same for cost among legal routes; a pass may let it follow size hints, since any
            answer is right. None means ``le``.

    Returns:
        The decision. ``Selection.SCORED`` also stands for ``own_selection=False``: the indices that
        somebody else made are read as they are, never replaced, and this step scores nothing.

    Raises:
        ValueError: ``mode="dense"`` or ``mode="masked"`` where that route is illegal.
    """
    limits = thresholds(spec)
    mode = spec.config.mode
    if facts.captured:
        le = prefer = operator.le
    elif prefer is None:
        prefer = le

    if mode == "sparse":
        return _decision(spec, facts, le, Route.SPARSE_MQA, Reason.MODE_SPARSE)
    if spec.config.batch_invariant:
        return _decision(spec, facts, le, Route.SPARSE_MQA, Reason.BATCH_INVARIANT)
    if mode == "dense":
        return _forced(spec, facts, le, Route.DENSE_MHA)
    if mode == "masked":
        return _forced(spec, facts, le, Route.MASKED_MHA)

    reason = _dense_flags(spec, facts, limits)
    if reason is None:
        answer, reason = _weigh_dense(spec, facts, limits, le, prefer)
        if answer is not False:
            route = Route.DENSE_MHA if answer else Route.DEFER
            return _decision(spec, facts, le, route, reason)
    if _masked_flags(spec) is None:
        answer, reason = _weigh_masked(facts, limits, le, prefer)
        if answer is not False:
            route = Route.MASKED_MHA if answer else Route.DEFER
            return _decision(spec, facts, le, route, reason)
    return _decision(spec, facts, le, Route.SPARSE_MQA, reason)


def selection_form(max_kv_len: Length, topk: int, le: Compare = operator.le) -> Selection:
    """CLOSED where every row is short, that is sees at most ``topk`` keys, else SCORED.

    An unanswered question gives SCORED. With a mask operand the closed form is not
    ``0, 1, ...``; ``decide`` and the passes do not ask then.
    """
    return Selection.CLOSED if _ask(le, max_kv_len, topk) else Selection.SCORED


def _decision(
    spec: RouteSpec, facts: BatchFacts, le: Compare, route: Route, reason: Reason
) -> Decision:
    return Decision(route, _selection(spec, facts, le, route), reason)


def _selection(spec: RouteSpec, facts: BatchFacts, le: Compare, route: Route) -> Selection:
    if route is Route.DEFER:
        return Selection.SCORED
    consumed = (
        route is not Route.DENSE_MHA
        or facts.other_consumers
        or spec.config.prefill_context_parallel > 1
    )
    if not consumed:
        return Selection.NONE
    kv = _kv_len(facts)
    if kv is None or facts.masked or not facts.own_selection:
        return Selection.SCORED
    return selection_form(kv, spec.topk, le)


def _forced(spec: RouteSpec, facts: BatchFacts, le: Compare, route: Route) -> Decision:
    limits = thresholds(spec)
    if route is Route.DENSE_MHA:
        refusal = _dense_flags(spec, facts, limits)
        answer, reason = (False, refusal) if refusal else _dense_fits(spec, facts, limits, le)
    else:
        refusal = _masked_flags(spec)
        answer, reason = (False, refusal) if refusal else _masked_fits(facts, le)
    if answer is False:
        _refuse(spec, facts, limits, reason)
    return _decision(spec, facts, le, Route.DEFER if answer is None else route, reason)


def _dense_flags(spec: RouteSpec, facts: BatchFacts, limits: Thresholds) -> Reason | None:
    """Why dense MHA is illegal at every length, or None (C3)."""
    if not spec.layer.dense_mha:
        return Reason.LAYER_WITHOUT_DENSE
    if not spec.kernels.dense_mha:
        return Reason.KERNELS_WITHOUT_DENSE
    if limits.dense_limit == 0:
        return Reason.DENSE_OFF
    if facts.masked:
        return Reason.MASK_OPERAND
    if not facts.own_selection:
        return Reason.FOREIGN_SELECTION
    return _sharded_without_lse(spec)


def _masked_flags(spec: RouteSpec) -> Reason | None:
    """Why masked MHA is illegal at every length, or None (C4)."""
    if not spec.layer.masked_mha:
        return Reason.LAYER_WITHOUT_MASKED
    if not spec.kernels.masked_mha:
        return Reason.KERNELS_WITHOUT_MASKED
    return _sharded_without_lse(spec)


def _sharded_without_lse(spec: RouteSpec) -> Reason | None:
    sharded = spec.config.decode_context_parallel > 1
    return Reason.SHARDED_KEYS if sharded and not spec.kernels.returns_lse else None


def _dense_fits(spec: RouteSpec, facts: BatchFacts, limits: Thresholds, le: Compare) -> _Verdict:
    """Whether dense MHA, which no flag excludes, is legal at this length."""
    limit = limits.dense_limit
    if limit is None:
        return True, Reason.DENSE_APPROXIMATE
    kv = _kv_len(facts)
    if kv is None:
        return False, Reason.CAPTURED
    short = _ask(le, kv, limit)
    if short is None:
        return None, Reason.LENGTH_UNKNOWN
    if not short:
        return False, Reason.ABOVE_LIMIT
    if limit > spec.topk:
        return True, Reason.DENSE_APPROXIMATE
    return True, Reason.DENSE_FORCED if spec.config.mode == "dense" else Reason.DENSE_CHEAPER


def _weigh_dense(
    spec: RouteSpec, facts: BatchFacts, limits: Thresholds, le: Compare, prefer: Compare
) -> _Verdict:
    """Whether dense MHA, which no flag excludes, is cheaper and legal."""
    if _kv_len(facts) is None:
        return False, Reason.CAPTURED
    cheaper = _dense_is_cheaper(facts, limits, prefer)
    if cheaper is False:
        return False, Reason.CAPTURED_QUERY if facts.captured else Reason.SPARSE_CHEAPER
    legal, reason = _dense_fits(spec, facts, limits, le)
    if legal and cheaper is None:
        return None, Reason.COST_UNKNOWN
    return legal, reason


def _dense_is_cheaper(facts: BatchFacts, limits: Thresholds, prefer: Compare) -> bool | None:
    enough = limits.dense_min_query
    if facts.captured:
        return enough is not None and enough <= 1
    fresh = _ask(prefer, facts.max_kv_len, facts.max_query_len) if limits.fresh_pays else False
    if fresh:
        return True
    long = False if enough is None else _ask(prefer, enough, facts.max_query_len)
    return long if long or fresh is not None else None


def _masked_fits(facts: BatchFacts, le: Compare) -> _Verdict:
    """Whether masked MHA, which no flag excludes, has its workspace."""
    if _kv_len(facts) is None:
        return False, Reason.CAPTURED
    fits = _ask(le, facts.masked_bytes, facts.workspace_bytes)
    if fits is None:
        return None, Reason.WORKSPACE_UNKNOWN
    return fits, Reason.MASKED_FORCED if fits else Reason.WORKSPACE


def _weigh_masked(facts: BatchFacts, limits: Thresholds, le: Compare, prefer: Compare) -> _Verdict:
    """Whether masked MHA, which no flag excludes, is cheaper and legal."""
    if _kv_len(facts) is None:
        return False, Reason.CAPTURED
    if facts.captured:
        return False, Reason.CAPTURED_QUERY
    if limits.masked_max_kv == 0:
        return False, Reason.SPARSE_CHEAPER
    fresh = _ask(prefer, facts.max_kv_len, facts.max_query_len)
    if fresh is False:
        return False, Reason.SPARSE_CHEAPER
    short = _ask(prefer, facts.max_kv_len, limits.masked_max_kv)
    if short is False:
        return False, Reason.SPARSE_CHEAPER
    legal, reason = _masked_fits(facts, le)
    if not legal:
        return legal, reason
    if fresh is None or short is None:
        return None, Reason.COST_UNKNOWN
    return True, Reason.MASKED_CHEAPER


def _kv_len(facts: BatchFacts) -> Length | None:
    """The bound on a row's keys that may be used here; None where no length is known (C6)."""
    return facts.capture_bound if facts.captured else facts.max_kv_len


def _ask(le: Compare, a: Length, b: Length) -> bool | None:
    answer = le(a, b)
    return None if answer is None else bool(answer)


def _refuse(spec: RouteSpec, facts: BatchFacts, limits: Thresholds, reason: Reason) -> NoReturn:
    got = {
        Reason.LAYER_WITHOUT_DENSE: f"got layer={spec.layer}",
        Reason.LAYER_WITHOUT_MASKED: f"got layer={spec.layer}",
        Reason.KERNELS_WITHOUT_DENSE: f"got kernels={spec.kernels}",
        Reason.KERNELS_WITHOUT_MASKED: f"got kernels={spec.kernels}",
        Reason.DENSE_OFF: f"got dense_threshold={spec.config.dense_threshold}",
        Reason.MASK_OPERAND: "got masked=True",
        Reason.FOREIGN_SELECTION: "got own_selection=False",
        Reason.SHARDED_KEYS: f"got decode_context_parallel={spec.config.decode_context_parallel}",
        Reason.ABOVE_LIMIT: (
            f"got max_kv_len={_kv_len(facts)}, accepted at most {limits.dense_limit}"
        ),
        Reason.CAPTURED: "got capture_bound=None",
        Reason.WORKSPACE: (
            f"got masked_bytes={facts.masked_bytes}, accepted at most {facts.workspace_bytes}"
        ),
    }
    raise ValueError(
        f"mode={spec.config.mode!r} is impossible here: {reason.value}; {got[reason]}. "
        "mode='auto' and mode='sparse' are accepted."
    )
