"""The ops of DeepSeek Sparse Attention: schemas, references, routing and providers."""

from ._options import options
from .cache_layouts import new_index_cache, new_mla_cache
from .causal_positions import causal_positions
from .dense_mha import dense_mha
from .index_cache import index_cache_gather, index_cache_write
from .index_query import index_query
from .index_scores import index_scores
from .index_select import index_select
from .index_select_paged import index_select_paged
from .index_select_partial import index_select_partial
from .indices import check_indices, compact, slots
from .masked_mha import masked_mha
from .merge_attention import merge_attention
from .merge_selection import merge_selection
from .mla_attention import mla_attention
from .mla_attention_paged import mla_attention_paged
from .mla_cache import mla_cache_gather, mla_cache_write
from .norm import layer_norm, rms_norm
from .norm_rope import norm_rope, norm_rope_index
from .norm_rope_write import norm_rope_index_write, norm_rope_write
from .providers import use_provider
from .rope import rope
from .select_topk import select_topk
from .sparse_mla import sparse_mla
from .sparse_mqa import sparse_mqa
from .sparse_mqa_paged import sparse_mqa_paged

__all__ = [
    "causal_positions",
    "check_indices",
    "compact",
    "dense_mha",
    "index_cache_gather",
    "index_cache_write",
    "index_query",
    "index_scores",
    "index_select",
    "index_select_paged",
    "index_select_partial",
    "layer_norm",
    "masked_mha",
    "merge_attention",
    "merge_selection",
    "mla_attention",
    "mla_attention_paged",
    "mla_cache_gather",
    "mla_cache_write",
    "new_index_cache",
    "new_mla_cache",
    "norm_rope",
    "norm_rope_index",
    "norm_rope_index_write",
    "norm_rope_write",
    "options",
    "rms_norm",
    "rope",
    "select_topk",
    "slots",
    "sparse_mla",
    "sparse_mqa",
    "sparse_mqa_paged",
    "use_provider",
]
