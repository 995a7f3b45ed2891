"""What a pass is told and what it answers, and how a caller gathers the answers."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import fx

from ._traces import Traces

if TYPE_CHECKING:
    from .verify import Entered

Oracle: TypeAlias = Callable[[Any, Any], bool | None]


@dataclass(frozen=True)
class PassOptions:
    """What a user may set.

    specialize: ``"auto"`` may put a guard on a length where guards are checked; ``"never"`` uses
        only what is known without one, for callers that drop guards.
    fuse: ``"auto"`` fuses where the device's provider has the kernel and it pays, ``"always"`` also
        onto the reference kernel, ``"never"`` nothing.
    recognise: ``"auto"`` puts ops of this package in place of the DSA layers of transformers models
        that were not enabled, ``"never"`` leaves those as they are.
    strict: raise where the final graph cannot be verified, instead of compiling the graph as it
        came.
    """

    specialize: str = "auto"
    fuse: str = "auto"
    recognise: str = "auto"
    strict: bool = False

    def __post_init__(self) -> None:
        _require_choice("specialize", self.specialize, ("auto", "never"))
        _require_choice("fuse", self.fuse, ("auto", "always", "never"))
        _require_choice("recognise", self.recognise, ("auto", "never"))
        if not isinstance(self.strict, bool):
            raise TypeError(f"strict must be True or False, got {self.strict!r}")


def _require_choice(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")


@dataclass(frozen=True)
class PassContext:
    """What a pass may rely on for one graph.

    options: the user's.
    inference: no gradient will be asked of this graph; only then may a selection be removed.
    guards_live: guards on lengths are checked by whoever runs the graph.
    le: ``a <= b`` as True, False or None, for legality; may add a guard where ``guards_live``.
    prefer: the same for costs, from the example inputs; never adds a guard.
    entered: the graph's outputs and writes as it entered the pipeline.
    traces: what passes have inlined into this graph.
    """

    options: PassOptions = field(default_factory=PassOptions)
    inference: bool = True
    guards_live: bool = True
    le: Oracle = operator.le
    prefer: Oracle = operator.le
    entered: Entered | None = None
    traces: Traces = field(default_factory=Traces, repr=False, compare=False)


@dataclass
class PassReport:
    """What one pass did to one graph, and what it left alone and why.

    name: the pass. matched: how many nodes it rewrote. became: those of them for which there is
        more to say.
    removed, declined: node names with the reason. verb: what ``matched`` counts.
    """

    name: str
    matched: int = 0
    became: list[tuple[str, str]] = field(default_factory=list)
    removed: list[tuple[str, str]] = field(default_factory=list)
    declined: list[tuple[str, str]] = field(default_factory=list)
    verb: str = "rewritten"

    def rewrite(self, node: fx.Node, what: str) -> None:
        """Count a rewrite and say what the node became."""
        self.matched += 1
        self.became.append((node.name, what))

    def remove(self, node: fx.Node, reason: str) -> None:
        """Record that a node was removed."""
        self.removed.append((node.name, reason))

    def decline(self, node: fx.Node, reason: str) -> None:
        """Record that a node was left alone."""
        self.declined.append((node.name, reason))

    def __str__(self) -> str:
        parts = [f"{self.matched} {self.verb}"]
        parts += [f"{name} became {what}" for name, what in self.became]
        parts += [f"{name} removed: {reason}" for name, reason in self.removed]
        parts += [f"{name} declined: {reason}" for name, reason in self.declined]
        return f"{self.name}: {'; '.join(parts)}"


@dataclass
class PipelineReport:
    """What the passes of one stage did to one graph.

    stage: ``"pre_grad"`` for the graph of Dynamo, in which layers are recognised, ``"post_grad"``
        for the graph of ATen ops that the other passes rewrite.
    passes: the reports in the order in which the passes ran.
    inference: whether the graph is one for inference; None before that is known.
    before, after: the graph's text, only where ``collect`` asked for it.
    problem: why the graph was put back as it came, or None.
    """

    passes: list[PassReport] = field(default_factory=list)
    inference: bool | None = True
    stage: str = "post_grad"
    before: str = ""
    after: str = ""
    problem: str | None = None

    def of(self, name: str) -> PassReport:
        """The report of one pass."""
        return next(report for report in self.passes if report.name == name)

    def __str__(self) -> str:
        lines = [str(report) for report in self.passes]
        if self.problem is not None:
            lines.append(f"put back as it came: {self.problem}")
        return "\n".join(lines)


_collected: ContextVar[list[PipelineReport] | None] = ContextVar("dsafx_reports", default=None)


@contextlib.contextmanager
def collect() -> Iterator[list[PipelineReport]]:
    """Gather a report for each graph that is compiled inside the ``with`` block.

    Passes do not run for a graph that comes from Inductor's cache, so that it has no report.
    """
    reports: list[PipelineReport] = []
    token = _collected.set(reports)
    try:
        yield reports
    finally:
        _collected.reset(token)


def collected() -> list[PipelineReport] | None:
    """The list of the innermost ``collect`` block, or None outside of one."""
    return _collected.get()
