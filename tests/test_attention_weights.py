"""``output_attentions``: the weights of the selected keys, where transformers' eager has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _recognised import ONE_LAYER, make_cache, small_model
from _tiny import FAMILIES, TOPK, left_padding, prompt
from torch import Tensor
from transformers import PreTrainedModel

from dsafx import enable, enabling
from dsafx.models._attention_weights import attention_weights

LENGTH = 40
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of two layers on eager attention, of each family; tests leave it disabled."""
    return small_model(request.param, attention="eager")


def weights(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    """[layers, B, S, N, keys]"""
    with torch.no_grad():
        attentions = model(ids, output_attentions=True, **kwargs).attentions
    assert len(attentions) == model.config.num_hidden_layers
    return torch.stack(attentions).transpose(2, 3)


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("mode", ["auto", "sparse", "masked"])
@pytest.mark.parametrize("length", [TOPK, LENGTH])
def test_the_weights_are_those_of_eager_attention(model: PreTrainedModel, length: int, mode: str):
    ids, mask = prompt(2, length), left_padding(length, 0, 5)
    expected = weights(model, ids, attention_mask=mask)
    with enabling(model, mode):
        got = weights(model, ids, attention_mask=mask)
    assert got.shape == (2, 2, length, model.config.num_attention_heads, length)
    rows = mask.bool()
    assert_close(got[:, rows], expected[:, rows])
    assert_close(got[:, rows].sum(-1), torch.ones(got[:, rows].shape[:-1]))
    kept = (got > 0).sum(-1).amax(dim=(1, 3))
    assert torch.equal(kept, torch.arange(1, length + 1).clamp(max=TOPK).expand(2, -1))
    assert not got[:, 1, :5].any()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_later_tokens_weigh_cached_keys(model: PreTrainedModel, kind: str):
    ids, mask = prompt(2, LENGTH), left_padding(LENGTH, 0, 5)
    mask[0, 9:12] = 0

    def run() -> Tensor:
        cache = make_cache(kind, model)
        model(ids[:, :-3], attention_mask=mask[:, :-3], cache=cache)
        return weights(model, ids[:, -3:], attention_mask=mask, cache=cache)

    expected = run()
    with enabling(model):
        assert_close(run(), expected)


def test_generate_collects_them(model: PreTrainedModel):
    ids = prompt(1, LENGTH)
    settings = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_attentions": True}
    expected = model.generate(ids, **settings).attentions
    with enabling(model):
        got = model.generate(ids, **settings).attentions
    assert [[layer.shape[2:] for layer in step] for step in got] == [
        [(rows, keys)] * 2 for rows, keys in ((LENGTH, LENGTH), (1, LENGTH + 1), (1, LENGTH + 2))
    ]
    for step, theirs in zip(got, expected, strict=True):
        for layer, reference in zip(step, theirs, strict=True):
            assert_close(layer, reference)


def test_they_are_made_only_for_who_asks(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    ids, made = prompt(1, TOPK), []

    def count(*args: Any) -> Tensor:
        made.append(args)
        return attention_weights(*args)

    monkeypatch.setattr("dsafx.models._seams.attention_weights", count)
    with torch.no_grad(), enabling(model):
        assert model(ids).attentions is None
        assert not made
        monkeypatch.setattr(model.config, "_output_attentions", True)
        assert len(model(ids).attentions) == len(made) == 2
        assert model(ids, output_attentions=False).attentions is None
    assert len(made) == 2


def test_compiled_code_gives_them_too():
    ids, mask = prompt(2, LENGTH), left_padding(LENGTH, 0, 5)
    model = small_model("glm_moe_dsa", sizes=ONE_LAYER["glm_moe_dsa"], attention="eager")
    expected = weights(model, ids, attention_mask=mask, use_cache=False)
    enable(model)
    # In the first call, transformers installs its hooks, under a lock that cannot be traced.
    weights(model, ids)
    model.compile(backend="eager", fullgraph=True)
    got = weights(model, ids, attention_mask=mask, use_cache=False)
    rows = mask.bool()
    assert_close(got[:, rows], expected[:, rows])


def test_gradients_go_through_them_and_an_empty_row_has_none():
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        tensor = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return tensor.requires_grad_()

    operands = (randn(1, 2, 3, 4), randn(1, 2, 3, 2), randn(1, 1, 5, 6), randn(1, 1, 5, 2))
    up = randn(2 * (4 + 3), 6)
    intervals = torch.tensor([[[0, 3], [4, 4], [1, 5]]], dtype=torch.int32)
    indices = torch.tensor([[[0, 2, -1], [-1, -1, -1], [-1, 3, 0]]], dtype=torch.int32)

    def run(*tensors: Tensor) -> Tensor:
        return attention_weights(*tensors, indices, intervals, 0.4)

    seen = run(*operands, up)[0, 0] > 0
    assert seen.int().tolist() == [[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 1]]
    assert torch.autograd.gradcheck(run, (*operands, up))
    everything = attention_weights(*operands, up, None, intervals, 0.4)[0, 0] > 0
    assert everything.int().tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]
