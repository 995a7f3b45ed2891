"""enable, disable and enabling: what they change on a transformers model, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import _tiny
import pytest
import torch
from _tiny import FAMILIES, TOPK, prompt
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import dsafx
from dsafx import disable, enable, enabled, enabling, routing
from dsafx.models import record_decisions


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model of each family; tests leave it disabled."""
    return _tiny.tiny_model(request.param)


def test_disable_restores_the_model_bit_for_bit(model: PreTrainedModel):
    ids = prompt(2, 3 * TOPK)
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        expected = model(ids).logits
        assert enable(model) is model
        assert enabled(model)
        enable(model, mode="sparse")
        model(ids)
        assert disable(model) is model
        assert not enabled(model)
        assert torch.equal(model(ids).logits, expected)
    assert model.config._attn_implementation == "sdpa"
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    assert disable(model) is model


def test_enabling_ends_with_the_mode_that_was_there_before(model: PreTrainedModel):
    ids = prompt(1, 8)
    enable(model, mode="sparse")
    with torch.no_grad(), enabling(model, mode="masked"):
        pass
    with torch.no_grad(), record_decisions() as records:
        model(ids)
    disable(model)
    assert {record.decision.reason for record in records} == {routing.Reason.MODE_SPARSE}


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_state_dict_and_copies_are_those_of_the_model(
    model: PreTrainedModel, make_copy: Callable[[PreTrainedModel], PreTrainedModel]
):
    ids, keys = prompt(1, 24), list(model.state_dict())
    with torch.no_grad(), enabling(model):
        assert list(model.state_dict()) == keys
        copied = make_copy(model)
        assert torch.equal(copied(ids).logits, model(ids).logits)
        assert copied.model.layers[0].self_attn.indexer.forward.args[0] is not (
            model.model.layers[0].self_attn.indexer
        )
        disable(copied)
        plain = copied(ids).logits
        assert enabled(model)
    with torch.no_grad():
        assert torch.equal(plain, model(ids).logits)


def test_what_is_no_dsa_model_is_refused_with_a_reason():
    with pytest.raises(TypeError, match="must be a module of a transformers model, got 'model'"):
        enable("model")  # type: ignore[type-var]
    with pytest.raises(ValueError, match="Linear has no DSA attention layer"):
        enable(torch.nn.Linear(2, 2))
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    with pytest.raises(ValueError, match="deepseek_v32, glm_moe_dsa, got 'llama'"):
        enable(llama)
    with pytest.raises(ValueError, match="mode must be one of"):
        enable(_tiny.tiny_model("glm_moe_dsa"), mode="fast")


def test_an_up_projection_that_is_no_linear_layer_is_refused_by_layer():
    model = _tiny.tiny_model("glm_moe_dsa")
    attention = model.model.layers[2].self_attn
    attention.kv_b_proj = torch.nn.Sequential(attention.kv_b_proj)
    with pytest.raises(NotImplementedError, match=r"layer 2 must be an nn\.Linear.*got Sequential"):
        enable(model)
    assert not enabled(model)


def test_attention_dropout_in_training_is_refused():
    model = _tiny.tiny_model("deepseek_v32", attention_dropout=0.1)
    ids = prompt(1, 4)
    enable(model)(ids)
    with pytest.raises(NotImplementedError, match=r"attention dropout .* 0\.1 for layer 0"):
        model.train()(ids)
    with pytest.raises(NotImplementedError, match="attention dropout"):
        enable(disable(model))


def test_compile_enables_in_place_keeps_a_chosen_mode_and_leaves_generate_nothing_to_compile():
    model = enable(_tiny.tiny_model("glm_moe_dsa"), mode="sparse")
    with pytest.raises(TypeError, match="got 'inductor'"):
        dsafx.compile(model, backend="inductor")
    assert dsafx.compile(model, dynamic=True) is model
    assert model.generation_config.disable_compile
    assert model.model.layers[0].self_attn.dsa_layer.routing.route.mode == "sparse"
    plain = _tiny.tiny_model("deepseek_v32")
    assert enabled(dsafx.compile(plain))
