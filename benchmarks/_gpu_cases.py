"""Every op that launches kernels, and the sizes at which it is measured, the important ones first.

A budget ends a run somewhere in this list: first each op once where it matters most, then the
lengths, contexts and head counts around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import _gpu_attention as attention
import _gpu_index as index
import _gpu_rows as rows
from _gpu_setting import Case, Family, Scene, Work

BUILDERS: Mapping[str, Callable[[Scene], Work]] = {
    build.__name__: build
    for build in (
        attention.sparse_mla,
        index.index_select,
        attention.sparse_mqa_paged,
        index.index_select_paged,
        attention.mla_attention,
        index.index_scores,
        attention.dense_mha,
        attention.masked_mha,
        index.select_topk,
        rows.norm_rope_index_write,
        index.index_query,
        attention.mla_attention_paged,
        attention.sparse_mqa,
        rows.norm_rope_index,
        rows.norm_rope_write,
        rows.norm_rope,
        rows.mla_cache_gather,
        rows.index_cache_gather,
        attention.merge_attention,
        index.index_select_partial,
        index.merge_selection,
        rows.mla_cache_write,
        rows.index_cache_write,
        index.causal_positions,
        rows.rope,
        rows.rms_norm,
        rows.layer_norm,
    )
}
"""By the op's name."""

_GLM, _DEEPSEEK = Family.GLM, Family.DEEPSEEK
_LONGEST = 131_072

_FIRST = (
    Case("sparse_mla", _GLM, 4096, 32_768),
    Case("index_select", _GLM, 4096, 32_768),
    Case("mla_attention", _GLM, 2048, 2048, variant="skip"),
    Case("sparse_mqa_paged", _GLM, 64, 32_768, 64, variant="bf16"),
    Case("index_select_paged", _GLM, 64, 32_768, 64),
    Case("index_scores", _GLM, 4096, 32_768),
    Case("index_select_paged", _GLM, 4096, 32_768),
    Case("mla_attention", _GLM, 8192, 8192),
    Case("dense_mha", _GLM, 2048, 2048),
    Case("masked_mha", _GLM, 8192, 8192),
    Case("select_topk", _GLM, 4096, 32_768),
    Case("norm_rope_index_write", _GLM, 8192, 8192, variant="bf16"),
    Case("index_query", _GLM, 8192, 8192),
    Case("sparse_mqa_paged", _GLM, 64, 32_768, 64, variant="fp8_ds_mla"),
    Case("mla_attention_paged", _GLM, 64, 32_768, 64),
)
_EACH_ONCE = (
    Case("sparse_mqa", _GLM, 4096, 32_768),
    Case("norm_rope_index_write", _GLM, 64, 4096, 64, variant="fp8_ds_mla"),
    Case("index_query", _GLM, 8192, 8192, variant="fp8"),
    Case("mla_cache_gather", _GLM, 8192, _LONGEST, variant="fp8_ds_mla"),
    Case("index_cache_gather", _GLM, 8192, _LONGEST),
    Case("merge_attention", _GLM, 4096, 4096),
    Case("index_select_partial", _GLM, 4096, 16_384),
    Case("merge_selection", _GLM, 1024, 16_384),
    Case("norm_rope_index", _GLM, 8192, 8192),
    Case("norm_rope_write", _GLM, 8192, 8192, variant="bf16"),
    Case("norm_rope", _GLM, 8192, 8192),
    Case("mla_cache_write", _GLM, 8192, 8192, variant="fp8_ds_mla"),
    Case("index_cache_write", _GLM, 8192, 8192),
    Case("causal_positions", _GLM, 8192, 8192),
    Case("rope", _GLM, 8192, 8192),
    Case("rms_norm", _GLM, 8192, 8192),
    Case("layer_norm", _GLM, 8192, 8192),
)


def _around() -> Iterator[Case]:
    """Other lengths, contexts and head counts of the ops that a step's time consists of."""
    for tokens in (512, 1024):
        yield Case("mla_attention", _GLM, tokens, tokens, variant="skip")
    for heads in (8, 16, 32, 128):
        yield Case("sparse_mla", _GLM, 4096, 32_768, heads=heads)
        yield Case("sparse_mqa_paged", _GLM, 64, 32_768, 64, heads, "bf16")
    for tokens, keys in ((1, 4096), (1, _LONGEST), (8, _LONGEST), (1024, 8192), (8192, _LONGEST)):
        yield Case("sparse_mla", _GLM, tokens, keys)
        yield Case("index_select", _GLM, tokens, keys)
    for requests in (1, 8, 128):
        yield Case("sparse_mqa_paged", _GLM, requests, 8192, requests, variant="bf16")
        yield Case("index_select_paged", _GLM, requests, 8192, requests)
    yield Case("index_select_paged", _GLM, 8, _LONGEST, 8)
    yield Case("sparse_mqa_paged", _GLM, 8, _LONGEST, 8, variant="fp8_ds_mla")
    yield Case("mla_attention", _GLM, 1, _LONGEST)
    yield Case("dense_mha", _GLM, 8192, 8192)
    yield Case("masked_mha", _GLM, 2048, 4096)
    yield Case("select_topk", _GLM, 1, _LONGEST)
    yield Case("select_topk", _GLM, 64, _LONGEST)


def _all() -> Iterator[Case]:
    yield from _FIRST
    yield from (replace(case, family=_DEEPSEEK) for case in _FIRST)
    yield from _EACH_ONCE
    around = tuple(_around())
    yield from around
    yield from (replace(case, family=_DEEPSEEK) for case in (*around, *_EACH_ONCE))


CASES: tuple[Case, ...] = tuple(_all())
"""All cases, the most important first."""
