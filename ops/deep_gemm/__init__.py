"""The deep_gemm provider: fp8 index scores of an installed DeepGEMM, imported by the first call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .._host import Host, cuda_host
from ..providers import Kernel
from . import index
from ._limits import DISTRIBUTION


def kernels(host: Host) -> dict[str, Kernel]:
    """The kernels by op name, on ``host``."""

    def kernel(run: Callable[..., Any], supports: Callable[..., str | None]) -> Kernel:
        return Kernel(partial(run, host), partial(supports, host))

    return {
        "index_scores": kernel(index.index_scores, index.supports_scores),
        "index_select": kernel(index.index_select, index.supports_select),
    }


KERNELS: dict[str, Kernel] = kernels(cuda_host(DISTRIBUTION))
