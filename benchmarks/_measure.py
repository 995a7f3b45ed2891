"""How everything here is measured: the contract's section "Measuring", once.

Only ratios leave this module, from calls that take turns (A B A B ...) in one process. The rates of
a GEMM and of a copy are measured before and after; where they moved, the machine was not the same
for both sides, and the run is thrown away. Memory is what the process grows by over its inputs.
"""

from __future__ import annotations

import ctypes
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Call = Callable[[], object]

_PROC = Path("/proc")
# Written to clear_refs, this sets the process's peak resident size back to its present one.
_RESET_PEAK = "5"


@dataclass(frozen=True)
class Rules:
    """How often and how strictly.

    pairs: rounds in which each call runs once; slow_pairs: the same where one of the calls takes
        over ``slow_seconds``.
    drift: largest relative change of the GEMM or copy rate that a run may contain.
    attempts: how often a run is tried before it is given up.
    gemm_size, copy_bytes: what the rates are measured on.
    """

    pairs: int = 7
    slow_pairs: int = 3
    slow_seconds: float = 10.0
    drift: float = 0.15
    attempts: int = 2
    gemm_size: int = 2048
    copy_bytes: int = 256 << 20


QUICK = Rules(pairs=2, slow_pairs=2, drift=math.inf, attempts=1, gemm_size=128, copy_bytes=1 << 20)
"""Enough to see that everything runs; its ratios mean nothing."""


@dataclass(frozen=True)
class Spread:
    """The median of paired ratios, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Rates:
    """What the machine does at its best just now: of a square GEMM and of a large copy."""

    flops_per_second: float
    bytes_per_second: float

    def moved(self, later: Rates) -> float:
        """The larger relative change of the two rates."""
        pairs = (
            (self.flops_per_second, later.flops_per_second),
            (self.bytes_per_second, later.bytes_per_second),
        )
        return max(max(pair) / min(pair) - 1 for pair in pairs)


def measure_rates(dtype: torch.dtype, rules: Rules) -> Rates:
    """GEMM rate in ``dtype`` and copy rate (bytes read plus bytes written), medians of 5."""
    size = rules.gemm_size
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    product = torch.empty(size, size, dtype=dtype)
    source = torch.zeros(rules.copy_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    gemm = statistics.median(_seconds(lambda: torch.mm(a, b, out=product)) for _ in range(5))
    copy = statistics.median(_seconds(lambda: target.copy_(source)) for _ in range(5))
    return Rates(2 * size**3 / gemm, 2 * rules.copy_bytes / copy)


@dataclass(frozen=True)
class Floor:
    """The least work a result can be had for, whatever the kernel.

    flops: of the products that cannot be avoided; bytes: inputs read once and outputs written once.
    """

    flops: float
    bytes: float

    def seconds(self, rates: Rates) -> float:
        """The time of the larger of the two at full rate."""
        return max(self.flops / rates.flops_per_second, self.bytes / rates.bytes_per_second)


@dataclass(frozen=True)
class Timed:
    """Calls that took turns.

    seconds: of each call, one value a round.
    moved: how much the machine's rates changed between start and end.
    """

    seconds: Mapping[str, Sequence[float]]
    before: Rates
    after: Rates

    @property
    def rounds(self) -> int:
        """How often each call ran."""
        return len(next(iter(self.seconds.values())))

    @property
    def moved(self) -> float:
        """How much the machine's rates changed between start and end."""
        return self.before.moved(self.after)

    def ratio(self, above: str, below: str) -> Spread:
        """Time of one call over time of another, round by round."""
        pairs = zip(self.seconds[above], self.seconds[below], strict=True)
        return Spread.of([a / b for a, b in pairs])

    def share(self, floor: Floor, call: str) -> Spread:
        """The floor's time over that of a call: 1 would be a kernel that cannot be faster."""
        rates = Rates(
            (self.before.flops_per_second + self.after.flops_per_second) / 2,
            (self.before.bytes_per_second + self.after.bytes_per_second) / 2,
        )
        return Spread.of([floor.seconds(rates) / seconds for seconds in self.seconds[call]])


def take_turns(
    calls: Mapping[str, Call], slowest: float, dtype: torch.dtype, rules: Rules
) -> Timed:
    """Run all ``calls`` in turns, once a round, and again from the start where the machine moved.

    Args:
        calls: already warmed up, by name; a name is what ratios are asked for.
        slowest: seconds that the slowest of them takes.
        dtype: of the GEMM whose rate is watched.
        rules: how often.

    Returns:
        The last attempt; whether its ``moved`` is acceptable is for the caller to say.
    """
    rounds = rules.pairs if slowest <= rules.slow_seconds else rules.slow_pairs
    for attempt in range(rules.attempts):
        before = measure_rates(dtype, rules)
        seconds = _rounds(calls, rounds)
        timed = Timed(seconds, before, measure_rates(dtype, rules))
        if timed.moved <= rules.drift or attempt == rules.attempts - 1:
            break
    return timed


def _rounds(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                seconds[name].append(_seconds(call))
    finally:
        gc.enable()
    return seconds


@dataclass(frozen=True)
class Trial:
    """One call on its own: what it returned, how long it took and how far the process grew.

    extra_bytes: its peak over its inputs; None where the system does not tell.
    """

    value: object
    seconds: float
    extra_bytes: int | None


def try_out(call: Call, rules: Rules) -> Trial:
    """Warm ``call`` up and measure its peak memory, the result included.

    The first call also pays for what is made once; where a second is cheap, its peak counts.
    """
    first = _with_peak(call)
    return first if first.seconds > rules.slow_seconds else _with_peak(call)


def free_bytes() -> int | None:
    """Memory that the system would still give away; None where it does not tell."""
    meminfo = _PROC / "meminfo"
    if not meminfo.exists():
        return None
    return _kibibytes(meminfo.read_text(), "MemAvailable") << 10


def fits(computed: int) -> bool:
    """Whether a peer may run: its largest tensors, with a quarter to spare for others, are free."""
    free = free_bytes()
    return free is None or 1.25 * computed < free


def _with_peak(call: Call) -> Trial:
    _return_freed_memory()
    before = _resident("VmRSS") if _reset_peak() else None
    start = time.perf_counter()
    value = call()
    seconds = time.perf_counter() - start
    if before is None:
        return Trial(value, seconds, None)
    return Trial(value, seconds, max(0, _resident("VmHWM") - before))


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _reset_peak() -> bool:
    """Whether the system forgot the process's peak so far."""
    try:
        (_PROC / "self" / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _return_freed_memory() -> None:
    """Give pages that are free inside the allocator back, so that using them again is seen."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # glibc alone has it
        return
    trim(0)


def _resident(field: str) -> int:
    return _kibibytes((_PROC / "self" / "status").read_text(), field) << 10


def _kibibytes(text: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"the system reports no {field}")
    return int(found[1])
