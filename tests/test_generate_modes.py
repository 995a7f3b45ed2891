"""``generate`` in all of its ways: token for token what transformers gives, well above K keys.

Not one token differs, so that none has to be excused by a small margin of its logit.

Group and constrained beam search, contrastive search and DoLa are no part of transformers 5.24: it
loads them from repositories of their own. ``prefix_allowed_tokens_fn`` is, and stands in the list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _recognised import ONE_LAYER, small_model
from _tiny import VOCAB, left_padding, prompt
from torch import Tensor
from transformers import (
    Cache,
    CompileConfig,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
    TextStreamer,
)

import dsafx
from dsafx import enable, enabling

LENGTH, NEW = 40, 6
MASK = left_padding(LENGTH, 0, 5)


@pytest.fixture(scope="module", params=[("deepseek_v32", "sdpa"), ("glm_moe_dsa", "eager")])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of two layers of each family, on either attention; tests leave it disabled."""
    return small_model(*request.param)


def theirs_and_ours(
    model: PreTrainedModel, run: Callable[[PreTrainedModel], Any]
) -> tuple[Any, Any]:
    """``run`` from the same random state, before and while ``model`` is enabled."""
    torch.manual_seed(0)
    expected = run(model)
    torch.manual_seed(0)
    with enabling(model):
        return expected, run(model)


def even_after_odd(request: int, tokens: Tensor) -> list[int]:
    """Allowed tokens, for a search that is constrained."""
    return list(range(2 + (int(tokens[-1]) + request) % 2, VOCAB, 2))


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "dynamic cache": {"cache_implementation": "dynamic"},
    "static cache": {"cache_implementation": "static"},
    "samples": {"do_sample": True, "temperature": 0.7, "top_k": 50, "num_return_sequences": 3},
    "nucleus": {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.2},
    "samples on a static cache": {"do_sample": True, "cache_implementation": "static"},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "beams without a cache": {"num_beams": 2, "use_cache": False},
    "beams on a static cache": {"num_beams": 3, "cache_implementation": "static"},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "constrained beams": {"num_beams": 3, "prefix_allowed_tokens_fn": even_after_odd},
    "guidance": {"guidance_scale": 1.5},
    "a prompt in chunks": {"prefill_chunk_size": 7},
    "a prompt in chunks on a static cache": {
        "prefill_chunk_size": 7,
        "cache_implementation": "static",
    },
}


@pytest.mark.parametrize("name", MODES)
def test_each_mode_gives_the_tokens_of_transformers(model: PreTrainedModel, name: str):
    """Two requests, one of them padded on the left."""
    expected, got = theirs_and_ours(
        model,
        lambda model: model.generate(
            prompt(2, LENGTH), attention_mask=MASK, max_new_tokens=NEW, **MODES[name]
        ),
    )
    assert torch.equal(got, expected)


MASKS: dict[str, Tensor] = {
    "bool": MASK.bool(),
    "float": MASK.float(),
    "a hole": MASK * (torch.arange(LENGTH) != 17),
    "padding on the right": MASK.flip(-1),
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MASKS)
def test_each_form_of_padding_gives_the_tokens_of_transformers(
    model: PreTrainedModel, name: str, cache: str
):
    settings = {"attention_mask": MASKS[name], "cache_implementation": cache}
    expected, got = theirs_and_ours(
        model,
        lambda model: model.generate(prompt(2, LENGTH), max_new_tokens=NEW, **settings),
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"num_beams": 2}])
def test_logits_scores_and_hidden_states_are_within_a_ten_thousandth(
    model: PreTrainedModel, settings: dict[str, Any]
):
    flags = {"output_logits": True, "output_scores": True, "output_hidden_states": True}
    expected, got = theirs_and_ours(
        model,
        lambda model: model.generate(
            prompt(2, LENGTH),
            attention_mask=MASK,
            max_new_tokens=NEW,
            return_dict_in_generate=True,
            **flags,
            **settings,
        ),
    )
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.logits) == len(got.scores) == NEW
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(got.scores, expected.scores, atol=1e-4, rtol=0)
    shapes = [[tuple(layer.shape) for layer in step] for step in got.hidden_states]
    assert shapes == [[tuple(layer.shape) for layer in step] for step in expected.hidden_states]
    decode = [step[-1] for step in got.hidden_states[1:]]
    theirs = [step[-1] for step in expected.hidden_states[1:]]
    torch.testing.assert_close(decode, theirs, atol=1e-4, rtol=0)


def test_embeddings_in_place_of_a_prompt(model: PreTrainedModel):
    embeddings = model.get_input_embeddings()(prompt(2, LENGTH)).detach()
    expected, got = theirs_and_ours(
        model,
        lambda model: model.generate(
            inputs_embeds=embeddings, attention_mask=MASK, max_new_tokens=NEW
        ),
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}])
def test_an_assistant_proposes_and_both_caches_are_cropped(
    model: PreTrainedModel, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """The assistant is the model with other words for some of its states, and enabled with it."""
    assistant = small_model(model.config.model_type)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        head = assistant.lm_head.weight
        head.add_(0.15 * torch.randn(head.shape, generator=generator))
    cropped: set[int] = set()
    crop = DynamicCache.crop

    def watch(cache: Cache, tokens: int) -> None:
        before = cache.get_seq_length()
        crop(cache, tokens)
        if cache.get_seq_length() < before:
            cropped.add(id(cache))

    monkeypatch.setattr(DynamicCache, "crop", watch)

    def run(model: PreTrainedModel) -> Tensor:
        cropped.clear()
        if dsafx.enabled(model):
            enable(assistant)
        return model.generate(
            prompt(1, LENGTH), assistant_model=assistant, max_new_tokens=20, **settings
        )

    expected, got = theirs_and_ours(model, run)
    assert torch.equal(got, expected)
    assert len(cropped) == 2
    if not settings:
        with enabling(model):
            assert torch.equal(model.generate(prompt(1, LENGTH), max_new_tokens=20), got)


def test_a_prompt_is_looked_up_in_itself(model: PreTrainedModel):
    """Its words come again, so that some of the proposals are taken and others cropped."""
    ids = prompt(1, 10).repeat(1, 4)
    expected, got = theirs_and_ours(
        model, lambda model: model.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=20)
    )
    assert torch.equal(got, expected)
    with enabling(model):
        assert torch.equal(model.generate(ids, max_new_tokens=20), got)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_second_generate_goes_on_from_the_cache_of_the_first(model: PreTrainedModel, kind: str):
    ids, said = prompt(2, LENGTH), prompt(2, 64)[:, 50:57]
    ones = torch.ones((2, NEW + said.shape[1]), dtype=torch.int64)
    mask = torch.cat((MASK, ones), dim=-1)

    def run(model: PreTrainedModel) -> Tensor:
        cache: Cache = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=64)
        first = model.generate(ids, attention_mask=MASK, cache=cache, max_new_tokens=NEW)
        longer = torch.cat((first, said), dim=-1)
        assert cache.get_seq_length() == LENGTH + NEW - 1
        return model.generate(longer, attention_mask=mask, cache=cache, max_new_tokens=NEW)

    expected, got = theirs_and_ours(model, run)
    assert torch.equal(got, expected)
    with enabling(model):
        anew = model.generate(got[:, : mask.shape[1]], attention_mask=mask, max_new_tokens=NEW)
    assert torch.equal(got, anew)


class Words:
    """As much of a tokenizer as a streamer asks for."""

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        return "".join(f"{token} " for token in tokens)


def test_a_streamer_shows_the_tokens_as_they_come(
    model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
):
    """After a prefill in chunks too."""
    ids = prompt(1, LENGTH)
    expected = model.generate(ids, max_new_tokens=NEW)[0, LENGTH:].tolist()
    with enabling(model):
        streamer = TextStreamer(Words(), skip_prompt=True)
        model.generate(ids, max_new_tokens=NEW, streamer=streamer)
        assert capsys.readouterr().out.split() == [str(token) for token in expected]
        _, cache = dsafx.prefill(model, ids[:, :-1], chunk_size=17)
        streamer = TextStreamer(Words(), skip_prompt=True)
        model.generate(ids, cache=cache, max_new_tokens=NEW, streamer=streamer)
        assert capsys.readouterr().out.split() == [str(token) for token in expected]


@pytest.mark.slow
def test_a_compiled_decode_step_gives_the_tokens_of_transformers():
    """With padding, greedy and sampled; one compile serves both."""
    plain, ours = (small_model("deepseek_v32", sizes=ONE_LAYER["deepseek_v32"]) for _ in range(2))
    enable(ours)
    compile_config = CompileConfig(backend="dsafx")
    # Without it, generate compiles on accelerators only.
    compile_config._compile_all_devices = True
    for settings in ({}, {"do_sample": True, "top_k": 50}):
        tokens = []
        for model, config in ((plain, None), (ours, compile_config)):
            torch.manual_seed(0)
            tokens.append(
                model.generate(
                    prompt(2, LENGTH),
                    attention_mask=MASK,
                    max_new_tokens=NEW,
                    cache_implementation="static",
                    compile_config=config,
                    **settings,
                )
            )
        assert torch.equal(*tokens)
