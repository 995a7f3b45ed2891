"""Every model type of transformers that selects keys is supported, or refused with its reason."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from _tiny import TOPK, deepseek_config, left_padding, prompt
from torch import Tensor
from transformers import (
    AutoConfig,
    AXK2Config,
    AXK2ForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

from dsafx import enable, enabled, enabling, routing
from dsafx.models import _families, record_decisions

MODELS = Path(transformers.__file__).parent / "models"
SELECTS = re.compile(r"^class \w*Indexer\w*\(|^    index_topk\w*:", re.MULTILINE)


def model_types_that_select() -> list[str]:
    """Registered model types whose folder defines an indexer, or has ``index_topk`` in a config."""
    found = []
    for model_type in CONFIG_MAPPING_NAMES:
        folder = MODELS / model_type_to_module_name(model_type)
        sources = (*folder.glob("modeling_*.py"), *folder.glob("configuration_*.py"))
        if not any(SELECTS.search(source.read_text(encoding="utf-8")) for source in sources):
            continue
        if CONFIG_MAPPING[model_type].base_config_key not in ("vision_config", "audio_config"):
            found.append(model_type)
    return found


def tiny_axk2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 A.X-K2 in small, with grouped experts in its last layer and yarn RoPE."""
    torch.manual_seed(seed)
    sizes = {
        key: value
        for key, value in deepseek_config().to_dict().items()
        if key not in ("model_type", "architectures", "mlp_layer_types", "layer_types")
    }
    settings = {"gated_norm_rank": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2}
    model = AXK2ForCausalLM(AXK2Config(**{**sizes, **settings, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            elif name.endswith("norm.bias"):
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
        model.model.embed_tokens.weight.normal_(0.0, 1.0)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A tiny A.X-K2; tests leave it disabled."""
    return tiny_axk2()


def run(model: PreTrainedModel, ids: Tensor, mask: Tensor, prefill: int, kind: str) -> Tensor:
    """Logits at the real tokens of a prefill and of one step for each further token."""
    length = ids.shape[1]
    cache: Any = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=length + 3)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    parts = []
    with torch.no_grad():
        for start, end in itertools.pairwise([0, prefill, *range(prefill + 1, length + 1)]):
            out = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                cache=cache,
            )
            parts.append(out.logits)
    return torch.cat(parts, dim=1)[mask.bool()]


def test_every_model_type_that_selects_has_a_row_and_no_row_is_made_up():
    rows = [*_families.SUPPORTED, *_families.REFUSED]
    assert len(rows) == len(set(rows))
    # A newer transformers may have dropped a type; it may not have one that nobody looked at.
    assert set(model_types_that_select()) - set(rows) == set()
    if transformers.__version__.startswith("5.24."):
        assert set(rows) == set(model_types_that_select())


@pytest.mark.parametrize("model_type", _families.REFUSED)
def test_enable_refuses_a_model_that_selects_otherwise_and_says_why(model_type: str):
    model = PreTrainedModel(AutoConfig.for_model(model_type))
    with pytest.raises(NotImplementedError) as refusal:
        enable(model)
    assert str(refusal.value) == (
        f"model_type {model_type} is not supported: {_families.REFUSED[model_type]}."
        " Supported are axk2, deepseek_v32, glm_moe_dsa"
    )
    assert not enabled(model)


def test_any_other_model_is_told_what_is_supported():
    with pytest.raises(ValueError, match="one of axk2, deepseek_v32, glm_moe_dsa, got 'llama'"):
        enable(PreTrainedModel(LlamaConfig()))
    with pytest.raises(ValueError, match="got None"):
        _families.family(None)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("length", [TOPK - 1, TOPK, TOPK + 1, 3 * TOPK])
def test_axk2_prefill_and_four_decode_steps_with_left_padding_give_the_same_logits(
    model: PreTrainedModel, length: int, kind: str
):
    ids, mask = prompt(2, length + 4), left_padding(length + 4, 0, 5)
    expected = run(model, ids, mask, length, kind)
    with enabling(model), record_decisions() as records:
        got = run(model, ids, mask, length, kind)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert len(records) == 5 * model.config.num_hidden_layers


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", ["sparse", "masked"])
def test_axk2_gives_the_same_logits_in_each_forced_mode(
    model: PreTrainedModel, mode: str, attention: str
):
    ids, mask = prompt(2, 3 * TOPK), left_padding(3 * TOPK, 0, 5)
    model.set_attn_implementation(attention)
    expected = run(model, ids, mask, 40, "dynamic")
    routes = {"sparse": routing.Route.SPARSE_MQA, "masked": routing.Route.MASKED_MHA}
    with enabling(model, mode), record_decisions() as records:
        got = run(model, ids, mask, 40, "dynamic")
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert {record.decision.route for record in records} == {routes[mode]}


def test_axk2_generates_the_same_tokens(model: PreTrainedModel):
    ids, mask = prompt(2, 2 * TOPK), left_padding(2 * TOPK, 0, 5)
    settings: Any = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **settings)
    with enabling(model):
        assert torch.equal(model.generate(ids, **settings), expected)


def test_axk2_gradients_equal_those_of_transformers(model: PreTrainedModel):
    ids = prompt(2, 3 * TOPK)

    def gradients() -> dict[str, Tensor | None]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients()
    with enabling(model):
        got = gradients()
    model.zero_grad()
    for name, gradient in expected.items():
        assert (gradient is None) == (".indexer." in name)
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
