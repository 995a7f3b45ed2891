"""Which combinations of settings the tests of recognised models run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from _tiny import FAMILIES, TOPK

AROUND_TOPK = (TOPK - 1, TOPK, TOPK + 1, 3 * TOPK)
SETTINGS: dict[str, tuple[Any, ...]] = {
    "family": FAMILIES,
    "attention": ("sdpa", "eager"),
    "cache": ("none", "dynamic", "static"),
    "dynamic": (None, True, False),
    "padded": (False, True),
}
# One length of at most K and one above it, in both orders.
TWO_LENGTHS = (
    (TOPK - 1, 3 * TOPK),
    (TOPK, TOPK + 1),
    (TOPK + 1, TOPK - 1),
    (3 * TOPK, TOPK),
)


@dataclass(frozen=True)
class Case:
    """One way to run a model: a prefill of each length, and with a cache decode steps after it."""

    family: str
    attention: str
    cache: str
    dynamic: bool | None
    padded: bool
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        padding = "padded" if self.padded else "unpadded"
        lengths = "+".join(map(str, self.lengths))
        shapes = f"dynamic={self.dynamic}"
        return "-".join((self.family, self.attention, self.cache, shapes, padding, lengths))


def every_case() -> list[Case]:
    """The whole product, each with all lengths."""
    return [Case(*values, AROUND_TOPK) for values in product(*SETTINGS.values())]


def covering_cases() -> list[Case]:
    """Few cases in which any two settings meet in each of their combinations."""
    rows = pairwise_cover({**SETTINGS, "lengths": TWO_LENGTHS})
    return [Case(**row) for row in rows]


def pairwise_cover(settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows with a value of each setting, in which each two settings meet in all their pairs.

    The two longest settings give the rows. The others are filled in one by one, each place with the
    value that shows the most new pairs; of equals, the one that its diagonal starts with.
    """
    first, second, *others = sorted(settings, key=lambda name: -len(settings[name]))
    corners = list(product(enumerate(settings[first]), enumerate(settings[second])))
    rows = [{first: a, second: b} for (_, a), (_, b) in corners]
    for name in others:
        shown: set[frozenset[tuple[str, Any]]] = set()
        for row, ((i, _), (j, _)) in zip(rows, corners, strict=True):
            start = (i + j) % len(settings[name])
            values = [*settings[name][start:], *settings[name][:start]]
            known = tuple(row.items())
            pairs = [{frozenset(((name, value), each)) for each in known} for value in values]
            new = [len(each - shown) for each in pairs]
            best = new.index(max(new))
            row[name] = values[best]
            shown |= pairs[best]
    return rows


def pairs_of(row: Mapping[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    """Each two settings of a row with their values."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}
