"""The flashinfer provider's calls: a recorder computes what FlashInfer documents, in float64."""

from __future__ import annotations

from typing import Any

import _flashinfer_cases as cases
import pytest
import torch
from _flashinfer_bodies import numbers, provider, recorder
from _flashinfer_signatures import SIGNATURES
from _foreign import assert_near, host_of
from _reference import int32
from torch import Tensor

from dsafx import ops
from dsafx.ops.flashinfer import kernels

MLA = "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla"
SM120 = "flashinfer.mla.SparseMLASm120Wrapper"
WRAPPER = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
RAGGED = "flashinfer.BatchPrefillWithRaggedKVCacheWrapper"
DEEPSEEK = "flashinfer.prefill.trtllm_ragged_attention_deepseek"

every_version = pytest.mark.parametrize("version", SIGNATURES)


def run(found: Any, op: str, *args: Any) -> Any:
    kernel = found[op]
    assert kernel.supports(*args) is None
    return kernel.run(*args)


def in_float64(op: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """The reference of ``op`` on the same numbers in float64."""
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    with ops.use_provider("reference"):
        return op(*wide)


def assert_attention(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert_near(found[0], wanted[0])
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-5, atol=1e-5)


@every_version
@pytest.mark.parametrize("architecture", [90, 100])
def test_packed_rows_give_the_attention_over_what_each_row_selects(architecture, version):
    given = cases.packed()
    _, found = provider(architecture, version)
    wanted = in_float64(ops.sparse_mqa, *given)
    result = run(found, "sparse_mqa", *given)
    assert_attention(result, wanted)
    assert result[0][2].eq(0).all()
    assert result[1][2].eq(float("-inf")).all()
    assert_attention(run(found, "sparse_mla", *given.parts()), wanted)


@every_version
@pytest.mark.parametrize(
    ("architecture", "layout"), [(90, "bf16"), (100, "bf16"), (120, "fp8_ds_mla")]
)
def test_pages_give_the_attention_over_what_each_row_selects(architecture, layout, version):
    given = cases.paged(layout)
    _, found = provider(architecture, version)
    with ops.use_provider("reference"):
        wanted = ops.sparse_mqa_paged(given.q.double(), *given[1:])
    result = run(found, "sparse_mqa_paged", *given)
    assert_attention(result, wanted)
    for row in (3, 4):
        assert result[0][row].eq(0).all()
        assert result[1][row].eq(float("-inf")).all()


@every_version
@pytest.mark.parametrize("architecture", [90, 100, 120])
def test_an_lse_that_nobody_asked_for_is_empty(architecture, version):
    given = cases.paged("fp8_ds_mla" if architecture == 120 else "bf16")
    _, found = provider(architecture, version)
    out, lse = run(found, "sparse_mqa_paged", *given, None, False)
    assert lse.shape == (0,)
    assert_near(out, run(found, "sparse_mqa_paged", *given)[0])


@pytest.mark.parametrize("architecture", [90, 100, 120])
def test_no_query_token_and_no_key_need_no_call(architecture):
    layout = "fp8_ds_mla" if architecture == 120 else "bf16"
    given = cases.paged(layout)
    recorded, found = provider(architecture)
    none = [
        a[:0] if name in ("q", "indices", "row_request", "lens") else a
        for name, a in given._asdict().items()
    ]
    out, lse = run(found, "sparse_mqa_paged", *none)
    assert (out.shape, lse.shape) == ((0, 8, 512), (0, 8))
    out, lse = run(found, "sparse_mqa_paged", *given._replace(cache=given.cache[:0]))
    assert out.eq(0).all()
    assert lse.eq(float("-inf")).all()
    assert recorded.calls == []


def test_lanes_are_filled_up_with_minus_one_and_the_valid_ones_come_first():
    given = cases.packed()
    recorded, found = provider(100)
    run(found, "sparse_mqa", *given)
    (call,) = recorded.named(MLA)
    first = given.indices[1][given.indices[1] >= 0] + 30
    assert call["block_tables"].shape == (5, 1, 128)
    assert call["block_tables"][1, 0, : first.shape[0]].tolist() == first.tolist()
    assert call["block_tables"][1, 0, first.shape[0] :].eq(-1).all()
    # An empty row reads key 0, and what comes of it is thrown away.
    assert call["seq_lens"].tolist() == [16, first.shape[0], 1, 1, 16]
    assert call["block_tables"][2, 0, :2].tolist() == [0, -1]


@pytest.mark.parametrize(("keys", "page"), [(128, 64), (96, 32), (90, 64)])
def test_packed_keys_are_read_in_pages_that_the_kernel_has(keys, page):
    given = cases.packed(keys=keys)
    recorded, found = provider(100)
    assert_attention(run(found, "sparse_mqa", *given), in_float64(ops.sparse_mqa, *given))
    (call,) = recorded.named(MLA)
    assert call["kv_cache"].shape == (-(-keys // page), page, 576)
    copied = call["kv_cache"].data_ptr() != given.kv.data_ptr()
    assert copied == (keys % page != 0)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_scale_is_the_softmax_scale_and_values_keep_theirs(capturing):
    recorded, found = provider(100, capturing=capturing)
    run(found, "sparse_mqa", *cases.packed())
    (call,) = recorded.named(MLA)
    assert (call["bmm1_scale"], call["bmm2_scale"]) == (cases.SCALE, 1.0)
    assert call["backend"] == "trtllm-gen"


def test_more_query_tokens_than_a_grid_has_are_computed_in_several_calls():
    tokens = 65_535 + 3
    q = torch.zeros(1, 1, 1, dtype=torch.bfloat16).expand(tokens, 1, 576)
    indices = torch.zeros(tokens, 1, dtype=torch.int32)
    given = (q, torch.zeros(64, 576).bfloat16(), indices, torch.zeros(tokens).int(), 1.0, 512)
    recorded, found = provider(100, bodies={})
    with ops.options(workspace_bytes=1 << 30):
        run(found, "sparse_mqa", *given, False)
    calls = recorded.named(MLA)
    assert [call["query"].shape[0] for call in calls] == [65_535, 3]
    assert [call["seq_lens"].shape[0] for call in calls] == [65_535, 3]
    with ops.options(workspace_bytes=1 << 20):
        run(
            found,
            "sparse_mqa",
            *[a[:500] if a is q or a is indices else a for a in given[:3]],
            given[3][:500],
            *given[4:],
        )
    # An LSE takes 2 KiB a head and query token of the workspace.
    assert max(call["query"].shape[0] for call in recorded.named(MLA)[2:]) == 146


@pytest.mark.parametrize(
    ("version", "heads", "topk", "most"),
    [
        ("0.7.4", 8, 16, 70),
        ("0.7.4", 24, 16, 64),
        ("0.6.18.post1", 8, 16, 64),
        ("0.6.18.post1", 8, 2000, 70),
    ],
)
def test_sm120_prefills_where_it_has_a_kernel_and_decodes_64_tokens_elsewhere(
    version, heads, topk, most
):
    given = cases.paged("fp8_ds_mla", heads)
    rows = given._replace(
        q=given.q[:1].expand(70, -1, -1),
        indices=torch.nn.functional.pad(given.indices[:1], (0, topk - 16), value=-1).expand(70, -1),
        row_request=given.row_request[:1].expand(70),
        lens=given.lens[:1].expand(70),
    )
    recorded, found = provider(120, version, bodies={})
    run(found, "sparse_mqa_paged", *rows)
    queries = [call.get("q", call.get("query")) for _, call in recorded.calls]
    assert max(q.shape[0] for q in queries if q is not None) == most


def test_each_stream_has_a_workspace_and_a_wrapper_of_its_own():
    given = cases.packed()
    recorded, found = provider(90)
    run(found, "sparse_mqa", *given)
    run(found, "sparse_mqa", *given)
    assert len(recorded.named(WRAPPER)) == 1
    current = [0]
    recorded, found = provider(100, stream=lambda: current[0])
    for current[0] in (0, 1, 0):
        run(found, "sparse_mqa", *given)
    first, second, again = (call["workspace_buffer"] for call in recorded.named(MLA))
    assert first.data_ptr() == again.data_ptr() != second.data_ptr()
    assert not first.any()


def test_a_graph_that_is_recorded_gets_a_workspace_that_nobody_else_holds():
    recorded = recorder("0.7.4")
    host = host_of(recorded, 100, numbers("0.7.4"), capturing=True)
    run(kernels(host), "sparse_mqa", *cases.packed())
    assert host.kept == {}
    assert recorded.named(MLA)[0]["workspace_buffer"].numel() > 128 << 20


@every_version
@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
@pytest.mark.parametrize(("dims", "rope"), [((192, 128), 0), ((192, 128), 64), ((256, 256), 0)])
def test_dense_prefill_gives_the_attention_over_each_interval(architecture, dims, rope, version):
    given = cases.dense(dims, rope)
    _, found = provider(architecture, version)
    result = run(found, "dense_mha", *given)
    assert_attention(result, in_float64(ops.dense_mha, *given))
    assert result[0][11].eq(0).all()


def test_requests_that_touch_share_a_call_and_equal_rows_are_not_causal():
    recorded, found = provider(90)
    run(found, "dense_mha", *cases.dense())
    plans = recorded.named(f"{RAGGED}.plan")
    assert [(p["qo_indptr"].tolist(), p["kv_indptr"].tolist(), p["causal"]) for p in plans] == [
        ([0, 5], [0, 5], True),
        ([0, 4], [0, 6], True),
        ([0, 1, 2], [0, 5, 10], True),
        ([0, 2], [0, 5], False),
    ]
    assert len(recorded.named(RAGGED)) == 1
    assert recorded.named(RAGGED)[0]["backend"] == "fa3"


def test_a_packed_batch_of_prompts_is_one_call():
    ks, ke = int32(0, 0, 0, 3, 3, 5), int32(1, 2, 3, 4, 5, 6)
    q, k, v = (torch.randn(6, 2, 128).bfloat16() for _ in range(3))
    recorded, found = provider(100)
    args = (q, k, v, ks, ke, 3, 0.1)
    assert_attention(run(found, "dense_mha", *args), in_float64(ops.dense_mha, *args))
    (call,) = recorded.named(DEEPSEEK)
    assert call["cum_seq_lens_q"].tolist() == call["cum_seq_lens_kv"].tolist() == [0, 3, 5, 6]
    assert (call["batch_size"], call["max_q_len"], call["max_kv_len"]) == (3, 3, 3)


@pytest.mark.parametrize("architecture", [90, 100])
def test_equal_rows_that_touch_a_prompt_are_a_call_of_their_own(architecture):
    ks, ke = int32(0, 0, 0, 3, 3, 3), int32(1, 2, 3, 6, 6, 6)
    q, k, v = (torch.randn(6, 2, 128).bfloat16() for _ in range(3))
    recorded, found = provider(architecture)
    args = (q, k, v, ks, ke, 3, 0.1)
    assert_attention(run(found, "dense_mha", *args), in_float64(ops.dense_mha, *args))
    calls = recorded.named(DEEPSEEK if architecture == 100 else f"{RAGGED}.run")
    assert len(calls) == 2


def test_a_broken_premise_is_told_before_any_call():
    recorded, found = provider(90)
    given = cases.dense()
    with pytest.raises(ValueError, match="compiled for at most 4 keys"):
        found["dense_mha"].run(*given, 4)
    with pytest.raises(ValueError, match="max_kv_len must bound"):
        found["dense_mha"].run(*given[:5], 3, given[6])
    assert recorded.calls == []


@every_version
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_top_k_selects_what_the_reference_selects(architecture, version):
    given = cases.scores()
    _, found = provider(architecture, version)
    with ops.use_provider("reference"):
        wanted = ops.select_topk(*given)
    result = run(found, "select_topk", *given)
    assert result.tolist() == wanted.tolist()
    ops.check_indices(result, given[1], given[2], given[3])


def test_a_top_k_wider_than_the_scores_keeps_its_width():
    given = torch.randn(2, 5), int32(0, 2), int32(5, 4), 9
    _, found = provider(100)
    assert run(found, "select_topk", *given).tolist() == [
        [0, 1, 2, 3, 4, -1, -1, -1, -1],
        [0, 1, -1, -1, -1, -1, -1, -1, -1],
    ]
    assert run(found, "select_topk", torch.randn(2, 0), int32(0, 0), int32(0, 0), 2).tolist() == [
        [-1, -1],
        [-1, -1],
    ]


@pytest.mark.parametrize(
    ("architecture", "capturing", "safe"),
    [(100, False, False), (100, True, True), (120, False, True)],
)
def test_top_k_is_safe_for_graphs_where_one_is_recorded_and_where_only_cub_serves(
    architecture, capturing, safe
):
    recorded, found = provider(architecture, capturing=capturing)
    run(found, "select_topk", *cases.scores())
    (call,) = recorded.named("flashinfer.top_k_ragged_transform")
    assert (call["dsa_graph_safe"], call["tie_break"]) == (safe, 1)


@every_version
def test_merged_states_are_those_of_the_reference_whatever_an_empty_side_holds(version):
    given = cases.states()
    _, found = provider(90, version)
    result = run(found, "merge_attention", *given)
    assert_attention(result, in_float64(ops.merge_attention, *given))
    assert result[0][2].eq(0).all()
    assert result[1][2].eq(float("-inf")).all()
