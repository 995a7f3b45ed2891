"""What a case is: rules, inputs of its own, a check, and the fault that it catches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ._adapters import Adapters


@dataclass(frozen=True)
class Size:
    """How large the inputs of a case are.

    rows, keys, topk: T, S and K where a case does not need its own. K is well below S, since a
        test with K >= S sees no fault of the indexer.
    heads: head counts to try; widths: values of K to try.
    repeats: how often a deterministic function is repeated.
    """

    name: str
    rows: int
    keys: int
    topk: int
    heads: tuple[int, ...]
    widths: tuple[int, ...]
    repeats: int


SIZES = {
    "small": Size("small", 8, 96, 16, (1, 3, 16), (1, 3, 51, 251), 5),
    "full": Size("full", 40, 700, 64, (1, 3, 16, 24, 128), (1, 3, 512, 1000, 2047, 2048, 2051), 50),
}

Check = Callable[[Adapters, Size], None]
Fault = Callable[[Adapters], Adapters]


@dataclass(frozen=True)
class Case:
    """One executable rule of the contract.

    name: a sentence that is true of conforming kernels.
    rules: rules of ``CONTRACT.md`` that it stands for.
    classes: classes of public bugs that it would have caught: A routing, B index buffers, C top-k,
        D indexer arithmetic, E batches and caches, F speculative decoding, G shared layers,
        H sharded keys, I sizes.
    needs: functions of ``Adapters`` that it calls.
    check: raises ``AssertionError`` where the rule is broken.
    fault: gives correct adapters the bug that the case is there for; its self-test.
    exact: it rests on exact scores, which fp8 queries or keys do not give.
    sizes: names of the sizes that it runs at.
    """

    name: str
    rules: tuple[str, ...]
    classes: tuple[str, ...]
    needs: tuple[str, ...]
    check: Check
    fault: Fault
    exact: bool = False
    sizes: tuple[str, ...] = ("small", "full")

    def skipped(self, adapters: Adapters, size: Size) -> str | None:
        """Why the case does not apply, or None."""
        if size.name not in self.sizes:
            return f"runs at size {', '.join(self.sizes)}"
        missing = [name for name in self.needs if vars(adapters)[name] is None]
        if missing:
            return f"{adapters.name} has no {', '.join(missing)}"
        if self.exact and adapters.fp8_scores:
            return "rests on exact scores, and these are made of fp8 queries or keys"
        return None
