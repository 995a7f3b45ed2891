"""Planting faults: correct adapters with one function changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from .. import ops
from ._adapters import FUNCTIONS, Adapters, Function
from ._case import Fault

Arguments = dict[str, Any]


def _named(name: str, args: tuple[Any, ...]) -> Arguments:
    """The arguments of a call by name, None for those left out."""
    names = FUNCTIONS[name]
    return dict(zip(names, args + (None,) * (len(names) - len(args)), strict=True))


def around(name: str, body: Callable[[Function, Arguments], Any]) -> Fault:
    """Plant ``body(right, arguments)`` in the place of the function ``name``."""

    def plant(adapters: Adapters) -> Adapters:
        right = adapters.function(name)

        def faulty(*args: Any) -> Any:
            return body(right, _named(name, args))

        changes: dict[str, Any] = {name: faulty}
        return replace(adapters, **changes)

    return plant


def replacing(name: str, **values: Callable[[Arguments], Any]) -> Fault:
    """Plant a function that is called with some arguments replaced."""

    def body(right: Function, arguments: Arguments) -> Any:
        changed = {key: value(arguments) for key, value in values.items()}
        return right(*{**arguments, **changed}.values())

    return around(name, body)


def after(name: str, change: Callable[[Any, Arguments], Any]) -> Fault:
    """Plant a function whose result is changed."""
    return around(name, lambda right, a: change(right(*a.values()), a))


def scores_of(a: Arguments) -> Tensor:
    """The right scores of the operands of ``select``."""
    return ops.index_scores(a["q"], a["k"], a["weights"], a["ks"], a["ke"], a["mask"])


def rescored(change: Callable[[Tensor, Arguments], Tensor]) -> Fault:
    """Plant a selection that ranks changed scores."""

    def body(right: Function, a: Arguments) -> Tensor:
        return ops.select_topk(change(scores_of(a), a), a["ks"], a["ke"], a["topk"], a["mask"])

    return around("select", body)


def as_if_contiguous(x: Tensor) -> Tensor:
    """The rows of ``x`` as a kernel reads them that knows no strides."""
    return x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())


def in_batch_invariant_mode(fault: Fault) -> Fault:
    """Plant ``fault`` in the adapters of the batch-invariant mode."""

    def plant(adapters: Adapters) -> Adapters:
        mode = adapters.batch_invariant
        return replace(adapters, batch_invariant=None if mode is None else fault(mode))

    return plant
