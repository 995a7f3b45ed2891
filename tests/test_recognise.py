"""``recognise`` on the graphs that Dynamo makes of unmodified models: what becomes our ops."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from _graphs import wrapped
from _recognised import (
    ONE_LAYER,
    Wrapped,
    became,
    calls,
    graph_of,
    groups,
    layer_inputs,
    other_model,
    small_graph,
    small_model,
)
from _tiny import FAMILIES, TOPK, tiny_model
from _uncompiled import passes_only
from expecttest import assert_expected_inline
from torch import Tensor, fx

from dsafx.passes import collect, graph_text
from dsafx.passes._dsa_layers import owner_of
from dsafx.passes.recognise import recognise_pass

FULL, SHARED = "selects and attends", "attends"
PHASES = [
    ("prefill", "none"),
    ("prefill", "dynamic"),
    ("prefill", "static"),
    ("decode", "dynamic"),
    ("decode", "static"),
]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_layer_of_deepseek_v32_selects_and_attends(attention: str):
    graph = graph_of(_tiny("deepseek_v32", attention))
    report = recognise_pass(graph)
    assert groups(report) == {"0": FULL, "1": FULL, "2": FULL}
    assert report.declined == []
    _assert_replaced(graph, selections=3, attentions=3)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_shared_layers_of_glm_attend_with_the_selection_before_them(attention: str):
    graph = graph_of(_tiny("glm_moe_dsa", attention), "decode", "static")
    report = recognise_pass(graph)
    assert groups(report) == {"0": FULL, "1": FULL, "2": SHARED, "3": FULL}
    assert report.declined == []
    _assert_replaced(graph, selections=3, attentions=4)
    selections = calls(graph, "select_requests")
    read = [node.args[5] for node in calls(graph, "attend_requests")]
    assert read == [selections[0], selections[1], selections[1], selections[2]]


def _tiny(family: str, attention: str) -> Any:
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    return model


def _assert_replaced(graph: fx.Graph, selections: int, attentions: int) -> None:
    graph.lint()
    assert len(calls(graph, "select_requests")) == selections
    assert len(calls(graph, "attend_requests")) == attentions
    gone = ("scaled_dot_product_attention", "softmax", "masked_fill", "topk", "scatter")
    left = [node for name in gone for node in calls(graph, name) if owner_of(node) is not None]
    assert left == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("phase", "cache"), PHASES)
def test_a_layer_is_found_in_each_phase_with_each_cache_and_attention(
    family: str, attention: str, phase: str, cache: str
):
    graph = small_graph(family, attention, phase=phase, cache=cache)
    report = recognise_pass(graph)
    second = FULL if family == "deepseek_v32" else SHARED
    assert (groups(report), report.declined) == ({"0": FULL, "1": second}, [])
    _assert_replaced(graph, selections=2 if second is FULL else 1, attentions=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_norms_and_rotations_of_a_recognised_layer_are_counted_apart(family: str):
    report = recognise_pass(small_graph(family))
    with_indexer = Counter(rms_norm=2, layer_norm=1, rope=4)
    norms = {
        layer: ops - Counter(index_select=1, mla_attention=1)
        for layer, ops in became(report).items()
    }
    without = Counter(rms_norm=2, rope=2)
    assert norms == {"0": with_indexer, "1": with_indexer if family == FAMILIES[0] else without}
    assert report.matched == sum(sum(ops.values()) for ops in became(report).values())


@pytest.mark.parametrize("length", [TOPK - 1, TOPK, TOPK + 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_is_found_at_each_length_with_the_width_that_selects_the_same(
    length: int, dynamic: bool
):
    graph = small_graph("glm_moe_dsa", length=length, dynamic=dynamic)
    assert groups(recognise_pass(graph)) == {"0": FULL, "1": SHARED}
    (selection,) = calls(graph, "select_requests")
    assert selection.args[4] == (TOPK if dynamic else min(length, TOPK))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("phase", "cache"), PHASES)
def test_causality_that_the_graph_builds_becomes_intervals_and_the_mask_goes(
    attention: str, phase: str, cache: str
):
    graph = small_graph("glm_moe_dsa", attention, phase=phase, cache=cache)
    recognise_pass(graph)
    (selection,) = calls(graph, "select_requests")
    (intervals,) = calls(graph, "causal_intervals")
    assert selection.args[3] is intervals
    assert {node.args[6] for node in calls(graph, "attend_requests")} == {intervals}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("phase", "cache"), [("prefill", "none"), ("decode", "static")])
def test_with_padding_the_mask_stays_an_operand(attention: str, phase: str, cache: str):
    graph = small_graph("glm_moe_dsa", attention, phase=phase, cache=cache, padded=True)
    assert groups(recognise_pass(graph)) == {"0": FULL, "1": SHARED}
    (selection,) = calls(graph, "select_requests")
    mask = selection.args[3]
    assert mask.target is torch.select
    assert mask.args[0].meta["example_value"].dtype == torch.bool
    assert calls(graph, "causal_intervals") == []


def test_a_bool_mask_from_outside_is_an_operand():
    model = small_model("glm_moe_dsa")
    mask = torch.rand(2, 1, 2 * TOPK, 2 * TOPK) < 0.5
    graph = graph_of(model, attention_mask={"indexed_attention": mask})
    assert groups(recognise_pass(graph)) == {"0": FULL, "1": SHARED}
    (selection,) = calls(graph, "select_requests")
    assert selection.args[3].args[0].op == "placeholder"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_training_without_dropout_is_recognised(attention: str):
    model = small_model("glm_moe_dsa", attention).train()
    with torch.enable_grad():
        graph = graph_of(model)
    assert groups(recognise_pass(graph)) == {"0": FULL, "1": SHARED}


def test_hidden_states_may_be_outputs():
    model = small_model("deepseek_v32", sizes=ONE_LAYER["deepseek_v32"])
    settings = {"output_hidden_states": True, "use_cache": False}
    with torch.no_grad():
        # transformers installs its recording hooks on first use, which Dynamo cannot trace.
        model(torch.ones(1, 2, dtype=torch.int64), **settings)
    graph = graph_of(model, output_hidden_states=True)
    assert groups(recognise_pass(graph)) == {"0": FULL}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_axk2_has_the_same_layers(attention: str, phase: str):
    model = other_model("axk2", "AXK2ForCausalLM", "AXK2Config")
    model.set_attn_implementation(attention)
    report = recognise_pass(graph_of(model, phase, "static"))
    assert (groups(report), report.declined) == ({"0": FULL, "1": FULL}, [])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_dots3_note_has_the_same_layers_beside_others_that_are_left_alone(
    attention: str, phase: str
):
    model = other_model(
        "dots3_note",
        "Dots3NoteForCausalLM",
        "Dots3NoteTextConfig",
        layer_types=["indexed_attention", "sliding_attention"],
        sliding_window=8,
    )
    model.set_attn_implementation(attention)
    report = recognise_pass(graph_of(model, phase, "static"))
    assert groups(report) == {"0": FULL}
    ((layer, reason),) = report.declined
    assert layer == "model.layers.1.self_attn"
    assert reason.startswith("its attention differs: expected")


@torch.no_grad()
@pytest.mark.parametrize("length", [TOPK - 4, 2 * TOPK])
def test_a_selection_that_is_an_output_keeps_the_form_of_transformers(length: int):
    """[B, S, min(K, T)] int32, each lane a position that the row sees; the same keys are named."""
    model = small_model("glm_moe_dsa", sizes=ONE_LAYER["glm_moe_dsa"])
    layer = Wrapped(model.model.layers[0].self_attn)
    *inputs, mask = layer_inputs(model, length)
    with collect() as reports:
        compiled = torch.compile(layer, backend=passes_only, fullgraph=True)
        out, _, ours = compiled(*inputs, mask)
    assert list(groups(reports[0].of("recognise")).values()) == [FULL]
    expected, _, theirs = layer(*inputs, mask)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert (ours.shape, ours.dtype) == (theirs.shape, torch.int32)
    # In rows that see fewer, those of transformers go on with keys that the mask hides.
    assert torch.equal(_scattered(ours, length), _scattered(theirs, length) & mask[:, 0])


@torch.no_grad()
def test_in_bfloat16_the_selection_differs_where_scores_are_within_a_rounding():
    """Norms and rotations round once here and twice in transformers, which may swap near keys."""
    model = small_model("glm_moe_dsa", sizes=ONE_LAYER["glm_moe_dsa"]).to(torch.bfloat16)
    layer, length = Wrapped(model.model.layers[0].self_attn), 3 * TOPK
    hidden, angles, mask = layer_inputs(model, length)
    inputs = (hidden.bfloat16(), tuple(each.bfloat16() for each in angles), mask)
    ours = torch.compile(layer, backend=passes_only, fullgraph=True)(*inputs)[-1]
    theirs = _scattered(layer(*inputs)[-1], length) & mask[:, 0]
    missing = theirs & ~_scattered(ours, length)
    assert int(missing.sum()) <= 0.005 * int(theirs.sum())


def _scattered(indices: Tensor, keys: int) -> Tensor:
    """[B, S, keys] bool, true at the positions that ``indices`` names."""
    marks = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool)
    return marks.scatter(-1, indices.long(), True)


def shown(graph: fx.Graph) -> str:
    """The selections, what attends with them, and the writes of caches."""
    names = ("causal_intervals", "select_requests", "attend_requests", "foreign_indices")
    kept = {node.name for name in (*names, "index_copy_") for node in calls(graph, name)}
    text = re.sub(
        r"\bl_\w+_layers_(modules_)?(\d)_(modules_\w+_modules_)?", r"layer\2_", graph_text(graph)
    )
    lines = text.splitlines()
    return "\n".join(wrapped(line) for line in lines if line.partition(":")[0] in kept)


def test_a_prefill_of_a_full_and_a_shared_layer():
    graph = small_graph("glm_moe_dsa", cache="dynamic")
    recognise_pass(graph)
    assert_expected_inline(
        shown(graph),
        """\
causal_intervals: causal_intervals(kv_indices, q_indices)
select_requests: select_requests(q_2, k_2, mul, causal_intervals, 16)
attend_requests: attend_requests(q_pass, rotated_requests, keys, values,
    layer0_kv_b_proj_parameters_weight_, select_requests, causal_intervals, 16,
    0.2041241452319315, '...')
attend_requests_1: attend_requests(q_pass_2, rotated_requests_4, keys_1, values_1,
    layer1_kv_b_proj_parameters_weight_, select_requests, causal_intervals, 16,
    0.2041241452319315, '...')""",
    )


def test_a_decode_step_of_a_full_and_a_shared_layer_with_a_static_cache():
    graph = small_graph("glm_moe_dsa", phase="decode", cache="static")
    recognise_pass(graph)
    assert_expected_inline(
        shown(graph),
        """\
causal_intervals: causal_intervals(kv_indices, q_indices)
index_copy_: call_method[index_copy_](layer0_keys, 2, cache_position, k_pass)
index_copy__1: call_method[index_copy_](layer0_values, 2, cache_position, rotated_requests_1)
index_copy__2: call_method[index_copy_](layer0_indexer_keys, 1, cache_position_1, k_1)
select_requests: select_requests(q_2, layer0_indexer_keys, mul, causal_intervals, 16)
attend_requests: attend_requests(q_pass, rotated_requests, layer0_keys, layer0_values,
    layer0_kv_b_proj_parameters_weight_, select_requests, causal_intervals, 16,
    0.2041241452319315, '...')
index_copy__3: call_method[index_copy_](layer1_keys, 2, cache_position_2, k_pass_2)
index_copy__4: call_method[index_copy_](layer1_values, 2, cache_position_2,
    rotated_requests_5)
attend_requests_1: attend_requests(q_pass_2, rotated_requests_4, layer1_keys, layer1_values,
    layer1_kv_b_proj_parameters_weight_, select_requests, causal_intervals, 16,
    0.2041241452319315, '...')""",
    )
