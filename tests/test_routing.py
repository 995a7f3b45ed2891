"""The routing decision, case by case. The enumeration of all cases is in test_routing_oracles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsafx import routing
from dsafx.ops.routing import BatchFacts, Reason, Route, Selection

GLM = routing.RouteSpec(
    layer=routing.LayerCapabilities(dense_mha=True),
    kernels=routing.KernelCapabilities(dense_mha=True, masked_mha=True, returns_lse=True),
    config=routing.RouteConfig(),
    topk=2048,
    num_heads=64,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    kv_lora_rank=512,
)
WITH_MASKED = replace(GLM, layer=routing.LayerCapabilities(dense_mha=True, masked_mha=True))


def with_config(spec: routing.RouteSpec = GLM, **settings: object) -> routing.RouteSpec:
    return replace(spec, config=routing.RouteConfig(**settings))


def prefill(length: int, **facts: object) -> BatchFacts:
    return BatchFacts(max_kv_len=length, max_query_len=length, **facts)


def decode(length: int, **facts: object) -> BatchFacts:
    return BatchFacts(max_kv_len=length, max_query_len=1, **facts)


def answer(spec: routing.RouteSpec, facts: BatchFacts) -> tuple[Route, Selection]:
    decision = routing.decide(spec, facts)
    return decision.route, decision.selection


def test_a_decision_reads_as_a_sentence():
    assert str(routing.decide(GLM, prefill(1024))) == (
        "Dense MHA, no selection: no row sees more keys than the dense limit, and expanding them "
        "costs less."
    )
    assert str(routing.decide(GLM, decode(5000))) == (
        "Top-k MQA, selection scored: absorbing the query and reading the selected keys costs less."
    )


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (2047, (Route.DENSE_MHA, Selection.NONE)),
        (2048, (Route.DENSE_MHA, Selection.NONE)),
        (2049, (Route.SPARSE_MQA, Selection.SCORED)),
    ],
)
def test_a_fresh_prefill_is_dense_up_to_topk(length: int, expected: object):
    assert answer(GLM, prefill(length)) == expected


def test_decode_rows_are_sparse_and_closed_while_short():
    assert answer(GLM, decode(2048)) == (Route.SPARSE_MQA, Selection.CLOSED)
    assert answer(GLM, decode(2049)) == (Route.SPARSE_MQA, Selection.SCORED)


def test_the_length_is_a_maximum_and_never_a_mean_or_a_packed_sum():
    two_short, one_long, long_prefix = prefill(1500), prefill(3000), BatchFacts(4016, 16)
    assert answer(GLM, two_short) == (Route.DENSE_MHA, Selection.NONE)
    assert answer(GLM, one_long) == (Route.SPARSE_MQA, Selection.SCORED)
    assert answer(GLM, long_prefix) == (Route.SPARSE_MQA, Selection.SCORED)


def test_ten_thousand_tokens_are_dense_only_where_approximation_was_asked_for():
    assert answer(GLM, prefill(10_000)) == (Route.SPARSE_MQA, Selection.SCORED)
    asked = with_config(dense_threshold=10_240, allow_approximate=True)
    assert routing.decide(asked, prefill(10_000)) == routing.Decision(
        Route.DENSE_MHA, Selection.NONE, Reason.DENSE_APPROXIMATE
    )
    assert answer(asked, prefill(10_241)) == (Route.SPARSE_MQA, Selection.SCORED)


def test_a_threshold_above_topk_without_approximation_raises():
    with pytest.raises(ValueError, match="dense_threshold must be at most index_topk=2048, got 20"):
        with_config(dense_threshold=2049)


def test_a_threshold_below_topk_is_the_limit_and_zero_turns_dense_off():
    assert answer(with_config(dense_threshold=512), prefill(512))[0] is Route.DENSE_MHA
    assert answer(with_config(dense_threshold=512), prefill(513))[0] is Route.SPARSE_MQA
    off = routing.decide(with_config(dense_threshold=0), prefill(1))
    assert (off.route, off.reason) == (Route.SPARSE_MQA, Reason.DENSE_OFF)


@pytest.mark.parametrize("length", [100, 118, 205, 2048])
def test_sharded_keys_are_dense_only_with_an_lse(length: int):
    sharded = with_config(decode_context_parallel=2)
    without = replace(sharded, kernels=routing.KernelCapabilities(dense_mha=True))
    assert answer(sharded, prefill(length))[0] is Route.DENSE_MHA
    assert routing.decide(without, prefill(length)).reason is Reason.SHARDED_KEYS


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        (GLM, {"other_consumers": True}),
        (with_config(prefill_context_parallel=2), {}),
    ],
)
def test_a_selection_is_produced_while_anyone_consumes_it(
    spec: routing.RouteSpec, facts: dict[str, bool]
):
    assert answer(spec, prefill(2048, **facts)) == (Route.DENSE_MHA, Selection.CLOSED)
    assert answer(spec, prefill(2049, **facts)) == (Route.SPARSE_MQA, Selection.SCORED)


def test_above_topk_the_selection_for_others_is_scored_though_the_route_is_dense():
    full = with_config(mode="dense", allow_approximate=True)
    assert answer(full, prefill(2049)) == (Route.DENSE_MHA, Selection.NONE)
    others = prefill(2049, other_consumers=True)
    assert answer(full, others) == (Route.DENSE_MHA, Selection.SCORED)


def test_a_foreign_selection_is_read_as_it_is_given():
    decision = routing.decide(GLM, prefill(16, own_selection=False))
    assert decision.route is Route.SPARSE_MQA
    assert decision.selection is Selection.SCORED
    assert decision.reason is Reason.FOREIGN_SELECTION
    with pytest.raises(ValueError, match="got own_selection=False"):
        routing.decide(with_config(mode="dense"), prefill(16, own_selection=False))


def test_a_mask_operand_excludes_dense_and_the_closed_form():
    assert answer(GLM, prefill(16, masked=True)) == (Route.SPARSE_MQA, Selection.SCORED)


def test_masked_mha_takes_scored_rows_of_a_fresh_prefill():
    limit = 2048 * (2 * 512 + 64) // (192 + 64 + 256)
    assert answer(WITH_MASKED, prefill(limit)) == (Route.MASKED_MHA, Selection.SCORED)
    assert answer(WITH_MASKED, prefill(limit + 1))[0] is Route.SPARSE_MQA
    assert answer(WITH_MASKED, BatchFacts(limit, limit - 1))[0] is Route.SPARSE_MQA
    small = prefill(limit, masked_bytes=11, workspace_bytes=10)
    assert routing.decide(WITH_MASKED, small).reason is Reason.WORKSPACE


def test_a_chunk_behind_a_prefix_is_dense_from_the_query_threshold_on():
    enough = routing.thresholds(GLM).dense_min_query
    assert answer(GLM, BatchFacts(2048, enough))[0] is Route.DENSE_MHA
    assert answer(GLM, BatchFacts(2048, enough - 1))[0] is Route.SPARSE_MQA


@pytest.mark.parametrize(
    ("mode", "length", "expected"),
    [
        ("sparse", 16, (Route.SPARSE_MQA, Selection.CLOSED)),
        ("masked", 16, (Route.MASKED_MHA, Selection.CLOSED)),
        ("masked", 9000, (Route.MASKED_MHA, Selection.SCORED)),
        ("dense", 2048, (Route.DENSE_MHA, Selection.NONE)),
    ],
)
def test_a_forced_mode_takes_its_route(mode: str, length: int, expected: object):
    assert answer(with_config(WITH_MASKED, mode=mode), decode(length)) == expected


@pytest.mark.parametrize(
    ("mode", "facts", "message"),
    [
        ("dense", prefill(2049), "got max_kv_len=2049, accepted at most 2048"),
        ("dense", prefill(8, masked=True), "got masked=True"),
        ("dense", prefill(8, captured=True), "got capture_bound=None"),
        ("masked", prefill(8, masked_bytes=9, workspace_bytes=8), "masked_bytes=9, .* most 8"),
    ],
)
def test_an_impossible_forced_mode_says_what_it_got(mode: str, facts: BatchFacts, message: str):
    with pytest.raises(ValueError, match=message):
        routing.decide(with_config(WITH_MASKED, mode=mode), facts)


@pytest.mark.parametrize("mode", ["dense", "masked"])
def test_a_forced_mode_that_the_layer_or_kernels_lack_names_them(mode: str):
    forced = with_config(WITH_MASKED, mode=mode)
    with pytest.raises(ValueError, match=f"class declares no {mode} MHA; got layer="):
        routing.decide(replace(forced, layer=routing.LayerCapabilities()), prefill(8))
    with pytest.raises(ValueError, match=f"kernels declare no {mode} MHA; got kernels="):
        routing.decide(replace(forced, kernels=routing.KernelCapabilities()), prefill(8))


def test_batch_invariance_pins_the_sparse_route():
    pinned = routing.decide(with_config(batch_invariant=True), prefill(16))
    assert (pinned.route, pinned.reason) == (Route.SPARSE_MQA, Reason.BATCH_INVARIANT)
    with pytest.raises(ValueError, match="batch_invariant=True accepts"):
        routing.RouteConfig(mode="dense", batch_invariant=True)


def test_a_captured_step_without_a_bound_depends_on_no_length():
    for spec in (GLM, WITH_MASKED):
        for facts in (prefill(4), prefill(9000), decode(4)):
            captured = routing.decide(spec, replace(facts, captured=True))
            assert captured == routing.Decision(Route.SPARSE_MQA, Selection.SCORED, Reason.CAPTURED)


@pytest.mark.parametrize(
    ("bound", "selection"), [(2048, Selection.CLOSED), (2049, Selection.SCORED)]
)
def test_a_captured_step_reads_its_bound_instead_of_its_lengths(bound: int, selection: Selection):
    for facts in (prefill(4), prefill(9000), decode(4)):
        captured = replace(facts, captured=True, capture_bound=bound)
        assert answer(WITH_MASKED, captured) == (Route.SPARSE_MQA, selection)
    forced = replace(decode(9000), captured=True, capture_bound=2048)
    assert answer(with_config(mode="dense"), forced) == (Route.DENSE_MHA, Selection.NONE)


def test_the_form_of_a_selection_changes_above_topk():
    assert routing.selection_form(8, 8) is Selection.CLOSED
    assert routing.selection_form(9, 8) is Selection.SCORED
    assert routing.selection_form(8, 8, le=lambda a, b: None) is Selection.SCORED


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fast"}, "mode must be one of auto, sparse, masked, dense, got 'fast'"),
        ({"dense_threshold": -1}, "dense_threshold must be at least 0, got -1"),
        ({"prefill_context_parallel": 0}, "prefill_context_parallel must be at least 1, got 0"),
        ({"decode_context_parallel": 0}, "decode_context_parallel must be at least 1, got 0"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        routing.RouteConfig(**settings)


def test_bad_sizes_and_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        replace(GLM, topk=0)
    with pytest.raises(ValueError, match="qk_rope_head_dim must be at least 0, got -1"):
        replace(GLM, qk_rope_head_dim=-1)
    with pytest.raises(ValueError, match="max_kv_len must be at least 0, got -1"):
        BatchFacts(max_kv_len=-1, max_query_len=1)
