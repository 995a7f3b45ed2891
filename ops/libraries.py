"""Which kernel libraries are there, found out without importing one."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os

UNKNOWN = "unknown"

# Extras of this package, which are named as what they import.
_EXTRAS = ("flashinfer", "triton")
# Names that a library is installed under, where they are not that which is imported.
_DISTRIBUTIONS = {
    "deep_gemm": ("deep_gemm", "deep-gemm"),
    "flash_mla": ("flash_mla", "flash-mla"),
    "flashinfer": ("flashinfer-python",),
    "triton": ("triton", "pytorch-triton"),
}
_TRUE = ("1", "true", "on", "yes", "y")


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors: ``TRITON_INTERPRET=1``.

    Triton reads the variable when a kernel is defined, so that it holds for a whole process.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE


@functools.cache
def installed(library: str) -> bool:
    """Whether ``import library`` would find something."""
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:
        # sys.modules holds None in its place, or something that was made by hand.
        return False


def how_to_install(library: str) -> str:
    """What to do where it is missing."""
    if library in _EXTRAS:
        return f"pip install 'dsafx[{library}]'"
    return "it is built from its own source"


def distributions(library: str) -> tuple[str, ...]:
    """Names that it may be installed under."""
    return _DISTRIBUTIONS.get(library, (library,))


def version(library: str) -> str:
    """The installed version; ``UNKNOWN`` where it was installed without saying so."""
    for distribution in distributions(library):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return UNKNOWN
