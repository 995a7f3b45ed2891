"""Traces of plain functions, made once for all places of a graph where they would be the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ._torch_compat import (
    FakeTensor,
    FakeTensorMode,
    assumptions_of,
    expression_of,
    fake_like,
    storage_key,
    trace,
)

Renew: TypeAlias = Callable[[Any], Any]

_CONSTANTS = (type(None), bool, int, float, str, Enum, torch.dtype, torch.device)


class Traces:
    """The traces of one graph's functions.

    Invariant: a trace is given again only where tracing again would give the same nodes. What the
    tracer sees is all in the key: the function, its constants, the fake mode and what its shape
    environment assumes, and of each operand the dtype, the device, sizes, strides and offset as
    symbolic expressions, and which operands are one tensor or share a storage. An argument that
    is none of these is traced anew.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[fx.Graph, list[Any]]] = {}

    def of(
        self, function: Callable[..., Any], args: Sequence[Any], mode: FakeTensorMode
    ) -> tuple[fx.Graph, Renew]:
        """The ATen graph of ``function(*args)``, in which each node in ``args`` is an input.

        Returns:
            The graph, which is not to be changed, and a function that turns the values in the
            metadata of its nodes into values of this call: with storages of their own, or those
            of the operands that they are views of.
        """
        leaves, structure = pytree.tree_flatten(tuple(args))
        operands = [leaf.meta["val"] for leaf in leaves if isinstance(leaf, fx.Node)]
        arguments = _arguments_key(leaves)
        key = (function, structure, arguments, mode, assumptions_of(mode))
        if arguments is not None and key in self._kept:
            graph, before = self._kept[key]
            return graph, _renewal(before, operands, mode)

        def on_operands(*values: Any) -> Any:
            remaining = iter(values)
            filled = [next(remaining) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
            return function(*pytree.tree_unflatten(filled, structure))

        graph = trace(on_operands, operands, mode)
        if arguments is not None:
            self._kept[key] = (graph, operands)
        return graph, lambda values: values


def _arguments_key(leaves: Sequence[Any]) -> Hashable | None:
    """All that a trace can depend on in its arguments; None where one of them is not understood."""
    tensors: dict[int, int] = {}
    storages: dict[Hashable, int] = {}
    found: list[Hashable] = []
    for leaf in leaves:
        value = leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf
        if isinstance(leaf, fx.Node) and isinstance(value, FakeTensor):
            if value.layout is not torch.strided:
                return None
            same = tensors.setdefault(id(value), len(tensors))
            shared = storages.setdefault(storage_key(value), len(storages))
            found.append((same, shared, *_metadata_key(value)))
        elif isinstance(leaf, fx.Node) and isinstance(value, torch.SymInt):
            found.append((torch.SymInt, expression_of(value)))
        elif isinstance(value, _CONSTANTS):
            # Not by value: 1, 1.0 and True are equal, and so are 0.0 and -0.0.
            found.append((isinstance(leaf, fx.Node), type(value), repr(value)))
        else:
            return None
    return tuple(found)


def _metadata_key(value: Tensor) -> tuple[Hashable, ...]:
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    flags = (value.requires_grad, value.is_conj(), value.is_neg())
    return (value.dtype, value.device, flags, *map(expression_of, numbers))


def _renewal(before: Sequence[Any], now: Sequence[Any], mode: FakeTensorMode) -> Renew:
    """What makes values of the operands ``now`` out of those that were traced on ``before``."""
    storages = {
        storage_key(old): new.untyped_storage()
        for old, new in zip(before, now, strict=True)
        if isinstance(old, Tensor)
    }

    def renewed(value: FakeTensor) -> FakeTensor:
        key = storage_key(value)
        new = fake_like(value, mode, storages.get(key))
        storages.setdefault(key, new.untyped_storage())
        return new

    def renew(values: Any) -> Any:
        # Most values are one tensor, and mapping a tree takes as long as making three.
        if isinstance(values, FakeTensor):
            return renewed(values)
        return pytree.tree_map_only(FakeTensor, renewed, values)

    return renew
