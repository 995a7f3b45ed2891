"""Norms, rotations and the paged writes of their values as one op, with no clone of a cache."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from _functionalized import functionalized
from _graphs import evaluate, op_names, static_context, text
from _layer_parts import (
    ALWAYS,
    DTYPES,
    FIRST_SLOT,
    LATENT,
    ROTATED,
    TOKENS,
    TOPK,
    Parts,
    flat,
    head_weights,
    index_key,
    index_query,
    latents,
    operands,
)
from _uncompiled import passes_only
from expecttest import assert_expected_inline
from torch import Tensor, fx

from dsafx import fusion
from dsafx.ops.cache_layouts import new_mla_cache
from dsafx.ops.index_cache import index_cache_gather, index_cache_write
from dsafx.ops.index_select_paged import index_select_paged
from dsafx.ops.mla_cache import mla_cache_write
from dsafx.passes import collect
from dsafx.passes._report import PassContext, PassOptions, PassReport
from dsafx.passes.fuse_cache_write import fuse_cache_write_pass
from dsafx.passes.fuse_norm_rope import fuse_norm_rope_pass
from dsafx.passes.pipeline import PASSES, Pipeline
from dsafx.passes.verify import VerificationError


def write(a: Parts, kv_c: Tensor, k_pe: Tensor) -> None:
    mla_cache_write(flat(kv_c), flat(k_pe), a["cache"], a["slots"], "bf16")


def shared_layer(a: Parts) -> tuple[Tensor, ...]:
    """A layer without an indexer, whose attention reads the cache that it has written."""
    q_c, kv_c, k_pe = latents(a)
    write(a, kv_c, k_pe)
    return q_c * 2, a["cache"].sum()


def full_layer(a: Parts) -> tuple[Tensor, ...]:
    """A layer with an indexer, which selects among the keys that it has written."""
    q_c, kv_c, k_pe = latents(a)
    key = index_key(a)
    index_cache_write(key, a["index_cache"], a["index_slots"], "ue8m0")
    write(a, kv_c, k_pe)
    found = index_select_paged(
        index_query(a, q_c),
        a["index_cache"],
        head_weights(a),
        a["table"],
        a["ks"],
        a["ke"] + FIRST_SLOT,
        TOKENS + FIRST_SLOT,
        TOPK,
        "ue8m0",
    )
    return q_c * 2, a["cache"].sum(), found


def graph_of(function: Callable[[Parts], Any], a: Parts) -> fx.Graph:
    return functionalized(function, deepcopy(a))


def same(graph: fx.Graph, function: Callable[[Parts], Any], a: Parts) -> bool:
    """Whether results and caches equal those of the parts in eager code."""
    ours, theirs = deepcopy(a), deepcopy(a)
    pairs = list(zip(evaluate(graph, *ours.values()), function(theirs), strict=True))
    pairs += [(ours[name], theirs[name]) for name in ("cache", "index_cache")]
    return all(torch.equal(x, y) for x, y in pairs)


def stored_keys(a: Parts) -> Tensor:
    total = TOKENS + FIRST_SLOT
    lens = torch.tensor([0, total], dtype=torch.int32)
    return index_cache_gather(a["index_cache"], a["table"], lens, total, "ue8m0")


def test_a_shared_layer_writes_its_latents_in_the_op_that_makes_them():
    graph = graph_of(shared_layer, operands())
    report = fuse_cache_write_pass(graph, ALWAYS)
    assert_expected_inline(
        text(graph, report),
        """\
mm: aten.mm(arg0_1, arg1_1)
mm_1: aten.mm(arg0_1, arg2_1)
slice_1: aten.slice(mm_1, 1, 0, 8)
slice_2: aten.slice(mm_1, 1, 8, end)
view: aten.view(slice_2, [20, 4])
auto_functionalized_v2_1: auto_functionalized_v2(dsafx.norm_rope_write, q_c=mm,
    q_weight=arg6_1, kv_c=slice_1, kv_weight=arg7_1, k_pe=view, cos=arg10_1, sin=arg11_1,
    slot_mapping=arg15_1, eps=1e-06, style='interleaved', layout='bf16', scale=None,
    _cache_base_index=0, _all_bases=[arg14_1])
getitem_2: getitem(auto_functionalized_v2_1, 0)
getitem_3: getitem(auto_functionalized_v2_1, 1)
getitem_4: getitem(auto_functionalized_v2_1, 2)
getitem_5: getitem(auto_functionalized_v2_1, 3)
view_1: aten.view(getitem_3, [-1, 8])
view_2: aten.view(getitem_4, [-1, 4])
mul: aten.mul(getitem_2, 2)
sum_1: aten.sum(getitem_5)
copy_: aten.copy_(arg14_1, getitem_5)
fuse_cache_write: 1 rewritten; auto_functionalized_v2 became part of norm_rope_write""",
    )


def test_a_layer_with_an_indexer_writes_both_caches_at_once():
    graph = graph_of(lambda a: full_layer(a)[:1], operands())
    report = fuse_cache_write_pass(graph, ALWAYS)
    assert_expected_inline(
        text(graph, report),
        """\
mm: aten.mm(arg0_1, arg1_1)
mm_1: aten.mm(arg0_1, arg2_1)
slice_1: aten.slice(mm_1, 1, 0, 8)
slice_2: aten.slice(mm_1, 1, 8, end)
view: aten.view(slice_2, [20, 4])
mm_2: aten.mm(arg0_1, arg3_1)
auto_functionalized_v2_2: auto_functionalized_v2(dsafx.norm_rope_index_write, q_c=mm,
    q_weight=arg6_1, kv_c=slice_1, kv_weight=arg7_1, k_pe=view, index_k=mm_2,
    index_weight=arg8_1, index_bias=arg9_1, cos=arg10_1, sin=arg11_1, slot_mapping=arg15_1,
    index_slot_mapping=arg17_1, eps=1e-06, style='interleaved', index_eps=1e-06,
    index_style='half', layout='bf16', scale_store='ue8m0', hadamard=False, scale=None,
    _cache_base_index=0, _index_cache_base_index=1, _all_bases=[arg14_1, arg16_1])
getitem_8: getitem(auto_functionalized_v2_2, 0)
getitem_9: getitem(auto_functionalized_v2_2, 1)
getitem_10: getitem(auto_functionalized_v2_2, 2)
getitem_11: getitem(auto_functionalized_v2_2, 3)
getitem_12: getitem(auto_functionalized_v2_2, 4)
getitem_13: getitem(auto_functionalized_v2_2, 5)
view_2: aten.view(getitem_9, [-1, 8])
view_3: aten.view(getitem_10, [-1, 4])
mul_1: aten.mul(getitem_8, 2)
copy_: aten.copy_(arg14_1, getitem_12)
copy__1: aten.copy_(arg16_1, getitem_13)
fuse_cache_write: 1 rewritten; auto_functionalized_v2_1 became part of norm_rope_index_write""",
    )


@pytest.mark.parametrize("fused_before", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [shared_layer, full_layer])
def test_caches_hold_what_the_separate_writes_store(
    layer: Callable[[Parts], Any], dtype: torch.dtype, fused_before: bool
):
    a = operands(dtype)
    assert a["slots"][0] == -1
    graph = graph_of(layer, a)
    if fused_before:
        assert fuse_norm_rope_pass(graph, ALWAYS).matched == 1
    report = fuse_cache_write_pass(graph, ALWAYS)
    assert (report.matched, report.declined) == (1, [])
    if dtype == torch.float32 or layer is shared_layer:
        assert same(graph, layer, a)
    else:
        # The index key is rounded once instead of twice: what was declared, and nothing else.
        ours, theirs = deepcopy(a), deepcopy(a)
        evaluate(graph, *ours.values())
        layer(theirs)
        assert set(fusion.NORM_ROPE_INDEX_WRITE.rounding) == {"index_k"}
        assert torch.equal(ours["cache"], theirs["cache"])
        torch.testing.assert_close(stored_keys(ours), stored_keys(theirs), rtol=2**-3, atol=2**-5)


def test_batched_rows_are_written_as_the_rows_that_they_are():
    a = operands(rows=(2, 10))
    graph = graph_of(full_layer, a)
    assert fuse_norm_rope_pass(graph, ALWAYS).matched == 1
    assert fuse_cache_write_pass(graph, ALWAYS).matched == 1
    assert same(graph, full_layer, a)


def test_a_quantised_cache_takes_its_layout_and_scale_with_it():
    def step(a: Parts) -> tuple[Tensor, ...]:
        q_c, kv_c, k_pe = latents(a)
        mla_cache_write(kv_c, k_pe, a["cache"], a["slots"], "fp8", a["scale"])
        return (q_c,)

    a = operands(torch.bfloat16)
    a |= {"scale": torch.tensor(0.02), "cache": new_mla_cache(8, 4, "fp8", LATENT, ROTATED)}
    graph = graph_of(step, a)
    assert fuse_cache_write_pass(graph, ALWAYS).matched == 1
    ours, theirs = deepcopy(a), deepcopy(a)
    evaluate(graph, *ours.values())
    step(theirs)
    assert ours["cache"].view(torch.uint8).count_nonzero() > 100
    assert torch.equal(ours["cache"].view(torch.uint8), theirs["cache"].view(torch.uint8))


def test_layers_whose_caches_are_slices_of_one_buffer_fuse_one_after_another():
    def two(a: Parts) -> tuple[Tensor, ...]:
        q_c, kv_c, k_pe = latents(a)
        mla_cache_write(kv_c, k_pe, a["stacked"][0], a["slots"], "bf16")
        q_d, kv_d, pe_d = latents({**a, "x": torch.tanh(a["x"])})
        mla_cache_write(kv_d, pe_d, a["stacked"][1], a["slots"], "bf16")
        return q_c * 2, q_d * 2, a["stacked"].sum()

    a = operands()
    a["stacked"] = torch.stack([a["cache"], a["cache"]])
    graph = graph_of(two, a)
    report = fuse_cache_write_pass(graph, ALWAYS)
    assert (report.matched, report.declined) == (2, [])
    ours, theirs = deepcopy(a), deepcopy(a)
    for x, y in zip(evaluate(graph, *ours.values()), two(theirs), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(ours["stacked"], theirs["stacked"])


def declined(function: Callable[[Parts], Any]) -> str:
    graph = graph_of(function, operands())
    before = text(graph)
    report = fuse_cache_write_pass(graph, ALWAYS)
    assert text(graph) == before
    ((_, reason),) = report.declined
    return reason


def test_an_old_cache_that_is_read_in_between_keeps_them_apart():
    def reading(a: Parts) -> tuple[Tensor, ...]:
        q_c, kv_c, k_pe = latents(a)
        old = a["cache"].sum()
        write(a, kv_c, k_pe)
        return q_c, old

    assert declined(reading) == "the old value of arg14_1 is read behind its first part"


def test_latents_that_are_changed_before_they_are_written_stay_apart():
    def scaled(a: Parts) -> tuple[Tensor, ...]:
        q_c, kv_c, k_pe = latents(a)
        write(a, kv_c * 2, k_pe)
        return (q_c,)

    assert declined(scaled) == "it stores other values of its layer"


def test_the_query_latent_in_the_place_of_the_other_stays_apart():
    def swapped(a: Parts) -> tuple[Tensor, ...]:
        q_c, kv_c, k_pe = latents({**a, "q_a": a["wk"][:, :8], "q_w": a["kv_w"]})
        write(a, q_c, k_pe)
        return (kv_c * 2,)

    assert declined(swapped) == "it stores other values of its layer"


def test_an_index_key_without_a_paged_cache_keeps_its_layer_apart():
    def keyless(a: Parts) -> tuple[Tensor, ...]:
        q_c, kv_c, k_pe = latents(a)
        write(a, kv_c, k_pe)
        return q_c, index_key(a)

    assert declined(keyless) == "its index key goes to 0 paged caches, not 1"


def test_the_reference_kernel_is_not_taken_unless_asked_for():
    report = fuse_cache_write_pass(graph_of(shared_layer, operands()), static_context())
    assert [reason for _, reason in report.declined] == [
        "norm_rope_write of the cpu provider is not faster than its parts"
    ]


@pytest.mark.parametrize("layer", [shared_layer, full_layer])
@pytest.mark.parametrize("fuse", ["auto", "always"])
def test_the_pipeline_proves_what_it_has_made(layer: Callable[[Parts], Any], fuse: str):
    a = operands()
    graph = graph_of(layer, a)
    with collect() as reports:
        Pipeline(PassOptions(fuse=fuse, strict=True))(graph, True)
    assert reports[0].problem is None
    assert reports[0].of("fuse_cache_write").matched == (fuse == "always")
    assert same(graph, layer, a)


def problem(fault: Callable[[fx.Node], None]) -> str:
    """What a strict pipeline says where a fault befalls the fused write."""

    def fault_pass(graph: fx.Graph, context: PassContext) -> PassReport:
        (node,) = (n for n in graph.nodes if n.name.startswith("auto_functionalized"))
        fault(node)
        return PassReport("fault")

    graph = graph_of(full_layer, operands())
    passes = (*PASSES[:-1], fault_pass, PASSES[-1])
    with pytest.raises(VerificationError) as raised:
        Pipeline(PassOptions(fuse="always", strict=True), passes)(graph, True)
    return str(raised.value)


def test_a_dropped_write_is_still_caught():
    bare = torch.ops.dsafx.norm_rope_index.default

    def drop(node: fx.Node) -> None:
        for user in [user for user in node.users if user.args[1] >= 4]:
            user.replace_all_uses_with(node.kwargs["_all_bases"][user.args[1] - 4])
            node.graph.erase_node(user)
        with node.graph.inserting_before(node):
            kwargs = {each.name: node.kwargs[each.name] for each in bare._schema.arguments}
            call = node.graph.call_function(bare, (), kwargs)
        call.meta.update(node.meta, val=node.meta["val"][:4])
        node.replace_all_uses_with(call)
        node.graph.erase_node(node)

    assert "a write of the graph is gone" in problem(drop)


def with_other_slots(kwargs: dict[str, Any]) -> dict[str, Any]:
    mine, theirs = kwargs["slot_mapping"], kwargs["index_slot_mapping"]
    return {**kwargs, "slot_mapping": theirs, "index_slot_mapping": mine}


@pytest.mark.parametrize("change", [with_other_slots, lambda k: {**k, "scale_store": "fp32"}])
def test_slots_of_the_other_cache_and_another_scale_store_are_caught(change: Callable[..., Any]):
    def fault(node: fx.Node) -> None:
        node.kwargs = change(dict(node.kwargs))

    assert "a write of the graph is gone" in problem(fault)


def test_inductor_writes_in_place_and_clones_nothing():
    a, graphs = operands(), []
    options = {"fuse": "always", "strict": True, "post_grad_custom_post_pass": graphs.append}
    step = torch.compile(full_layer, backend=passes_only, dynamic=False, options=options)
    ours, theirs = deepcopy(a), deepcopy(a)
    with torch.no_grad():
        results = step(ours)
    for x, y in zip(results, full_layer(theirs), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(ours["cache"], theirs["cache"])
    assert torch.equal(ours["index_cache"], theirs["index_cache"])
    assert op_names(graphs[0]) == ["norm_rope_index_write", "index_query", "index_select_paged"]
    (node,) = (n for n in graphs[0].nodes if "norm_rope_index_write" in str(n.target))
    assert {node.args[10].op, node.args[12].op} == {"placeholder"}
    assert not [n for n in graphs[0].nodes if n.target is torch.ops.aten.clone.default]
