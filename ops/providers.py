"""Who computes an op: the providers, what they promise, and the one dispatch that asks them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from . import _options, _verdicts, libraries, routing


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
    library: what must be installed for ``module`` to be importable, and the package's extra.
    interpreted: whether it also runs on CPU tensors, in a process with ``TRITON_INTERPRET=1``.
    opt_in: why it computes only where ``use_provider`` names it; None where it is chosen unnamed.
    self_tested: device types on which the first call of each op follows a self-test of it.
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
    library: str | None = None
    interpreted: bool = False
    opt_in: str | None = None
    self_tested: tuple[str, ...] = ()

    def supports(self, device_type: str) -> str | None:
        """None where it runs on ``device_type``, else the reason why not."""
        if self.library is not None and not libraries.installed(self.library):
            missing = f"{self.name} needs {self.library}, which is not installed"
            return f"{missing}: {libraries.how_to_install(self.library)}"
        if not self.devices or device_type in self.devices:
            return None
        if self.interpreted and device_type == "cpu":
            if libraries.interpreted():
                return None
            return f"{self.name} runs on the CPU only in its interpreter, with TRITON_INTERPRET=1"
        return f"{self.name} runs on {', '.join(self.devices)} and not on {device_type}"

    def passed_over(self, device_type: str, wanted: str | None) -> str | None:
        """None where calls on ``device_type`` may run here, else the reason why not.

        Args:
            device_type: where the tensors are.
            wanted: the provider that ``use_provider`` names, if any.
        """
        if wanted is not None and wanted != self.name:
            return f"{self.name} is not {wanted}, the provider in use"
        reason = self.supports(device_type)
        if reason is None and wanted is None:
            reason = self.opt_in or _verdicts.failure(self.name, device_type)
        return reason


def _not_run_yet(name: str) -> str:
    return f"{name} has not run on a GPU yet, so that it computes only where use_provider names it"


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

TRITON = Provider(
    name="triton",
    devices=("cuda",),
    kernels=routing.KernelCapabilities(dense_mha=True, masked_mha=True, returns_lse=True),
    fused=frozenset(
        {"norm_rope", "norm_rope_index", "norm_rope_write", "norm_rope_index_write", "index_query"}
    ),
    sorted_ids=True,
    lowest_tie=True,
    fp32_scores=True,
    graph_safe=True,
    module=".triton",
    library="triton",
    interpreted=True,
    opt_in=_not_run_yet("triton"),
    self_tested=("cuda",),
)

FLASHINFER = Provider(
    name="flashinfer",
    devices=("cuda",),
    # It has no masked kernel.
    kernels=routing.KernelCapabilities(dense_mha=True, returns_lse=True),
    fused=frozenset(),
    sorted_ids=True,
    lowest_tie=True,
    fp32_scores=True,
    # Dense prefill, and sparse attention on SM90, plan on the host.
    graph_safe=False,
    module=".flashinfer",
    library="flashinfer",
    opt_in=_not_run_yet("flashinfer"),
    self_tested=("cuda",),
)

FLASH_MLA = Provider(
    name="flash_mla",
    devices=("cuda",),
    kernels=routing.KernelCapabilities(),
    fused=frozenset(),
    sorted_ids=True,
    lowest_tie=True,
    fp32_scores=True,
    graph_safe=True,
    module=".flash_mla",
    library="flash_mla",
    opt_in=_not_run_yet("flash_mla"),
    self_tested=("cuda",),
)

DEEP_GEMM = Provider(
    name="deep_gemm",
    devices=("cuda",),
    kernels=routing.KernelCapabilities(),
    fused=frozenset(),
    sorted_ids=True,
    lowest_tie=True,
    # Queries and keys are rounded to e4m3.
    fp32_scores=False,
    graph_safe=False,
    module=".deep_gemm",
    library="deep_gemm",
    opt_in=_not_run_yet("deep_gemm"),
    self_tested=("cuda",),
)

PROVIDERS: tuple[Provider, ...] = (CPU, TRITON, FLASHINFER, FLASH_MLA, DEEP_GEMM, REFERENCE)


def dispatch(device_type: str) -> Provider:
    """The provider of calls on ``device_type`` tensors: the first that supports them.

    Raises:
        NotImplementedError: the provider that ``use_provider`` names does not run there.
    """
    wanted = _options.current().provider
    for provider in PROVIDERS:
        if provider.passed_over(device_type, wanted) is None:
            return provider
    raise NotImplementedError(_named(wanted).supports(device_type))


def reasons(device_type: str) -> dict[str, str | None]:
    """Why each provider is passed over for calls on ``device_type``, in the order they are asked.

    None stands for a provider that may run them: the first such that has an op's kernel does.
    """
    wanted = _options.current().provider
    return {each.name: each.passed_over(device_type, wanted) for each in PROVIDERS}


def kernel(op: str, device_type: str, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The body that ``op`` runs with on ``device_type``; None stands for its reference.

    A provider that does not support the call is passed over, unless ``use_provider`` names it.

    Raises:
        NotImplementedError: the provider that ``use_provider`` names does not run there, or has the
            op and refuses the call.
        RuntimeError: it has failed its self-test there.
    """
    wanted = _options.current().provider
    for provider in PROVIDERS:
        # Every call of an op comes by: nobody asks why the others are passed over.
        if provider.name != wanted and (wanted is not None or provider.opt_in is not None):
            continue
        reason = provider.passed_over(device_type, wanted)
        if reason is not None and provider.name == wanted:
            raise NotImplementedError(f"{op}: {reason}")
        if reason is not None or provider.module is None:
            continue
        found = kernels_of(provider.module).get(op)
        if found is None:
            continue
        reason = found.supports(*args)
        if reason is not None:
            if wanted is not None:
                raise NotImplementedError(f"{op} of the provider {wanted}: {reason}")
            continue
        failure = _self_test_failure(provider, op, device_type, args)
        if failure is None:
            return found.run
        if wanted is not None:
            raise RuntimeError(f"{op} of the provider {wanted}: {failure}")
    return None


def _self_test_failure(
    provider: Provider, op: str, device_type: str, args: tuple[Any, ...]
) -> str | None:
    """Why a call may not go to ``provider``; the first of an op on a device tries it."""
    if device_type not in provider.self_tested:
        return None
    from . import _self_test

    return _self_test.failure(provider, op, args)


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
    _named(name)
    token = _options.set_current(replace(_options.current(), provider=name))
    try:
        yield
    finally:
        _options.reset(token)


def _named(name: str | None) -> Provider:
    for provider in PROVIDERS:
        if provider.name == name:
            return provider
    names = ", ".join(provider.name for provider in PROVIDERS)
    raise ValueError(f"provider must be one of {names}, got {name!r}")
