"""The attention kernels of the cpu provider by op name."""

from __future__ import annotations

from ..providers import Kernel
from . import _gradients, dense, dense_backward, sparse, sparse_backward

ATTENTION: dict[str, Kernel] = {
    "dense_mha": Kernel(dense.dense_mha, dense.supports),
    "masked_mha": Kernel(dense.masked_mha, dense.supports),
    "sparse_mqa": Kernel(sparse.sparse_mqa, sparse.supports),
    "sparse_mla": Kernel(sparse.sparse_mla, sparse.supports),
    "dense_mha_backward": Kernel(dense_backward.dense_mha_backward, _gradients.supports),
    "masked_mha_backward": Kernel(dense_backward.masked_mha_backward, _gradients.supports),
    "sparse_mqa_backward": Kernel(sparse_backward.sparse_mqa_backward, _gradients.supports),
    "sparse_mla_backward": Kernel(sparse_backward.sparse_mla_backward, _gradients.supports),
}
