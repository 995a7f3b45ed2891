"""The triton provider: kernels for CUDA devices, and for CPU tensors in Triton's interpreter.

Importing this imports Triton. Each file holds kernels, the tiles they run with, the launcher
``run`` and ``supports`` of an op, and ``variants``: the forms that can be launched on an
architecture. All are compiled, without a GPU, by ``dsafx kernels``.
"""

from __future__ import annotations

from ..providers import Kernel
from . import (
    dense_mha,
    index_cache,
    index_query,
    index_scores,
    index_select,
    index_select_paged,
    index_select_partial,
    masked_mha,
    merge_attention,
    merge_selection,
    mla_cache,
    norm_rope,
    norm_rope_write,
    radix_select,
    select_topk,
    sparse_mla,
    sparse_mqa,
    sparse_mqa_paged,
)
from ._device import on_its_device
from ._variants import Variant

_KERNELS: dict[str, Kernel] = {
    "dense_mha": Kernel(dense_mha.run, dense_mha.supports),
    "index_query": Kernel(index_query.run, index_query.supports),
    "index_scores": Kernel(index_scores.run, index_scores.supports),
    "index_select": Kernel(index_select.run, index_select.supports),
    "index_select_paged": Kernel(index_select_paged.run, index_select_paged.supports),
    "index_select_partial": Kernel(index_select_partial.run, index_select_partial.supports),
    "masked_mha": Kernel(masked_mha.run, masked_mha.supports),
    "merge_attention": Kernel(merge_attention.run, merge_attention.supports),
    "merge_selection": Kernel(merge_selection.run, merge_selection.supports),
    "norm_rope": Kernel(norm_rope.run, norm_rope.supports),
    "norm_rope_index": Kernel(norm_rope.run_index, norm_rope.supports_index),
    "norm_rope_index_write": Kernel(norm_rope_write.run_index, norm_rope_write.supports_index),
    "norm_rope_write": Kernel(norm_rope_write.run, norm_rope_write.supports),
    "select_topk": Kernel(select_topk.run, select_topk.supports),
    "sparse_mla": Kernel(sparse_mla.run, sparse_mla.supports),
    "sparse_mqa": Kernel(sparse_mqa.run, sparse_mqa.supports),
    "sparse_mqa_paged": Kernel(sparse_mqa_paged.run, sparse_mqa_paged.supports),
    **index_cache.KERNELS,
    **mla_cache.KERNELS,
}

KERNELS: dict[str, Kernel] = {
    op: Kernel(on_its_device(kernel.run), kernel.supports) for op, kernel in _KERNELS.items()
}

_COMPILED = (
    merge_attention,
    norm_rope,
    norm_rope_write,
    index_query,
    index_scores,
    index_select_paged,
    radix_select,
    sparse_mla,
    sparse_mqa_paged,
    dense_mha,
    masked_mha,
    mla_cache,
    index_cache,
)


def variants(arch: int) -> list[Variant]:
    """Every form of every kernel that can be launched on ``arch``."""
    return [variant for module in _COMPILED for variant in module.variants(arch)]
