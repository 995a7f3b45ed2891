"""The cases of what is done to each token's row: norms, rotations, cache writes and reads."""

from __future__ import annotations

from typing import Any

import _gpu_compare as compare
import _gpu_plain as plain
import torch
from _gpu_peers import plain as compiled_peer
from _gpu_setting import EPS, INDEX_STYLE, STYLE, Peer, Scene, Work, size_of
from _measure import Floor
from torch import Tensor

from dsafx import ops


def _copied(*tensors: Tensor) -> int:
    return 2 * size_of(*tensors)


def rms_norm(scene: Scene) -> Work:
    """Of the query latents."""
    width = scene.dims.q_lora_rank
    x, weight = scene.random(scene.tokens, width), scene.random(width)
    return Work(
        lambda: ops.rms_norm(x, weight, EPS),
        Floor(0, _copied(x) + size_of(weight)),
        (
            Peer("torch's own", lambda: plain.rms_norm(x, weight), _copied(x)),
            compiled_peer(scene, plain.rms_norm, x, weight, nbytes=_copied(x)),
        ),
        compare.values,
        compare.VALUES_MOST,
    )


def layer_norm(scene: Scene) -> Work:
    """Of the index keys."""
    width = scene.dims.index_head_dim
    x, weight, bias = scene.random(scene.tokens, width), scene.random(width), scene.random(width)
    return Work(
        lambda: ops.layer_norm(x, weight, bias, EPS),
        Floor(0, _copied(x) + size_of(weight, bias)),
        (
            Peer("torch's own", lambda: plain.layer_norm(x, weight, bias), _copied(x)),
            compiled_peer(scene, plain.layer_norm, x, weight, bias, nbytes=_copied(x)),
        ),
        compare.values,
        compare.VALUES_MOST,
    )


def rope(scene: Scene) -> Work:
    """Of the rotated part of all query heads."""
    dims, (cos, sin) = scene.dims, scene.angles
    x = scene.random(scene.tokens, dims.num_attention_heads, dims.qk_rope_head_dim)
    return Work(
        lambda: ops.rope(x, cos, sin, STYLE),
        Floor(0, _copied(x) + size_of(cos, sin)),
        (compiled_peer(scene, plain.rope, x, cos, sin, STYLE, nbytes=_copied(x)),),
        compare.values,
        compare.VALUES_MOST,
    )


class _Latents:
    """What the fused norms take, by name in the order of their schemas."""

    def __init__(self, scene: Scene, index: bool) -> None:
        dims, tokens = scene.dims, scene.tokens
        self.q_c = scene.random(tokens, dims.q_lora_rank)
        self.kv_c = scene.random(tokens, dims.kv_lora_rank)
        self.k_pe = scene.random(tokens, dims.qk_rope_head_dim)
        self.index_k = scene.random(tokens, dims.index_head_dim)
        self.q_weight, self.kv_weight = scene.random(dims.q_lora_rank), scene.random(self.latent)
        self.index_weight, self.index_bias = (scene.random(dims.index_head_dim) for _ in range(2))
        self.angles = scene.angles
        self.index_style = INDEX_STYLE[scene.case.family]
        self.index = index

    @property
    def latent(self) -> int:
        return self.kv_c.shape[1]

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The tensors, angles last."""
        keys = (self.index_k, self.index_weight, self.index_bias) if self.index else ()
        rows = (self.q_c, self.q_weight, self.kv_c, self.kv_weight, self.k_pe)
        return (*rows, *keys, *self.angles)

    @property
    def styles(self) -> tuple[Any, ...]:
        """What follows the tensors."""
        return (EPS, STYLE, EPS, self.index_style) if self.index else (EPS, STYLE)

    @property
    def moved(self) -> int:
        """Bytes of rows read and written once, and of weights and angles."""
        made = [self.q_c, self.kv_c, self.k_pe, *([self.index_k] if self.index else [])]
        return size_of(*self.operands) + size_of(*made)

    def plain(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """The same in plain PyTorch."""
        q_c, q_weight, kv_c, kv_weight, k_pe, *keys, cos, sin = operands
        latents = plain.rms_norm(q_c, q_weight), plain.rms_norm(kv_c, kv_weight)
        made = (*latents, plain.rope(k_pe, cos, sin, STYLE))
        if not self.index:
            return made
        normed = plain.layer_norm(*keys)
        return (*made, plain.rope_first(normed, cos, sin, self.index_style))


def _norms(scene: Scene, index: bool) -> Work:
    latents = _Latents(scene, index)
    op = ops.norm_rope_index if index else ops.norm_rope
    operands, styles = latents.operands, latents.styles
    return Work(
        lambda: op(*operands, *styles),
        Floor(0, latents.moved),
        (compiled_peer(scene, latents.plain, *operands, nbytes=latents.moved),),
        compare.values,
        compare.VALUES_MOST,
    )


def norm_rope(scene: Scene) -> Work:
    """Both norms and the rotation of the key."""
    return _norms(scene, index=False)


def norm_rope_index(scene: Scene) -> Work:
    """The same with the index key."""
    return _norms(scene, index=True)


def _norm_writes(scene: Scene, index: bool) -> Work:
    latents, layout, slots = _Latents(scene, index), scene.case.variant, scene.pages.slots
    operands, (eps, style, *index_styles) = latents.operands, latents.styles
    cache, theirs = scene.mla_cache(layout), scene.mla_cache(layout)
    written = scene.tokens * cache.shape[2] * cache.itemsize + size_of(slots)
    if not index:

        def write(cache: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
            made = latents.plain(*operands)
            plain.write_latents(cache, slots, made[1], made[2], layout)
            return made

        return Work(
            lambda: ops.norm_rope_write(*operands, cache, slots, eps, style, layout),
            Floor(0, latents.moved + written),
            (compiled_peer(scene, write, theirs, *operands, nbytes=2 * latents.moved),),
            compare.values,
            compare.VALUES_MOST,
        )
    keys, their_keys = scene.index_cache(), scene.index_cache()
    written += scene.tokens * keys.shape[2] + size_of(slots)

    def write_both(cache: Tensor, keys: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        made = latents.plain(*operands)
        plain.write_latents(cache, slots, made[1], made[2], layout)
        plain.write_index_keys(keys, slots, made[3])
        return made

    caches = (cache, slots, keys, slots)
    return Work(
        lambda: ops.norm_rope_index_write(
            *operands, *caches, eps, style, *index_styles, layout, "ue8m0"
        ),
        Floor(0, latents.moved + written),
        (
            compiled_peer(
                scene, write_both, theirs, their_keys, *operands, nbytes=2 * latents.moved
            ),
        ),
        compare.values,
        compare.VALUES_MOST,
    )


def norm_rope_write(scene: Scene) -> Work:
    """Both norms, the rotation, and the write to the MLA cache."""
    return _norm_writes(scene, index=False)


def norm_rope_index_write(scene: Scene) -> Work:
    """The same with the index key and its write: all that a step does before its products."""
    return _norm_writes(scene, index=True)


def mla_cache_write(scene: Scene) -> Work:
    """The write to the MLA cache alone."""
    dims, layout, slots = scene.dims, scene.case.variant, scene.pages.slots
    kv_c = scene.random(scene.tokens, dims.kv_lora_rank)
    k_pe = scene.random(scene.tokens, dims.qk_rope_head_dim)
    cache, theirs = scene.mla_cache(layout), scene.mla_cache(layout)
    read = size_of(kv_c, k_pe)
    args = theirs, slots, kv_c, k_pe, layout
    return Work(
        lambda: ops.mla_cache_write(kv_c, k_pe, cache, slots, layout),
        Floor(0, read + size_of(slots) + scene.tokens * cache.shape[2] * cache.itemsize),
        (compiled_peer(scene, plain.write_latents, *args, nbytes=6 * read),),
    )


def index_cache_write(scene: Scene) -> Work:
    """The write to the index cache alone."""
    index_k = scene.random(scene.tokens, scene.dims.index_head_dim)
    cache, theirs, slots = scene.index_cache(), scene.index_cache(), scene.pages.slots
    return Work(
        lambda: ops.index_cache_write(index_k, cache, slots, "ue8m0"),
        Floor(0, size_of(index_k, slots) + scene.tokens * cache.shape[2]),
        (
            compiled_peer(
                scene, plain.write_index_keys, theirs, slots, index_k, nbytes=6 * size_of(index_k)
            ),
        ),
    )


def mla_cache_gather(scene: Scene) -> Work:
    """The latents of all requests, packed."""
    dims, pages, layout = scene.dims, scene.pages, scene.case.variant
    cache, latent = scene.mla_cache(layout), dims.kv_lora_rank
    rows = scene.token_slots.flatten()

    def theirs(cache: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        read = plain.read_latents(cache, rows, latent, layout)
        return read[:, :latent].contiguous(), read[:, latent:].contiguous()

    def ours() -> tuple[Tensor, Tensor]:
        return ops.mla_cache_gather(
            cache, pages.table, pages.cu_seqlens, pages.total, layout, kv_lora_rank=latent
        )

    out = 2 * pages.total * dims.latent_width
    return Work(
        ours,
        Floor(0, size_of(pages.table) + pages.total * cache.shape[2] * cache.itemsize + out),
        (compiled_peer(scene, theirs, cache, rows, nbytes=4 * out),),
        compare.values,
        1e-6,
    )


def index_cache_gather(scene: Scene) -> Work:
    """The index keys of all requests, packed."""
    cache, pages, rows = scene.index_cache(), scene.pages, scene.token_slots.flatten()
    out = 2 * pages.total * scene.dims.index_head_dim
    return Work(
        lambda: ops.index_cache_gather(
            cache, pages.table, pages.cu_seqlens, pages.total, "ue8m0", torch.bfloat16
        ),
        Floor(0, size_of(pages.table) + pages.total * cache.shape[2] + out),
        (compiled_peer(scene, plain.read_index_keys, cache, rows, nbytes=4 * out),),
        compare.values,
        1e-6,
    )
