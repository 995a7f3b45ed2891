"""Run the attention of a transformers DSA model on our ops, and put it back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

try:
    from transformers import PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.axk2.modeling_axk2 import AXK2Attention
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention
except ImportError as error:
    raise ImportError(
        "transformers 5.24 or later is needed here: pip install 'dsafx[transformers]'"
    ) from error

from ..ops import routing
from ._inputs import prepare_inputs, prepare_masks
from ._intervals import interval_mask
from ._seams import AttentionSeams, attend, check_attention, indexer_forward, latents
from ._selection import LayerRouting, Step
from .config import DSAConfig

NAME = "dsafx"
"""Our name among transformers' attention implementations."""

_ATTENTION = (AXK2Attention, DeepseekV32Attention, GlmMoeDsaAttention)
_Model = TypeVar("_Model", bound=nn.Module)


@dataclass
class _Enabled:
    """What ``disable`` needs to know; kept on the model, so that it is copied and saved with it."""

    previous: str | None
    hook: RemovableHandle

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A model that arrives in another process brings its own name for our functions with it.
        vars(self).update(state)
        _register()


def enable(
    model: _Model, mode: str = "auto", *, route: routing.RouteConfig | None = None
) -> _Model:
    """Make every DSA layer of a transformers model use our ops, in eager and in compiled code.

    Parameters, state dict, caches and ``generate`` stay as they are. Enabling an enabled model
    again changes its mode.

    Args:
        model: of type ``axk2``, ``deepseek_v32`` or ``glm_moe_dsa``, with or without a head.
        mode: "auto", "sparse", "masked" or "dense" (``routing.RouteConfig``).
        route: the whole route configuration, in place of ``mode``.

    Returns:
        ``model``, changed in place.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: an unknown model type or mode, or a model without a DSA layer.
        NotImplementedError: a model type that selects keys in another way, with the reason, or a
            layer whose function our ops would not reproduce, by name. Nothing is changed then.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    config = DSAConfig.from_transformers(model.config)
    route_config = routing.RouteConfig(mode=mode) if route is None else route
    modules = _attention_modules(model)
    for module in modules:
        check_attention(module)
    seams = [AttentionSeams(config, cast(int, m.layer_idx), route_config) for m in modules]

    _register()
    for module, seam in zip(modules, seams, strict=True):
        _connect(cast(Any, module), seam)
    if not enabled(model):
        hook = model.base_model.register_forward_pre_hook(prepare_masks, with_kwargs=True)
        host = cast(Any, model)
        host.dsa_enabled = _Enabled(model.config._attn_implementation, hook)
        model.set_attn_implementation(NAME)
        if model.can_generate():
            # `generate` reads the names of accepted arguments from the signature of the original.
            host.prepare_inputs_for_generation = functools.update_wrapper(
                functools.partial(prepare_inputs, model), host.prepare_inputs_for_generation
            )
    return model


def disable(model: _Model) -> _Model:
    """Restore a model to what it was before ``enable``; one that was not enabled stays as it is.

    Returns:
        ``model``, changed in place.
    """
    if not enabled(model):
        return model
    host = cast(Any, model)
    state: _Enabled = host.dsa_enabled
    state.hook.remove()
    host.set_attn_implementation(state.previous)
    for module in _attention_modules(model):
        _disconnect(cast(Any, module))
    if "prepare_inputs_for_generation" in vars(model):
        del host.prepare_inputs_for_generation
    del host.dsa_enabled
    return model


def enabled(model: nn.Module) -> bool:
    """Whether ``model`` itself was given to ``enable`` and not to ``disable`` since."""
    return "dsa_enabled" in vars(model)


@contextlib.contextmanager
def enabling(
    model: _Model, mode: str = "auto", *, route: routing.RouteConfig | None = None
) -> Iterator[_Model]:
    """``enable`` for the ``with`` block, and back to what ``model`` was before it."""
    before = _route(model) if enabled(model) else None
    enable(model, mode, route=route)
    try:
        yield model
    finally:
        if before is None:
            disable(model)
        else:
            enable(model, route=before)


def admit(model: nn.Module, max_kv_len: int, max_query_len: int) -> None:
    """Ask every layer of an enabled model whether it may run a request of this length.

    A forced mode can be legal for the first chunk of a prompt and illegal for a later one.

    Args:
        model: an enabled model.
        max_kv_len: bound on the keys that a row will see at the end of the request.
        max_query_len: bound on the query tokens of one forward.

    Raises:
        ValueError: a forced mode is illegal.
    """
    for module in _attention_modules(model):
        layer: LayerRouting = cast(Any, module).dsa_layer.routing
        rows = torch.empty(0, dtype=torch.int32, device=cast(Any, module).kv_b_proj.weight.device)
        step = Step(rows, rows, max_kv_len, max_query_len)
        layer.decide(step, layer.config.is_followed(layer.layer_idx))


def _route(model: nn.Module) -> routing.RouteConfig:
    seam: AttentionSeams = cast(Any, _attention_modules(model)[0]).dsa_layer
    return seam.routing.route


def _register() -> None:
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, interval_mask)


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    modules: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, _ATTENTION)
    ]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no DSA attention layer")
    return modules


def _connect(module: Any, seam: AttentionSeams) -> None:
    module.dsa_layer = seam
    module.expand_kv = latents
    if module.indexer is not None:
        module.indexer.dsa_layer = seam
        module.indexer.forward = functools.partial(indexer_forward, module.indexer)


def _disconnect(module: Any) -> None:
    del module.dsa_layer, module.expand_kv
    if module.indexer is not None:
        del module.indexer.dsa_layer, module.indexer.forward
