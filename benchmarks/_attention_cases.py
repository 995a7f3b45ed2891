"""The cases of attention: expanded, from latents, and a decode step of a whole layer."""

from __future__ import annotations

import _peers as peers
from _families import Dims, GrownCache
from _measure import Floor
from _setting import Prepared, Setting, causal, causal_mask, size_of
from torch import Tensor

from dsafx import ops, routing


def _expanded(setting: Setting, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, N, T, P + R], and k and v as ``expand_kv`` leaves them."""
    dims = setting.dims
    q = setting.random(1, dims.num_attention_heads, tokens, dims.qk_head_dim)
    latents = setting.random(1, 1, tokens, dims.kv_lora_rank)
    rotated = setting.random(1, 1, tokens, dims.qk_rope_head_dim)
    k, v = setting.attention.expand_kv(latents, rotated)
    return q, k, v


def _packed(x: Tensor) -> Tensor:
    """[T, N, D] of [1, N, T, D]."""
    return x[0].transpose(0, 1).contiguous()


def _sdpa_bytes(dims: Dims, tokens: int, keys: int) -> int:
    """Peak of SDPA: unlike head widths take its slow path, which holds all scores twice."""
    heads = dims.num_attention_heads
    if dims.qk_head_dim == dims.v_head_dim:
        return 4 * tokens * (heads * dims.v_head_dim + keys)
    return 2 * 4 * heads * tokens * keys


def dense_mha(setting: Setting) -> Prepared:
    """Expanded attention of a prompt of K tokens, against the masked SDPA of transformers."""
    tokens, dims = setting.length(2048), setting.dims
    q, k, v = _expanded(setting, tokens)
    ks, ke = causal(tokens)
    mask = causal_mask(tokens)
    packed = _packed(q), _packed(k), _packed(v)
    attention = setting.attention
    width = dims.qk_head_dim + dims.v_head_dim
    return Prepared(
        tokens,
        tokens,
        lambda: ops.dense_mha(*packed, ks, ke, tokens, dims.scale, return_lse=False),
        lambda: peers.masked_attention(attention, q, k, v, mask),
        peer_bytes=_sdpa_bytes(dims, tokens, tokens),
        floor=Floor(
            2 * int(ke.sum()) * dims.num_attention_heads * width, size_of(*packed, packed[2])
        ),
        comparable=True,
    )


def _selection(setting: Setting, tokens: int, ks: Tensor, ke: Tensor) -> Tensor:
    q, k, weights = setting.index_operands(tokens)
    return ops.index_select(q, k, weights, ks, ke, tokens, setting.dims.index_topk)


def masked_mha(setting: Setting) -> Prepared:
    """Expanded attention over the selection of a prompt of 2 K tokens."""
    tokens, dims = setting.length(4096), setting.dims
    q, k, v = _expanded(setting, tokens)
    ks, ke = causal(tokens)
    indices = _selection(setting, tokens, ks, ke)
    packed = _packed(q), _packed(k), _packed(v)
    attention = setting.attention
    mask = peers.selected_mask(indices.clamp(min=0)[None], causal_mask(tokens))
    selected = int(ke.clamp(max=dims.index_topk).sum())
    width = dims.qk_head_dim + dims.v_head_dim
    return Prepared(
        tokens,
        tokens,
        lambda: ops.masked_mha(*packed, indices, ks, ke, dims.scale, return_lse=False),
        lambda: peers.masked_attention(attention, q, k, v, mask),
        peer_bytes=_sdpa_bytes(dims, tokens, tokens),
        floor=Floor(
            2 * selected * dims.num_attention_heads * width,
            size_of(*packed, packed[2], indices),
        ),
        comparable=True,
    )


def _routed(setting: Setting, tokens: int, keys: int) -> Prepared:
    """``mla_attention`` for the last ``tokens`` of ``keys``, all of them cached as latents."""
    dims = setting.dims
    heads, topk = dims.num_attention_heads, dims.index_topk
    q = setting.random(1, heads, tokens, dims.qk_head_dim)
    latents = setting.random(1, 1, keys, dims.kv_lora_rank)
    rotated = setting.random(1, 1, keys, dims.qk_rope_head_dim)
    ks, ke = (x[keys - tokens :] for x in causal(keys))
    index_q, index_k, weights = setting.index_operands(keys)
    indices = ops.index_select(
        index_q[keys - tokens :], index_k, weights[keys - tokens :], ks, ke, keys, topk
    )
    mask = causal_mask(keys)[:, :, keys - tokens :]
    named = indices.clamp(min=0)[None]
    packed = _packed(q)
    q_nope, q_pe = packed.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
    weight, attention = setting.kv_b_weight, setting.attention
    capabilities = routing.LayerCapabilities(dense_mha=True, masked_mha=True)
    spec = routing.encode_spec(capabilities, routing.RouteConfig())

    def ours() -> tuple[Tensor, Tensor]:
        return ops.mla_attention(
            q_nope,
            q_pe,
            latents[0, 0],
            rotated[0, 0],
            weight,
            indices,
            ks,
            ke,
            keys,
            tokens,
            topk,
            dims.scale,
            spec,
        )

    return Prepared(
        tokens,
        keys,
        ours,
        lambda: peers.attend(attention, q, latents, rotated, named, mask),
        peer_bytes=_sdpa_bytes(dims, tokens, keys) + weight.itemsize * dims.expanded(keys),
        floor=_attention_floor(setting, tokens, keys, int(ke.clamp(max=topk).sum())),
        comparable=True,
    )


def _attention_floor(setting: Setting, tokens: int, keys: int, selected: int) -> Floor:
    """The cheaper of two ways: expand the latents, or absorb the up-projection into the query."""
    dims = setting.dims
    heads, latent, rope = dims.num_attention_heads, dims.kv_lora_rank, dims.qk_rope_head_dim
    up = dims.qk_nope_head_dim + dims.v_head_dim
    expand = keys * latent * up + selected * (dims.qk_head_dim + dims.v_head_dim)
    absorb = tokens * latent * up + selected * (2 * latent + rope)
    rows = min(keys, selected) * (latent + rope)
    values = rows + heads * (up * latent + tokens * (dims.qk_head_dim + dims.v_head_dim))
    return Floor(2 * heads * min(expand, absorb), values * setting.dtype.itemsize)


def routed(setting: Setting) -> Prepared:
    """Attention of a prompt of 2 K tokens from its latents, by the route that ``decide`` takes."""
    tokens = setting.length(4096)
    return _routed(setting, tokens, tokens)


def decode_attention(setting: Setting) -> Prepared:
    """Attention of one token over 2 K cached ones, from the latents."""
    return _routed(setting, 1, setting.length(4096))


def decode_layer(setting: Setting) -> Prepared:
    """A decode step of the whole attention layer at 2 K cached tokens, projections included."""
    keys, dims, layer = setting.length(4096), setting.dims, setting.layer
    cache = GrownCache(dims, keys, setting.dtype)
    hidden = setting.random(1, 1, dims.hidden_size)
    growing = cache.as_dynamic(layer.plain.config, keys - 1)
    newest = cache.latents[:, :, -1:], cache.rotated[:, :, -1:], cache.index_keys[:, -1:]

    def grow() -> None:
        growing.update(*newest[:2], 0)
        growing.update_indexer(newest[2], 0)

    return Prepared(
        1,
        keys,
        layer.step(layer.enabled, cache, hidden),
        layer.step(layer.plain, cache, hidden),
        peer_bytes=setting.dtype.itemsize * dims.expanded(keys),
        others={
            "ceiling": lambda: peers.projections_and_absorption(setting.attention, hidden),
            "growth": grow,
        },
        notes={
            "share of the ceiling": ("ceiling", "ours"),
            "the ceiling over transformers": ("peer", "ceiling"),
            "growth of a dynamic cache over the step": ("growth", "ours"),
        },
        comparable=True,
    )


def decode_layer_long(setting: Setting) -> Prepared:
    """The same step at 16 K cached tokens, against itself at 2 K."""
    return _decode_long(setting, 32768)


def decode_layer_longest(setting: Setting) -> Prepared:
    """The same step at 32 K cached tokens, against itself at 2 K."""
    return _decode_long(setting, 65536)


def _decode_long(setting: Setting, real: int) -> Prepared:
    dims, layer = setting.dims, setting.layer
    hidden = setting.random(1, 1, dims.hidden_size)
    short, long = (
        layer.step(layer.enabled, GrownCache(dims, keys, setting.dtype), hidden)
        for keys in (setting.length(4096), setting.length(real))
    )
    return Prepared(
        1,
        long.cache.keys,
        long,
        others={"short": short},
        notes={"time over its own at 2 K cached tokens": ("ours", "short")},
    )
