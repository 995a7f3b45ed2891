"""Who computes an op: the providers, what they promise, and the one dispatch that asks them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from . import _options, routing


@dataclass(frozen=True)
class Kernel:
    """One provider's body of one op.

    run: takes the arguments of the op's schema in order, trailing defaults possibly left out.
    supports: takes the same; None where ``run`` serves this call, else the reason why not.
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None]


@dataclass(frozen=True)
class Provider:
    """One set of kernels, with its limits and promises as data.

    name: what ``use_provider`` and reports call it.
    devices: device types it runs on; empty means every device.
    kernels: the attention kernels it has, for ``routing.decide``.
    fused: fused kernel ops (``norm_rope`` and its kin) that are faster here than their parts.
    sorted_ids, lowest_tie, fp32_scores: what it promises of a selection (contract C8, C10).
    graph_safe: whether a call reads no device value, so that it can be captured.
    module: where its ``KERNELS`` lie, by op name; imported with the first call. None: every op's
        own reference.
    """

    name: str
    devices: tuple[str, ...]
    kernels: routing.KernelCapabilities
    fused: frozenset[str]
    sorted_ids: bool
    lowest_tie: bool
    fp32_scores: bool
    graph_safe: bool
    module: str | None = None

    def supports(self, device_type: str) -> str | None:
        """None where it runs on ``device_type``, else the reason why not."""
        if not self.devices or device_type in self.devices:
            return None
        return f"{self.name} runs on {', '.join(self.devices)} and not on {device_type}"


REFERENCE = Provider(
    name="reference",
    devices=(),
    kernels=routing.KernelCapabilities(dense_mha=True, masked_mha=True, returns_lse=True),
    # Its fused ops are its separate ops in a row: they save no work, and hide the parts from
    # Inductor.
    fused=frozenset(),
    sorted_ids=True,
    lowest_tie=True,
    fp32_scores=True,
    graph_safe=False,
)

CPU = Provider(
    name="cpu",
    devices=("cpu",),
    kernels=routing.KernelCapabilities(dense_mha=True, masked_mha=True, returns_lse=True),
    # Inductor fuses norms and rotations into one loop here; an opaque op would stop it.
    fused=frozenset(),
    sorted_ids=True,
    lowest_tie=True,
    fp32_scores=True,
    graph_safe=False,
    module=".cpu",
)

PROVIDERS: tuple[Provider, ...] = (CPU, REFERENCE)


def dispatch(device_type: str) -> Provider:
    """The provider of calls on ``device_type`` tensors: the first that supports them.

    Raises:
        NotImplementedError: the provider that ``use_provider`` names does not run there.
    """
    wanted = _options.current().provider
    reasons = []
    for provider in PROVIDERS:
        if wanted is not None and provider.name != wanted:
            continue
        reason = provider.supports(device_type)
        if reason is None:
            return provider
        reasons.append(reason)
    raise NotImplementedError("; ".join(reasons))


def kernel(op: str, device_type: str, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The body that ``op`` runs with on ``device_type``; None stands for its reference.

    A provider that does not support the call is passed over, unless ``use_provider`` names it.

    Raises:
        NotImplementedError: the provider that ``use_provider`` names has the op, and refuses the
            call.
    """
    wanted = _options.current().provider
    for provider in PROVIDERS:
        if provider.module is None or (wanted or provider.name) != provider.name:
            continue
        found = None if provider.supports(device_type) else kernels_of(provider.module).get(op)
        if found is None:
            continue
        reason = found.supports(*args)
        if reason is None:
            return found.run
        if wanted is not None:
            raise NotImplementedError(f"{op} of the provider {wanted}: {reason}")
    return None


@cache
def kernels_of(module: str) -> Mapping[str, Kernel]:
    """The kernels of a provider by op name."""
    kernels: Mapping[str, Kernel] = importlib.import_module(module, __package__).KERNELS
    return kernels


def kernel_capabilities(device_type: str) -> routing.KernelCapabilities:
    """What the kernels on ``device_type`` can do, for ``routing.decide``."""
    return dispatch(device_type).kernels


@contextlib.contextmanager
def use_provider(name: str) -> Iterator[None]:
    """Use only the provider ``name`` inside the ``with`` block.

    Raises:
        ValueError: there is no such provider.
    """
    names = [provider.name for provider in PROVIDERS]
    if name not in names:
        raise ValueError(f"provider must be one of {', '.join(names)}, got {name!r}")
    token = _options.set_current(replace(_options.current(), provider=name))
    try:
        yield
    finally:
        _options.reset(token)
