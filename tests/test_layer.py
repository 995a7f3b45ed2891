"""The packed layer: the function of transformers' module, caches, shared layers."""

from __future__ import annotations

import itertools
from typing import Any

import _tiny
import pytest
import torch
from _tiny import FAMILIES, TOPK
from torch import Tensor

from dsafx import ops, routing
from dsafx.models import record_decisions
from dsafx.models.config import DSAConfig
from dsafx.models.layer import DSAAttention, MQAOnlyAttention

HIDDEN = 64


def rows(*lengths: int) -> tuple[Tensor, Tensor]:
    """Causal intervals of fresh requests, packed one behind the other."""
    starts = [sum(lengths[:request]) for request in range(len(lengths))]
    ks = [torch.full((n,), start) for start, n in zip(starts, lengths, strict=True)]
    ke = [torch.arange(start + 1, start + n + 1) for start, n in zip(starts, lengths, strict=True)]
    return torch.cat(ks).int(), torch.cat(ke).int()


def angles(model: Any, *lengths: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2] of fresh requests."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def their_attention(model: Any, layer_idx: int, hidden: Tensor) -> Tensor:
    """What transformers' module of layer ``layer_idx`` makes of one request [S, hidden]."""
    length = hidden.shape[0]
    positions = torch.arange(length)[None]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    out: Tensor = model.model.layers[layer_idx].self_attn(
        hidden[None], model.model.rotary_emb(hidden, positions), mask
    )[0]
    return out[0]


def our_layer(model: Any, layer_idx: int, kind: type[DSAAttention] = DSAAttention) -> DSAAttention:
    layer = kind(DSAConfig.from_transformers(model.config), layer_idx)
    layer.load_state_dict(model.model.layers[layer_idx].self_attn.state_dict())
    return layer.eval()


@pytest.mark.parametrize("kind", [DSAAttention, MQAOnlyAttention])
@pytest.mark.parametrize("lengths", [(TOPK - 1, 5), (TOPK,), (TOPK + 1, 3), (3 * TOPK, 9, 20)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_step_gives_what_transformers_gives_for_each_request(
    family: str, lengths: tuple[int, ...], kind: type[DSAAttention]
):
    model = _tiny.tiny_model(family)
    layer = our_layer(model, 0, kind)
    hidden = torch.randn(sum(lengths), HIDDEN)
    ks, ke = rows(*lengths)
    with torch.no_grad():
        out, _ = layer(hidden, *angles(model, *lengths), ks, ke, max(lengths), max(lengths))
        expected = [their_attention(model, 0, part) for part in hidden.split(lengths)]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=0)


def test_an_mqa_only_layer_inherits_no_dense_route_and_always_gets_a_selection():
    model = _tiny.tiny_model("deepseek_v32")
    hidden = torch.randn(TOPK, HIDDEN)
    ks, ke = rows(TOPK)
    found = {}
    for kind in (DSAAttention, MQAOnlyAttention):
        layer = our_layer(model, 0, kind)
        with torch.no_grad(), record_decisions() as records:
            _, indices = layer(hidden, *angles(model, TOPK), ks, ke, TOPK, TOPK)
        found[kind] = records[0].decision
    assert found[DSAAttention].route is routing.Route.DENSE_MHA
    assert found[DSAAttention].selection is routing.Selection.NONE
    assert found[MQAOnlyAttention].route is routing.Route.SPARSE_MQA
    assert found[MQAOnlyAttention].selection is routing.Selection.CLOSED
    assert indices is not None
    assert torch.equal(indices, ops.causal_positions(ks, ke, TOPK, TOPK))


@pytest.mark.parametrize("length", [TOPK - 6, 2 * TOPK])
def test_a_prefill_and_decode_through_caches_equal_one_step_and_fill_the_index_cache(length: int):
    model = _tiny.tiny_model("deepseek_v32")
    layer, config = our_layer(model, 0), DSAConfig.from_transformers(model.config)
    steps = 10
    total = length + steps
    hidden = torch.randn(total, HIDDEN)
    cos, sin = angles(model, total)
    ks, ke = rows(total)
    caches = {
        "kv_c_cache": torch.full((total, config.kv_lora_rank), float("nan")),
        "k_pe_cache": torch.full((total, config.qk_rope_head_dim), float("nan")),
        "index_k_cache": torch.full((total, config.index_head_dim), float("nan")),
    }
    outs = []
    with torch.no_grad():
        expected, _ = layer(hidden, cos, sin, ks, ke, total, total)
        indexer = layer.indexer
        assert indexer is not None
        index_key = layer._index_key(indexer, hidden, cos, sin)
        bounds = [0, length, *range(length + 1, total + 1)]
        for start, end in itertools.pairwise(bounds):
            step = slice(start, end)
            out, _ = layer(
                hidden[step],
                cos[step],
                sin[step],
                ks[step],
                ke[step],
                end,
                end - start,
                **caches,
                write_positions=torch.arange(start, end),
            )
            outs.append(out)
            torch.testing.assert_close(caches["index_k_cache"][:end], index_key[:end])
    torch.testing.assert_close(torch.cat(outs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [TOPK, 3 * TOPK])
def test_a_shared_layer_takes_the_selection_of_its_leader(length: int):
    model = _tiny.tiny_model("glm_moe_dsa")
    leader, follower = our_layer(model, 1), our_layer(model, 2)
    hidden = torch.randn(length, HIDDEN)
    step = (*angles(model, length), *rows(length), length, length)
    with torch.no_grad():
        _, indices = leader(hidden, *step)
        out, handed_on = follower(hidden, *step, indices=indices)
        positions = torch.arange(length)[None]
        expected = model.model.layers[2].self_attn(
            hidden[None],
            model.model.rotary_emb(hidden, positions),
            torch.ones(1, 1, length, length, dtype=torch.bool).tril(),
            prev_topk_indices=indices.clamp(min=0)[None],
        )[0][0]
    assert handed_on is indices
    kept = slice(TOPK - 1, None)
    torch.testing.assert_close(out[kept], expected[kept], atol=1e-5, rtol=0)


def test_a_shared_layer_without_a_carrier_names_both_layers():
    layer = our_layer(_tiny.tiny_model("glm_moe_dsa"), 2)
    with pytest.raises(ValueError, match="layer 2 is shared and needs the indices of layer 1"):
        layer(torch.randn(2, HIDDEN), torch.ones(2, 4), torch.ones(2, 4), *rows(2), 2, 2)


def test_a_full_layer_refuses_a_foreign_selection():
    layer = our_layer(_tiny.tiny_model("glm_moe_dsa"), 0)
    step = (torch.randn(2, HIDDEN), torch.ones(2, 4), torch.ones(2, 4), *rows(2), 2, 2)
    with pytest.raises(ValueError, match="layer 0 makes its own selection"):
        layer(*step, indices=torch.zeros(2, TOPK, dtype=torch.int32))


def test_caches_come_together():
    layer = our_layer(_tiny.tiny_model("glm_moe_dsa"), 0)
    step = (torch.randn(2, HIDDEN), torch.ones(2, 4), torch.ones(2, 4), *rows(2), 2, 2)
    with pytest.raises(ValueError, match="k_pe_cache, index_k_cache is missing"):
        layer(*step, kv_c_cache=torch.zeros(2, 32), write_positions=torch.arange(2))


def test_a_refused_mode_writes_no_cache():
    config = DSAConfig.from_transformers(_tiny.deepseek_config())
    layer = DSAAttention(config, 0, routing.RouteConfig(mode="dense"))
    length = TOPK + 1
    cache = torch.zeros(length, 16)
    with pytest.raises(ValueError, match="dense"):
        layer(
            torch.randn(length, HIDDEN),
            torch.ones(length, 4),
            torch.ones(length, 4),
            *rows(length),
            length,
            length,
            kv_c_cache=torch.zeros(length, 32),
            k_pe_cache=torch.zeros(length, 8),
            index_k_cache=cache,
            write_positions=torch.arange(length),
        )
    assert not cache.any()


def test_asking_for_the_indices_makes_them_in_closed_form_without_changing_the_route():
    model = _tiny.tiny_model("deepseek_v32")
    layer = our_layer(model, 0)
    step = (torch.randn(5, HIDDEN), *angles(model, 5), *rows(5), 5, 5)
    with torch.no_grad(), record_decisions() as records:
        plain, nothing = layer(*step)
        kept, indices = layer(*step, keep_indices=True)
    assert nothing is None
    assert indices[4, :6].tolist() == [0, 1, 2, 3, 4, -1]
    assert torch.equal(plain, kept)
    assert [record.decision.route for record in records] == [routing.Route.DENSE_MHA] * 2


def test_gradients_reach_the_projections_and_not_the_indexer():
    model = _tiny.tiny_model("deepseek_v32")
    layer = our_layer(model, 0)
    length = 2 * TOPK
    hidden = torch.randn(length, HIDDEN)
    out, _ = layer(hidden, *angles(model, length), *rows(length), length, length)
    out.square().sum().backward()
    theirs = model.model.layers[0].self_attn
    their_attention(model, 0, hidden).square().sum().backward()
    for name, parameter in theirs.named_parameters():
        ours = layer.get_parameter(name).grad
        if name.startswith("indexer."):
            assert ours is None
        else:
            torch.testing.assert_close(ours, parameter.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_a_layer_index_outside_of_the_schedule_is_an_error():
    config = DSAConfig.from_transformers(_tiny.deepseek_config())
    with pytest.raises(ValueError, match=r"layer_idx must be in \[0, 3\), got 3"):
        DSAAttention(config, 3)
