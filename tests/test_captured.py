"""Captured variants of a step: which serves a batch, and that it gives what eager code gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from _capture import HostRead, Recorder, as_on_a_device
from _captured_layer import (
    DECODE,
    LONG,
    NOWHERE,
    ROWS,
    SHORT,
    STEPS,
    VARIANTS,
    batch,
    captured_layer,
    layer_step,
    new_caches,
    spec_of,
)
from _inside import Inside
from _packed_layer import CAPACITY, build
from _tiny import TOPK
from torch import Tensor

from dsafx import ops
from dsafx.models import DSAAttention, record_decisions
from dsafx.models.captured import EAGER, CapturedStep, CapturedVariant, RowInput
from dsafx.ops import routing


def assert_equals_eager(layer: DSAAttention, captured: CapturedStep, caches: dict[str, Tensor]):
    """Each step gives what the eager layer gives, and leaves in the caches what that leaves."""
    theirs = new_caches()
    eager = layer_step(layer, theirs)
    for expected, requests in STEPS:
        rows, max_kv_len, max_query_len = batch(*requests)
        with torch.no_grad():
            out, indices = eager(rows, routing.BatchFacts(max_kv_len, max_query_len))
        found, selected = captured(rows, max_kv_len, max_query_len)
        assert captured.last is not None
        assert captured.last.variant is not None
        assert captured.last.variant.name == expected
        torch.testing.assert_close(found, out, atol=1e-5, rtol=0)
        assert (selected is None) == (indices is None)
        if indices is not None:
            assert torch.equal(selected, indices)
        for name, cache in caches.items():
            torch.testing.assert_close(
                cache[:NOWHERE], theirs[name][:NOWHERE], atol=1e-6, rtol=0, equal_nan=True
            )


@pytest.mark.parametrize("family", ["glm", "deepseek"])
def test_a_captured_step_gives_what_the_eager_layer_gives(family: str):
    layer, caches = build(family=family), new_caches()
    captured, recorder = captured_layer(layer, caches)
    assert_equals_eager(layer, captured, caches)
    assert captured.counts == {"short": 2, "long": 2, "decode": 2}
    assert recorder.replays == [2, 2, 2]


@pytest.mark.triton
@pytest.mark.parametrize("family", ["glm", "deepseek"])
def test_with_kernels_made_for_it_a_captured_step_reads_no_value_of_the_device(family: str):
    with ops.use_provider("triton"):
        layer, caches = build(family=family), new_caches()
        captured, _ = captured_layer(layer, caches, strict=True)
        assert_equals_eager(layer, captured, caches)


def test_the_guard_of_these_tests_sees_reads_inside_of_ops():
    layer = build()
    rows, *facts = batch((0, 0, 20))
    step = layer_step(layer, new_caches())
    with ops.use_provider("reference"), torch.no_grad(), as_on_a_device():
        with pytest.raises(HostRead, match="aten::nonzero"):
            step(rows, routing.BatchFacts(*facts))
        with pytest.raises(HostRead):
            rows["ke"][0].item()
        with pytest.raises(HostRead):
            rows["ke"].tolist()
        with pytest.raises(HostRead):
            rows["ke"][rows["ke"] > 3]


@pytest.mark.parametrize(
    ("family", "selection"),
    [("glm", routing.Selection.CLOSED), ("deepseek", routing.Selection.NONE)],
)
def test_a_short_variant_holds_the_dense_route_and_no_scoring_and_a_long_one_scores(
    family: str, selection: routing.Selection
):
    layer = build(family=family)
    with record_decisions() as records:
        captured, _ = captured_layer(layer, new_caches())
    held = captured.decisions
    assert held["short"].route is routing.Route.DENSE_MHA
    assert held["short"].selection is selection
    for name in ("decode", "long"):
        assert held[name].route is routing.Route.SPARSE_MQA
        assert held[name].selection is routing.Selection.SCORED
    # Captured from the largest to the smallest, after a warm-up.
    made = [record.decision for record in records]
    assert made == [held[name] for name in ("long", "short", "decode") for _ in range(2)]

    inside = {}
    for name, requests in (("short", (0, 0, 10)), ("long", (0, 0, 30)), ("decode", (0, 30, 1))):
        with Inside() as inside[name]:
            captured(*batch(requests))
    assert "dsafx::dense_mha" in inside["short"].names
    assert not {"dsafx::index_select", "dsafx::sparse_mla"} & inside["short"].names
    for name in ("long", "decode"):
        assert {"dsafx::index_select", "dsafx::sparse_mla"} <= inside[name].names
        assert "dsafx::dense_mha" not in inside[name].names


def test_padding_writes_nothing_and_nothing_is_left_of_an_earlier_batch():
    layer, caches = build(family="deepseek"), new_caches()
    captured, _ = captured_layer(layer, caches)
    assert all(bool(cache[:NOWHERE].isnan().all()) for cache in caches.values())
    captured(*batch((0, 0, 32)))
    # The rows go to somebody else, whom padding made of the earlier batch would overwrite.
    for cache in caches.values():
        cache[:32] = 3.0
    rows, *facts = batch((40, 0, 20))
    found, _ = captured(rows, *facts)
    assert captured.last is not None
    assert captured.last.reason == "long serves it with 12 rows of padding"
    for name, cache in caches.items():
        assert bool((cache[:32] == 3.0).all()), name
        assert bool(cache[32:40].isnan().all())
        assert bool(cache[60:NOWHERE].isnan().all())
    assert found.shape == (20, 64)
    with torch.no_grad():
        expected, _ = layer_step(layer, new_caches())(rows, routing.BatchFacts(*facts))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_step_may_return_one_tensor_of_which_a_batch_gets_its_own_rows():
    spec = spec_of(build(family="deepseek"))
    captured = CapturedStep(
        lambda rows, facts: rows["x"] * 2,
        [SHORT],
        {"x": RowInput((2,), torch.float32)},
        spec,
        "cpu",
        capture=Recorder(),
    )
    for tokens in (0, 3, TOPK):
        x = torch.randn(tokens, 2)
        found = captured({"x": x}, max_kv_len=tokens, max_query_len=tokens)
        assert isinstance(found, Tensor)
        assert torch.equal(found, x * 2)


def test_no_batch_is_replayed_on_a_graph_whose_bound_it_exceeds():
    captured, recorder = captured_layer(build(family="deepseek"), new_caches())
    sizes = (0, 1, 4, 5, TOPK, TOPK + 1, 32, 33)
    lengths = (0, 1, TOPK, TOPK + 1, CAPACITY, CAPACITY + 1)
    for tokens, longest, query in itertools.product(sizes, lengths, sizes):
        chosen = captured.plan(tokens, longest, query).variant
        if chosen is None:
            assert all(each.refusal(tokens, longest, query) for each in VARIANTS)
        else:
            assert tokens <= chosen.tokens
            assert longest <= chosen.capture_bound
            assert query <= chosen.query_bound
    assert captured.plan(10, TOPK, 10).variant is SHORT
    assert captured.plan(10, TOPK + 1, 10).variant is LONG
    assert recorder.replays == [0, 0, 0]


def test_a_batch_beyond_all_variants_runs_eagerly_and_says_why():
    layer, caches = build(family="deepseek"), new_caches()
    captured, recorder = captured_layer(layer, caches, variants=(SHORT, DECODE))
    rows, *facts = batch((0, 0, 24))
    found, _ = captured(rows, *facts)
    with torch.no_grad():
        expected, _ = layer_step(layer, new_caches())(rows, routing.BatchFacts(*facts))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert captured.counts == {EAGER: 1}
    assert recorder.replays == [0, 0]
    assert captured.last is not None
    assert captured.last.variant is None
    assert captured.last.reason == (
        "short was captured for at most 16 tokens, got 24;"
        " decode was captured for at most 4 tokens, got 24"
    )
    assert captured.plan(3, 17, 3).reason == (
        "short was captured for at most 16 keys a row, got 17;"
        " decode was captured for at most 1 query tokens a request, got 3"
    )


def test_among_legal_variants_the_fewest_rows_win_then_what_decide_answers_for_the_batch():
    layer = build(family="deepseek")
    wide = CapturedVariant("wide", tokens=32, capture_bound=TOPK)
    few = CapturedVariant("few", tokens=32, capture_bound=TOPK, max_query_len=2)
    half = CapturedVariant("half", tokens=32, capture_bound=32)
    chunk = CapturedVariant("chunk", tokens=TOPK, capture_bound=CAPACITY)
    captured, _ = captured_layer(layer, new_caches(), (LONG, wide, few, half, chunk, DECODE))
    assert captured.plan(4, 10, 1).variant is DECODE
    assert captured.plan(10, 10, 10).variant is chunk
    # A fresh prefill is cheaper dense, single tokens by top-k MQA; then the lower bound counts.
    assert captured.decisions["wide"].route is routing.Route.DENSE_MHA
    assert captured.decisions["few"].route is routing.Route.SPARSE_MQA
    assert captured.plan(20, 10, 10).variant is wide
    assert captured.plan(20, 10, 1).variant is few
    assert captured.plan(20, 2, 2).variant is wide
    assert captured.plan(20, 20, 10).variant is half
    assert captured.plan(20, 33, 10).variant is LONG


def test_a_forced_mode_that_a_variant_cannot_hold_is_an_error_when_it_is_captured():
    layer = DSAAttention(build(family="deepseek").config, 0, routing.RouteConfig(mode="dense"))
    recorder = Recorder()
    step = layer_step(layer, new_caches())
    with pytest.raises(ValueError, match=r"variants: long cannot be captured: .*max_kv_len=64"):
        CapturedStep(step, VARIANTS[1:], ROWS, spec_of(layer), "cpu", capture=recorder)
    assert recorder.replays == []
    captured, _ = captured_layer(layer, new_caches(), (SHORT,))
    with pytest.raises(ValueError, match=r"mode='dense' is impossible here"):
        captured(*batch((0, 0, TOPK + 1)))
    assert not captured.counts


def test_wrong_inputs_are_named_before_anything_is_written():
    layer, caches = build(family="deepseek"), new_caches()
    captured, recorder = captured_layer(layer, caches)
    rows, *facts = batch((0, 0, 10))
    wrong: list[tuple[dict[str, Tensor], type[Exception], str]] = [
        ({"ks": rows["ks"][:3]}, ValueError, r"ks must have 10 rows, as hidden_states has, got 3"),
        ({"ke": rows["ke"].long()}, TypeError, r"ke must be torch.int32, got torch.int64"),
        ({"cos": rows["cos"][:, :2]}, ValueError, r"cos must be \[tokens, 4\], got \(10, 2\)"),
        ({"sin": rows["sin"].to("meta")}, ValueError, r"sin must be on cpu, got meta"),
        ({"mask": rows["ks"]}, ValueError, r"inputs must be hidden_states, .*, got .*mask"),
    ]
    for change, kind, message in wrong:
        with pytest.raises(kind, match=message):
            captured({**rows, **change}, *facts)
    with pytest.raises(ValueError, match=r"inputs must be hidden_states, .*, got ks"):
        captured({"ks": rows["ks"]}, *facts)
    with pytest.raises(ValueError, match="max_kv_len must be at least 0, got -1"):
        captured(rows, -1, 10)
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        captured.plan(-1, 1, 1)
    assert recorder.replays == [0, 0, 0]
    assert all(bool(cache[:NOWHERE].isnan().all()) for cache in caches.values())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"capture_bound": 0}, "capture_bound must be at least 1, got 0"),
        ({"max_query_len": 0}, "max_query_len must be at least 1, got 0"),
        ({"max_query_len": 9}, "max_query_len must be at most tokens=8, got 9"),
        ({"name": EAGER}, "name must be neither empty nor 'eager', got 'eager'"),
    ],
)
def test_a_variant_of_impossible_sizes_is_refused(sizes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        CapturedVariant(**{"name": "a", "tokens": 8, "capture_bound": 8, **sizes})


def test_arguments_that_cannot_be_captured_are_named():
    layer = build(family="deepseek")
    step, spec = layer_step(layer, new_caches()), spec_of(layer)
    with pytest.raises(ValueError, match="variants must name at least one"):
        CapturedStep(step, (), ROWS, spec, "cpu", capture=Recorder())
    with pytest.raises(ValueError, match="variants must have names of their own, got 'short' 2"):
        CapturedStep(step, (SHORT, SHORT), ROWS, spec, "cpu", capture=Recorder())
    with pytest.raises(ValueError, match="inputs must name at least one"):
        CapturedStep(step, (SHORT,), {}, spec, "cpu", capture=Recorder())
    with pytest.raises(ValueError, match=r"capture must be given .* got cpu"):
        CapturedStep(step, (SHORT,), ROWS, spec, "cpu")
    for returned, got in (([], "list"), (torch.ones(3, 2), r"\(3, 2\)"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"step must return tensors of 16 rows, .* got {got}"):
            CapturedStep(
                lambda rows, facts, returned=returned: returned,
                (SHORT,), ROWS, spec, "cpu", capture=Recorder(),
            )  # fmt: skip
