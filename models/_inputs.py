"""What an enabled model does to its inputs: masks become intervals before the forward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.utils.import_utils import is_tracing

from ..ops._requests import is_interval
from ._interface import causal_mask, is_whole
from ._intervals import document_intervals, prepared_mask

# The key under which these model families look up a prepared mask.
_MASK_KEY = "indexed_attention"

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def mask_hook(decoder: nn.Module) -> Callable[..., Inputs | None]:
    """The forward pre-hook, with keyword arguments, that prepares the mask of ``decoder``."""
    names = tuple(inspect.signature(type(decoder).forward).parameters)[1:]
    return functools.partial(prepare_mask, names)


def prepare_mask(
    names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inputs | None:
    """Settle what each token sees, in place of the mask factory in the forward of ``module``.

    No mask, a 2-D one and packed documents become intervals where they can, and a prepared mask
    becomes bool, once for all layers.

    Args:
        names: of the positional arguments of the forward of ``module``.
        module: the decoder.
        args, kwargs: of the call.

    Raises:
        TypeError: a mask that is no tensor, and a prepared one that is neither bool nor floating
            point.
        ValueError: a mask of another shape than [B, keys] or [B or 1, 1, S or 1, keys], where the
            keys are S without a cache, or an additive one with a bias between 0 and half its
            minimum (traced: when the graph runs).
    """
    if not is_whole(module):
        return None
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens = given.get("input_ids")
    if tokens is None:
        tokens = given.get("inputs_embeds")
    if tokens is None:
        return None
    prepared = {_MASK_KEY: _prepared(module, given, tokens)}
    place = names.index("attention_mask")
    if place < len(args):
        return (*args[:place], prepared, *args[place + 1 :]), kwargs
    return args, {**kwargs, "attention_mask": prepared}


def _prepared(module: nn.Module, given: Mapping[str, Any], tokens: Tensor) -> Tensor:
    mask = given.get("attention_mask")
    if isinstance(mask, dict):
        mask = _of_mapping(mask)
        if mask.dim() == 4 and is_interval(mask):
            return mask
    elif mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor or a dict, got {type(mask).__name__}")
    elif mask is None or mask.dim() == 2:
        return _built(module, mask, given, tokens)
    return _as_bool(mask, given, tokens)


def _built(
    module: nn.Module, mask: Tensor | None, given: Mapping[str, Any], tokens: Tensor
) -> Tensor:
    """What the factory makes of the 2-D ``mask`` or of none, or of packed documents."""
    batch, rows = tokens.shape[:2]
    cache = _cache(given)
    if mask is not None and cache is None and mask.shape[1] != rows:
        raise ValueError(
            f"attention_mask must be [{batch}, {rows}] without a cache, got {tuple(mask.shape)}"
        )
    # With a mask or a cache, transformers does not look for documents in the positions.
    alone = mask is None and cache is None and not _makes_cache(module, given)
    positions = given.get("position_ids") if alone else None
    if positions is not None:
        return document_intervals(positions, batch)
    config = cast(Any, module).config
    return causal_mask(config, tokens, mask, cache, given.get("is_causal"))


def _makes_cache(module: Any, given: Mapping[str, Any]) -> bool:
    """Whether a decoder that was given no cache will make one."""
    if module.gradient_checkpointing and module.training and torch.is_grad_enabled():
        return False
    wanted = given.get("use_cache")
    return bool(module.config.use_cache if wanted is None else wanted)


def _of_mapping(mask: Mapping[str, Any]) -> Tensor:
    prepared = mask.get(_MASK_KEY)
    if not isinstance(prepared, Tensor):
        raise TypeError(
            f"attention_mask as a dict must hold a tensor under {_MASK_KEY!r}, got"
            f" {type(prepared).__name__} there, and the keys {sorted(mask)}"
        )
    return prepared


def _as_bool(mask: Tensor, given: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """A prepared mask as bool [B or 1, 1, S, keys]."""
    batch, rows = tokens.shape[:2]
    cache = _cache(given)
    keys = rows if cache is None else cache.get_mask_sizes(rows, 0)[0]
    if not is_tracing(mask):
        accepted = ((batch, 1), (1,), (rows, 1), (keys, 1))
        fits = mask.dim() == 4 and all(
            size in sizes for size, sizes in zip(mask.shape, accepted, strict=True)
        )
        if not fits:
            raise ValueError(
                f"attention_mask must be [{batch}, keys] or [{batch} or 1, 1, {rows} or 1, {keys}],"
                f" for {rows} new tokens and {keys} keys, got {tuple(mask.shape)}"
            )
    return prepared_mask(mask).expand(-1, -1, rows, keys)


def _cache(given: Mapping[str, Any]) -> Any:
    # The second is the name of before transformers 5.24, which is still accepted.
    cache = given.get("cache")
    return given.get("past_key_values") if cache is None else cache


def prepare_inputs(model: PreTrainedModel, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """In place of ``prepare_inputs_for_generation``: a 2-D mask leaves it as intervals.

    transformers does this for static caches, to keep mask building out of the compiled forward;
    with every other cache the forward would meet the 2-D mask, and traced code could not read it.
    """
    prepare = cast(Any, type(model)).prepare_inputs_for_generation
    inputs: dict[str, Any] = prepare(model, *args, **kwargs)
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or is_tracing(mask):
        return inputs
    if not is_whole(model.base_model):
        return inputs
    tokens = inputs.get("inputs_embeds")
    if tokens is None:
        tokens = inputs["input_ids"]
    inputs["attention_mask"] = {
        _MASK_KEY: causal_mask(model.config, tokens, mask, inputs.get("cache"))
    }
    return inputs


def generation_masks(
    model: PreTrainedModel,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    **kwargs: Any,
) -> Any:
    """What ``generate`` asks the model itself for, in place of ``create_masks_for_generate``."""
    if is_whole(model.base_model):
        return {_MASK_KEY: causal_mask(model.config, inputs_embeds, attention_mask, cache)}
    return create_masks_for_generate(
        inputs_embeds=inputs_embeds, attention_mask=attention_mask, cache=cache, **kwargs
    )
