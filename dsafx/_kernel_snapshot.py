"""What kernels became, as a file of one line each, and how far a new report may differ from it.

Nothing here needs Triton: it compares numbers that ``dsafx kernels`` found with recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TOLERANCES = {
    # A warp is given registers in groups of 8 a thread, so that this costs it one group at most.
    "registers": 8,
    # Room that a layout is converted in varies by less. A stage of a pipeline that came or went,
    # which is what a change of shared memory must not hide, takes more.
    "shared": 1024,
    # Columns are given in powers of two: any other number is another kernel.
    "tensor_memory": 0,
}
"""How far a number may lie from the recorded one, more or less, in its own unit. Fewer count too:
a kernel that lost its pipeline needs less memory."""

_UNITS = {
    "registers": "registers",
    "shared": "bytes of shared memory",
    "tensor_memory": "columns of tensor memory",
}

_HEAD = """\
# One kernel a line: architecture, matrix instruction, registers of a thread, bytes of shared memory
# and columns of tensor memory of a block, name. `dsafx kernels --record FILE` writes it.
"""


class SnapshotError(ValueError):
    """A file is no snapshot, or one that cannot take what was found."""


@dataclass(frozen=True, order=True)
class Entry:
    """One kernel on one architecture; ``instruction`` is "" where no matrix is multiplied."""

    arch: int
    name: str
    instruction: str
    registers: int
    shared: int
    tensor_memory: int


@dataclass(frozen=True)
class Part:
    """What of all kernels one run compiles: those on ``archs`` whose name holds ``only``."""

    archs: Sequence[int]
    only: str = ""

    def holds(self, entry: Entry) -> bool:
        """Whether the run compiles it."""
        return entry.arch in self.archs and self.only in entry.name


@dataclass(frozen=True)
class Snapshot:
    """The entries of one release of Triton."""

    triton: str
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        lines = [f"triton {self.triton}"]
        lines += [
            f"{each.arch:<3} {each.instruction or '-':<15} {each.registers:>3} {each.shared:>6}"
            f" {each.tensor_memory:>3} {each.name}"
            for each in sorted(self.entries)
        ]
        return _HEAD + "\n".join(lines) + "\n"

    def updated(self, found: Snapshot, part: Part) -> Snapshot:
        """``found`` in the place of that ``part``; the rest stays.

        Raises:
            SnapshotError: something would stay, and it is of another release of Triton.
        """
        rest = tuple(each for each in self.entries if not part.holds(each))
        if rest and self.triton != found.triton:
            raise SnapshotError(
                f"{len(rest)} other kernels are recorded with Triton {self.triton}, this is"
                f" {found.triton}: record all of them, or to another file"
            )
        return Snapshot(found.triton, (*rest, *found.entries))


def read(path: Path) -> Snapshot:
    """The snapshot in a file.

    Raises:
        SnapshotError: a line that is none of a snapshot, by its number; or no release is named.
    """
    triton = ""
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        fields = line.split(maxsplit=5)
        if not fields or line.startswith("#"):
            continue
        if fields[0] == "triton" and len(fields) == 2:
            triton = fields[1]
            continue
        try:
            arch, instruction, registers, shared, tensor_memory, name = fields
            numbers = int(registers), int(shared), int(tensor_memory)
            entries.append(Entry(int(arch), name, instruction.removeprefix("-"), *numbers))
        except ValueError:
            raise SnapshotError(f"{path}:{number}: not a line of a snapshot: {line!r}") from None
    if not triton:
        raise SnapshotError(f"{path}: does not say which release of Triton it was recorded with")
    return Snapshot(triton, tuple(entries))


def differences(recorded: Snapshot, found: Snapshot, part: Part) -> list[str]:
    """One sentence for each kernel of ``part`` and each thing about it that has changed.

    Registers and memory are compared where both are of the same release of Triton: on another they
    are what its assembler and its pipeliner make of them, within the limits of the architecture.
    """
    old = {(each.arch, each.name): each for each in recorded.entries if part.holds(each)}
    new = {(each.arch, each.name): each for each in found.entries}
    lines = []
    for arch, name in sorted(old.keys() | new.keys()):
        before, after = old.get((arch, name)), new.get((arch, name))
        if after is None:
            changes = ["recorded, but not compiled"]
        elif before is None:
            changes = ["compiled, but not recorded"]
        else:
            changes = list(_changes(before, after, recorded.triton == found.triton))
        lines += [f"sm_{arch} {name}: {change}" for change in changes]
    return lines


def _changes(old: Entry, new: Entry, same_release: bool) -> Iterator[str]:
    if old.instruction != new.instruction:
        was, now = (each or "no matrix instruction" for each in (old.instruction, new.instruction))
        yield f"{was} recorded, {now} found"
    if not same_release:
        return
    for field, tolerance in TOLERANCES.items():
        before, after = getattr(old, field), getattr(new, field)
        if abs(after - before) > tolerance:
            yield (
                f"{before} {_UNITS[field]} recorded, {after} found; {tolerance} more or fewer pass"
            )
