"""All flags, interval edges and oracles of ``decide``, against the contract's own words."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest

from dsafx import routing
from dsafx.ops.routing import BatchFacts, Decision, Reason, Route, RouteConfig, RouteSpec, Selection

K, LATENT, NOPE, ROPE, VALUE = 8, 8, 4, 2, 4
SPEC = RouteSpec(
    layer=routing.LayerCapabilities(dense_mha=True, masked_mha=True),
    kernels=routing.KernelCapabilities(dense_mha=True, masked_mha=True, returns_lse=True),
    config=RouteConfig(),
    topk=K,
    num_heads=2,
    qk_nope_head_dim=NOPE,
    qk_rope_head_dim=ROPE,
    v_head_dim=VALUE,
    kv_lora_rank=LATENT,
)
KERNELS = tuple(
    routing.KernelCapabilities(*bits)
    for bits in itertools.product((False, True), repeat=3)
    if bits[:2] == (True, True) or not bits[2]
)
LAYERS = tuple(
    routing.LayerCapabilities(*bits) for bits in itertools.product((False, True), repeat=2)
)
CONFIGS = (
    RouteConfig(),
    RouteConfig(dense_threshold=0),
    RouteConfig(dense_threshold=5),
    RouteConfig(dense_threshold=12, allow_approximate=True),
    RouteConfig(batch_invariant=True),
    RouteConfig(prefill_context_parallel=2),
    RouteConfig(decode_context_parallel=2),
    RouteConfig(mode="sparse"),
    RouteConfig(mode="masked"),
    RouteConfig(mode="dense"),
    RouteConfig(mode="dense", dense_threshold=0, allow_approximate=True),
    RouteConfig(mode="dense", allow_approximate=True, prefill_context_parallel=2),
    RouteConfig(mode="dense", allow_approximate=True, decode_context_parallel=2),
)
MASKED_MAX = 14
LENGTHS = (0, 5, 6, K - 1, K, K + 1, 12, 13, MASKED_MAX, MASKED_MAX + 1)
FACT_FLAGS = tuple(itertools.product((False, True), repeat=3))
BOUNDS = (None, K, K + 1)


@dataclass(frozen=True)
class Symbol:
    """A length of which a compiler knows an interval."""

    low: int
    high: int


def static_le(a: int | Symbol, b: int | Symbol) -> bool | None:
    low_a, high_a = (a.low, a.high) if isinstance(a, Symbol) else (a, a)
    low_b, high_b = (b.low, b.high) if isinstance(b, Symbol) else (b, b)
    if high_a <= low_b:
        return True
    return False if low_a > high_b else None


def never_knows(a: object, b: object) -> None:
    return None


def specs() -> Iterator[RouteSpec]:
    for layer, kernels, config in itertools.product(LAYERS, KERNELS, CONFIGS):
        yield replace(SPEC, layer=layer, kernels=kernels, config=config)


def facts_of(lengths: tuple[int, ...]) -> Iterator[BatchFacts]:
    regions = [(kv, False, None) for kv in lengths] + [(K, True, bound) for bound in BOUNDS]
    for (kv, captured, bound), flags, need in itertools.product(regions, FACT_FLAGS, (0, 2)):
        for query in {1, 4, kv}:
            yield BatchFacts(kv, query, *flags, captured, bound, need, 1)


def outcome(spec: RouteSpec, facts: BatchFacts, *oracles: object) -> Decision | str:
    try:
        return routing.decide(spec, facts, *oracles)
    except ValueError as error:
        return str(error)


@lru_cache(maxsize=1)
def full_outcomes() -> tuple[tuple[RouteSpec, BatchFacts, Decision | str], ...]:
    facts = tuple(facts_of(LENGTHS))
    return tuple((spec, fact, outcome(spec, fact)) for spec in specs() for fact in facts)


def known_length(facts: BatchFacts) -> int | None:
    return facts.capture_bound if facts.captured else facts.max_kv_len


def dense_is_legal(spec: RouteSpec, facts: BatchFacts) -> bool:
    config, length = spec.config, known_length(facts)
    if config.mode == "dense" and config.allow_approximate and config.dense_threshold is None:
        short = True
    else:
        limit = K if config.dense_threshold is None else config.dense_threshold
        short = limit > 0 and length is not None and length <= limit
    return (
        spec.layer.dense_mha
        and spec.kernels.dense_mha
        and config.mode in ("auto", "dense")
        and not config.batch_invariant
        and short
        and (config.decode_context_parallel == 1 or spec.kernels.returns_lse)
        and not facts.masked
        and facts.own_selection
    )


def masked_is_legal(spec: RouteSpec, facts: BatchFacts) -> bool:
    config = spec.config
    return (
        spec.layer.masked_mha
        and spec.kernels.masked_mha
        and config.mode in ("auto", "masked")
        and not config.batch_invariant
        and known_length(facts) is not None
        and facts.masked_bytes <= facts.workspace_bytes
        and (config.decode_context_parallel == 1 or spec.kernels.returns_lse)
    )


def test_a_decision_at_run_time_is_legal_and_never_deferred():
    for spec, facts, decision in full_outcomes():
        if isinstance(decision, str):
            legal = dense_is_legal if spec.config.mode == "dense" else masked_is_legal
            assert spec.config.mode in ("dense", "masked")
            assert not legal(spec, facts), decision
            continue
        assert decision.route is not Route.DEFER
        if decision.route is Route.DENSE_MHA:
            assert dense_is_legal(spec, facts)
        if decision.route is Route.MASKED_MHA:
            assert masked_is_legal(spec, facts)
        if spec.config.mode in ("dense", "masked"):
            assert decision.route.value.startswith(spec.config.mode)


def test_a_selection_is_closed_exactly_where_it_is_consumed_and_every_row_is_short():
    for spec, facts, decision in full_outcomes():
        if isinstance(decision, str):
            continue
        consumed = (
            decision.route is not Route.DENSE_MHA
            or facts.other_consumers
            or spec.config.prefill_context_parallel > 1
        )
        length = known_length(facts)
        short = length is not None and length <= K
        if not consumed:
            assert decision.selection is Selection.NONE
        elif short and facts.own_selection and not facts.masked:
            assert decision.selection is Selection.CLOSED
        else:
            assert decision.selection is Selection.SCORED


def test_every_reason_is_reached():
    outcomes = [decision for _, _, decision in full_outcomes()]
    reached = {decision.reason for decision in outcomes if isinstance(decision, Decision)}
    errors = "\n".join({error for error in outcomes if isinstance(error, str)})
    reached |= {reason for reason in Reason if reason.value in errors}
    for spec in (SPEC, replace(SPEC, layer=routing.LayerCapabilities(masked_mha=True))):
        fresh = BatchFacts(K, K)
        reached.add(routing.decide(spec, fresh, never_knows).reason)
        reached.add(routing.decide(spec, fresh, never_knows, operator.le).reason)
        reached.add(routing.decide(spec, fresh, operator.le, never_knows).reason)
    assert reached == set(Reason)


@pytest.mark.parametrize("oracle", [never_knows, static_le])
def test_a_partial_oracle_defers_or_agrees_with_every_value_it_allows(oracle: routing.Compare):
    intervals = [Symbol(low, high) for low, high in itertools.combinations(LENGTHS, 2)]
    shapes = [(Symbol(K, K), 1), (Symbol(1, 64), Symbol(1, 64))]
    shapes += [(kv, query) for kv in intervals[::3] for query in (1, 4, Symbol(K, K + 1))]
    for spec in specs():
        if spec.kernels.returns_lse:
            continue
        for kv, query in shapes:
            symbolic = BatchFacts(kv, query, other_consumers=True)
            partial = outcome(spec, symbolic, oracle)
            for length in {kv.low, min(kv.high, K), kv.high}:
                if not kv.low <= length <= kv.high:
                    continue
                for size in (query.low, query.high) if isinstance(query, Symbol) else (query,):
                    check_agreement(partial, outcome(spec, BatchFacts(length, size, True, True)))


def check_agreement(partial: Decision | str, full: Decision | str) -> None:
    if isinstance(partial, str):
        assert isinstance(full, str)
        return
    if partial.route is Route.DEFER:
        assert partial.selection is Selection.SCORED
        return
    assert isinstance(full, Decision)
    assert partial.route is full.route
    assert partial.selection in (full.selection, Selection.SCORED)


@pytest.mark.parametrize("oracle", [never_knows, static_le])
def test_a_captured_step_is_decided_alike_by_every_oracle(oracle: routing.Compare):
    for spec, facts, full in full_outcomes()[::7]:
        if facts.captured:
            assert outcome(spec, facts, oracle) == full


def test_a_cost_hint_may_choose_among_legal_routes_but_cannot_make_one_legal():
    always, long = (lambda a, b: True), BatchFacts(K + 1, 1)
    assert routing.decide(SPEC, BatchFacts(K, 1), prefer=always).route is Route.DENSE_MHA
    only_dense = replace(SPEC, layer=routing.LayerCapabilities(dense_mha=True))
    assert routing.decide(only_dense, long, prefer=always).reason is Reason.ABOVE_LIMIT


def test_a_layer_that_declares_nothing_asks_only_how_long_its_rows_are():
    asked: list[tuple[object, object]] = []

    def record(a: int, b: int) -> bool:
        asked.append((a, b))
        return a <= b

    bare = replace(SPEC, layer=routing.LayerCapabilities())
    routing.decide(bare, BatchFacts(5, 5), record)
    assert asked == [(5, K)]


def test_a_decode_row_never_asks_whether_dense_would_be_legal():
    legality: list[tuple[object, object]] = []

    def record(a: int, b: int) -> bool:
        legality.append((a, b))
        return a <= b

    dense_off_by_cost = routing.decide(
        replace(SPEC, config=RouteConfig(dense_threshold=5)), BatchFacts(5, 1), record, operator.le
    )
    assert dense_off_by_cost.reason is Reason.SPARSE_CHEAPER
    assert legality == [(5, K)]


def cost(route: Route, kv: int, query: int, spec: RouteSpec) -> int:
    expanded = spec.qk_nope_head_dim + spec.v_head_dim
    latent, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
    if route is Route.SPARSE_MQA:
        return query * latent * expanded + query * min(kv, spec.topk) * (2 * latent + rope)
    return kv * latent * expanded + query * kv * (expanded + rope)


@pytest.mark.parametrize("value_dim", [1, 4, 11, 12, 13, 40, 400])
def test_the_thresholds_never_choose_the_dearer_route(value_dim: int):
    spec = replace(SPEC, v_head_dim=value_dim)
    chosen = set()
    for kv, query in itertools.product(range(1, 40), repeat=2):
        if query > kv:
            continue
        route = routing.decide(spec, BatchFacts(kv, query)).route
        chosen.add(route)
        if route is not Route.SPARSE_MQA:
            assert cost(route, kv, query, spec) <= cost(Route.SPARSE_MQA, kv, query, spec)
        if kv == K and cost(Route.DENSE_MHA, kv, query, spec) < cost(
            Route.SPARSE_MQA, kv, query, spec
        ):
            assert route is Route.DENSE_MHA
    assert (Route.DENSE_MHA in chosen) == (NOPE + value_dim <= 2 * LATENT)


def test_the_weights_of_a_provider_move_its_thresholds():
    dear = routing.CostConstants(version=2, expand=100)
    spec = replace(SPEC, kernels=replace(SPEC.kernels, costs=dear))
    assert routing.decide(SPEC, BatchFacts(K, K)).route is Route.DENSE_MHA
    assert routing.decide(spec, BatchFacts(K, K)).route is Route.SPARSE_MQA
    with pytest.raises(ValueError, match="expand must be at least 1, got 0"):
        routing.CostConstants(expand=0)
