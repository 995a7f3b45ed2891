"""What FlashInfer's functions document, in float64; base 2 LSE, undefined results left as NaN."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
from types import SimpleNamespace
from typing import Any

import torch
from _flashinfer_signatures import SIGNATURES
from _foreign import Body, Recorder, host_of, signature_of
from torch import Tensor

from dsafx.ops._host import version_numbers
from dsafx.ops.flashinfer import kernels
from dsafx.ops.mla_cache import load_latents

MIB = 1 << 20


def recorder(version: str, bodies: dict[str, Body] | None = None) -> Recorder:
    """FlashInfer of this ``version``, one of ``SIGNATURES``."""
    texts = SIGNATURES[version]
    signatures = {name: signature_of(text) for name, text in texts.items()}
    return Recorder(signatures, BODIES if bodies is None else bodies)


def numbers(version: str) -> tuple[int, ...]:
    return version_numbers(version)


def provider(architecture: int, version: str = "0.7.4", bodies: Any = None, **host: Any):
    """The recorder, and the kernels on it."""
    recorded = recorder(version, bodies)
    return recorded, kernels(host_of(recorded, architecture, numbers(version), **host))


def attend64(
    q: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out and base-2 lse of q [t, N, D] over keys [t, s, D]; NaN for a row without a key."""
    scores = torch.einsum("tnd,tsd->tns", q.double(), keys.double()) * scale
    scores = scores.masked_fill(~valid[:, None], -math.inf)
    lse = scores.logsumexp(-1) / math.log(2.0)
    return torch.einsum("tns,tsv->tnv", scores.softmax(-1), values.double()), lse


def _chosen(rows: Tensor, slots: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that ``slots`` [T, K] names; valid ones stand first, and -1 behind them."""
    assert slots.dtype == lengths.dtype == torch.int32
    assert slots.is_contiguous()
    valid = torch.arange(slots.shape[1]) < lengths[:, None]
    assert bool((lengths >= 1).all())
    assert bool((slots[valid] >= 0).all())
    assert bool((slots[valid] < rows.shape[0]).all())
    assert bool((slots[~valid] == -1).all())
    return rows[slots.clamp(min=0).long()].masked_fill(~valid[..., None], 0), valid


def _sparse_rows(kv_cache: Tensor) -> Tensor:
    """[tokens, 576] of pages in one block of memory."""
    assert kv_cache.is_contiguous()
    if kv_cache.dtype != torch.uint8:
        return kv_cache.flatten(0, 1)
    slot = torch.arange(kv_cache.shape[0] * kv_cache.shape[1])
    return torch.cat(load_latents(kv_cache, slot, "fp8_ds_mla", None, 512, None), dim=-1)


def trtllm_batch_decode(**a: Any) -> Any:
    query, pages, width = a["query"], a["kv_cache"], a["sparse_mla_top_k"]
    tokens, one, heads, _ = query.shape
    latent = a["kv_lora_rank"]
    assert one == 1
    assert tokens <= 65_535
    assert query.is_contiguous()
    assert a["block_tables"].shape == (tokens, 1, width)
    assert a["max_seq_len"] == width
    assert query.shape[3] == latent + a["qk_rope_head_dim"]
    assert a["bmm2_scale"] == 1.0
    assert isinstance(a["bmm1_scale"], float)
    if a["backend"] == "trtllm-gen":
        assert pages.dtype == query.dtype == torch.bfloat16
        assert pages.shape[1] in (32, 64)
        assert not 64 < heads < 128
        assert width % 128 == 0
        slab = 8 * heads * tokens * 256 + MIB if a["return_lse"] else 0
        assert a["workspace_buffer"].numel() >= 128 * MIB + slab
    else:
        assert a["backend"] == "sparse"
        assert pages.shape[1:] == (64, 656)
        assert heads in (8, 16, 32, 64, 128)
        assert width in (128, 512, 1024, 2048)
        assert tokens <= 64 or width == 2048
        assert a["kv_scale_format"] == "arbitrary_fp32"
    keys, valid = _chosen(_sparse_rows(pages), a["block_tables"][:, 0], a["seq_lens"])
    out, lse = attend64(query[:, 0], keys, keys[..., :latent], valid, a["bmm1_scale"])
    a["out"][:, 0] = out.to(a["out"].dtype)
    if a["return_lse"]:
        a["lse"].copy_(lse)
        return a["out"], a["lse"]
    assert a.get("lse") is None
    return a["out"]


def sm120_run(state: dict[str, Any], **a: Any) -> Tensor:
    q, indices = a["q"], a["indices"]
    assert state["kv_scale_format"] == "arbitrary_fp32"
    assert q.dtype == torch.bfloat16
    assert q.is_contiguous()
    assert a["kv_cache"].shape[2] == 656
    assert 1 <= q.shape[1] <= 128
    if q.shape[0] > 64:
        assert q.shape[1] in (8, 16, 32, 64, 128)
        assert indices.shape[1] % 64 == 0
    keys, valid = _chosen(_sparse_rows(a["kv_cache"]), indices, a["topk_length"])
    out, lse = attend64(q, keys, keys[..., :512], valid, a["sm_scale"])
    a["output"].copy_(out)
    a["out_lse"].copy_(lse)
    return a["out_lse"]


def mla_plan(state: dict[str, Any], **a: Any) -> None:
    metadata = a.pop("metadata", None)
    state.update(a if metadata is None else {**a, **vars(metadata)})
    if metadata is not None:
        assert a["query_layout"] == a["kv_cache_layout"] == "split"
    assert state["backend"] == "fa3"
    assert state["page_size"] == 1
    assert state["causal"] is False
    counts = state["kv_indptr"].diff()
    assert torch.equal(counts, state["kv_len_arr"])
    assert int(state["kv_indptr"][-1]) == state["kv_indices"].shape[0]
    assert torch.equal(state["qo_indptr"], torch.arange(counts.shape[0] + 1, dtype=torch.int32))


def mla_run(state: dict[str, Any], **a: Any) -> Any:
    q_nope, q_pe = a["query"] if "query" in a else (a["q_nope"], a["q_pe"])
    ckv, kpe = a["kv_cache"] if "kv_cache" in a else (a["ckv_cache"], a["kpe_cache"])
    assert q_nope.dtype == state["q_data_type"]
    assert ckv.dtype == kpe.dtype == state["kv_data_type"]
    assert (q_nope.shape[1:], q_pe.shape[2]) == (
        (state["num_heads"], state["head_dim_ckv"]),
        state["head_dim_kpe"],
    )
    wanted = a.get("return_lse", False)
    assert state.get("lse_mode", "base2" if wanted else "none") == ("base2" if wanted else "none")
    out = q_nope.new_full(q_nope.shape, math.nan)
    lse = torch.full(q_nope.shape[:2], math.nan)
    bounds = state["kv_indptr"].tolist()
    for t, (start, stop) in enumerate(itertools.pairwise(bounds)):
        pages = state["kv_indices"][start:stop].long()
        keys = torch.cat([ckv[pages, 0], kpe[pages, 0]], dim=-1)[None]
        query = torch.cat([q_nope[t], q_pe[t]], dim=-1)[None]
        valid = torch.ones(1, stop - start, dtype=torch.bool)
        part, part_lse = attend64(query, keys, keys[..., : ckv.shape[2]], valid, state["sm_scale"])
        out[t], lse[t] = part[0].to(out.dtype), part_lse[0]
    return (out, lse) if wanted else out


def ragged_plan(state: dict[str, Any], **a: Any) -> None:
    state.update(a)
    assert a["num_qo_heads"] == a["num_kv_heads"]
    assert (a["head_dim_qk"], a["head_dim_vo"]) in {(64, 64), (128, 128), (192, 128), (256, 256)}
    assert a["qo_indptr"].device.type == a["kv_indptr"].device.type == "cpu"


def ragged_run(state: dict[str, Any], **a: Any) -> Any:
    assert a["q"].dtype == state["q_data_type"]
    _ragged(
        a,
        state["qo_indptr"],
        state["kv_indptr"],
        state["causal"],
        state["sm_scale"],
        a["q"],
        a["k"],
    )
    return a["out"], a["lse"]


def trtllm_ragged(**a: Any) -> Any:
    q, k, v = a["query"], a["key"], a["value"]
    assert (q.shape[2], k.shape[2], v.shape[2]) in {
        (192, 192, 128),
        (128, 128, 128),
        (256, 256, 256),
    }
    rows, keys = a["cum_seq_lens_q"], a["cum_seq_lens_kv"]
    assert rows.shape[0] - 1 == a["batch_size"] <= 65_535
    assert torch.equal(a["seq_lens"], keys.diff())
    assert torch.equal(a["kv_seq_lens_cpu"], keys.diff())
    assert torch.equal(a["q_seq_lens_cpu"], rows.diff())
    assert bool((rows.diff() > 0).all())
    assert bool((keys.diff() > 0).all())
    assert (int(rows.diff().max()), int(keys.diff().max())) == (a["max_q_len"], a["max_kv_len"])
    tiles = -(-a["max_q_len"] // 256) * 256
    slab = 8 * q.shape[1] * a["batch_size"] * tiles + MIB
    assert a["workspace_buffer"].numel() >= 128 * MIB + slab
    assert a["window_left"] == -1
    a["v"] = v
    _ragged(a, rows, keys, a["is_causal"], a["bmm1_scale"], q, k)
    return a["out"], a["lse"]


def _ragged(
    a: dict[str, Any], rows: Tensor, keys: Tensor, causal: bool, scale: float, q: Tensor, k: Tensor
) -> None:
    """Causal is aligned at the end: the last row of a request sees all of its keys."""
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert (int(rows[-1]), int(keys[-1])) == (q.shape[0], k.shape[0])
    for b in range(rows.shape[0] - 1):
        first, last = int(keys[b]), int(keys[b + 1])
        for row in range(int(rows[b]), int(rows[b + 1])):
            stop = last - (int(rows[b + 1]) - 1 - row if causal else 0)
            part, lse = q[row].double()[:, None], None
            scores = torch.einsum("nqd,snd->ns", part, k[first:stop].double()) * scale
            lse = scores.logsumexp(-1) / math.log(2.0)
            out = torch.einsum("ns,snv->nv", scores.softmax(-1), a["v"][first:stop].double())
            a["out"][row], a["lse"][row] = out.to(a["out"].dtype), lse


def top_k_ragged(**a: Any) -> Tensor:
    """Highest first; a tie goes to the lowest position, and NaN counts as the highest of all."""
    scores, k = a["input"], a["k"]
    assert a["tie_break"] == 1
    assert a.get("deterministic", False) is False
    assert k <= min(2048, scores.shape[1])
    found = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
    for t in range(scores.shape[0]):
        start, length = int(a["row_starts"][t]), int(a["lengths"][t])
        row = scores[t, start : start + length]
        assert row.shape[0] == length
        bits = row.view(torch.int32)
        rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        order = sorted(range(length), key=lambda s, rank=rank: (-int(rank[s]), s))[:k]
        # The order of what is selected is not promised.
        found[t, : len(order)] = torch.tensor(order[::-1]) + a["offsets"][t]
    return found


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    for tensor in (v_a, s_a, v_b, s_b):
        assert tensor.is_contiguous()
    assert s_a.dtype == s_b.dtype == torch.float32
    top = torch.maximum(s_a, s_b).double()
    w_a, w_b = torch.exp2(s_a - top), torch.exp2(s_b - top)
    v = (w_a[..., None] * v_a.double() + w_b[..., None] * v_b.double()) / (w_a + w_b)[..., None]
    return v.to(v_a.dtype), (top + torch.log2(w_a + w_b)).float()


_MLA = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
_RAGGED = "flashinfer.BatchPrefillWithRaggedKVCacheWrapper"

BODIES: dict[str, Body] = {
    "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla": trtllm_batch_decode,
    "flashinfer.mla.SparseMLASm120Wrapper.run": sm120_run,
    "flashinfer.mla.MLAPlanMetadata.csr": SimpleNamespace,
    f"{_MLA}.plan": mla_plan,
    f"{_MLA}.run": mla_run,
    f"{_RAGGED}.plan": ragged_plan,
    f"{_RAGGED}.run": ragged_run,
    "flashinfer.prefill.trtllm_ragged_attention_deepseek": trtllm_ragged,
    "flashinfer.top_k_ragged_transform": top_k_ragged,
    "flashinfer.merge_state": merge_state,
}


def real_signatures() -> dict[str, inspect.Signature]:
    """Those of the installed FlashInfer, by the names of ``SIGNATURES``.

    Raises:
        ImportError: it is not installed, or one of its dependencies is not.
    """
    found = {}
    for name in SIGNATURES["0.7.4"]:
        module = "flashinfer.mla" if name.startswith("flashinfer.mla.") else "flashinfer"
        if name.startswith("flashinfer.prefill."):
            module = "flashinfer.prefill"
        owner: Any = importlib.import_module(module)
        *parents, last = name.removeprefix(f"{module}.").split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        value = getattr(owner, last, None)
        if value is None:
            continue
        signature = inspect.signature(value)
        if parents and next(iter(signature.parameters)) == "self":
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        found[name] = signature
    return found
