"""Rows of an earlier run, read back from its JSON, so that a long sweep can be taken up again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _families import Family
from _measure import Rules, Spread
from _model_cases import Case, Phase, Scope, Subject
from _model_run import Row
from _report import document
from _run import Status


def steady_rows(
    path: Path, subjects: Sequence[Subject], rules: Rules, quick: bool
) -> dict[tuple[Case, str], list[Row]]:
    """The rows that ``path`` holds, by case and dtype; none where there is no such file.

    Cases of other subjects, and those during which the machine's rates moved, are left out.

    Raises:
        ValueError: other versions, another machine or other rules gave those rows.
    """
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    now = json.loads(document([], rules, quick))
    unlike = [name for name, value in now.items() if name != "results" and content[name] != value]
    if unlike:
        name = unlike[0]
        raise ValueError(f"{path} holds results of {name} {content[name]}, this is {now[name]}")
    found: dict[tuple[Case, str], list[Row]] = {}
    for row in map(_row, content["results"]):
        found.setdefault((row.case, row.dtype), []).append(row)
    return {
        key: rows
        for key, rows in found.items()
        if [row.subject for row in rows] == list(subjects)
        and all(row.status is not Status.UNSTEADY for row in rows)
    }


def _row(record: dict[str, Any]) -> Row:
    case, speedup = record["case"], record["speedup"]
    return Row(
        **record
        | {
            "case": Case(
                Family(case["family"]), Scope(case["scope"]), Phase(case["phase"]), case["length"]
            ),
            "subject": Subject(record["subject"]),
            "status": Status(record["status"]),
            "speedup": None if speedup is None else Spread(**speedup),
        }
    )
