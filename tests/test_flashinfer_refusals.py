"""What the flashinfer provider refuses, and with which reason."""

from __future__ import annotations

import _flashinfer_cases as cases
import pytest
import torch
from _flashinfer_bodies import provider


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        (80, {}, "no sparse MLA for sm_80"),
        (120, {}, "stored as fp8_ds_mla on sm_120, got bf16"),
        (100, {"heads": 96}, "96 heads, between 64 and 128"),
        (100, {"heads": 129}, "at most 128 heads, got 129"),
        (100, {"dtype": torch.float16}, "no kernel for torch.float16 queries on sm_100"),
        (90, {"dtype": torch.float32}, "no kernel for torch.float32 queries on sm_90"),
    ],
)
def test_sparse_rows_that_no_kernel_serves_are_refused_with_the_reason(
    architecture, changes, reason
):
    _, found = provider(architecture)
    assert reason in found["sparse_mqa"].supports(*cases.packed(**changes))


def test_pages_that_no_kernel_serves_are_refused_with_the_reason():
    given = cases.paged("bf16")
    _, found = provider(100)
    supports = found["sparse_mqa_paged"].supports
    assert supports(*given) is None
    gap = given._replace(cache=torch.zeros(5, 65, 576).bfloat16()[:, :64])
    assert "without a gap" in supports(*gap)
    small = given._replace(cache=torch.zeros(5, 16, 576).bfloat16())
    assert "pages of 64 or 32 tokens, got 16" in supports(*small)
    wide = given._replace(cache=torch.zeros(5, 64, 576))
    assert "the dtype of q" in supports(*wide)
    assert "stored as bf16" in supports(*cases.paged("fp8_ds_mla"))
    assert "bit-equal alone" in supports(*given, None, True, True)
    _, old = provider(120, "0.6.18.post1")
    few = cases.paged("fp8_ds_mla")
    page = few._replace(cache=torch.zeros(5, 32, 656, dtype=torch.uint8))
    assert "pages of 64 tokens on SM120, got 32" in old["sparse_mqa_paged"].supports(*page)
    odd = cases.paged("fp8_ds_mla", heads=24)
    assert "24 heads and top-k 16" in old["sparse_mqa_paged"].supports(*odd)


def test_apart_keys_are_joined_only_where_that_copies_no_more_than_is_selected():
    _, found = provider(100)
    few = cases.packed(keys=80)
    assert found["sparse_mla"].supports(*few.parts()) is None
    many = cases.packed(keys=81)
    assert "would copy more rows" in found["sparse_mla"].supports(*many.parts())
    _, apart = provider(90)
    assert apart["sparse_mla"].supports(*many.parts()) is None


@pytest.mark.parametrize(
    ("op", "architecture", "args", "reason"),
    [
        ("sparse_mqa", 90, lambda: cases.packed(), "copies lengths to the host"),
        ("sparse_mqa_paged", 120, lambda: cases.paged("fp8_ds_mla"), "scratch memory"),
        ("dense_mha", 90, lambda: cases.dense(), "read on the host"),
        ("dense_mha", 100, lambda: cases.dense(), "read on the host"),
    ],
)
def test_what_a_graph_cannot_record_is_refused_while_one_is_recorded(
    op, architecture, args, reason
):
    _, found = provider(architecture, capturing=True)
    assert reason in found[op].supports(*args())


def test_a_top_k_that_cannot_break_ties_by_position_is_refused():
    given = cases.scores()
    for architecture, version in ((89, "0.7.4"), (120, "0.6.18.post1")):
        _, found = provider(architecture, version)
        assert "breaks ties by position" in found["select_topk"].supports(*given)
    _, found = provider(100)
    supports = found["select_topk"].supports
    assert "at most 2048, got 2049" in supports(*given[:3], 2049)
    assert "takes a mask" in supports(*given, torch.ones(6, 40, dtype=torch.bool))


def test_states_and_head_dims_that_no_kernel_serves_are_refused():
    _, found = provider(90)
    assert "no kernel for values of 96" in found["merge_attention"].supports(*cases.states(96))
    wide = (torch.zeros(2, 64, 512).bfloat16(), torch.zeros(2, 64)) * 2
    assert "at most 1024 threads" in found["merge_attention"].supports(*wide)
    given = cases.dense((96, 128))
    assert "head dims 96 and 128 on sm_90" in found["dense_mha"].supports(*given)
