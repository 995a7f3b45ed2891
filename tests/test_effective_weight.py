"""The effective weight of a linear layer is the matrix that does what the layer does."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest
import torch
from _projections import IN, NAME, OUT, Holder, lora
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

pytest.importorskip("transformers")

from transformers.integrations.finegrained_fp8 import FP8Linear

from dsafx.models._weights import check_weight, effective_weight


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def plain() -> Holder:
    return Holder()


def parametrised() -> Holder:
    holder = Holder()
    parametrize.register_parametrization(holder.kv_b_proj, "weight", Doubled())
    return holder


def weight_norm() -> Holder:
    holder = Holder()
    parametrizations.weight_norm(holder.kv_b_proj)
    with torch.no_grad():
        holder.kv_b_proj.parametrizations.weight.original0.mul_(1.5)
    return holder


def int8() -> Holder:
    torchao = pytest.importorskip("torchao.quantization")
    holder = Holder()
    torchao.quantize_(holder, torchao.Int8WeightOnlyConfig())
    return holder


def lora_of_one() -> Holder:
    holder = lora()
    holder.kv_b_proj.set_adapter("second")
    return holder


def lora_merged() -> Holder:
    holder = lora()
    holder.kv_b_proj.merge()
    return holder


def lora_disabled() -> Holder:
    holder = lora()
    holder.kv_b_proj.enable_adapters(False)
    return holder


def lora_merged_and_disabled() -> Holder:
    holder = lora_merged()
    holder.kv_b_proj.enable_adapters(False)
    return holder


def dora() -> Holder:
    holder = lora(use_dora=True)
    with torch.no_grad():
        for magnitude in holder.kv_b_proj.lora_magnitude_vector.values():
            magnitude.weight.mul_(torch.rand(OUT) + 0.5)
    return holder


def dora_merged() -> Holder:
    holder = dora()
    holder.kv_b_proj.merge()
    return holder


def lora_on_weight_norm() -> Holder:
    return lora(weight_norm())


def lora_on_int8() -> Holder:
    return lora(int8())


def modules_to_save() -> Holder:
    peft = pytest.importorskip("peft")

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv_b_proj, self.other = Holder().kv_b_proj, nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.kv_b_proj(x)

    config = peft.LoraConfig(target_modules=["other"], modules_to_save=["kv_b_proj"])
    holder = peft.get_peft_model(Two(), config).base_model.model
    with torch.no_grad():
        holder.kv_b_proj.modules_to_save["default"].weight.mul_(3)
    return holder


CASES: list[Callable[[], Holder]] = [
    plain,
    parametrised,
    weight_norm,
    int8,
    lora,
    lora_of_one,
    lora_merged,
    lora_disabled,
    dora,
    dora_merged,
    lora_on_weight_norm,
    lora_on_int8,
    modules_to_save,
]


def weight_of(holder: Holder, dtype: torch.dtype = torch.float32) -> Tensor:
    return effective_weight(holder.kv_b_proj, NAME, dtype)


# PEFT then takes the adapters out of the weight at the next call.
@pytest.mark.parametrize("case", [*CASES, lora_merged_and_disabled])
def test_the_weight_does_what_the_layer_does(case: Callable[[], Holder]):
    holder, x = case(), torch.randn(6, IN)
    # The weight first: a layer that is called may change itself.
    got = x @ weight_of(holder).T
    torch.testing.assert_close(got, holder(x), atol=1e-5, rtol=1e-5)
    check_weight(holder.kv_b_proj, NAME)


@pytest.mark.parametrize("case", CASES)
def test_traced_it_is_the_same_weight_in_one_graph(case: Callable[[], Holder]):
    holder = case()
    expected = weight_of(holder)
    compiled = torch.compile(weight_of, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(holder), expected)


@pytest.mark.parametrize(
    "case", [plain, weight_norm, lora, dora, lora_on_weight_norm, lora_on_int8, modules_to_save]
)
def test_gradients_are_those_of_calling_the_layer(case: Callable[[], Holder]):
    holder, x = case(), torch.randn(6, IN)
    for parameter in holder.parameters():
        # The tensors of torchao have no gradient of their own.
        parameter.requires_grad_(type(parameter) is nn.Parameter)
    target = torch.randn(6, OUT)

    def gradients(out: Tensor) -> dict[str, Tensor | None]:
        holder.zero_grad()
        (out * target).sum().backward()
        return {name: parameter.grad for name, parameter in holder.named_parameters()}

    got, expected = gradients(x @ weight_of(holder).T), gradients(holder(x))
    reached = {name for name, gradient in expected.items() if gradient is not None}
    assert reached == {name for name, gradient in got.items() if gradient is not None}
    assert len(reached) >= {
        lora: 5,
        dora: 7,
        lora_on_weight_norm: 6,
        lora_on_int8: 4,
        weight_norm: 2,
    }.get(case, 1)
    for name in reached:
        torch.testing.assert_close(got[name], expected[name], atol=1e-4, rtol=1e-4, msg=name)


def test_nothing_is_kept_between_calls():
    holder, x = lora(), torch.randn(3, IN)
    weight_of(holder)
    with torch.no_grad():
        holder.kv_b_proj.lora_B["default"].weight.mul_(-2)
    torch.testing.assert_close(x @ weight_of(holder).T, holder(x))
    holder.kv_b_proj.set_scale("default", 0.3)
    torch.testing.assert_close(x @ weight_of(holder).T, holder(x))


def test_traced_code_follows_a_change_of_adapters():
    holder, x = lora(), torch.randn(3, IN)
    compiled = torch.compile(weight_of, backend="eager", fullgraph=True)
    for adapters in (["default", "second"], ["second"], ["default"]):
        holder.kv_b_proj.set_adapter(adapters)
        torch.testing.assert_close(x @ compiled(holder).T, holder(x))
    holder.kv_b_proj.enable_adapters(False)
    torch.testing.assert_close(x @ compiled(holder).T, holder(x))
    holder.kv_b_proj = holder.kv_b_proj.base_layer
    torch.testing.assert_close(x @ compiled(holder).T, holder(x))


def test_what_adapters_add_is_rounded_once():
    holder = lora().to(torch.bfloat16)
    projection = holder.kv_b_proj
    exact = projection.base_layer.weight.double()
    for name, scaling in projection.scaling.items():
        up, down = projection.lora_B[name].weight.double(), projection.lora_A[name].weight.double()
        exact = exact + up @ down * scaling
    with torch.autocast("cpu", torch.bfloat16):
        got = weight_of(holder)
    assert got.dtype == torch.bfloat16
    error = (got.double() - exact).abs() / exact.abs()
    assert error.max() <= 2**-8


@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (300, 200), (40, 24)])
@pytest.mark.parametrize("scale_format", ["float", "ue8m0"])
def test_block_scaled_fp8_is_dequantised_the_last_blocks_too(
    rows: int, columns: int, scale_format: str
):
    projection = FP8Linear(columns, rows, (128, 128), scale_fmt=scale_format)
    with torch.no_grad():
        projection.weight.copy_(torch.randn(rows, columns).to(torch.float8_e4m3fn))
        scales = 2.0 ** torch.randint(-4, 4, projection.weight_scale_inv.shape)
        projection.weight_scale_inv.copy_(scales.to(projection.weight_scale_inv.dtype))
    expected = projection.weight.detach().float()
    blocks = itertools.product(range(0, rows, 128), range(0, columns, 128))
    for row, column in blocks:
        expected[row : row + 128, column : column + 128] *= scales[row // 128, column // 128]
    got = effective_weight(projection, NAME, torch.float32)
    assert torch.equal(got, expected)
    assert not got.requires_grad
    rounded = effective_weight(projection, NAME, torch.bfloat16)
    assert torch.equal(rounded, expected.bfloat16())


def test_fp8_with_one_scale_and_fp8_that_was_loaded_dequantised():
    projection = FP8Linear(IN, OUT, None)
    with torch.no_grad():
        projection.weight.copy_(torch.randn(OUT, IN).to(torch.float8_e4m3fn))
        projection.weight_scale_inv.fill_(0.25)
    got = effective_weight(projection, NAME, torch.float32)
    assert torch.equal(got, projection.weight.detach().float() / 4)
    projection.weight = nn.Parameter(torch.randn(OUT, IN))
    assert effective_weight(projection, NAME, torch.bfloat16) is projection.weight


def test_dropout_of_adapters_is_no_obstacle_outside_of_training():
    holder, x = lora(lora_dropout=0.1), torch.randn(3, IN)
    torch.testing.assert_close(x @ weight_of(holder).T, holder(x))


def test_peft_and_torchao_are_not_needed(monkeypatch: pytest.MonkeyPatch):
    for library in ("peft", "torchao", "accelerate"):
        monkeypatch.setitem(sys.modules, library, None)
    assert weight_of(plain()).shape == (OUT, IN)
    with pytest.raises(NotImplementedError, match="got Sequential"):
        effective_weight(nn.Sequential(), NAME, torch.float32)
