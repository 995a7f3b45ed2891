"""Norms and rotations of one layer as one op: when they fuse, and what keeps them apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from _graphs import evaluate, largest_difference, op_names, static_context, text, trace
from _layer_parts import DTYPES, STYLES, Parts, head_weights
from _layer_parts import index_key as key_of
from _layer_parts import latents as latents_of
from _layer_parts import operands as operands_of
from _uncompiled import passes_only
from expecttest import assert_expected_inline
from torch import Tensor

from dsafx import fusion, ops
from dsafx.ops import providers
from dsafx.passes import collect
from dsafx.passes._report import PassOptions
from dsafx.passes.fuse_norm_rope import fuse_norm_rope_pass

ROTATED, LATENT, DIM, HIDDEN, TOKENS = 4, 8, 12, 16, 5
ALWAYS = static_context(options=PassOptions(fuse="always"))


def operands() -> dict[str, Tensor]:
    torch.manual_seed(0)
    angle = torch.randn(TOKENS, ROTATED // 2)
    shapes = {
        "x": (TOKENS, HIDDEN),
        "q_a": (HIDDEN, 10),
        "kv_a": (HIDDEN, LATENT + ROTATED),
        "wk": (HIDDEN, DIM),
        "q_w": (10,),
        "kv_w": (LATENT,),
        "k_w": (DIM,),
        "k_b": (DIM,),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return {**tensors, "cos": angle.cos(), "sin": angle.sin()}


def latents(a: dict[str, Tensor], eps: float = 1e-6) -> tuple[Tensor, ...]:
    q_c = ops.rms_norm(a["x"] @ a["q_a"], a["q_w"], eps)
    both = a["x"] @ a["kv_a"]
    kv_c = ops.rms_norm(both[:, :LATENT], a["kv_w"], 1e-6)
    return q_c * 2, kv_c, ops.rope(both[:, LATENT:], a["cos"], a["sin"], "interleaved")


def index_key(a: dict[str, Tensor], split: bool = False) -> Tensor:
    normed = ops.layer_norm(a["x"] @ a["wk"], a["k_w"], a["k_b"], 1e-6)
    if split:
        first, second = normed.split([ROTATED, DIM - ROTATED], dim=-1)
    else:
        first, second = normed[:, :ROTATED], normed[:, ROTATED:]
    return torch.cat([ops.rope(first, a["cos"], a["sin"], "half"), second], dim=-1)


def test_the_latents_of_a_layer_fuse_and_their_projections_move_above():
    graph = trace(latents, operands())
    report = fuse_norm_rope_pass(graph, ALWAYS)
    assert_expected_inline(
        text(graph, report),
        """\
mm: aten.mm(arg0_1, arg0_2)
mm_1: aten.mm(arg0_1, arg0_3)
slice_1: aten.slice(mm_1, 1, 0, 8)
slice_2: aten.slice(mm_1, 1, 8, end)
norm_rope: dsafx.norm_rope(mm, arg0_5, slice_1, arg0_6, slice_2, arg0_9, arg0_10, 1e-06,
    'interleaved')
getitem: getitem(norm_rope, 0)
getitem_1: getitem(norm_rope, 1)
getitem_2: getitem(norm_rope, 2)
mul: aten.mul(getitem, 2)
fuse_norm_rope: 1 rewritten; rope became part of norm_rope""",
    )


def test_an_index_key_fuses_with_the_latents_and_the_key_stays_an_output():
    def layer(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return *latents(a), index_key(a)

    graph = trace(layer, operands())
    report = fuse_norm_rope_pass(graph, ALWAYS)
    assert_expected_inline(
        text(graph, report),
        """\
mm: aten.mm(arg0_1, arg0_2)
mm_1: aten.mm(arg0_1, arg0_3)
slice_1: aten.slice(mm_1, 1, 0, 8)
slice_2: aten.slice(mm_1, 1, 8, end)
mm_2: aten.mm(arg0_1, arg0_4)
norm_rope_index: dsafx.norm_rope_index(mm, arg0_5, slice_1, arg0_6, slice_2, mm_2, arg0_7,
    arg0_8, arg0_9, arg0_10, 1e-06, 'interleaved', 1e-06, 'half')
getitem: getitem(norm_rope_index, 0)
getitem_1: getitem(norm_rope_index, 1)
getitem_2: getitem(norm_rope_index, 2)
getitem_3: getitem(norm_rope_index, 3)
mul: aten.mul(getitem, 2)
fuse_norm_rope: 1 rewritten; rope became part of norm_rope_index""",
    )


@pytest.mark.parametrize("split", [False, True])
def test_fusing_keeps_the_numbers_bit_for_bit_in_float32(split: bool):
    def layer(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return *latents(a), index_key(a, split)

    a = operands()
    graph = trace(layer, a)
    assert fuse_norm_rope_pass(graph, ALWAYS).matched == 1
    assert op_names(graph) == ["norm_rope_index"]
    assert largest_difference(evaluate(graph, *a.values()), layer(a)) == 0


def test_the_reference_kernel_is_not_taken_unless_asked_for():
    graph = trace(latents, operands())
    report = fuse_norm_rope_pass(graph, static_context())
    assert str(report) == (
        "fuse_norm_rope: 0 rewritten; rope declined: "
        "norm_rope of the cpu provider is not faster than its parts"
    )
    never = static_context(options=PassOptions(fuse="never"))
    assert fuse_norm_rope_pass(graph, never).declined == [("rope", 'fuse="never"')]


def test_the_layers_of_a_model_fuse_each_for_itself():
    def two(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
        first = latents(a)
        following = {**a, "x": torch.tanh(a["x"])}
        return *first, *latents(following), index_key(following)

    a = operands()
    graph = trace(two, a)
    assert fuse_norm_rope_pass(graph, ALWAYS).matched == 2
    assert op_names(graph) == ["norm_rope", "norm_rope_index"]
    assert largest_difference(evaluate(graph, *a.values()), two(a)) == 0


def declined(function: Any) -> str:
    graph = trace(function, operands())
    before = text(graph)
    report = fuse_norm_rope_pass(graph, ALWAYS)
    assert text(graph) == before
    ((_, reason),) = report.declined
    return reason


def test_norms_of_unlike_eps_stay_apart():
    assert declined(lambda a: latents(a, eps=1e-5)) == "its norms have unlike eps 1e-05 and 1e-06"


def test_a_third_normed_projection_is_ambiguous():
    def third(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return *latents(a), ops.rms_norm(a["x"] @ a["wk"], a["k_w"], 1e-6)

    assert declined(third) == "its hidden states have 3 normed projections, not 2"


def test_an_index_key_of_other_angles_stays_apart():
    def other(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return *latents(a), index_key({**a, "cos": a["sin"], "sin": a["cos"]})

    assert declined(other) == "its index key is rotated by other angles"


def test_an_index_key_whose_norm_is_also_read_elsewhere_stays_apart():
    def shown(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
        normed = ops.layer_norm(a["x"] @ a["wk"], a["k_w"], a["k_b"], 1e-6)
        rotated = ops.rope(normed[:, :ROTATED], a["cos"], a["sin"], "half")
        return *latents(a), torch.cat([rotated, normed[:, ROTATED:]], dim=-1), normed

    assert declined(shown) == "its index key is not [rotated | passed] of its LayerNorm"


def test_nothing_fuses_across_a_write():
    def writing(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
        q_c = ops.rms_norm(a["x"] @ a["q_a"], a["q_w"], 1e-6)
        a["k_w"].copy_(a["k_b"])
        both = a["x"] @ a["kv_a"]
        kv_c = ops.rms_norm(both[:, :LATENT], a["kv_w"], 1e-6)
        return q_c, kv_c, ops.rope(both[:, LATENT:], a["cos"], a["sin"], "interleaved")

    assert declined(writing) == "a write stands between its parts"


def test_a_rotation_of_something_else_is_not_mentioned():
    def query(a: dict[str, Tensor]) -> Tensor:
        return ops.rope(a["x"][:, :ROTATED], a["cos"], a["sin"], "half")

    report = fuse_norm_rope_pass(trace(query, operands()), ALWAYS)
    assert str(report) == "fuse_norm_rope: 0 rewritten"


def with_key(a: Parts, style: str = "interleaved", index_style: str = "half") -> tuple[Tensor, ...]:
    return *latents_of(a, style), key_of(a, index_style)


def unequal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> list[int]:
    """Which results differ in a bit."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [number for number, (a, b) in pairs if not torch.equal(a, b)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_style", STYLES)
@pytest.mark.parametrize("style", STYLES)
def test_every_pair_of_rope_styles_fuses_with_the_rounding_that_is_declared(
    style: str, index_style: str, dtype: torch.dtype
):
    def layer(a: Parts) -> tuple[Tensor, ...]:
        return with_key(a, style, index_style)

    a = operands_of(dtype)
    graph = trace(layer, a)
    assert fuse_norm_rope_pass(graph, ALWAYS).matched == 1
    ours, theirs = evaluate(graph, *a.values()), layer(a)
    which = fusion.NORM_ROPE_INDEX
    declared = [which.outputs.index(name) for name in which.rounding]
    assert unequal(ours, theirs) == ([] if dtype == torch.float32 else declared)
    for number in declared:
        torch.testing.assert_close(ours[number], theirs[number], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_without_an_indexer_fuses_without_any_other_rounding(dtype: torch.dtype):
    a = operands_of(dtype)
    graph = trace(latents_of, a)
    assert fuse_norm_rope_pass(graph, ALWAYS).matched == 1
    assert op_names(graph) == ["norm_rope"]
    assert fusion.NORM_ROPE.rounding == {}
    assert unequal(evaluate(graph, *a.values()), latents_of(a)) == []


def test_batched_latents_are_seen_as_rows_and_put_back_as_they_were():
    a = operands_of(rows=(2, 10))
    graph = trace(with_key, a)
    report = fuse_norm_rope_pass(graph, ALWAYS)
    assert report.matched == 1
    assert unequal(evaluate(graph, *a.values()), with_key(a)) == []
    (node,) = (n for n in graph.nodes if n.name == "norm_rope_index")
    assert [value.shape[0] for value in node.meta["val"]] == [20] * 4


@pytest.mark.parametrize("rows", [(20,), (2, 10)])
def test_a_compiled_layer_of_symbolic_sizes_fuses(rows: tuple[int, ...]):
    a = operands_of(rows=rows)
    for name in ("x", "cos", "sin", "slots", "index_slots", "ks", "ke"):
        for dim in range(max(1, a[name].dim() - 1)):
            torch._dynamo.mark_dynamic(a[name], dim)
    compiled = torch.compile(with_key, backend=passes_only, options={"fuse": "always"})
    with torch.no_grad(), collect() as reports:
        ours = compiled(a)
    report = reports[-1].of("fuse_norm_rope")
    assert (report.matched, report.declined, reports[-1].problem) == (1, [], None)
    assert unequal(ours, with_key(a)) == []


def test_one_projection_of_both_latents_is_told_apart_by_its_columns():
    def joined(a: Parts) -> tuple[Tensor, ...]:
        together = a["x"] @ torch.cat([a["kv_a"], a["q_a"]], dim=-1)
        kv, pe, q = together.split([8, 4, 10], dim=-1)
        q_c = ops.rms_norm(q, a["q_w"], 1e-6)
        kv_c = ops.rms_norm(kv, a["kv_w"], 1e-6)
        return q_c, kv_c, ops.rope(pe, a["cos"], a["sin"], "interleaved")

    a = operands_of()
    graph = trace(joined, a)
    assert fuse_norm_rope_pass(graph, ALWAYS).matched == 1
    (node,) = (n for n in graph.nodes if n.name == "norm_rope")
    assert [value.shape[1] for value in node.meta["val"]] == [10, 8, 4]
    assert unequal(evaluate(graph, *a.values()), joined(a)) == []


def test_other_readers_of_the_hidden_states_are_no_part_of_the_layer():
    def layer(a: Parts) -> tuple[Tensor, ...]:
        gate = torch.sigmoid(a["x"] @ a["wk"])
        return *with_key(a), head_weights(a), gate

    a = operands_of(torch.bfloat16)
    graph = trace(layer, a)
    report = fuse_norm_rope_pass(graph, ALWAYS)
    assert (report.matched, report.declined) == (1, [])


def test_a_rotated_part_with_several_heads_stays_apart():
    def heads(a: Parts) -> tuple[Tensor, ...]:
        both = a["x"] @ a["kv_a"]
        kv_c = ops.rms_norm(both[:, :8], a["kv_w"], 1e-6)
        q_c = ops.rms_norm(a["x"] @ a["q_a"], a["q_w"], 1e-6)
        turned = ops.rope(both[:, :8].view(-1, 2, 4), a["cos"], a["sin"], "half")
        return q_c, kv_c, turned

    report = fuse_norm_rope_pass(trace(heads, operands_of()), ALWAYS)
    assert report.declined == [("rope", "its key has 2 heads, not 1")]


@pytest.mark.parametrize(
    ("passed_before", "turned", "passed_behind"),
    [(slice(0, -4), slice(-4, None), slice(0, 0)), (slice(0, 0), slice(2, 6), slice(6, None))],
)
def test_a_layer_norm_that_is_not_rotated_in_its_first_dims_stays_apart(
    passed_before: slice, turned: slice, passed_behind: slice
):
    def other(a: Parts) -> tuple[Tensor, ...]:
        normed = ops.layer_norm(a["x"] @ a["wk"], a["k_w"], a["k_b"], 1e-6)
        parts = [normed[:, each] for each in (passed_before, turned, passed_behind)]
        parts[1] = ops.rope(parts[1], a["cos"], a["sin"], "half")
        return *latents_of(a), torch.cat([part for part in parts if part.shape[1]], dim=-1)

    report = fuse_norm_rope_pass(trace(other, operands_of()), ALWAYS)
    assert report.declined == [
        ("rope_1", "its index key is not [rotated | passed] of its LayerNorm")
    ]


def test_a_provider_that_has_the_kernel_is_asked_for_it(monkeypatch: pytest.MonkeyPatch):
    fast = replace(providers.CPU, fused=frozenset({"norm_rope"}))
    monkeypatch.setattr(providers, "PROVIDERS", (fast, providers.REFERENCE))
    a = operands_of()
    assert fuse_norm_rope_pass(trace(latents_of, a), static_context()).matched == 1
    assert fuse_norm_rope_pass(trace(with_key, a), static_context()).declined == [
        ("rope", "norm_rope_index of the cpu provider is not faster than its parts")
    ]
