"""The verifier: sound rewrites pass, and each planted fault is caught and named."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _graphs import (
    INDEX_DIM,
    INDEX_HEADS,
    TOPK,
    node_named,
    op_names,
    run_pipeline,
    static_context,
    text,
    trace,
    trace_layer,
)
from torch import Tensor, fx

from dsafx import ops
from dsafx.passes._report import PassContext, PassOptions, PassReport
from dsafx.passes.pipeline import PASSES, Pipeline
from dsafx.passes.verify import VerificationError, verify_pass

LONG = 40


def with_fault(fault: Callable[[fx.Graph], None]) -> tuple[Any, ...]:
    """The pipeline's passes with one that breaks the graph before it is verified."""

    def fault_pass(graph: fx.Graph, context: PassContext) -> PassReport:
        fault(graph)
        return PassReport("fault")

    return (*PASSES[:-1], fault_pass, PASSES[-1])


def problem(graph: fx.Graph, fault: Callable[[fx.Graph], None]) -> str:
    """What a strict pipeline says of a graph that a fault has broken."""
    with pytest.raises(VerificationError) as raised:
        Pipeline(PassOptions(strict=True), with_fault(fault))(graph, True)
    return str(raised.value)


def cached_step(
    cache: Tensor, buffer: Tensor, x: Tensor, w: Tensor, values: Tensor, ks: Tensor, ke: Tensor
) -> Tensor:
    """Write keys into a static cache, select among them, attend; ``buffer`` is another layer's."""
    q = torch.mm(x, w).view(-1, INDEX_HEADS, INDEX_DIM)
    position = torch.arange(3, 8)
    written = torch.index_copy(cache, 0, position, x)
    indices = ops.index_select(q, written, q.sum(-1), ks, ke, LONG, TOPK)
    cache.copy_(written)
    buffer.copy_(buffer + 1)
    out, _ = ops.sparse_mqa(values[:5, None], values, indices, ks, 1.0, 4, False)
    return out


def cached_graph() -> fx.Graph:
    ke = torch.arange(LONG - 4, LONG + 1, dtype=torch.int32)
    return trace(
        cached_step,
        torch.randn(LONG, INDEX_DIM),
        torch.zeros(5, TOPK, dtype=torch.int32),
        torch.randn(5, INDEX_DIM),
        torch.randn(INDEX_DIM, INDEX_HEADS * INDEX_DIM),
        torch.randn(LONG, 6),
        torch.zeros_like(ke),
        ke,
    )


def rewire(graph: fx.Graph, name: str, operand: str, source: fx.Node) -> None:
    node = node_named(graph, name)
    parameters = [parameter.name for parameter in node.target._schema.arguments]
    node.update_arg(parameters.index(operand), source)


def placeholder(graph: fx.Graph, number: int) -> fx.Node:
    return [node for node in graph.nodes if node.op == "placeholder"][number]


@pytest.mark.parametrize("length", [9, 40])
@pytest.mark.parametrize("fuse", ["never", "always"])
def test_sound_rewrites_are_proved(length: int, fuse: str):
    report = run_pipeline(trace_layer(length), fuse=fuse, strict=True)
    assert report.problem is None
    assert report.of("verify").matched >= 4


def test_a_static_cache_is_proved():
    assert run_pipeline(cached_graph(), strict=True).problem is None


def test_indices_from_a_buffer_that_the_graph_writes_are_caught():
    said = problem(cached_graph(), lambda g: rewire(g, "sparse_mqa", "indices", placeholder(g, 1)))
    assert said.startswith("sparse_mqa its indices are read from arg1_1, which the graph writes")


def test_indices_that_select_nothing_are_caught():
    def fault(graph: fx.Graph) -> None:
        rewire(graph, "sparse_mqa", "indices", node_named(graph, "sum_1"))

    assert "its indices come from sum_1, which selects nothing" in problem(cached_graph(), fault)


def test_indices_from_a_float_input_are_caught():
    said = problem(cached_graph(), lambda g: rewire(g, "sparse_mqa", "indices", placeholder(g, 4)))
    assert said == "sparse_mqa its indices are the input arg4_1, which is torch.float32"


def test_an_int32_input_that_nothing_writes_is_a_carrier():
    def shared(values: Tensor, carrier: Tensor, ks: Tensor) -> Tensor:
        indices = ops.compact(carrier.view(-1, TOPK))
        return ops.sparse_mqa(values[:5, None], values, indices, ks, 1.0, 4, False)[0]

    carrier = torch.zeros(1, 5, TOPK, dtype=torch.int32)
    graph = trace(shared, torch.randn(LONG, 6), carrier, torch.zeros(5, dtype=torch.int32))
    assert run_pipeline(graph, strict=True).problem is None


def test_a_dropped_key_write_is_caught():
    said = problem(cached_graph(), lambda g: g.erase_node(node_named(g, "copy_")))
    assert said == "copy_ a write of the graph is gone"


def test_a_key_write_of_other_keys_is_caught():
    def fault(graph: fx.Graph) -> None:
        node_named(graph, "index_put").update_arg(2, placeholder(graph, 0))

    assert problem(cached_graph(), fault) == "index_put a write no longer reads arg2_1"


def test_a_write_back_of_the_old_cache_is_caught():
    def fault(graph: fx.Graph) -> None:
        node_named(graph, "copy_").update_arg(1, placeholder(graph, 0))

    assert "copy_ a write no longer reads index_put" in problem(cached_graph(), fault)


def test_a_read_of_the_old_keys_behind_the_write_is_caught():
    said = problem(cached_graph(), lambda g: rewire(g, "index_select", "k", placeholder(g, 0)))
    assert said == "index_select reads the old value of arg0_1 behind its write"


def test_a_routed_op_that_goes_down_two_paths_is_caught():
    def fault(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if "dense_mha" in str(n.target))
        with graph.inserting_after(node):
            graph.node_copy(node, lambda each: each)

    assert problem(trace_layer(9), fault) == "output mla_attention went down 2 paths"


def test_a_routed_op_that_vanishes_is_caught():
    def fault(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if "dense_mha" in str(n.target))
        for user in list(node.users):
            user.replace_all_uses_with(node_named(graph, "mm"))
            graph.erase_node(user)
        graph.erase_node(node)

    assert "mla_attention went down 0 paths" in problem(trace_layer(9), fault)


def test_another_output_in_the_place_of_the_index_key_is_caught():
    def fault(graph: fx.Graph) -> None:
        out, _ = graph.output_node().args[0]
        graph.output_node().args = ([out, node_named(graph, "mm_2")],)

    assert problem(trace_layer(9), fault) == "output output 1 was cat and is mm_2"


def test_a_graph_that_cannot_be_verified_is_put_back_with_one_warning():
    graph = cached_graph()
    before = text(graph)
    pipeline = Pipeline(PassOptions(), with_fault(lambda g: g.erase_node(node_named(g, "copy_"))))
    with pytest.warns(UserWarning, match="copy_ a write of the graph is gone") as caught:
        pipeline(graph, True)
    assert len(caught) == 1
    assert sorted(op_names(graph)) == ["index_select", "sparse_mqa"]
    assert len(text(graph).splitlines()) == len(before.splitlines())
    assert [node.target for node in graph.nodes].count(operator.getitem) == 2


def test_the_verifier_needs_the_graph_as_it_entered():
    with pytest.raises(ValueError, match=r"context\.entered"):
        verify_pass(cached_graph(), static_context())
