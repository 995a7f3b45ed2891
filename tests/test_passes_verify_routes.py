"""The verifier on selections and routes: each goes where it went, and no dense kernel sees more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _faults import placeholder, problem, rewire
from _graphs import (
    INDEX_DIM,
    INDEX_HEADS,
    TOPK,
    guarding_context,
    node_named,
    static_context,
    trace,
    trace_layer,
)
from torch import Tensor, fx

from dsafx import ops, routing
from dsafx.ops._attend import attend
from dsafx.passes._edit import arguments, emit, erase, inline, replace
from dsafx.passes._report import PassContext
from dsafx.passes.resolve_route import resolve_route_pass
from dsafx.passes.verify import verify_pass

LONG = 40


def two_layers(
    x: Tensor, first: Tensor, second: Tensor, values: Tensor, ks: Tensor, ke: Tensor
) -> tuple[Tensor, Tensor]:
    """Each layer selects with keys of its own and attends."""
    results = []
    for keys in (first, second):
        q = torch.mm(x, keys.t()).view(-1, INDEX_HEADS, 5)[..., :4]
        chosen = ops.index_select(q, keys[:, :4].contiguous(), q.sum(-1), ks, ke, LONG, TOPK)
        results.append(ops.sparse_mqa(values[:5, None], values, chosen, ks, 1.0, 4, False)[0])
    return results[0], results[1]


def two_layer_graph() -> fx.Graph:
    ke = torch.arange(LONG - 4, LONG + 1, dtype=torch.int32)
    keys = torch.randn(2, LONG, 6)
    args = (torch.randn(5, 6), *keys, torch.randn(LONG, 6), torch.zeros_like(ke), ke)
    return trace(two_layers, *args)


def last_call(graph: fx.Graph, op: str) -> fx.Node:
    return [node for node in graph.nodes if f"dsafx.{op}." in str(node.target)][-1]


def test_a_selection_wired_to_another_layer_is_caught():
    def fault(graph: fx.Graph) -> None:
        rewire(graph, "sparse_mqa_1", "indices", node_named(graph, "index_select"))

    assert problem(two_layer_graph(), fault) == "sparse_mqa_1 no longer reads index_select_1"


def test_a_kernel_that_reads_another_layers_selection_than_its_routed_op_is_caught():
    def fault(graph: fx.Graph) -> None:
        kernel = last_call(graph, "masked_mha")
        first, second = (arguments(kernel)[name] for name in ("ks", "ke"))
        with graph.inserting_before(kernel):
            q, k, weights = (
                arguments(last_call(graph, "index_select"))[n] for n in ("q", "k", "weights")
            )
            foreign = emit(
                graph, torch.ops.dsafx.index_select.default, q, k, weights, first, second, 40, TOPK
            )
        rewire(graph, kernel.name, "indices", foreign)

    said = problem(trace_layer(40), fault)
    assert "masked_mha reads the selection index_select_1 and not index_select" in said


def test_a_selection_for_which_another_layers_stands_is_caught():
    def fault(graph: fx.Graph) -> None:
        replace(node_named(graph, "index_select_1"), node_named(graph, "index_select"))

    said = problem(two_layer_graph(), fault)
    assert "index_select_1 index_select stands for it, which is no closed form" in said


def close(graph: fx.Graph, name: str, *changed: Any) -> fx.Node:
    """Put a closed form in the place of a scored selection; some of its arguments may be others."""
    node = node_named(graph, name)
    args = [arguments(node)[each] for each in ("ks", "ke", "max_kv_len", "topk")]
    args = [*changed, *args[len(changed) :]]
    with graph.inserting_before(node):
        closed = emit(graph, torch.ops.dsafx.causal_positions.default, *args, origin=node)
    replace(node, closed)
    return closed


def test_a_closed_form_of_long_rows_is_caught():
    said = problem(two_layer_graph(), lambda graph: close(graph, "index_select"))
    assert said == "index_select is right for 16 keys a row at most, and there may be 40"


def test_a_closed_form_of_other_rows_is_caught():
    def fault(graph: fx.Graph) -> None:
        close(graph, "index_select", placeholder(graph, 5))

    said = problem(two_layer_graph(), fault)
    assert "index_select causal_positions stands for it, which is of other rows" in said


def test_a_selection_that_goes_from_a_training_graph_is_caught():
    def fault(graph: fx.Graph) -> None:
        erase(node_named(graph, "index_select"))

    said = problem(trace_layer(9), fault, inference=False)
    assert said == ("index_select a selection is gone from a graph that gradients may be asked of")


def dense_layer() -> tuple[fx.Graph, PassContext]:
    """A layer of symbolic length that a guard has made dense, with what it entered as."""
    graph = trace_layer(9, symbolic=True)
    context = guarding_context(graph)
    resolve_route_pass(graph, context)
    return graph, context


def test_a_dense_kernel_that_checks_its_bound_is_proved():
    graph, context = dense_layer()
    assert arguments(last_call(graph, "dense_mha"))["bound"] == TOPK
    assert verify_pass(graph, context).declined == []


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        (TOPK + 1, "its bound is 17, above 16"),
        (LONG, "its bound is 40, above 16"),
    ],
)
def test_a_dense_kernel_with_a_long_bound_is_caught(bound: int, reason: str):
    graph, context = dense_layer()
    rewire(graph, "dense_mha", "bound", bound)
    assert verify_pass(graph, context).declined == [("dense_mha", reason)]


def test_a_dense_kernel_without_a_bound_is_caught():
    graph, context = dense_layer()
    rewire(graph, "dense_mha", "bound", None)
    assert verify_pass(graph, context).declined == [
        ("dense_mha", "does not check that sym_size_int_26 is at most 16")
    ]


def test_a_dense_kernel_that_is_fed_another_length_is_caught():
    graph = trace_layer(9)
    context = guarding_context(graph)
    resolve_route_pass(graph, context)
    rewire(graph, "dense_mha", "max_kv_len", LONG)
    ((name, reason),) = verify_pass(graph, context).declined
    assert (name, reason) == ("dense_mha", "has the length 40 and not 9")


def test_a_dense_kernel_of_a_length_that_is_long_is_caught():
    graph = trace_layer(40)
    context = guarding_context(graph)
    node = node_named(graph, "mla_attention")
    args = arguments(node)
    first = [args[name] for name in ("q_nope", "q_pe", "kv_c", "k_pe", "kv_b_weight", "indices")]
    rows = [args[name] for name in ("ks", "ke", "max_kv_len")]
    replace(
        node, inline(graph, node, attend, [routing.Route.DENSE_MHA, *first, *rows, args["scale"]])
    )
    declined = verify_pass(graph, context).declined
    assert declined == [("dense_mha", "is right for 16 keys a row at most, and there may be 40")]


def test_a_constant_length_that_nobody_holds_a_longer_call_to_is_caught():
    def constant(*args: Tensor) -> Tensor:
        return ops.index_select(*args, 8, TOPK)

    ke = torch.arange(1, 9, dtype=torch.int32)
    args = torch.randn(8, INDEX_HEADS, INDEX_DIM), torch.randn(8, INDEX_DIM)
    weights = torch.randn(8, INDEX_HEADS)
    graph = trace(constant, *args, weights, torch.zeros_like(ke), ke, symbolic=True)
    context = static_context(graph)
    close(graph, "index_select")
    assert verify_pass(graph, context).declined == [
        ("index_select", "its length is a constant although its keys may be more")
    ]


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
