"""``dsafx.tensor_parallel``: models in memory and layers of our own, shared by two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _ranks import RANKS, Raised, Ranks
from _sharded import LENGTH, assert_same_gradients, gradients, language_loss, logits
from _tiny import glm_config, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dsafx
from dsafx import ops
from dsafx.models import DSAAttention, DSAConfig, record_decisions


def split_in_memory(rank: int, family: str, enable: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = dsafx.tensor_parallel(tiny_model(family), init_device_mesh("cpu", (RANKS,)))
    if enable:
        dsafx.enable(model)
    return logits(model), gradients(model, language_loss(model))


@pytest.mark.parametrize("enable", [False, True])
def test_a_model_that_is_split_in_memory_gives_what_it_gave_whole(ranks: Ranks, enable: bool):
    one = tiny_model("glm_moe_dsa")
    expected, expected_gradients = logits(one), gradients(one, language_loss(one))
    for found, found_gradients in ranks.run(split_in_memory, "glm_moe_dsa", enable):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert_same_gradients(found_gradients, expected_gradients)


def layer_and_inputs() -> tuple[DSAAttention, tuple[Any, ...]]:
    """A layer of our own, and one request of ``LENGTH`` packed tokens."""
    layer = DSAAttention(DSAConfig.from_transformers(glm_config()))
    half = layer.config.qk_rope_head_dim // 2
    generator = torch.Generator().manual_seed(1)
    angle = torch.randn(LENGTH, half, generator=generator)
    ends = torch.arange(1, LENGTH + 1, dtype=torch.int32)
    hidden = torch.randn(LENGTH, layer.config.hidden_size, generator=generator)
    return layer, (hidden, angle.cos(), angle.sin(), torch.zeros_like(ends), ends, LENGTH, LENGTH)


def run_layer(rank: int, split: bool) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    layer, inputs = layer_and_inputs()
    if split:
        dsafx.tensor_parallel(layer, init_device_mesh("cpu", (RANKS,)))
    with ops.options(check=True), record_decisions() as records:
        out, _ = layer(*inputs)
    return out.detach(), gradients(layer, out.square().sum()), [str(r.decision) for r in records]


def test_a_layer_of_our_own_that_is_split_gives_what_it_gave_whole(ranks: Ranks):
    expected, expected_gradients, decisions = run_layer(0, split=False)
    for found, found_gradients, found_decisions in ranks.run(run_layer, True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert_same_gradients(found_gradients, expected_gradients)
        assert found_decisions == decisions


REFUSED: dict[str, tuple[dict[str, int], str]] = {
    "heads": ({"num_attention_heads": 3}, "the number of heads of model.layers.0.self_attn"),
    "width": ({"intermediate_size": 63}, "the width of model.layers.0.mlp"),
}


def split_unevenly(rank: int, changes: dict[str, int]) -> None:
    model = tiny_model("deepseek_v32", num_key_value_heads=1, **changes)
    try:
        dsafx.tensor_parallel(model, init_device_mesh("cpu", (RANKS,)))
    finally:
        assert not any(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_the_ranks_cannot_share_is_refused_before_anything_is_split(
    ranks: Ranks, changes: dict[str, int], message: str
):
    for answer in ranks.answers(split_unevenly, changes):
        assert isinstance(answer, Raised)
        assert answer.kind == "ValueError"
        assert answer.message.startswith(f"{message} must be a multiple of the 2 ranks")


def split_twice(rank: int, between: str) -> None:
    model = tiny_model("deepseek_v32")
    mesh = init_device_mesh("cpu", (RANKS,))
    if between == "enable":
        dsafx.enable(model)
    else:
        dsafx.tensor_parallel(model, mesh)
    dsafx.tensor_parallel(model, mesh)


@pytest.mark.parametrize(
    ("before", "message"),
    [("enable", "is enabled: shard a model first"), ("split", "is sharded already")],
)
def test_a_model_is_split_once_and_before_it_is_enabled(ranks: Ranks, before: str, message: str):
    for answer in ranks.answers(split_twice, before):
        assert isinstance(answer, Raised)
        assert answer.kind == "ValueError"
        assert message in answer.message
