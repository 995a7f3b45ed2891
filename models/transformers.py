"""Run the attention of a transformers DSA model on our ops, and put it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "transformers 5.24 or later is needed here: pip install 'dsafx[transformers]'"
    ) from error

from ..ops import routing
from ._connect import check_layer, connect, connect_surroundings, disconnect_all
from ._interface import NAME, is_connected
from ._layers import Route, dsa_layers, read_configs, read_routes, require_layers
from ._seams import AttentionSeams
from ._selection import LayerRouting, Step
from ._sharding import heads_mesh
from .config import DSAConfig

__all__ = ["NAME", "admit", "disable", "enable", "enabled", "enabling"]

_Model = TypeVar("_Model", bound=nn.Module)


def enable(
    model: _Model,
    mode: str = "auto",
    *,
    route: routing.RouteConfig | None = None,
    layers: Mapping[int, Route] | None = None,
) -> _Model:
    """Make every DSA layer of ``model`` use our ops, in eager and in compiled code.

    Parameters, state dict, config, caches and ``generate`` stay as they are. Enabling what is
    enabled already changes its modes.

    Args:
        model: a transformers model of type ``axk2``, ``deepseek_v32`` or ``glm_moe_dsa``, with or
            without a head; what holds one, such as a ``PeftModel``; or a part of one that holds
            whole index groups. What is not in it stays as it is, sharing a config or not. Left
            padding becomes intervals where all layers of a decoder are enabled; in one that is
            enabled in part, our layers too get the mask of transformers, with which dense MHA is
            never legal.
        mode: "auto", "sparse", "masked" or "dense" (``routing.RouteConfig``).
        route: the whole route configuration, in place of ``mode``.
        layers: mode or route configuration of single layers, by their number in the model. The
            layers of an index group may differ.

    Returns:
        ``model``, changed in place.

    Raises:
        TypeError: ``model`` is no module, or a value of ``layers`` is of another type.
        ValueError: an unknown model type or mode, a model without a DSA layer, a part that cuts an
            index group, or a number in ``layers`` that none of its layers has.
        NotImplementedError: a model type that selects keys in another way, with the reason, or a
            layer whose function our ops would not reproduce, by name. Nothing is changed then.
    """
    modules = require_layers(model)
    configs = read_configs(model, modules)
    routes = read_routes(model, modules, mode if route is None else route, layers)
    for module in modules:
        check_layer(module)
    seams = [_seam(*each) for each in zip(modules, configs, routes, strict=True)]

    for module, seam in zip(modules, seams, strict=True):
        connect(module, seam)
    connect_surroundings(model)
    return model


def disable(model: _Model) -> _Model:
    """Restore ``model`` to what it was before ``enable``; what was not enabled stays as it is.

    Args:
        model: what was enabled; or a part of it, with whole index groups: the rest stays enabled.

    Returns:
        ``model``, changed in place.

    Raises:
        ValueError: a part that cuts an index group.
    """
    modules = [module for module in dsa_layers(model) if is_connected(module)]
    read_configs(model, modules)
    disconnect_all(model)
    return model


def enabled(model: nn.Module) -> bool:
    """Whether ``model`` holds DSA layers and all of them run on our ops."""
    modules = dsa_layers(model)
    return bool(modules) and all(is_connected(module) for module in modules)


@contextlib.contextmanager
def enabling(
    model: _Model,
    mode: str = "auto",
    *,
    route: routing.RouteConfig | None = None,
    layers: Mapping[int, Route] | None = None,
) -> Iterator[_Model]:
    """``enable`` for the ``with`` block, and back to what ``model`` was before it."""
    before = [(module, _seam_of(module)) for module in dsa_layers(model) if is_connected(module)]
    enable(model, mode, route=route, layers=layers)
    try:
        yield model
    finally:
        disable(model)
        for module, seam in before:
            connect(module, seam)
        connect_surroundings(model)


def admit(model: nn.Module, max_kv_len: int, max_query_len: int) -> None:
    """Ask every layer that is enabled whether it may run a request of this length.

    A forced mode can be legal for the first chunk of a prompt and illegal for a later one.

    Args:
        model: a model; of one that is not enabled nothing is asked.
        max_kv_len: bound on the keys that a row will see at the end of the request.
        max_query_len: bound on the query tokens of one forward.

    Raises:
        ValueError: a forced mode is illegal.
    """
    for module in dsa_layers(model):
        if is_connected(module):
            layer: LayerRouting = _seam_of(module).routing
            device = module.kv_a_layernorm.weight.device
            rows = torch.empty(0, dtype=torch.int32, device=device)
            step = Step(rows, rows, max_kv_len, max_query_len)
            layer.decide(step, layer.config.is_followed(layer.layer_idx))


def _seam(module: Any, config: DSAConfig, route: routing.RouteConfig) -> AttentionSeams:
    mesh = heads_mesh(module.kv_b_proj, f"kv_b_proj of layer {module.layer_idx}")
    return AttentionSeams(config, module.layer_idx, route, mesh)


def _seam_of(module: Any) -> AttentionSeams:
    return cast(AttentionSeams, module.dsa_layer)
