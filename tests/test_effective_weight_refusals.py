"""A projection for which no weight stands is refused by name, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _projections import IN, NAME, OUT, Holder, lora
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers.integrations.finegrained_fp8 import FP8Linear

from dsafx.models._weights import check_weight, effective_weight


def with_bias() -> nn.Module:
    return nn.Linear(IN, OUT)


def with_a_hook() -> nn.Module:
    projection = Holder().kv_b_proj
    projection.register_forward_hook(lambda module, args, out: out + 1)
    return projection


def with_another_forward() -> nn.Module:
    projection = Holder().kv_b_proj
    projection.forward = lambda x: x
    return projection


def with_an_old_weight_norm() -> nn.Module:
    projection = Holder().kv_b_proj
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(projection)


def in_integers() -> nn.Module:
    projection = Holder().kv_b_proj
    projection.weight = nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    return projection


def of_another_kind() -> nn.Module:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    return Scaled(IN, OUT, bias=False)


def fp8_with_bias() -> nn.Module:
    return FP8Linear(IN, OUT, (128, 128), has_bias=True)


def fp4() -> nn.Module:
    projection = FP8Linear(IN, OUT, (128, 128))
    projection.weight = nn.Parameter(torch.zeros(OUT, IN // 2, dtype=torch.int8), False)
    return projection


def int8_with_int8_inputs() -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    holder = Holder()
    torchao.quantize_(holder, torchao.Int8DynamicActivationInt8WeightConfig())
    return holder.kv_b_proj


def lora_with_dropout() -> nn.Module:
    return lora(lora_dropout=0.1).train().kv_b_proj


def lora_with_bias() -> nn.Module:
    return lora(lora_bias=True).kv_b_proj


def activated_lora() -> nn.Module:
    return lora(alora_invocation_tokens=[1]).kv_b_proj


def ia3() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(target_modules=["kv_b_proj"], feedforward_modules=[])
    return peft.get_peft_model(Holder(), config).base_model.model.kv_b_proj


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (with_bias, "must have no bias"),
        (with_a_hook, "must have no hooks: its weight is used without calling it"),
        (with_another_forward, "must have no hooks"),
        (with_an_old_weight_norm, "must have no hooks"),
        (in_integers, r"16 bits or more .* got Parameter of torch\.int8"),
        (of_another_kind, r"must be an nn\.Linear .* got Scaled"),
        (fp8_with_bias, "must have no bias"),
        (fp4, r"a weight of float8_e4m3fn, got one of torch\.int8"),
        (int8_with_int8_inputs, "scales or quantises its input.*Int8WeightOnlyConfig"),
        (lora_with_dropout, r"'default' of .* lora_dropout = 0\.1.* Train kv_b_proj with"),
        (lora_with_bias, r"'default' of .* must have no bias \(lora_bias\)"),
        (activated_lora, "'default' of .* is LoRA's variant ALora: plain LoRA and DoRA are"),
        (ia3, r"is peft\.tuners\.ia3\.layer\.Linear, .* LoRA on linear layers"),
    ],
)
def test_what_no_weight_stands_for_is_refused_by_name(case: Callable[[], nn.Module], reason: str):
    projection = case()
    for function in (check_weight, lambda *args: effective_weight(*args, torch.float32)):
        with pytest.raises(NotImplementedError, match=reason) as refusal:
            function(projection, NAME)
        assert NAME in str(refusal.value)
