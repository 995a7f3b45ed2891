"""Check that a wheel holds every module and C++ file of the tree and nothing else.

Usage: ``check_wheel.py WHEEL TREE``
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

FLOORS = {
    "dsafx": "dsafx",
    "ops": "dsafx/ops",
    "passes": "dsafx/passes",
    "fusion": "dsafx/fusion",
    "models": "dsafx/models",
}


def expected(tree: Path) -> set[str]:
    """What the wheel of ``tree`` must hold: each source file, by its name when installed."""
    found = {"dsafx/py.typed"}
    for folder, package in FLOORS.items():
        root = tree / folder
        sources = (path for kind in ("*.py", "*.cpp") for path in root.rglob(kind))
        found |= {f"{package}/{path.relative_to(root).as_posix()}" for path in sources}
    return found


def held(wheel: Path) -> set[str]:
    """Names of the wheel's files, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def main(wheel: Path, tree: Path) -> None:
    """Print the number of files, or exit with the difference."""
    want, have = expected(tree), held(wheel)
    if want != have:
        lines = [f"not in the wheel: {name}" for name in sorted(want - have)]
        lines += [f"not in the tree:  {name}" for name in sorted(have - want)]
        sys.exit("\n".join(lines))
    print(f"{wheel.name} holds the {len(have)} files of the package and nothing else")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
