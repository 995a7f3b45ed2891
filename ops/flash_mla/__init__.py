"""The flash_mla provider: sparse attention of an installed FlashMLA, imported by the first call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .._host import Host, cuda_host
from ..providers import Kernel
from . import sparse
from ._limits import DISTRIBUTION


def kernels(host: Host) -> dict[str, Kernel]:
    """The kernels by op name, on ``host``."""

    def kernel(run: Callable[..., Any], supports: Callable[..., str | None]) -> Kernel:
        return Kernel(partial(run, host), partial(supports, host))

    return {
        "sparse_mqa": kernel(sparse.sparse_mqa, sparse.supports_packed),
        "sparse_mla": kernel(sparse.sparse_mla, sparse.supports_parts),
        "sparse_mqa_paged": kernel(sparse.sparse_mqa_paged, sparse.supports_paged),
    }


KERNELS: dict[str, Kernel] = kernels(cuda_host(DISTRIBUTION))
