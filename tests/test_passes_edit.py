"""The verbs that edit graphs, the hook that holds several passes, and the lowering of ops."""

from __future__ import annotations

import pytest
import torch
from _graphs import evaluate, int32, node_named, op_names, static_context, text, trace
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from dsafx import ops
from dsafx.passes import _torch_compat as compat
from dsafx.passes._edit import arguments, calls, copy_of, emit, erase, hoist, inline, restore
from dsafx.passes.lower import lower_pass

CLOSED = torch.ops.dsafx.causal_positions.default


def positions(ks: Tensor, ke: Tensor) -> Tensor:
    return ops.causal_positions(ks, ke, 4, 8)


def test_arguments_are_found_by_name_with_omitted_defaults():
    graph = trace(positions, int32(0, 0), int32(1, 4))
    (node,) = calls(graph, CLOSED)
    inputs = [each for each in graph.nodes if each.op == "placeholder"]
    expected = {"ks": inputs[0], "ke": inputs[1], "max_kv_len": 4, "topk": 8, "bound": None}
    assert arguments(node) == expected


def test_an_emitted_op_has_a_value_and_operand_values_of_its_own():
    graph = trace(positions, int32(0, 0), int32(1, 4))
    (node,) = calls(graph, CLOSED)
    node.meta["stack_trace"] = "here"
    with graph.inserting_before(node):
        new = emit(graph, CLOSED, *node.args[:2], 4, 16, origin=node)
    assert new.meta["val"].shape == (2, 16)
    assert new.meta["eager_input_vals"][0][2:] == (4, 16)
    assert new.meta["stack_trace"] == "here"
    assert new.meta["dsafx_origin"] == node.name


def test_inlining_works_with_symbolic_sizes_and_size_arguments():
    def rows(x: Tensor, n: int) -> Tensor:
        return x[:, None].expand(-1, n, -1).reshape(-1, x.shape[1]) * 2

    def doubled(x: Tensor, n: int) -> Tensor:
        return torch.relu(x) + n

    graph = trace(doubled, torch.randn(5, 7), 3, symbolic=True)
    relu = node_named(graph, "relu")
    x, n = (node for node in graph.nodes if node.op == "placeholder")
    out = inline(graph, relu, rows, [x, n])
    graph.output_node().args = (out,)
    graph.lint()
    x_value, n_value = torch.randn(4, 7), 6
    assert torch.equal(evaluate(graph, x_value, n_value), rows(x_value, n_value))
    assert len(out.meta["val"].shape) == 2


def test_a_function_that_writes_is_not_inlined():
    graph = trace(torch.relu, torch.randn(3))
    relu = node_named(graph, "relu")
    with pytest.raises(ValueError, match="cannot be inlined: it writes with aten"):
        inline(graph, relu, lambda x: x.add_(1), [relu.args[0]])


def test_erasing_takes_what_became_dead_and_stops_at_writes_and_selections():
    def step(x: Tensor, buffer: Tensor, ks: Tensor, ke: Tensor) -> Tensor:
        buffer.copy_(x)
        indices = ops.causal_positions(ks, ke, 4, 8)
        unread = torch.relu(buffer.sum() + indices.sum())
        return torch.sigmoid(unread) if x.shape[0] == 0 else x

    graph = trace(step, torch.randn(3), torch.randn(3), int32(0), int32(4))
    erased = erase(node_named(graph, "relu"))
    assert {"relu", "add", "sum_1", "sum_2"} <= set(erased)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.copy_.default,
        CLOSED,
    ]


def test_hoisting_moves_all_operands_and_refuses_a_circle():
    def chain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x), torch.exp(torch.sin(y))

    graph = trace(chain, torch.randn(3), torch.randn(3))
    relu = node_named(graph, "relu")
    hoist([node_named(graph, "exp")], before=relu)
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    assert names == ["sin", "exp", "relu"]
    with pytest.raises(ValueError, match="depends on sin"):
        hoist([relu, node_named(graph, "exp")], before=node_named(graph, "sin"))


def test_a_restored_graph_computes_what_it_did_with_the_same_inputs():
    graph = trace(positions, int32(0, 0), int32(1, 4))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    saved, before = copy_of(graph), text(graph)
    graph.output_node().args = (inputs[0],)
    erase(*calls(graph, CLOSED))
    restore(graph, saved)
    assert [node for node in graph.nodes if node.op == "placeholder"] == inputs
    assert len(text(graph)) >= len(before)
    args = (int32(0, 0), int32(1, 4))
    assert torch.equal(evaluate(graph, *args), positions(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lowered_ops_compute_what_the_ops_compute(dtype: torch.dtype):
    def semantic(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        normed = ops.layer_norm(ops.rms_norm(x, weight, 1e-6), weight, weight, 1e-6)
        return ops.rope(normed, cos, sin, "interleaved"), ops.rope(normed, cos, sin, "half")

    angle = torch.randn(5, 4)
    args = (torch.randn(5, 8, dtype=dtype), torch.rand(8), angle.cos(), angle.sin())
    graph = trace(semantic, *args)
    assert lower_pass(graph, static_context()).matched == 4
    assert op_names(graph) == []
    for found, expected in zip(evaluate(graph, *args), semantic(*args), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected)


class Named(CustomGraphPass):
    def __init__(self, name: str, ran: list[str]) -> None:
        self.name, self.ran = name, ran

    def __call__(self, graph: fx.Graph) -> None:
        self.ran.append(self.name)

    def uuid(self) -> str:
        return self.name


def test_our_pass_is_appended_also_where_a_hook_takes_one_object(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "_HOOKS_TAKE_LISTS", False)
    ran: list[str] = []
    first, second, ours = (Named(name, ran) for name in ("first", "second", "ours"))
    assert compat.passes_in(compat.append_pass(None, ours)) == (ours,)
    chain = compat.append_pass(compat.append_pass(first, second), ours)
    chain(fx.Graph(), True)
    assert ran == ["first", "second", "ours"]
    assert chain.uuid() == ("first", "second", "ours")
    assert compat.append_pass(lambda graph: None, ours).uuid() is None
