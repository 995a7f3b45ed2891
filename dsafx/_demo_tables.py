"""What the demo saw, as rich tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table
from rich.text import Text

from ._demo_measure import Measured
from .models._record import LayerRecord
from .passes import PipelineReport


@dataclass(frozen=True)
class Run:
    """One way of generating after one prompt.

    first, second: the same call twice; what the first costs more is compiling and warming up.
    decisions: of the first call's eager layers, in order.
    reports: of the graphs that the first call compiled, in order.
    """

    way: str
    compiles: bool
    prompt_length: int
    first: Measured[list[int]]
    second: Measured[list[int]]
    decisions: Sequence[LayerRecord]
    reports: Sequence[PipelineReport]


def agrees(run: Run, runs: Sequence[Run]) -> bool:
    """Whether both calls of ``run`` gave the tokens of the first way after the same prompt."""
    expected = next(other for other in runs if other.prompt_length == run.prompt_length).first.value
    return run.first.value == expected and run.second.value == expected


def routes(run: Run, schedule: Sequence[str]) -> Iterator[Table]:
    """What each layer of an eager run decided, with reason and provider, a table for each step."""
    for step, records in _steps(run.decisions, run.prompt_length):
        table = Table(title=step, title_justify="left")
        for column in ("layer", "indexer", "route", "selection", "provider"):
            table.add_column(column, no_wrap=True)
        table.add_column("reason")
        for record in records:
            table.add_row(
                str(record.layer_idx),
                schedule[record.layer_idx],
                record.decision.route.value,
                record.decision.selection.name.lower(),
                record.provider,
                record.decision.reason.value,
            )
        yield table


def _steps(
    records: Sequence[LayerRecord], prompt_length: int
) -> Iterator[tuple[str, list[LayerRecord]]]:
    """The prefill's records, then those of each run of decode steps that decided alike."""
    prefill = [record for record in records if record.tokens == prompt_length]
    yield f"prefill of {prompt_length} tokens", prefill
    decode = [record for record in records if record.tokens != prompt_length]
    forwards = [decode[i : i + len(prefill)] for i in range(0, len(decode), len(prefill))]
    for _, alike in groupby(forwards, key=lambda layers: [layer.decision for layer in layers]):
        group = list(alike)
        first, last = group[0][0].max_kv_len, group[-1][0].max_kv_len
        keys = f"{first} keys" if first == last else f"{first} to {last} keys"
        yield f"decode over {keys}", group[0]


def rewrites(run: Run) -> Iterator[Text]:
    """What the passes did to the graphs that a run compiled, in order; equal neighbours once."""
    count, number = len(run.reports), 0
    for lines, alike in groupby(run.reports, key=_lines):
        first, number = number + 1, number + len(list(alike))
        which = f"graph {first}" if first == number else f"graphs {first} to {number}"
        yield Text.assemble((f"{which} of {count}", "bold"), "\n", "\n".join(lines), "\n")


def _lines(report: PipelineReport) -> list[str]:
    """A report with the nodes that share a fate on one line."""
    lines = []
    for done in report.passes:
        lines.append(f"  {done.name}: {done.matched} {done.verb}")
        for fate, entries in (
            ("became", done.became),
            ("removed:", done.removed),
            ("declined:", done.declined),
        ):
            nodes: dict[str, list[str]] = {}
            for node, reason in entries:
                nodes.setdefault(reason, []).append(node)
            lines += [f"    {', '.join(names)} {fate} {why}" for why, names in nodes.items()]
    if report.problem is not None:
        lines.append(f"  put back as it came: {report.problem}")
    return lines


def measurements(runs: Sequence[Run]) -> Table:
    """Agreement of the tokens, time and extra resident memory, side by side."""
    table = Table(title="Side by side", title_justify="left")
    table.add_column("prompt")
    table.add_column("way")
    table.add_column("tokens")
    for column in ("run, s", "compiling, s", "peak extra memory, MiB"):
        table.add_column(column, justify="right")
    for length, group in groupby(
        sorted(runs, key=lambda run: run.prompt_length), key=lambda run: run.prompt_length
    ):
        for index, run in enumerate(group):
            compiling = max(0.0, run.first.seconds - run.second.seconds)
            table.add_row(
                str(length) if index == 0 else "",
                run.way,
                "equal" if agrees(run, runs) else Text("DIFFERENT", style="bold red"),
                f"{run.second.seconds:.2f}",
                f"{compiling:.1f}" if run.compiles else "",
                _mebibytes(run.second.peak_bytes),
            )
        table.add_section()
    table.caption = "Run and memory are of a second call; what the first cost more is compiling."
    table.caption_justify = "left"
    return table


def _mebibytes(size: int | None) -> str:
    if size is None:
        return "not known"
    return f"{size / 2**20:.0f}" if size >= 2**20 else "under 1"
