"""Time and extra resident memory of one call."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

_STATM = Path("/proc/self/statm")
_SAMPLE_SECONDS = 0.001

Value = TypeVar("Value")


@dataclass(frozen=True)
class Measured(Generic[Value]):
    """What a call returned, how long it took, and how far the process grew meanwhile.

    ``peak_bytes`` is None where the system does not tell a process's resident size.
    """

    value: Value
    seconds: float
    peak_bytes: int | None


def measure(call: Callable[[], Value]) -> Measured[Value]:
    """Run ``call`` once; its peak is the highest resident size sampled, less the size before."""
    gc.collect()
    sampler = _Sampler() if _STATM.exists() else None
    start = time.perf_counter()
    try:
        value = call()
        seconds = time.perf_counter() - start
    finally:
        peak = sampler.stop() if sampler is not None else None
    return Measured(value, seconds, peak)


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Sampler:
    """A thread that keeps the highest resident size it sees until it is stopped."""

    def __init__(self) -> None:
        self._before = self._highest = _resident_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._highest = max(self._highest, _resident_bytes())

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return max(self._highest, _resident_bytes()) - self._before
