"""Two processes with a gloo group between them, to which a test sends functions."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
_TIMEOUT = 120.0


@dataclass
class Raised:
    """What a rank answers in place of a result when its function raised."""

    kind: str
    message: str
    trace: str


class Ranks:
    """``RANKS`` processes that wait for work until ``close``."""

    def __init__(self) -> None:
        # One server imports the libraries once and forks the ranks while it has no threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["dsafx.models.transformers", "torch.distributed.tensor"])
        self._folder = tempfile.TemporaryDirectory(prefix="dsafx-ranks-")
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def answers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(rank, *args)`` returned, or how it raised, on each rank.

        Raises:
            TimeoutError: a rank did not answer: it hangs, most likely in a collective call.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_TIMEOUT):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {_TIMEOUT:.0f} s")
            answers.append(pipe.recv())
        return answers

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(rank, *args)`` returned on each rank; a rank that raised fails the test.

        Raises:
            AssertionError: with the trace of the first rank that raised.
        """
        answers = self.answers(function, *args)
        for rank, answer in enumerate(answers):
            if isinstance(answer, Raised):
                raise AssertionError(f"rank {rank}:\n{answer.trace}")
        return answers

    def close(self) -> None:
        """End the processes, those that hang by force."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, store: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    # pytest calls a test's module ``tests.<name>``. Last, so that the package is the installed one.
    sys.path.append(str(Path(__file__).parents[1]))
    # A file, since a port may be taken by another worker of the test run.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        timeout=timedelta(seconds=_TIMEOUT / 2),
        rank=rank,
        world_size=RANKS,
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = function(rank, *args)
        except Exception as error:
            answer = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(answer)
    dist.destroy_process_group()
