"""The cases of attention: expanded, over selected latents, routed, and with the skip off."""

from __future__ import annotations

from collections.abc import Callable

import _gpu_compare as compare
import _gpu_plain as plain
import torch
from _gpu_peers import attend
from _gpu_peers import plain as compiled_peer
from _gpu_setting import INDEX_STYLE, Peer, Scene, Work, size_of
from _measure import Floor
from torch import Tensor
from torch.nn import functional as F

from dsafx import ops, routing

_LAYER = routing.LayerCapabilities(dense_mha=True, masked_mha=True)
_SDPA = "SDPA"


def _values(ours: object, peers: tuple[Peer, ...], floor: Floor) -> Work:
    assert callable(ours)
    return Work(ours, floor, peers, compare.values, compare.VALUES_MOST)


def _sparse_flops(scene: Scene) -> int:
    """Products of absorbed queries with the selected rows, and of weights with their latents."""
    dims = scene.dims
    width = dims.latent_width + dims.kv_lora_rank
    return 2 * scene.selected * dims.num_attention_heads * width


def _gathered_bytes(scene: Scene) -> int:
    """Peak of attention over gathered rows: the rows, the logits twice and the weights."""
    dims = scene.dims
    lanes = scene.tokens * dims.index_topk
    return lanes * (4 * dims.latent_width + 10 * dims.num_attention_heads)


def _latent_operands(scene: Scene) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dims = scene.dims
    rows = scene.tokens, dims.num_attention_heads
    return (
        scene.random(*rows, dims.kv_lora_rank),
        scene.random(*rows, dims.qk_rope_head_dim),
        scene.random(scene.keys, dims.kv_lora_rank),
        scene.random(scene.keys, dims.qk_rope_head_dim),
    )


def _sparse_floor(scene: Scene, q: Tensor, row_bytes: int) -> Floor:
    """Queries, ids and selected rows are read, and latents written, once."""
    dims = scene.dims
    rows = min(scene.requests * scene.keys, scene.selected)
    out = scene.tokens * dims.num_attention_heads * dims.kv_lora_rank * q.itemsize
    return Floor(_sparse_flops(scene), size_of(q, scene.indices) + rows * row_bytes + out)


def sparse_mla(scene: Scene) -> Work:
    """Top-k attention over packed latents and rotated keys that lie apart."""
    dims, indices = scene.dims, scene.indices
    q_latent, q_pe, kv_c, k_pe = _latent_operands(scene)
    ks = scene.interval[0]

    def theirs(q: Tensor, kv_c: Tensor, k_pe: Tensor, indices: Tensor) -> Tensor:
        taken = indices.clamp(min=0).long()
        kv = torch.cat((kv_c[taken], k_pe[taken]), dim=-1)
        return plain.sparse(q, kv, indices, dims.scale, dims.kv_lora_rank)

    q = torch.cat((q_latent, q_pe), dim=-1)
    return _values(
        lambda: ops.sparse_mla(
            q_latent, q_pe, kv_c, k_pe, indices, ks, dims.scale, return_lse=False
        ),
        (compiled_peer(scene, theirs, q, kv_c, k_pe, indices, nbytes=_gathered_bytes(scene)),),
        _sparse_floor(scene, q, dims.latent_width * q.itemsize),
    )


def sparse_mqa(scene: Scene) -> Work:
    """The same over packed rows."""
    dims, indices = scene.dims, scene.indices
    q = scene.random(scene.tokens, dims.num_attention_heads, dims.latent_width)
    kv = scene.random(scene.keys, dims.latent_width)
    ks = scene.interval[0]

    def theirs(q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
        taken = kv[indices.clamp(min=0).long()]
        return plain.sparse(q, taken, indices, dims.scale, dims.kv_lora_rank)

    return _values(
        lambda: ops.sparse_mqa(q, kv, indices, ks, dims.scale, dims.kv_lora_rank, return_lse=False),
        (compiled_peer(scene, theirs, q, kv, indices, nbytes=_gathered_bytes(scene)),),
        _sparse_floor(scene, q, dims.latent_width * q.itemsize),
    )


def sparse_mqa_paged(scene: Scene) -> Work:
    """The same over a cache in pages, of the layout that is the variant."""
    dims, pages, layout = scene.dims, scene.pages, scene.case.variant
    cache, indices = scene.mla_cache(layout), scene.indices
    q = scene.random(scene.tokens, dims.num_attention_heads, dims.latent_width)
    taken = scene.token_slots.repeat_interleave(scene.each, dim=0)
    slots = taken.gather(1, indices.clamp(min=0).long())

    def theirs(q: Tensor, cache: Tensor, slots: Tensor, indices: Tensor) -> Tensor:
        kv = plain.read_latents(cache, slots, dims.kv_lora_rank, layout)
        return plain.sparse(q, kv, indices, dims.scale, dims.kv_lora_rank)

    held = _gathered_bytes(scene) * (1 if layout == "bf16" else 3)
    return _values(
        lambda: ops.sparse_mqa_paged(
            q,
            cache,
            indices,
            pages.table,
            pages.row_request,
            pages.lens,
            dims.scale,
            dims.kv_lora_rank,
            layout,
            return_lse=False,
        ),
        (compiled_peer(scene, theirs, q, cache, slots, indices, nbytes=held),),
        _sparse_floor(scene, q, cache.shape[2] * cache.itemsize),
    )


def _expanded(scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
    dims = scene.dims
    heads = dims.num_attention_heads
    return (
        scene.random(scene.tokens, heads, dims.qk_head_dim),
        scene.random(scene.keys, heads, dims.qk_head_dim),
        scene.random(scene.keys, heads, dims.v_head_dim),
    )


def _mha_floor(scene: Scene, pairs: int, *read: Tensor) -> Floor:
    dims = scene.dims
    heads = dims.num_attention_heads
    out = scene.tokens * heads * dims.v_head_dim * read[0].itemsize
    return Floor(2 * pairs * heads * (dims.qk_head_dim + dims.v_head_dim), size_of(*read) + out)


def _sdpa_bytes(scene: Scene, *operands: Tensor) -> int:
    """Peak of SDPA: head widths that differ may take its path that holds all scores, twice."""
    dims, wide = scene.dims, scene.tokens * scene.keys
    alike = dims.qk_head_dim == dims.v_head_dim
    return 2 * size_of(*operands) + (0 if alike else 4 * wide * dims.num_attention_heads)


def dense_mha(scene: Scene) -> Work:
    """Expanded attention over all keys."""
    q, k, v = _expanded(scene)
    (ks, ke), scale = scene.interval, scene.dims.scale
    return _values(
        lambda: ops.dense_mha(q, k, v, ks, ke, scene.keys, scale, return_lse=False),
        (Peer(_SDPA, lambda: plain.sdpa(q, k, v, scale), _sdpa_bytes(scene, q, k, v)),),
        _mha_floor(scene, scene.pairs, q, k, v),
    )


def masked_mha(scene: Scene) -> Work:
    """Expanded attention over the selected keys."""
    q, k, v = _expanded(scene)
    (ks, ke), indices, scale = scene.interval, scene.indices, scene.dims.scale
    mask = torch.zeros(scene.tokens, scene.keys + 1, dtype=torch.bool, device=q.device)
    # The last column takes the lanes without a key.
    mask.scatter_(1, indices.long().where(indices >= 0, scene.keys), True)
    mask = mask[:, :-1]
    held = _sdpa_bytes(scene, q, k, v) + 4 * mask.numel()
    return _values(
        lambda: ops.masked_mha(q, k, v, indices, ks, ke, scale, return_lse=False),
        (Peer("SDPA with a mask", lambda: plain.sdpa(q, k, v, scale, mask), held),),
        _mha_floor(scene, scene.selected, q, k, v, indices),
    )


def _attention_floor(scene: Scene) -> Floor:
    """The cheaper of two ways: expand the latents, or absorb the up-projection into the query."""
    dims = scene.dims
    heads, latent, rope = dims.num_attention_heads, dims.kv_lora_rank, dims.qk_rope_head_dim
    up, keys = dims.qk_nope_head_dim + dims.v_head_dim, scene.requests * scene.keys
    expand = keys * latent * up + scene.selected * (dims.qk_head_dim + dims.v_head_dim)
    absorb = scene.tokens * latent * up + scene.selected * (2 * latent + rope)
    rows = min(keys, scene.selected) * (latent + rope)
    rest = heads * (up * latent + scene.tokens * (dims.qk_head_dim + dims.v_head_dim))
    return Floor(2 * heads * min(expand, absorb), (rows + rest) * scene.dtype.itemsize)


def _routed(scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
    """q_nope, q_pe and the up-projection of the latents."""
    dims = scene.dims
    heads = dims.num_attention_heads
    weight = scene.random(heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank)
    q = scene.random(scene.tokens, heads, dims.qk_head_dim)
    q_nope, q_pe = q.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
    return q_nope, q_pe, weight.mul_(dims.kv_lora_rank**-0.5)


def mla_attention(scene: Scene) -> Work:
    """One layer's attention by the route that is decided; the variant ``skip`` has no selection."""
    dims = scene.dims
    q_nope, q_pe, weight = _routed(scene)
    kv_c = scene.random(scene.keys, dims.kv_lora_rank)
    k_pe = scene.random(scene.keys, dims.qk_rope_head_dim)
    ks, ke = scene.interval

    def call(indices: Tensor | None, mode: str) -> Tensor:
        out, _ = ops.mla_attention(
            q_nope,
            q_pe,
            kv_c,
            k_pe,
            weight,
            indices,
            ks,
            ke,
            scene.keys,
            scene.each,
            dims.index_topk,
            dims.scale,
            routing.encode_spec(_LAYER, routing.RouteConfig(mode=mode)),
        )
        return out

    if scene.case.variant == "skip":
        return _values(
            lambda: call(None, "auto"), _without_skip(scene, call), _attention_floor(scene)
        )
    indices = scene.indices
    theirs = attend(scene, torch.cat((q_nope, q_pe), dim=-1), kv_c, k_pe, weight)
    return _values(lambda: call(indices, "auto"), (theirs,), _attention_floor(scene))


def _without_skip(scene: Scene, call: Callable[[Tensor, str], Tensor]) -> tuple[Peer, ...]:
    """The same step where a short prompt is scored and attends by its selection like a long one."""
    dims = scene.dims
    heads, dim = dims.index_n_heads, dims.index_head_dim
    q_c = scene.random(scene.tokens, dims.q_lora_rank)
    project = scene.random(heads * dim, dims.q_lora_rank).mul_(dims.q_lora_rank**-0.5)
    k, raw = scene.random(scene.keys, dim), scene.floats(scene.tokens, heads)
    (ks, ke), (cos, sin) = scene.interval, scene.angles
    style = INDEX_STYLE[scene.case.family]

    def theirs() -> Tensor:
        q = F.linear(q_c, project).unflatten(-1, (heads, dim))
        q, weights = ops.index_query(q, raw, cos, sin, style, False)
        scores = ops.index_scores(q, k, weights, ks, ke)
        return call(ops.select_topk(scores, ks, ke, dims.index_topk), "sparse")

    return (Peer("the same, scored and sparse", theirs, 4 * scene.tokens * scene.keys),)


def mla_attention_paged(scene: Scene) -> Work:
    """One layer's attention of a decode step over the cache, captured: by its selection."""
    dims, pages, indices = scene.dims, scene.pages, scene.indices
    q_nope, q_pe, weight = _routed(scene)
    cache = scene.mla_cache("bf16")
    spec = routing.encode_spec(_LAYER, routing.RouteConfig())
    heads, nope, latent = dims.num_attention_heads, dims.qk_nope_head_dim, dims.kv_lora_rank
    taken = scene.token_slots.repeat_interleave(scene.each, dim=0)
    slots = taken.gather(1, indices.clamp(min=0).long())

    def theirs(
        q_nope: Tensor, q_pe: Tensor, cache: Tensor, weight: Tensor, slots: Tensor, indices: Tensor
    ) -> Tensor:
        up = weight.view(heads, -1, latent)
        absorbed = torch.einsum("tnp,npl->tnl", q_nope, up[:, :nope])
        kv = plain.read_latents(cache, slots, latent, "bf16")
        q = torch.cat((absorbed, q_pe), dim=-1)
        out = plain.sparse(q, kv, indices, dims.scale, latent)
        return torch.einsum("tnl,nvl->tnv", out, up[:, nope:])

    args = q_nope, q_pe, cache, weight, slots, indices
    return _values(
        lambda: ops.mla_attention_paged(
            q_nope,
            q_pe,
            cache,
            weight,
            indices,
            pages.table,
            pages.row_request,
            pages.lens,
            scene.keys,
            scene.each,
            dims.index_topk,
            dims.scale,
            spec,
            "bf16",
            captured=True,
        ),
        (compiled_peer(scene, theirs, *args, nbytes=_gathered_bytes(scene)),),
        _attention_floor(scene),
    )


def merge_attention(scene: Scene) -> Work:
    """Two results over latents, joined."""
    rows = scene.tokens, scene.dims.num_attention_heads
    a, b = (scene.random(*rows, scene.dims.kv_lora_rank) for _ in range(2))
    lse_a, lse_b = (scene.floats(*rows) for _ in range(2))
    args = a, lse_a, b, lse_b
    return _values(
        lambda: ops.merge_attention(*args),
        (compiled_peer(scene, plain.merge, *args, nbytes=2 * size_of(a)),),
        Floor(0, size_of(*args, a, lse_a)),
    )
