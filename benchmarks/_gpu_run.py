"""Run one case by the rules of ``_measure.py``, and keep what may be said about it."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from _gpu_cases import BUILDERS
from _gpu_machine import Machine, Roof, Yardstick
from _gpu_setting import Case, Peer, Scene, Work
from _measure import Call, Spread, Timed

from dsafx import ops
from dsafx.ops import providers

OURS = "ours"
# How often a case is timed at most, and for about how long, beyond the pairs that it must have.
_MOST_ROUNDS = 25
_SECONDS = 0.4


class Status(StrEnum):
    """How a run ended."""

    MEASURED = "measured"
    DOES_NOT_FIT = "does not fit"
    UNSTEADY = "discarded: the device's rates moved"
    WRONG = "the result differs from a peer's"
    FAILED = "failed"


@dataclass(frozen=True)
class PeerResult:
    """What came of one peer.

    speedup: its time over ours; None where it did not run, for the reason given.
    bytes: its computed peak over the operands. difference: of its result and ours.
    """

    name: str
    speedup: Spread | None
    reason: str
    bytes: int
    difference: float | None = None


@dataclass(frozen=True)
class Result:
    """What was measured of one case.

    rounds: how many interleaved pairs the ratios are medians of; rates_moved: change of the
        device's rates meanwhile.
    share_of_roof: the least time at the rates measured beside it, over ours.
    of_bf16_gemm, of_fp8_gemm, of_copy: rate of ours over that of a GEMM and of a copy.
    """

    case: Case
    provider: str
    status: Status
    reason: str = ""
    rounds: int = 0
    rates_moved: float = 0.0
    roof: Roof | None = None
    flops: float = 0.0
    bytes: float = 0.0
    share_of_roof: Spread | None = None
    of_bf16_gemm: float | None = None
    of_fp8_gemm: float | None = None
    of_copy: float | None = None
    extra_bytes: int | None = None
    peers: tuple[PeerResult, ...] = field(default=())

    @property
    def best(self) -> PeerResult | None:
        """The fastest peer that ran."""
        ran = [(peer.speedup.median, peer) for peer in self.peers if peer.speedup is not None]
        return min(ran, key=lambda pair: pair[0])[1] if ran else None

    @property
    def tflops(self) -> float | None:
        """Of ours, in 10^12 FLOP/s."""
        if self.of_bf16_gemm is None or self.roof is None or not self.flops:
            return None
        return self.of_bf16_gemm * self.roof.bf16 * 1e-12


def run(case: Case, machine: Machine, yardstick: Yardstick) -> Result:
    """Measure ``case``; whatever goes wrong in it is in the result, so that others still run."""
    torch.manual_seed(0)
    try:
        with torch.no_grad(), ops.use_provider(machine.provider):
            return _run(case, machine, yardstick)
    except torch.OutOfMemoryError as error:
        return Result(case, machine.provider, Status.DOES_NOT_FIT, line(error))
    except Exception as error:
        return Result(case, machine.provider, Status.FAILED, line(error))
    finally:
        torch._dynamo.reset()
        gc.collect()
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()


def _run(case: Case, machine: Machine, yardstick: Yardstick) -> Result:
    work = BUILDERS[case.op](Scene(machine, case))
    value = work.ours()
    extra = machine.extra_bytes(work.ours)
    calls: dict[str, Call] = {}
    known: dict[str, PeerResult] = {}
    wrong = []
    for peer in (*work.peers, *_providers(case.op, machine, work)):
        tried = _try(machine, work, peer, value)
        known[peer.name] = tried
        if peer.call is not None and not tried.reason:
            calls[peer.name] = peer.call
        if tried.difference is not None and tried.difference > work.most:
            wrong.append(f"by {tried.difference:.2g} from {peer.name}, at most {work.most:.2g}")
    del value
    timed, roof = _take_turns({**calls, OURS: work.ours}, machine, yardstick)
    steady = timed.moved <= machine.rules.drift
    status = Status.MEASURED if steady else Status.UNSTEADY
    reached = Spread.of(timed.seconds[OURS]).median
    result = Result(
        case,
        computes(case.op, machine),
        Status.WRONG if wrong else status,
        "; ".join(wrong),
        timed.rounds,
        timed.moved,
        roof,
        work.floor.flops,
        work.floor.bytes,
        extra_bytes=extra,
        peers=tuple(_with_speedup(peer, timed, steady) for peer in known.values()),
    )
    if not steady:
        return result
    return Result(
        **{
            **vars(result),
            "share_of_roof": timed.share(work.floor, OURS),
            "of_bf16_gemm": work.floor.flops / reached / roof.bf16,
            "of_fp8_gemm": None if roof.fp8 is None else work.floor.flops / reached / roof.fp8,
            "of_copy": work.floor.bytes / reached / roof.copy,
        }
    )


def computes(op: str, machine: Machine) -> str:
    """Whose kernels "ours" are: an op that its provider has none for runs as its reference.

    A routed op is no kernel itself; those that it calls are.
    """
    routed = op.startswith("mla_attention")
    return machine.provider if routed or op in _kernels(machine.provider) else "reference"


def _kernels(name: str) -> Collection[str]:
    """The ops that the provider of this name has kernels for."""
    (found,) = (each for each in providers.PROVIDERS if each.name == name)
    return () if found.module is None else providers.kernels_of(found.module)


def _providers(op: str, machine: Machine, work: Work) -> Iterator[Peer]:
    """The same op by each other provider that has a kernel for it."""
    for provider in providers.PROVIDERS:
        if provider.name in (machine.provider, "reference", "cpu"):
            continue
        reason = provider.supports(machine.device.type)
        # Without this, naming it would run the reference.
        if reason is None and op not in _kernels(provider.name):
            continue

        def call(name: str = provider.name) -> object:
            with ops.use_provider(name):
                return work.ours()

        yield Peer(provider.name, None if reason else call, 0, reason or "")


def _try(machine: Machine, work: Work, peer: Peer, ours: object) -> PeerResult:
    """Warm ``peer`` up and compare its result, or say why it has none."""
    reason, difference = peer.reason, None
    if peer.call is not None and not machine.fits(peer.bytes):
        reason = Status.DOES_NOT_FIT.value
    elif peer.call is not None:
        # Another's code: whatever it raises, ours is still to be measured.
        try:
            value = peer.call()
            machine.synchronize()
            if work.compare is not None and value is not None:
                difference = work.compare(ours, value)
        except Exception as error:
            reason = line(error)
    return PeerResult(peer.name, None, reason, peer.bytes, difference)


def _take_turns(
    calls: dict[str, Call], machine: Machine, yardstick: Yardstick
) -> tuple[Timed, Roof]:
    """All calls by turns (A B A B ...), again from the start where the device's rates moved."""
    for call in calls.values():
        call()
    once = sum(machine.seconds(call) for call in calls.values())
    rules = machine.rules
    rounds = max(rules.pairs, 0 if machine.dry else min(_MOST_ROUNDS, int(_SECONDS / once)))
    for attempt in range(rules.attempts):
        before = yardstick.measure()
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                seconds[name].append(machine.seconds(call))
        after = yardstick.measure()
        timed = Timed(seconds, before.rates, after.rates)
        if timed.moved <= rules.drift or attempt == rules.attempts - 1:
            break
    return timed, after


def _with_speedup(peer: PeerResult, timed: Timed, steady: bool) -> PeerResult:
    if not steady or peer.name not in timed.seconds:
        return peer
    ratio = timed.ratio(peer.name, OURS)
    return PeerResult(peer.name, ratio, "", peer.bytes, peer.difference)


def line(error: Exception) -> str:
    """The first line of what went wrong."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
