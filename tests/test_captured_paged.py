"""Captured steps of ops on paged caches, as an engine writes them: decode and short prefill."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from _capture import HostRead, Recorder, as_on_a_device
from _pages import (
    DIM,
    HEADS,
    LATENT,
    LENGTHS,
    NOPE,
    ROPE,
    SCALE,
    TOPK,
    VALUE,
    Pages,
    filled_index_cache,
    filled_mla_cache,
    index_inputs,
    mla_inputs,
    pages,
    spec,
)
from torch import Tensor

from dsafx import ops
from dsafx.models.captured import EAGER, CapturedStep, CapturedVariant, Outputs, RowInput
from dsafx.ops import providers, routing
from dsafx.ops.index_cache import index_cache_write
from dsafx.ops.index_select_paged import index_select_paged
from dsafx.ops.mla_attention_paged import mla_attention_paged
from dsafx.ops.mla_cache import mla_cache_gather, mla_cache_write

LAYER = routing.LayerCapabilities(dense_mha=True, masked_mha=True)
BOUND = 16
DECODE = CapturedVariant("decode", tokens=5, capture_bound=BOUND, max_query_len=1)
SHORT = CapturedVariant("short", tokens=8, capture_bound=TOPK)
LONG = CapturedVariant("long", tokens=8, capture_bound=BOUND)
LAYOUTS = ("bf16", "fp8_ds_mla")
ROWS = {
    "q_nope": RowInput((HEADS, NOPE), torch.float32),
    "q_pe": RowInput((HEADS, ROPE), torch.float32),
    "kv_c": RowInput((LATENT,), torch.float32),
    "k_pe": RowInput((ROPE,), torch.float32),
    "index_q": RowInput((8, DIM), torch.float32),
    "index_k": RowInput((DIM,), torch.float32),
    "weights": RowInput((8,), torch.float32),
    "slot_mapping": RowInput((), torch.int64, padding=-1),
    "row_request": RowInput((), torch.int32, padding=-1),
    "lens": RowInput((), torch.int32),
}


class Requests:
    """Requests in pages, whose last ``new`` tokens the caches do not hold yet."""

    def __init__(
        self,
        layout: str,
        lengths: tuple[int, ...] = LENGTHS,
        new: int = 1,
        mode: str = "auto",
    ) -> None:
        torch.manual_seed(5)
        at: Pages = pages(lengths, new)
        self.layout = layout
        self.at = at
        self.new = new
        self.config = routing.RouteConfig(mode=mode)
        q_nope, q_pe, self.kv_c, self.k_pe, self.kv_b_weight = mla_inputs(at)
        index_q, index_k, weights = index_inputs(at)
        last = at.ke.long() - 1
        before = at.slot_mapping.clone()
        before[last] = -1
        earlier = Pages(**{**vars(at), "slot_mapping": before})
        self.cache = filled_mla_cache(earlier, self.kv_c, self.k_pe, layout, None)
        self.index_cache = filled_index_cache(earlier, index_k)
        self.rows = {
            "q_nope": q_nope,
            "q_pe": q_pe,
            "kv_c": self.kv_c[last],
            "k_pe": self.k_pe[last],
            "index_q": index_q,
            "index_k": index_k[last],
            "weights": weights,
            "slot_mapping": at.slot_mapping[last],
            "row_request": at.row_request,
            "lens": at.lens,
        }

    def step(self, rows: Mapping[str, Tensor], facts: routing.BatchFacts) -> Outputs:
        slots, table = rows["slot_mapping"], self.at.block_table
        mla_cache_write(rows["kv_c"], rows["k_pe"], self.cache, slots, self.layout)
        index_cache_write(rows["index_k"], self.index_cache, slots, "fp32")
        seen = table, rows["row_request"], rows["lens"], facts.max_kv_len
        indices = index_select_paged(
            rows["index_q"], self.index_cache, rows["weights"], *seen, TOPK, "fp32"
        )
        out, _ = mla_attention_paged(
            rows["q_nope"],
            rows["q_pe"],
            self.cache,
            self.kv_b_weight,
            indices,
            *seen,
            facts.max_query_len,
            TOPK,
            SCALE,
            routing.encode_spec(LAYER, self.config),
            self.layout,
        )
        return out, indices

    def captured(self, variant: CapturedVariant, strict: bool) -> tuple[CapturedStep, Recorder]:
        recorder = Recorder(strict)
        kernels = providers.kernel_capabilities("cpu")
        sizes = TOPK, HEADS, NOPE, ROPE, VALUE, LATENT
        route = routing.RouteSpec(LAYER, kernels, self.config, *sizes)
        step = CapturedStep(self.step, [variant], ROWS, route, "cpu", capture=recorder)
        return step, recorder

    def exact(self, selected: Tensor) -> Tensor:
        """float64 attention over the selected keys, as the cache stores them."""
        at = self.at
        stored = self.cache, *at.packed, self.layout, None, LATENT
        with ops.use_provider("reference"):
            kv_c, k_pe = mla_cache_gather(*stored, dtype=torch.float64)
            out, _ = ops.mla_attention(
                self.rows["q_nope"].double(),
                self.rows["q_pe"].double(),
                kv_c,
                k_pe,
                self.kv_b_weight.double(),
                selected,
                at.ks,
                at.ke,
                BOUND,
                self.new,
                TOPK,
                SCALE,
                spec("sparse"),
            )
        return out


def assert_serves(variant: CapturedVariant, route: routing.Route, strict: bool, *scene) -> None:
    requests, eager = Requests(*scene), Requests(*scene)
    captured, _ = requests.captured(variant, strict)
    assert captured.decisions[variant.name].route is route
    assert_same_caches(requests, eager)
    longest = int(requests.at.lens.max())
    # Of the other batch, which is replayed first, nothing may be left.
    captured({name: rows[:2].flip(0) for name, rows in requests.rows.items()}, longest, 1)
    found, indices = captured(requests.rows, longest, requests.new)
    assert captured.counts == {variant.name: 2}
    with ops.use_provider("reference"):
        _, selected = eager.step(eager.rows, routing.BatchFacts(longest, requests.new))
    assert_same_caches(requests, eager)
    assert torch.equal(indices, selected)
    torch.testing.assert_close(found.double(), eager.exact(selected), atol=1e-5, rtol=1e-5)


def assert_decodes(layout: str, strict: bool) -> None:
    assert_serves(DECODE, routing.Route.SPARSE_MQA, strict, layout)


def assert_prefills(layout: str, strict: bool) -> None:
    """Short requests by dense MHA, one of them with a cached token, and long ones by masked MHA."""
    assert_serves(SHORT, routing.Route.DENSE_MHA, strict, layout, (2, 4, 1), 3)
    assert_serves(LONG, routing.Route.MASKED_MHA, strict, layout, LENGTHS, 3, "masked")


def assert_same_caches(a: Requests, b: Requests) -> None:
    torch.testing.assert_close(a.cache, b.cache, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(a.index_cache, b.index_cache)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_captured_decode_step_on_pages_gives_the_selected_softmax_and_writes_its_keys_alone(
    layout: str,
):
    assert_decodes(layout, strict=False)


@pytest.mark.triton
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_kernels_made_for_it_a_decode_step_on_pages_reads_no_value_of_the_device(layout: str):
    with ops.use_provider("triton"):
        assert_decodes(layout, strict=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_captured_prefill_on_pages_is_the_exact_attention_of_its_rows(layout: str):
    assert_prefills(layout, strict=False)


@pytest.mark.triton
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_kernels_made_for_it_a_prefill_on_pages_reads_no_value_of_the_device(layout: str):
    with ops.use_provider("triton"):
        assert_prefills(layout, strict=True)


def test_a_request_beyond_the_bound_is_decoded_eagerly():
    requests = Requests("bf16")
    captured, recorder = requests.captured(DECODE, strict=False)
    captured(requests.rows, max_kv_len=BOUND + 1, max_query_len=1)
    assert captured.counts == {EAGER: 1}
    assert recorder.replays == [0]


def test_the_reference_reads_the_device_in_a_decode_step_on_pages():
    requests = Requests("bf16")
    with (
        ops.use_provider("reference"),
        as_on_a_device(),
        torch.no_grad(),
        pytest.raises(HostRead),
    ):
        requests.step(requests.rows, routing.BatchFacts(14, 1))
