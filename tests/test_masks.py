"""Masks of every form: what an enabled model sees is what transformers sees, or is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _masks import (
    CAUSAL,
    DOCUMENTS,
    LENGTH,
    ONE_ROW,
    SEEN,
    additive,
    assert_close,
    biased,
    logits,
    with_holes,
)
from _recognised import CACHE_LENGTH, make_cache, small_model
from _tiny import FAMILIES, TOPK, left_padding, prompt
from torch import Tensor
from transformers import PreTrainedModel

from dsafx import enable, enabling, routing
from dsafx.models import record_decisions

ATTENTIONS = ("sdpa", "eager")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of two layers of each family; tests leave it disabled, on SDPA."""
    return small_model(request.param)


def theirs_and_ours(
    model: PreTrainedModel, run: Callable[[], Tensor], attention: str = "sdpa"
) -> tuple[Tensor, Tensor]:
    """What ``run`` gives with transformers' ``attention`` and enabled after it."""
    model.set_attn_implementation(attention)
    try:
        expected = run()
        with enabling(model):
            return expected, run()
    finally:
        model.set_attn_implementation("sdpa")


PADDED: dict[str, Tensor] = {
    "int64": left_padding(LENGTH, 0, 5),
    "int32": left_padding(LENGTH, 0, 5).int(),
    "bool": left_padding(LENGTH, 0, 5).bool(),
    "float32": left_padding(LENGTH, 0, 5).float(),
    "bfloat16": left_padding(LENGTH, 0, 5).bfloat16(),
    "holes": with_holes(),
    "right": left_padding(LENGTH, 0, 9).flip(-1),
    "both sides": torch.nn.functional.pad(left_padding(LENGTH - 4, 0, 9), (0, 4)),
    "an empty request": left_padding(LENGTH, 0, LENGTH),
}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", PADDED)
def test_a_2d_mask_says_what_it_says_to_transformers(
    model: PreTrainedModel, name: str, attention: str
):
    ids, mask = prompt(2, LENGTH), PADDED[name]
    expected, got = theirs_and_ours(
        model, lambda: logits(model, ids, attention_mask=mask), attention
    )
    # A pad token behind others sees these, and is compared too.
    assert_close(got, expected, mask.long().cumsum(-1))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["holes", "right", "both sides"])
def test_a_2d_mask_holds_for_cached_tokens_too(model: PreTrainedModel, name: str, kind: str):
    """Padding on the right of a prompt is a hole once tokens are added after it."""
    ids = prompt(2, LENGTH + 3)
    mask = torch.nn.functional.pad(PADDED[name], (0, 3), value=1)
    bounds = (0, LENGTH, LENGTH + 1, LENGTH + 3)

    def run() -> Tensor:
        cache = make_cache(kind, model)
        steps = itertools.pairwise(bounds)
        parts = [
            logits(model, ids[:, start:end], attention_mask=mask[:, :end], cache=cache)
            for start, end in steps
        ]
        return torch.cat(parts, dim=1)

    expected, got = theirs_and_ours(model, run)
    assert_close(got, expected, mask)


PREPARED: dict[str, Tensor] = {
    "bool": SEEN,
    "bool, one for all requests": SEEN[:1],
    "bool, one row for all tokens": ONE_ROW,
    "additive with the minimum": additive(SEEN, torch.finfo(torch.float32).min),
    "additive with -inf": additive(SEEN, -torch.inf),
}


@pytest.mark.parametrize("name", PREPARED)
@pytest.mark.parametrize("form", ["tensor", "dict", "positional"])
def test_a_4d_mask_says_what_it_says_to_transformers(model: PreTrainedModel, name: str, form: str):
    ids, mask = prompt(2, LENGTH), PREPARED[name]

    def run() -> Tensor:
        if form == "positional":
            with torch.no_grad():
                return model.model(ids, mask).last_hidden_state
        given = {"indexed_attention": mask} if form == "dict" else mask
        return logits(model, ids, attention_mask=given)

    expected, got = theirs_and_ours(model, run)
    assert_close(got, expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_4d_mask_of_later_tokens_is_as_wide_as_the_cache(model: PreTrainedModel, kind: str):
    ids, first = prompt(2, LENGTH), LENGTH - 10
    width = LENGTH if kind == "dynamic" else CACHE_LENGTH
    mask = torch.nn.functional.pad(SEEN[:, :, first:], (0, width - LENGTH))

    def run() -> Tensor:
        cache = make_cache(kind, model)
        logits(model, ids[:, :first], cache=cache)
        return logits(model, ids[:, first:], attention_mask=mask, cache=cache)

    expected, got = theirs_and_ours(model, run)
    assert_close(got, expected)
    narrow, cache = mask[..., :-1], make_cache(kind, model)
    with enabling(model):
        logits(model, ids[:, :first], cache=cache)
        with pytest.raises(ValueError, match=rf"{width} keys, got \(2, 1, 10, {width - 1}\)"):
            logits(model, ids[:, first:], attention_mask=narrow, cache=cache)


def test_a_4d_bool_mask_is_no_bias_after_eager_attention(model: PreTrainedModel):
    """transformers' eager attention adds it as a number, 1 at visible keys and 0 at all others.

    True means visible to us whatever stood there before, as it does to transformers' SDPA.
    """
    ids = prompt(2, LENGTH)
    meant = logits(model, ids, attention_mask=SEEN)
    added, got = theirs_and_ours(
        model, lambda: logits(model, ids, attention_mask=SEEN), attention="eager"
    )
    assert_close(got, meant)
    assert (added - meant).abs().max() > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", ["minimum", "-inf"])
def test_an_additive_mask_may_have_another_dtype_than_the_model(
    model: PreTrainedModel, dtype: torch.dtype, hidden: str
):
    """transformers fails on it, since it fills in the minimum of the model's dtype."""
    ids = prompt(2, LENGTH)
    value = torch.finfo(dtype).min if hidden == "minimum" else -torch.inf
    mask = additive(SEEN, value, dtype)
    with pytest.raises(RuntimeError, match="without overflow"):
        logits(model, ids, attention_mask=mask)
    expected = logits(model, ids, attention_mask=SEEN)
    with enabling(model):
        assert_close(logits(model, ids, attention_mask=mask), expected)


def test_a_bfloat16_model_takes_a_bfloat16_mask():
    model, ids = small_model("glm_moe_dsa").bfloat16(), prompt(2, LENGTH)
    mask = additive(SEEN, torch.finfo(torch.bfloat16).min, torch.bfloat16)
    enable(model)
    expected = logits(model, ids, attention_mask=SEEN)
    assert torch.equal(logits(model, ids, attention_mask=mask), expected)


def test_a_row_that_sees_nothing_attends_to_nothing(model: PreTrainedModel):
    """Its attention is 0, where transformers' eager attention averages over all values."""
    ids, seen = prompt(2, LENGTH), SEEN.clone()
    seen[0, :, 12] = False
    outputs: list[Tensor] = []
    hook = model.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, output: outputs.append(output[0])
    )
    mask = additive(seen, torch.finfo(torch.float32).min)
    theirs_and_ours(model, lambda: logits(model, ids, attention_mask=mask), attention="eager")
    hook.remove()
    theirs, ours = outputs
    assert theirs[0, 12].abs().max() > 0.1
    assert torch.equal(ours[0, 12], torch.zeros_like(ours[0, 12]))
    rows = torch.ones(2, LENGTH, dtype=torch.bool)
    rows[0, 12] = False
    assert_close(ours, theirs, rows)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("requests", [1, 2])
def test_packed_documents_are_intervals(model: PreTrainedModel, attention: str, requests: int):
    """No mask is built of them, so that a short one is not scored."""
    ids, others = prompt(2, LENGTH), torch.arange(LENGTH)[None] % 17
    positions = DOCUMENTS if requests == 1 else torch.cat((DOCUMENTS, others))

    def run() -> Tensor:
        return logits(model, ids, position_ids=positions, use_cache=False)

    expected, got = theirs_and_ours(model, run, attention)
    assert_close(got, expected)
    with enabling(model), record_decisions() as records:
        alone = logits(model, ids[:, 22:], use_cache=False)
        short = ids[:, :TOPK]
        logits(model, short, position_ids=DOCUMENTS[:, 14 : 14 + TOPK], use_cache=False)
    assert_close(got[:1, 22:], alone[:1])
    assert {r.decision.route for r in records[-2:]} == {routing.Route.DENSE_MHA}


@pytest.mark.parametrize("given", [False, True])
def test_packed_documents_are_not_looked_for_beside_a_cache(model: PreTrainedModel, given: bool):
    """transformers takes the positions as they are there; and a model makes a cache by default."""
    ids = prompt(2, LENGTH)
    apart = logits(model, ids, position_ids=DOCUMENTS, use_cache=False)

    def run() -> Tensor:
        cache = {"cache": make_cache("dynamic", model), "use_cache": False} if given else {}
        return logits(model, ids, position_ids=DOCUMENTS, **cache)

    expected, got = theirs_and_ours(model, run)
    assert_close(got, expected)
    assert (got - apart).abs().max() > 0.1


def test_packed_documents_are_looked_for_where_layers_are_checkpointed(model: PreTrainedModel):
    """In training transformers then makes no cache, whatever it is asked for."""
    ids = prompt(1, LENGTH)
    model.train().gradient_checkpointing_enable()
    try:
        expected, got = theirs_and_ours(
            model, lambda: model(ids, position_ids=DOCUMENTS).logits.detach()
        )
    finally:
        model.eval().gradient_checkpointing_disable()
    assert_close(got, expected)
    assert_close(got, logits(model, ids, position_ids=DOCUMENTS, use_cache=False))


def test_embeddings_in_place_of_tokens_and_positional_arguments_change_nothing(
    model: PreTrainedModel,
):
    ids, mask = prompt(2, LENGTH), PADDED["int64"]
    embeddings = model.get_input_embeddings()(ids).detach()
    with enabling(model):
        expected = logits(model, ids, attention_mask=mask)
        assert torch.equal(logits(model, inputs_embeds=embeddings, attention_mask=mask), expected)
        assert torch.equal(logits(model, ids, mask), expected)
        assert torch.equal(logits(model, ids, mask, None, make_cache("dynamic", model)), expected)
        unpadded = logits(model, ids)
        assert torch.equal(logits(model, inputs_embeds=embeddings), unpadded)


def test_a_model_may_be_told_to_look_ahead(model: PreTrainedModel):
    ids = prompt(2, LENGTH)
    expected, got = theirs_and_ours(
        model, lambda: logits(model, ids, is_causal=False, use_cache=False)
    )
    assert_close(got, expected)
    assert (got - logits(model, ids)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (biased(), ValueError, r"bias on visible keys is not supported, got -0\.5"),
        ({"indexed_attention": biased()}, ValueError, "bias on visible keys"),
        (SEEN.long(), TypeError, r"bool or floating point, got torch\.int64"),
        (SEEN.expand(2, 4, -1, -1), ValueError, r"\[2 or 1, 1, 40 or 1, 40\].*got \(2, 4, 40, 40"),
        (SEEN[..., :-1], ValueError, r"40 keys, got \(2, 1, 40, 39\)"),
        (SEEN[:, 0], ValueError, r"\[2, keys\] or .* got \(2, 40, 40\)"),
        (CAUSAL[0], ValueError, r"got \(40,\)"),
        (PADDED["int64"][:1], ValueError, "2 rows, one for each request, got 1"),
        ({"full_attention": SEEN}, TypeError, r"'indexed_attention', got NoneType .*full_attent"),
        ([1] * LENGTH, TypeError, "tensor or a dict, got list"),
    ],
)
@pytest.mark.parametrize("positional", [False, True])
def test_a_mask_that_is_not_supported_is_refused(
    model: PreTrainedModel,
    mask: Any,
    error: type[Exception],
    message: str,
    positional: bool,
):
    ids, cache = prompt(2, LENGTH), make_cache("dynamic", model)
    args, kwargs = ((ids, mask), {}) if positional else ((ids,), {"attention_mask": mask})
    with enabling(model), pytest.raises(error, match=message):
        model.model(*args, cache=cache, **kwargs)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("width", [LENGTH - 3, LENGTH + 3])
def test_a_mask_of_other_tokens_than_these_is_refused_without_a_cache(
    model: PreTrainedModel, width: int
):
    mask = torch.ones(2, width)
    with enabling(model), pytest.raises(ValueError, match=rf"\[2, 40\] .*got \(2, {width}\)"):
        logits(model, prompt(2, LENGTH), attention_mask=mask)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_decoder_of_which_some_layers_are_ours_sees_alike(model: PreTrainedModel, attention: str):
    """And refuses a bias, though its other layers would take it: ours would drop it silently."""
    ids, group = prompt(2, LENGTH), model.model
    part = group.layers[0] if model.config.model_type == "deepseek_v32" else group.layers
    model.set_attn_implementation(attention)
    try:
        for mask in (left_padding(LENGTH, 0, 5), with_holes(), PREPARED["additive with -inf"]):
            rows = mask if mask.dim() == 2 else None
            expected = logits(model, ids, attention_mask=mask)
            with enabling(part):
                assert_close(logits(model, ids, attention_mask=mask), expected, rows)
        with enabling(part), pytest.raises(ValueError, match="bias on visible keys"):
            model(ids, attention_mask=biased())
    finally:
        model.set_attn_implementation("sdpa")
