"""Run one case by the rules, and keep what may be said about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from _cases import CASES
from _measure import Call, Rules, Spread, fits, take_turns, try_out
from _setting import Prepared, Setting
from torch import Tensor

from dsafx.ops import providers


class Status(StrEnum):
    """How a run ended."""

    MEASURED = "measured"
    DOES_NOT_FIT = "the peer does not fit"
    UNSTEADY = "discarded: the machine's rates moved"


@dataclass(frozen=True)
class Result:
    """What was measured of one case.

    provider: whose kernels ran.
    rounds: how many pairs the ratios are medians of; rates_moved: change of the machine's rates.
    speedup: the peer's time over ours. share_of_floor: the floor's time over ours.
    notes: further ratios, by the sentence that names them.
    extra_bytes, peer_extra_bytes: peak memory over the inputs; computed where the peer did not run.
    difference: largest difference of the two results over the peer's largest value.
    asserted: what was asserted on our result.
    """

    case: str
    family: str
    dtype: str
    tokens: int
    keys: int
    topk: int
    provider: str
    status: Status
    rounds: int
    rates_moved: float
    speedup: Spread | None = None
    share_of_floor: Spread | None = None
    notes: dict[str, Spread] = field(default_factory=dict)
    extra_bytes: int | None = None
    peer_extra_bytes: int | None = None
    difference: float | None = None
    asserted: str | None = None

    @property
    def reduction(self) -> float | None:
        """The part of the peer's time that is saved."""
        return None if self.speedup is None else 1 - 1 / self.speedup.median

    @property
    def memory_ratio(self) -> float | None:
        """The peer's extra memory over ours; None where either is unknown or ours is nothing."""
        if not self.extra_bytes or self.peer_extra_bytes is None:
            return None
        return self.peer_extra_bytes / self.extra_bytes


def run(name: str, setting: Setting, rules: Rules) -> Result:
    """Measure the case ``name``.

    Raises:
        AssertionError: our result is wrong.
    """
    torch.manual_seed(0)
    with torch.inference_mode():
        return _run(name, setting, CASES[name](setting), rules)


def _run(name: str, setting: Setting, prepared: Prepared, rules: Rules) -> Result:
    calls: dict[str, Call] = {"ours": prepared.ours}
    ours = try_out(prepared.ours, rules)
    asserted = prepared.check(ours.value) if prepared.check is not None else None
    slowest, peer = ours.seconds, None
    if prepared.peer is not None and fits(prepared.peer_bytes):
        peer = try_out(prepared.peer, rules)
        slowest = max(slowest, peer.seconds)
        calls = {"peer": prepared.peer, **calls}
    difference = None
    if prepared.comparable and peer is not None:
        difference = largest_difference(ours.value, peer.value)
    extra, peer_extra = ours.extra_bytes, prepared.peer_bytes if peer is None else peer.extra_bytes
    del ours
    for other in prepared.others.values():
        slowest = max(slowest, try_out(other, rules).seconds)

    timed = take_turns({**calls, **prepared.others}, slowest, setting.dtype, rules)
    steady = timed.moved <= rules.drift
    left_out = prepared.peer is not None and peer is None
    status = Status.DOES_NOT_FIT if left_out else Status.MEASURED
    ran = timed.seconds.keys()
    notes = {
        sentence: timed.ratio(*pair)
        for sentence, pair in prepared.notes.items()
        if steady and ran >= set(pair)
    }
    floor = prepared.floor
    return Result(
        case=name,
        family=setting.family.value,
        dtype=str(setting.dtype).removeprefix("torch."),
        tokens=prepared.tokens,
        keys=prepared.keys,
        topk=setting.dims.index_topk,
        provider=providers.dispatch("cpu").name,
        status=status if steady else Status.UNSTEADY,
        rounds=timed.rounds,
        rates_moved=timed.moved,
        speedup=timed.ratio("peer", "ours") if steady and peer is not None else None,
        share_of_floor=timed.share(floor, "ours") if steady and floor is not None else None,
        notes=notes,
        extra_bytes=extra,
        peer_extra_bytes=None if prepared.peer is None else peer_extra,
        difference=difference,
        asserted=asserted,
    )


def largest_difference(ours: object, theirs: object) -> float:
    """The largest difference of two results over the largest value of the second."""
    mine, other = _flat(ours), _flat(theirs)
    return float((mine - other).abs().max() / other.abs().max())


def _flat(value: object) -> Tensor:
    """All values of a result in one row, float32."""
    if isinstance(value, Tensor):
        return value.flatten().float()
    assert isinstance(value, tuple)
    return torch.cat([_flat(part) for part in value])
