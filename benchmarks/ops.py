"""Each op at the dimensions of GLM-5.2 and DeepSeek-V3.2, against transformers and the machine.

    python benchmarks/ops.py --family glm --only index_select --json result.json --plot result.png

Prints ratios only; how they are measured is written in ``_measure.py``. Needs
``pip install 'dsafx[bench]'``.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import _report as report
import torch
import transformers
import typer
from _cases import CASES
from _families import Family
from _measure import QUICK, Rules
from _run import Result, run
from _setting import DType, Setting
from rich.console import Console

CaseName = StrEnum("CaseName", {name: name for name in CASES})  # type: ignore[misc]


def main(
    family: Annotated[
        list[Family] | None, typer.Option(help="Which dimensions; both unless given.")
    ] = None,
    dtype: Annotated[list[DType] | None, typer.Option(help="float32 unless given.")] = None,
    only: Annotated[
        list[CaseName] | None, typer.Option(help="A case to run; all unless given.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny dimensions, to see that everything runs.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads that torch may use; its default unless given."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the speedups here.")] = None,
) -> None:
    """Measure ops and layers, print a table of ratios, and write what was asked for."""
    transformers.logging.set_verbosity_error()
    if threads is not None:
        torch.set_num_threads(threads)
    rules = QUICK if quick else Rules()
    console = Console(markup=False)
    results: list[Result] = []
    for chosen_family in family or list(Family):
        for chosen_dtype in dtype or [DType.FLOAT32]:
            setting = Setting(chosen_family, getattr(torch, chosen_dtype.value), quick)
            for case in only or list(CaseName):
                console.print(f"{chosen_family.label}, {chosen_dtype.value}: {case.value}")
                results.append(run(case.value, setting, rules))
                if json is not None:
                    json.write_text(report.as_json(results, rules, quick))
    console.print(report.table(results))
    for result in results:
        console.print(report.remarks(result), soft_wrap=True, highlight=False)
    if plot is not None:
        report.plot(results, plot)


if __name__ == "__main__":
    typer.run(main)
