"""Whether a provider's kernels are right on a device: each op, once, on a few rows of inputs.

A signature that exists may still not run, and a kernel that runs may still be wrong there: nothing
but running it tells. ``failure`` is what ``providers.kernel`` asks before it hands a call to a
provider: it tries the op that is called, so that no other kernel is compiled for it, and a provider
that fails at one op is trusted with none. ``verdict`` tries all ops.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import providers
from ._verdicts import Verdict, known, record
from .probes import PROBES, Probe
from .providers import Kernel, Provider

_lock = threading.RLock()
# Set while kernels are tested, whose own calls of ops must not start another test.
_testing: ContextVar[bool] = ContextVar("dsafx_self_test", default=False)


def verdict(provider: Provider, device: torch.device) -> Verdict:
    """What comes of trying every kernel of ``provider`` on ``device``, each once in a process.

    Warns, once in a process, where a provider fails. Neither random numbers nor the modes in force
    (fake tensors, autocast, gradients) are touched or seen.
    """
    device = _indexed(device)
    try:
        names = tuple(_kernels(provider))
    except Exception as error:
        # A library that does not load: whatever it is, others compute.
        return _recorded(provider, device, Verdict((), {}, _said(error)))
    found = Verdict((), {}, None)
    for op in names:
        found = _tried(provider, device, op)
        if not found.passed:
            break
    return found


def failure(provider: Provider, op: str, args: Sequence[object]) -> str | None:
    """Why ``provider`` may not have a call of ``op`` with these arguments, or None.

    The first call of an op on a device tries it there, unless a kernel under test makes that call,
    or it comes while a CUDA graph is captured, whose warm-up is the place for it.
    """
    device = next((_indexed(arg.device) for arg in args if isinstance(arg, Tensor)), None)
    if device is None or _testing.get():
        return None
    found = known(provider.name, str(device))
    if found is None or not found.knows(op):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        found = _tried(provider, device, op)
    return None if found.passed else f"its self-test failed on {device}: {found.failure}"


def _tried(provider: Provider, device: torch.device, op: str) -> Verdict:
    """The verdict on ``provider`` once ``op`` has been tried."""
    with _lock:
        before = known(provider.name, str(device)) or Verdict((), {}, None)
        if before.knows(op):
            return before
        token = _testing.set(True)
        try:
            with (
                _disable_current_modes(),
                torch.no_grad(),
                torch.autocast(device.type, enabled=False),
                torch.device("cpu"),
            ):
                found = _judged(provider, op, device)
        except Exception as error:
            # A launch that fails, a probe that a kernel chokes on: whatever it is, others compute.
            found = Verdict((op,), {}, f"{op}: {_said(error)}")
        finally:
            _testing.reset(token)
        return _recorded(provider, device, before.joined(found))


def _recorded(provider: Provider, device: torch.device, found: Verdict) -> Verdict:
    record(provider.name, str(device), found)
    if not found.passed:
        warnings.warn(
            f"the provider {provider.name} fails its self-test on {device} and steps aside:"
            f" {found.failure}",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _kernels(provider: Provider) -> Mapping[str, Kernel]:
    return {} if provider.module is None else providers.kernels_of(provider.module)


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _judged(provider: Provider, op: str, device: torch.device) -> Verdict:
    kernel, tried, refusal = _kernels(provider)[op], False, "it has no probe"
    for probe in PROBES[op](provider) if op in PROBES else ():
        if probe.fallback and tried:
            continue
        args = tuple(_moved(arg, device) for arg in probe.args)
        reason = kernel.supports(*args)
        if reason is not None:
            refusal = reason
            continue
        tried = True
        wrong = _wrong(op, kernel, args, probe)
        if wrong is not None:
            return Verdict((op,), {}, f"{op}: {wrong}")
    return Verdict((op,), {}, None) if tried else Verdict((), {op: refusal}, None)


def _wrong(op: str, kernel: Kernel, args: tuple[object, ...], probe: Probe) -> str | None:
    """What is wrong with the results of ``kernel`` for ``args``, copies of the probe's."""
    overload = getattr(torch.ops.dsafx, op).default
    written = [
        place
        for place, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    got = _results(kernel.run(*args), args, written)
    exact_args = tuple(_widened(arg) if probe.wide else _moved(arg, _CPU) for arg in probe.args)
    with providers.use_provider("reference"):
        exact = _results(overload(*exact_args), exact_args, written)
    if len(got) != len(exact):
        return f"returns {len(got)} tensors for {len(exact)}"
    for number, (found, right) in enumerate(zip(got, exact, strict=True)):
        if found.shape != right.shape:
            shapes = f"{tuple(found.shape)} for {tuple(right.shape)}"
            return f"result {number} has shape {shapes}"
    return probe.judge(got, exact)


_CPU = torch.device("cpu")


def _results(
    returned: object, args: Sequence[object], written: Sequence[int]
) -> tuple[Tensor, ...]:
    """What a call returned and wrote, on the CPU."""
    found = (*_tensors(returned), *_tensors([args[place] for place in written]))
    return tuple(each.cpu() for each in found)


def _tensors(returned: object) -> Iterator[Tensor]:
    if isinstance(returned, Tensor):
        yield returned
    elif isinstance(returned, tuple | list):
        for each in returned:
            yield from _tensors(each)


def _moved(arg: object, device: torch.device) -> object:
    return arg.clone().to(device) if isinstance(arg, Tensor) else arg


def _widened(arg: object) -> object:
    if isinstance(arg, Tensor) and arg.dtype.is_floating_point:
        return arg.double()
    return _moved(arg, _CPU)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
