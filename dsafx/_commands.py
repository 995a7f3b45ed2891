"""The commands of ``dsafx``; needs the extra ``cli``."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from ._kernel_snapshot import Part, SnapshotError, read
from .ops import routing

app = typer.Typer(
    help="DeepSeek Sparse Attention for PyTorch: see how a layer is routed, and see it run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class RoutesTable(StrEnum):
    """The tables that ``dsafx routes`` prints."""

    TRUTH = "truth"
    BACKENDS = "backends"


class DemoFamily(StrEnum):
    """The models that ``dsafx demo`` runs."""

    GLM = "glm"
    DEEPSEEK = "deepseek"
    BOTH = "both"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsafx {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options that stand before every command."""


@app.command()
def demo(
    family: Annotated[DemoFamily, typer.Option(help="Which small model to run.")] = DemoFamily.BOTH,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 16,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the checkpoints in this folder.", file_okay=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the prompts.")] = 0,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads torch may use; more gain little at these sizes.")
    ] = 1,
) -> None:
    """Generate with two small DSA models: transformers, dsafx eager and dsafx compiled.

    Writes a GLM-5.2-style and a DeepSeek-V3.2-style checkpoint with random weights, loads them, and
    generates greedily after a prompt shorter and one longer than index_topk. Prints whether the
    tokens agree, each layer's route with its reason, what the passes rewrote, time and memory. Ends
    with status 1 if any token differs.
    """
    try:
        from . import _demo
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("rich", "transformers"):
            raise
        typer.echo(f"the demo needs {missing}: pip install 'dsafx[cli,transformers]'", err=True)
        raise typer.Exit(1) from None
    families = [*_demo.Family] if family is DemoFamily.BOTH else [_demo.Family(family.value)]
    agreed = _demo.run(families, new_tokens, keep=keep, seed=seed, threads=threads)
    raise typer.Exit(0 if agreed else 1)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    self_test: Annotated[
        bool, typer.Option(help="Run each available provider's kernels once, on a few rows.")
    ] = True,
) -> None:
    """Say which versions, devices and providers there are, and what is missing and what it costs.

    Ends with status 1 if something that is installed is outside of its supported range or fails its
    self-test, else with 0: what is not installed is no failure.
    """
    from . import _doctor

    report = _doctor.examine(self_test=self_test)
    typer.echo(report.to_json() if as_json else str(report))
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def kernels(
    arch: Annotated[
        list[int] | None,
        typer.Option(help="Compile for this architecture (80, 89, 90, 100 or 120); repeatable."),
    ] = None,
    only: Annotated[str, typer.Option(help="Compile the kernels whose name holds this.")] = "",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile; one a core by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print records, not a table.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Compare with this snapshot and fail on a difference.", exists=True, dir_okay=False
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Write a snapshot of what was compiled; other lines of the file stay.",
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Compile every Triton kernel for each architecture and print what it became; needs no GPU.

    Registers, spilled bytes, shared and tensor memory, matrix instruction, and how far the kernel
    has been checked. Ends with status 1 if a kernel breaks a limit of its architecture.

    With --against, also if a kernel has another matrix instruction than in the snapshot, if one is
    new or gone, or, on the snapshot's release of Triton, if registers or memory moved by more than
    a tolerance. Only what is compiled is compared.
    """
    # It would turn kernels into ones that cannot be compiled, once Triton is imported.
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        from . import _kernels
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("rich", "triton"):
            raise
        typer.echo(f"this needs {missing}: pip install 'dsafx[cli,triton]'", err=True)
        raise typer.Exit(1) from None
    unknown = sorted(set(arch or ()) - set(_kernels.ARCHITECTURES))
    if unknown:
        known = ", ".join(str(each) for each in _kernels.ARCHITECTURES)
        raise typer.BadParameter(f"--arch accepts {known}, got {unknown[0]}")
    part = Part(sorted(set(arch)) if arch else _kernels.ARCHITECTURES, only)
    try:
        expected = None if against is None else read(against)
        good = _kernels.run(part, jobs or os.cpu_count() or 1, as_json, expected, record)
    except SnapshotError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(0 if good else 1)


@app.command()
def routes(
    only: Annotated[RoutesTable | None, typer.Option(help="Print this table alone.")] = None,
) -> None:
    """Print which kernel a layer takes for what reason, and the flags of the known backends."""
    tables = {
        RoutesTable.TRUTH: routing.truth_table,
        RoutesTable.BACKENDS: routing.backend_table,
    }
    chosen = [only] if only is not None else list(tables)
    typer.echo("\n\n".join(tables[name]().rstrip() for name in chosen))
