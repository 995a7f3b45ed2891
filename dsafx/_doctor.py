"""``dsafx doctor``: what is installed, what can compute on this machine, and what is missing.

Imports no kernel library by itself; a self-test imports those whose provider runs here. Every
question to the machine may raise, and then the answer is what it said.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import __version__
from ._doctor_libraries import LIBRARIES, Library
from .ops import _self_test, libraries, providers
from .ops._host import version_numbers
from .ops._verdicts import Verdict
from .ops.levels import LEVELS
from .ops.providers import Provider


@dataclass(frozen=True)
class Installed:
    """One library: its version, and what is wrong with it or with its absence.

    status: "ok", "missing", "outside" of the supported range, or "unknown" without a version.
    """

    name: str
    version: str | None
    supported: str
    status: str
    note: str


@dataclass(frozen=True)
class Device:
    """One device that kernels could run on. capability: of CUDA, "9.0"."""

    device: str
    name: str
    capability: str | None


@dataclass(frozen=True)
class Ability:
    """One provider on one device.

    available: whether it computes there where it is named.
    chosen: whether it also computes there unnamed.
    reason: why not, or "".
    level: how far its kernels have been checked.
    self_test: the verdict in words, or "not run".
    passed: False where the self-test failed.
    """

    provider: str
    device: str
    available: bool
    chosen: bool
    reason: str
    level: str
    self_test: str
    passed: bool


@dataclass(frozen=True)
class Report:
    """What the doctor found. no_cuda: why there is no CUDA device, or None."""

    dsafx: str
    libraries: tuple[Installed, ...]
    compiler: Installed
    devices: tuple[Device, ...]
    no_cuda: str | None
    providers: tuple[Ability, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing that is installed is outside of its range or fails its self-test."""
        installed = (*self.libraries, self.compiler)
        return all(each.status != "outside" for each in installed) and all(
            each.passed for each in self.providers
        )

    def to_json(self) -> str:
        """The whole report as an object."""
        return json.dumps({**asdict(self), "ok": self.ok}, indent=2)

    def __str__(self) -> str:
        installed = (*self.libraries, self.compiler)
        tables = (
            _table(
                ("library", "version", "supported", "status"),
                [
                    (each.name, each.version or "-", each.supported, each.status)
                    for each in installed
                ],
            ),
            _table(("device", "name"), [(each.device, _named(each)) for each in self.devices]),
            _table(
                ("provider", "device", "computes", "self-test", "checked so far"),
                [
                    (each.provider, each.device, _computes(each), each.self_test, each.level)
                    for each in self.providers
                ],
            ),
        )
        notes = [] if self.no_cuda is None else [f"no CUDA device: {self.no_cuda}"]
        notes += [f"{each.provider}: {each.reason}" for each in self.providers if each.reason]
        notes += [each.note for each in installed if each.note]
        said = [f"dsafx {self.dsafx} on {platform.system()} {platform.machine()}", *tables]
        if notes:
            said.append("\n".join(f"- {note}" for note in notes))
        said.append(
            "All that this machine can use works."
            if self.ok
            else "Something that is installed is outside of its range or fails its self-test."
        )
        return "\n\n".join(said)


def examine(self_test: bool = True) -> Report:
    """Look at this machine; ``self_test`` runs each available provider's kernels once."""
    found, no_cuda = _cuda_devices()
    devices = (Device("cpu", platform.processor() or platform.machine(), None), *found)
    return Report(
        dsafx=__version__,
        libraries=tuple(_installed(library, no_cuda is None) for library in LIBRARIES),
        compiler=_compiler(self_test),
        devices=devices,
        no_cuda=no_cuda,
        providers=tuple(
            ability
            for provider in providers.PROVIDERS
            for ability in _abilities(provider, devices, self_test)
        ),
    )


def _installed(library: Library, cuda: bool) -> Installed:
    version = _version(library)
    supported = library.supported
    if version is None:
        lost = "" if cuda or not library.needs_cuda else "; nothing here, without a CUDA device"
        note = f"without {library.name}, {library.cost}{lost}"
        return Installed(library.name, None, supported, "missing", note)
    if version == libraries.UNKNOWN:
        note = f"{library.name} does not say its version; supported is {supported}"
        return Installed(library.name, None, supported, "unknown", note)
    if library.accepts(version_numbers(version)):
        return Installed(library.name, version, supported, "ok", "")
    note = f"{library.name} {version} is outside of what is supported, {supported}"
    return Installed(library.name, version, supported, "outside", note)


def _version(library: Library) -> str | None:
    """The version, or ``UNKNOWN``; None where the library is not installed."""
    if library.name == "python":
        return platform.python_version()
    if library.name == "torch":
        return str(torch.__version__)
    if not libraries.installed(library.name):
        return None
    return libraries.version(library.name)


def _compiler(build: bool) -> Installed:
    """The C++ compiler that the cpu provider calls at its first attention in float32."""
    name, supported, lost = os.environ.get("CXX", "c++"), "C++20, on Linux", _SLOWER
    if sys.platform != "linux":
        note = f"C++ is compiled on Linux only, not on {sys.platform}; so that {lost}"
        return Installed(name, None, supported, "missing", note)
    path = shutil.which(name)
    if path is None:
        return Installed(name, None, supported, "missing", f"without a C++ compiler, {lost}")
    if build:
        from .ops import cpu
        from .ops.cpu._build import BuildError, load

        try:
            for source in sorted(Path(cpu.__file__).parent.glob("*.cpp")):
                load(source)
        except BuildError as error:
            return Installed(name, path, supported, "outside", f"{error}; so that {lost}")
    return Installed(name, path, supported, "ok", "")


_SLOWER = "attention in float32 on the CPU runs on PyTorch's own kernels, which are slower"


def _cuda_devices() -> tuple[tuple[Device, ...], str | None]:
    try:
        if torch.version.cuda is None:
            return (), f"torch {torch.__version__} is built without CUDA"
        if not torch.cuda.is_available():
            return (), "torch finds no usable driver or device"
        found = []
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            name = torch.cuda.get_device_name(index)
            found.append(Device(f"cuda:{index}", name, f"{major}.{minor}"))
    except Exception as error:
        # A driver that is broken raises whatever it likes, and is what a doctor is asked about.
        return (), f"torch.cuda raised {type(error).__name__}: {error}"
    return tuple(found), None if found else "torch counts none"


def _abilities(
    provider: Provider, devices: tuple[Device, ...], self_test: bool
) -> Iterator[Ability]:
    """One for each device that ``provider`` is made for, or one that says that there is none."""
    own = [
        each.device
        for each in devices
        if not provider.devices or each.device.partition(":")[0] in provider.devices
    ]
    for device in own or provider.devices[:1]:
        device_type = device.partition(":")[0]
        reason = provider.supports(device_type)
        if reason is None and not own:
            reason = f"{provider.name} runs on {device_type}, and no such device is here"
        verdict = None
        if reason is None and self_test and provider.module is not None:
            with warnings.catch_warnings():
                # The report says it.
                warnings.simplefilter("ignore")
                verdict = _self_test.verdict(provider, torch.device(device))
        aside = provider.passed_over(device_type, None) or _untried(verdict)
        yield Ability(
            provider=provider.name,
            device=device,
            available=reason is None,
            chosen=reason is None and aside is None,
            reason=reason or aside or "",
            level=str(LEVELS[provider.name]) if provider.name in LEVELS else "unknown",
            self_test=_words(provider, verdict),
            passed=verdict is None or verdict.passed,
        )


def _untried(verdict: Verdict | None) -> str | None:
    """Why no op at all could be tried, or None."""
    if verdict is None or not verdict.passed or verdict.tested or not verdict.untested:
        return None
    return f"no op can be tried, for {next(iter(verdict.untested.values()))}"


def _words(provider: Provider, verdict: Verdict | None) -> str:
    if provider.module is None:
        return "is the measure"
    if verdict is None:
        return "not run"
    return str(verdict)


def _computes(ability: Ability) -> str:
    if not ability.available:
        return "no"
    return "yes" if ability.chosen else "where named"


def _named(device: Device) -> str:
    return device.name if device.capability is None else f"{device.name}, sm {device.capability}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )
