"""The cpu provider: blocked kernels within the workspace budget, for every host thread.

All are made of ATen calls, except that dense and masked attention in float32 and float16, and the
scores of long rows, run on C++ that is compiled at first use. That takes about five seconds a file,
once per machine and torch; without a compiler, or under ``options(compiled_kernels=False)``,
PyTorch's own kernels take its place.
"""

from __future__ import annotations

from ..providers import Kernel
from . import index_select, select
from .attention import ATTENTION

KERNELS: dict[str, Kernel] = {
    "index_select": Kernel(index_select.run, index_select.supports),
    "select_topk": Kernel(select.run, select.supports),
    **ATTENTION,
}
