"""DeepSeek Sparse Attention for PyTorch: one routing contract for eager and compiled code.

Importing this package imports no kernel library and no model library, and touches no device: each
public name is looked up on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import ops
    from ._backend import inductor_options
    from ._debug import debug
    from .models.compile import compile
    from .models.prefill import prefill
    from .models.tensor_parallel import tensor_parallel
    from .models.transformers import disable, enable, enabled, enabling
    from .ops import routing

__all__ = [
    "__version__",
    "compile",
    "debug",
    "disable",
    "enable",
    "enabled",
    "enabling",
    "inductor_options",
    "ops",
    "prefill",
    "routing",
    "tensor_parallel",
]

__version__ = "0.1.0"

_MODULES = {"ops": ".ops", "routing": ".ops.routing"}
_FUNCTIONS = {
    "compile": ".models.compile",
    "debug": "._debug",
    "disable": ".models.transformers",
    "enable": ".models.transformers",
    "enabled": ".models.transformers",
    "enabling": ".models.transformers",
    "inductor_options": "._backend",
    "prefill": ".models.prefill",
    "tensor_parallel": ".models.tensor_parallel",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value: object = importlib.import_module(_MODULES[name], __name__)
    elif name in _FUNCTIONS:
        value = getattr(importlib.import_module(_FUNCTIONS[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
