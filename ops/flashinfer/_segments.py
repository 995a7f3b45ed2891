"""Rows with intervals as ragged requests: which calls compute them, with which offsets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Call:
    """Requests that lie next to each other, in rows and in packed keys.

    start, stop: its rows. first, last: its keys.
    rows, keys: where each request ends, counted from ``start`` and ``first``, after a 0.
    causal: whether row i of a request of n rows sees all of its keys but the last n - 1 - i.
    """

    start: int
    stop: int
    first: int
    last: int
    causal: bool
    rows: list[int] = field(default_factory=lambda: [0])
    keys: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        self.rows.append(self.stop - self.start)
        self.keys.append(self.last - self.first)

    @property
    def requests(self) -> int:
        return len(self.rows) - 1

    def longest(self) -> tuple[int, int]:
        """Most rows and most keys of one request."""
        return _largest_step(self.rows), _largest_step(self.keys)

    def join(self, other: Call) -> None:
        """Append ``other``, which begins where this one ends."""
        self.rows += [self.stop - self.start + end for end in other.rows[1:]]
        self.keys += [self.last - self.first + end for end in other.keys[1:]]
        self.stop, self.last = other.stop, other.last


def calls(ks: Tensor, ke: Tensor, most_requests: int) -> list[Call]:
    """Cover all rows that see a key, in order; reads the values of [T] int32 ``ks`` and ``ke``.

    A request is a run of rows whose intervals start together and grow by one key a row, as in
    causal prefill, or that are equal, as those of one document without an order.
    """
    found: list[Call] = []
    for run in _runs(ks.cpu(), ke.cpu()):
        before = found[-1] if found else None
        if (
            before is not None
            and before.causal == run.causal
            and (before.stop, before.last) == (run.start, run.first)
            and before.requests < most_requests
        ):
            before.join(run)
        else:
            found.append(run)
    return found


def _runs(ks: Tensor, ke: Tensor) -> Iterator[Call]:
    """One request each; single rows with equal intervals are put together."""
    held: Call | None = None
    for run in _causal_runs(ks, ke):
        same = held is not None and (held.first, held.last) == (run.first, run.last)
        if held is not None and same and _may_be_equal(held) and run.stop - run.start == 1:
            held = Call(held.start, run.stop, held.first, held.last, causal=False)
            continue
        if held is not None:
            yield held
        held = run
    if held is not None:
        yield held


def _may_be_equal(run: Call) -> bool:
    return not run.causal or run.stop - run.start == 1


def _causal_runs(ks: Tensor, ke: Tensor) -> Iterator[Call]:
    rows = ks.shape[0]
    if rows == 0:
        return
    seen = ks < ke
    follows = seen[:-1] & (ks[1:] == ks[:-1]) & (ke[1:] == ke[:-1] + 1)
    edges = ((~follows).nonzero()[:, 0] + 1).tolist()
    starts, stops = [0, *edges], [*edges, rows]
    firsts, lasts = ks[starts].tolist(), ke[[stop - 1 for stop in stops]].tolist()
    for start, stop, first, last in zip(starts, stops, firsts, lasts, strict=True):
        if first < last:
            yield Call(start, stop, first, last, causal=True)


def _largest_step(ends: list[int]) -> int:
    return max(stop - start for start, stop in itertools.pairwise(ends))
