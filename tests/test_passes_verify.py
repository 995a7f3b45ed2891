"""The verifier: sound rewrites pass, and each planted fault is caught and named."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable

import _layer_parts as parts
import pytest
import torch
from _faults import placeholder, problem, rewire, with_fault
from _functionalized import functionalized
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
from dsafx.ops.index_cache import index_cache_write
from dsafx.ops.mla_cache import mla_cache_write
from dsafx.passes import verify
from dsafx.passes._edit import calls, emit, hoist
from dsafx.passes._report import PassOptions
from dsafx.passes._torch_compat import AUTO_FUNCTIONALIZED
from dsafx.passes.pipeline import Pipeline
from dsafx.passes.verify import verify_pass

LONG = 40


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
    assert said.startswith("sparse_mqa its indices are the input arg4_1, which is torch.float32")


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

    assert problem(cached_graph(), fault) == "index_put no longer reads arg2_1"


def test_a_write_back_of_the_old_cache_is_caught():
    def fault(graph: fx.Graph) -> None:
        node_named(graph, "copy_").update_arg(1, placeholder(graph, 0))

    assert "copy_ no longer reads index_put" in problem(cached_graph(), fault)


def test_a_read_of_the_old_keys_behind_the_write_is_caught():
    said = problem(cached_graph(), lambda g: rewire(g, "index_select", "k", placeholder(g, 0)))
    assert "index_select no longer reads index_put" in said
    assert "index_select reads the old value of arg0_1 behind its write" in said


def test_another_output_in_the_place_of_the_index_key_is_caught():
    def fault(graph: fx.Graph) -> None:
        out, _ = graph.output_node().args[0]
        graph.output_node().args = ([out, node_named(graph, "mm_2")],)

    assert problem(trace_layer(9), fault) == "output output 1 was cat and is mm_2"


def reads_both(cache: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """A step that reads the old value of its cache behind the write, and means it."""
    written = torch.index_copy(cache, 0, torch.arange(3, 8), x)
    result = ops.rms_norm(cache, weight, 1e-6) + written
    cache.copy_(written)
    return result


def test_a_read_of_the_old_value_that_the_program_means_is_kept():
    args = torch.randn(LONG, INDEX_DIM), torch.randn(5, INDEX_DIM), torch.randn(INDEX_DIM)
    report = run_pipeline(trace(reads_both, *args), strict=True)
    assert report.of("lower").matched == 1
    assert report.problem is None


def test_a_read_of_the_old_value_that_a_pass_moves_behind_the_write_is_caught():
    def step(cache: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        old = ops.rms_norm(weight, weight, 1e-6) + cache.sum()
        cache.index_copy_(0, torch.arange(3, 8), x)
        return old

    def fault(graph: fx.Graph) -> None:
        (write,) = calls(graph, torch.ops.aten.index_put.default)
        hoist([write], before=next(n for n in graph.nodes if n.op == "call_function"))

    args = torch.randn(LONG, INDEX_DIM), torch.randn(5, INDEX_DIM), torch.randn(INDEX_DIM)
    said = problem(functionalized(step, *args), fault)
    assert said.startswith("sum_1 reads the old value of")


def paged_step() -> fx.Graph:
    """One layer that writes both paged caches, its norms, rotations and writes one op."""

    def layer(a: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        q_c, kv_c, k_pe = parts.latents(a)
        index_cache_write(parts.index_key(a), a["index_cache"], a["index_slots"], "ue8m0")
        mla_cache_write(kv_c, k_pe, a["cache"], a["slots"], "bf16")
        return q_c * 2, a["cache"].sum()

    return functionalized(layer, parts.operands())


def writing(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in AUTO_FUNCTIONALIZED]


@pytest.mark.parametrize(("fuse", "calls"), [("never", 2), ("always", 1)])
def test_paged_writes_are_proved_where_they_stand_and_where_they_moved(fuse: str, calls: int):
    graph = paged_step()
    report = run_pipeline(graph, fuse=fuse, strict=True)
    assert report.problem is None
    assert len(writing(graph)) == calls


def paged_problem(fuse: str, fault: Callable[[fx.Graph, fx.Node], None]) -> str:
    """What is said where a fault befalls the last of the writing calls."""
    return problem(paged_step(), lambda graph: fault(graph, writing(graph)[-1]), fuse=fuse)


def input_like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Another graph input of the same shape."""
    (other,) = (
        each
        for each in graph.nodes
        if each.op == "placeholder"
        and each is not node
        and each.meta["val"].shape == node.meta["val"].shape
        and each.meta["val"].dtype == node.meta["val"].dtype
    )
    return other


def test_a_write_that_moves_to_other_slots_is_caught():
    def fault(graph: fx.Graph, call: fx.Node) -> None:
        slots = call.kwargs["slot_mapping"]
        call.update_kwarg("slot_mapping", input_like(graph, slots))

    assert "a write of the graph is gone" in paged_problem("always", fault)
    assert "auto_functionalized_v2_1 no longer reads" in paged_problem("never", fault)


def test_a_fused_write_in_another_layout_is_caught():
    def fault(graph: fx.Graph, call: fx.Node) -> None:
        call.update_kwarg("layout", "fp8")

    assert "a write of the graph is gone" in paged_problem("always", fault)


def test_a_cloned_cache_is_caught():
    def fault(graph: fx.Graph, call: fx.Node) -> None:
        bases = call.kwargs["_all_bases"]
        with graph.inserting_before(call):
            cloned = emit(graph, torch.ops.aten.clone.default, bases[0])
        call.update_kwarg("_all_bases", [cloned, *bases[1:]])

    assert "a write of the graph is gone" in paged_problem("always", fault)
    assert "auto_functionalized_v2_1 no longer reads" in paged_problem("never", fault)


def test_a_paged_key_write_that_is_dropped_is_caught():
    def fault(graph: fx.Graph) -> None:
        first = writing(graph)[0]
        for user in list(first.users):
            user.replace_all_uses_with(first.kwargs["_all_bases"][0])
            graph.erase_node(user)
        graph.erase_node(first)

    assert "a write of the graph is gone" in problem(paged_step(), fault)


def test_a_write_that_is_done_twice_is_caught():
    def fault(graph: fx.Graph, call: fx.Node) -> None:
        with graph.inserting_before(call):
            graph.node_copy(call, lambda node: node)

    assert "a write that the graph did not have" in paged_problem("never", fault)
    assert "a write that the graph did not have" in paged_problem("always", fault)


def test_a_fused_op_that_reads_what_its_parts_did_not_is_caught():
    def fault(graph: fx.Graph, call: fx.Node) -> None:
        call.update_kwarg("kv_weight", unread_input(graph))

    assert "which nothing that it stands for has read" in paged_problem("always", fault)


def unread_input(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op == "placeholder" and not n.users)


def test_a_graph_that_cannot_be_verified_is_put_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(verify, "_warned", set())
    graph = cached_graph()
    before = text(graph)
    pipeline = Pipeline(PassOptions(), with_fault(lambda g: g.erase_node(node_named(g, "copy_"))))
    with pytest.warns(UserWarning, match="copy_ a write of the graph is gone") as caught:
        pipeline(graph, True)
    assert len(caught) == 1
    assert sorted(op_names(graph)) == ["index_select", "sparse_mqa"]
    assert len(text(graph).splitlines()) == len(before.splitlines())
    assert [node.target for node in graph.nodes].count(operator.getitem) == 2


def test_each_problem_is_said_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "_warned", set())
    with pytest.warns(UserWarning, match="compiles the graph as it came: copy_ is gone"):
        verify.warn_once("copy_ is gone")
    with pytest.warns(UserWarning, match="compiles the graph as it came: index_put is gone"):
        verify.warn_once("index_put is gone")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify.warn_once("copy_ is gone")


def test_the_verifier_needs_the_graph_as_it_entered():
    with pytest.raises(ValueError, match=r"context\.entered"):
        verify_pass(cached_graph(), static_context())
