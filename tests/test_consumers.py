"""Who reads a selection decides whether it is made; that its rows are short decides how."""

from __future__ import annotations

from typing import Any

import _tiny
import pytest
import torch
from _tiny import TOPK
from _uncompiled import passes_only
from test_layer import HIDDEN, angles, rows

from dsafx import ops, routing
from dsafx.models.config import DSAConfig
from dsafx.models.layer import DSAAttention
from dsafx.passes import collect

SHORT = TOPK - 3
PARALLEL = routing.RouteConfig(prefill_context_parallel=2)


def group(leader_route=None, follower_route=None):
    """A full layer and the shared layer behind it, and one step of short rows."""
    model = _tiny.tiny_model("glm_moe_dsa", num_hidden_layers=2, indexer_types=["full", "shared"])
    config = DSAConfig.from_transformers(model.config)
    layers = []
    for index, route in enumerate((leader_route, follower_route)):
        layer = DSAAttention(config, index, route or routing.RouteConfig())
        layer.load_state_dict(model.model.layers[index].self_attn.state_dict())
        layers.append(layer.eval())
    step = (torch.randn(SHORT, HIDDEN), *angles(model, SHORT), *rows(SHORT), SHORT, SHORT)
    return (*layers, step)


def no_scoring(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a short row was scored")


def alone() -> tuple[DSAAttention, tuple[Any, ...]]:
    model = _tiny.tiny_model("deepseek_v32", num_hidden_layers=1)
    layer = DSAAttention(DSAConfig.from_transformers(model.config)).eval()
    return layer, (torch.randn(SHORT, HIDDEN), *angles(model, SHORT), *rows(SHORT), SHORT, SHORT)


def closed(step: tuple[Any, ...]) -> torch.Tensor:
    return ops.causal_positions(step[3], step[4], SHORT, TOPK)


def test_nobody_reads_the_selection_of_a_dense_layer_alone(monkeypatch):
    layer, step = alone()
    monkeypatch.setattr("dsafx.models.layer.ops.index_select", no_scoring)
    with torch.no_grad():
        assert layer(*step)[1] is None


def test_a_draft_step_or_a_recorder_gets_the_closed_form(monkeypatch):
    layer, step = alone()
    monkeypatch.setattr("dsafx.models.layer.ops.index_select", no_scoring)
    with torch.no_grad():
        assert torch.equal(layer(*step, keep_indices=True)[1], closed(step))


@pytest.mark.parametrize("follower", ["auto", "sparse"])
def test_a_shared_layer_gets_the_closed_form_whatever_its_route(monkeypatch, follower):
    leader, shared, step = group(follower_route=routing.RouteConfig(mode=follower))
    with torch.no_grad():
        expected = shared(*step, indices=closed(step))[0]
        monkeypatch.setattr("dsafx.models.layer.ops.index_select", no_scoring)
        indices = leader(*step)[1]
        assert torch.equal(indices, closed(step))
        torch.testing.assert_close(shared(*step, indices=indices)[0], expected)


def test_prefill_context_parallel_gets_the_closed_form_from_every_layer(monkeypatch):
    leader, _, step = group(leader_route=PARALLEL)
    monkeypatch.setattr("dsafx.models.layer.ops.index_select", no_scoring)
    with torch.no_grad():
        assert torch.equal(leader(*step)[1], closed(step))


def compiled_ops(run: Any, *args: Any) -> set[str]:
    """The ops of this package that are left in the inference graph of ``run``."""
    with torch.no_grad(), collect() as reports:
        torch.compile(run, backend=passes_only, fullgraph=True, dynamic=False)(*args)
    names = ("index_select", "causal_positions", "dense_mha", "sparse_mla", "mla_attention")
    return {name for name in names if f"dsafx.{name}(" in reports[0].after}


def test_a_compiled_group_makes_the_closed_form_once_for_the_layer_that_reads_it():
    leader, shared, step = group(follower_route=routing.RouteConfig(mode="sparse"))

    def both(step):
        indices = leader(*step)[1]
        return shared(*step, indices=indices)[0]

    assert compiled_ops(both, step) == {"causal_positions", "sparse_mla"}


def test_a_compiled_group_without_a_reader_makes_no_selection():
    leader, shared, step = group()

    def both(step):
        out, indices = leader(*step)
        return out, shared(*step, indices=indices)[0]

    assert compiled_ops(both, step) == {"dense_mha"}


def test_a_compiled_selection_that_is_returned_stays_in_closed_form():
    layer, step = alone()
    assert compiled_ops(lambda step: layer(*step), step) == {"causal_positions", "dense_mha"}
