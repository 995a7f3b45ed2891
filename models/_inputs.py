"""What an enabled model does to its inputs: masks become intervals before the forward."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.utils.import_utils import is_tracing

from ..ops._requests import visible
from ._intervals import interval_mask

# The key under which these model families look up a prepared mask.
_MASK_KEY = "indexed_attention"


def prepare_masks(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the decoder: settle the two masks that its mask factory would not.

    Without mask, positions and cache the model counts the positions itself. Traced, its mask
    factory then has to allow for packed documents and builds a mask; here it is known that there
    are none.
    A prepared 4-D mask becomes bool once for all layers.

    Raises:
        ValueError: an additive 4-D mask with finite biases between 0 and half its minimum.
        TypeError: a 4-D mask that is neither bool nor floating point.
    """
    mask = kwargs.get("attention_mask")
    if len(args) > 1:
        return None
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return args, {**kwargs, "attention_mask": _as_bool(mask)}
    if any(kwargs.get(name) is not None for name in _GIVEN):
        return None
    tokens = args[0] if args else kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if tokens is None:
        return None
    batch, rows = tokens.shape[:2]
    intervals = interval_mask(batch, rows, rows, device=tokens.device)
    return args, {**kwargs, "attention_mask": {_MASK_KEY: intervals}}


_GIVEN = ("attention_mask", "position_ids", "cache", "past_key_values")


def _as_bool(mask: Tensor) -> Tensor:
    seen = visible(mask)
    if mask.dtype == torch.bool or is_tracing(mask):
        return seen
    if bool((seen & (mask != 0)).any()):
        raise ValueError(
            "an additive attention mask must hold 0 at visible keys and the dtype's minimum or -inf"
            " elsewhere: a bias on visible keys is not supported"
        )
    return seen


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
    tokens = inputs.get("inputs_embeds")
    if tokens is None:
        tokens = inputs["input_ids"]
    batch, rows = tokens.shape[:2]
    inputs["attention_mask"] = create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty((batch, rows, 0), dtype=model.dtype, device=tokens.device),
        attention_mask=mask,
        cache=inputs.get("cache"),
        position_ids=inputs.get("position_ids"),
    )
    return inputs
