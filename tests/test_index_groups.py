"""A selection is kept exactly as long as somebody selects with it: a model's whole schedule."""

from __future__ import annotations

import operator
from collections import Counter
from functools import lru_cache

import pytest
import torch
from _graphs import (
    HIDDEN,
    INDEX_DIM,
    ROPE,
    TOPK,
    Layer,
    op_names,
    prompt,
    spec_of,
    static_context,
    trace,
)
from torch import Tensor, fx

from dsafx import ops, routing
from dsafx.passes import PipelineReport, collect
from dsafx.passes._edit import ORIGIN, calls, copy_of, selects
from dsafx.passes._report import PassOptions
from dsafx.passes.close_selection import close_selection_pass
from dsafx.passes.pipeline import Pipeline
from dsafx.passes.resolve_route import resolve_route_pass
from dsafx.passes.verify import verify_pass

LAYERS = 78
SCHEDULE = routing.index_schedule(LAYERS, index_topk_freq=4, index_skip_topk_offset=3)
FULL = [number for number, kind in enumerate(SCHEDULE) if kind == "full"]
SPEC = [each.name for each in torch.ops.dsafx.mla_attention.default._schema.arguments].index("spec")
SHORT, LONG = 9, 40
CACHED = 64

KERNELS = ("dense_mha", "masked_mha", "sparse_mla")
SELECTIONS = ("index_select", "causal_positions")


@lru_cache(maxsize=2)
def traced(length: int) -> fx.Graph:
    """All layers of a model in one graph, semantic ops alone; the layers share their weights."""
    stage = Stage()
    names = [name for name, _ in stage.named_parameters()]

    def run(
        weights: list[Tensor], caches: list[Tensor], at: Tensor, x: Tensor, *step: Tensor
    ) -> tuple[Tensor]:
        given = dict(zip(names, weights, strict=True))
        free = iter(caches)
        indices = None
        for kind in SCHEDULE:
            cache = next(free) if kind == "full" else None
            args = (x, *step, at, cache, indices)
            hidden, indices = torch.func.functional_call(stage, given, args)
            x = x + hidden
        return (x,)

    weights = [each.detach() for each in stage.parameters()]
    caches = [torch.zeros(CACHED, INDEX_DIM) for _ in FULL]
    return trace(run, weights, caches, torch.arange(length), *prompt(length))


def model(length: int) -> fx.Graph:
    """The graph of all layers, to change at will."""
    return copy_of(traced(length))


def selections(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and selects(node)]


def routed(graph: fx.Graph) -> list[fx.Node]:
    return calls(graph, torch.ops.dsafx.mla_attention.default)


def with_mqa_only(graph: fx.Graph, layer: int) -> fx.Graph:
    """One layer declares nothing, so that top-k MQA is all it can run."""
    routed(graph)[layer].update_arg(SPEC, spec_of(dense=False, masked=False))
    return graph


def with_draft(graph: fx.Graph) -> fx.Graph:
    """A draft step behind the last layer attends once more with that layer's selection."""
    (out,) = graph.output_node().args[0]
    with graph.inserting_before(graph.output_node()):
        step = graph.node_copy(routed(graph)[-1], lambda node: node)
        picked = graph.call_function(operator.getitem, (step, 0))
    picked.meta["val"] = step.meta["val"][0]
    graph.output_node().args = ([out, picked],)
    return graph


def with_output(graph: fx.Graph) -> fx.Graph:
    """The last full layer's selection is returned."""
    (out,) = graph.output_node().args[0]
    graph.output_node().args = ([out, selections(graph)[-1]],)
    return graph


class Stage(Layer):
    """``Layer`` with a static cache for its index keys, or with another layer's selection."""

    def forward(self, x, cos, sin, ks, ke, at, cache, indices):  # type: ignore[override]
        """What is added to ``x``, and the selection to hand on."""
        q_c, kv_c, k_pe = self.latents(x, cos, sin)
        if cache is not None:
            written = cache.index_copy(0, at, self.index_key(x, cos, sin))
            indices = self.select(x, q_c, written[: x.shape[0]], cos, sin, ks, ke)
            cache.copy_(written)
        out = self.attend(q_c, kv_c, k_pe, cos, sin, indices, ks, ke)
        return out.flatten(1).mean(-1, keepdim=True).expand(-1, HIDDEN), indices

    def latents(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_c = ops.rms_norm(x @ self.q_a.t(), self.q_norm, 1e-6)
        latents = x @ self.kv_a.t()
        kv_c = ops.rms_norm(latents[:, :-ROPE], self.kv_norm, 1e-6)
        return q_c, kv_c, ops.rope(latents[:, -ROPE:], cos, sin, "interleaved")

    def index_key(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = ops.layer_norm(x @ self.index_k.t(), self.k_norm, self.k_bias, 1e-6)
        rotated = ops.rope(normed[:, :ROPE], cos, sin, "half")
        return torch.cat([rotated, normed[:, ROPE:]], dim=-1)


def run(graph: fx.Graph, inference: bool = True) -> PipelineReport:
    """Rewrite ``graph`` by the passes that decide about selections, and verify it."""
    passes = (resolve_route_pass, close_selection_pass, verify_pass)
    with collect() as reports:
        Pipeline(PassOptions(strict=True), passes)(graph, inference)
    (report,) = reports
    return report


def count(graph: fx.Graph, *names: str) -> dict[str, int]:
    """How often each of ``names`` that is there is called."""
    found = Counter(op_names(graph))
    return {name: found[name] for name in names if name in found}


def projections(graph: fx.Graph) -> Counter[str]:
    """How often each weight of the indexer is multiplied with."""
    names = [name for name, _ in Stage().named_parameters()]
    weights = dict(zip((n for n in graph.nodes if n.op == "placeholder"), names, strict=False))
    read: Counter[str] = Counter()
    for weight, name in weights.items():
        for user in weight.users:
            read[name] += len(user.users) if name.startswith("index") else 0
    return +read


def consumers(graph: fx.Graph) -> list[int]:
    """How many nodes read each selection, in program order."""
    return [len(node.users) for node in selections(graph)]


def key_writes(graph: fx.Graph) -> int:
    return len(calls(graph, torch.ops.aten.copy_.default))


def test_the_schedule_has_21_groups():
    graph = model(LONG)
    assert len(FULL) == 21
    assert len(routed(graph)) == 78
    assert consumers(graph) == [1, 1] + [4] * 19
    assert projections(graph) == {"index_k": 21, "index_q": 21, "index_w": 21}


def test_where_all_rows_are_short_every_selection_goes_with_its_query_and_every_key_is_written():
    graph = model(SHORT)
    names = [node.name for node in selections(graph)]
    report = run(graph)
    assert count(graph, *KERNELS) == {"dense_mha": 78}
    assert selections(graph) == []
    assert projections(graph) == {"index_k": 21}
    assert key_writes(graph) == 21
    # Two rotations of attention a layer and that of the index key: none of an index query.
    assert count(graph, "rope", "layer_norm") == {"rope": 2 * 78 + 21, "layer_norm": 21}
    assert report.of("close_selection").matched == 0
    assert report.of("close_selection").removed == [(n, "nothing reads it") for n in names]


def test_where_rows_are_long_every_selection_stays_with_all_its_layers():
    graph = model(LONG)
    report = run(graph)
    assert count(graph, *KERNELS, *SELECTIONS) == {"masked_mha": 78, "index_select": 21}
    assert consumers(graph) == [1, 1] + [4] * 19
    assert projections(graph) == {"index_k": 21, "index_q": 21, "index_w": 21}
    assert key_writes(graph) == 21
    assert report.of("close_selection").removed == []


@pytest.mark.parametrize("layer", [6, 77])
def test_one_layer_that_must_read_indices_keeps_its_leaders_selection_closed(layer: int):
    graph = with_mqa_only(model(SHORT), layer)
    names = [node.name for node in selections(graph)]
    report = run(graph)
    assert count(graph, *KERNELS) == {"dense_mha": 77, "sparse_mla": 1}
    (closed,) = selections(graph)
    leader = routing.leaders(SCHEDULE)[layer]
    assert closed.target is torch.ops.dsafx.causal_positions.default
    assert closed.meta[ORIGIN] == names[FULL.index(leader)]
    assert consumers(graph) == [1]
    assert len(report.of("close_selection").removed) == 20
    assert projections(graph) == {"index_k": 21}
    assert key_writes(graph) == 21


@pytest.mark.parametrize(
    ("length", "kept", "removed"),
    [(SHORT, {"causal_positions": 1}, 20), (LONG, {"index_select": 21}, 0)],
)
def test_a_selection_that_is_returned_is_kept(length: int, kept: dict[str, int], removed: int):
    graph = with_output(model(length))
    report = run(graph)
    assert count(graph, *SELECTIONS) == kept
    assert len(report.of("close_selection").removed) == removed
    assert graph.output_node().args[0][1] is selections(graph)[-1]


def test_a_draft_step_keeps_the_selection_that_it_reads():
    short = with_mqa_only(with_draft(model(SHORT)), LAYERS)
    run(short)
    assert count(short, *KERNELS) == {"dense_mha": 78, "sparse_mla": 1}
    assert count(short, *SELECTIONS) == {"causal_positions": 1}
    long = with_mqa_only(with_draft(model(LONG)), LAYERS)
    run(long)
    assert count(long, *KERNELS) == {"masked_mha": 78, "sparse_mla": 1}
    assert consumers(long) == [1, 1] + [4] * 18 + [5]


def test_a_draft_step_that_runs_dense_keeps_nothing():
    graph = with_draft(model(SHORT))
    run(graph)
    assert count(graph, *KERNELS, *SELECTIONS) == {"dense_mha": 79}


def test_a_graph_that_gradients_may_be_asked_of_keeps_its_selections():
    graph = model(SHORT)
    report = run(graph, inference=False)
    assert count(graph, *KERNELS, *SELECTIONS) == {"dense_mha": 78, "index_select": 21}
    assert consumers(graph) == [0] * 21
    reasons = {reason for _, reason in report.of("close_selection").declined}
    assert reasons == {"nothing reads it, but gradients may be asked of this graph"}


def test_a_selection_that_only_another_one_needed_which_goes_goes_too():
    def two(q: Tensor, k: Tensor, weights: Tensor, ks: Tensor, ke: Tensor) -> Tensor:
        first = ops.index_select(q, k, weights, ks, ke, LONG, TOPK)
        ops.index_select(q + first.sum(), k, weights, ks, ke, LONG, TOPK)
        return q + 1

    _, _, _, ks, ke = prompt(LONG)
    q, k = torch.randn(LONG, 8, INDEX_DIM), torch.randn(LONG, INDEX_DIM)
    graph = trace(two, q, k, torch.randn(LONG, 8), ks, ke)
    report = close_selection_pass(graph, static_context())
    assert op_names(graph) == []
    assert [name for name, _ in report.removed] == ["index_select", "index_select_1"]
