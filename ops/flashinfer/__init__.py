"""The flashinfer provider: calls into FlashInfer 0.6.18 to 0.7.x, which is imported by the first.

``_limits`` holds what FlashInfer accepts, ``_probe`` whether it can be called here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .._host import Host, cuda_host
from ..providers import Kernel
from . import dense, merge, select_topk, sparse
from ._limits import DISTRIBUTION


def kernels(host: Host) -> dict[str, Kernel]:
    """The kernels by op name, on ``host``."""

    def kernel(run: Callable[..., Any], supports: Callable[..., str | None]) -> Kernel:
        return Kernel(partial(run, host), partial(supports, host))

    return {
        "sparse_mqa": kernel(sparse.sparse_mqa, sparse.supports_packed),
        "sparse_mla": kernel(sparse.sparse_mla, sparse.supports_parts),
        "sparse_mqa_paged": kernel(sparse.sparse_mqa_paged, sparse.supports_paged),
        "dense_mha": kernel(dense.dense_mha, dense.supports),
        "select_topk": kernel(select_topk.run, select_topk.supports),
        "merge_attention": kernel(merge.run, merge.supports),
    }


KERNELS: dict[str, Kernel] = kernels(cuda_host(DISTRIBUTION))
