"""What self-tests found in this process; nothing here runs one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What trying the ops of one provider on one device found so far.

    tested: ops whose results are right, and the one that failed.
    untested: why other ops were not tried.
    failure: what the first wrong op did, or None.
    """

    tested: tuple[str, ...]
    untested: Mapping[str, str]
    failure: str | None

    @property
    def passed(self) -> bool:
        """Whether no op was wrong; one that could not be tried is not."""
        return self.failure is None

    def knows(self, op: str) -> bool:
        """Whether there is nothing more to learn by trying ``op``."""
        return not self.passed or op in self.tested or op in self.untested

    def joined(self, later: Verdict) -> Verdict:
        """Both findings as one."""
        return Verdict(
            (*self.tested, *later.tested),
            {**self.untested, **later.untested},
            self.failure or later.failure,
        )

    def __str__(self) -> str:
        if self.failure is not None:
            return f"failed: {self.failure}"
        total = len(self.tested) + len(self.untested)
        return f"passed, {len(self.tested)} of {total} ops tried"


_verdicts: dict[tuple[str, str], Verdict] = {}


def record(provider: str, device: str, verdict: Verdict) -> None:
    """Keep the verdict on the provider of this name on ``device``, such as ``cuda:0``."""
    _verdicts[provider, device] = verdict


def known(provider: str, device: str) -> Verdict | None:
    """The verdict on a provider on a device, if there is one."""
    return _verdicts.get((provider, device))


def failure(provider: str, device_type: str) -> str | None:
    """Why a provider steps aside on all devices of a type: it failed on each that was tried."""
    found = [
        (device, verdict.failure)
        for (name, device), verdict in _verdicts.items()
        if name == provider and device.partition(":")[0] == device_type
    ]
    if not found or any(reason is None for _, reason in found):
        return None
    device, reason = found[0]
    return f"the self-test of {provider} failed on {device}: {reason}"
