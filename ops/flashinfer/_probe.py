"""Whether FlashInfer can be called here: an answer with a reason, and without an exception."""

from __future__ import annotations

import importlib.metadata

from .._host import Host
from ._limits import BELOW_VERSION, FIRST_VERSION


def unavailable(host: Host, *names: str) -> str | None:
    """None where the functions ``names`` can be called, else the reason why not.

    The device is asked for first: without one, FlashInfer's own helpers raise instead of answering.
    """
    if not host.available():
        return "there is no CUDA device"
    try:
        version = host.version()
    except importlib.metadata.PackageNotFoundError:
        return "flashinfer-python is not installed"
    if not FIRST_VERSION <= version < BELOW_VERSION:
        return (
            f"flashinfer-python must be from {_text(FIRST_VERSION)} to below"
            f" {_text(BELOW_VERSION)}, got {_text(version)}"
        )
    return host.lacks(*names)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
