"""``dsafx.debug``: everything about the compiles of a block of code, in a folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import torch

from .passes import _torch_compat as compat
from .passes._log import reading

REPORT = "report.txt"

_entering = threading.Lock()


@contextlib.contextmanager
def debug(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Leave in ``folder`` what became of the functions that are compiled inside the block.

    | file | holds |
    |---|---|
    | ``report.txt`` | for each graph, what each pass did, what it declined, and why |
    | ``__compiled_fn_1.dsafx.post_grad.00_before.0.py`` | a graph as it came to a stage's passes |
    | ``__compiled_fn_1.dsafx.post_grad.03_after_x.0.py`` | as the third of them, ``x``, left it |
    | the others | depyf's: Dynamo's and AOTAutograd's graphs, decompiled bytecode, kernels |

    A pass that changed nothing has no file; the graph before a pass is in the file with the next
    lower number. The stage ``pre_grad`` is Dynamo's graph, ``post_grad`` the one of ATen ops.

    Passes do not run for what is compiled already, so the block starts with
    ``torch.compiler.reset()``, and the calling thread compiles without on-disk caches. Where a
    graph came from a cache nevertheless, the report says so. What is compiled inside the block
    stays compiled, as depyf put it together. Where the block raises, what was written stays.

    Args:
        folder: made where it does not exist. Where it is not empty, a new folder inside it,
            ``run_1``, ``run_2`` and so on, takes its place, so that runs do not mix.

    Yields:
        The folder that is written to.

    Raises:
        ImportError: depyf is not installed.
        TypeError: ``folder`` is not a path.
        NotADirectoryError: ``folder`` is a file.
        RuntimeError: another such block, or one of ``depyf.prepare_debug``, is open in the process.
    """
    if not isinstance(folder, (str, os.PathLike)) or isinstance(os.fspath(folder), bytes):
        raise TypeError(f"folder must be a str or a path of str, got {folder!r}")
    depyf = _import_depyf()
    with _entering:
        if compat.depyf_is_watching():
            raise RuntimeError(
                "dsafx.debug cannot be nested: a block of dsafx.debug or depyf.prepare_debug is "
                "open in this process"
            )
        written = _claim(Path(folder).absolute())
        watch = _start(depyf, written)
    report = _Report(written / REPORT)
    try:
        torch.compiler.reset()
        with compat.without_caches(), reading(report.write):
            yield written
    finally:
        report.close()
        _stop(watch)


class _Report:
    """The file with the reports, complete up to the last graph at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hits_before = compat.cache_hits()
        self._lock = threading.Lock()
        self._empty = True

    def write(self, text: str) -> None:
        """Add the section of the graph that is being compiled."""
        from depyf.explain.utils import (  # type: ignore[import-untyped]
            get_current_compiled_fn_name,
        )

        self._add(f"{text}\nfiles: {get_current_compiled_fn_name()}.*\n")

    def close(self) -> None:
        """Say what a reader would look for in vain."""
        if compat.cache_hits() > self._hits_before:
            self._add("One graph or more came from a cache: no pass ran for them.\n")
        elif self._empty:
            self._add("No graph came to the passes of dsafx: nothing was compiled with them.\n")

    def _add(self, text: str) -> None:
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(text if self._empty else f"\n{text}")
            self._empty = False


def _import_depyf() -> ModuleType:
    try:
        import depyf  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "dsafx.debug needs depyf 0.20 or later: pip install 'dsafx[debug]'"
        ) from error
    module: ModuleType = depyf
    return module


def _claim(folder: Path) -> Path:
    """The folder itself where it is new or empty, else a new one inside it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(f"folder must be a folder, but {folder} is a file") from error
    if not any(folder.iterdir()):
        # Of processes that come at once, the one that makes the file has the folder.
        with contextlib.suppress(FileExistsError):
            (folder / REPORT).touch(exist_ok=False)
            return folder
    for number in itertools.count(1):
        inside = folder / f"run_{number}"
        with contextlib.suppress(FileExistsError):
            inside.mkdir()
            break
    return inside


def _start(depyf: ModuleType, folder: Path) -> AbstractContextManager[None]:
    watch: AbstractContextManager[None] = depyf.prepare_debug(str(folder))
    with warnings.catch_warnings():
        # It warns that a block ought to run its code more than once.
        warnings.simplefilter("ignore", UserWarning)
        watch.__enter__()
    return watch


def _stop(watch: AbstractContextManager[None]) -> None:
    """Let depyf write its last files; where it cannot, the block's own outcome still counts."""
    try:
        watch.__exit__(None, None, None)
    except Exception as error:
        warnings.warn(
            f"depyf could not write all of its files: {type(error).__name__}: {error}", stacklevel=4
        )
