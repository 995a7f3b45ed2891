"""Selections in graphs: closed where every row is short, removed where nobody reads them."""

from __future__ import annotations

from typing import Any

import torch
from _graphs import (
    INDEX_DIM,
    INDEX_HEADS,
    TOPK,
    evaluate,
    guarding_context,
    op_names,
    static_context,
    text,
    trace,
)
from expecttest import assert_expected_inline
from torch import Tensor

from dsafx import ops
from dsafx.passes.close_selection import close_selection_pass


def operands(length: int) -> tuple[Tensor, ...]:
    ke = torch.arange(1, length + 1, dtype=torch.int32)
    q = torch.randn(length, INDEX_HEADS, INDEX_DIM)
    weights = torch.randn(length, INDEX_HEADS)
    return q, torch.randn(length, INDEX_DIM), weights, torch.zeros_like(ke), ke


def select(*args: Any) -> Tensor:
    return ops.index_select(*args, TOPK)


def test_a_short_prefill_is_closed_and_a_long_one_is_left_alone():
    def both(short: list[Tensor], long: list[Tensor]) -> tuple[Tensor, Tensor]:
        return select(*short, 8), select(*long, 17)

    graph = trace(both, list(operands(8)), list(operands(17)))
    report = close_selection_pass(graph, static_context())
    assert_expected_inline(
        text(graph, report),
        """\
causal_positions: dsafx.causal_positions(arg0_4, arg0_5, 8, 16)
index_select_1: dsafx.index_select(arg1_1, arg1_2, arg1_3, arg1_4, arg1_5, 17, 16)
close_selection: 1 rewritten; index_select_1 declined: rows may see more than K keys""",
    )


def test_the_closed_form_is_what_scoring_selects():
    args = (*operands(TOPK), TOPK)
    graph = trace(select, *args)
    close_selection_pass(graph, static_context())
    assert op_names(graph) == ["causal_positions"]
    assert evaluate(graph, *args).tolist() == select(*args).tolist()


def test_one_key_more_than_the_width_is_scored():
    args = (*operands(TOPK + 1), TOPK + 1)
    graph = trace(select, *args)
    assert close_selection_pass(graph, static_context()).matched == 0
    assert op_names(graph) == ["index_select"]


def test_what_only_scoring_read_goes_and_the_key_write_stays():
    def step(cache: Tensor, x: Tensor, w: Tensor, ks: Tensor, ke: Tensor) -> Tensor:
        q = torch.mm(x, w).view(-1, INDEX_HEADS, INDEX_DIM)
        written = torch.slice_scatter(cache, x, 0, 3, 8)
        indices = select(q, written, q.sum(-1), ks, ke, 8)
        cache.copy_(written)
        return indices

    _, key, _, ks, ke = operands(8)
    args = (key, torch.randn(5, INDEX_DIM), torch.randn(INDEX_DIM, INDEX_HEADS * INDEX_DIM))
    graph = trace(step, *args, ks[3:], ke[3:])
    report = close_selection_pass(graph, static_context())
    assert_expected_inline(
        text(graph, report),
        """\
slice_scatter: aten.slice_scatter(arg0_1, arg1_1, 0, 3, 8)
causal_positions: dsafx.causal_positions(arg3_1, arg4_1, 8, 16)
copy_: aten.copy_(arg0_1, slice_scatter)
close_selection: 1 rewritten""",
    )


def test_an_unread_selection_goes_with_its_producers_in_inference_only():
    def unread(x: Tensor, *rest: Tensor) -> Tensor:
        select(torch.relu(x), *rest, 40)
        return rest[0] + 1

    graph = trace(unread, *operands(40))
    report = close_selection_pass(graph, static_context(inference=False))
    assert str(report) == (
        "close_selection: 0 rewritten; index_select declined: "
        "nothing reads it, but gradients may be asked of this graph"
    )
    report = close_selection_pass(graph, static_context())
    assert_expected_inline(
        text(graph, report),
        """\
add: aten.add(arg1_1, 1)
close_selection: 0 rewritten; index_select removed: nothing reads it""",
    )


def test_a_selection_with_a_mask_operand_is_never_closed():
    mask = torch.ones(8, 8, dtype=torch.bool)

    def masked(mask: Tensor, *args: Tensor) -> Tensor:
        return ops.index_select(*args, 8, TOPK, mask)

    graph = trace(masked, mask, *operands(8))
    report = close_selection_pass(graph, static_context())
    assert report.declined == [("index_select", "has a mask operand")]


def test_a_symbolic_length_is_scored_unless_a_guard_may_settle_it():
    graph = trace(select, *operands(8), 8, symbolic=True)
    report = close_selection_pass(graph, static_context())
    assert report.declined == [("index_select", "rows may see more than K keys")]
    report = close_selection_pass(graph, guarding_context())
    assert report.matched == 1
    (closed,) = [node for node in graph.nodes if "causal_positions" in str(node.target)]
    assert closed.args[3:] == (TOPK, TOPK)


def test_a_length_burnt_in_as_a_constant_is_not_trusted_where_nobody_checks_guards():
    def constant(*args: Tensor) -> Tensor:
        return select(*args, 8)

    graph = trace(constant, *operands(8), symbolic=True)
    report = close_selection_pass(graph, static_context())
    reason = "its length is a constant although its keys may be more"
    assert report.declined == [("index_select", reason)]
    assert close_selection_pass(graph, guarding_context()).matched == 1
