"""How a pass compares lengths: by what is known, by a guard, or by the example inputs."""

from __future__ import annotations

import torch

from ._report import Oracle
from ._torch_compat import hint, is_unbacked, statically_known_true

Length = int | torch.SymInt


def static(a: Length, b: Length) -> bool | None:
    """Whether ``a <= b`` where that follows from constants and known ranges; adds no guard."""
    if statically_known_true(a <= b):
        return True
    if statically_known_true(a > b):
        return False
    return None


def guarding(a: Length, b: Length) -> bool | None:
    """``static``, else the answer for the example inputs with a guard that holds the graph to it.

    Sound only where guards are checked; a length that depends on data stays unknown.
    """
    known = static(a, b)
    if known is not None or is_unbacked(a) or is_unbacked(b):
        return known
    return bool(a <= b)


def following_hints(a: Length, b: Length) -> bool | None:
    """The answer for the example inputs, without a guard: for choices among right ones."""
    left, right = hint(a), hint(b)
    return None if left is None or right is None else left <= right


def legality(specialize: str, guards_live: bool) -> Oracle:
    """The oracle for questions whose answer changes the result."""
    return guarding if specialize == "auto" and guards_live else static


def burnt_in(length: Length, keys: Length, guards_live: bool) -> bool:
    """Whether ``length`` is a constant although the tensors could hold longer rows (contract C20).

    Args:
        length: the host bound on the keys of a row.
        keys: how many packed keys the operands hold.
        guards_live: whether a guard holds the constant to what the caller passes.
    """
    if guards_live or isinstance(length, torch.SymInt):
        return False
    return static(keys, length) is not True
