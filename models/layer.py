"""A DSA attention layer on packed tokens, as an engine would write it: semantic ops alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import ops
from ..ops import routing
from ._index_rope import rotate_index
from ._selection import LayerRouting, Step, plan, select
from ._sharding import check_one_selection, local_weight, sum_gradients
from .config import DSAConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DEFAULT_ROUTE = routing.RouteConfig()


class Indexer(nn.Module):
    """The parameters of an indexer, under the names that transformers gives them."""

    def __init__(self, config: DSAConfig) -> None:
        super().__init__()
        width = config.index_num_heads * config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, width, bias=False)
        self.wk = nn.Linear(config.hidden_size, config.index_head_dim, bias=False)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=config.index_norm_eps)
        self.weights_proj = nn.Linear(config.hidden_size, config.index_num_heads, bias=False)


class DSAAttention(nn.Module):
    """Multi-head latent attention over the keys that an indexer selects.

    The layer holds no route and compares no length: ``routing.decide`` does. A state dict of the
    attention module of transformers loads as it is.

    Args:
        config: of the model.
        layer_idx: of this layer in ``config.schedule``; a shared layer has no indexer.
        route: mode and limits.
    """

    dsa_capabilities = routing.LayerCapabilities(dense_mha=True, masked_mha=True)

    def __init__(
        self,
        config: DSAConfig,
        layer_idx: int = 0,
        route: routing.RouteConfig = _DEFAULT_ROUTE,
    ) -> None:
        super().__init__()
        if not 0 <= layer_idx < config.num_layers:
            raise ValueError(f"layer_idx must be in [0, {config.num_layers}), got {layer_idx}")
        self.config = config
        self.layer_idx = layer_idx
        self.mesh: DeviceMesh | None = None
        self.routing = LayerRouting.of(self, config, layer_idx, route)
        bias, heads = config.attention_bias, config.num_heads
        nope, rope, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=bias)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=config.norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            config.hidden_size, config.kv_lora_rank + rope, bias=bias
        )
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=config.norm_eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (nope + v), bias=False)
        self.o_proj = nn.Linear(heads * v, config.hidden_size, bias=bias)
        self.indexer = Indexer(config) if config.schedule[layer_idx] == "full" else None

    def kv_b_weight(self) -> Tensor:
        """[N * (P + V), L], the up-projection of the latents, rows of each head ``[P | V]``.

        Of the heads of this rank.
        """
        return local_weight(self.kv_b_proj.weight)

    def share_heads(self, mesh: DeviceMesh) -> None:
        """Count the heads of this rank alone, once the projections are sharded over ``mesh``."""
        self.mesh = mesh
        self.config = self.config.for_ranks(mesh.size())
        self.routing = LayerRouting.of(self, self.config, self.layer_idx, self.routing.route)

    def forward(
        self,
        hidden_states: Tensor,
        cos: Tensor,
        sin: Tensor,
        ks: Tensor,
        ke: Tensor,
        max_kv_len: int,
        max_query_len: int,
        *,
        kv_c_cache: Tensor | None = None,
        k_pe_cache: Tensor | None = None,
        index_k_cache: Tensor | None = None,
        write_positions: Tensor | None = None,
        indices: Tensor | None = None,
        keep_indices: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one segment of packed tokens.

        Without caches the keys are those of ``hidden_states``. With caches, the keys of this step
        are written to them in place before anything is read, and ``ks, ke`` name cache rows.

        Args:
            hidden_states: [T, hidden].
            cos, sin: [T, R / 2], one angle a pair.
            ks, ke: [T] int32, the visible interval of packed keys.
            max_kv_len: host upper bound on ``ke - ks``.
            max_query_len: host upper bound on the tokens of a request.
            kv_c_cache, k_pe_cache: [S, L] and [S, R].
            index_k_cache: [S, D], on a layer with an indexer.
            write_positions: [T] int64, the cache row of each token. Every token is written, and -1
                skips none, as slots in pages do: rows of padding need a cache row that nobody sees.
            indices: [T, K] int32, on a shared layer the selection of the full layer before it.
            keep_indices: somebody else reads the selection, so it is made whatever the route.

        Returns:
            [T, hidden]; and [T, K] int32, the selection to hand on, or None where nobody reads one.

        Raises:
            ValueError: a shared layer without ``indices``, a full layer with them, some but not all
                of the caches, or a forced mode that is illegal. No cache is written then.
        """
        config = self.config
        self._check(kv_c_cache, k_pe_cache, index_k_cache, write_positions, indices)
        step = Step(ks, ke, max_kv_len, max_query_len)
        decision = plan(self.routing, step, keep_indices or config.is_followed(self.layer_idx))
        latent, k_pe = torch.split(
            self.kv_a_proj_with_mqa(hidden_states),
            [config.kv_lora_rank, config.qk_rope_head_dim],
            dim=-1,
        )
        kv_c = ops.rms_norm(latent, self.kv_a_layernorm.weight, config.norm_eps)
        k_pe = ops.rope(k_pe, cos, sin, config.mla_rope_style)
        index_k = None
        if self.indexer is not None:
            index_k = self._index_key(self.indexer, hidden_states, cos, sin)
        if write_positions is not None and kv_c_cache is not None and k_pe_cache is not None:
            if index_k_cache is not None and index_k is not None:
                index_k = _written(index_k_cache, index_k, write_positions)
            kv_c = _written(kv_c_cache, kv_c, write_positions)
            k_pe = _written(k_pe_cache, k_pe, write_positions)

        q_c = ops.rms_norm(self.q_a_proj(hidden_states), self.q_a_layernorm.weight, config.norm_eps)
        if self.indexer is not None and index_k is not None:
            score = self._scoring(self.indexer, index_k, hidden_states, q_c, cos, sin, step)
            indices = select(self.routing, step, decision, score)
        check_one_selection(indices, self.mesh, self.layer_idx)
        q = self.q_b_proj(q_c).view(q_c.shape[0], config.num_heads, -1)
        q_nope, q_pe = torch.split(q, [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        out, _ = ops.mla_attention(
            q_nope,
            ops.rope(q_pe, cos, sin, config.mla_rope_style),
            sum_gradients(kv_c, self.mesh),
            k_pe,
            self.kv_b_weight(),
            indices,
            ks,
            ke,
            max_kv_len,
            max_query_len,
            config.topk,
            config.softmax_scale,
            self.routing.spec,
        )
        return self.o_proj(out.flatten(1)), indices

    def _check(
        self,
        kv_c_cache: Tensor | None,
        k_pe_cache: Tensor | None,
        index_k_cache: Tensor | None,
        write_positions: Tensor | None,
        indices: Tensor | None,
    ) -> None:
        shared = self.indexer is None
        if shared and indices is None:
            leader = routing.leaders(self.config.schedule)[self.layer_idx]
            raise ValueError(
                f"layer {self.layer_idx} is shared and needs the indices of layer {leader},"
                " got None"
            )
        if not shared and indices is not None:
            raise ValueError(
                f"layer {self.layer_idx} makes its own selection, so indices must be None"
            )
        given = {
            "kv_c_cache": kv_c_cache,
            "k_pe_cache": k_pe_cache,
            "write_positions": write_positions,
        }
        if not shared:
            given["index_k_cache"] = index_k_cache
        missing = [name for name, value in given.items() if value is None]
        if missing and len(missing) < len(given):
            raise ValueError(f"caches come together, and {', '.join(missing)} is missing")

    @torch.no_grad()
    def _index_key(
        self, indexer: Indexer, hidden_states: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """[T, D], what the index-key cache holds of these tokens."""
        norm = indexer.k_norm
        key = ops.layer_norm(
            indexer.wk(hidden_states), norm.weight, norm.bias, self.config.index_norm_eps
        )
        return rotate_index(key, cos, sin, self.config)

    def _scoring(
        self,
        indexer: Indexer,
        index_k: Tensor,
        hidden_states: Tensor,
        q_c: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: Step,
    ) -> Callable[[], Tensor]:
        config = self.config

        @torch.no_grad()
        def score() -> Tensor:
            query = indexer.wq_b(q_c).view(-1, config.index_num_heads, config.index_head_dim)
            weights = nn.functional.linear(
                hidden_states.float(), indexer.weights_proj.weight.float()
            )
            return ops.index_select(
                rotate_index(query, cos, sin, config),
                index_k,
                weights * config.index_weight_scale,
                step.ks,
                step.ke,
                step.max_kv_len,
                config.topk,
                None,
                self.routing.route.batch_invariant,
            )

        return score


class MQAOnlyAttention(DSAAttention):
    """A layer that knows top-k MQA alone: it declares nothing, and inherits no declaration."""


def _written(cache: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """``cache`` with ``rows`` written to it in place."""
    return cache.index_copy_(0, positions, rows.to(cache.dtype))
