"""``norm_rope`` and ``norm_rope_index`` with the cache writes that follow them, as one kernel.

Each equals its parts in a row, bit for bit: the caches hold what ``mla_cache_write`` and
``index_cache_write`` store of the returned tensors. A fused kernel therefore rounds to the
activation dtype in registers before it quantises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define_op
from ._slots import places, require_slot_mapping
from .cache_layouts import require_mla_cache
from .index_cache import require_index_key, store_index_keys
from .mla_cache import require_latents, require_scale_value, store_latents
from .norm_rope import norm_rope, norm_rope_index


def norm_rope_write(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    style: str,
    layout: str,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``norm_rope``, whose new kv_c and k_pe are also written to the MLA cache.

    Args:
        q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style: see ``norm_rope``.
        cache, slot_mapping, layout, scale: see ``mla_cache_write``; rows with the slot -1 are
            returned and not written.

    Returns:
        New q_c, kv_c and k_pe. Where a gradient is wanted they come from ``norm_rope``, which
        runs after the fused op.

    Raises:
        ValueError, TypeError: see ``norm_rope`` and ``mla_cache_write``. Nothing is written then.
    """
    require_latents(kv_c, k_pe, cache)
    require_mla_cache(cache, layout, kv_c.shape[1], k_pe.shape[1], scale)
    require_slot_mapping("slot_mapping", slot_mapping, kv_c.shape[0], cache)
    out = _op(
        q_c,
        q_weight,
        kv_c,
        kv_weight,
        k_pe,
        cos,
        sin,
        cache,
        slot_mapping,
        eps,
        style,
        layout,
        scale,
    )
    if not _wants_gradient(q_c, q_weight, kv_c, kv_weight, k_pe):
        return out
    return norm_rope(q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style)


def norm_rope_index_write(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    index_weight: Tensor,
    index_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    index_cache: Tensor,
    index_slot_mapping: Tensor,
    eps: float,
    style: str,
    index_eps: float,
    index_style: str,
    layout: str,
    scale_store: str,
    hadamard: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``norm_rope_index``, whose new keys are also written to the MLA cache and the index cache.

    Args:
        q_c to sin, eps to index_style, hadamard: see ``norm_rope_index``.
        cache, slot_mapping, layout, scale: see ``mla_cache_write``.
        index_cache, index_slot_mapping, scale_store: see ``index_cache_write``. The caches have
            slots of their own: -1 in one mapping skips nothing in the other cache.

    Returns:
        New q_c, kv_c, k_pe and index_k. Where a gradient is wanted they come from
        ``norm_rope_index``, which runs after the fused op.

    Raises:
        ValueError, TypeError: see ``norm_rope_index``, ``mla_cache_write`` and
            ``index_cache_write``. Neither cache is written then.
    """
    require_latents(kv_c, k_pe, cache)
    require_mla_cache(cache, layout, kv_c.shape[1], k_pe.shape[1], scale)
    require_slot_mapping("slot_mapping", slot_mapping, kv_c.shape[0], cache)
    require_index_key(index_k, index_cache, scale_store)
    require_slot_mapping("index_slot_mapping", index_slot_mapping, kv_c.shape[0], index_cache)
    out = _index_op(
        q_c,
        q_weight,
        kv_c,
        kv_weight,
        k_pe,
        index_k,
        index_weight,
        index_bias,
        cos,
        sin,
        cache,
        slot_mapping,
        index_cache,
        index_slot_mapping,
        eps,
        style,
        index_eps,
        index_style,
        layout,
        scale_store,
        hadamard,
        scale,
    )
    parameters = (q_weight, kv_weight, index_weight, index_bias)
    if not _wants_gradient(q_c, kv_c, k_pe, index_k, *parameters):
        return out
    return norm_rope_index(
        q_c,
        q_weight,
        kv_c,
        kv_weight,
        k_pe,
        index_k,
        index_weight,
        index_bias,
        cos,
        sin,
        eps,
        style,
        index_eps,
        index_style,
        hadamard,
    )


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@torch.no_grad()
def _reference(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    style: str,
    layout: str,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    require_scale_value(scale)
    at = places("slot_mapping", slot_mapping, cache)
    out = norm_rope(q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style)
    store_latents(out[1], out[2], cache, at, layout, scale)
    return out


@torch.no_grad()
def _fake(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    style: str,
    layout: str,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return norm_rope(q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style)


@torch.no_grad()
def _index_reference(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    index_weight: Tensor,
    index_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    index_cache: Tensor,
    index_slot_mapping: Tensor,
    eps: float,
    style: str,
    index_eps: float,
    index_style: str,
    layout: str,
    scale_store: str,
    hadamard: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require_scale_value(scale)
    at = places("slot_mapping", slot_mapping, cache)
    index_at = places("index_slot_mapping", index_slot_mapping, index_cache)
    out = norm_rope_index(
        q_c,
        q_weight,
        kv_c,
        kv_weight,
        k_pe,
        index_k,
        index_weight,
        index_bias,
        cos,
        sin,
        eps,
        style,
        index_eps,
        index_style,
        hadamard,
    )
    store_latents(out[1], out[2], cache, at, layout, scale)
    store_index_keys(out[3], index_cache, index_at, scale_store)
    return out


@torch.no_grad()
def _index_fake(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    index_weight: Tensor,
    index_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    index_cache: Tensor,
    index_slot_mapping: Tensor,
    eps: float,
    style: str,
    index_eps: float,
    index_style: str,
    layout: str,
    scale_store: str,
    hadamard: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return norm_rope_index(
        q_c,
        q_weight,
        kv_c,
        kv_weight,
        k_pe,
        index_k,
        index_weight,
        index_bias,
        cos,
        sin,
        eps,
        style,
        index_eps,
        index_style,
        hadamard,
    )


_op = define_op(
    "norm_rope_write(Tensor q_c, Tensor q_weight, Tensor kv_c, Tensor kv_weight, Tensor k_pe,"
    " Tensor cos, Tensor sin, Tensor(a!) cache, Tensor slot_mapping, float eps, str style,"
    " str layout, Tensor? scale=None) -> (Tensor, Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
)

_index_op = define_op(
    "norm_rope_index_write(Tensor q_c, Tensor q_weight, Tensor kv_c, Tensor kv_weight,"
    " Tensor k_pe, Tensor index_k, Tensor index_weight, Tensor index_bias, Tensor cos,"
    " Tensor sin, Tensor(a!) cache, Tensor slot_mapping, Tensor(b!) index_cache,"
    " Tensor index_slot_mapping, float eps, str style, float index_eps, str index_style,"
    " str layout, str scale_store, bool hadamard=False, Tensor? scale=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_index_reference,
    fake=_index_fake,
)
