"""Where our ops enter a transformers attention module: latents, indexer and attention interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .. import ops
from ..ops import routing
from ..ops._requests import attend_requests, is_interval, packed_rows, select_requests
from ._attention_weights import attention_weights
from ._index_rope import rotate_index
from ._intervals import prepared_mask
from ._selection import LayerRouting, Step, note, plan, select
from ._sharding import check_one_selection, sum_gradients
from ._weights import check_weight, effective_weight, is_wrapped
from .config import DSAConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class AttentionSeams:
    """What an attention module of transformers carries, as ``dsa_layer``, while on our ops.

    Args:
        config: of the model, with the heads of all ranks.
        layer_idx: of the module.
        route: mode and limits.
        mesh: the ranks that share the module's heads, or None.

    Raises:
        ValueError: the ranks cannot hold the same number of heads.
    """

    dsa_capabilities = routing.LayerCapabilities(dense_mha=True, masked_mha=True)

    def __init__(
        self,
        config: DSAConfig,
        layer_idx: int,
        route: routing.RouteConfig,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.mesh = mesh
        self.config = config if mesh is None else config.for_ranks(mesh.size())
        self.routing = LayerRouting.of(self, self.config, layer_idx, route)

    @staticmethod
    def kv_b_weight(module: nn.Module) -> Tensor:
        """[N * (P + V), L], the weight of the latents' up-projection, looked up each forward.

        The rows of this rank's heads where they are sharded.

        Raises:
            NotImplementedError: no weight says what ``kv_b_proj`` computes.
        """
        # The norm that makes the latents has their dtype, whatever its successor is stored in.
        dtype = cast(Tensor, cast(nn.Module, module.kv_a_layernorm).weight).dtype
        return effective_weight(cast(nn.Module, module.kv_b_proj), _up_projection(module), dtype)


def _up_projection(module: nn.Module) -> str:
    return f"kv_b_proj of layer {module.layer_idx}"


def check_attention(module: nn.Module) -> None:
    """Refuse an attention module whose function our ops would not reproduce.

    Raises:
        NotImplementedError: no weight says what ``kv_b_proj`` computes, or the module is in
            training mode with attention dropout.
    """
    check_weight(cast(nn.Module, module.kv_b_proj), _up_projection(module))
    if module.training and module.attention_dropout:
        raise NotImplementedError(
            _dropout_message(f"layer {module.layer_idx}", module.attention_dropout)
        )


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
    # In a decoder of which other layers are not ours, nobody looked at the mask before.
    if attention_mask.is_floating_point():
        attention_mask = prepared_mask(attention_mask)

    key = indexer.wk(hidden_states).flatten(0, 1)
    normed = _normed(indexer.k_norm, key, config.index_norm_eps)
    keys = rotate_index(normed, cos, sin, config).view(batch, rows, config.index_head_dim)
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


def _normed(norm: nn.Module, x: Tensor, eps: float) -> Tensor:
    """``norm`` of [T, D], as our op where its parameters say everything."""
    if type(norm) is nn.LayerNorm and not is_wrapped(norm):
        return ops.layer_norm(x, norm.weight, norm.bias, eps)
    return cast(Tensor, norm(x))


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
) -> tuple[Tensor, Tensor | None]:
    """The attention interface of the name "dsafx".

    Args:
        module: an attention module that carries ``dsa_layer``.
        query: [B, N, S, P + R], rotated part last.
        key: [B, 1, keys, L], the cached latents; value: [B, 1, keys, R], the cached rotated keys.
        attention_mask: [B or 1, 1, S, 2] int32 intervals, or [B or 1, 1, S, keys] bool or additive.
        scaling: softmax scale.
        dropout: must be 0.
        indices: [B, S, K] int32, the selection; None where the layer's route reads none.
        kwargs: what transformers hands to every attention function; ``output_attentions`` is read.

    Returns:
        [B, S, N, V]; and None, or with ``output_attentions`` the weights [B, N, S, keys], which
        take memory for each query token times each key.

    Raises:
        NotImplementedError: dropout, or no weight says what ``kv_b_proj`` computes.
        ValueError: other heads in ``query`` than this rank's, as ``enable`` found them.
    """
    seam: AttentionSeams = cast(Any, module).dsa_layer
    layer = seam.routing
    config = layer.config
    if dropout:
        raise NotImplementedError(_dropout_message(f"layer {layer.layer_idx}", dropout))
    if query.shape[1] != config.num_heads:
        raise ValueError(
            f"layer {layer.layer_idx} has {query.shape[1]} query heads on this rank, and kv_b_proj"
            f" had {config.num_heads} when it was enabled: the projections of the heads must be"
            " sharded alike, and before that"
        )
    mask = attention_mask[:, 0]

    def step() -> Step:
        batch, rows, key_len = query.shape[0], query.shape[2], key.shape[2]
        ks, ke = packed_rows(mask, batch, rows, key_len)
        return Step(ks, ke, key_len, rows, masked=not is_interval(mask))

    if config.schedule[layer.layer_idx] == "shared":
        note(layer, step, config.is_followed(layer.layer_idx))
    check_one_selection(indices, seam.mesh, layer.layer_idx)
    key = sum_gradients(key, seam.mesh)
    q_nope, q_pe = torch.split(query, [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    up_projection = AttentionSeams.kv_b_weight(module)
    out = attend_requests(
        q_nope,
        q_pe,
        key,
        value,
        up_projection,
        indices,
        mask,
        config.topk,
        scaling,
        layer.spec,
    )
    weights = None
    if kwargs.get("output_attentions", cast(Any, module).config.output_attentions):
        weights = attention_weights(q_nope, q_pe, key, value, up_projection, indices, mask, scaling)
    return out.transpose(1, 2), weights
