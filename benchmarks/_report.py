"""Results as a table, as JSON and as a plot."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from _measure import Rules
from _run import Result, Status
from rich.table import Table

import dsafx


def table(results: Sequence[Result]) -> Table:
    """One row a result; ratios are medians of pairs, with the lowest and the highest."""
    shown = Table(title="dsafx against transformers, and against the machine")
    for heading in ("case", "tokens x keys", "family", "times faster", "of the floor"):
        shown.add_column(heading, overflow="fold")
    shown.add_column("memory", justify="right")
    shown.add_column("theirs", justify="right")
    for result in results:
        shown.add_row(
            result.case,
            f"{result.tokens} x {result.keys}",
            f"{result.family} {result.dtype}",
            _speed(result),
            "" if result.share_of_floor is None else str(result.share_of_floor),
            mebibytes(result.extra_bytes),
            mebibytes(result.peer_extra_bytes),
        )
    return shown


def remarks(result: Result) -> str:
    """What else is to be said about a result, in one line."""
    parts = [f"{sentence} {spread}" for sentence, spread in result.notes.items()]
    if result.reduction is not None and result.reduction > 0:
        parts.append(f"{result.reduction:.2%} of the time saved")
    if result.memory_ratio is not None:
        parts.append(f"their memory over ours {result.memory_ratio:.3g}")
    if result.difference is not None:
        parts.append(f"largest difference {result.difference:.1e}")
    if result.asserted is not None:
        parts.append(f"asserted: {result.asserted}")
    setting = f"{result.family} {result.dtype}, provider {result.provider}"
    return f"{result.case} ({setting}, {result.rounds} rounds): {'; '.join(parts)}"


def _speed(result: Result) -> str:
    if result.status is Status.UNSTEADY:
        return f"{result.status} by {result.rates_moved:.0%}"
    if result.speedup is None:
        return str(result.status) if result.status is Status.DOES_NOT_FIT else ""
    return str(result.speedup)


def mebibytes(count: int | None) -> str:
    """A size for a reader; empty where it is not known."""
    return "" if count is None else f"{count / 2**20:.1f} MiB"


def as_json(results: Sequence[Result], rules: Rules, quick: bool) -> str:
    """Everything that was measured, and on what."""
    derived = [
        asdict(result) | {"reduction": result.reduction, "memory_ratio": result.memory_ratio}
        for result in results
    ]
    return document(derived, rules, quick)


def document(results: Sequence[Any], rules: Rules, quick: bool, **settings: Any) -> str:
    """The versions, the machine and the rules that ``results`` come from, with them, as JSON.

    Args:
        results: dictionaries or dataclasses.
        rules: how was measured.
        quick: whether dimensions were tiny.
        settings: what else holds for all results.
    """
    content: dict[str, Any] = {
        "versions": {
            "dsafx": dsafx.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "quick": quick,
        **settings,
        "rules": {"pairs": rules.pairs, "slow_pairs": rules.slow_pairs, "attempts": rules.attempts},
        "results": [each if isinstance(each, dict) else asdict(each) for each in results],
    }
    return json.dumps(content, indent=2) + "\n"


def plot(results: Sequence[Result], path: Path) -> None:
    """Bars of the speedups, on a logarithmic axis, with the lowest and the highest pair.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    shown = [result for result in results if result.speedup is not None]
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(shown)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{r.case} {r.tokens} x {r.keys}, {r.family} {r.dtype}" for r in shown]
    spreads = [result.speedup for result in shown if result.speedup is not None]
    medians = [spread.median for spread in spreads]
    reach = [
        [spread.median - spread.low for spread in spreads],
        [spread.high - spread.median for spread in spreads],
    ]
    axes.barh(labels, medians, xerr=reach, capsize=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_xlabel("times faster than transformers (median, lowest and highest pair)")
    figure.savefig(path)
