"""Training enabled and recognised models: the losses, gradients and selections of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _recognised import ONE_LAYER, TWO_LAYERS, groups
from _tiny import FAMILIES, TOPK, left_padding, prompt, tiny_model
from _uncompiled import passes_only
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import dsafx
from dsafx.passes import collect

# A few steps in, weights move keys past each other; with as many index heads no two scores are
# equal, so that all of them choose the same key.
INDEX_HEADS = 32
LENGTH = 3 * TOPK
TOKENS, MASK = prompt(2, LENGTH), left_padding(LENGTH, 0, 5)
LABELS = torch.where(MASK.bool(), TOKENS, -100)


def trainable(family: str, **changes: Any) -> PreTrainedModel:
    """A model in training mode, the same each time; there is no dropout in it."""
    return tiny_model(family, **{"index_n_heads": INDEX_HEADS, **changes}).train()


def loss_of(run: Callable[..., Any]) -> Tensor:
    """Of one left-padded batch, in which K is a third of the length."""
    loss: Tensor = run(input_ids=TOKENS, attention_mask=MASK, labels=LABELS, use_cache=False).loss
    return loss


def losses(
    model: nn.Module, steps: int = 20, run: Callable[..., Any] | None = None, rate: float = 1e-3
) -> list[float]:
    """Before each of ``steps`` steps of AdamW on the one batch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model if run is None else run)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def gradients(model: nn.Module, run: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Of the loss, by parameter."""
    model.zero_grad()
    loss_of(model if run is None else run).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_curve(actual: list[float], expected: list[float]) -> None:
    """Step by step; transformers in float64 is as far from transformers in float32."""
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", ["masked", "sparse"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_overfits_one_batch_with_the_losses_of_transformers(family: str, mode: str):
    expected = losses(trainable(family))
    assert expected[-1] < expected[0] / 3
    assert_same_curve(losses(dsafx.enable(trainable(family), mode)), expected)


@pytest.mark.parametrize(
    ("family", "enabled"),
    [
        ("glm_moe_dsa", True),
        pytest.param("deepseek_v32", False, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", True, marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_trains_with_the_losses_of_transformers(family: str, enabled: bool):
    check_compiled(family, enabled, passes_only, TWO_LAYERS[family])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "enabled"), [("glm_moe_dsa", True), ("deepseek_v32", False)])
def test_a_model_compiled_by_inductor_trains_with_the_losses_of_transformers(
    family: str, enabled: bool
):
    with fresh_cache():
        check_compiled(family, enabled, "dsafx", ONE_LAYER[family])


def check_compiled(family: str, enabled: bool, backend: Any, sizes: dict[str, Any]) -> None:
    expected = losses(trainable(family, **sizes), steps=5)
    model = trainable(family, **sizes)
    if enabled:
        dsafx.enable(model)
    run = torch.compile(model, backend=backend, fullgraph=True)
    with collect() as reports:
        assert_same_curve(losses(model, 5, run), expected)
    if not enabled:
        recognised = [report.of("recognise") for report in reports if report.stage == "pre_grad"]
        assert recognised
        for found in recognised:
            assert [*groups(found)] == [str(n) for n in range(sizes["num_hidden_layers"])]
            assert found.declined == []
    assert {report.inference for report in reports if report.stage == "post_grad"} == {False}
    assert [report.problem for report in reports if report.problem] == []


class Selections(TorchDispatchMode):
    """Gathers what ``index_select`` answers, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.dsafx.index_select.default:
            self.found.append(out)
        return out


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_layers_select_the_same_keys_again_and_have_the_same_gradients(
    family: str, reentrant: bool
):
    """A shared layer of GLM is made again with the selection that its leader made before."""
    model = dsafx.enable(trainable(family))
    with Selections() as selections:
        expected = gradients(model)
    once = selections.found
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with Selections() as selections:
        actual = gradients(model)
    assert len(once) == 3
    assert_all_equal(selections.found, [*once, *reversed(once)])
    assert actual.keys() == expected.keys()
    assert_all_equal(list(actual.values()), list(expected.values()))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_a_checkpoint_around_an_index_group_makes_its_selection_again(reentrant: bool):
    model = dsafx.enable(trainable("glm_moe_dsa"))
    with Selections() as selections:
        expected = gradients(model)
    once = selections.found

    def run(input_ids: Tensor, labels: Tensor, **settings: Any) -> Any:
        def logits(embedded: Tensor) -> Tensor:
            result: Tensor = model(inputs_embeds=embedded, **settings).logits
            return result

        embedded = model.get_input_embeddings()(input_ids)
        output = checkpoint(logits, embedded, use_reentrant=reentrant)
        loss = model.loss_function(output, labels, vocab_size=model.config.vocab_size)
        return type("Output", (), {"loss": loss})

    with Selections() as selections:
        actual = gradients(model, run)
    assert_all_equal(selections.found, [*once, *once])
    assert_all_equal(list(actual.values()), list(expected.values()))


def assert_all_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit."""
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


PROJECTIONS = [
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("wq_b", "wk", "weights_proj"),
]


def with_adapters(family: str, enable: bool) -> nn.Module:
    """LoRA on every projection of the attention and the indexer; nothing else is trained."""
    peft = pytest.importorskip("peft")
    model = trainable(family)
    if enable:
        dsafx.enable(model)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=PROJECTIONS, init_lora_weights=False
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted.train()


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_every_projection_train_as_with_transformers(family: str):
    plain, ours = (with_adapters(family, enable) for enable in (False, True))
    expected, actual = gradients(plain), gradients(ours)
    assert actual.keys() == expected.keys()
    trained = {name.split(".")[-4] for name in expected}
    assert trained == set(PROJECTIONS[:5])
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert scale > 0
        torch.testing.assert_close(
            actual[name],
            gradient,
            atol=1e-4 * scale,
            rtol=0,
            msg=lambda text, of=name: f"{of}: {text}",
        )
    assert_same_curve(losses(ours, 10, rate=1e-2), losses(plain, 10, rate=1e-2))
