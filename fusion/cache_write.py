"""The norms and rotations of one layer, and the cache writes that follow, as one kernel.

What ``norm_rope`` makes goes to the caches at once and is read there by this step's attention::

    q_c, kv_c, k_pe = norm_rope(...)                 q_c, kv_c, k_pe = norm_rope_write(
    mla_cache_write(kv_c, k_pe, cache, slots)            ..., cache, slots)

A layer with an indexer writes its key too, to a cache and to slots of its own. The fused kernel
rounds to the activation dtype in registers before it casts to what the cache stores, so that a
cache holds what the separate writes would have stored of the same values.
"""

from __future__ import annotations

from ._fusion import Fusion
from .norm_rope import INDEX_KEY_ROUNDING, NORM_ROPE, NORM_ROPE_INDEX

NORM_ROPE_WRITE = Fusion(
    "norm_rope_write", (*NORM_ROPE.parts, "mla_cache_write"), NORM_ROPE.outputs
)

NORM_ROPE_INDEX_WRITE = Fusion(
    "norm_rope_index_write",
    (*NORM_ROPE_INDEX.parts, "mla_cache_write", "index_cache_write"),
    NORM_ROPE_INDEX.outputs,
    INDEX_KEY_ROUNDING,
)
