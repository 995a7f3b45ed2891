"""The modules of the benchmarks, which are programs beside the package and no part of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(*names: str) -> list[ModuleType]:
    """Import modules of the folder by name; skips the file that asks where it is missing."""
    if not FOLDER.is_dir():
        pytest.skip("needs the repository: a wheel holds no benchmarks", allow_module_level=True)
    sys.path.insert(0, str(FOLDER))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(FOLDER))
