"""A static cache with one free place, which each call of a decode step fills anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _families import Dims
from torch import Tensor
from transformers import PreTrainedModel, StaticCache


class FilledCache:
    """Random keys for every layer of a model, the same for each call with one seed.

    Args:
        model: of transformers.
        dims: its dimensions.
        keys: how many the cache holds; all places but the last are taken.
    """

    def __init__(self, model: PreTrainedModel, dims: Dims, keys: int) -> None:
        self.keys = keys
        self.cache = StaticCache(config=model.config, max_cache_len=keys)
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(model.dtype)

        base: Any = model.base_model
        for index, layer in enumerate(base.layers):
            latents = random(1, 1, keys, dims.kv_lora_rank)
            self.cache.update(latents, random(1, 1, keys, dims.qk_rope_head_dim), index)
            if layer.self_attn.indexer is not None:
                self.cache.update_indexer(random(1, keys, dims.index_head_dim), index)
        self.free_last()

    def free_last(self) -> None:
        """Let the next update write the last place."""
        for layer in self.cache.layers:
            filled: Any = layer
            filled.cumulative_length.fill_(self.keys - 1)
            if filled.is_indexer_initialized:
                filled.indexer_cumulative_length.fill_(self.keys - 1)

    def step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, which writes one token, so that it may be called again and again."""

        def step(*args: Any) -> Any:
            self.free_last()
            return call(*args)

        return step
