"""Enabled transformers models in eager mode: the same logits, gradients and caches as before."""

from __future__ import annotations

import itertools
from typing import Any

import _tiny
import pytest
import torch
from _inside import Inside
from _tiny import FAMILIES, TOPK, left_padding, prompt
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from dsafx import disable, enable, enabling, routing
from dsafx.models import record_decisions
from dsafx.ops import _requests

PADS = (0, 5)
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model of each family; tests leave it disabled."""
    return _tiny.tiny_model(request.param)


def make_cache(kind: str, model: PreTrainedModel, length: int) -> Any:
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=length)


def run(model: PreTrainedModel, ids: Tensor, mask: Tensor, prefill: int, kind: str) -> Tensor:
    """[B, length, vocab] logits of a prefill and of one step for each further token."""
    length = ids.shape[1]
    cache = make_cache(kind, model, length + 3)
    bounds = [0, prefill, *range(prefill + 1, length + 1)]
    parts = []
    with torch.no_grad():
        for start, end in itertools.pairwise(bounds):
            out = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, start:end],
                cache=cache,
            )
            parts.append(out.logits)
    return torch.cat(parts, dim=1)


def assert_same_logits(got: Tensor, expected: Tensor, mask: Tensor) -> None:
    rows = mask.bool()
    torch.testing.assert_close(got[rows], expected[rows], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("length", [TOPK - 1, TOPK, TOPK + 1, 3 * TOPK])
def test_prefill_and_eight_decode_steps_with_left_padding_give_the_same_logits(
    model: PreTrainedModel, length: int, kind: str
):
    ids, mask = prompt(2, length + 8), left_padding(length + 8, *PADS)
    expected = run(model, ids, mask, length, kind)
    with enabling(model):
        got = run(model, ids, mask, length, kind)
    assert_same_logits(got, expected, mask)


@pytest.mark.parametrize("mode", ["sparse", "masked"])
@pytest.mark.parametrize("length", [TOPK, 3 * TOPK])
def test_each_forced_mode_gives_the_same_logits(model: PreTrainedModel, length: int, mode: str):
    ids, mask = prompt(2, length + 2), left_padding(length + 2, *PADS)
    expected = run(model, ids, mask, length, "dynamic")
    routes = {"sparse": routing.Route.SPARSE_MQA, "masked": routing.Route.MASKED_MHA}
    with enabling(model, mode), record_decisions() as records:
        got = run(model, ids, mask, length, "dynamic")
    assert_same_logits(got, expected, mask)
    assert {record.decision.route for record in records} == {routes[mode]}


def test_forced_dense_gives_the_same_logits_up_to_k_and_is_refused_above(model: PreTrainedModel):
    ids = prompt(2, TOPK + 1)
    with torch.no_grad():
        expected = model(ids[:, :TOPK]).logits
        with enabling(model, "dense"):
            torch.testing.assert_close(model(ids[:, :TOPK]).logits, expected, atol=1e-4, rtol=0)
            with pytest.raises(ValueError, match="dense"):
                model(ids)


@pytest.mark.parametrize("chunks", [[1] * 20, [17, 3], [5, 12, 3], [16, 1, 3]])
def test_any_split_of_the_prompt_gives_the_same_logits(model: PreTrainedModel, chunks: list[int]):
    ids = prompt(2, 20)
    with torch.no_grad():
        expected = model(ids).logits
        with enabling(model):
            cache = DynamicCache(config=model.config)
            parts = [model(part, cache=cache).logits for part in ids.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [TOPK, 3 * TOPK])
def test_gradients_equal_those_of_transformers(model: PreTrainedModel, length: int):
    ids = prompt(2, length)

    def gradients() -> dict[str, Tensor | None]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients()
    with enabling(model):
        got = gradients()
    model.zero_grad()
    for name, gradient in expected.items():
        if ".indexer." in name:
            assert gradient is None
            assert got[name] is None
        else:
            torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_a_mask_with_holes_hides_those_keys(model: PreTrainedModel):
    ids, mask = prompt(2, 40), left_padding(40, *PADS)
    mask[0, 7:11] = 0
    mask[1, 30] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        with enabling(model), record_decisions() as records:
            got = model(ids, attention_mask=mask).logits
    assert_same_logits(got, expected, mask)
    assert {r.decision.selection for r in records} == {routing.Selection.SCORED}


def test_packed_documents_do_not_see_each_other(model: PreTrainedModel):
    ids = prompt(1, 40)
    positions = torch.cat((torch.arange(22), torch.arange(18)))[None]
    with torch.no_grad():
        expected = model(ids, position_ids=positions, use_cache=False).logits
        with enabling(model):
            got = model(ids, position_ids=positions, use_cache=False).logits
            second = model(ids[:, 22:], use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(got[:, 22:], second, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_prepared_mask_is_obeyed(model: PreTrainedModel, kind: str):
    ids = prompt(2, 40)
    seen = torch.ones(40, 40, dtype=torch.bool).tril() & ~torch.eye(40, dtype=torch.bool).roll(3, 0)
    given = seen.expand(2, 1, 40, 40)
    if kind == "additive":
        given = torch.zeros(2, 1, 40, 40).masked_fill(~given, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(ids, attention_mask=given).logits
        with enabling(model):
            got = model(ids, attention_mask=given).logits
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_a_bias_on_visible_keys_is_refused(model: PreTrainedModel):
    bias = torch.zeros(1, 1, 8, 8)
    bias[..., 0] = -0.5
    with enabling(model), pytest.raises(ValueError, match="bias on visible keys"):
        model(prompt(1, 8), attention_mask=bias)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("length", [TOPK - 4, 2 * TOPK])
def test_greedy_generation_gives_the_same_tokens(model: PreTrainedModel, length: int, kind: str):
    ids, mask = prompt(2, length), left_padding(length, *PADS)

    def generate() -> Tensor:
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=10, do_sample=False, cache_implementation=kind
        )

    expected = generate()
    with enabling(model):
        assert torch.equal(generate(), expected)


def test_beam_search_gives_the_same_tokens(model: PreTrainedModel):
    ids = prompt(1, TOPK + 2)
    settings = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    expected = model.generate(ids, **settings)
    with enabling(model):
        assert torch.equal(model.generate(ids, **settings), expected)


def test_generation_hands_intervals_to_the_forward(model: PreTrainedModel):
    ids, mask = prompt(2, 10), left_padding(10, *PADS)
    cache = DynamicCache(config=model.config)
    with enabling(model):
        inputs = model.prepare_inputs_for_generation(
            ids, attention_mask=mask, cache=cache, is_first_iteration=True
        )
    intervals = inputs["attention_mask"]["indexed_attention"]
    assert intervals.dtype == torch.int32
    assert intervals[1, 0].tolist() == [[5, row + 1] for row in range(10)]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_short_prefill_writes_the_index_keys_that_transformers_would(
    model: PreTrainedModel, kind: str
):
    ids = prompt(2, TOPK)
    caches = []
    for context in (False, True):
        cache = make_cache(kind, model, TOPK)
        if context:
            enable(model)
        with torch.no_grad(), record_decisions() as records:
            model(ids, cache=cache)
        disable(model)
        caches.append(cache)
    assert routing.Selection.SCORED not in {record.decision.selection for record in records}
    compared = 0
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=TOLERANCE, rtol=0)
        assert (ours.indexer_keys is None) == (theirs.indexer_keys is None)
        if theirs.indexer_keys is not None:
            torch.testing.assert_close(
                ours.indexer_keys, theirs.indexer_keys, atol=TOLERANCE, rtol=0
            )
            compared += 1
    assert compared == 3


def test_a_short_prefill_asks_for_no_score_and_shared_layers_get_the_closed_form(
    monkeypatch: pytest.MonkeyPatch,
):
    def fail(*args: object) -> None:
        raise AssertionError("a short prefill was scored")

    model = enable(_tiny.tiny_model("glm_moe_dsa"))
    monkeypatch.setattr(_requests, "index_select", fail)
    with torch.no_grad(), record_decisions() as records:
        model(prompt(2, TOPK))
        with pytest.raises(AssertionError, match="was scored"):
            model(prompt(2, TOPK + 1))
    none, closed = routing.Selection.NONE, routing.Selection.CLOSED
    assert [record.decision.selection for record in records[:4]] == [none, closed, none, none]
    first = records[0]
    assert (first.layer_idx, first.provider, first.tokens, first.max_kv_len) == (
        0,
        "cpu",
        2 * TOPK,
        TOPK,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_never_expands_the_cached_latents(family: str):
    model = _tiny.tiny_model(family, first_k_dense_replace=4)
    length, config = 60, model.config
    expanded = length * config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    largest = {}
    for mode in ("off", "masked", "auto"):
        if mode != "off":
            enable(model, mode)
        cache = DynamicCache(config=config)
        with torch.no_grad():
            model(prompt(1, length - 1), cache=cache)
            with Inside() as seen:
                model.model(prompt(1, length)[:, -1:], cache=cache)
        largest[mode] = seen.elements
    assert largest["off"] >= expanded
    assert largest["masked"] >= expanded
    assert largest["auto"] < expanded
