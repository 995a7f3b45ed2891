"""enable with adapters of PEFT: on any projection, in any order, changed at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _tiny
import pytest
import torch
from _tiny import FAMILIES, TOPK, left_padding, prompt
from _uncompiled import passes_only
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsafx import disable, enable, enabled, enabling, routing
from dsafx.models import record_decisions

peft = pytest.importorskip("peft")

LENGTH = 2 * TOPK + 3
ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
INDEXER = ["wq_b", "wk", "weights_proj"]
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"num_hidden_layers": 2},
    "glm_moe_dsa": {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]},
}


def tiny_model(family: str) -> PreTrainedModel:
    """Two layers, the same weights each time."""
    return _tiny.tiny_model(family, **SIZES[family])


def lora(*names: str, **settings: Any) -> Any:
    """Adapters that change what the layers of these names compute."""
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(names), init_lora_weights=False, **settings
    )


def with_adapters(model: PreTrainedModel, *names: str, seed: int = 1, **settings: Any) -> Any:
    """A ``PeftModel`` in eval mode, with the same adapters each time."""
    torch.manual_seed(seed)
    return peft.get_peft_model(model, lora(*names, **settings)).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=prompt(2, LENGTH)).logits


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("first", ["adapters", "enable"])
@pytest.mark.parametrize("name", [*ATTENTION, *INDEXER])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_on_any_projection_gives_the_same_logits(family: str, name: str, first: str):
    expected = logits(with_adapters(tiny_model(family), name))
    assert not torch.allclose(expected, logits(tiny_model(family)), atol=1e-3)
    if first == "adapters":
        model = with_adapters(tiny_model(family), name)
        enable(model.get_base_model())
    else:
        model = with_adapters(enable(tiny_model(family)), name)
    with record_decisions() as records:
        assert_close(logits(model), expected)
    assert {record.layer_idx for record in records} == {0, 1}


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("glm_moe_dsa", "aot_eager"),
        *(pytest.param(family, passes_only, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_adapters_on_all_projections_are_compiled_into_one_graph(family: str, backend: Any):
    model = with_adapters(tiny_model(family), *ATTENTION, *INDEXER)
    expected = logits(model)
    compiled = torch.compile(enable(model), backend=backend, fullgraph=True)
    assert_close(logits(compiled), expected)


def test_the_peft_model_itself_is_enabled_and_disabled():
    model = with_adapters(tiny_model("glm_moe_dsa"), *ATTENTION)
    expected = logits(model)
    assert enable(model) is model
    assert enabled(model)
    assert enabled(model.get_base_model())
    assert_close(logits(model), expected)
    assert torch.equal(logits(disable(model)), expected)
    with enabling(model, "sparse"):
        assert_close(logits(model), expected)
    assert not enabled(model)


@pytest.mark.parametrize("length", [TOPK // 2, LENGTH])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_peft_model_generates_the_same_tokens(kind: str, length: int):
    model = with_adapters(tiny_model("glm_moe_dsa"), *ATTENTION)

    def generate() -> Tensor:
        return model.generate(
            input_ids=prompt(2, length),
            attention_mask=left_padding(length, 0, 4),
            max_new_tokens=6,
            do_sample=False,
            cache_implementation=kind,
        )

    expected = generate()
    with enabling(model), record_decisions() as records:
        assert torch.equal(generate(), expected)
    # Through PEFT's own generate too, padding reaches the layers as intervals: with a mask dense
    # MHA would be illegal. A static cache is longer than the prompt, and another route is cheaper.
    taken = {record.decision.route for record in records}
    assert (routing.Route.DENSE_MHA in taken) is (length < TOPK and kind == "dynamic")


def test_adapters_come_and_go_while_the_model_is_enabled():
    plain, ours = (with_adapters(tiny_model("glm_moe_dsa"), "kv_b_proj", "wk") for _ in range(2))
    enable(ours)
    for model in (plain, ours):
        torch.manual_seed(2)
        model.add_adapter("second", lora("kv_b_proj", "o_proj"))
    seen = [logits(plain)]
    for change in _CHANGES:
        with change(plain), change(ours):
            seen.append(logits(plain))
            assert_close(logits(ours), seen[-1])
    assert not torch.allclose(seen[0], seen[1], atol=1e-3)
    assert not torch.allclose(seen[1], seen[2], atol=1e-3)
    base, ours_base = plain.merge_and_unload(), ours.merge_and_unload()
    assert enabled(ours_base)
    assert type(ours_base.model.layers[0].self_attn.kv_b_proj) is nn.Linear
    assert_close(logits(ours_base), logits(base))
    assert torch.equal(logits(disable(ours_base)), logits(base))


class _Set:
    """Another adapter is active from here on."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def __call__(self, model: Any) -> _Set:
        model.base_model.set_adapter(self.names)
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def _merged(model: Any) -> _Set:
    model.merge_adapter()
    return _Set()


_CHANGES: list[Callable[[Any], Any]] = [
    lambda model: model.disable_adapter(),
    _Set("second"),
    _Set("default", "second"),
    _merged,
    lambda model: model.disable_adapter(),
]


def test_adapters_that_are_injected_without_a_peft_model_work_too():
    plain, ours = tiny_model("deepseek_v32"), enable(tiny_model("deepseek_v32"))
    for model in (plain, ours):
        torch.manual_seed(3)
        peft.inject_adapter_in_model(lora(*ATTENTION, *INDEXER), model)
        model.eval()
    assert_close(logits(ours), logits(plain))
    assert not torch.allclose(logits(ours), logits(tiny_model("deepseek_v32")), atol=1e-3)


@pytest.mark.parametrize("trained", [{}, {"modules_to_save": ["kv_b_proj"]}])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_adapters_are_those_of_transformers(family: str, trained: dict[str, Any]):
    names = [name for name in ATTENTION if not trained or name != "kv_b_proj"]
    model = with_adapters(tiny_model(family), *names, *INDEXER, **trained).train()
    ids = prompt(2, LENGTH)

    def gradients() -> dict[str, Tensor | None]:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    expected = gradients()
    with enabling(model):
        got = gradients()
    assert any("kv_b_proj" in name for name in got)
    for name, gradient in expected.items():
        # No gradient passes through a selection.
        assert (gradient is None) is (".indexer." in name), name
        if gradient is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


def test_dropout_is_refused_on_the_up_projection_alone_and_in_training_alone():
    model = enable(with_adapters(tiny_model("deepseek_v32"), *ATTENTION, lora_dropout=0.5))
    expected = logits(disable(model))
    assert_close(logits(enable(model)), expected)
    with pytest.raises(NotImplementedError, match=r"of kv_b_proj of layer 0 drops inputs"):
        model.train()(input_ids=prompt(1, 4))
    with pytest.raises(NotImplementedError, match=r"of kv_b_proj of layer 0 drops inputs"):
        enable(disable(model))
    others = [name for name in ATTENTION if name != "kv_b_proj"]
    model = enable(with_adapters(tiny_model("deepseek_v32"), *others, lora_dropout=0.5)).train()
    model(input_ids=prompt(1, 4), labels=prompt(1, 4)).loss.backward()


def test_an_adapter_for_each_request_is_refused():
    model = with_adapters(tiny_model("deepseek_v32"), "kv_b_proj")
    ids = prompt(2, 8)
    model(input_ids=ids, adapter_names=["default", "__base__"])
    with (
        enabling(model),
        pytest.raises(NotImplementedError, match="layer 0 must have no hooks"),
    ):
        model(input_ids=ids, adapter_names=["default", "__base__"])


def test_another_tuner_is_refused_on_the_up_projection_alone():
    def with_ia3(*names: str) -> Any:
        config = peft.IA3Config(
            target_modules=list(names), feedforward_modules=[], init_ia3_weights=False
        )
        torch.manual_seed(4)
        return peft.get_peft_model(tiny_model("deepseek_v32"), config).eval()

    with pytest.raises(NotImplementedError, match=r"layer 0 is peft\.tuners\.ia3\.layer\.Linear"):
        enable(with_ia3("kv_b_proj"))
    model = with_ia3("q_b_proj", "o_proj")
    expected = logits(model)
    assert_close(logits(enable(model)), expected)


def test_a_saved_adapter_knows_nothing_of_us(tmp_path: Any):
    model = with_adapters(enable(tiny_model("glm_moe_dsa")), *ATTENTION)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_model("glm_moe_dsa"), tmp_path).eval()
    assert_close(logits(loaded), expected)
    assert_close(logits(enable(loaded)), expected)
