"""Patterns over Dynamo graphs: what unifies, and what is said where something does not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from dsafx.passes._match import (
    Either,
    Match,
    Mismatch,
    Rest,
    Var,
    call,
    called,
    erase_unread,
    is_written,
    match,
    writes,
)


def traced(function: Callable[..., Any]) -> tuple[fx.Graph, Any]:
    """The graph of ``function`` and the node or nodes that it returns."""
    graph = fx.symbolic_trace(function).graph
    return graph, graph.output_node().args[0]


def test_a_function_and_a_method_of_one_name_are_as_good_as_each_other():
    for function in (lambda x: torch.relu(x), lambda x: x.relu()):
        graph, node = traced(function)
        found = match(call("relu", Var("x")), node)
        assert found["x"] is next(iter(graph.nodes))
        assert found.nodes == [node]


def test_a_variable_stands_for_one_thing():
    pattern = call("add", Var("x"), Var("x"))
    match(pattern, traced(lambda x, y: x + x)[1])
    with pytest.raises(Mismatch, match=r"^x is both x and y$"):
        match(pattern, traced(lambda x, y: x + y)[1])


def test_a_variable_tells_equal_numbers_of_different_types_apart():
    pattern = call("add", call("mul", Var("x"), Var("n")), Var("n"))
    match(pattern, traced(lambda x: x * 1 + 1)[1])
    with pytest.raises(Mismatch, match=r"^n is both 1.0 and 1$"):
        match(pattern, traced(lambda x: x * 1.0 + 1)[1])


def test_a_bound_name_stands_for_one_node():
    pattern = call("add", call("relu", Var("x"), bind="y"), call("relu", Var("x"), bind="y"))

    def once(x: Any) -> Any:
        y = x.relu()
        return y + y

    match(pattern, traced(once)[1])
    with pytest.raises(Mismatch, match=r"^y is both relu and relu_1$"):
        match(pattern, traced(lambda x: x.relu() + x.relu())[1])


def test_keywords_must_be_the_same_ones():
    pattern = call("sum", Var("x"), dim=-1)
    match(pattern, traced(lambda x: x.sum(dim=-1))[1])
    with pytest.raises(Mismatch, match=r"^sum_1 has the keywords \['dim', 'keepdim'\]$"):
        match(pattern, traced(lambda x: x.sum(dim=-1, keepdim=True))[1])
    with pytest.raises(Mismatch, match=r"^expected -1, found 0$"):
        match(pattern, traced(lambda x: x.sum(dim=0))[1])


def test_arguments_are_counted_unless_the_rest_is_left_open():
    node = traced(lambda x: x.view(2, 3))[1]
    assert match(call("view", Var("x"), Rest()), node)["x"].name == "x"
    with pytest.raises(Mismatch, match=r"^expected 2 arguments, found "):
        match(call("view", Var("x"), 2), node)


def test_a_constant_equals_none_of_another_type():
    with pytest.raises(Mismatch, match=r"^expected 0.0, found 0$"):
        match(call("add", Var("x"), 0.0), traced(lambda x: x + 0)[1])
    with pytest.raises(Mismatch, match=r"^expected 1, found True$"):
        match(call("add", Var("x"), 1), traced(lambda x: x + True)[1])


def test_slices_and_lists_are_compared_part_by_part():
    pattern = call("getitem", Var("x"), (..., slice(None, Var("half"), None)))
    assert match(pattern, traced(lambda x: x[..., :4])[1])["half"] == 4
    with pytest.raises(Mismatch, match=r"^expected None, found 2$"):
        match(pattern, traced(lambda x: x[..., :4:2])[1])
    with pytest.raises(Mismatch, match=r"^expected a slice, found 0$"):
        match(pattern, traced(lambda x: x[..., 0])[1])
    joined = call("cat", (Var("a"), Var("b")))
    assert match(joined, traced(lambda x, y: torch.cat([x, y]))[1])["b"].name == "y"


def test_the_first_of_several_patterns_that_fits_is_taken_and_the_others_leave_nothing():
    pattern = Either((call("add", call("relu", Var("x")), 1), call("add", Var("y"), Var("n"))))
    found = match(pattern, traced(lambda x: x.relu() + 2)[1])
    assert set(found.bound) == {"y", "n"}
    assert len(found.nodes) == 1
    with pytest.raises(Mismatch, match=r"^expected add, found mul \(mul\)$"):
        match(pattern, traced(lambda x: x * 2)[1])


def test_a_match_can_go_on_with_what_another_one_bound():
    graph, node = traced(lambda x: x.relu() + x.exp())
    found = match(call("add", Var("left"), Var("right")), node)
    match(call("relu", Var("x")), found["left"], into=found)
    match(call("exp", Var("x")), found["right"], into=found)
    assert found["x"] is next(iter(graph.nodes))
    other = Match({"x": node})
    with pytest.raises(Mismatch, match=r"^x is both add and x$"):
        match(call("relu", Var("x")), found["left"], into=other)


def test_only_calls_have_a_name():
    graph, node = traced(lambda x: x.relu())
    assert called(node) == "relu"
    assert called(next(iter(graph.nodes))) is None
    assert called(3) is None


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("copy_", True),
        ("index_copy_", True),
        ("add_", True),
        ("add", False),
        ("__and__", False),
        (operator.setitem, True),
        (operator.iand, True),
        (operator.iadd, True),
        (operator.and_, False),
        (operator.or_, False),
        (operator.not_, False),
    ],
)
def test_writes_are_known_by_name(target: Any, expected: bool):
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.create_node(
        "call_method" if isinstance(target, str) else "call_function", target, (x, x)
    )
    assert writes(node) is expected
    assert is_written(x) is expected


def test_a_value_that_is_only_read_by_a_write_is_not_written():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.call_method("copy_", (x, y))
    assert is_written(x)
    assert not is_written(y)


def test_replaced_nodes_go_readers_first_and_what_is_read_stays():
    graph, (exp, kept) = traced(lambda x: (x.relu().exp(), x.relu()))
    graph.output_node().args = (kept,)
    erase_unread(graph, [exp.args[0], exp, kept])
    graph.lint()
    assert [each.name for each in graph.nodes] == ["x", "relu_1", "output"]
