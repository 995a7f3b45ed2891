"""What a caller may set around ops: the workspace budget, value checks, and the provider."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Options:
    """Options in force.

    workspace_bytes: most bytes a kernel may hold beyond its inputs and outputs (contract C21);
        read at each call.
    check: check values inside tensors of every device, not only of the CPU (C23), and that ranks
        which share a layer's heads select the same keys (C10): in eager calls of a model's layers,
        and on all ranks or none, since they wait for each other. This reads the device.
    compiled_kernels: whether kernels may be compiled at first use, and used; without them the cpu
        provider stays with PyTorch's own, which are slower.
    provider: name of the only provider to use, or None for the first that supports the call.
    """

    workspace_bytes: int = 256 << 20
    check: bool = False
    compiled_kernels: bool = True
    provider: str | None = None


_DEFAULT = Options()
_current: ContextVar[Options] = ContextVar("dsafx_options", default=_DEFAULT)


def current() -> Options:
    """The options in force for this thread or task."""
    return _current.get()


def set_current(changed: Options) -> Token[Options]:
    """Put ``changed`` in force until ``reset``."""
    return _current.set(changed)


def reset(token: Token[Options]) -> None:
    """Put back what was in force before ``set_current``."""
    _current.reset(token)


@contextlib.contextmanager
def options(
    *,
    workspace_bytes: int | None = None,
    check: bool | None = None,
    compiled_kernels: bool | None = None,
) -> Iterator[Options]:
    """Set options for the calls inside the ``with`` block.

    Raises:
        ValueError: ``workspace_bytes`` is not positive.
    """
    if workspace_bytes is not None and workspace_bytes < 1:
        raise ValueError(f"workspace_bytes must be at least 1, got {workspace_bytes}")
    now = current()
    changed = replace(
        now,
        workspace_bytes=now.workspace_bytes if workspace_bytes is None else workspace_bytes,
        check=now.check if check is None else check,
        compiled_kernels=now.compiled_kernels if compiled_kernels is None else compiled_kernels,
    )
    token = set_current(changed)
    try:
        yield changed
    finally:
        reset(token)
