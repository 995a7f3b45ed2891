"""A routed layer, fused or not, is node for node the layer that one writes by hand."""

from __future__ import annotations

import re
from typing import Any

import _layer_parts as _parts
import pytest
import torch
from _canonical import final_graph
from _graphs import wrapped
from _layer_parts import (
    DIM,
    FIRST_SLOT,
    HEADS,
    LATENT,
    ROTATED,
    TOKENS,
    Parts,
    head_weights,
    index_key,
    latents,
    operands,
)
from _packed_layer import CAPACITY, build, inputs
from _tiny import TOPK
from expecttest import assert_expected_inline
from torch import Tensor, nn

from dsafx import ops
from dsafx.models.layer import DSAAttention
from dsafx.ops.index_cache import index_cache_write
from dsafx.ops.index_query import index_query
from dsafx.ops.mla_cache import mla_cache_write
from dsafx.ops.norm import plain_layer_norm, plain_rms_norm
from dsafx.ops.norm_rope_write import norm_rope_index_write
from dsafx.ops.rope import plain_rope

SHORT, LONG = 12, 40
SHOWN = re.compile(r"^\w+: (dsafx\.\w+|aten\.(mm|bmm|index_put|copy_)\()")


class ByHand(DSAAttention):
    """The layer as somebody writes it who knows the length, the kernels and the fused ops."""

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        ks: Tensor,
        ke: Tensor,
        max_kv_len: int,
        max_query_len: int,
        *,
        kv_c_cache: Tensor,
        k_pe_cache: Tensor,
        write_positions: Tensor,
        index_k_cache: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        config, tokens = self.config, hidden.shape[0]
        latent, k_pe = self.kv_a_proj_with_mqa(hidden).split([32, 8], dim=-1)
        norms = (self.q_a_proj(hidden), self.q_a_layernorm.weight, latent)
        norms = (*norms, self.kv_a_layernorm.weight, k_pe)
        how = (cos, sin, config.norm_eps, config.mla_rope_style)
        indexer = self.indexer
        if indexer is None:
            q_c, kv_c, k_pe = ops.norm_rope(*norms, *how)
        else:
            key = (indexer.wk(hidden), indexer.k_norm.weight, indexer.k_norm.bias)
            q_c, kv_c, k_pe, index_k = ops.norm_rope_index(
                *norms, *key, *how, config.index_norm_eps, config.index_rope_style
            )
            index_k = index_k_cache.index_copy_(0, write_positions, index_k)
        kv_c = kv_c_cache.index_copy_(0, write_positions, kv_c)
        k_pe = k_pe_cache.index_copy_(0, write_positions, k_pe)
        if indexer is not None and max_kv_len > TOPK:
            q, weights = index_query(
                indexer.wq_b(q_c).view(-1, 8, 16),
                nn.functional.linear(hidden, indexer.weights_proj.weight),
                cos,
                sin,
                config.index_rope_style,
                False,
            )
            indices = ops.index_select(q, index_k, weights, ks, ke, max_kv_len, TOPK)
        q_nope, q_pe = self.q_b_proj(q_c).view(tokens, 4, -1).split([16, 8], dim=-1)
        q_pe = plain_rope(q_pe, cos, sin, config.mla_rope_style)
        rows = (kv_c, k_pe, ks, ke, max_kv_len)
        attend = self.dense if max_kv_len <= TOPK else self.sparse
        return self.o_proj(attend(q_nope, q_pe, *rows, indices).flatten(1)), indices

    def dense(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        ks: Tensor,
        ke: Tensor,
        max_kv_len: int,
        indices: Tensor | None,
    ) -> Tensor:
        kv = torch.mm(kv_c, self.kv_b_proj.weight.t()).view(CAPACITY, 4, 16 + 24)
        return ops.dense_mha(
            q_nope,
            kv[..., :16],
            kv[..., 16:],
            ks,
            ke,
            max_kv_len,
            self.config.softmax_scale,
            return_lse=False,
            q_pe=q_pe,
            k_pe=k_pe,
        )[0]

    def sparse(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        ks: Tensor,
        ke: Tensor,
        max_kv_len: int,
        indices: Tensor | None,
    ) -> Tensor:
        up = self.kv_b_proj.weight.view(4, 16 + 24, 32)
        absorbed = torch.bmm(q_nope.transpose(0, 1), up[:, :16]).transpose(0, 1)
        scale = self.config.softmax_scale
        latent, _ = ops.sparse_mla(absorbed, q_pe, kv_c, k_pe, indices, ks, scale, False)
        out = torch.bmm(latent.transpose(0, 1), up[:, 16:].transpose(1, 2))
        return out.transpose(0, 1)


def both(family: str, with_indexer: bool, tokens: int) -> tuple[str, str, str, bool]:
    """Our graph, the graph by hand, our report, and whether results and caches are equal."""
    graphs, results = [], []
    report = ""
    for kind in (ByHand, DSAAttention):
        layer = build(kind, family, with_indexer)
        rows, caches = inputs(tokens, with_indexer=with_indexer)

        def step(rows: Any, caches: Any, layer: Any = layer) -> Tensor:
            return layer(*rows, **caches)[0]

        graph, result, about = final_graph(step, rows, caches, fuse="always")
        assert about.problem is None
        graphs.append(graph)
        results.append((result, *caches.values()))
        report = str(about)
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return graphs[1], graphs[0], report, equal


def shown(graph: str, report: str) -> str:
    lines = [line for line in graph.split("\n") if SHOWN.match(line)]
    lines += [line for line in report.split("\n") if line.startswith("fuse_")]
    return "\n".join(wrapped(line) for line in lines)


CASES = [
    pytest.param("deepseek", True, SHORT, id="half index, short"),
    pytest.param("deepseek", True, LONG, id="half index, long"),
    pytest.param("glm", True, SHORT, id="interleaved index, short"),
    pytest.param("glm", True, LONG, id="interleaved index, long"),
    pytest.param("glm", False, SHORT, id="no indexer, short"),
    pytest.param("glm", False, LONG, id="no indexer, long"),
]


@pytest.mark.parametrize(("family", "with_indexer", "tokens"), CASES)
def test_a_routed_fused_layer_is_node_for_node_the_one_by_hand(
    family: str, with_indexer: bool, tokens: int
):
    ours, by_hand, _, equal = both(family, with_indexer, tokens)
    assert ours.split("\n") == by_hand.split("\n")
    assert equal


def paged(a: Parts) -> tuple[Tensor, Tensor]:
    """A layer up to its selection, in semantic ops, with paged caches."""
    q_c, kv_c, k_pe = latents(a)
    index_cache_write(index_key(a), a["index_cache"], a["index_slots"], "ue8m0")
    mla_cache_write(kv_c, k_pe, a["cache"], a["slots"], "bf16")
    return q_c, select_paged(a, _parts.index_query(a, q_c), head_weights(a))


def paged_by_hand(a: Parts) -> tuple[Tensor, Tensor]:
    both = a["x"] @ a["kv_a"]
    q_c, _, _, _ = norm_rope_index_write(
        *(a["x"] @ a["q_a"], a["q_w"], both[..., :LATENT], a["kv_w"]),
        *(both[..., LATENT:].reshape(-1, ROTATED), a["x"] @ a["wk"], a["k_w"], a["k_b"]),
        *(a["cos"], a["sin"], a["cache"], a["slots"], a["index_cache"], a["index_slots"]),
        *(1e-6, "interleaved", 1e-6, "half", "bf16", "ue8m0"),
    )
    raw = (q_c @ a["wq_b"]).view(-1, HEADS, DIM)
    q, weights = index_query(raw, a["x"] @ a["weights_proj"], a["cos"], a["sin"], "half", False)
    return q_c, select_paged(a, q, weights)


def select_paged(a: Parts, q: Tensor, weights: Tensor) -> Tensor:
    sees = (a["table"], a["ks"], a["ke"] + FIRST_SLOT, TOKENS + FIRST_SLOT)
    return ops.index_select_paged(q, a["index_cache"], weights, *sees, _parts.TOPK, "ue8m0")


def test_a_layer_with_paged_caches_is_node_for_node_the_one_by_hand():
    ours, theirs = operands(), operands()
    graph, results, report = final_graph(paged, ours, fuse="always")
    by_hand, expected, _ = final_graph(paged_by_hand, theirs, fuse="always")
    assert report.problem is None
    assert graph.split("\n") == by_hand.split("\n")
    assert "dsafx.norm_rope_index_write" in graph
    pairs = list(zip(results, expected, strict=True))
    pairs += [(ours[name], theirs[name]) for name in ("cache", "index_cache")]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_long_layer_in_short():
    ours, _, report, _ = both("deepseek", True, LONG)
    assert_expected_inline(
        shown(ours, report),
        """\
mm_default: aten.mm(input_0, permute_default)
mm_default_1: aten.mm(input_0, permute_default_1)
mm_default_2: aten.mm(input_0, permute_default_2)
norm_rope_index_default: dsafx.norm_rope_index(mm_default, input_2, getitem, input_4,
    getitem_1, mm_default_2, input_6, input_7, input_8, input_9, 1e-06, 'interleaved_to_half',
    1e-06, 'half')
mm_default_3: aten.mm(getitem_2, permute_default_3)
bmm_default: aten.bmm(permute_default_4, slice_tensor)
index_put_default: aten.index_put(input_12, [input_13], getitem_5)
index_put_default_1: aten.index_put(input_14, [input_13], getitem_6)
mm_default_4: aten.mm(getitem_2, permute_default_6)
mm_default_5: aten.mm(input_0, permute_default_7)
index_query_default: dsafx.index_query(reshape_default_2, mm_default_5, input_8, input_9,
    'half', False)
index_put_default_2: aten.index_put(input_17, [input_13], getitem_8)
index_select_default: dsafx.index_select(getitem_7, index_put_default_2, getitem_9, input_18,
    input_19, 40, 16)
sparse_mla_default: dsafx.sparse_mla(permute_default_5, cat_default, index_put_default,
    index_put_default_1, index_select_default, input_18, 0.297843476154079, False)
bmm_default_1: aten.bmm(permute_default_8, permute_default_9)
mm_default_6: aten.mm(reshape_default_3, permute_default_11)
copy__default: aten.copy_(input_17, index_put_default_2)
copy__default_1: aten.copy_(input_12, index_put_default)
copy__default_2: aten.copy_(input_14, index_put_default_1)
fuse_norm_rope: 1 rewritten; rope became part of norm_rope_index
fuse_index_query: 1 rewritten; index_select became the reader of index_query
fuse_cache_write: 0 rewritten""",
    )


def test_a_short_layer_without_an_indexer_in_short():
    ours, _, report, _ = both("glm", False, SHORT)
    assert_expected_inline(
        shown(ours, report),
        """\
mm_default: aten.mm(input_0, permute_default)
mm_default_1: aten.mm(input_0, permute_default_1)
norm_rope_default: dsafx.norm_rope(mm_default, input_2, getitem, input_4, getitem_1, input_5,
    input_6, 1e-06, 'interleaved_to_half')
mm_default_2: aten.mm(getitem_2, permute_default_2)
index_put_default: aten.index_put(input_8, [input_9], getitem_4)
mm_default_3: aten.mm(index_put_default, permute_default_3)
index_put_default_1: aten.index_put(input_13, [input_9], getitem_6)
dense_mha_default: dsafx.dense_mha(getitem_3, slice_tensor, slice_tensor_1, input_11,
    input_12, 12, 0.2041241452319315, None, False, cat_default, index_put_default_1)
mm_default_4: aten.mm(reshape_default_2, permute_default_4)
copy__default: aten.copy_(input_8, index_put_default)
copy__default_1: aten.copy_(input_13, index_put_default_1)
fuse_norm_rope: 1 rewritten; rope became part of norm_rope
fuse_index_query: 0 rewritten
fuse_cache_write: 0 rewritten""",
    )


class ShortPrefillByHand(DSAAttention):
    """What somebody would write for prompts of at most K tokens: no selection, dense attention."""

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        ks: Tensor,
        ke: Tensor,
        max_kv_len: int,
        max_query_len: int,
        *,
        kv_c_cache: Tensor,
        k_pe_cache: Tensor,
        index_k_cache: Tensor,
        write_positions: Tensor,
    ) -> Tensor:
        heads, nope, rope, v = 4, 16, 8, 24
        latent, k_pe = self.kv_a_proj_with_mqa(hidden).split([32, rope], dim=-1)
        kv_c = plain_rms_norm(latent, self.kv_a_layernorm.weight, 1e-6)
        k_pe = plain_rope(k_pe, cos, sin, "interleaved_to_half")
        norm = self.indexer.k_norm
        index_k = plain_layer_norm(self.indexer.wk(hidden), norm.weight, norm.bias, 1e-6)
        turned, passed = index_k.split([rope, 8], dim=-1)
        turned = plain_rope(turned, cos, sin, "interleaved_to_half")
        index_k_cache.index_copy_(0, write_positions, torch.cat((turned, passed), dim=-1))
        kv_c = kv_c_cache.index_copy_(0, write_positions, kv_c)
        k_pe = k_pe_cache.index_copy_(0, write_positions, k_pe)
        q_c = plain_rms_norm(self.q_a_proj(hidden), self.q_a_layernorm.weight, 1e-6)
        q = self.q_b_proj(q_c).view(hidden.shape[0], heads, -1)
        q_nope, q_pe = q.split([nope, rope], dim=-1)
        q_pe = plain_rope(q_pe, cos, sin, "interleaved_to_half")
        kv = torch.mm(kv_c, self.kv_b_proj.weight.t()).view(CAPACITY, heads, nope + v)
        out, _ = ops.dense_mha(
            q_nope,
            kv[..., :nope],
            kv[..., nope:],
            ks,
            ke,
            max_kv_len,
            self.config.softmax_scale,
            return_lse=False,
            q_pe=q_pe,
            k_pe=k_pe,
        )
        return self.o_proj(out.flatten(1))


def final(layer: nn.Module, take_first: bool) -> tuple[list[str], list[Tensor]]:
    """The graph behind all passes; the layer's output and the caches that it wrote."""
    rows, caches = inputs(12)

    def step(args: Any, caches: Any) -> Tensor:
        result = layer(*args, **caches)
        return result[0] if take_first else result

    graph, result, _ = final_graph(step, rows, caches)
    return graph.split("\n"), [result, *caches.values()]


def test_the_short_prefill_graph_is_that_of_a_layer_written_by_hand():
    assert TOPK > 12
    by_hand, expected = final(build(ShortPrefillByHand), take_first=False)
    ours, results = final(build(), take_first=True)
    assert ours == by_hand
    assert any("dsafx.dense_mha" in term for term in by_hand)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
