"""What the passes cost: their share of a cold compile, and a warm start against plain Inductor's.

    python benchmarks/pipeline.py --layers 78 --json result.json

Each start is a process of its own, and the two sides take turns as whole processes. A cold start
has an empty compile cache; a warm one that of an earlier process with the same backend. The model
is described in ``_pipeline_start.py``. Needs ``pip install 'dsafx[bench]'``.
"""

from __future__ import annotations

import json as json_format
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from _measure import QUICK, Rules, Spread, take_turns
from _pipeline_start import Answer, Order
from _report import document
from rich.console import Console
from rich.table import Table

_CHILD = Path(__file__).with_name("_pipeline_start.py")
OURS, PEER = "dsafx", "inductor"


class CaseName(StrEnum):
    """What is measured."""

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True)
class Result:
    """What was measured of one case; ratios are spreads over the starts.

    recognised: attention layers that became ops of this package.
    passes_share: time of the passes over that from ``torch.compile`` to the first result.
    passes_ms_per_layer, start_ms_per_layer: the two for one layer, ours.
    start, process: our start over the peer's: from ``torch.compile`` to the first result, and of
        the whole process.
    noise: the standard deviation of the paired start ratios.
    rates_moved: change of the machine's rates over the run; steady: whether it was accepted.
    """

    case: CaseName
    layers: int
    recognised: int | None
    passes_share: Spread | None
    passes_ms_per_layer: Spread | None
    start_ms_per_layer: Spread
    start: Spread
    process: Spread
    noise: float
    rounds: int
    rates_moved: float
    steady: bool


def run(case: CaseName, layers: int, tokens: int, rules: Rules, folder: Path) -> Result:
    """Measure one case.

    Raises:
        RuntimeError: a child failed, a graph was put back as it came, or a cache was not empty or
            not used as the case demands.
    """
    orders = {backend: Order(backend, layers, tokens) for backend in (OURS, PEER)}
    answers: dict[str, list[Answer]] = {OURS: [], PEER: []}

    def begin(backend: str) -> None:
        cold = case is CaseName.COLD
        place = tempfile.mkdtemp(dir=folder) if cold else str(folder / backend)
        answers[backend].append(_start(orders[backend], place, warm=not cold))

    if case is CaseName.WARM:
        for backend in orders:
            _start(orders[backend], str(folder / backend), warm=False)
    slowest = float("inf") if case is CaseName.COLD else 0.0
    calls = {OURS: lambda: begin(OURS), PEER: lambda: begin(PEER)}
    timed = take_turns(calls, slowest, torch.float32, rules)
    ours, peer = (answers[backend][-timed.rounds :] for backend in (OURS, PEER))
    ratios = [a.start / b.start for a, b in zip(ours, peer, strict=True)]
    cold = case is CaseName.COLD
    return Result(
        case=case,
        layers=layers,
        recognised=ours[0].layers if cold else None,
        passes_share=Spread.of([each.passes / each.start for each in ours]) if cold else None,
        passes_ms_per_layer=_per_layer([each.passes for each in ours], layers) if cold else None,
        start_ms_per_layer=_per_layer([each.start for each in ours], layers),
        start=Spread.of(ratios),
        process=timed.ratio(OURS, PEER),
        noise=_deviation(ratios),
        rounds=timed.rounds,
        rates_moved=timed.moved,
        steady=timed.moved <= rules.drift,
    )


def _start(order: Order, cache: str, *, warm: bool) -> Answer:
    done = subprocess.run(
        [sys.executable, str(_CHILD), json_format.dumps(asdict(order))],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{order} failed:\n{done.stderr}")
    answer = Answer(**json_format.loads(done.stdout.splitlines()[-1]))
    if answer.refused:
        raise RuntimeError(f"{order}: a graph was put back as it came: {answer.refused[0]}")
    if answer.hits != (answer.graphs if warm else 0):
        raise RuntimeError(f"{order}: {answer.hits} of {answer.graphs} graphs from the cache")
    return answer


def _per_layer(seconds: list[float], layers: int) -> Spread:
    return Spread.of([1000 * each / layers for each in seconds])


def _deviation(ratios: list[float]) -> float:
    return float(torch.tensor(ratios).std()) if len(ratios) > 1 else 0.0


def table(results: list[Result]) -> Table:
    """One row a result; ratios are medians of pairs, with the lowest and the highest."""
    shown = Table(title="the passes, and dsafx against plain Inductor")
    for heading in ("start", "layers", "share of the passes", "start over Inductor's"):
        shown.add_column(heading, overflow="fold")
    shown.add_column("process over Inductor's")
    shown.add_column("passes, ms a layer")
    shown.add_column("start, ms a layer")
    for result in results:
        layers = str(result.layers)
        if result.recognised is not None:
            layers += f", {result.recognised} recognised"
        shown.add_row(
            result.case if result.steady else f"{result.case}: rates moved",
            layers,
            "" if result.passes_share is None else _percent(result.passes_share),
            f"{result.start}, deviation {result.noise:.2g}",
            str(result.process),
            "" if result.passes_ms_per_layer is None else str(result.passes_ms_per_layer),
            str(result.start_ms_per_layer),
        )
    return shown


def _percent(share: Spread) -> str:
    return f"{share.median:.2%} ({share.low:.2%} to {share.high:.2%})"


def main(
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = 78,
    tokens: Annotated[int, typer.Option(min=1, help="Of the prompt; K is 32.")] = 64,
    only: Annotated[
        list[CaseName] | None, typer.Option(help="A case to run; both unless given.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two pairs, to see that everything runs.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
) -> None:
    """Measure what the passes cost at compile time, and print a table of ratios."""
    rules = QUICK if quick else Rules()
    console = Console(markup=False)
    results: list[Result] = []
    for case in only or list(CaseName):
        console.print(f"{case.value} start, {layers} layers")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            results.append(run(case, layers, tokens, rules, Path(folder)))
        if json is not None:
            json.write_text(document(results, rules, quick, tokens=tokens))
    console.print(table(results))


if __name__ == "__main__":
    typer.run(main)
