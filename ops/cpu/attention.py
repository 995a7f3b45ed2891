"""The attention kernels of the cpu provider by op name."""

from __future__ import annotations

from ..providers import Kernel
from . import dense, sparse

ATTENTION: dict[str, Kernel] = {
    "dense_mha": Kernel(dense.dense_mha, dense.supports),
    "masked_mha": Kernel(dense.masked_mha, dense.supports),
    "sparse_mqa": Kernel(sparse.sparse_mqa, sparse.supports),
    "sparse_mla": Kernel(sparse.sparse_mla, sparse.supports),
}
