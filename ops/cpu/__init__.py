"""The cpu provider: blocked ATen kernels within the workspace budget, for every host thread."""

from __future__ import annotations

from ..providers import Kernel
from . import index_select, select
from .attention import ATTENTION

KERNELS: dict[str, Kernel] = {
    "index_select": Kernel(index_select.run, index_select.supports),
    "select_topk": Kernel(select.run, select.supports),
    **ATTENTION,
}
