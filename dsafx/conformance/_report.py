"""Running the cases and saying what came of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ._adapters import Adapters
from ._case import SIZES, Case, Size
from ._cases import CASES


@dataclass(frozen=True)
class Result:
    """What came of one case: "passed", "failed" or "skipped", and why."""

    case: Case
    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What came of all cases; ``str()`` is a table, ``ok`` says whether none failed."""

    adapters: str
    size: str
    results: tuple[Result, ...] = field(repr=False)

    @property
    def ok(self) -> bool:
        """No case failed. Skipped ones are no evidence: look at ``skipped`` as well."""
        return not self.failed

    @property
    def passed(self) -> tuple[Result, ...]:
        return self._of("passed")

    @property
    def failed(self) -> tuple[Result, ...]:
        return self._of("failed")

    @property
    def skipped(self) -> tuple[Result, ...]:
        return self._of("skipped")

    def _of(self, outcome: str) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.outcome == outcome)

    def __str__(self) -> str:
        lines = [
            f"{self.adapters}, size {self.size}: {len(self.passed)} passed,"
            f" {len(self.failed)} failed, {len(self.skipped)} skipped"
        ]
        for result in self.results:
            case = result.case
            covers = " ".join((*case.rules, *case.classes))
            lines.append(f"  {result.outcome:<8}{case.name}  [{covers}]")
            if result.reason:
                lines.append(f"          {result.reason}")
        return "\n".join(lines)


def run(adapters: Adapters, size: str = "small", cases: Sequence[Case] = CASES) -> Report:
    """Put ``adapters`` through the cases.

    Args:
        adapters: the functions under test; see ``Adapters``.
        size: "small" or "full".
        cases: all of them, unless chosen.

    Returns:
        A report with one result a case. An adapter that raises ``NotImplementedError`` skips the
        case, with its message; any other exception fails it.

    Raises:
        ValueError: an unknown size.
    """
    if size not in SIZES:
        raise ValueError(f"size must be {' or '.join(SIZES)}, got {size!r}")
    results = tuple(_outcome(case, adapters, SIZES[size]) for case in cases)
    return Report(adapters.name, size, results)


def _outcome(case: Case, adapters: Adapters, size: Size) -> Result:
    reason = case.skipped(adapters, size)
    if reason is not None:
        return Result(case, "skipped", reason)
    try:
        case.check(adapters, size)
    except NotImplementedError as refusal:
        return Result(case, "skipped", str(refusal) or "NotImplementedError")
    except Exception as error:  # whatever an adapter raises is its result
        return Result(case, "failed", f"{type(error).__name__}: {error}")
    return Result(case, "passed")
