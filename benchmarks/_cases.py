"""The cases: an op or a layer, the lines of transformers that it replaces, and its floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import _attention_cases as attention
import _compiled_cases as compiled
import _peers as peers
import torch
from _dispatched import assert_neither_gemm_nor_topk
from _families import angles
from _measure import Floor
from _setting import Prepared, Setting, causal, causal_mask, size_of
from torch import Tensor

from dsafx import ops

_MARGIN = 1e-5
_CHECKED_ROWS = 64


def _select(setting: Setting, real: int) -> Prepared:
    tokens, dims = setting.length(real), setting.dims
    q, k, weights = setting.index_operands(tokens)
    ks, ke = causal(tokens)
    mask = causal_mask(tokens)[0]
    folded = weights * dims.index_head_dim**-0.5
    topk, indexer = dims.index_topk, setting.attention.indexer
    scored = int(ke[ke > topk].sum())

    def ours() -> Tensor:
        return ops.index_select(q, k, folded, ks, ke, tokens, topk)

    def check(indices: Tensor) -> str:
        ops.check_indices(indices, ks, ke, topk)
        rows = _assert_highest(indices, q, k, folded, ke)
        return f"C8 on all rows, C10 on {rows} rows against float64 scores"

    return Prepared(
        tokens,
        tokens,
        ours,
        lambda: peers.score_and_select(indexer, q[None], k[None], weights[None], mask),
        # Scores of all heads and their product with the scale, or with ReLU.
        peer_bytes=2 * 4 * tokens * tokens * dims.index_n_heads,
        floor=Floor(
            2 * scored * dims.index_n_heads * dims.index_head_dim,
            size_of(q, k, weights, ks, ke) + 4 * tokens * topk,
        ),
        check=check,
    )


def _assert_highest(indices: Tensor, q: Tensor, k: Tensor, weights: Tensor, ke: Tensor) -> int:
    """Assert on sampled long rows that no key left out scores above one that was taken."""
    topk = indices.shape[1]
    long = (ke > topk).nonzero()[:, 0]
    sample = long[:: max(1, long.shape[0] // _CHECKED_ROWS)]
    for row in sample.tolist():
        seen = int(ke[row])
        dots = (k[:seen].double() @ q[row].double().t()).relu_()
        scores = dots @ weights[row].double()
        taken = torch.zeros(seen, dtype=torch.bool)
        taken[indices[row].long()] = True
        excess = float(scores[~taken].max() - scores[taken].min())
        margin = _MARGIN * max(1.0, float(scores.abs().max()))
        if excess > margin:
            raise AssertionError(f"row {row} leaves out a key that scores higher by {excess:.3g}")
    return sample.shape[0]


def index_select(setting: Setting) -> Prepared:
    """Scoring and exact top-k of a prompt of 2 K tokens."""
    return _select(setting, 4096)


def index_select_long(setting: Setting) -> Prepared:
    """The same for a prompt of 4 K tokens."""
    return _select(setting, 8192)


def short_prefill(setting: Setting) -> Prepared:
    """The selection of a prompt of K / 2 tokens: no token is scored."""
    prepared = _select(setting, 1024)

    def check(indices: Tensor) -> str:
        assert_neither_gemm_nor_topk(prepared.ours)
        assert prepared.check is not None
        prepared.check(indices)
        return "C8 on all rows; no GEMM and no top-k is dispatched"

    return Prepared(**{**vars(prepared), "check": check})


def select_topk(setting: Setting) -> Prepared:
    """The exact selection from given scores, against ``torch.topk(sorted=False)``."""
    tokens, topk = setting.length(4096), setting.dims.index_topk
    scores = torch.randn(tokens, tokens)
    ks = torch.zeros(tokens, dtype=torch.int32)
    ke = torch.full_like(ks, tokens)
    return Prepared(
        tokens,
        tokens,
        lambda: ops.select_topk(scores, ks, ke, topk),
        lambda: scores.topk(topk, dim=-1, sorted=False),
        peer_bytes=12 * tokens * topk,
        floor=Floor(0, size_of(scores) + 4 * tokens * topk),
        notes={"the exact selection over torch.topk(sorted=False)": ("ours", "peer")},
    )


def norm_rope(setting: Setting) -> Prepared:
    """Both norms and the rotation of the key, for K tokens."""
    tokens, dims, attention = setting.length(2048), setting.dims, setting.attention
    q_c = setting.random(tokens, dims.q_lora_rank)
    kv_c = setting.random(tokens, dims.kv_lora_rank)
    k_pe = setting.random(tokens, dims.qk_rope_head_dim)
    norms = attention.q_a_layernorm, attention.kv_a_layernorm
    positions = torch.arange(tokens)[None]
    both = angles(setting.layer.plain, q_c, positions)
    cos, sin = (part[0, :, : dims.qk_rope_head_dim // 2].float() for part in both)
    return Prepared(
        tokens,
        tokens,
        lambda: ops.norm_rope(
            q_c,
            norms[0].weight,
            kv_c,
            norms[1].weight,
            k_pe,
            cos,
            sin,
            norms[0].variance_epsilon,
            "interleaved_to_half",
        ),
        lambda: peers.norms_and_rope(attention, q_c[None], kv_c[None], k_pe[None, None], both),
        peer_bytes=16 * q_c.numel(),
        floor=Floor(0, 2 * size_of(q_c, kv_c, k_pe) + size_of(cos, sin)),
        comparable=True,
    )


CASES: Mapping[str, Callable[[Setting], Prepared]] = {
    case.__name__: case
    for case in (
        short_prefill,
        norm_rope,
        select_topk,
        attention.decode_attention,
        attention.decode_layer,
        attention.decode_layer_long,
        attention.decode_layer_longest,
        attention.dense_mha,
        index_select,
        attention.masked_mha,
        attention.routed,
        index_select_long,
        compiled.compiled_decode,
        compiled.compiled_prefill,
        compiled.compiled_prefill_long,
    )
}
"""All cases by name, the cheap ones first."""
