"""What a self-test gives each op: a few rows of inputs, and how far the results may lie off.

Selections have inputs of small whole numbers, whose scores are exact and often tie; caches hold
bytes; everything else is compared with float64 within the package's tolerances.
"""

from __future__ import annotations

from collections.abc import Callable

from ..providers import Provider
from .attention import ATTENTION
from .caches import CACHES
from .inputs import Probe
from .rows import ROWS
from .selection import SELECTION

__all__ = ["PROBES", "Probe"]

PROBES: dict[str, Callable[[Provider], list[Probe]]] = {
    **SELECTION,
    **ATTENTION,
    **ROWS,
    **CACHES,
}
"""The probes of each op, given what its provider promises. Gradients have none: only the cpu
provider has kernels for them, and its own tests reach those."""
