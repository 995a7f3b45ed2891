"""A recorder in the place of a kernel library: binds every call to a signature, then computes it.

Signatures are real ones or texts such as "q, k, *, lse=". A body gets the bound arguments by name
and computes in float64 what the library documents; what it documents about its arguments, it
asserts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsafx.ops._host import Host

Body = Callable[..., Any]


def signature_of(text: str) -> inspect.Signature:
    """The signature that ``text`` describes: "=" ends a parameter that has a default."""
    kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif part.startswith("*"):
            parameters.append(inspect.Parameter(part[1:], inspect.Parameter.VAR_POSITIONAL))
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            default = None if part.endswith("=") else inspect.Parameter.empty
            parameters.append(inspect.Parameter(part.rstrip("="), kind, default=default))
    return inspect.Signature(parameters)


class Recorder:
    """The functions of a library by dotted name, as ``Host.function`` finds them.

    signatures: what exists; methods are written "module.Class.method", without ``self``.
    bodies: what a function computes, from the arguments by name. A method's body gets what its
        object was made with, and what earlier methods got, as ``state``.
    calls: name and arguments of every call, in order.
    """

    def __init__(
        self, signatures: Mapping[str, inspect.Signature], bodies: Mapping[str, Body]
    ) -> None:
        self.signatures = signatures
        self.bodies = bodies
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def function(self, name: str) -> Any:
        methods = [known for known in self.signatures if known.startswith(f"{name}.")]
        if name not in self.signatures and not methods:
            raise AttributeError(f"no {name} in this version")
        return _Class(self, name) if methods else self.bound(name)

    def bound(self, name: str, **more: Any) -> Body:
        """The function ``name``; its body also gets ``more``."""
        signature, body = self.signatures[name], self.bodies.get(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            self.calls.append((name, arguments))
            return None if body is None else body(**arguments, **more)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    def named(self, name: str) -> list[dict[str, Any]]:
        """The arguments of all calls of ``name``."""
        return [arguments for called, arguments in self.calls if called == name]


class _Class:
    """A class, or an object of it once called: methods of both are looked up by name."""

    def __init__(self, recorder: Recorder, name: str, state: dict[str, Any] | None = None) -> None:
        self._recorder, self._name, self._state = recorder, name, state

    def __call__(self, *args: Any, **kwargs: Any) -> _Class:
        self._recorder.bound(self._name)(*args, **kwargs)
        return _Class(self._recorder, self._name, dict(self._recorder.calls[-1][1]))

    def __getattr__(self, method: str) -> Body:
        more = {} if self._state is None else {"state": self._state}
        return self._recorder.bound(f"{self._name}.{method}", **more)


def host_of(
    recorder: Recorder,
    architecture: int,
    version: tuple[int, ...] = (),
    capturing: bool = False,
    stream: Callable[[], int] = lambda: 0,
) -> Host:
    """A host whose CPU tensors count as tensors of a device of this ``architecture``."""
    return Host(
        available=lambda: True,
        function=recorder.function,
        version=lambda: version,
        architecture=lambda device: architecture,
        capturing=lambda: capturing,
        stream=lambda device: stream(),
    )


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """``found`` is ``wanted``, but for one rounding to its dtype."""
    error = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), wanted.double(), rtol=error, atol=error * 1e-2)
