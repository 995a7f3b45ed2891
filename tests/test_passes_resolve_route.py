"""Routed attention in graphs: which kernel takes its place, and when it stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _graphs import (
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    SCALE,
    TOPK,
    VALUE,
    evaluate,
    guarding_context,
    largest_difference,
    op_names,
    spec_of,
    static_context,
    text,
    trace,
)
from expecttest import assert_expected_inline
from torch import Tensor, fx

from dsafx import ops
from dsafx.passes.resolve_route import resolve_route_pass


def operands(tokens: int, keys: int) -> tuple[Tensor, ...]:
    q_nope, q_pe = torch.randn(tokens, HEADS, NOPE), torch.randn(tokens, HEADS, ROPE)
    kv_c, k_pe = torch.randn(keys, LATENT), torch.randn(keys, ROPE)
    weight = torch.randn(HEADS * (NOPE + VALUE), LATENT)
    ke = torch.arange(keys - tokens + 1, keys + 1, dtype=torch.int32)
    ks = torch.zeros_like(ke)
    lane = torch.arange(TOPK, dtype=torch.int32)
    indices = torch.where(lane < ke[:, None], lane, -1)
    return q_nope, q_pe, kv_c, k_pe, weight, indices, ks, ke


def attention(spec: str, **flags: Any) -> Any:
    def run(*args: Any) -> tuple[Tensor, Tensor]:
        *tensors, max_kv_len, max_query_len = args
        return ops.mla_attention(*tensors, max_kv_len, max_query_len, TOPK, SCALE, spec, **flags)

    return run


def resolved(
    tokens: int, keys: int, spec: str, symbolic: bool = False, guards: bool = False, **flags: Any
) -> tuple[fx.Graph, Any]:
    args = (*operands(tokens, keys), keys, tokens)
    graph = trace(attention(spec, **flags), *args, symbolic=symbolic)
    context = guarding_context() if guards else static_context()
    report = resolve_route_pass(graph, context)
    graph.lint()
    return graph, report


def test_a_short_prefill_becomes_dense_attention_that_reads_no_indices():
    graph, report = resolved(9, 9, spec_of())
    assert_expected_inline(
        text(graph, report),
        """\
permute: aten.permute(arg4_1, [1, 0])
mm: aten.mm(arg2_1, permute)
view: aten.reshape(mm, [9, 2, 16])
slice_1: aten.slice(view, 2, 0, 8)
slice_2: aten.slice(view, 2, 8, end)
dense_mha: dsafx.dense_mha(arg0_1, slice_1, slice_2, arg6_1, arg7_1, 9, 0.28867513459481287,
    None, False, arg1_1, arg3_1)
getitem_2: getitem(dense_mha, 0)
getitem_3: getitem(dense_mha, 1)
resolve_route: 1 rewritten; mla_attention became dense MHA: no row sees more keys than the
    dense limit, and expanding them costs less""",
    )


def test_a_decode_row_becomes_absorbed_attention_over_the_selected_latents():
    graph, report = resolved(1, 40, spec_of())
    assert_expected_inline(
        text(graph, report),
        """\
view: aten.reshape(arg4_1, [2, 16, 32])
permute: aten.permute(arg0_1, [1, 0, 2])
slice_1: aten.slice(view, 1, 0, 8)
bmm: aten.bmm(permute, slice_1)
permute_1: aten.permute(bmm, [1, 0, 2])
sparse_mla: dsafx.sparse_mla(permute_1, arg1_1, arg2_1, arg3_1, arg5_1, arg6_1,
    0.28867513459481287, False)
getitem_2: getitem(sparse_mla, 0)
getitem_3: getitem(sparse_mla, 1)
permute_2: aten.permute(getitem_2, [1, 0, 2])
slice_2: aten.slice(view, 1, 8, end)
permute_3: aten.permute(slice_2, [0, 2, 1])
bmm_1: aten.bmm(permute_2, permute_3)
permute_4: aten.permute(bmm_1, [1, 0, 2])
resolve_route: 1 rewritten; mla_attention became top-k MQA: absorbing the query and reading
    the selected keys costs less""",
    )


def test_a_forced_masked_mode_becomes_masked_attention():
    graph, _ = resolved(40, 40, spec_of(mode="masked"))
    assert op_names(graph) == ["masked_mha"]


@pytest.mark.parametrize(
    ("tokens", "keys", "mode", "kernel"),
    [
        (9, 9, "auto", "dense_mha"),
        (40, 40, "masked", "masked_mha"),
        (40, 40, "sparse", "sparse_mla"),
        (1, 40, "auto", "sparse_mla"),
        (9, 9, "sparse", "sparse_mla"),
    ],
)
def test_the_kernels_of_a_route_compute_what_the_routed_op_computes(
    tokens: int, keys: int, mode: str, kernel: str
):
    args = (*operands(tokens, keys), keys, tokens)
    run = attention(spec_of(mode=mode), return_lse=True)
    graph = trace(run, *args)
    resolve_route_pass(graph, static_context())
    assert op_names(graph) == [kernel]
    assert largest_difference(evaluate(graph, *args), run(*args)) < 1e-5


def test_a_layer_that_declares_no_dense_attention_keeps_its_selection_at_any_length():
    graph, report = resolved(9, 9, spec_of(dense=False, masked=False))
    assert op_names(graph) == ["sparse_mla"]
    assert str(report) == (
        "resolve_route: 1 rewritten; mla_attention became top-k MQA: "
        "the layer's own class declares no dense MHA"
    )


def test_an_unknown_length_stays_one_op_that_decides_at_run_time():
    graph, report = resolved(9, 9, spec_of(), symbolic=True)
    assert op_names(graph) == ["mla_attention"]
    assert str(report) == (
        "resolve_route: 0 rewritten; mla_attention declined: decides at run time: "
        "whether a row may see more keys than the dense limit is not known yet"
    )


def test_a_guarded_length_is_dense_and_carries_its_premise():
    graph, report = resolved(9, 9, spec_of(), symbolic=True, guards=True)
    assert report.matched == 1
    (kernel,) = [node for node in graph.nodes if "dense_mha" in str(node.target)]
    assert kernel.args[7] == TOPK
    shape_env = kernel.meta["val"][0].fake_mode.shape_env
    assert [guard for guard in shape_env.guards if str(guard.expr).endswith("<= 16")]


def test_a_layer_without_dense_attention_costs_no_guard():
    graph, _ = resolved(9, 9, spec_of(dense=False, masked=False), symbolic=True, guards=True)
    (kernel,) = [node for node in graph.nodes if "sparse_mla" in str(node.target)]
    assert not [g for g in kernel.meta["val"][0].fake_mode.shape_env.guards if "<= 16" in str(g)]


def test_a_dense_threshold_is_the_premise_of_the_graph():
    graph, _ = resolved(9, 9, spec_of(dense_threshold=12), symbolic=True, guards=True)
    (kernel,) = [node for node in graph.nodes if "dense_mha" in str(node.target)]
    assert kernel.args[7] == 12


def test_a_length_burnt_in_as_a_constant_is_not_trusted_where_nobody_checks_guards():
    spec = spec_of()

    def run(*tensors: Tensor) -> Any:
        return ops.mla_attention(*tensors, 9, 9, TOPK, SCALE, spec)

    graph = trace(run, *operands(9, 9), symbolic=True)
    report = resolve_route_pass(graph, static_context())
    assert op_names(graph) == ["mla_attention"]
    assert report.declined == [
        (
            "mla_attention",
            "decides at run time: its length is a constant although its keys may be more",
        )
    ]
    assert resolve_route_pass(graph, guarding_context()).matched == 1


def test_a_burnt_in_length_that_is_long_resolves_since_that_stays_right_when_short():
    def run(*tensors: Tensor) -> Any:
        return ops.mla_attention(*tensors, 40, 40, TOPK, SCALE, spec_of(mode="sparse"))

    graph = trace(run, *operands(40, 40), symbolic=True)
    assert resolve_route_pass(graph, static_context()).matched == 1


def test_an_impossible_forced_mode_is_left_to_raise_when_it_runs():
    graph, report = resolved(40, 40, spec_of(mode="dense"))
    assert op_names(graph) == ["mla_attention"]
    assert "raises when it runs: mode='dense' is impossible here" in str(report)


def test_a_route_that_reads_a_selection_without_one_is_left_to_raise_when_it_runs():
    *first, _, ks, ke = operands(40, 40)

    def run(*tensors: Tensor) -> Any:
        return ops.mla_attention(*tensors[:5], None, *tensors[5:], 40, 40, TOPK, SCALE, spec_of())

    graph = trace(run, *first, ks, ke)
    report = resolve_route_pass(graph, static_context())
    assert report.declined == [("mla_attention", "raises when it runs: it has no selection")]


def test_a_captured_step_is_decided_by_its_bound_alone():
    dense = {"mode": "dense", "dense": True}
    graph, _ = resolved(9, 9, spec_of(**dense), symbolic=True, captured=True, capture_bound=16)
    assert op_names(graph) == ["dense_mha"]
    graph, _ = resolved(9, 9, spec_of(), symbolic=True, captured=True)
    assert op_names(graph) == ["sparse_mla"]


def test_new_nodes_carry_values_and_provenance_of_their_own():
    graph, _ = resolved(9, 9, spec_of())
    new = [node for node in graph.nodes if node.meta.get("dsafx_origin") == "mla_attention"]
    assert new
    assert all("val" in node.meta for node in new)
    (kernel,) = [node for node in new if "dense_mha" in str(node.target)]
    eager_args, eager_kwargs = kernel.meta["eager_input_vals"]
    assert len(eager_args) == len(kernel.args)
    assert eager_kwargs == {}
    assert eager_args[0].shape == (9, HEADS, NOPE)
