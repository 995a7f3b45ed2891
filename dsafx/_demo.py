"""``dsafx demo``: two small models, two prompts, three ways to generate, side by side."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from . import _demo_tables as tables
from ._demo_measure import measure
from ._demo_models import (
    LONG_PROMPT,
    SHORT_PROMPT,
    Family,
    generate,
    load,
    prompt,
    write_checkpoint,
)
from ._demo_tables import Run
from .models._record import record_decisions
from .models.compile import compile
from .models.config import DSAConfig
from .models.transformers import enable
from .ops import options
from .passes import collect

__all__ = ["Family", "run"]

# What a kernel may hold beyond inputs and outputs: small enough to show at these lengths.
_WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True)
class Way:
    """A way to generate: what is done to a model that was just loaded."""

    title: str
    prepare: Callable[[PreTrainedModel], PreTrainedModel]
    compiles: bool = False


_WAYS = (
    Way("transformers", lambda model: model),
    Way("dsafx eager", enable),
    Way("dsafx compiled", compile, compiles=True),
)


def run(
    families: Sequence[Family],
    new_tokens: int,
    *,
    keep: Path | None = None,
    seed: int = 0,
    threads: int = 1,
) -> bool:
    """Run the demo, print its tables, and answer whether all is as it should be.

    That is: all tokens agree, and no step of the compiled way ran eagerly.

    Args:
        families: the models to write, load and run.
        new_tokens: how many tokens follow each prompt.
        keep: folder for the checkpoints; None means a temporary one.
        seed: seed of weights and prompts.
        threads: threads torch may use from now on.
    """
    console = Console()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    prompts = [prompt(length, seed + length) for length in (SHORT_PROMPT, LONG_PROMPT)]
    budget = f"{_WORKSPACE_BYTES >> 20} MiB"
    console.print(f"Greedy generation in float32; each dsafx kernel may use {budget} of workspace.")
    agreed = True
    with _folder(keep) as folder, _empty_compile_cache(), options(workspace_bytes=_WORKSPACE_BYTES):
        for family in families:
            console.rule(family.label)
            checkpoint = folder / family.value
            console.print(f"writing a checkpoint with random weights to {checkpoint}")
            write_checkpoint(family, checkpoint, seed)
            agreed &= _run_family(console, checkpoint, prompts, new_tokens)
    console.rule()
    if agreed:
        console.print("[bold green]All tokens are equal[/] in every way of generating.")
    else:
        console.print("[bold red]Not as it should be;[/] see the tables above.")
    return agreed


def _run_family(
    console: Console, checkpoint: Path, prompts: Sequence[Tensor], new_tokens: int
) -> bool:
    """Generate after each prompt in three ways, print the tables, answer whether all is well."""
    # Models of both families compile the same wrapper function of transformers, and Dynamo limits
    # how often one function is compiled; beyond that it runs eagerly.
    torch.compiler.reset()
    runs: list[Run] = []
    for way in _WAYS:
        model = way.prepare(load(checkpoint))
        schedule = DSAConfig.from_transformers(model.config).schedule
        for tokens in prompts:
            task = f"{way.title}: {new_tokens} tokens after {tokens.shape[1]}"
            console.print(f"{task}{', compiling first' if way.compiles else ''} ...")
            with console.status(task):
                runs.append(_run(way, model, tokens, new_tokens))
            first, second = runs[-1].first.seconds, runs[-1].second.seconds
            console.print(f"  {first:.1f} s, and again in {second:.1f} s")
    for run in runs:
        if run.decisions and not run.compiles:
            console.print(f"\n[bold]What each layer decided[/] ({run.way})")
            console.print(*tables.routes(run, schedule), sep="\n", markup=False)
    for run in runs:
        if run.reports:
            console.print(f"\n[bold]What the passes rewrote[/] ({run.prompt_length} tokens)")
            console.print(*tables.rewrites(run), sep="\n", markup=False)
    console.print(tables.measurements(runs))
    uncompiled = [run.prompt_length for run in runs if run.compiles and run.decisions]
    for length in uncompiled:
        console.print(f"[bold red]Some steps after {length} tokens ran eagerly, not compiled.[/]")
    return not uncompiled and all(tables.agrees(run, runs) for run in runs)


def _run(way: Way, model: PreTrainedModel, tokens: Tensor, new_tokens: int) -> Run:
    def call() -> list[int]:
        return generate(model, tokens, new_tokens)

    with record_decisions() as decisions, collect() as reports:
        first = measure(call)
    return Run(way.title, way.compiles, tokens.shape[1], first, measure(call), decisions, reports)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """``keep``, made if it is not there, or a temporary folder."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="dsafx-demo-") as folder:
        yield Path(folder)


@contextmanager
def _empty_compile_cache() -> Iterator[None]:
    """Let Inductor start from an empty cache: the passes do not run for a graph it already has."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(prefix="dsafx-demo-cache-") as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
