"""The effective weight of a linear layer: the one matrix that does what the layer does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ._sharding import heads_mesh, is_hooked, local_weight

_Weight = Callable[[torch.dtype], Tensor]


def effective_weight(projection: nn.Module, name: str, dtype: torch.dtype) -> Tensor:
    """[out, in], with which ``x @ weight.T`` is what ``projection`` makes of ``x``.

    To be called at each forward, since adapters come and go; nothing is kept. Gradients reach the
    parameters that those of ``projection`` would, adapters included.

    Args:
        projection: a case of ``_SOURCES``: ``nn.Linear``, parametrised or with an int8 weight of
            torchao; LoRA or a trained copy of PEFT; ``FP8Linear`` of transformers.
        name: what an error calls it.
        dtype: of the result where the weight is stored quantised; else the weight keeps its own.

    Returns:
        A dense tensor. What LoRA adds is summed in float32 or wider and rounded once to the dtype
        of the weight below it, as by merging. A quantised weight is dequantised; that ``FP8Linear``
        would also quantise its input is not imitated.

    Raises:
        NotImplementedError: no matrix stands for ``projection``, or it is of an unknown kind.
    """
    return _source(projection, name)(dtype)


def check_weight(projection: nn.Module, name: str) -> None:
    """Raise what ``effective_weight`` would raise, without computing anything."""
    _source(projection, name)


def _source(projection: nn.Module, name: str) -> _Weight:
    """How to compute the weight of ``projection``, once it is known that there is one."""
    kind = parametrize.type_before_parametrizations(projection)
    full_name = _full_name(kind)
    find = _SOURCES.get(full_name)
    if find is None and full_name.startswith("peft."):
        raise NotImplementedError(
            f"{name} is {full_name}, which is not known to be the sum of a weight and"
            " its adapters: of PEFT, LoRA on linear layers and modules_to_save are supported"
        )
    if find is None or (find is not _linear and parametrize.is_parametrized(projection)):
        raise NotImplementedError(f"{name} must be {_ACCEPTED}, got {type(projection).__name__}")
    if is_wrapped(projection) and is_hooked(cast(nn.Linear, projection)):
        raise NotImplementedError(
            f"{name} must have no hooks: its weight is used without calling it"
        )
    return find(cast(Any, projection), name)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_wrapped(module: nn.Module) -> bool:
    """Whether calling ``module`` runs more than the forward of its class."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or has_own_forward(module)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the instance overrides ``forward`` with more than a move of inputs to their device.

    That is what accelerate puts on every module of a model that is spread over devices.
    """
    attributes = vars(module)
    if "forward" not in attributes:
        return False
    hook = attributes.get("_hf_hook")
    aligns = _full_name(type(hook)) == "accelerate.hooks.AlignDevicesHook"
    return not aligns or cast(Any, hook).offload


def _linear(projection: Any, name: str) -> _Weight:
    if projection.bias is not None:
        raise NotImplementedError(f"{name} must have no bias")
    if parametrize.is_parametrized(projection, "weight"):
        return lambda dtype: cast(Tensor, projection.weight)
    weight: Tensor = projection.weight
    find = _DEQUANTISED.get(_full_name(type(weight)))
    if find is not None:
        return find(weight, name)
    local = local_weight(weight)
    dense = type(local) in (Tensor, nn.Parameter) and local.is_floating_point()
    if not dense or local.itemsize < 2:
        raise NotImplementedError(
            f"{name} must have a dense weight of 16 bits or more or one of torchao's Int8Tensor,"
            f" got {type(weight).__name__} of {weight.dtype}"
        )
    return lambda dtype: local


def _int8(weight: Any, name: str) -> _Weight:
    if weight.act_quant_kwargs is not None or weight.act_pre_scale is not None:
        raise NotImplementedError(
            f"{name} scales or quantises its input, which no weight stands for; of torchao,"
            " Int8WeightOnlyConfig is supported"
        )
    return lambda dtype: cast(Tensor, weight.dequantize(dtype))


def _fp8(projection: Any, name: str) -> _Weight:
    if projection.bias is not None:
        raise NotImplementedError(f"{name} must have no bias")
    weight = local_weight(projection.weight)
    if weight.itemsize > 1:
        return lambda dtype: weight
    if weight.dtype != torch.float8_e4m3fn:
        raise NotImplementedError(
            f"{name} must have a weight of float8_e4m3fn, got one of {weight.dtype}"
        )
    scale = local_weight(projection.weight_scale_inv)
    block = projection.block_size
    if weight is not projection.weight and block is not None and weight.shape[0] % block[0]:
        raise NotImplementedError(
            f"{name} must be sharded between blocks of {block[0]} rows, which have a scale each,"
            f" got {weight.shape[0]} rows on a rank"
        )
    return lambda dtype: _dequantise_blocks(weight, scale, block).to(dtype)


def _dequantise_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """float32 ``weight`` times the scale of each block, the last ones cut off; no gradient."""
    factor = scale.detach().float()
    if block is not None:
        for dim, size in enumerate(block):
            factor = factor.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return weight.detach().float() * factor


def _lora(projection: Any, name: str) -> _Weight:
    base = _source(projection.base_layer, name)
    if heads_mesh(projection, name) is not None:
        raise NotImplementedError(f"{name} must have no adapters while it is sharded over ranks")
    if projection.disable_adapters:
        return lambda dtype: _unmerged(projection, base, dtype)
    if projection.merged:
        return base
    adapters = [each for each in projection.active_adapters if each in projection.lora_A]
    for each in adapters:
        if each in projection.lora_variant and not _is_dora(projection, each):
            variant = type(projection.lora_variant[each]).__name__.removesuffix("LinearVariant")
            raise NotImplementedError(
                f"adapter {each!r} of {name} is LoRA's variant {variant}: plain LoRA and DoRA are"
                " supported, and any variant once it is merged"
            )
        if projection.lora_bias[each]:
            raise NotImplementedError(f"adapter {each!r} of {name} must have no bias (lora_bias)")
        dropout = projection.lora_dropout[each]
        if isinstance(dropout, nn.Dropout) and dropout.p and dropout.training:
            raise NotImplementedError(
                f"adapter {each!r} of {name} drops inputs in training mode, got lora_dropout ="
                f" {dropout.p}: no weight stands for that. Train {name.split()[0]} with"
                " lora_dropout=0, or without an adapter"
            )
    return lambda dtype: _with_adapters(base(dtype), projection, adapters)


def _is_dora(projection: Any, adapter: str) -> bool:
    variant = type(projection.lora_variant.get(adapter))
    return _full_name(variant) == "peft.tuners.lora.variants.DoraLinearVariant"


def _unmerged(projection: Any, base: _Weight, dtype: torch.dtype) -> Tensor:
    # PEFT leaves it to the first forward to take a disabled adapter out of the weight again.
    if projection.merged:
        projection.unmerge()
    return base(dtype)


def _with_adapters(weight: Tensor, projection: Any, adapters: list[str]) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    with torch.autocast(weight.device.type, enabled=False):
        total = base = weight.to(wide)
        for each in adapters:
            down, up = projection.lora_A[each].weight, projection.lora_B[each].weight
            change = (up.to(wide) @ down.to(wide)) * projection.scaling[each]
            total = total + change
            if _is_dora(projection, each):
                # A constant for the gradient: https://huggingface.co/papers/2402.09353, section 4.3
                norm = torch.linalg.norm((base + change).detach(), dim=1)
                magnitude = projection.lora_magnitude_vector[each].weight
                total = (magnitude.to(wide) / norm)[:, None] * total
        return total.to(weight.dtype)


def _trained_copy(projection: Any, name: str) -> _Weight:
    active = projection.active_adapters
    if projection.disable_adapters or not active or active[0] not in projection.modules_to_save:
        return _source(projection.original_module, name)
    return _source(projection.modules_to_save[active[0]], name)


# By name, so that none of these libraries is imported for it.
_SOURCES: dict[str, Callable[[Any, str], _Weight]] = {
    "torch.nn.modules.linear.Linear": _linear,
    "transformers.integrations.finegrained_fp8.FP8Linear": _fp8,
    "peft.tuners.lora.layer.Linear": _lora,
    "peft.tuners.lora.torchao.TorchaoLoraLinear": _lora,
    "peft.utils.other.ModulesToSaveWrapper": _trained_copy,
}
_DEQUANTISED: dict[str, Callable[[Any, str], _Weight]] = {
    "torchao.quantization.Int8Tensor": _int8,
}
_ACCEPTED = (
    "an nn.Linear (parametrised or not), an FP8Linear of transformers, or one of them with LoRA or"
    " modules_to_save of PEFT"
)
