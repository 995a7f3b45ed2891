"""Run one case in all ways that fit into memory, and keep what may be said about each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from _families import Pair
from _measure import Call, Rules, Spread, fits, take_turns, try_out
from _model_cases import Case, Subject, prepare
from _run import Status, largest_difference


@dataclass(frozen=True)
class Row:
    """What was measured of one way to run one case.

    rounds: how many pairs the ratio is a median of; rates_moved: change of the machine's rates.
    speedup: the time of transformers' eager code over that of this one.
    tokens_per_second: at the median time of this machine, for orientation; not to be compared
        between runs.
    extra_bytes: peak memory over the inputs; computed where it did not run.
    difference: largest difference to transformers' eager result over its largest value.
    """

    case: Case
    dtype: str
    subject: Subject
    status: Status
    rounds: int = 0
    rates_moved: float = 0.0
    speedup: Spread | None = None
    tokens_per_second: float | None = None
    extra_bytes: int | None = None
    difference: float | None = None


def run(case: Case, pair: Pair, subjects: Sequence[Subject], rules: Rules) -> list[Row]:
    """A row for each subject, in their order; those that do not fit are listed and not run."""
    with torch.inference_mode():
        return _run(case, pair, subjects, rules)


def _run(case: Case, pair: Pair, subjects: Sequence[Subject], rules: Rules) -> list[Row]:
    computed = case.peer_bytes(pair.dims, pair.dtype)
    calls: dict[Subject, Call] = {}
    extra: dict[Subject, int | None] = {}
    differences: dict[Subject, float] = {}
    expected: object = None
    slowest = 0.0
    for subject in subjects:
        if not subject.is_ours and not fits(computed):
            continue
        call = prepare(case, subject, pair)
        if subject.backend is not None:
            # Compilation is neither time nor memory of the result.
            call()
        trial = try_out(call, rules)
        calls[subject], extra[subject] = call, trial.extra_bytes
        slowest = max(slowest, trial.seconds)
        if subject is Subject.EAGER:
            expected = trial.value
        elif expected is not None:
            differences[subject] = largest_difference(trial.value, expected)
    del expected
    named = {subject.value: call for subject, call in calls.items()}
    timed = take_turns(named, slowest, pair.dtype, rules) if named else None
    rows = []
    for subject in subjects:
        row = Row(
            case=case,
            dtype=str(pair.dtype).removeprefix("torch."),
            subject=subject,
            status=Status.DOES_NOT_FIT,
            extra_bytes=computed,
        )
        if timed is not None and subject in calls:
            steady = timed.moved <= rules.drift
            against = steady and Subject.EAGER in calls and subject is not Subject.EAGER
            median = Spread.of(timed.seconds[subject.value]).median
            row = replace(
                row,
                status=Status.MEASURED if steady else Status.UNSTEADY,
                rounds=timed.rounds,
                rates_moved=timed.moved,
                speedup=timed.ratio(Subject.EAGER.value, subject.value) if against else None,
                tokens_per_second=case.tokens / median if steady else None,
                extra_bytes=extra[subject],
                difference=differences.get(subject),
            )
        rows.append(row)
    return rows
