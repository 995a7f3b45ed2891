"""What the passes did, as text for people: two loggers, ``DSAFX_LOGS``, and depyf's folder.

| logger | level | holds |
|---|---|---|
| ``dsafx.passes.report`` | INFO | for each graph, what each pass did, what it declined, and why |
| ``dsafx.passes.graphs`` | DEBUG | each graph as it came and after each pass that changed it |

Both are loggers like any other: ``TORCH_LOGS=dsafx``, ``torch._logging.set_logs(modules=...)`` and
``logging`` itself reach them by name. No text is made unless somebody reads it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeAlias

from torch import fx

from . import _torch_compat as compat
from ._edit import copy_of
from ._print import graph_text
from ._report import PassReport, PipelineReport

REPORT = logging.getLogger("dsafx.passes.report")
GRAPHS = logging.getLogger("dsafx.passes.graphs")

VARIABLE = "DSAFX_LOGS"
_LOGGERS = {"report": (REPORT, logging.INFO), "graphs": (GRAPHS, logging.DEBUG)}

Reader: TypeAlias = Callable[[str], None]
# Of the process, not of a thread: a backward is compiled on a thread of autograd.
_readers: list[Reader] = []


@lru_cache(maxsize=1)
def follow_environment() -> None:
    """Send to stderr what ``DSAFX_LOGS`` names: ``report``, ``graphs``, or both and a comma.

    The variable is read once a process. What is sent to stderr goes to no other handler.

    Raises:
        ValueError: the variable holds another name.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    for name in names:
        if name not in _LOGGERS:
            accepted = ", ".join(_LOGGERS)
            raise ValueError(f"{VARIABLE} accepts {accepted}, separated by commas, got {name!r}")
    for logger, level in map(_LOGGERS.__getitem__, dict.fromkeys(names)):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False


@contextlib.contextmanager
def reading(reader: Reader) -> Iterator[None]:
    """Give ``reader`` the text of each report that is made in this process meanwhile."""
    _readers.append(reader)
    try:
        yield
    finally:
        _readers.remove(reader)


class Steps:
    """Shows a graph as it came and after each pass that changed it, to the log and to depyf."""

    def __init__(self, graph: fx.Graph, stage: str) -> None:
        self._graph = graph
        self._stage = stage
        self._is_read = compat.depyf_is_watching() or GRAPHS.isEnabledFor(logging.DEBUG)
        self._number = 0
        self._shown = ""
        self._show("before")

    def after(self, step: str) -> None:
        """Show the graph as ``step`` left it; nothing where it is as it was.

        Steps are counted whether they are shown or not, so that a number names the same pass in
        every graph of a stage.
        """
        self._number += 1
        self._show(f"after_{step}")

    def _show(self, name: str) -> None:
        if not self._is_read:
            return
        text = graph_text(self._graph, shapes=True)
        if text == self._shown:
            return
        self._shown = text
        name = f"{self._stage}.{self._number:02}_{name}"
        GRAPHS.debug("graph %s, %s\n%s", compat.compile_id(), name, text)
        if compat.depyf_is_watching():
            compat.show_to_depyf(f"dsafx.{name}", self._graph, copy_of(self._graph))


@contextlib.contextmanager
def following(graph: fx.Graph, report: PipelineReport) -> Iterator[Steps]:
    """Show ``graph`` step by step, and tell ``report`` in the end, also where a pass raised."""
    steps = Steps(graph, report.stage)
    try:
        yield steps
    finally:
        tell(report)


def tell(report: PipelineReport) -> None:
    """Give a report to the log and to whoever reads."""
    if not _readers and not REPORT.isEnabledFor(logging.INFO):
        return
    text = report_text(report)
    REPORT.info("%s", text)
    for reader in tuple(_readers):
        reader(text)


@contextlib.contextmanager
def noting_cache_hits() -> Iterator[None]:
    """Log that a graph compiled meanwhile came from a cache, where it therefore has no report."""
    before = compat.cache_hits()
    yield
    if compat.cache_hits() > before:
        REPORT.info("graph %s came from Inductor's cache: no pass ran", compat.compile_id())


def report_text(report: PipelineReport) -> str:
    """A report with a line for each node that was rewritten, removed or declined."""
    kind = {True: ", inference", False: ", training", None: ""}[report.inference]
    lines = [f"graph {compat.compile_id()}, {report.stage}{kind}"]
    if not report.passes:
        lines.append("no op of dsafx in it: left as it came")
    for each in report.passes:
        lines += _pass_lines(each)
    if report.problem is not None:
        lines.append(f"put back as it came: {report.problem}")
    return "\n".join(lines)


def _pass_lines(report: PassReport) -> list[str]:
    return [
        f"{report.name}: {report.matched} {report.verb}",
        *(f"    {name} became {what}" for name, what in report.became),
        *(f"    {name} removed: {reason}" for name, reason in report.removed),
        *(f"    {name} declined: {reason}" for name, reason in report.declined),
    ]
