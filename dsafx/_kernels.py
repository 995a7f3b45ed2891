"""What ``dsafx kernels`` prints: each Triton kernel, compiled here for each architecture."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ._kernel_snapshot import Entry, Part, Snapshot, differences, read
from .ops.levels import kernel_level
from .ops.libraries import version
from .ops.triton import variants
from .ops.triton._compile_report import Compiled, compile_report
from .ops.triton._device import ARCHITECTURES
from .ops.triton._variants import Variant

__all__ = ["ARCHITECTURES", "run"]


def run(
    part: Part,
    jobs: int,
    as_json: bool,
    against: Snapshot | None = None,
    record: Path | None = None,
) -> bool:
    """Compile and print; whether no kernel breaks a limit or differs from a snapshot.

    Args:
        part: what to compile; its architectures are of ``ARCHITECTURES``.
        jobs: how many processes compile.
        as_json: print a list of records and not a table.
        against: what the kernels are compared with.
        record: the file that takes what was found, unless a kernel breaks a limit.

    Raises:
        SnapshotError: ``record`` holds no snapshot, or other kernels of another release of Triton.
    """
    kept = Snapshot(triton_release(), ())
    if record is not None and record.exists():
        kept = read(record)
        # What could not be written is found out before all is compiled.
        kept.updated(Snapshot(triton_release(), ()), part)
    found = _compile_all(part, jobs)
    if as_json:
        print(json.dumps([_record(line) for line in found], indent=1))
    else:
        _print(found)
    within = all(line.failure is None for line in found)
    snapshot = Snapshot(triton_release(), tuple(_entry(line) for line in found))
    agreed = against is None or _agrees(against, snapshot, part)
    if record is not None and within:
        record.write_text(str(kept.updated(snapshot, part)))
    elif record is not None:
        print(f"{record} stays as it is: kernels break limits", file=sys.stderr)
    return within and agreed


def triton_release() -> str:
    """The installed release, without what a build of torch adds to it."""
    return version("triton").split("+")[0]


def _compile_all(part: Part, jobs: int) -> list[Compiled]:
    wanted = [
        (arch, each.name)
        for arch in part.archs
        for each in variants(arch)
        if part.only in each.name
    ]
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
    return found


def _agrees(recorded: Snapshot, found: Snapshot, part: Part) -> bool:
    """Whether nothing differs; what does goes to stderr, so that a record on stdout stays one."""
    changed = differences(recorded, found, part)
    lines = list(changed)
    if recorded.triton != found.triton:
        lines.insert(
            0,
            f"recorded with Triton {recorded.triton}, compiled with {found.triton}: registers and"
            " memory are not compared",
        )
    if changed:
        lines.append(
            f"differences from the snapshot: {len(changed)}; if all are meant, record what was"
            " found with dsafx kernels --record FILE and the same --arch and --only"
        )
    for line in lines:
        print(line, file=sys.stderr)
    return not changed


def _compiled(wanted: tuple[int, str]) -> list[Compiled]:
    """The report of one variant, by architecture and name; empty where it is not for it."""
    arch, name = wanted
    return list(compile_report([_by_name(arch)[name]], arch))


@functools.cache
def _by_name(arch: int) -> dict[str, Variant]:
    return {each.name: each for each in variants(arch)}


def _record(line: Compiled) -> dict[str, object]:
    return {**asdict(line), "level": _level(line)}


def _entry(line: Compiled) -> Entry:
    return Entry(
        line.arch, line.name, line.instruction, line.registers, line.shared, line.tensor_memory
    )


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
    console = Console(width=width, markup=False)
    console.print(table)
    failed = sum(line.failure is not None for line in found)
    console.print(f"{len(found)} compiled, {failed} of them fail")
