"""A stand-in for CUDA graphs on the CPU, and a guard against reading a device from the host."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsafx.models.captured import Outputs

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# Their results, or the shapes of these, are values that a host must wait for.
READS = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
_MASKED = {"aten::index", "aten::index_put", "aten::index_put_"}


class HostRead(AssertionError):
    """A captured step read a value of the device."""


class NoHostReads(TorchDispatchMode):
    """Fails at what a stream that records a CUDA graph refuses, also in the bodies of our ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        if name in READS or (name in _MASKED and _has_mask(args[1])):
            raise HostRead(name)
        if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            raise HostRead(name)
        if func.namespace == "dsafx":
            with self:
                return func.redispatch(_CPU, *args, **kwargs)
        return func(*args, **kwargs)


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Forbid host reads, and leave out the checks of values that CPU tensors alone get (C23)."""

    def refused(*args: object) -> None:
        raise HostRead("tolist or numpy")

    with pytest.MonkeyPatch.context() as patch, NoHostReads():
        for name, module in list(sys.modules.items()):
            if name.startswith("dsafx.") and "checks_values" in vars(module):
                patch.setattr(module, "checks_values", lambda tensor: False)
        patch.setattr(torch.Tensor, "tolist", refused)
        yield


class _Calls(TorchDispatchMode):
    """Keeps every call; an op of ours is one call."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, out))
        return out


class Recorder:
    """Captures as a CUDA graph does: the calls and their addresses, and no Python between them.

    A replay makes the same calls with the same arguments and writes to the same results.

    Attributes:
        strict: whether host reads are forbidden while recording and replaying.
        replays: how often each graph was replayed, in the order of capture.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.replays: list[int] = []

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
        run()
        with self._guarded(), _Calls() as calls:
            outputs = run()
        number = len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[number] += 1
            with self._guarded():
                for func, args, kwargs, out in calls.made:
                    _write(out, func(*args, **kwargs))

        return replay, outputs

    def _guarded(self) -> contextlib.AbstractContextManager[None]:
        return as_on_a_device() if self.strict else contextlib.nullcontext()


def _write(out: Any, new: Any) -> None:
    if isinstance(out, (tuple, list)):
        for mine, theirs in zip(out, new, strict=True):
            _write(mine, theirs)
    elif isinstance(out, Tensor) and out.numel() and out.data_ptr() != new.data_ptr():
        out.copy_(new)
