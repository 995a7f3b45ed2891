"""What ``recognise`` leaves alone, and the reason that its report gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _recognised import (
    ONE_LAYER,
    Wrapped,
    calls,
    dynamo_graphs,
    graph_of,
    groups,
    layer_inputs,
    other_model,
    small_graph,
    small_model,
)
from _tiny import TOPK, tiny_model
from torch import Tensor, fx, nn

from dsafx.passes import graph_text
from dsafx.passes._report import PassReport
from dsafx.passes.recognise import recognise_pass

FAMILY = "glm_moe_dsa"


def assert_declined(graph: fx.Graph, reason: str) -> PassReport:
    """Nothing is recognised, the graph stays as it is, and the report says why."""
    before = graph_text(graph)
    report = recognise_pass(graph)
    assert (report.matched, report.became) == (0, [])
    assert graph_text(graph) == before
    reasons = [text for _, text in report.declined]
    assert any(re.search(reason, text) for text in reasons), reasons
    return report


def one_layer(attention: str = "sdpa") -> Any:
    return small_model(FAMILY, attention, ONE_LAYER[FAMILY])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_with_dropout(attention: str):
    model = small_model(FAMILY, attention, ONE_LAYER[FAMILY], attention_dropout=0.1).train()
    report = assert_declined(graph_of(model), "^its attention differs: expected 0.0, found 0.1$")
    assert {layer for layer, _ in report.declined} == {"model.layers.0.self_attn"}


def test_attention_weights_that_are_an_output():
    model = one_layer("eager")
    with torch.no_grad():
        # transformers installs its recording hooks on first use, which Dynamo cannot trace.
        model(torch.ones(1, 2, dtype=torch.int64), output_attentions=True, use_cache=False)
    assert_declined(graph_of(model, output_attentions=True), "has 2 readers$")


def test_an_additive_mask_from_outside():
    length = 2 * TOPK
    hidden = torch.ones(length, length).triu(1).bool()
    mask = torch.zeros(2, 1, length, length).masked_fill(hidden, torch.finfo(torch.float32).min)
    graph = graph_of(one_layer("eager"), attention_mask={"indexed_attention": mask})
    assert_declined(graph, "^its mask is additive and comes from outside of the graph$")


class Adapted(nn.Module):
    """A projection with a low-rank update beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _biased(base: nn.Linear) -> nn.Linear:
    return nn.Linear(base.in_features, base.out_features)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Adapted, r"^its attention differs: expected linear, found add \("),
        (_biased, "^its attention differs: expected None, found .*kv_b_proj.*bias"),
    ],
)
def test_an_up_projection_of_the_latents_that_is_no_plain_matrix(
    change: Callable[[nn.Linear], nn.Module], reason: str
):
    model = one_layer()
    layer = model.model.layers[0].self_attn
    layer.kv_b_proj = change(layer.kv_b_proj)
    assert_declined(graph_of(model), reason)


def test_a_shared_layer_compiled_alone_has_its_selection_from_outside():
    model = small_model(FAMILY)
    layer = Wrapped(model.model.layers[1].self_attn)
    indices = torch.zeros(2, 2 * TOPK, TOPK, dtype=torch.int32)
    inputs = layer_inputs(model, 2 * TOPK)
    with torch.no_grad():
        (graph,) = dynamo_graphs(layer, lambda run: run(*inputs, prev_topk_indices=indices))
    assert_declined(graph, "^its selection was not made in this graph$")


def test_an_attention_compiled_alone_is_not_named_in_its_graph():
    model = small_model(FAMILY)
    inputs = layer_inputs(model, 2 * TOPK)
    with torch.no_grad():
        (graph,) = dynamo_graphs(model.model.layers[0].self_attn, lambda run: run(*inputs))
    assert_declined(graph, "^the graph does not say which attention it is of$")


@pytest.mark.parametrize(
    ("module", "model", "config"),
    [
        ("hy_v4", "HYV4ForCausalLM", "HYV4Config"),
        ("mistral_large4", "MistralLarge4TextModel", "MistralLarge4TextConfig"),
    ],
)
def test_attention_classes_whose_indexer_is_another(module: str, model: str, config: str):
    graph = graph_of(other_model(module, model, config))
    kind = config.replace("Config", "Attention")
    report = assert_declined(graph, f"^{kind} is not a layer that is known$")
    assert len(report.declined) == 2


def _first(graph: fx.Graph, name: str) -> fx.Node:
    return calls(graph, name)[0]


def _without_relu(graph: fx.Graph) -> None:
    relu = _first(graph, "relu")
    relu.replace_all_uses_with(relu.args[0])
    graph.erase_node(relu)


def _over_queries(graph: fx.Graph) -> None:
    _first(graph, "topk").update_kwarg("dim", 1)


def _smallest(graph: fx.Graph) -> None:
    topk = _first(graph, "topk")
    topk.kwargs = {**topk.kwargs, "largest": False}


def _of_unknown_width(graph: fx.Graph) -> None:
    topk = _first(graph, "topk")
    with graph.inserting_before(topk):
        width = graph.call_method("size", (_weight(graph), 1))
    topk.update_arg(1, width)


def _negative_scores(graph: fx.Graph) -> None:
    _first(graph, "relu").args[0].update_arg(1, -0.25)


def _scores_scaled_by_a_tensor(graph: fx.Graph) -> None:
    scores = _first(graph, "relu").args[0]
    scores.update_arg(1, next(node for node in graph.nodes if node.op == "placeholder"))


def _selection_read_elsewhere(graph: fx.Graph) -> None:
    selection = _first(graph, "long").args[0]
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        total = graph.call_method("sum", (selection,))
    output.args = ((*output.args[0], total),)


def _scores_read_elsewhere(graph: fx.Graph) -> None:
    (output,) = graph.find_nodes(op="output")
    output.args = ((*output.args[0], _first(graph, "relu")),)


def _masked_unlike_the_selection(graph: fx.Graph) -> None:
    attended = _first(graph, "scaled_dot_product_attention").kwargs["attn_mask"]
    with graph.inserting_before(attended):
        other = graph.call_method("clone", (attended.args[0],))
    attended.update_arg(0, other)


def _queries_in_another_order(graph: fx.Graph) -> None:
    query = _first(graph, "scaled_dot_product_attention").args[0]
    query.update_arg(0, tuple(reversed(query.args[0])))


def _keys_written_twice_alike(graph: fx.Graph) -> None:
    first, second = calls(graph, "copy_")[:2]
    second.args[0].update_arg(1, first.args[0].args[1])
    second.update_arg(1, first.args[1])


def _without_a_scale(graph: fx.Graph) -> None:
    _first(graph, "scaled_dot_product_attention").update_kwarg("scale", None)


def _weight(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if "kv_b_proj" in node.name)


def _quantised_weight(graph: fx.Graph) -> None:
    meta = _weight(graph).meta
    meta["example_value"] = meta["example_value"].to(torch.float8_e4m3fn)


def _weight_of_more_heads(graph: fx.Graph) -> None:
    meta = _weight(graph).meta
    meta["example_value"] = torch.cat([meta["example_value"]] * 2)


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (_without_relu, "its selection differs: expected relu, found mul"),
        (_over_queries, "its selection differs: expected -1, found 1"),
        (_smallest, r"its selection differs: topk has the keywords \['dim', 'largest'\]"),
        (_of_unknown_width, "its selection differs: its width is size, and K is not known"),
        (_negative_scores, "its selection differs: its scores are scaled by -0.25"),
        (_scores_scaled_by_a_tensor, "its selection differs: its scores are scaled by l_"),
        (_selection_read_elsewhere, "its selection is read by sum_1, which is no attention"),
        (_scores_read_elsewhere, "its selection differs: scores_1 is also read by output"),
        (_masked_unlike_the_selection, "self_attn has another mask than its selection"),
        (_queries_in_another_order, "its attention differs: 8 dims of its queries meet 16"),
        (_keys_written_twice_alike, "its attention differs: nope_write is both copy_ and copy__1"),
        (_without_a_scale, "its attention differs: its logits are scaled by None"),
        (_quantised_weight, "its attention differs: kv_b_proj has a weight of torch.float8_e4m3fn"),
        (_weight_of_more_heads, "its attention differs: kv_b_proj does not give 4 heads of 40"),
    ],
)
def test_a_graph_altered_in_one_place(alter: Callable[[fx.Graph], None], reason: str):
    graph = small_graph(FAMILY)
    alter(graph)
    graph.lint()
    assert_declined(graph, reason)


def _wide_softmax(graph: fx.Graph) -> None:
    _first(graph, "softmax").update_kwarg("dtype", torch.float64)


def _weights_rounded(graph: fx.Graph) -> None:
    _first(graph, "dropout").args[0].update_arg(1, torch.bfloat16)


def _unselected_keys_count(graph: fx.Graph) -> None:
    filled = next(node for node in calls(graph, "masked_fill") if node.args[2] != float("-inf"))
    filled.update_arg(2, 0.0)


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (_wide_softmax, "its attention differs: expected torch.float32, found torch.float64"),
        (_weights_rounded, "its attention differs: its weights are rounded to torch.bfloat16"),
        (_unselected_keys_count, "its attention differs: keys that are not selected get 0.0"),
    ],
)
def test_a_graph_of_eager_attention_altered_in_one_place(
    alter: Callable[[fx.Graph], None], reason: str
):
    graph = small_graph(FAMILY, "eager")
    alter(graph)
    assert_declined(graph, f"^{reason}$")


@pytest.mark.parametrize(
    ("name", "dim", "at"),
    [
        ("layers_0_keys", 2, "scaled_dot_product_attention"),
        ("layers_0_values", 2, "scaled_dot_product_attention"),
        ("layers_0_indexer_keys", 1, "topk"),
    ],
)
def test_a_cache_that_is_written_between_its_read_and_the_attention(name: str, dim: int, at: str):
    graph = small_graph(FAMILY, phase="decode", cache="static")
    written = next(node for node in calls(graph, "index_copy_") if str(node.args[0]).endswith(name))
    with graph.inserting_before(_first(graph, at)):
        graph.call_method("index_copy_", written.args)
    assert_declined(graph, "^index_copy__[0-9]+ writes what it reads$")


@pytest.mark.parametrize(
    ("altered", "left"),
    [
        (0, {"1": "selects and attends", "2": "attends", "3": "selects and attends"}),
        (2, {"0": "selects and attends", "3": "selects and attends"}),
    ],
)
def test_a_group_is_left_alone_whole_and_the_others_are_recognised(
    altered: int, left: dict[str, str]
):
    """Layer 2 shares the selection of layer 1."""
    graph = graph_of(tiny_model(FAMILY))
    attention = calls(graph, "scaled_dot_product_attention")[altered]
    attention.update_kwarg("is_causal", True)
    report = recognise_pass(graph)
    graph.lint()
    assert groups(report) == left
    first = 0 if altered == 0 else 1
    assert [layer for layer, _ in report.declined] == [
        f"model.layers.{altered}.self_attn",
        f"model.layers.{first}.self_attn",
    ]
