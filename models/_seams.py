"""Where our ops enter a transformers attention module: latents, indexer and attention interface."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .. import ops
from ..ops import routing
from ..ops._requests import attend_requests, is_interval, packed_rows, select_requests
from ._index_rope import rotate_index
from ._selection import LayerRouting, Step, note, plan, select
from .config import DSAConfig


class AttentionSeams:
    """What an attention module of transformers carries, as ``dsa_layer``, while on our ops."""

    dsa_capabilities = routing.LayerCapabilities(dense_mha=True, masked_mha=True)

    def __init__(self, config: DSAConfig, layer_idx: int, route: routing.RouteConfig) -> None:
        self.config = config
        self.routing = LayerRouting.of(self, config, layer_idx, route)

    @staticmethod
    def kv_b_weight(module: nn.Module) -> Tensor:
        """[N * (P + V), L], the weight of the latents' up-projection, looked up each forward.

        Raises:
            NotImplementedError: ``kv_b_proj`` is anything but a plain dense linear layer, so that
                its weight does not say what it computes.
        """
        projection = module.kv_b_proj
        if type(projection) is not nn.Linear:
            raise NotImplementedError(
                f"kv_b_proj of layer {module.layer_idx} must be a plain nn.Linear, got"
                f" {type(projection).__name__}"
            )
        return projection.weight


def check_attention(module: nn.Module) -> None:
    """Refuse an attention module whose function our ops would not reproduce.

    Raises:
        NotImplementedError: ``kv_b_proj`` is no plain dense linear layer without bias and hooks, or
            the module is in training mode with attention dropout.
    """
    layer = f"layer {module.layer_idx}"
    weight = AttentionSeams.kv_b_weight(module)
    projection = cast(nn.Linear, module.kv_b_proj)
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.itemsize < 2:
        raise NotImplementedError(
            f"kv_b_proj of {layer} must have a dense weight of 16 bits or more, got"
            f" {type(weight).__name__} of {weight.dtype}"
        )
    if projection.bias is not None:
        raise NotImplementedError(f"kv_b_proj of {layer} must have no bias")
    if projection._forward_hooks or projection._forward_pre_hooks or "forward" in vars(projection):
        raise NotImplementedError(
            f"kv_b_proj of {layer} must have no hooks: its weight is used without calling it"
        )
    if module.training and module.attention_dropout:
        raise NotImplementedError(_dropout_message(layer, module.attention_dropout))


def _dropout_message(layer: str, dropout: object) -> str:
    return f"attention dropout is not supported, got {dropout} for {layer} in training mode"


def latents(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """In place of ``expand_kv``: hand [B, 1, S, L] and [B, 1, S, R] to ``attend`` as cached."""
    return kv_nope, k_rot


@torch.no_grad()
def indexer_forward(
    self: nn.Module,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    cache: Cache | None = None,
) -> Tensor | None:
    """In place of the ``forward`` of the indexer ``self``.

    The index key of each token is written first, whatever is decided about the selection (C5).

    Args:
        hidden_states: [B, S, hidden].
        q_resid: [B, S, q_lora], the normed query latent.
        position_embeddings: cos and sin, [B or 1, S, R] each, the second half a copy of the first.
        attention_mask: [B or 1, S, 2] int32 intervals, or [B or 1, S, keys] bool or additive.
        position_ids: not used.
        cache: of the model; holds the index keys of this layer.

    Returns:
        [B, S, K] int32 positions in the request's keys, then -1; or None where nobody reads them.
    """
    indexer = cast(Any, self)
    layer: LayerRouting = indexer.dsa_layer.routing
    config = layer.config
    batch, rows = hidden_states.shape[:2]
    cos, sin = (_packed_angles(part, batch, config) for part in position_embeddings)

    key = indexer.wk(hidden_states).flatten(0, 1)
    key = ops.layer_norm(key, indexer.k_norm.weight, indexer.k_norm.bias, config.index_norm_eps)
    keys = rotate_index(key, cos, sin, config).view(batch, rows, config.index_head_dim)
    if cache is not None:
        keys = cache.update_indexer(keys, indexer.layer_idx)
    key_len = keys.shape[1]
    ks, ke = packed_rows(attention_mask, batch, rows, key_len)

    def score() -> Tensor:
        query = indexer.wq_b(q_resid).view(
            batch * rows, config.index_num_heads, config.index_head_dim
        )
        weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype))
        return select_requests(
            rotate_index(query, cos, sin, config).unflatten(0, (batch, rows)),
            keys,
            weights.float() * config.index_weight_scale,
            attention_mask,
            config.topk,
            layer.route.batch_invariant,
        ).flatten(0, 1)

    step = Step(ks, ke, key_len, rows, masked=not is_interval(attention_mask))
    decision = plan(layer, step, config.is_followed(layer.layer_idx))
    selected = select(layer, step, decision, score)
    return None if selected is None else selected.view(batch, rows, config.topk)


def _packed_angles(part: Tensor, batch: int, config: DSAConfig) -> Tensor:
    """cos or sin as ``ops.rope`` takes it, [B * S, R / 2] float32."""
    half = part[..., : config.qk_rope_head_dim // 2].float()
    return half.expand(batch, -1, -1).reshape(-1, config.qk_rope_head_dim // 2)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention interface of the name "dsafx".

    Args:
        module: an attention module that carries ``dsa_layer``.
        query: [B, N, S, P + R], rotated part last.
        key: [B, 1, keys, L], the cached latents; value: [B, 1, keys, R], the cached rotated keys.
        attention_mask: [B or 1, 1, S, 2] int32 intervals, or [B or 1, 1, S, keys] bool or additive.
        scaling: softmax scale.
        dropout: must be 0.
        indices: [B, S, K] int32, the selection; None where the layer's route reads none.
        kwargs: what transformers hands to every attention function; not used.

    Returns:
        [B, S, N, V], and None for the attention weights, which are never formed.

    Raises:
        NotImplementedError: dropout, or a ``kv_b_proj`` that is not a plain linear layer.
    """
    layer: LayerRouting = cast(Any, module).dsa_layer.routing
    config = layer.config
    if dropout:
        raise NotImplementedError(_dropout_message(f"layer {layer.layer_idx}", dropout))
    mask = attention_mask[:, 0]

    def step() -> Step:
        batch, rows, key_len = query.shape[0], query.shape[2], key.shape[2]
        ks, ke = packed_rows(mask, batch, rows, key_len)
        return Step(ks, ke, key_len, rows, masked=not is_interval(mask))

    if config.schedule[layer.layer_idx] == "shared":
        note(layer, step, config.is_followed(layer.layer_idx))
    q_nope, q_pe = torch.split(query, [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    out = attend_requests(
        q_nope,
        q_pe,
        key,
        value,
        AttentionSeams.kv_b_weight(module),
        indices,
        mask,
        config.topk,
        scaling,
        layer.spec,
    )
    return out.transpose(1, 2), None
