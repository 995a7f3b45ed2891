"""Results of layers and models as a table and as a plot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _model_cases import Phase, Subject
from _model_run import Row
from _report import mebibytes
from _run import Status
from rich.table import Table


def table(rows: Sequence[Row]) -> Table:
    """A line for each way to run each case; ratios are medians of pairs, lowest and highest."""
    shown = Table(title="transformers and dsafx, on the same weights")
    for heading in ("case", "run as", "times faster", "tokens/s"):
        shown.add_column(heading)
    shown.add_column("memory", justify="right")
    for (case, dtype), group in itertools.groupby(rows, lambda row: (row.case, row.dtype)):
        shown.add_section()
        title = f"{case}, {dtype}"
        for row in group:
            shown.add_row(
                title, row.subject.label, _speed(row), _rate(row), mebibytes(row.extra_bytes)
            )
            title = ""
    return shown


def differences(rows: Sequence[Row]) -> str:
    """How far results lie from those of transformers' eager code."""
    known = [row.difference for row in rows if row.difference is not None]
    if not known:
        return "no result was compared with transformers"
    return f"largest difference to transformers, over its largest value: {max(known):.1e}"


def _speed(row: Row) -> str:
    if row.status is not Status.MEASURED:
        return str(row.status)
    return "" if row.speedup is None else str(row.speedup)


def _rate(row: Row) -> str:
    return "" if row.tokens_per_second is None else f"{row.tokens_per_second:.3g}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Tokens per second over the length, and memory; a column a family, a line a way to run.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    ran = [row for row in rows if row.status is not Status.DOES_NOT_FIT]
    columns = list(dict.fromkeys((row.case.family, row.case.scope, row.case.phase) for row in ran))
    figure = Figure(figsize=(1 + 3.6 * len(columns), 6), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False)
    for column, chosen in enumerate(columns):
        speed, memory = axes[0][column], axes[1][column]
        for subject in Subject:
            line = [
                row
                for row in ran
                if (row.case.family, row.case.scope, row.case.phase) == chosen
                and row.subject is subject
            ]
            _draw(speed, line, [row.tokens_per_second for row in line])
            _draw(memory, line, [_gibibytes(row.extra_bytes) for row in line])
        family, scope, phase = chosen
        speed.set_title(f"{family.label}, {scope}, {phase}")
        speed.set_ylabel("tokens per second")
        memory.set_ylabel("extra memory, GiB")
        prompt = phase is Phase.PREFILL
        memory.set_xlabel("tokens of the prompt" if prompt else "tokens cached")
    axes[0][0].legend()
    figure.savefig(path)


def _draw(axes: Any, rows: Sequence[Row], values: Sequence[float | None]) -> None:
    known = [(row.case.length, value) for row, value in zip(rows, values, strict=True) if value]
    if known:
        axes.plot(*zip(*known, strict=True), marker="o", markersize=3, label=rows[0].subject.label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_yscale("log")


def _gibibytes(count: int | None) -> float | None:
    return None if count is None else count / 2**30
