"""enable on single layers: another mode for some, and parts of a model instead of all of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import _tiny
import pytest
import torch
from _tiny import FAMILIES, TOPK, left_padding, prompt
from _uncompiled import passes_only
from torch import Tensor, nn
from transformers import DynamicCache, GlmMoeDsaForCausalLM, PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from dsafx import disable, enable, enabled, enabling, routing
from dsafx.models import record_decisions

LENGTH = 3 * TOPK
# The tiny GLM's index groups are {0}, {1, 2} and {3}.
LEADER, FOLLOWER = 1, 2


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model of each family; tests leave it disabled."""
    return _tiny.tiny_model(request.param)


@pytest.fixture(scope="module")
def glm() -> PreTrainedModel:
    """Tests leave it disabled."""
    return _tiny.tiny_model("glm_moe_dsa")


@torch.no_grad()
def logits(model: nn.Module, length: int = LENGTH, **kwargs: Any) -> Tensor:
    return model(prompt(2, length), **kwargs).logits


@torch.no_grad()
def routes(model: nn.Module, length: int = LENGTH) -> dict[int, routing.Route]:
    """The route of each layer that ran on our ops in a forward of ``length`` tokens."""
    with record_decisions() as records:
        model(prompt(2, length))
    return {record.layer_idx: record.decision.route for record in records}


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("other", ["sparse", "masked", routing.RouteConfig(dense_threshold=0)])
@pytest.mark.parametrize("layer", [0, LEADER, FOLLOWER])
@pytest.mark.parametrize("length", [TOPK, LENGTH])
def test_a_layer_with_another_mode_gives_the_same_logits(
    model: PreTrainedModel, length: int, layer: int, other: str | routing.RouteConfig
):
    expected = logits(model, length)
    with enabling(model, layers={layer: other}):
        assert_close(logits(model, length), expected)


def test_only_the_layers_that_are_named_get_another_mode(model: PreTrainedModel):
    with enabling(model, "masked", layers={0: "sparse", FOLLOWER: "auto"}):
        found = routes(model, TOPK)
        expected = dict.fromkeys(found, routing.Route.MASKED_MHA)
        expected |= {0: routing.Route.SPARSE_MQA, FOLLOWER: routing.Route.DENSE_MHA}
        assert found == expected
        with enabling(model, "sparse"):
            assert set(routes(model, TOPK).values()) == {routing.Route.SPARSE_MQA}
        assert routes(model, TOPK) == expected
    assert not enabled(model)


@pytest.mark.parametrize(
    ("layers", "error", "sentence"),
    [
        (
            {1: "sparse", 4: "sparse", -1: "auto"},
            ValueError,
            r"layers must name DSA layers of GlmMoeDsaForCausalLM, which are 0, 1, 2, 3,"
            r" got 4, -1",
        ),
        ({0: "fast"}, ValueError, "mode must be one of .* got 'fast'"),
        ({0: None}, TypeError, "a route must be a mode or a routing.RouteConfig, got None"),
    ],
)
def test_what_is_no_layer_or_no_mode_is_refused_before_anything_is_changed(
    glm: PreTrainedModel, layers: dict[int, Any], error: type[Exception], sentence: str
):
    with pytest.raises(error, match=sentence):
        enable(glm, layers=layers)
    assert routes(glm) == {}


def parts(model: PreTrainedModel) -> dict[str, tuple[nn.Module, set[int]]]:
    """Parts of the tiny GLM that hold whole index groups, and the numbers of their layers."""
    layers = model.model.layers
    return {
        "decoder": (model.model, {0, 1, 2, 3}),
        "all layers": (layers, {0, 1, 2, 3}),
        "a slice": (layers[1:3], {1, 2}),
        "two groups": (layers[1:], {1, 2, 3}),
        "a layer": (layers[3], {3}),
        "an attention module": (layers[0].self_attn, {0}),
    }


@pytest.mark.parametrize(
    "name",
    ["decoder", "all layers", "a slice", "two groups", "a layer", "an attention module"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_part_is_enabled_and_the_rest_stays_as_it_was(
    glm: PreTrainedModel, name: str, padded: bool
):
    part, numbers = parts(glm)[name]
    mask = left_padding(LENGTH, 0, 5) if padded else None
    before = {path: sorted(vars(module)) for path, module in glm.named_modules()}
    rows = torch.ones(2, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    expected = logits(glm, attention_mask=mask)
    assert enable(part) is part
    assert enabled(part)
    assert enabled(glm) is (len(numbers) == 4)
    assert_close(logits(glm, attention_mask=mask)[rows], expected[rows])
    assert set(routes(glm)) == numbers
    assert glm.config._attn_implementation == "sdpa"
    for number, layer in enumerate(glm.model.layers):
        assert (layer.self_attn.config is glm.config) is (number not in numbers)
    disable(part)
    assert torch.equal(logits(glm, attention_mask=mask), expected)
    assert {path: sorted(vars(module)) for path, module in glm.named_modules()} == before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_that_are_not_enabled_run_what_transformers_chose(attention: str):
    model = _tiny.tiny_model("glm_moe_dsa")
    model.set_attn_implementation(attention)
    expected = logits(model)
    enable(model.model.layers[1:3])
    assert_close(logits(model), expected)
    # Of its own implementations, eager alone gives weights.
    weights = model(prompt(2, LENGTH), output_attentions=True).attentions
    assert len(weights) == {"sdpa": 2, "eager": 4}[attention]


def test_a_short_prompt_is_dense_where_the_whole_decoder_is_enabled_and_masked_elsewhere(
    glm: PreTrainedModel,
):
    with enabling(glm.model):
        assert set(routes(glm, TOPK).values()) == {routing.Route.DENSE_MHA}
    with enabling(glm.model.layers[1:]):
        assert routing.Route.DENSE_MHA not in routes(glm, TOPK).values()
        # The rest is added; now the decoder can speak in intervals.
        with enabling(glm.model):
            assert set(routes(glm, TOPK).values()) == {routing.Route.DENSE_MHA}
        assert set(routes(glm)) == {1, 2, 3}
    assert routes(glm) == {}


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        (
            lambda layers: layers[: LEADER + 1],
            r"ModuleList cuts an index group: layer 2 attends to the selection of layer 1, and 1"
            r" lies in it and 2 does not",
        ),
        (
            lambda layers: layers[FOLLOWER].self_attn,
            r"GlmMoeDsaAttention cuts an index group: layer 2 attends to the selection of layer 1,"
            r" and 2 lies in it and 1 does not",
        ),
    ],
)
def test_a_part_that_cuts_an_index_group_is_refused_and_names_both_layers(
    glm: PreTrainedModel, cut: Callable[[nn.ModuleList], nn.Module], sentence: str
):
    part = cut(glm.model.layers)
    with pytest.raises(ValueError, match=sentence):
        enable(part)
    assert routes(glm) == {}
    expected = logits(glm)
    with enabling(glm):
        with pytest.raises(ValueError, match=sentence):
            disable(part)
        assert_close(logits(glm), expected)


def test_a_part_of_an_enabled_model_is_disabled_and_comes_back(model: PreTrainedModel):
    expected, part = logits(model), model.model.layers[0]
    mask = left_padding(LENGTH, 0, 5)
    rows = mask.bool()
    expected_padded = logits(model, attention_mask=mask)
    enable(model, "sparse")
    everything = routes(model)
    disable(disable(part))
    assert set(routes(model)) == set(everything) - {0}
    assert_close(logits(model), expected)
    assert_close(logits(model, attention_mask=mask)[rows], expected_padded[rows])
    assert torch.equal(generated(model), generated(disable(copy.deepcopy(model))))
    enable(part, "sparse")
    assert routes(model) == everything
    with enabling(part, "masked"):
        assert routes(model) == everything | {0: routing.Route.MASKED_MHA}
    assert routes(model) == everything
    disable(model)
    assert torch.equal(logits(model), expected)


def generated(model: PreTrainedModel, kind: str = "dynamic") -> Tensor:
    """Tokens after a padded prompt."""
    return model.generate(
        prompt(2, 2 * TOPK),
        attention_mask=left_padding(2 * TOPK, 0, 5),
        max_new_tokens=8,
        do_sample=False,
        cache_implementation=kind,
    )


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["decoder", "a slice", "a layer"])
def test_a_model_of_which_a_part_is_enabled_generates_the_same_tokens(
    glm: PreTrainedModel, name: str, kind: str
):
    expected = generated(glm, kind)
    with enabling(parts(glm)[name][0]):
        assert torch.equal(generated(glm, kind), expected)


def test_decoding_after_a_part_was_enabled_goes_on_from_the_same_cache(glm: PreTrainedModel):
    expected = logits(glm)[:, -1]
    cache = DynamicCache(config=glm.config)
    logits(glm, LENGTH - 1, cache=cache)
    with torch.no_grad(), enabling(glm.model.layers[1:3]):
        got = glm(prompt(2, LENGTH)[:, -1:], cache=cache).logits[:, -1]
    assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_a_part_is_compiled_beside_layers_that_are_recognised(glm: PreTrainedModel, padded: bool):
    mask = left_padding(LENGTH, 0, 5) if padded else None
    rows = torch.ones(2, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    expected = logits(glm, attention_mask=mask)
    torch._dynamo.reset()
    with enabling(glm.model.layers[1:3]):
        compiled = torch.compile(glm, backend=passes_only, fullgraph=True)
        assert_close(logits(compiled, attention_mask=mask)[rows], expected[rows])


def test_two_models_that_share_a_config_are_enabled_apart():
    config = _tiny.glm_config()
    torch.manual_seed(0)
    first, second = GlmMoeDsaForCausalLM(config).eval(), GlmMoeDsaForCausalLM(config).eval()
    assert first.config is second.config
    expected = logits(second)
    enable(first)
    assert enabled(first)
    assert not enabled(second)
    assert torch.equal(logits(second), expected)
    both = nn.ModuleList([first, second])
    assert enabled(enable(both, "sparse"))
    assert_close(logits(second), expected)
    disable(second)
    assert torch.equal(logits(second), expected)
    assert set(routes(first).values()) == {routing.Route.SPARSE_MQA}


def test_another_attention_implementation_is_for_when_the_model_is_disabled(
    model: PreTrainedModel,
):
    expected = logits(model)
    with enabling(model):
        model.set_attn_implementation("eager")
        assert_close(logits(model), expected)
        assert routes(model)
    assert model.config._attn_implementation == "eager"
    assert_close(logits(model), expected)
    model.set_attn_implementation("sdpa")


def test_changes_of_the_config_reach_an_enabled_model_and_outlive_it(model: PreTrainedModel):
    config = model.config
    with enabling(model):
        assert model.config is config
        model.config.use_cache = False
        attention = model.model.layers[0].self_attn
        assert attention.config.use_cache is False
        assert model(prompt(1, 4)).cache is None
    assert model.config.use_cache is False
    model.config.use_cache = True


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_of_which_a_part_is_enabled_is_one_too(
    glm: PreTrainedModel, make_copy: Callable[[PreTrainedModel], PreTrainedModel]
):
    expected = logits(glm)
    with enabling(glm.model.layers[1:3], "sparse"):
        copied = make_copy(glm)
    assert set(routes(copied)) == {1, 2}
    assert copied.model.layers[1].self_attn.config.original is copied.config
    assert torch.equal(logits(disable(copied)), expected)


def test_a_stage_of_a_pipeline_is_enabled():
    model = _tiny.tiny_model("deepseek_v32")
    model.model.layers[0] = PipelineIdentityLayer()
    expected = logits(model)
    with enabling(model):
        assert_close(logits(model), expected)
        assert set(routes(model, TOPK).values()) == {routing.Route.DENSE_MHA}
    glm = _tiny.tiny_model("glm_moe_dsa")
    glm.model.layers[LEADER] = PipelineIdentityLayer()
    with pytest.raises(ValueError, match="layer 2 attends to the selection of layer 1"):
        enable(glm)


def test_what_replaced_a_method_of_ours_is_refused(glm: PreTrainedModel):
    attention = glm.model.layers[3].self_attn
    attention.indexer.forward = attention.indexer.forward
    with pytest.raises(NotImplementedError, match="indexer of layer 3 must have the forward"):
        enable(glm)
    del attention.indexer.forward
    attention.expand_kv = attention.expand_kv
    with pytest.raises(NotImplementedError, match="layer 3 must have the expand_kv of its class"):
        enable(glm)
    del attention.expand_kv
    assert routes(glm) == {}


def test_a_hook_on_the_norm_of_the_index_keys_is_called(glm: PreTrainedModel):
    norms = [layer.self_attn.indexer.k_norm for layer in glm.model.layers[::3]]
    handles = [norm.register_forward_hook(lambda module, args, out: out.flip(-1)) for norm in norms]
    expected = logits(glm)
    with enabling(glm):
        assert_close(logits(glm), expected)
    for handle in handles:
        handle.remove()
    assert not torch.allclose(logits(glm), expected, atol=1e-2)
