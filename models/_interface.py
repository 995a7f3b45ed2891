"""Our functions among transformers' attention implementations, and a config that chooses them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ._intervals import interval_mask
from ._seams import attend

NAME = "dsafx"
"""Our name among transformers' attention implementations."""


class InterfaceConfig:
    """The config of a model, but for the attention implementation, which is ours.

    A model's config is one object for all of its layers, and may be that of other models too. An
    attention module on our ops has this in its place, so that all others keep what they had, and so
    that nothing of it is saved with the model.
    """

    _attn_implementation = NAME
    is_causal: bool

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        # While it is copied or unpickled there is no original yet.
        if name == "original" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.original, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A model that arrives in another process brings our name with it.
        vars(self).update(state)
        register()


def original_config(config: Any) -> Any:
    """The config that the model was built with."""
    return config.original if isinstance(config, InterfaceConfig) else config


def is_connected(layer: Any) -> bool:
    """Whether the attention module ``layer`` runs on our ops."""
    return isinstance(layer.config, InterfaceConfig)


def is_whole(decoder: Any) -> bool:
    """Whether all layers of ``decoder`` run on our ops, so that none of them wants a mask."""
    # A stage of a pipeline holds the identity in place of each layer of another rank.
    return all(
        isinstance(layer, nn.Identity) or is_connected(layer.self_attn) for layer in decoder.layers
    )


def causal_mask(
    config: Any,
    tokens: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    is_causal: bool | None = None,
) -> Tensor:
    """What transformers' mask factory makes for our layers, of padding or of nothing.

    Args:
        config: of the decoder.
        tokens: [B, S, ...], whose shape and device are read.
        attention_mask: [B, keys], or None.
        cache: what the forward will add to, or None.
        is_causal: False: every token sees every other; None: what ``config`` says, if anything.

    Returns:
        What ``interval_mask`` returns.
    """
    ours = InterfaceConfig(config)
    if is_causal is not None:
        ours.is_causal = is_causal
    shape = torch.empty((*tokens.shape[:2], 0), device=tokens.device)
    mask = create_causal_mask(
        config=ours,
        inputs_embeds=shape,
        attention_mask=attention_mask,
        cache=cache,
        allow_is_causal_skip=False,
    )
    return cast(Tensor, mask)


def register() -> None:
    """Make our name known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, interval_mask)
