"""What transformers asks of each of its models in its own tests, asked of enabled ones.

Written after the mixins for models and for generation. What concerns ``generate`` alone stands in
``test_generate_modes``, and one graph for the whole forward in ``test_transformers_compiled``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _recognised import ONE_LAYER, make_cache, small_model
from _tiny import FAMILIES, TOPK, VOCAB, left_padding, prompt
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import dsafx
from dsafx import disable, enable, enabling

LENGTH = 40
TOLERANCE = 1e-5
CACHES = ("dynamic", "static")


@pytest.fixture(scope="module", params=FAMILIES)
def shared(request: pytest.FixtureRequest) -> PreTrainedModel:
    return small_model(request.param)


@pytest.fixture
def model(shared: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """An enabled model of two layers of each family, whose weights tests leave as they are."""
    with enabling(shared):
        yield shared


@pytest.fixture(params=FAMILIES)
def own_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """The same, for a test that changes it."""
    return enable(small_model(request.param))


def logits(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(*args, **kwargs).logits


def assert_close(got: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("new", [1, 3])
def test_tokens_after_a_cache_equal_those_of_one_pass(model: PreTrainedModel, kind: str, new: int):
    ids, cache = prompt(2, LENGTH), make_cache(kind, model)
    expected = logits(model, ids, use_cache=False)
    logits(model, ids[:, :-new], cache=cache)
    assert_close(logits(model, ids[:, -new:], cache=cache), expected[:, -new:])
    assert cache.get_seq_length() == LENGTH


def test_the_cache_that_a_model_makes_is_the_one_to_go_on_from(model: PreTrainedModel):
    ids = prompt(2, LENGTH)
    with torch.no_grad():
        first = model(ids[:, :-4], use_cache=True)
        second = model(ids[:, -4:], cache=first.cache, use_cache=True)
    assert second.cache is first.cache
    assert_close(second.logits, logits(model, ids, use_cache=False)[:, -4:])
    assert model(ids, use_cache=False).cache is None


@pytest.mark.parametrize("kind", CACHES)
def test_a_cropped_cache_is_as_if_the_tokens_had_never_been(model: PreTrainedModel, kind: str):
    ids, other = prompt(2, LENGTH), prompt(2, 64)[:, -5:]
    expected = logits(model, torch.cat((ids, other), dim=-1), use_cache=False)[:, -5:]
    cache = make_cache(kind, model)
    cache.activate_past_recording()
    logits(model, torch.cat((ids, other.flip(-1)), dim=-1), cache=cache)
    cache.crop(-5)
    assert_close(logits(model, other, cache=cache), expected)


@pytest.mark.parametrize("kind", CACHES)
def test_a_reordered_cache_follows_its_beams(model: PreTrainedModel, kind: str):
    ids, order, new = prompt(2, LENGTH), torch.tensor([1, 0]), prompt(2, 64)[:, -3:]
    expected = logits(model, torch.cat((ids[order], new), dim=-1), use_cache=False)[:, -3:]
    cache = make_cache(kind, model)
    logits(model, ids, cache=cache)
    cache.reorder_cache(order)
    assert_close(logits(model, new, cache=cache), expected)


def test_a_cache_can_be_repeated_and_picked_from(model: PreTrainedModel):
    ids, cache = prompt(2, LENGTH), DynamicCache(config=model.config)
    expected = logits(model, ids, use_cache=False)[:, -1:]
    logits(model, ids[:, :-1], cache=cache)
    cache.batch_repeat_interleave(2)
    repeated = ids.repeat_interleave(2, dim=0)
    assert_close(logits(model, repeated[:, -1:], cache=cache), expected.repeat_interleave(2, dim=0))
    cache.crop(-1)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert_close(logits(model, ids[[1, 0], -1:], cache=cache), expected[[1, 0]])


@pytest.mark.parametrize("positions", [False, True])
def test_left_padding_changes_no_logit(model: PreTrainedModel, positions: bool):
    """With positions that do not count it; without, RoPE is the same but for rounding."""
    ids = prompt(1, LENGTH)
    padded = torch.nn.functional.pad(ids, (7, 0))
    mask = left_padding(LENGTH + 7, 7)
    given = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else {}
    got = logits(model, padded, attention_mask=mask, **given)[:, 7:]
    assert_close(got, logits(model, ids), TOLERANCE if positions else 1e-4)


def test_a_request_is_the_same_alone_and_in_a_batch(model: PreTrainedModel):
    ids = prompt(2, LENGTH)
    assert_close(logits(model, ids), torch.cat([logits(model, row[None]) for row in ids]))


def test_two_calls_give_the_same_bits(model: PreTrainedModel):
    ids = prompt(2, LENGTH)
    assert torch.equal(logits(model, ids), logits(model, ids))


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"num_beams": 3}])
def test_a_static_cache_generates_as_a_dynamic_one(
    model: PreTrainedModel, settings: dict[str, Any]
):
    ids, mask = prompt(2, LENGTH), left_padding(LENGTH, 0, 5)
    dynamic, static = (
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=6,
            cache_implementation=kind,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
        for kind in CACHES
    )
    assert torch.equal(dynamic.sequences, static.sequences)
    assert_close(dynamic.logits, static.logits)


def test_it_does_not_matter_which_attention_stood_there_before(shared: PreTrainedModel):
    ids, mask = prompt(2, LENGTH), left_padding(LENGTH, 0, 5)
    plain, ours = [], []
    for attention in ("eager", "sdpa"):
        shared.set_attn_implementation(attention)
        plain.append(logits(shared, ids, attention_mask=mask)[mask.bool()])
        with enabling(shared):
            ours.append(logits(shared, ids, attention_mask=mask))
        assert shared.config._attn_implementation == attention
    assert torch.equal(*ours)
    assert_close(*plain)
    assert_close(ours[0][mask.bool()], plain[0])


def test_hidden_states_and_router_logits_are_those_of_the_layers(shared: PreTrainedModel):
    ids, flags = prompt(2, LENGTH), {"output_hidden_states": True}
    with torch.no_grad():
        expected = shared(ids, **flags).hidden_states
        with enabling(shared):
            got = shared(ids, **flags).hidden_states
            last = shared.model(ids).last_hidden_state
            by_tuple = shared(ids, return_dict=False)[0]
    assert [tuple(state.shape) for state in got] == [(2, LENGTH, shared.config.hidden_size)] * 3
    assert_close(got, expected)
    assert torch.equal(got[-1], last)
    assert torch.equal(shared.lm_head(last), by_tuple)


def test_logits_can_be_asked_for_at_the_last_tokens_alone(model: PreTrainedModel):
    ids = prompt(2, LENGTH)
    assert torch.equal(logits(model, ids, logits_to_keep=3), logits(model, ids)[:, -3:])


def test_a_saved_model_comes_back_as_it_was(own_model: PreTrainedModel, tmp_path: Path):
    """It is saved without a trace of us, and goes on enabled."""
    ids = prompt(2, LENGTH)
    expected = logits(own_model, ids)
    own_model.save_pretrained(tmp_path)
    assert "dsafx" not in (tmp_path / "config.json").read_text()
    assert "dsafx" not in (tmp_path / "generation_config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == own_model.state_dict().keys()
    assert not dsafx.enabled(loaded)
    assert_close(logits(loaded, ids), expected)
    assert torch.equal(logits(enable(loaded), ids), expected)
    assert torch.equal(logits(own_model, ids), expected)


def test_embeddings_can_be_resized_while_enabled(own_model: PreTrainedModel):
    ids = prompt(2, LENGTH)
    expected = logits(own_model, ids)
    own_model.resize_token_embeddings(VOCAB + 10)
    got = logits(own_model, ids)
    assert got.shape[-1] == VOCAB + 10
    assert torch.equal(got[..., :VOCAB], expected)
    assert logits(own_model, ids + 10).isfinite().all()
    own_model.resize_token_embeddings(VOCAB)
    assert own_model.generate(ids, max_new_tokens=2).shape == (2, LENGTH + 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_give_the_same_gradients(own_model: PreTrainedModel, reentrant: bool):
    ids, mask = prompt(2, LENGTH), left_padding(LENGTH, 0, 5)

    def gradients() -> dict[str, Tensor]:
        own_model.zero_grad()
        own_model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        found = own_model.named_parameters()
        return {name: p.grad.clone() for name, p in found if p.grad is not None}

    own_model.train()
    expected = gradients()
    own_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    got = gradients()
    assert {name for name, _ in own_model.named_parameters()} - got.keys() == {
        name for name, _ in own_model.named_parameters() if ".indexer." in name
    }
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_give_narrow_logits(own_model: PreTrainedModel, dtype: torch.dtype):
    """Compared where all keys are selected, since rounding may choose others."""
    ids, mask = prompt(2, LENGTH), left_padding(LENGTH, 0, 5)
    own_model.to(dtype)
    long = logits(own_model, ids, attention_mask=mask)
    assert long.dtype is dtype
    assert bool(long.isfinite().all())
    got = logits(own_model, ids[:, :TOPK])
    assert_close(got, logits(disable(own_model), ids[:, :TOPK]), tolerance=0.05)


@pytest.mark.slow
def test_a_model_compiled_in_place_generates_as_transformers():
    """The whole of ``generate``, prefill included, through ``dsafx.compile``."""
    ids, mask = prompt(2, LENGTH), left_padding(LENGTH, 0, 5)
    plain, ours = (small_model("glm_moe_dsa", sizes=ONE_LAYER["glm_moe_dsa"]) for _ in range(2))
    expected, got = (
        model.generate(ids, attention_mask=mask, max_new_tokens=6)
        for model in (plain, dsafx.compile(ours))
    )
    assert torch.equal(got, expected)
