"""Kernels on a GPU: whether they are right there, and how fast beside their peers and the device.

    python benchmarks/gpu.py --json result.json --plot result.png
    python benchmarks/gpu.py --dry-run            # no GPU: tiny CPU tensors, no measurement

First the checks: each provider's self-test, that a dead selection launches no kernel, that a
decode step waits for nothing and can be captured, and the conformance kit. Then each op in turns
with every peer that is there: other providers (FlashInfer, DeepGEMM, FlashMLA), SDPA, transformers'
own code, and plain PyTorch under ``torch.compile``. A peer whose computed peak is not free is
listed as "does not fit". Cases come in the order of their importance, and those that the budget has
no room for are listed. Needs ``pip install 'dsafx[bench,triton]'``.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import _gpu_report as report
import torch
import typer
from _gpu_cases import BUILDERS, CASES
from _gpu_checks import checks
from _gpu_machine import DRY_RUN, Yardstick, cuda_machine, dry_machine
from _gpu_report import Run
from _gpu_run import Result, run
from _gpu_setting import Family
from rich.console import Console

NO_GPU = "There is no CUDA device that torch can use here; --dry-run needs none."
BUDGET = 420.0
_CHECKS_SHARE = 0.25

OpName = StrEnum("OpName", {name: name for name in BUILDERS})  # type: ignore[misc]


def main(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tiny CPU tensors, to see that everything runs.")
    ] = False,
    budget: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds after which no further case starts; the checks have a quarter of them.",
        ),
    ] = BUDGET,
    family: Annotated[
        list[Family] | None, typer.Option(help="Which dimensions; both unless given.")
    ] = None,
    only: Annotated[
        list[OpName] | None, typer.Option(help="An op to measure; all unless given.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Run the checks, and not the cases alone.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results here.")] = None,
) -> None:
    """Check the kernels on this GPU, measure them, print tables, and write what was asked for."""
    console = Console(markup=False)
    if not dry_run and not torch.cuda.is_available():
        console.print(NO_GPU)
        raise typer.Exit(2)
    start = time.monotonic()
    machine = dry_machine() if dry_run else cuda_machine()
    if machine.dry:
        console.print(DRY_RUN, style="bold")
    yardstick = Yardstick(machine)
    roof = yardstick.measure()
    found = list(checks(machine, _CHECKS_SHARE * budget)) if check else []
    chosen = [
        case
        for case in CASES
        if (not family or case.family in family) and (not only or case.op in only)
    ]
    results: list[Result] = []

    def so_far() -> Run:
        seconds = time.monotonic() - start
        return Run(machine, roof, found, results, chosen[len(results) :], budget, seconds)

    for number, case in enumerate(chosen):
        if time.monotonic() - start >= budget:
            break
        console.print(f"{number + 1} of {len(chosen)}: {case}", highlight=False)
        results.append(run(case, machine, yardstick))
        if json is not None:
            # At once, so that a run that is cut short leaves what it has.
            json.write_text(report.as_json(so_far()))
    done = so_far()
    _show(console, done)
    if json is not None:
        json.write_text(report.as_json(done))
    if plot is not None:
        report.plot(done, plot)
    if not done.ok:
        raise typer.Exit(1)


def _show(console: Console, done: Run) -> None:
    if done.checks:
        console.print(report.check_table(done.checks))
    console.print(report.table(done))
    for result in done.results:
        console.print(report.remarks(result), soft_wrap=True, highlight=False)
    for case in done.left:
        console.print(f"{case}: not run, the budget was spent", soft_wrap=True, highlight=False)
    console.print(report.settings(done), soft_wrap=True, highlight=False)
    console.print(
        f"{len(done.results)} cases in {done.seconds:.0f} s of {done.budget:.0f},"
        f" {len(done.left)} not run",
        highlight=False,
    )


if __name__ == "__main__":
    typer.run(main)
