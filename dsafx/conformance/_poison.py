"""A poison allocator: memory that nobody wrote holds values that nobody can miss."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

POISON = 2_000_000_000

_PATCHED: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_permuted"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Fill what ``torch.empty`` and its kin return, inside the ``with`` block.

    Floating point becomes NaN, integers 2 000 000 000 or their largest value, bool True. That
    reaches the callers of the Python functions ``torch.empty``, ``empty_like``, ``empty_strided``,
    ``empty_permuted`` and the methods ``new_empty`` and ``new_empty_strided``, in this process and
    every thread of it. Memory that C++ or compiled code allocates for itself stays as it is, and
    so do fake, functional and meta tensors and what is traced.
    """
    _learn_the_originals()
    originals = [(owner, name, getattr(owner, name)) for owner, name in _PATCHED]
    try:
        for owner, name, original in originals:
            setattr(owner, name, _poisoned(original))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _learn_the_originals() -> None:
    """Have torch fill the tables in which it knows functions by identity.

    It reads them from these names on first use. Read from what replaces them, the tables would be
    wrong for good: ``torch.device`` as a context would never see another allocation, and Dynamo
    would not inline what replaces them and find the originals inside.
    """
    from torch._dynamo import trace_rules
    from torch.utils import _device

    trace_rules.get_torch_obj_rule_map()
    _device._device_constructors()
    torch.overrides.get_ignored_functions()
    torch.overrides.get_testing_overrides()
    torch.overrides.get_overridable_functions()


def _poisoned(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def allocate(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        # This thread's modes, and not the flag ``is_in_torch_dispatch_mode``: all threads share
        # that, and where modes of two of them overlap it stays up.
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
            return made
        return _filled(made) if type(made) is Tensor else made

    return allocate


def _filled(made: Tensor) -> Tensor:
    if made.device.type == "meta" or made.layout != torch.strided or not made.numel():
        return made
    with torch.no_grad():
        if made.dtype == torch.bool:
            made.fill_(True)
        elif made.is_floating_point() or made.is_complex():
            made.fill_(torch.nan)
        elif not made.is_quantized:
            made.fill_(min(POISON, torch.iinfo(made.dtype).max))
    return made
