"""FlashMLA and DeepGEMM: their call contracts, written down here, and every call bound to them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import _flashinfer_cases as cases
import pytest
import torch
from _foreign import Body, Recorder, assert_near, host_of, signature_of
from _reference import causal_intervals, int32
from torch import Tensor

from dsafx import ops
from dsafx.ops import deep_gemm, flash_mla
from dsafx.ops.cache_layouts import FP8, quantise_index_key
from dsafx.ops.mla_cache import load_latents
from dsafx.ops.tolerances import least_recall

PREFILL, DECODE = "flash_mla.flash_mla_sparse_fwd", "flash_mla.flash_mla_with_kvcache"
LOGITS = "deep_gemm.fp8_mqa_logits"

# flash_mla/flash_mla_interface.py of 9241ae3 (April 2026).
FLASH_MLA = {
    PREFILL: "q, kv, indices, sm_scale, d_v=, attn_sink=, topk_length=",
    DECODE: (
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=,"
        " softmax_scale=, causal=, is_fp8_kvcache=, indices=, attn_sink=, extra_k_cache=,"
        " extra_indices_in_kvcache=, topk_length=, extra_topk_length="
    ),
    "flash_mla.get_mla_metadata": "*args",
}
# csrc/apis/attention.hpp of 54e2261 (June 2026).
DEEP_GEMM = {
    LOGITS: ("q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=, max_seqlen_k="),
}


def sparse_fwd(**a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Prefill: -1 is no key, lanes from ``topk_length`` on are ignored; natural lse, +inf empty."""
    q, kv, indices = a["q"], a["kv"], a["indices"]
    assert q.dtype == kv.dtype == torch.bfloat16
    assert q.shape[1] in (64, 128)
    assert (q.shape[2], kv.shape[1], kv.shape[2], a["d_v"]) == (576, 1, 576, 512)
    assert indices.dtype == a["topk_length"].dtype == torch.int32
    assert indices.shape[1] == 1
    assert indices.shape[2] % 128 == 0
    out, lse = _attend(q, kv[:, 0], indices[:, 0], a["topk_length"], a["sm_scale"])
    return out, lse, lse


def with_kvcache(architecture: int) -> Body:
    """Decode over rows of 656 bytes; lse [b, N, s]."""

    def run(**a: Any) -> tuple[Tensor, Tensor]:
        q, cache, indices = a["q"], a["k_cache"], a["indices"]
        assert (a["block_table"], a["cache_seqlens"], a["head_dim_v"]) == (None, None, 512)
        assert a["is_fp8_kvcache"]
        assert a["tile_scheduler_metadata"] == "new"
        assert (q.shape[1], q.shape[3]) == (1, 576)
        assert q.shape[2] in (64, 128)
        assert cache.dtype == torch.uint8
        assert cache.shape[2:] == (1, 656)
        assert cache.stride(1) == 656
        assert indices.shape[2] % 64 == 0
        # The SM90 kernel for these rows takes no lengths.
        assert (a["topk_length"] is None) == (architecture == 90)
        slot = torch.arange(cache.shape[0] * cache.shape[1])
        rows = torch.cat(load_latents(cache[:, :, 0], slot, "fp8_ds_mla", None, 512, None), dim=-1)
        out, lse = _attend(q[:, 0], rows, indices[:, 0], a["topk_length"], a["softmax_scale"])
        return out[:, None], lse[:, :, None]

    return run


def _attend(
    q: Tensor, rows: Tensor, indices: Tensor, lengths: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    valid = indices >= 0
    if lengths is not None:
        valid &= torch.arange(indices.shape[1]) < lengths[:, None]
    keys = rows[indices.clamp(min=0).long()].double().masked_fill(~valid[..., None], 0)
    scores = torch.einsum("tnd,tsd->tns", q.double(), keys) * scale
    lse = scores.masked_fill(~valid[:, None], -math.inf).logsumexp(-1)
    empty = ~valid.any(dim=1)[:, None]
    shares = (scores - lse[..., None]).exp().masked_fill(~valid[:, None], 0)
    out = torch.einsum("tns,tsv->tnv", shares, keys[..., :512])
    return out.to(q.dtype), lse.masked_fill(empty, math.inf).float()


def mqa_logits(**a: Any) -> Tensor:
    """Scores of fp8 operands; columns that a row does not see hold anything."""
    q, (k, scale), weights = a["q"], a["kv"], a["weights"]
    first, last = a["cu_seq_len_k_start"], a["cu_seq_len_k_end"]
    assert q.dtype == k.dtype == torch.float8_e4m3fn
    assert scale.dtype == weights.dtype == torch.float32
    assert first.dtype == last.dtype == torch.int32
    for tensor in (q, k, scale, first, last):
        assert tensor.is_contiguous()
    assert (k.shape[1], scale.shape) == (q.shape[2], k.shape[:1])
    assert q.shape[1] in (32, 64)
    assert bool((first >= 0).all())
    assert bool((last <= k.shape[0]).all())
    dots = torch.einsum("thd,sd->ths", q.double(), k.double()).relu() * scale
    full = torch.einsum("th,ths->ts", weights.double(), dots).float()
    width, compressed = a.get("max_seqlen_k", 0), "max_seqlen_k" in a
    assert a["clean_logits"] is False
    logits = torch.full((q.shape[0], width if compressed else k.shape[0]), math.inf)
    for t in range(q.shape[0]):
        start, stop = int(first[t]), int(last[t])
        at = 0 if compressed else start
        logits[t, at : at + stop - start] = full[t, start:stop]
    return logits


def mla_provider(architecture: int, texts: dict[str, str] = FLASH_MLA, **host: Any):
    bodies = {
        PREFILL: sparse_fwd,
        DECODE: with_kvcache(architecture),
        "flash_mla.get_mla_metadata": lambda: ("new", None),
    }
    signatures = {name: signature_of(text) for name, text in texts.items()}
    recorded = Recorder(signatures, bodies)
    return recorded, flash_mla.kernels(host_of(recorded, architecture, **host))


def gemm_provider(architecture: int):
    signatures = {name: signature_of(text) for name, text in DEEP_GEMM.items()}
    recorded = Recorder(signatures, {LOGITS: mqa_logits})
    return recorded, deep_gemm.kernels(host_of(recorded, architecture))


def run(found: Any, op: str, *args: Any) -> Any:
    kernel = found[op]
    assert kernel.supports(*args) is None
    return kernel.run(*args)


def assert_attention(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert_near(found[0], wanted[0])
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("heads", [8, 128])
def test_flash_mla_gives_the_attention_over_what_each_row_selects(heads, architecture):
    given = cases.packed(heads)
    recorded, found = mla_provider(architecture)
    with ops.use_provider("reference"):
        wanted = ops.sparse_mqa(given.q.double(), given.kv.double(), *given[2:])
    result = run(found, "sparse_mqa", *given)
    assert_attention(result, wanted)
    assert result[1][2].eq(float("-inf")).all()
    assert_attention(run(found, "sparse_mla", *given.parts()), wanted)
    assert recorded.named(PREFILL)[0]["q"].shape[1] == max(heads, 64)


@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
def test_flash_mla_reads_pages_of_bf16_and_of_656_bytes(layout, architecture):
    given = cases.paged(layout)
    recorded, found = mla_provider(architecture)
    with ops.use_provider("reference"):
        wanted = ops.sparse_mqa_paged(given.q.double(), *given[1:])
    assert_attention(run(found, "sparse_mqa_paged", *given), wanted)
    assert len(recorded.named(DECODE)) == (1 if layout == "fp8_ds_mla" else 0)
    out, lse = run(found, "sparse_mqa_paged", *given, None, False)
    assert lse.shape == (0,)
    assert_near(out, wanted[0])


def test_flash_mla_refuses_what_it_has_no_kernel_for():
    given = cases.packed()
    _, found = mla_provider(120)
    assert "no sparse kernel for sm_120" in found["sparse_mqa"].supports(*given)
    _, found = mla_provider(90)
    supports = found["sparse_mqa"].supports
    assert "at most 128 heads" in supports(*cases.packed(heads=129))
    assert "torch.float16 queries" in supports(*cases.packed(dtype=torch.float16))
    assert "bit-equal" in supports(*given, True, True)
    assert "rows of 500 + 76" in supports(*given[:5], 500)
    paged = found["sparse_mqa_paged"].supports
    gap = cases.paged("bf16")._replace(cache=torch.zeros(5, 65, 576).bfloat16()[:, :64])
    assert "without a gap" in paged(*gap)
    assert "layout fp8" in paged(*cases.paged("bf16")[:8], "fp8", torch.ones(1))
    assert "more rows than are selected" in found["sparse_mla"].supports(
        *cases.packed(keys=81).parts()
    )


def test_a_flash_mla_whose_lse_has_base_two_is_refused():
    old = {**FLASH_MLA, PREFILL: "q, kv, indices, sm_scale, d_v="}
    _, found = mla_provider(90, old)
    assert "LSE in base 2" in found["sparse_mqa"].supports(*cases.packed())


@pytest.mark.parametrize("architecture", [90, 100])
def test_deep_gemm_scores_are_those_of_the_rounded_operands(architecture):
    q, k, weights = torch.randn(5, 32, 64), torch.randn(40, 64), torch.randn(5, 32)
    ks, ke = int32(0, 3, 9, 20, 7), int32(40, 30, 9, 33, 5)
    mask = torch.rand(5, 40) < 0.7
    _, found = gemm_provider(architecture)
    rounded = [
        values.double() * scale[..., None] for values, scale in map(quantise_index_key, (q, k))
    ]
    for extra in ((), (mask,)):
        with ops.use_provider("reference"):
            wanted = ops.index_scores(*rounded, weights, ks, ke, *extra)
        scores = run(found, "index_scores", q, k, weights, ks, ke, *extra)
        assert scores.dtype == torch.float32
        assert scores.is_contiguous()
        torch.testing.assert_close(scores.double(), wanted, rtol=1e-5, atol=1e-5)


def test_deep_gemm_takes_operands_that_are_fp8_already_as_they_are():
    ks, ke = causal_intervals([12, 9], cached=60)
    rows, keys = ks.shape[0], int(ke.max())
    # Whole numbers, of which scores are exact.
    q = torch.randint(-7, 8, (rows, 32, 64)).to(FP8)
    k, weights = torch.randint(-7, 8, (keys, 64)).float(), torch.randint(-7, 8, (rows, 32)).float()
    recorded, found = gemm_provider(90)
    for stored in (k.to(FP8), k):
        packed = q, stored, weights, ks, ke
        with ops.use_provider("reference"):
            scores, chosen = ops.index_scores(*packed), ops.index_select(*packed, 72, 16)
        assert torch.equal(run(found, "index_scores", *packed), scores)
        assert torch.equal(run(found, "index_select", *packed, 72, 16), chosen)
        call = recorded.named(LOGITS)[0]
        assert call["q"].data_ptr() == q.data_ptr()
        (values, scale), weights_given = call["kv"], call["weights"]
        assert (values.data_ptr() == stored.data_ptr()) == (stored.dtype == FP8)
        assert torch.equal(weights_given, weights)
        assert bool((scale == 1).all()) == (stored.dtype == FP8)
        recorded.calls.clear()


def test_deep_gemm_selects_what_the_reference_selects_of_the_rounded_operands():
    ks, ke = causal_intervals([12, 9], cached=60)
    rows, keys = ks.shape[0], int(ke.max())
    q, k, weights = torch.randn(rows, 32, 64), torch.randn(keys, 64), torch.randn(rows, 32)
    recorded, found = gemm_provider(90)
    rounded = [
        values.float() * scale[..., None] for values, scale in map(quantise_index_key, (q, k))
    ]
    args = (ks, ke, 72, 16)
    with ops.use_provider("reference"):
        wanted = ops.index_select(*rounded, weights, *args)
        exact = ops.index_select(q, k, weights, *args)
    with ops.options(workspace_bytes=1 << 16):
        result = run(found, "index_select", q, k, weights, *args)
    assert len(recorded.named(LOGITS)) > 1
    ops.check_indices(result, ks, ke, 16)
    assert result.tolist() == wanted.tolist()
    common = sum(len({*a} & {*b}) for a, b in zip(result.tolist(), exact.tolist(), strict=True))
    assert common / result.numel() >= least_recall(torch.float8_e4m3fn, result.numel())


def test_deep_gemm_scores_no_row_of_a_short_batch_and_nothing_of_an_empty_one():
    ks, ke = causal_intervals([6])
    q, k, weights = torch.randn(6, 32, 64), torch.randn(6, 64), torch.randn(6, 32)
    recorded, found = gemm_provider(90)
    result = run(found, "index_select", q, k, weights, ks, ke, 6, 16)
    with ops.use_provider("reference"):
        assert torch.equal(result, ops.index_select(q, k, weights, ks, ke, 6, 16))
    none = run(found, "index_scores", q[:0], k, weights[:0], ks[:0], ke[:0])
    assert none.shape == (0, 6)
    assert recorded.calls == []


def test_deep_gemm_refuses_what_it_has_no_kernel_for():
    ks, ke = causal_intervals([6])
    q, k, weights = torch.randn(6, 8, 64), torch.randn(6, 64), torch.randn(6, 8)
    given = (q, k, weights, ks, ke)
    for architecture, reason in ((90, "8 index heads of 64"), (100, None), (120, "for sm_120")):
        _, found = gemm_provider(architecture)
        refusal = found["index_scores"].supports(*given)
        assert refusal is None if reason is None else reason in refusal
    _, found = gemm_provider(100)
    assert "float64" in found["index_scores"].supports(q.double(), *given[1:])
    supports = found["index_select"].supports
    assert "takes a mask" in supports(*given, 6, 4, torch.ones(6, 6, dtype=torch.bool))
    assert "bit-equal" in supports(*given, 6, 4, None, True)


def test_a_library_that_is_not_there_is_refused_and_named():
    nothing = Recorder({}, {})
    mla, gemm = flash_mla.kernels(host_of(nothing, 90)), deep_gemm.kernels(host_of(nothing, 90))
    ks, ke = causal_intervals([6])
    index = (torch.randn(6, 32, 64), torch.randn(6, 64), torch.randn(6, 32), ks, ke)
    assert f"{PREFILL} is not there" in mla["sparse_mqa"].supports(*cases.packed())
    assert f"{LOGITS} is not there" in gemm["index_scores"].supports(*index)
    blind = replace(host_of(nothing, 90), available=lambda: False)
    for refusal in (
        flash_mla.kernels(blind)["sparse_mqa"].supports(*cases.packed()),
        deep_gemm.kernels(blind)["index_scores"].supports(*index),
    ):
        assert refusal == "there is no CUDA device"
