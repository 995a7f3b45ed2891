"""Which query tokens attention computes together: runs of rows whose intervals fit one call."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

# Rows from which a causal run pays for calls of its own.
_LONG = 16


class Form(enum.Enum):
    """How the intervals of a run of rows relate."""

    CAUSAL = "equal starts, and ends that grow by one with each row"
    FULL = "equal intervals"
    RAGGED = "intervals that need a mask"


@dataclass(frozen=True)
class Run:
    """Query tokens ``start .. stop``, none of them empty, over the packed keys ``first .. last``.

    ``last`` is the end of the longest row, which in a causal run is the last one.
    """

    start: int
    stop: int
    first: int
    last: int
    form: Form

    def part(self, start: int, stop: int) -> Run:
        """The query tokens ``start .. stop`` of this run, and the keys that they see at most."""
        hidden = self.stop - stop if self.form is Form.CAUSAL else 0
        return Run(start, stop, self.first, self.last - hidden, self.form)

    def even_parts(self, count: int) -> list[Run]:
        """This run in ``count`` parts, whose query tokens differ in number by one at most."""
        rows = self.stop - self.start
        edges = [self.start + rows * part // count for part in range(count + 1)]
        return [self.part(start, stop) for start, stop in itertools.pairwise(edges)]


def runs(ks: Tensor, ke: Tensor) -> Iterator[Run]:
    """Cover all rows that see a key by runs, in order; reads the values of [T] ``ks`` and ``ke``.

    At least three quarters of the (row, key) pairs of a ragged run are visible.
    """
    current: Run | None = None
    visible = 0
    for run in _causal_runs(ks, ke):
        pairs = _visible_pairs(run)
        joined = None if current is None else _joined(current, run)
        if joined is not None and 4 * (visible + pairs) >= 3 * _all_pairs(joined):
            current, visible = joined, visible + pairs
            continue
        if current is not None:
            yield current
        current, visible = run, pairs
    if current is not None:
        yield current


def _causal_runs(ks: Tensor, ke: Tensor) -> Iterator[Run]:
    rows = ks.shape[0]
    if rows == 0:
        return
    seen = ks < ke
    follows = seen[:-1] & (ks[1:] == ks[:-1]) & (ke[1:] == ke[:-1] + 1)
    edges = (~follows).nonzero()[:, 0] + 1
    starts, stops = [0, *edges.tolist()], [*edges.tolist(), rows]
    firsts, lasts = ks[starts].tolist(), ke[[stop - 1 for stop in stops]].tolist()
    for start, stop, first, last in zip(starts, stops, firsts, lasts, strict=True):
        if first < last:
            yield Run(start, stop, first, last, Form.CAUSAL if stop - start > 1 else Form.FULL)


def _joined(head: Run, tail: Run) -> Run | None:
    """Both as one run under a mask or none; None where they are better off apart."""
    if head.stop != tail.start or _stands_alone(head) or _stands_alone(tail):
        return None
    full = head.form is tail.form is Form.FULL
    same = full and (head.first, head.last) == (tail.first, tail.last)
    first, last = min(head.first, tail.first), max(head.last, tail.last)
    return Run(head.start, tail.stop, first, last, Form.FULL if same else Form.RAGGED)


def _stands_alone(run: Run) -> bool:
    return run.form is Form.CAUSAL and run.stop - run.start >= _LONG


def _all_pairs(run: Run) -> int:
    return (run.stop - run.start) * (run.last - run.first)


def _visible_pairs(run: Run) -> int:
    """(row, key) pairs that a causal or full run sees."""
    rows = run.stop - run.start
    return _all_pairs(run) - (rows * (rows - 1) // 2 if run.form is Form.CAUSAL else 0)
