"""The indexer's query with all its scales as one op: when it fuses, and what keeps it apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _graphs import evaluate, op_names, static_context, text, trace
from _layer_parts import (
    ALWAYS,
    DIM,
    DTYPES,
    HEADS,
    STYLES,
    TOKENS,
    TOPK,
    Parts,
    head_weights,
    index_query,
    operands,
)
from _uncompiled import passes_only
from expecttest import assert_expected_inline
from torch import Tensor

from dsafx import ops
from dsafx.ops.cache_layouts import quantise_index_key
from dsafx.ops.index_query import index_query as fused_query
from dsafx.passes import collect
from dsafx.passes.fuse_index_query import fuse_index_query_pass

SCALE = (HEADS * DIM) ** -0.5


def queries(dtype: torch.dtype = torch.float32) -> Parts:
    a = operands(dtype)
    return {**a, "q_c": torch.randn(TOKENS, 10).to(dtype), "k": torch.randn(TOKENS, DIM).to(dtype)}


def select(a: Parts, q: Tensor, weights: Tensor) -> Tensor:
    return ops.index_select(q, a["k"], weights, a["ks"], a["ke"], TOKENS, TOPK)


def plain(a: Parts, style: str = "half") -> Tensor:
    return select(a, index_query(a, a["q_c"], style), head_weights(a))


def quantised(a: Parts) -> Tensor:
    values, scale = quantise_index_key(index_query(a, a["q_c"]))
    return select(a, values.to(a["x"].dtype), head_weights(a) * scale)


def test_the_rotated_query_and_its_weights_become_one_op():
    graph = trace(plain, queries())
    report = fuse_index_query_pass(graph, ALWAYS)
    assert_expected_inline(
        text(graph, report),
        """\
view: aten.view(arg0_20, [-1, 10])
mm: aten.mm(view, arg0_5)
view_1: aten.view(mm, [-1, 8, 16])
view_2: aten.view(arg0_1, [-1, 16])
mm_1: aten.mm(view_2, arg0_6)
index_query: dsafx.index_query(view_1, mm_1, arg0_11, arg0_12, 'half', False)
getitem_2: getitem(index_query, 0)
getitem_3: getitem(index_query, 1)
index_select: dsafx.index_select(getitem_2, arg0_21, getitem_3, arg0_13, arg0_14, 20, 4)
fuse_index_query: 1 rewritten; index_select became the reader of index_query""",
    )


def test_a_quantised_query_gives_its_scale_to_the_weights():
    graph = trace(quantised, queries())
    report = fuse_index_query_pass(graph, ALWAYS)
    assert_expected_inline(
        text(graph, report),
        """\
view: aten.view(arg0_20, [-1, 10])
mm: aten.mm(view, arg0_5)
view_1: aten.view(mm, [-1, 8, 16])
view_4: aten.view(arg0_1, [-1, 16])
mm_1: aten.mm(view_4, arg0_6)
index_query: dsafx.index_query(view_1, mm_1, arg0_11, arg0_12, 'half', True)
getitem_2: getitem(index_query, 0)
getitem_3: getitem(index_query, 1)
convert_element_type_1: prims.convert_element_type(getitem_2, float32)
index_select: dsafx.index_select(convert_element_type_1, arg0_21, getitem_3, arg0_13, arg0_14,
    20, 4)
fuse_index_query: 1 rewritten; index_select became the reader of index_query""",
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fusing_keeps_the_query_bit_for_bit_and_the_selection(dtype: torch.dtype, style: str):
    def both(a: Parts) -> tuple[Tensor, Tensor]:
        q = index_query(a, a["q_c"], style)
        return q, select(a, q, head_weights(a))

    a = queries(dtype)
    graph = trace(both, a)
    assert fuse_index_query_pass(graph, ALWAYS).matched == 1
    assert op_names(graph) == ["index_query", "index_select"]
    for ours, theirs in zip(evaluate(graph, *a.values()), both(a), strict=True):
        assert torch.equal(ours, theirs)


def test_a_quantised_query_is_rounded_to_fp8_from_float32():
    a = queries(torch.bfloat16)
    graph = trace(lambda a: (quantised(a), head_weights(a)), a)
    assert fuse_index_query_pass(graph, ALWAYS).matched == 1
    raw = (a["q_c"] @ a["wq_b"]).view(-1, HEADS, DIM)
    weights = a["x"].float() @ a["weights_proj"].float()
    q, folded = fused_query(raw, weights, a["cos"], a["sin"], "half", True)
    expected = select(a, q.to(torch.bfloat16), folded)
    assert torch.equal(evaluate(graph, *a.values())[0], expected)


def test_two_segments_of_one_query_share_the_fused_op():
    def segments(a: Parts) -> Tensor:
        q, weights = index_query(a, a["q_c"]), head_weights(a)
        rows = [slice(0, 3), slice(3, None)]
        parts = [{**a, "ks": a["ks"][r], "ke": a["ke"][r]} for r in rows]
        found = [select(p, q[r], weights[r]) for p, r in zip(parts, rows, strict=True)]
        return torch.cat(found)

    a = queries()
    graph = trace(segments, a)
    report = fuse_index_query_pass(graph, ALWAYS)
    assert report.declined == []
    assert op_names(graph) == ["index_query", "index_select", "index_select"]
    assert torch.equal(evaluate(graph, *a.values()), segments(a))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("step", [plain, quantised])
def test_a_compiled_query_is_known_after_the_passes_of_inductor(
    step: Callable[[Parts], Tensor], dynamic: bool
):
    a = queries()
    if dynamic:
        for name in ("x", "q_c", "k", "cos", "sin", "ks", "ke"):
            torch._dynamo.mark_dynamic(a[name], 0)
    compiled = torch.compile(step, backend=passes_only, options={"fuse": "always"})
    with torch.no_grad(), collect() as reports:
        found = compiled(a)
    report = reports[-1].of("fuse_index_query")
    assert (report.matched, report.declined) == (1, [])
    assert reports[-1].problem is None
    assert torch.equal(found, step(a))


def test_the_reference_kernel_is_not_taken_unless_asked_for():
    report = fuse_index_query_pass(trace(plain, queries()), static_context())
    assert report.declined == [
        ("index_select", "index_query of the cpu provider is not faster than its parts")
    ]


def declined(function: Callable[[Parts], object]) -> str:
    graph = trace(function, queries())
    before = text(graph)
    report = fuse_index_query_pass(graph, ALWAYS)
    assert text(graph) == before
    ((_, reason),) = report.declined
    return reason


def test_weights_of_another_scale_stay_as_they_are():
    def other(a: Parts) -> Tensor:
        return select(a, index_query(a, a["q_c"]), head_weights(a) * 2)

    assert declined(other) == "its weights are scaled by 0.176777, not by D**-0.5 * H**-0.5"


def test_a_product_of_two_tensors_is_no_head_weight():
    def gated(a: Parts) -> Tensor:
        weights = head_weights(a)
        return select(a, index_query(a, a["q_c"]), weights * weights.sigmoid())

    assert declined(gated) == "its weights are a product of 2 tensors, not 1"


def test_weights_without_the_scale_of_the_quantised_query_are_noticed():
    def lost(a: Parts) -> Tensor:
        values, _ = quantise_index_key(index_query(a, a["q_c"]))
        return select(a, values.float(), head_weights(a))

    assert declined(lost) == "its weights do not hold the scale of its query"


def test_a_query_quantised_in_another_way_stays_as_it_is():
    def scaled(a: Parts) -> Tensor:
        q = index_query(a, a["q_c"])
        scale = q.abs().amax(-1) / 448
        values = (q / scale[..., None]).to(torch.float8_e4m3fn)
        return select(a, values.float(), head_weights(a) * scale)

    assert declined(scaled) == "its query is fp8, but not as quantise_index_key makes it"


def test_a_query_that_is_rotated_in_its_last_dims_stays_as_it_is():
    def last(a: Parts) -> Tensor:
        q = (a["q_c"] @ a["wq_b"]).view(-1, HEADS, DIM)
        turned = ops.rope(q[..., -4:], a["cos"], a["sin"], "half")
        return select(a, torch.cat([q[..., :-4], turned], dim=-1), head_weights(a))

    assert declined(last) == "its query is not [rotated | passed] of one tensor"


def test_a_query_of_two_projections_stays_as_it_is():
    def two(a: Parts) -> Tensor:
        q = (a["q_c"] @ a["wq_b"]).view(-1, HEADS, DIM)
        turned = ops.rope(q[..., :4], a["cos"], a["sin"], "half")
        return select(a, torch.cat([turned, (q * 2)[..., 4:]], dim=-1), head_weights(a))

    assert declined(two) == "its query is not [rotated | passed] of one tensor"


def test_nothing_fuses_across_a_write():
    def writing(a: Parts) -> Tensor:
        q = index_query(a, a["q_c"])
        a["k_w"].copy_(a["k_b"])
        return select(a, q, head_weights(a))

    assert declined(writing) == "a write stands between its parts"
