"""Which DSA layers a module holds, and whether it may be enabled: whole index groups alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.models.axk2.modeling_axk2 import AXK2Attention, AXK2Model
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32Model,
)
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaModel

from ..ops import routing
from ._families import SUPPORTED, family
from ._interface import original_config
from .config import DSAConfig

_ATTENTION = (AXK2Attention, DeepseekV32Attention, GlmMoeDsaAttention)
_DECODERS = (AXK2Model, DeepseekV32Model, GlmMoeDsaModel)

Route = str | routing.RouteConfig


def dsa_layers(model: nn.Module) -> list[Any]:
    """The attention modules with an index group that ``model`` holds, in order."""
    return [module for module in model.modules() if isinstance(module, _ATTENTION)]


def is_decoder(module: nn.Module) -> bool:
    """Whether ``module`` is a stack of layers, which makes the masks for them."""
    return isinstance(module, _DECODERS)


def require_layers(model: nn.Module) -> list[Any]:
    """``dsa_layers``, of which there is one at least.

    Raises:
        TypeError: ``model`` is no module.
        NotImplementedError: it is of a model type that selects keys in another way, with the
            reason.
        ValueError: it holds no DSA layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module of a transformers model, got {model!r}")
    found = dsa_layers(model)
    if not found:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                family(module.config.model_type)
        raise ValueError(
            f"{type(model).__name__} has no DSA attention layer; accepted are models of type"
            f" {', '.join(SUPPORTED)}, and parts of them that hold whole index groups"
        )
    return found


def read_configs(model: nn.Module, layers: Sequence[Any]) -> list[DSAConfig]:
    """The config of each of ``layers``, once it is known that they are whole index groups.

    A layer hands its selection to its followers in our form, and they cannot do without ours.

    Raises:
        ValueError, NotImplementedError: what ``DSAConfig.from_transformers`` raises.
        ValueError: ``layers`` cut an index group, with the layers on both sides.
    """
    stacks: dict[int, dict[int, Any]] = {}
    for layer in layers:
        stacks.setdefault(id(original_config(layer.config)), {})[layer.layer_idx] = layer
    configs: dict[int, DSAConfig] = {}
    for key, held in stacks.items():
        first = next(iter(held.values()))
        config = configs[key] = DSAConfig.from_transformers(original_config(first.config))
        for index, leader in enumerate(routing.leaders(config.schedule)):
            if (index in held) != (leader in held):
                inside, outside = (leader, index) if leader in held else (index, leader)
                raise ValueError(
                    f"{type(model).__name__} cuts an index group: layer {index} attends to the"
                    f" selection of layer {leader}, and {inside} lies in it and {outside} does not"
                )
    return [configs[id(original_config(layer.config))] for layer in layers]


def read_routes(
    model: nn.Module, layers: Sequence[Any], default: Route, given: Mapping[int, Route] | None
) -> list[routing.RouteConfig]:
    """The route configuration of each of ``layers``: what is given for its number, or the default.

    Raises:
        TypeError: a value that is neither a mode nor a route configuration.
        ValueError: an unknown mode, or the number of a layer that is not there.
    """
    numbers = [cast(int, layer.layer_idx) for layer in layers]
    of_layer = {} if given is None else {key: _route(value) for key, value in given.items()}
    unknown = [key for key in of_layer if key not in numbers]
    if unknown:
        raise ValueError(
            f"layers must name DSA layers of {type(model).__name__}, which are"
            f" {', '.join(map(str, numbers))}, got {', '.join(map(repr, unknown))}"
        )
    everywhere = _route(default)
    return [of_layer.get(number, everywhere) for number in numbers]


def _route(value: object) -> routing.RouteConfig:
    if isinstance(value, routing.RouteConfig):
        return value
    if isinstance(value, str):
        return routing.RouteConfig(mode=value)
    raise TypeError(f"a route must be a mode or a routing.RouteConfig, got {value!r}")
