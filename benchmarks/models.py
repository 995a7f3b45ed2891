"""A layer and a small model of transformers at real dimensions, in the four ways to run them.

    python benchmarks/models.py --family glm --scope layer --phase prefill --plot layer.png

transformers eager, transformers under Inductor, ``dsafx.enable``, and that compiled: times faster
than the first, tokens per second, and peak memory. How they are measured is written in
``_measure.py``; one way at a time can be left out with ``--subject``. Needs
``pip install 'dsafx[bench]'``.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated

import _model_report as report
import torch
import transformers
import typer
from _families import REAL, TINY, Family
from _measure import QUICK, Rules
from _model_cases import Case, Phase, Scope, Subject, models
from _model_rows import steady_rows
from _model_run import Row, run
from _report import document
from _setting import DType
from rich.console import Console

LENGTHS = {
    Phase.PREFILL: (256, 512, 1024, 2048, 4096, 8192),
    Phase.DECODE: (1024, 4096, 16384, 65536),
}
_QUICK_LENGTHS = {Phase.PREFILL: (16, 80), Phase.DECODE: (80,)}


def main(
    family: Annotated[
        list[Family] | None, typer.Option(help="Which dimensions; both unless given.")
    ] = None,
    dtype: Annotated[list[DType] | None, typer.Option(help="float32 unless given.")] = None,
    scope: Annotated[
        list[Scope] | None, typer.Option(help="A layer or a model; both unless given.")
    ] = None,
    phase: Annotated[list[Phase] | None, typer.Option(help="Both unless given.")] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Tokens of a prompt or of a cache; a list unless given."),
    ] = None,
    subject: Annotated[list[Subject] | None, typer.Option(help="All four unless given.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny dimensions, to see that everything runs.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads that torch may use; its default unless given."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them here.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep what --json holds, but for discarded cases."),
    ] = False,
) -> None:
    """Measure layers and models, print a table, and write what was asked for."""
    if resume and json is None:
        raise typer.BadParameter("--resume needs --json, which names the results to keep")
    transformers.logging.set_verbosity_error()
    if threads is not None:
        torch.set_num_threads(threads)
    rules = QUICK if quick else Rules()
    lengths = _QUICK_LENGTHS if quick else LENGTHS
    console = Console(markup=False)
    subjects = subject or list(Subject)
    try:
        known = steady_rows(json, subjects, rules, quick) if resume and json is not None else {}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    rows: list[Row] = []
    for chosen_family in family or list(Family):
        dims = (TINY if quick else REAL)[chosen_family]
        for chosen_dtype in dtype or [DType.FLOAT32]:
            for chosen_scope in scope or list(Scope):
                torch.manual_seed(0)
                pair = models(chosen_family, chosen_scope, dims, getattr(torch, chosen_dtype.value))
                cases = [
                    Case(chosen_family, chosen_scope, chosen_phase, tokens)
                    for chosen_phase in phase or list(Phase)
                    for tokens in length or lengths[chosen_phase]
                ]
                for case in cases:
                    key = case, chosen_dtype.value
                    console.print(
                        f"{case}, {chosen_dtype.value}{': known' if key in known else ''}"
                    )
                    if key not in known:
                        torch.compiler.reset()
                        known[key] = run(case, pair, subjects, rules)
                    rows += known[key]
                    if json is not None:
                        json.write_text(document([*chain(*known.values())], rules, quick))
    console.print(report.table(rows))
    console.print(report.differences(rows))
    if plot is not None:
        report.plot(rows, plot)


if __name__ == "__main__":
    typer.run(main)
