"""The two model families at their real attention dimensions, as transformers builds them."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from _dims import REAL as REAL
from _dims import Dims, Family
from torch import Tensor, nn
from transformers import (
    Cache,
    DeepseekV32Config,
    DeepseekV32Model,
    DynamicCache,
    GlmMoeDsaConfig,
    GlmMoeDsaModel,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask

import dsafx

VOCABULARY = 16
"""Of every model here."""

TINY = {
    Family.GLM: Dims(64, 4, 48, 32, 24, 8, 32, 8, 16, 32),
    Family.DEEPSEEK: Dims(64, 8, 32, 32, 16, 8, 16, 8, 16, 32),
}


class Pair:
    """A small model twice on the same weights: as transformers runs it, and enabled."""

    def __init__(self, family: Family, dims: Dims, dtype: torch.dtype, layers: int = 1) -> None:
        self.dims = dims
        self.dtype = dtype
        self.plain = _model(family, dims, dtype, layers)
        shared = {id(parameter): parameter for parameter in self.plain.parameters()}
        self.enabled = dsafx.enable(copy.deepcopy(self.plain, shared))


class Layer(Pair):
    """A model of one layer, for its attention."""

    def step(self, model: PreTrainedModel, cache: GrownCache, hidden: Tensor) -> Step:
        """One forward of the attention of ``model`` for the tokens at the end of ``cache``.

        Mask and angles are made here, once, as the model makes them once for all its layers.
        """
        rows, keys = hidden.shape[1], cache.keys
        positions = torch.arange(keys - rows, keys)[None]
        past = cache.as_dynamic(model.config, keys - rows)
        mask = causal_mask(model, hidden, past, positions)
        return Step(attention_of(model), hidden, angles(model, hidden, positions), mask, cache)


@dataclass(frozen=True)
class Step:
    """What an attention module is called with; calling this calls it."""

    attention: nn.Module
    hidden: Tensor
    angles: tuple[Tensor, Tensor]
    mask: Tensor
    cache: GrownCache

    def __call__(self) -> Tensor:
        """[1, rows, hidden], the output of the layer."""
        out: Tensor = self.attention(self.hidden, self.angles, self.mask, cache=self.cache)[0]
        return out


class GrownCache:
    """A cache in which the step's own places already exist: an update writes there and copies none.

    So the growth of a dynamic cache, a copy of all it holds, is measured apart from the step.
    """

    def __init__(self, dims: Dims, keys: int, dtype: torch.dtype) -> None:
        self.keys = keys
        self.latents = torch.randn(1, 1, keys, dims.kv_lora_rank).to(dtype)
        self.rotated = torch.randn(1, 1, keys, dims.qk_rope_head_dim).to(dtype)
        self.index_keys = torch.randn(1, keys, dims.index_head_dim).to(dtype)

    def update(
        self, latents: Tensor, rotated: Tensor, layer_idx: int, kwargs: object = None
    ) -> tuple[Tensor, Tensor]:
        """Write the newest rows, and give all of them."""
        rows = latents.shape[2]
        self.latents[:, :, -rows:] = latents
        self.rotated[:, :, -rows:] = rotated
        return self.latents, self.rotated

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Write the newest index keys, and give all of them."""
        self.index_keys[:, -keys.shape[1] :] = keys
        return self.index_keys

    def as_dynamic(self, config: Any, cached: int) -> DynamicCache:
        """A cache of transformers that holds the first ``cached`` tokens."""
        cache = DynamicCache(config=config)
        if cached:
            cache.update(self.latents[:, :, :cached], self.rotated[:, :, :cached], 0)
            cache.update_indexer(self.index_keys[:, :cached], 0)
        return cache


def attention_of(model: PreTrainedModel) -> Any:
    """The attention module of a model of one layer."""
    return cast(Any, model.base_model).layers[0].self_attn


def causal_mask(
    model: PreTrainedModel, like: Tensor, cache: Cache | None, positions: Tensor | None = None
) -> Tensor:
    """What the model makes for attention of ``like`` [1, T, ...]: intervals where it is enabled.

    An enabled layer has a config of its own; that of the model says what transformers would do.
    """
    mask: Tensor = create_causal_mask(
        config=attention_of(model).config,
        inputs_embeds=like,
        attention_mask=None,
        cache=cache,
        position_ids=positions,
        allow_is_causal_skip=False,
    )
    return mask


def angles(model: PreTrainedModel, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, R] of ``positions`` [1, T], in the dtype of ``like``."""
    made: tuple[Tensor, Tensor] = cast(Any, model.base_model).rotary_emb(
        like, position_ids=positions
    )
    return made


def _model(family: Family, dims: Dims, dtype: torch.dtype, layers: int) -> PreTrainedModel:
    """Real attention, one full layer and then shared ones for GLM, and as good as no MLP."""
    sizes: dict[str, Any] = asdict(dims) | {
        "num_key_value_heads": dims.num_attention_heads,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "head_dim": dims.qk_rope_head_dim,
        "vocab_size": VOCABULARY,
        "intermediate_size": 16,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model: PreTrainedModel
    if family is Family.GLM:
        schedule = ["full", *["shared"] * (layers - 1)]
        sizes |= {"indexer_types": schedule, "mlp_layer_types": ["dense"] * layers}
        model = GlmMoeDsaModel(GlmMoeDsaConfig(**sizes))
    else:
        model = DeepseekV32Model(DeepseekV32Config(**sizes))
    cast(nn.Module, model).to(dtype).eval().requires_grad_(False)
    for layer in cast(Any, model).layers:
        # Loading a checkpoint in a narrower dtype leaves this projection wide.
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.weights_proj.float()
    return model
