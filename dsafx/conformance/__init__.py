"""The contract as executable cases, to be pointed at any kernels.

Five functions (scores, select, attend, write, gather) are given as ``Adapters``, and ``run`` puts
them through every case that applies::

    from dsafx.conformance import Adapters, run

    report = run(Adapters("mine", select=my_select, attend=my_attend, device="cuda"))
    print(report)           # one line a case: passed, failed or skipped, and why
    assert report.ok

or, with pytest, on a provider of this package or on an ``Adapters`` found by name::

    pytest --pyargs dsafx.conformance --dsafx-provider=cpu --dsafx-size=small
    pytest --pyargs dsafx.conformance --dsafx-provider=my_package.kernels:adapters

Each case (``CASES``) is one rule of the contract with inputs of its own, and names the classes of
public bugs that it would have caught. It also holds a fault: ``case.fault(adapters)`` are the same
adapters with that bug planted, and the kit's self-test sees every case fail on its own. What right
means within rounding is said once, in ``dsafx.ops.tolerances``.

``poison`` makes memory that nobody wrote visible: ``torch.empty`` and its kin come filled with NaN
and 2 000 000 000. ``pytest --dsafx-poison`` runs any suite inside it.

Not here, because no function of the five can show it: RoPE layouts and norms, the write of an
index key on every path, layers that share a selection, bounded memory, and CUDA graphs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._adapters import LAYOUTS, Adapters, Declaration, Dims, adapters_for
    from ._case import SIZES, Case, Size
    from ._cases import CASES
    from ._interpreter import interpreter
    from ._poison import poison
    from ._report import Report, Result, run

__all__ = [
    "CASES",
    "LAYOUTS",
    "SIZES",
    "Adapters",
    "Case",
    "Declaration",
    "Dims",
    "Report",
    "Result",
    "Size",
    "adapters_for",
    "interpreter",
    "poison",
    "run",
]

# Looked up on first use: pytest imports this package for its options, and must not pay for torch.
_MODULES = {
    "CASES": "._cases",
    "LAYOUTS": "._adapters",
    "SIZES": "._case",
    "Adapters": "._adapters",
    "Case": "._case",
    "Declaration": "._adapters",
    "Dims": "._adapters",
    "Report": "._report",
    "Result": "._report",
    "Size": "._case",
    "adapters_for": "._adapters",
    "interpreter": "._interpreter",
    "poison": "._poison",
    "run": "._report",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
