"""Capabilities: what a layer and a provider can do, opt-in and never inherited (contract C2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ._cost import REFERENCE_COSTS, CostConstants


@dataclass(frozen=True)
class LayerCapabilities:
    """Routes besides top-k MQA that a layer class can feed.

    dense_mha: the layer can expand its latents and hand them to dense MHA.
    masked_mha: the same for MHA over the selected positions.
    """

    dense_mha: bool = False
    masked_mha: bool = False


@dataclass(frozen=True)
class KernelCapabilities:
    """Routes besides top-k MQA that the kernels of a provider offer on a device.

    dense_mha: dense MHA over the visible interval.
    masked_mha: MHA over the selected positions of expanded keys.
    returns_lse: both return the log-sum-exp, without which keys cannot be sharded over ranks.
    costs: the weights of the provider's kernels in the cost model.
    """

    dense_mha: bool = False
    masked_mha: bool = False
    returns_lse: bool = False
    costs: CostConstants = REFERENCE_COSTS


REQUIRES: dict[type, dict[str, tuple[str, ...]]] = {
    LayerCapabilities: {"dense_mha": ("kv_b_weight",), "masked_mha": ("kv_b_weight",)},
    KernelCapabilities: {"dense_mha": ("dense_mha",), "masked_mha": ("masked_mha",)},
}
"""Names that a class must have for each flag that it declares."""

DECLARATIONS: dict[type, str] = {
    LayerCapabilities: "dsa_capabilities",
    KernelCapabilities: "dsa_kernels",
}
"""The class attribute that holds each kind of declaration."""

_Capabilities = TypeVar("_Capabilities", LayerCapabilities, KernelCapabilities)


def flags(capabilities: LayerCapabilities | KernelCapabilities) -> tuple[str, ...]:
    """Names of the flags that are set, in the order of their definition."""
    return tuple(name for name, value in vars(capabilities).items() if value is True)


def declared(obj: object) -> LayerCapabilities:
    """What the class of the layer ``obj`` declares in its own body, less ``obj.dsa_without``.

    A declaration is the class attribute ``dsa_capabilities``. A base class's declaration does not
    count: the subclass may have replaced the forward that it spoke about. ``dsa_without`` is an
    optional attribute of the instance, a collection of flag names; an instance may only remove.

    Raises:
        TypeError: the declaration is not a ``LayerCapabilities``.
        ValueError: ``dsa_without`` names something that is not a flag.
    """
    return _less(_own(obj, LayerCapabilities), obj)


def declared_kernels(obj: object) -> KernelCapabilities:
    """What the class of the provider ``obj`` declares in its own body as ``dsa_kernels``.

    The rules and errors are those of ``declared``.
    """
    return _less(_own(obj, KernelCapabilities), obj)


def check_declaration(obj: object) -> None:
    """Fail unless the class of ``obj`` has what its declared flags require. Call at construction.

    Names may be inherited, declarations may not. Nothing is read from the object, so a property
    that would fail later is not run here.

    Raises:
        TypeError: a declared flag requires a name that the class does not have; names both.
    """
    cls = type(obj)
    present = {name for base in cls.__mro__ for name in vars(base)}
    for kind, attribute in DECLARATIONS.items():
        if attribute not in vars(cls):
            continue
        declaration = _own(obj, kind)
        for flag in flags(declaration):
            missing = [name for name in REQUIRES[kind].get(flag, ()) if name not in present]
            if missing:
                raise TypeError(
                    f"{cls.__qualname__} declares {flag} in {attribute}, which requires "
                    f"{', '.join(missing)}, and the class has no such attribute"
                )


def _own(obj: object, kind: type[_Capabilities]) -> _Capabilities:
    attribute = DECLARATIONS[kind]
    declaration = vars(type(obj)).get(attribute)
    if declaration is None:
        return kind()
    if not isinstance(declaration, kind):
        raise TypeError(
            f"{type(obj).__qualname__}.{attribute} must be a {kind.__name__}, "
            f"got {type(declaration).__name__}"
        )
    return declaration


def _less(capabilities: _Capabilities, obj: object) -> _Capabilities:
    removed: Iterable[str] = _instance_attributes(obj).get("dsa_without", ())
    names = (removed,) if isinstance(removed, str) else tuple(removed)
    known = [name for name, value in vars(capabilities).items() if isinstance(value, bool)]
    for name in names:
        if name not in known:
            raise ValueError(f"dsa_without accepts {', '.join(known)}, got {name!r}")
    without: dict[str, Any] = dict.fromkeys(names, False)
    return replace(capabilities, **without)


def _instance_attributes(obj: object) -> dict[str, Any]:
    try:
        return vars(obj)
    except TypeError:  # a class with __slots__ keeps no dictionary
        return {}
