"""What ``dsafx kernels`` prints: each Triton kernel, compiled here for each architecture."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.metadata import version

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .ops.levels import kernel_level
from .ops.triton import variants
from .ops.triton._compile_report import Compiled, compile_report
from .ops.triton._device import ARCHITECTURES
from .ops.triton._variants import Variant

__all__ = ["ARCHITECTURES", "run"]


def run(archs: Sequence[int], only: str, jobs: int, as_json: bool) -> bool:
    """Compile and print; whether no kernel breaks a limit.

    Args:
        archs: architectures, of ``ARCHITECTURES``.
        only: compile the variants whose name holds this.
        jobs: how many processes compile.
        as_json: print a list of records and not a table.
    """
    wanted = [(arch, each.name) for arch in archs for each in variants(arch) if only in each.name]
    found: list[Compiled] = []
    # A forked process would inherit torch's threads.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("compiling", total=len(wanted))
        for line in pool.map(_compiled, wanted):
            found += line
            progress.advance(task)
    if as_json:
        print(json.dumps([_record(line) for line in found], indent=1))
    else:
        _print(found)
    return all(line.failure is None for line in found)


def _compiled(wanted: tuple[int, str]) -> list[Compiled]:
    """The report of one variant, by architecture and name; empty where it is not for it."""
    arch, name = wanted
    return list(compile_report([_by_name(arch)[name]], arch))


@functools.cache
def _by_name(arch: int) -> dict[str, Variant]:
    return {each.name: each for each in variants(arch)}


def _record(line: Compiled) -> dict[str, object]:
    return {**asdict(line), "level": _level(line)}


def _level(line: Compiled) -> str:
    return kernel_level(line.name.split()[0], line.arch)


def _print(found: Sequence[Compiled]) -> None:
    table = Table(title=f"Kernels compiled by Triton {version('triton')}, without a GPU")
    for heading in ("kernel", "sm"):
        table.add_column(heading)
    for heading in ("registers", "spilled", "shared", "tmem"):
        table.add_column(heading, justify="right")
    for heading in ("instruction", "level", "verdict"):
        table.add_column(heading)
    for line in found:
        table.add_row(
            line.name,
            str(line.arch),
            str(line.registers),
            str(line.spilled),
            str(line.shared),
            str(line.tensor_memory),
            line.instruction or "-",
            _level(line),
            line.failure or "ok",
            style="red" if line.failure else None,
        )
    # A file or a pipe gets whole lines.
    width = None if os.isatty(1) else 200
    console = Console(width=width)
    console.print(table)
    failed = sum(line.failure is not None for line in found)
    console.print(f"{len(found)} compiled, {failed} of them fail")
