"""What is fused with what, how that rounds, and when it pays; ``passes`` applies it."""

from __future__ import annotations

from ._fusion import Fusion, reason_not_to_fuse
from .cache_write import NORM_ROPE_INDEX_WRITE, NORM_ROPE_WRITE
from .index_query import INDEX_QUERY, INDEX_QUERY_FP8
from .norm_rope import NORM_ROPE, NORM_ROPE_INDEX

FUSIONS = (
    NORM_ROPE,
    NORM_ROPE_INDEX,
    INDEX_QUERY,
    INDEX_QUERY_FP8,
    NORM_ROPE_WRITE,
    NORM_ROPE_INDEX_WRITE,
)

__all__ = [
    "FUSIONS",
    "INDEX_QUERY",
    "INDEX_QUERY_FP8",
    "NORM_ROPE",
    "NORM_ROPE_INDEX",
    "NORM_ROPE_INDEX_WRITE",
    "NORM_ROPE_WRITE",
    "Fusion",
    "reason_not_to_fuse",
]
