"""The device that is measured, and its stand-in for a dry run: clock, best rates, free memory.

On a GPU, time is that between two CUDA events. Before each call the L2 cache is flushed and the
device is kept busy, so that it starts on the call with all of it enqueued: what the host needs for
launching is not in the figures, as it is not where a step is replayed from a CUDA graph. A call
that waits for the device shows its wait.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _measure import QUICK, Call, Rates, Rules, free_bytes

Clock = Callable[[Call], float]

DRY_RUN = "DRY RUN on CPU tensors at tiny dimensions: nothing here is a measurement"
# What the device is kept busy for before a timed call: longer than a host takes to enqueue one.
_LEAD_SECONDS = 6e-3
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Machine:
    """Where calls run and how they are timed.

    name: of the device, for a reader.
    provider: whose kernels "ours" are.
    backend: of ``torch.compile`` for the peers.
    seconds: runs a call and returns its time.
    synchronize: waits for the device.
    free_bytes: memory that is still to be had, or None where that is not known.
    extra_bytes: runs a call and returns its peak memory over its inputs, or None.
    """

    device: torch.device
    name: str
    provider: str
    backend: str
    dry: bool
    rules: Rules
    seconds: Clock
    synchronize: Callable[[], None]
    free_bytes: Callable[[], int | None]
    extra_bytes: Callable[[Call], int | None]

    def fits(self, computed: int) -> bool:
        """Whether so much is free, with a quarter to spare."""
        free = self.free_bytes()
        return free is None or 1.25 * computed < free


def cuda_machine() -> Machine:
    """The current CUDA device."""
    device = torch.device("cuda", torch.cuda.current_device())
    return Machine(
        device=device,
        name=torch.cuda.get_device_name(device),
        provider="triton",
        backend="inductor",
        dry=False,
        rules=Rules(gemm_size=8192, copy_bytes=1 << 30, drift=0.15),
        seconds=_event_clock(device),
        synchronize=functools.partial(torch.cuda.synchronize, device),
        free_bytes=lambda: _free_on(device),
        extra_bytes=lambda call: _peak_on(device, call),
    )


def dry_machine() -> Machine:
    """CPU tensors, the reference provider and wall clock: the same code, and no measurement."""
    return Machine(
        device=torch.device("cpu"),
        name="dry run on the CPU",
        provider="reference",
        backend="eager",
        dry=True,
        rules=Rules(QUICK.pairs, QUICK.slow_pairs, drift=math.inf, attempts=1, gemm_size=64),
        seconds=_wall_clock,
        synchronize=lambda: None,
        free_bytes=free_bytes,
        extra_bytes=_unknown,
    )


@dataclass(frozen=True)
class Roof:
    """What the device does at its best just now.

    bf16: FLOP/s of a square GEMM of random values. fp8: the same in e4m3, or None where the device
    or torch has none. copy: bytes read plus bytes written per second of a large copy.
    """

    bf16: float
    fp8: float | None
    copy: float

    @property
    def rates(self) -> Rates:
        """The two rates that a floor is held against: no op here multiplies in fp8."""
        return Rates(self.bf16, self.copy)


class Yardstick:
    """Operands of the GEMMs and of the copy, made once."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        size, device = machine.rules.gemm_size, machine.device
        a, b = (torch.randn(size, size, device=device) for _ in range(2))
        self._bf16 = a.bfloat16(), b.bfloat16()
        self._product = torch.empty(size, size, device=device, dtype=torch.bfloat16)
        fp8 = torch.float8_e4m3fn
        # The second operand must be column-major.
        self._fp8 = a.to(fp8), b.to(fp8).t()
        self._one = torch.ones((), device=device)
        nbytes = (1 << 16) if machine.dry else machine.rules.copy_bytes
        self._source = torch.zeros(nbytes, device=device, dtype=torch.uint8)
        self._target = torch.empty_like(self._source)
        self._has_fp8 = self._try_fp8()

    def measure(self) -> Roof:
        """The rates now, medians of 5."""
        flops = 2 * self._machine.rules.gemm_size**3
        bf16 = self._median(lambda: torch.mm(*self._bf16, out=self._product))
        copy = self._median(lambda: self._target.copy_(self._source))
        fp8 = self._median(self._scaled_mm) if self._has_fp8 else None
        return Roof(
            flops / bf16, None if fp8 is None else flops / fp8, 2 * self._source.numel() / copy
        )

    def _median(self, call: Call) -> float:
        return statistics.median(self._machine.seconds(call) for _ in range(5))

    def _scaled_mm(self) -> object:
        return torch._scaled_mm(
            *self._fp8, scale_a=self._one, scale_b=self._one, out_dtype=torch.bfloat16
        )

    def _try_fp8(self) -> bool:
        try:
            self._scaled_mm()
            self._machine.synchronize()
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
        return True


def _wall_clock(call: Call) -> float:
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _event_clock(device: torch.device) -> Clock:
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(4 * cache, _FLUSH_BYTES), dtype=torch.uint8, device=device)
    cycles = int(_LEAD_SECONDS * _cycles_per_second())

    def seconds(call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(cycles)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        del result
        return float(start.elapsed_time(end)) * 1e-3

    return seconds


def _cycles_per_second() -> float:
    cycles = 10_000_000
    torch.cuda._sleep(cycles)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (float(start.elapsed_time(end)) * 1e-3)


def _free_on(device: torch.device) -> int:
    """Memory that the device would still give away, with what torch holds and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def _peak_on(device: torch.device, call: Call) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return int(torch.cuda.max_memory_allocated(device)) - before


def _unknown(call: Call) -> None:
    call()
